"""Plans made without a search: one layout for everything, or two halves that train at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan

__all__ = ["split", "symmetric"]

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

    Args:
        graph: the calls.
        cluster: the devices; its ranks are split over the calls.
        shapes: shapes of the models by role, to check the plan against.
        layouts: text form by call or by role (the call counts first); a call without one is data-parallel
            over its half. See `symmetric` for ``v`` and ``s``.
        num_microbatches: of each model's call; None is one per pipeline stage.

    Raises:
        PlanError: fewer than two ranks, a name in `layouts` that the graph does not have, or a layout that
        does not fit.
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
    halves = (Mesh(0, size // 2), Mesh(size // 2, size))
    calls = {}
    for call in graph.calls:
        mesh = halves[call.model not in _FIRST_HALF]
        text = layouts.get(call.name, layouts.get(call.model or call.name))
        calls[call.name] = _placement(call, mesh, _layout_on(mesh, text), num_microbatches)
    return _checked(graph, cluster, calls, shapes, "split plan")


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
