"""Hypothesis strategies: layouts, graphs of calls, plans for them, and lengths of sequences."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from megatron_real.data_plan import CallAssignment, Lengths, assign
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope, Update
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan

__all__ = ["assign_all", "graphs", "layouts", "lengths", "meshes", "plans"]


@st.composite
def meshes(draw: st.DrawFn, world: int) -> Mesh:
    """A window of the ranks 0..world-1."""
    start = draw(st.integers(0, world - 1))
    return Mesh(start, draw(st.integers(start + 1, world)))


@st.composite
def layouts(draw: st.DrawFn, size: int, *, context: bool = True) -> Layout:
    """Degrees that multiply to `size`."""
    rest, degrees = size, []
    for _ in range(3 if context else 2):
        degree = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        degrees.append(degree)
        rest //= degree
    return Layout(tp=degrees[0], pp=degrees[1], cp=degrees[2] if context else 1, dp=rest)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A generation, then inference calls of models or functions, then training, with random edges and updates."""
    keys = {"tokens": Per.TOKEN, "logprobs": Per.RESPONSE}
    calls = [Call(name="gen", model="m0", type=CallType.GENERATE, outputs=("tokens", "logprobs"))]
    for index in range(draw(st.integers(0, 4))):
        model = draw(st.sampled_from(["m0", "m1", "m2", None]))
        calls.append(
            Call(
                name=f"inf{index}",
                model=model,
                type=CallType.INFERENCE,
                inputs=draw(_inputs(tuple(keys))),
                outputs=(f"out{index}",),
            )
        )
        keys[f"out{index}"] = draw(st.sampled_from(list(Per)))
    for model in draw(st.lists(st.sampled_from(["m0", "m1", "m2"]), max_size=3, unique=True)):
        call = Call(
            name=f"train_{model}", model=model, type=CallType.TRAIN, inputs=draw(_inputs(tuple(keys)))
        )
        calls.insert(draw(st.integers(_after_producers(calls, call), len(calls))), call)
    return Graph(
        name="random",
        calls=tuple(calls),
        keys=tuple(
            KeySpec(name=key, per=per, dtype="int64" if key == "tokens" else "float32")
            for key, per in keys.items()
        ),
        updates=draw(_updates(calls)),
    )


@st.composite
def _updates(draw: st.DrawFn, calls: list[Call]) -> tuple[Update, ...]:
    """Of some of the models that no call trains."""
    trained = [call.model for call in calls if call.trains]
    still = sorted({call.model for call in calls if call.model is not None} - set(trained))
    if not trained or not still:
        return ()
    return tuple(
        Update(
            target=model,
            source=draw(st.sampled_from(trained)),
            mix=draw(st.sampled_from([0.25, 1.0])),
            every=draw(st.integers(1, 3)),
        )
        for model in draw(st.lists(st.sampled_from(still), unique=True))
    )


def _after_producers(calls: list[Call], call: Call) -> int:
    wanted = {entry.key for entry in call.inputs}
    return max([index + 1 for index, other in enumerate(calls) if wanted & set(other.outputs)], default=1)


@st.composite
def _inputs(draw: st.DrawFn, keys: tuple[str, ...]) -> tuple[Input, ...]:
    chosen = draw(st.lists(st.sampled_from(keys), unique=True, max_size=len(keys)))
    return tuple(Input(key=key, scope=draw(st.sampled_from(list(Scope)))) for key in chosen)


@st.composite
def plans(draw: st.DrawFn, graph: Graph, world: int) -> Plan:
    """Placements of all calls; calls of a model share one now and then."""
    calls: dict[str, Placement] = {}
    for call in graph.calls:
        others = [calls[other.name] for other in graph.calls_of(call.model or "") if other.name in calls]
        if call.model is not None and others and draw(st.booleans()):
            plain = {"drop_trained_weights": False, "stream": False, "offload": "none"}
            placement = draw(st.sampled_from(others)).model_copy(update=plain)
        else:
            mesh = draw(meshes(world))
            layout = draw(layouts(mesh.size)) if call.model is not None else Layout(dp=mesh.size)
            placement = Placement(ranks=(mesh.start, mesh.stop), layout=_spec(layout))
        changes: dict[str, Any] = {"num_microbatches": draw(st.integers(1, 2))}
        if call.trains:
            changes["drop_trained_weights"] = draw(st.booleans())
            changes["offload"] = draw(st.sampled_from(["none", "host"]))
        elif call.model is not None and not graph.trained(call.model):
            places = ["none", "host"] if graph.changes(call.model) else ["none", "host", "node"]
            changes["offload"] = draw(st.sampled_from(places))
        if call.model is not None and graph.home_call(call.model) != call:
            changes["stream"] = draw(st.booleans())
        calls[call.name] = placement.model_copy(update=changes)
    nodes = draw(st.sampled_from([n for n in (1, 2, 4) if world % n == 0]))
    return Plan(
        algorithm=graph.name,
        cluster=ClusterSpec(num_nodes=nodes, devices_per_node=world // nodes),
        calls=calls,
    )


def _spec(layout: Layout) -> LayoutSpec:
    return LayoutSpec(dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp)


def lengths(count: int) -> st.SearchStrategy[Lengths]:
    """Prompt and response lengths of `count` sequences (from one drawn number: drawing each takes most of the time)."""
    return st.integers(0, 2**32).map(lambda seed: _lengths(random.Random(seed), count))


def _lengths(source: random.Random, count: int) -> Lengths:
    longest = source.choice([0, 1, 12])
    return Lengths(
        prompt=tuple(source.randint(1, 8) for _ in range(count)),
        response=tuple(source.randint(0, longest) for _ in range(count)),
    )


def assign_all(graph: Graph, plan: Plan, known: Lengths, num_minibatches: int) -> dict[str, CallAssignment]:
    """The assignments of all calls."""
    return {
        call.name: assign(call, plan.calls[call.name], known, num_minibatches if call.trains else 1)
        for call in graph.calls
    }
