"""Pipeline stages of a placement: where their groups lie, and how long a micro-batch takes in each.

What depends on the position of a window is only how it lies in its nodes, so placements at equal offsets share all of
this. Stages with equally many layers share their times.

Invariants (tests/unit/plan_search/test_call_prices.py, tests/unit/plan_search/test_stage_prices.py):
    - groups span the nodes that `layout.rank_groups` says;
    - a stage takes the sum of its layers, embedding and head, or the floor of its launches if that is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from megatron_real.layout import Layout, stage_layers
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.costs.operations import Grid, Group, MicroBatch, OperationCosts, OpTime, Pass
from megatron_real.plan_search.models import ModelSpec

__all__ = [
    "Geometry",
    "Parts",
    "OverlapCosts",
    "Pipelined",
    "Stage",
    "StageTime",
    "StageTimer",
    "geometry",
    "pipelined",
    "score_share",
    "shares_cores",
]


Array = np.ndarray[Any, np.dtype[np.float64]]


class Stage(NamedTuple):
    """What pipeline stages of one kind hold, and how many there are."""

    plain_layers: int
    """Without routed experts."""
    expert_layers: int
    first: bool
    last: bool
    number: int
    position: int = 0
    """Of the first of them."""

    @property
    def num_layers(self) -> int:
        return self.plain_layers + self.expert_layers


class StageTime(NamedTuple):
    """Seconds of a micro-batch in a stage."""

    compute_s: float
    communication_s: float = 0.0
    overhead_s: float = 0.0
    """By which the floor of its launches exceeds the work."""

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s + self.overhead_s

    def plus(self, other: StageTime) -> StageTime:
        return StageTime(
            self.compute_s + other.compute_s,
            self.communication_s + other.communication_s,
            self.overhead_s + other.overhead_s,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """A layout of a model on a window."""

    grid: Grid
    stages: tuple[Stage, ...]
    contents: Array
    """[stages, 4]: layers without and with experts, embeddings and heads of each kind of stage."""
    numbers: Array
    """[stages]: stages of each kind."""
    hops_within: int
    """Borders between consecutive stages that lie inside a node for all ranks."""
    hops_across: int
    dense_group: Group
    """Ranks that reduce the gradients of parameters outside experts: data and context parallel."""
    expert_group: Group
    """Ranks that reduce the gradients of experts."""
    ends_group: Group
    """First and last stage, which reduce the gradient of tied embeddings; of size 1 where there are none."""
    replica_group: Group
    """Ranks of a data-parallel replica."""


@lru_cache(maxsize=4096)
def _spanned(offset: int, size: int, stride: int, window: int, per_node: int) -> int:
    """Most nodes that one of the groups of `size` ranks, `stride` apart, of a window at `offset` in its node spans."""
    block = stride * size
    repeats = min(window // block, per_node // gcd(block, per_node))
    found = 1
    for start in range(offset, offset + repeats * block, block):
        for first in range(start, start + min(stride, per_node)):
            if stride >= per_node:
                return size
            last = first + stride * (size - 1)
            found = max(found, last // per_node - first // per_node + 1)
    return found


def geometry(shape: ModelShape, layout: Layout, start: int, per_node: int, busy_ranks: int) -> Geometry:
    """Groups and stages of `layout` on a window whose first rank is number `start` of its node.

    Raises:
        PlanError: the layers do not divide over the stages.
    """
    etp = layout.etp if layout.etp is not None else layout.tp
    size = layout.size
    stride = size // layout.pp

    def group(count: int, step: int) -> Group:
        return Group(count, _spanned(start, count, step, size, per_node))

    experts = max(1, stride // (layout.ep * etp))
    across = 0
    for border in range(1, layout.pp):
        first = start + (border - 1) * stride
        across += any(rank // per_node != (rank + stride) // per_node for rank in (first, first + stride - 1))
    ends = layout.pp if shape.tied_embeddings and layout.pp > 1 else 1
    grid = Grid(
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        etp=etp,
        sp=layout.sp,
        tp_nodes=group(layout.tp, 1).num_nodes,
        cp_nodes=group(layout.cp, layout.tp).num_nodes,
        ep_nodes=group(layout.ep, etp).num_nodes,
        busy_ranks=busy_ranks,
    )
    pipeline = group(layout.pp, stride)
    stages = _stages(shape, layout)
    return Geometry(
        grid=grid,
        stages=stages,
        contents=np.array([stage[:4] for stage in stages], dtype=np.float64),
        numbers=np.array([stage.number for stage in stages], dtype=np.float64),
        hops_within=layout.pp - 1 - across,
        hops_across=across,
        dense_group=group(layout.dp * layout.cp, layout.tp),
        expert_group=group(experts, layout.ep * etp),
        ends_group=Group(min(ends, 2), min(pipeline.num_nodes, 2) if ends > 1 else 1),
        replica_group=Group(layout.tp * layout.cp * layout.pp, max(pipeline.num_nodes, grid.tp_nodes)),
    )


def shares_cores(cluster: Cluster) -> bool:
    """Whether the ranks of a node share its cores, so that a call is slower beside others than by itself."""
    cores = cluster.device.constants.get("cores_per_node")
    return isinstance(cores, int | float) and cores < cluster.devices_per_node


def _stages(shape: ModelShape, layout: Layout) -> tuple[Stage, ...]:
    members: dict[tuple[int, int, bool, bool], list[int]] = {}
    for index, chunks in enumerate(stage_layers(shape.num_layers, layout)):
        with_experts = sum(shape.has_experts(layer) for chunk in chunks for layer in chunk)
        plain = sum(map(len, chunks)) - with_experts
        members.setdefault((plain, with_experts, index == 0, index == layout.pp - 1), []).append(index)
    return tuple(Stage(*key, len(indices), indices[0]) for key, indices in members.items())


@runtime_checkable
class OverlapCosts(Protocol):
    """Operation costs that know how much communication and computation slow each other down."""

    @property
    def overlap_slowdown(self) -> float:
        """Factor on both while they run at the same time, at least 1 (Galvatron's overlap coefficient)."""
        ...


class Parts(NamedTuple):
    """Seconds of what stages consist of; None is what the model does not have."""

    plain_layer: OpTime | None
    expert_layer: OpTime | None
    embedding: OpTime
    head: OpTime


class StageTimer:
    """Times of one model's stages, cached by micro-batch and grid."""

    def __init__(self, model: ModelSpec, operations: OperationCosts, cluster: Cluster) -> None:
        """Times on `cluster`."""
        self.model = model
        self.operations = operations
        self.overlap_slowdown = operations.overlap_slowdown if isinstance(operations, OverlapCosts) else 1.0
        self._per_node = cluster.devices_per_node
        self._geometries: dict[tuple[Layout, int, int], Geometry] = {}
        self._parts: dict[tuple[Pass, MicroBatch, Grid], Parts] = {}
        self._curves: dict[tuple[float, tuple[float, ...], Grid], Array] = {}
        self._decode_floors: dict[Geometry, Array] = {}
        self._floors: dict[tuple[int, Pass], float] = {}

    def geometry(self, layout: Layout, start: int, busy_ranks: int) -> Geometry:
        """Of `layout` on a window that starts at rank `start`, with `busy_ranks` of a node at work (`Grid`).

        Raises:
            PlanError: the layers do not divide over the stages.
        """
        key = (layout, start % self._per_node, busy_ranks)
        found = self._geometries.get(key)
        if found is None:
            found = geometry(self.model.shape, layout, key[1], self._per_node, busy_ranks)
            self._geometries[key] = found
        return found

    def times(self, stages: Sequence[Stage], pass_: Pass, batch: MicroBatch, grid: Grid) -> list[StageTime]:
        """Of one micro-batch in a stage of each kind."""
        parts = self.parts(pass_, batch, grid)
        found = []
        for stage in stages:
            compute, communication = _layers(stage, parts)
            if stage.first:
                compute += parts.embedding.compute_s
                communication += parts.embedding.communication_s
            if stage.last:
                compute += parts.head.compute_s
                communication += parts.head.communication_s
            found.append(self._at_least(stage, pass_, compute, communication))
        return found

    def layers(self, stage: Stage, pass_: Pass, batch: MicroBatch, grid: Grid) -> StageTime:
        """Of the decoder layers of a stage alone, without embedding and head."""
        return self._at_least(stage, pass_, *_layers(stage, self.parts(pass_, batch, grid)))

    def parts(self, pass_: Pass, batch: MicroBatch, grid: Grid) -> Parts:
        """Of one micro-batch in each kind of layer, in the embedding and in the head."""
        key = (pass_, batch, grid)
        found = self._parts.get(key)
        if found is None:
            model, operations, shape = self.model, self.operations, self.model.shape
            last = shape.num_layers - 1
            found = Parts(
                None if shape.has_experts(0) else operations.layer(model, 0, pass_, batch, grid),
                operations.layer(model, last, pass_, batch, grid) if shape.has_experts(last) else None,
                operations.embedding(model, pass_, batch, grid),
                operations.head(model, pass_, batch, grid),
            )
            self._parts[key] = found
        return found

    def decode_curves(self, rows: float, contexts: tuple[float, ...], grid: Grid) -> Array:
        """Of a decode step of `rows` sequences at each of `contexts`.

        Returns:
            [4, 2 * contexts]: a layer without experts, one with experts, embedding and head (which do not depend on the
            context); computing stands before communication.
        """
        key = (rows, contexts, grid)
        known = self._curves.get(key)
        if known is not None:
            return known
        found = np.zeros((4, 2, len(contexts)))
        for index, context in enumerate(contexts):
            parts = self.parts(Pass.DECODE, MicroBatch(rows, 1.0, context, rows), grid)
            for kind, time in enumerate(parts):
                if time is not None:
                    found[kind, :, index] = time
        self._curves[key] = found.reshape(4, -1)
        return self._curves[key]

    def decode_floors(self, at: Geometry) -> Array:
        """The least times of a decode step, [kinds of stages, 1]."""
        found = self._decode_floors.get(at)
        if found is None:
            found = np.array([[self.floor(stage.num_layers, Pass.DECODE)] for stage in at.stages])
            self._decode_floors[at] = found
        return found

    def floor(self, num_layers: int, pass_: Pass) -> float:
        """The least time of a pass over a stage of this many layers: launches."""
        key = (num_layers, pass_)
        found = self._floors.get(key)
        if found is None:
            if pass_ is Pass.DECODE:
                found = self.operations.decode_step_floor(self.model, num_layers)
            else:
                found = self.operations.pass_floor(self.model, num_layers, pass_)
            self._floors[key] = found
        return found

    def hop(self, num_bytes: float, *, within_node: bool) -> float:
        """A message from stage to stage."""
        return self.operations.point_to_point(num_bytes, within_node=within_node)

    def _at_least(self, stage: Stage, pass_: Pass, compute: float, communication: float) -> StageTime:
        lacking = self.floor(stage.num_layers, pass_) - compute - communication
        return StageTime(compute, communication, lacking if lacking > 0 else 0.0)


def _layers(stage: Stage, parts: Parts) -> tuple[float, float]:
    compute = communication = 0.0
    if parts.plain_layer is not None:
        compute = stage.plain_layers * parts.plain_layer.compute_s
        communication = stage.plain_layers * parts.plain_layer.communication_s
    if parts.expert_layer is not None:
        compute += stage.expert_layers * parts.expert_layer.compute_s
        communication += stage.expert_layers * parts.expert_layer.communication_s
    return compute, communication


class Pipelined(NamedTuple):
    """Seconds of all micro-batches of a pass over the stages, as the slowest stage spends them."""

    compute_s: float
    communication_s: float
    bubble_s: float
    overhead_s: float


def pipelined(
    stages: Sequence[Stage],
    times: Sequence[StageTime],
    microbatches: int,
    vpp: int,
    hops: tuple[float, float],
) -> Pipelined:
    """``m * max(t) + (sum(t) - max(t)) / v`` and the messages between stages.

    For v = 1 this is ``sum(t) + (m - 1) max(t)`` of 1F1B with unequal stages; for equal ones of an interleaved schedule
    it is ``(m + (p - 1) / v) t`` (Narayanan et al. 2021, section 2.2.2).

    Args:
        stages: kinds of stages.
        times: of each kind.
        microbatches: m.
        vpp: v, model chunks of a stage.
        hops: seconds of one micro-batch's messages, both ways in training: of the slowest border, and of all borders.
    """
    slowest = max(times, key=_seconds)
    total = sum([stage.number * time.seconds for stage, time in zip(stages, times, strict=True)])
    slowest_hop, all_hops = hops
    return Pipelined(
        compute_s=microbatches * slowest.compute_s,
        communication_s=microbatches * slowest.communication_s
        + (microbatches * vpp - 1) * slowest_hop
        + all_hops,
        bubble_s=max(0.0, total - slowest.seconds) / vpp,
        overhead_s=microbatches * slowest.overhead_s,
    )


def _seconds(time: StageTime) -> float:
    return time[0] + time[1] + time[2]


@lru_cache(maxsize=4096)
def score_share(shape: ModelShape, with_experts: bool, length: float, square_length: float) -> float:
    """Share of the attention scores in a layer's forward FLOPs, for sequences of a mean (and mean square) length.

    Per sequence: scores and their product with the values ``2 a d L^2`` (causal); the rest
    ``2 L (2 h a d + 2 h k d) + matrices of the MLP * 2 L h f`` (Megatron's `num_floating_point_operations`).
    """
    hidden = shape.hidden_size
    scores = 2 * shape.query_width * square_length
    width = shape.ffn_hidden_size
    if with_experts:
        width = shape.experts_per_token * shape.expert_width + shape.shared_expert_ffn_hidden_size
    matrices = 3 if shape.gated_mlp else 2
    rest = 2 * length * hidden * (2 * shape.query_width + 2 * shape.key_width + matrices * width)
    return scores / (scores + rest)
