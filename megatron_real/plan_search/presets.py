"""Plans as other systems make them: written by hand, or the best one of a kind.

`symmetric` and `split` make a plan from layouts that the user gives; they need no prices. `preset_families` restricts a
search problem to the plans of a kind, and `solve_preset` finds the best of them:

=============  ======================================================================================================
``heuristic``  ReaL's heuristic (arXiv:2406.14088): one set of degrees for all calls on the whole cluster:
               tensor parallelism fills a node, pipelines cross the nodes, data parallelism takes the rest
``symmetric``  one set of degrees for all calls on the whole cluster: the best one
``split``      models in disjoint groups of ranks, as OpenRLHF and NeMo-Aligner place them: actor and reference;
               critic, rewards and the rest; generation with the actor or in a group of its own. Without any rest:
               trained models; frozen ones
``hybrid``     DeepSpeed-Chat: everything on the whole cluster, data-parallel over all ranks, but generation, which is
               tensor-parallel inside a node
``colocated``  verl: everything on the whole cluster; all calls of a model but generation share the model's layout
=============  ======================================================================================================

What a kind leaves open (micro-batches, recomputation, offload, dropped weights, virtual stages, sequence and expert
parallelism where the kind does not fix them) is chosen exactly, for the declared order of calls or the user's.
DeepSpeed's ZeRO-3 is not Megatron's: ``hybrid`` keeps whole weights on every rank and spreads the optimizer state.

A kind that makes calls alike needs options of *all* layouts of every call: a problem from which layouts were pruned
call by call may have no common one left.

Invariants (tests/unit/plan_search/test_presets.py):
    - a preset's plan is of its kind, and no plan of the kind is faster (brute force);
    - no preset is faster than the best plan of all;
    - a kind of which no plan fits is proven infeasible, not an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import permutations

from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from megatron_real.plan_search.problem import Limits, Option, Progress, SearchProblem, Solution
from megatron_real.plan_search.strategies.fixed import Alike, Family, solve_families
from megatron_real.plan_search.strategies.greedy import least_memory

__all__ = [
    "PRESETS",
    "WHOLE_CLUSTER",
    "least_memory",
    "preset_families",
    "solve_preset",
    "split",
    "symmetric",
]

PRESETS = ("heuristic", "symmetric", "split", "hybrid", "colocated")
"""Kinds that `solve_preset` knows."""
WHOLE_CLUSTER = ("heuristic", "symmetric", "hybrid", "colocated")
"""Those whose calls all run on all ranks, one after the other."""

_FIRST_HALF = ("actor", "ref")

Shapes = Mapping[str, ModelShape]


def symmetric(
    graph: Graph,
    cluster: ClusterSpec,
    shapes: Shapes | None = None,
    *,
    layout: str | None = None,
    num_microbatches: int | None = None,
) -> Plan:
    """Every call over the whole cluster in one layout: what a launch script without this package does.

    Args:
        graph: the calls.
        cluster: the devices, all of which every call uses.
        shapes: shapes of the models by role, to check the plan against.
        layout: text form such as ``d1t2p2``; None is data-parallel over all ranks. Model chunks (``v2``) are
            used in train calls only, and sequence parallelism (``s``) in all calls but generation: Megatron
            has neither there.
        num_microbatches: of each model's call; None is one per pipeline stage.

    Raises:
        PlanError: the layout does not fit the cluster or a shape.
    """
    mesh = Mesh(0, cluster.num_devices)
    chosen = _layout_on(mesh, layout)
    calls = {call.name: _placement(call, mesh, chosen, num_microbatches) for call in graph.calls}
    return _checked(graph, cluster, calls, shapes, "symmetric plan")


def split(
    graph: Graph,
    cluster: ClusterSpec,
    shapes: Shapes | None = None,
    *,
    layouts: Mapping[str, str] | None = None,
    num_microbatches: int | None = None,
) -> Plan:
    """Actor and reference on the first half, everything else on the second, so that two models train at once.

    Without anything else trained models are on the first half, the others on the second.

    Args:
        graph: the calls.
        cluster: the devices; its ranks are split over the calls.
        shapes: shapes of the models by role, to check the plan against.
        layouts: text form by call or by role (the call counts first); a call without one is data-parallel
            over its half. See `symmetric` for ``v`` and ``s``.
        num_microbatches: of each model's call; None is one per pipeline stage.

    Raises:
        PlanError: fewer than two ranks, nothing for one of the halves, a name in `layouts` that the graph does not
        have, or a layout that does not fit.
    """
    size = cluster.num_devices
    if size < 2:
        raise PlanError(
            f"split plan: found a cluster of {size} ranks; expected at least 2. Use a symmetric plan."
        )
    layouts = layouts or {}
    known = {*graph.models, *(call.name for call in graph.calls)}
    unknown = sorted(set(layouts) - known)
    if unknown:
        raise PlanError(f"split plan: found layouts for {unknown}; expected some of {sorted(known)}.")
    first = _first_half(graph)
    if len(first) in (0, len(graph.calls)):
        raise PlanError(
            f"split plan: found all calls of {graph.name} on one half; expected some for each. Use a symmetric plan."
        )
    halves = (Mesh(0, size // 2), Mesh(size // 2, size))
    calls = {}
    for call in graph.calls:
        mesh = halves[call.name not in first]
        text = layouts.get(call.name, layouts.get(call.model or call.name))
        calls[call.name] = _placement(call, mesh, _layout_on(mesh, text), num_microbatches)
    return _checked(graph, cluster, calls, shapes, "split plan")


def _first_half(graph: Graph) -> set[str]:
    """Calls of the actor and its reference; where that is all or nothing, of the trained models."""
    first = {call.name for call in graph.calls if call.model in _FIRST_HALF}
    if 0 < len(first) < len(graph.calls):
        return first
    return {call.name for call in graph.calls if call.model is not None and graph.trained(call.model)}


def _layout_on(mesh: Mesh, text: str | None) -> Layout:
    if text is None:
        return Layout(dp=mesh.size)
    layout = Layout.parse(text)
    if layout.size != mesh.size:
        raise PlanError(f"layout: {text!r} needs {layout.size} ranks; the window {mesh} has {mesh.size}.")
    return layout


def _placement(call: Call, mesh: Mesh, layout: Layout, num_microbatches: int | None) -> Placement:
    window = (mesh.start, mesh.stop)
    if call.model is None:
        return Placement(ranks=window, layout=LayoutSpec(dp=mesh.size))
    layout = _for_call(call, layout)
    return Placement(
        ranks=window,
        layout=LayoutSpec(**dataclasses.asdict(layout)),
        num_microbatches=layout.pp if num_microbatches is None else num_microbatches,
    )


def _for_call(call: Call, layout: Layout) -> Layout:
    """The layout without what Megatron has no schedule for in this type of call."""
    if call.type is CallType.GENERATE:
        layout = dataclasses.replace(layout, sp=False)
    if call.trains or layout.vpp == 1:
        return layout
    layers = layout.layers
    if layers is not None:
        # A stage keeps as many layers as its chunks have together.
        layers = tuple(sum(layers[stage :: layout.pp]) for stage in range(layout.pp))
    return dataclasses.replace(layout, vpp=1, layers=layers)


def _checked(
    graph: Graph, cluster: ClusterSpec, calls: dict[str, Placement], shapes: Shapes | None, source: str
) -> Plan:
    plan = Plan(algorithm=graph.name, cluster=cluster, calls=calls)
    plan.check(graph, shapes, source=source)
    return plan


def solve_preset(
    name: str,
    problem: SearchProblem,
    limits: Limits | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best plan of a kind.

    Args:
        name: one of `PRESETS`.
        problem: with the options of every layout.
        limits: when to stop before the best one is proven; None is 60 s.
        progress: called at each improvement.

    Returns:
        A solution whose lower bound holds for plans of the kind; `proven_infeasible` if none of them fits.

    Raises:
        PlanError: no such preset.
    """
    families = preset_families(name, problem)
    return solve_families(name, families, limits if limits is not None else Limits(), progress=progress)


def preset_families(name: str, problem: SearchProblem) -> tuple[Family, ...]:
    """A problem restricted to the plans of a kind: their union is the kind. No family: no such plan exists.

    Raises:
        PlanError: no such preset.
    """
    kinds = {
        "heuristic": _heuristic,
        "symmetric": _symmetric_families,
        "split": _split_families,
        "hybrid": _hybrid,
        "colocated": _colocated,
    }
    if name not in kinds:
        raise PlanError(f"preset: found {name!r}; expected one of {', '.join(PRESETS)}.")
    return tuple(family for family in kinds[name](problem) if family is not None)


def _heuristic(problem: SearchProblem) -> Iterator[Family | None]:
    """Of the degrees that all calls have, the largest tp that divides a node, then the largest pp over the nodes."""
    family = _whole_cluster(problem, _models_alike(problem), lambda call, option: option.layout.cp == 1)
    if family is None:
        return
    cluster = problem.cluster
    common = set.intersection(
        *(
            {_degrees(option.layout) for option in family.problem.options_on(call.name, _world(problem))}
            for call in _model_calls(problem)
        )
    )
    allowed = [
        (tp, pp, dp)
        for dp, tp, pp, _ in common
        if cluster.devices_per_node % tp == 0 and cluster.num_nodes % pp == 0
    ]
    if not allowed:
        return
    tp, pp, dp = max(allowed)
    wanted = Layout(tp=tp, pp=pp, dp=dp)
    yield _whole_cluster(
        problem,
        _models_alike(problem),
        lambda call, option: call.model is None or _degrees(option.layout) == _degrees(wanted),
    )


def _symmetric_families(problem: SearchProblem) -> Iterator[Family | None]:
    yield _whole_cluster(problem, _models_alike(problem))


def _colocated(problem: SearchProblem) -> Iterator[Family | None]:
    for family in _symmetric_families(problem):
        yield dataclasses.replace(family, start=True) if family is not None else None
    yield _whole_cluster(problem, _each_model_alike(problem))


def _hybrid(problem: SearchProblem) -> Iterator[Family | None]:
    node = problem.cluster.devices_per_node

    def allows(call: Call, option: Option) -> bool:
        layout = option.layout
        if call.type is CallType.GENERATE:
            return layout.pp == layout.cp == 1 and layout.tp <= node and node % layout.tp == 0
        return call.model is None or layout.dp == layout.size

    yield _whole_cluster(problem, (), allows)


def _split_families(problem: SearchProblem) -> Iterator[Family | None]:
    """Groups on windows that cover the cluster: every way to lay them out."""
    for groups in _groups(problem.graph):
        for windows in _covers(problem.meshes, _world(problem), len(groups)):
            for order in permutations(windows):
                where = {name: mesh for names, mesh in zip(groups, order, strict=True) for name in names}
                yield _family(problem, where, _each_model_alike(problem))


def _groups(graph: Graph) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Calls by group: generation with the actor's, or by itself. A function goes with the rest."""
    first = _first_half(graph)
    for own_generation in (False, True):
        groups: dict[str, list[str]] = {}
        for call in graph.calls:
            if own_generation and call.type is CallType.GENERATE:
                key = "generation"
            else:
                key = "first" if call.name in first else "second"
            groups.setdefault(key, []).append(call.name)
        if "generation" in groups or not own_generation:
            yield tuple(map(tuple, groups.values()))


def _covers(meshes: Sequence[Mesh], world: Mesh, count: int) -> Iterator[tuple[Mesh, ...]]:
    """Ways to cut `world` into `count` of the windows."""
    if count == 1:
        if world in meshes:
            yield (world,)
        return
    for mesh in meshes:
        if mesh.start == world.start and mesh.stop < world.stop:
            for rest in _covers(meshes, Mesh(mesh.stop, world.stop), count - 1):
                yield (mesh, *rest)


def _whole_cluster(
    problem: SearchProblem,
    alike: tuple[Alike, ...],
    allows: Callable[[Call, Option], bool] | None = None,
) -> Family | None:
    return _family(problem, {call.name: _world(problem) for call in problem.graph.calls}, alike, allows)


def _family(
    problem: SearchProblem,
    windows: Mapping[str, Mesh],
    alike: tuple[Alike, ...],
    allows: Callable[[Call, Option], bool] | None = None,
) -> Family | None:
    """None if a call has no such option, or the user pinned one to another window."""
    options = {}
    for call in problem.graph.calls:
        mesh = windows[call.name]
        if mesh not in problem.meshes_of(call.name):
            return None
        found = tuple(
            option for option in problem.options_on(call.name, mesh) if allows is None or allows(call, option)
        )
        if not found:
            return None
        options[call.name, mesh.size] = found
    restricted = dataclasses.replace(problem, options=options, pinned=dict(windows))
    return Family(problem=restricted, alike=alike)


def _world(problem: SearchProblem) -> Mesh:
    return Mesh(0, problem.cluster.num_devices)


def _model_calls(problem: SearchProblem) -> list[Call]:
    return [call for call in problem.graph.calls if call.model is not None]


def _degrees(layout: Layout) -> tuple[int, int, int, int]:
    """What is one layout for different models: experts, virtual stages and uneven stages are a model's own."""
    return layout.dp, layout.tp, layout.pp, layout.cp


def _shards(layout: Layout) -> Hashable:
    """What is one layout for calls of one model. Generation apart, they differ in virtual stages alone."""
    return _degrees(layout), layout.ep, layout.etp


def _models_alike(problem: SearchProblem) -> tuple[Alike, ...]:
    return (Alike(calls=tuple(call.name for call in _model_calls(problem)), of=_degrees),)


def _each_model_alike(problem: SearchProblem) -> tuple[Alike, ...]:
    """All calls of a model in one layout, but its generations, which have one of their own."""
    groups = []
    for model in problem.graph.models:
        calls = problem.graph.calls_of(model)
        for generates in (False, True):
            names = tuple(call.name for call in calls if (call.type is CallType.GENERATE) == generates)
            groups.append(Alike(calls=names, of=_shards))
    return tuple(groups)
