"""Search problems to test strategies on: random tiny ones, which can be enumerated, and realistic ones.

Prices do not change when equal siblings in the tree of windows change places, as on a cluster of equal nodes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.dataflow import SAMPLES, Call, CallType, Graph, Input, KeySpec, Per, Scope, Update
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import ClusterSpec, OffloadTo
from megatron_real.plan_search.problem import Choice, Option, SearchProblem

__all__ = [
    "GRAPHS",
    "MANY_COPIES",
    "UPDATES",
    "aligned_meshes",
    "choices_of",
    "graph_of",
    "random_choice",
    "random_problem",
    "realistic_problem",
    "with_frozen_models",
]

Row = tuple[str, str | None, str, str]
"""Call, model, type (g, i, t) and the calls whose outputs it takes."""

GRAPHS: dict[str, tuple[Row, ...]] = {
    "ppo": (
        ("gen", "a", "g", ""),
        ("rew", "r", "i", "gen"),
        ("val", "c", "i", "gen"),
        ("train_a", "a", "t", "gen rew val"),
        ("train_c", "c", "t", "gen rew val"),
    ),
    "grpo": (
        ("gen", "a", "g", ""),
        ("score", None, "i", "gen"),
        ("ref", "f", "i", "gen"),
        ("train_a", "a", "t", "score ref"),
    ),
    "two inferences": (
        ("gen", "a", "g", ""),
        ("old", "a", "i", "gen"),
        ("train_a", "a", "t", "old"),
    ),
    "frozen twice": (
        ("first", "f", "i", ""),
        ("mid", "b", "i", "first"),
        ("second", "f", "i", "mid"),
        ("train_b", "b", "t", "second"),
    ),
    "dpo": (("ref", "f", "i", ""), ("train_a", "a", "t", "ref")),
    "after training": (
        ("gen", "a", "g", ""),
        ("train_a", "a", "t", "gen"),
        ("check", "a", "i", ""),
    ),
    "independent": (("train_a", "a", "t", ""), ("train_b", "b", "t", ""), ("look", "f", "i", "")),
    "chain": (
        ("gen", "a", "g", ""),
        ("ref", "f", "i", "gen"),
        ("rew", "r", "i", "ref"),
        ("train_a", "a", "t", "rew"),
    ),
    "remax": (
        ("gen", "a", "g", ""),
        ("greedy", "a", "g", ""),
        ("rew", "r", "i", "gen"),
        ("greedy_rew", "r", "i", "greedy"),
        ("train_a", "a", "t", "rew greedy_rew"),
    ),
    "two generations": (
        ("gen", "a", "g", ""),
        ("greedy", "a", "g", ""),
        ("train_a", "a", "t", "gen greedy"),
    ),
    "two actors": (
        ("gen_a", "a", "g", ""),
        ("gen_b", "b", "g", ""),
        ("train_a", "a", "t", "gen_a gen_b"),
        ("train_b", "b", "t", "gen_a gen_b"),
    ),
    "following": (
        ("gen", "a", "g", ""),
        ("ref", "f", "i", "gen"),
        ("train_a", "a", "t", "gen ref"),
    ),
    "following alone": (("ref", "f", "i", ""), ("train_a", "a", "t", "ref")),
    "twins": (
        ("gen", "a", "g", ""),
        ("rew1", "r1", "i", "gen"),
        ("rew2", "r2", "i", "gen"),
        ("train_a", "a", "t", "rew1 rew2"),
    ),
}
MANY_COPIES: dict[str, tuple[Row, ...]] = {
    "three generations": (
        ("gen", "a", "g", ""),
        ("greedy", "a", "g", ""),
        ("third", "a", "g", ""),
        ("train_a", "a", "t", "gen greedy third"),
    ),
}
"""With three calls that may share one temporary copy: `cpsat` gives no certificate of these."""
UPDATES = {
    "following": Update(target="f", source="a", mix=0.5),
    "following alone": Update(target="f", source="a", mix=0.5, every=3),
}
"""By kind of graph: the model that follows another one."""
_TYPES = {"g": CallType.GENERATE, "i": CallType.INFERENCE, "t": CallType.TRAIN}


def graph_of(rows: Sequence[Row], name: str = "random", updates: tuple[Update, ...] = ()) -> Graph:
    """The graph in which a call's only output is named after it: a number for each sequence, of which all are taken.

    Every generation makes sequences of its own.
    """
    sets = {call: call if kind == "g" else SAMPLES for call, _, kind, _ in rows}
    return Graph(
        name=name,
        calls=tuple(
            Call(
                name=call,
                model=model,
                type=_TYPES[kind],
                inputs=tuple(Input(key=key, scope=Scope.FULL) for key in needs.split()),
                outputs=(call,),
                sequences=sets[call],
            )
            for call, model, kind, needs in rows
        ),
        keys=tuple(
            KeySpec(name=call, per=Per.SEQUENCE, dtype="float32", sequences=sets[call]) for call, *_ in rows
        ),
        updates=updates,
    )


def aligned_meshes(num_devices: int, smallest: int = 1) -> tuple[Mesh, ...]:
    """Power-of-two blocks at multiples of their size, and the whole cluster."""
    meshes = [Mesh(0, num_devices)]
    size = 1 << (num_devices.bit_length() - 1)
    while size >= smallest:
        if size < num_devices:
            meshes += [Mesh(at, at + size) for at in range(0, num_devices - size + 1, size)]
        size //= 2
    return tuple(meshes)


def choices_of(problem: SearchProblem, call: str) -> list[Choice]:
    """Every window and option of a call."""
    return [
        Choice(mesh, option) for mesh in problem.meshes_of(call) for option in problem.options_on(call, mesh)
    ]


def random_choice(problem: SearchProblem, rng: random.Random) -> dict[str, Choice] | None:
    """Any choice for every call; calls of a model share a copy now and then."""
    assignment: dict[str, Choice] = {}
    for call in problem.graph.calls:
        choices = choices_of(problem, call.name)
        if not choices:
            return None
        others = [
            assignment[other.name]
            for other in problem.graph.calls_of(call.model or "")
            if other.name in assignment
        ]
        same = [choice for choice in choices if any(choice.same_copy(other) for other in others)]
        assignment[call.name] = rng.choice(same if same and rng.random() < 0.6 else choices)
    return assignment


def random_problem(rng: random.Random, *, kind: str | None = None, most: int = 3000) -> SearchProblem:
    """A tiny problem with at most `most` choices times orders, some of them tight in memory or infeasible."""
    while True:
        chosen = kind or rng.choice(list(GRAPHS))
        updates = (UPDATES[chosen],) if chosen in UPDATES else ()
        graph = graph_of((GRAPHS | MANY_COPIES)[chosen], updates=updates)
        num_devices = rng.choice([2, 4, 4, 6, 8])
        meshes = list(aligned_meshes(num_devices, rng.choice([1, 1, 2])))
        meshes = [mesh for mesh in meshes if mesh.size == num_devices or rng.random() < 0.95]
        if num_devices > 2 and rng.random() < 0.1:  # windows that overlap in part
            meshes = [Mesh(0, num_devices), Mesh(0, num_devices - 1), Mesh(1, num_devices)][
                : rng.randint(1, 3)
            ]
        problem = _random_problem(rng, graph, num_devices, tuple(meshes))
        total = math.prod(len(choices_of(problem, call.name)) for call in graph.calls)
        if total * sum(1 for _ in problem.orders()) <= most:
            return problem


def _random_problem(
    rng: random.Random, graph: Graph, num_devices: int, meshes: tuple[Mesh, ...]
) -> SearchProblem:
    options: dict[tuple[str, int], tuple[Option, ...]] = {}
    sizes = sorted({mesh.size for mesh in meshes})
    twins = {"rew2": "rew1"} if rng.random() < 0.7 else {}
    needs = {model: rng.choice([5, 20, 60]) for model in graph.models}
    for call in graph.calls:
        work, need = rng.uniform(1, 20), needs.get(call.model or "", 0)
        many = rng.choice([1, 2, 3])
        for size in sizes:
            if rng.random() < 0.1 and size != num_devices:
                continue
            made = [_random_option(rng, graph, call, size, (work, need)) for _ in range(rng.randint(1, many))]
            if call.name in twins:
                made = list(options.get((twins[call.name], size), ()))
            options[call.name, size] = tuple(sorted(made, key=lambda option: option.seconds))
    price = rng.choice([0.0, 0.3, 3.0])
    pinned = {}
    if rng.random() < 0.15:
        pinned[rng.choice(graph.calls).name] = rng.choice(meshes)
    return SearchProblem(
        graph=graph,
        cluster=ClusterSpec(devices_per_node=num_devices),
        meshes=meshes,
        capacity_bytes=rng.choice([60, 100, 150, 250, 10_000]),
        options=options,
        realloc_s=_symmetric_price(price),
        mix_s=lambda update, *homes: _symmetric_price(price)(update.target, *homes) / update.every,
        bucket_bytes=rng.choice([0, 3]),
        laminar=all(_nested(one, two) for one in meshes for two in meshes),
        pinned=pinned,
        order=next(iter(_shuffled(rng, graph))) if rng.random() < 0.1 else None,
    )


def _nested(one: Mesh, two: Mesh) -> bool:
    return not one.overlaps(two) or max(one.size, two.size) == max(one.stop, two.stop) - min(
        one.start, two.start
    )


def _shuffled(rng: random.Random, graph: Graph) -> list[tuple[str, ...]]:
    names = [call.name for call in graph.calls]
    rng.shuffle(names)
    return [tuple(call.name for call in graph.ordered(tuple(names)))]


def _random_option(
    rng: random.Random, graph: Graph, call: Call, size: int, scale: tuple[float, int]
) -> Option:
    work, need = scale
    tp = rng.choice([degree for degree in (1, 2, 4) if size % degree == 0])
    frozen = call.model is not None and not graph.trained(call.model)
    places: list[OffloadTo] = ["host"] if graph.update_of(call.model or "") else ["host", "node"]
    home = call.model is not None and graph.home_call(call.model) == call
    away = rng.random() < (0.4 if frozen else 0.3 if call.trains else 0.0)
    drop = call.trains and rng.random() < 0.3
    return Option(
        layout=Layout(dp=size // tp, tp=tp) if call.model is not None else Layout(dp=size),
        num_microbatches=rng.randint(1, 4),
        offload="none" if not away else rng.choice(places) if frozen else "host",
        drop_trained_weights=drop,
        stream=call.model is not None and not home and rng.random() < 0.4,
        seconds=round(work / size ** rng.uniform(0.5, 1.1) * rng.uniform(0.8, 1.3), 2),
        weights_bytes=need // tp,  # of the model and the layout alone, as anywhere
        state_bytes=2 * need // size if call.trains else 0,
        active_bytes=rng.randint(0, 2 * need // size),
        leave_s=rng.choice([0.0, 0.5]),
        return_s=rng.choice([0.0, 0.7]),
        state_leave_s=rng.choice([0.0, 0.4]),
        state_return_s=rng.choice([0.0, 0.6]),
        first_share=rng.choice([0.1, 0.5, 1.0]),
        first_pass_s=rng.choice([0.0, 0.2, 1.0]),
    )


def _symmetric_price(scale: float) -> Callable[[str, Choice, Choice], float]:
    def price(model: str, home: Choice, other: Choice) -> float:
        a, b = home.mesh, other.mesh
        apart = not a.overlaps(b)
        layouts = (3 * home.option.layout.tp + 5 * other.option.layout.tp) % 7
        return scale * (0.2 + 0.1 * layouts + (0.5 if apart else 0.0) + 0.05 * abs(a.size - b.size))

    return price


def with_frozen_models(count: int) -> Graph:
    """PPO with `count` more reward models whose scores the trainings take."""
    base = ppo_graph()
    names = [f"rew{index}" for index in range(2, 2 + count)]
    extra = tuple(
        Call(
            name=f"{name}_inf",
            model=name,
            type=CallType.INFERENCE,
            inputs=(Input(key="tokens"),),
            outputs=(f"scores_{name}",),
        )
        for name in names
    )
    more = tuple(Input(key=f"scores_{name}") for name in names)
    middle = tuple(call for call in base.calls if not call.trains)
    trains = tuple(
        Call(name=call.name, model=call.model, type=call.type, inputs=call.inputs + more)
        for call in base.calls
        if call.trains
    )
    keys = base.keys + tuple(
        KeySpec(name=f"scores_{name}", per=Per.SEQUENCE, dtype="float32") for name in names
    )
    return Graph(name="ppo", calls=middle + extra + trains, keys=keys)


_GIB = 1 << 30
_MICROBATCHES = (1, 2, 4, 8, 16)
_RECOMPUTE = {"none": (1.0, 34.0), "selective": (1.03, 24.0), "full": (1.33, 3.0)}


def realistic_problem(
    num_devices: int,
    *,
    graph: Graph | None = None,
    billions: dict[str, float] | None = None,
    sequences: int = 1024,
    capacity_gib: float = 72.0,
) -> SearchProblem:
    """RLHF on H100-like devices in nodes of 8: rough closed forms, sane trade-offs of time and memory."""
    graph = graph or ppo_graph()
    actor = 70.0 if num_devices >= 128 else 34.0 if num_devices >= 32 else 7.0
    size_of = {"actor": actor, "ref": actor, "critic": 7.0, "reward": 7.0} | (billions or {})
    meshes = aligned_meshes(num_devices)
    options: dict[tuple[str, int], tuple[Option, ...]] = {}
    for call in graph.calls:
        for size in sorted({mesh.size for mesh in meshes}):
            params = size_of.get(call.model or "", 7.0) * 1e9
            made = [
                option
                for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16))
                if size % (tp * pp) == 0
                for option in _real_options(
                    call, params, Layout(dp=size // (tp * pp), tp=tp, pp=pp), sequences
                )
            ]
            frozen = call.model is not None and not graph.trained(call.model)
            if frozen:
                made += [_offloaded(option) for option in made]
            kept = [option for option in made if _least(option, call) <= capacity_gib * _GIB]
            if kept:
                options[call.name, size] = tuple(sorted(kept, key=lambda option: option.seconds))
    return SearchProblem(
        graph=graph,
        cluster=ClusterSpec(num_nodes=max(1, num_devices // 8), devices_per_node=min(8, num_devices)),
        meshes=meshes,
        capacity_bytes=int(capacity_gib * _GIB),
        options=options,
        realloc_s=_realloc,
        bucket_bytes=_GIB,
    )


def _least(option: Option, call: Call) -> int:
    return option.active_bytes + option.weights_bytes + (option.state_bytes if call.trains else 0)


def _realloc(model: str, home: Choice, other: Choice) -> float:
    to = other.option
    spread = 1.0 if home.mesh.overlaps(other.mesh) else 1.4
    turn = 1.0 if home.option.layout.tp == to.layout.tp else 1.15
    source = home.option.weights_bytes * home.option.layout.tp * home.option.layout.pp / home.mesh.size
    return 0.05 + spread * turn * (to.weights_bytes / 40e9 + source / 80e9)


def _real_options(call: Call, params: float, layout: Layout, sequences: int) -> list[Option]:
    split = layout.tp * layout.pp
    local = sequences / layout.dp
    if local < 1:
        return []
    prompt, response = 512, 1024
    tokens = local * (prompt + response)
    hidden = 8192 * math.sqrt(params / 70e9)
    layers = 80 * math.sqrt(params / 70e9)
    comm = 1 + 0.05 * math.log2(layout.tp) + (0.02 * math.log2(layout.pp) if layout.pp > 1 else 0)
    made = []
    for count in _MICROBATCHES:
        if count > local:
            continue
        bubble = 1 + (layout.pp - 1) / (count * 4 if call.trains else count)
        share = local / count * (prompt + response) * hidden * layers / split
        base = Option(
            layout=layout, num_microbatches=count, seconds=0.0, weights_bytes=int(2 * params / split)
        )
        floor = 0.002 * layers * count / 4
        if call.type is CallType.TRAIN:
            for name, (slower, per) in _RECOMPUTE.items():
                seconds = 6 * params * tokens / split / 400e12 * comm * bubble * slower
                seconds += 4 * (6 * params / split) / 40e9 * (layout.dp > 1) + floor
                made.append(
                    _changed(
                        base,
                        recompute=name,
                        seconds=seconds,
                        state_bytes=int((4 + 12 / layout.dp) * params / split),
                        active_bytes=int(share * per / 4 * min(layout.pp, 4)),
                    )
                )
        elif call.type is CallType.GENERATE:
            batch = local / count
            step = 0.006 + 2 * params / split / 3e12 + batch * 2 * params / split / 500e12
            seconds = response * count * step * (1 + 0.1 * math.log2(layout.tp)) * layout.pp**0.7
            kv = batch * (prompt + response) * layers * 4096 / split
            made.append(_changed(base, seconds=seconds, active_bytes=int(kv)))
        else:
            seconds = 2 * params * tokens / split / 450e12 * comm * bubble + floor
            made.append(_changed(base, seconds=seconds, active_bytes=int(share * 4 / layers + 3e8)))
    return made


def _offloaded(option: Option) -> Option:
    move = option.weights_bytes / 50e9
    return _changed(option, offload="host", leave_s=0.1 * move, return_s=move)


def _changed(option: Option, **changes: object) -> Option:
    fields = {name: getattr(option, name) for name in Option.__slots__}
    return Option(**(fields | changes))  # type: ignore[arg-type]
