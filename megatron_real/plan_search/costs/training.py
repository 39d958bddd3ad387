"""Seconds of an optimizer step: passes over the pipeline, reduction of gradients, update, gathering of parameters.

The step is what `hooks.forward.train` does with Megatron's schedules and distributed optimizer. The slowest stage's
gradients are reduced after the last backward pass, or beside it (``overlap_grad_reduce``).

Invariants (tests/unit/plan_search/test_call_prices.py):
    - an optimizer step is the closed form by hand: bubbles, recomputation, reduction, update;
    - what runs beside computing costs only what sticks out.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_real.layout import Layout
from megatron_real.plan_search.costs.operations import Collective, MicroBatch, Pass
from megatron_real.plan_search.costs.stages import (
    Geometry,
    Pipelined,
    Stage,
    StageTime,
    StageTimer,
    pipelined,
    score_share,
)
from megatron_real.plan_search.parameters import chunk_elements, stage_parameters

__all__ = ["StepCost", "StepPricer", "exposed_seconds", "hop_seconds"]


class StepCost(NamedTuple):
    """Seconds of one optimizer step."""

    passes: Pipelined
    reduction_s: float
    """Exposed communication of gradients and parameters."""
    optimizer_s: float


class StepPricer:
    """Prices optimizer steps of one model."""

    def __init__(self, timer: StageTimer) -> None:
        self._timer = timer
        self._updates: dict[Geometry, list[_Update]] = {}

    def price(
        self, at: Geometry, layout: Layout, batch: MicroBatch, microbatches: int, recompute: str
    ) -> StepCost:
        """One optimizer step.

        Args:
            at: the layout on its window.
            layout: degrees.
            batch: the mean micro-batch of a replica.
            microbatches: of a replica.
            recompute: ``none``; ``full``: every layer runs forward once more; ``selective``: its attention does, which
                costs the scores' share of the layer's computing, and nothing where the kernel keeps no scores anyway.
        """
        timer = self._timer
        forwards = timer.times(at.stages, Pass.TRAIN_FORWARD, batch, at.grid)
        backwards = timer.times(at.stages, Pass.BACKWARD, batch, at.grid)
        if recompute == "full":
            backwards = [
                back.plus(timer.layers(stage, Pass.TRAIN_FORWARD, batch, at.grid))
                for stage, back in zip(at.stages, backwards, strict=True)
            ]
        elif recompute == "selective" and not timer.model.fused_attention:
            backwards = [
                back.plus(_attention_again(timer, at, stage, batch))
                for stage, back in zip(at.stages, backwards, strict=True)
            ]
        times = [forward.plus(back) for forward, back in zip(forwards, backwards, strict=True)]
        one_way, all_one_way = hop_seconds(timer, at, batch.tokens, split=layout.tp if layout.sp else 1)
        passes = pipelined(at.stages, times, microbatches, layout.vpp, (2 * one_way, 2 * all_one_way))
        reduction, optimizer = 0.0, 0.0
        for update, forward, back in zip(self._update(at, layout), forwards, backwards, strict=True):
            exposed = self._exposed(update, forward.seconds, back.seconds)
            if exposed + update.optimizer_s > reduction + optimizer:
                reduction, optimizer = exposed, update.optimizer_s
        return StepCost(passes, reduction, optimizer)

    def _exposed(self, update: _Update, forward_s: float, backward_s: float) -> float:
        model, slowdown = self._timer.model, self._timer.overlap_slowdown
        gradients, parameters = update.gradients_s, update.parameters_s
        if model.overlap_grad_reduce:
            gradients = exposed_seconds(gradients, backward_s, slowdown)
        if model.overlap_param_gather:
            parameters = exposed_seconds(parameters, forward_s, slowdown)
        return gradients + parameters + update.embedding_s

    def _update(self, at: Geometry, layout: Layout) -> list[_Update]:
        found = self._updates.get(at)
        if found is None:
            found = [_update(self._timer, at, layout, stage) for stage in at.stages]
            self._updates[at] = found
        return found


class _Update(NamedTuple):
    """Seconds of one stage after its last backward pass, if nothing overlaps."""

    gradients_s: float
    parameters_s: float
    embedding_s: float
    optimizer_s: float


def _update(timer: StageTimer, at: Geometry, layout: Layout, stage: Stage) -> _Update:
    model, operations = timer.model, timer.operations
    own = stage_parameters(model.shape, layout)[stage.position]
    embedding = sum(chunk.tied for chunk in chunk_elements(model.shape, layout)[stage.position])
    gradients = parameters = owned = 0.0
    for count, group in ((own.dense, at.dense_group), (own.expert, at.expert_group)):
        owned += count / group.size if model.distributed_optimizer else count
        if count == 0 or group.size == 1:
            continue
        if model.distributed_optimizer:
            gradients += operations.collective(Collective.REDUCE_SCATTER, count * model.grad_itemsize, group)
            parameters += operations.collective(Collective.ALL_GATHER, count * model.param_itemsize, group)
        else:
            gradients += operations.collective(Collective.ALL_REDUCE, count * model.grad_itemsize, group)
    ends = 0.0
    if embedding and at.ends_group.size > 1:
        ends = operations.collective(Collective.ALL_REDUCE, embedding * model.grad_itemsize, at.ends_group)
    return _Update(gradients, parameters, ends, operations.optimizer_step(model, own.total, owned, at.grid))


def hop_seconds(timer: StageTimer, at: Geometry, tokens: float, *, split: int = 1) -> tuple[float, float]:
    """Seconds of one micro-batch's hidden states, one way: over the slowest border between stages, and over all."""
    if at.hops_within + at.hops_across == 0:
        return 0.0, 0.0
    model = timer.model
    num_bytes = tokens * model.shape.hidden_size * model.param_itemsize / (split * at.grid.cp)
    within = timer.hop(num_bytes, within_node=True) if at.hops_within else 0.0
    across = timer.hop(num_bytes, within_node=False) if at.hops_across else 0.0
    return max(within, across), at.hops_within * within + at.hops_across * across


def _attention_again(timer: StageTimer, at: Geometry, stage: Stage, batch: MicroBatch) -> StageTime:
    shape = timer.model.shape
    square = batch.square_length or batch.length**2
    compute = 0.0
    for count, with_experts in ((stage.plain_layers, False), (stage.expert_layers, True)):
        if count:
            alone = Stage(0 if with_experts else 1, 1 if with_experts else 0, False, False, 1)
            share = score_share(shape, with_experts, batch.length, square)
            compute += count * share * timer.layers(alone, Pass.TRAIN_FORWARD, batch, at.grid).compute_s
    return StageTime(compute)


def exposed_seconds(communication_s: float, computation_s: float, slowdown: float) -> float:
    """What communication adds to a computation that it runs beside, if both slow down while they overlap."""
    both = min(communication_s, computation_s)
    return slowdown * both + max(communication_s, computation_s) - both - computation_s
