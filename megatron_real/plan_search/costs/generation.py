"""Seconds of a generate call: prompts into the cache, then one position at a time until the longest response ends.

Two engines. The one of `hooks.generation` is static: a micro-batch is one decoding batch, whose prompts are cut at the
shortest; finished rows stay in it until its last one ends; each pipeline stage goes round its batches. A continuous
engine drops finished rows, and runs in waves where the key-value cache does not hold all sequences.

A sum over positions is taken by pieces between which no more sequences end. The time of a step is linear in the context
there, so its value in the middle times the number of positions is the sum.

Invariants (tests/unit/plan_search/test_call_prices.py, tests/property/test_call_prices.py):
    - prices are the sums of a loop over tokens;
    - the number of steps is that of the batches that `data_plan.assign` makes of sampled lengths;
    - more or longer sequences are never cheaper.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron_real.plan_search.costs.lengths import Histogram, mean_of_largest
from megatron_real.plan_search.costs.operations import Collective, MicroBatch, Pass
from megatron_real.plan_search.costs.stages import Geometry, Pipelined, StageTimer, pipelined
from megatron_real.plan_search.costs.training import hop_seconds
from megatron_real.plan_search.models import ModelSpec

__all__ = [
    "Decoding",
    "Ends",
    "cache_bytes_per_token",
    "continuous_generation",
    "first_pass_s",
    "static_ends",
    "static_generation",
]

_CONTEXTS = 9
"""Contexts at which a step is priced; those between are interpolated."""
_ROWS = 20
"""Pieces of a continuous engine's decoding, each with its number of rows."""

Array = np.ndarray[Any, np.dtype[np.float64]]


class Decoding(NamedTuple):
    """How a generation is cut."""

    rows: float
    """Sequences of a decoding batch."""
    batches: int
    """Of a replica."""
    replicas: int
    num_sequences: int
    """Of all replicas."""
    in_step: bool = False
    """All replicas run equally many passes, since they hold experts for each other."""
    waves: int = 1
    """One after the other, each with its share of the batches."""


class Ends(NamedTuple):
    """When sequences end, by pieces of positions ``[low, high)`` in which no sequence ends."""

    low: Array
    high: Array
    batches: Array
    """Mean number of batches of the slowest replica that are not finished."""
    any_left: Array
    """Probability that the slowest replica is not finished with a wave."""

    @property
    def width(self) -> Array:
        return self.high - self.low

    @property
    def middle(self) -> Array:
        """Mean of the whole numbers of a piece."""
        return (self.low + self.high - 1) / 2


def static_ends(total: Histogram, start: float, cut: Decoding) -> Ends:
    """Pieces of the contexts of the decode steps of a static engine, whose first pass covers `start` positions.

    A batch runs while its longest sequence does. Of several replicas, each with `batches` of them, the slowest counts:
    with one batch it is the longest of all; with more, the excess over the mean grows with their root.
    """
    edges = np.concatenate(([start + 1.0], np.maximum(total.values, start + 1.0)))
    below = np.concatenate(([0.0], total.below[:-1]))
    one = 1.0 - below**cut.rows
    slowest = 1.0 - below ** (cut.rows * cut.replicas)
    if cut.in_step:
        batches = cut.batches * slowest
    else:
        batches = np.minimum(cut.batches, cut.batches * one + math.sqrt(cut.batches) * (slowest - one))
    in_wave = cut.batches / cut.waves
    any_left = np.minimum(batches / cut.waves, 1.0 - below ** (cut.rows * in_wave * cut.replicas))
    keep = edges[1:] > edges[:-1]
    return Ends(edges[:-1][keep], edges[1:][keep], batches[keep], any_left[keep])


class _Step(NamedTuple):
    """Seconds of a decode step, one number per context: what the slowest stage spends, and a batch's whole way."""

    compute_s: Array
    communication_s: Array
    overhead_s: Array
    latency_s: Array

    @property
    def stage_s(self) -> Array:
        return self.compute_s + self.communication_s + self.overhead_s


def _step(timer: StageTimer, at: Geometry, rows: float, contexts: tuple[float, ...]) -> _Step:
    """Of `rows` sequences, at each of `contexts`."""
    hop, all_hops = hop_seconds(timer, at, rows)
    hand_out = 0.0
    if hop > 0:  # the last stage gives the tokens, int64, and whether that was all to the other ranks
        hand_out = timer.operations.collective(Collective.BROADCAST, 8 * (rows + 1), at.replica_group)
    works = at.contents @ timer.decode_curves(rows, contexts, at.grid)
    works = works.reshape(len(at.stages), 2, len(contexts))
    needed = works[:, 0] + works[:, 1]
    seconds = np.maximum(needed, timer.decode_floors(at))
    slowest = seconds.argmax(axis=0)
    place = np.arange(len(contexts))
    return _Step(
        works[slowest, 0, place],
        works[slowest, 1, place] + (hop + hand_out),
        (seconds - needed)[slowest, place],
        at.numbers @ seconds + (all_hops + hand_out),
    )


def _prefill(timer: StageTimer, at: Geometry, rows: float, length: float, batches: int) -> Pipelined:
    batch = MicroBatch(rows, length, length, rows)
    times = timer.times(at.stages, Pass.PREFILL, batch, at.grid)
    return pipelined(at.stages, times, batches, 1, hop_seconds(timer, at, batch.tokens))


def _sum(step: _Step, width: Array, batches: Array, latency_rounds: Array) -> Pipelined:
    """All decode steps: a round costs its batches on the busiest stage, or one batch's way through all stages."""
    busy = batches * step.stage_s
    rounds = np.maximum(busy, latency_rounds * step.latency_s)
    weights = width * batches
    return Pipelined(
        compute_s=float(weights @ step.compute_s),
        communication_s=float(weights @ step.communication_s),
        bubble_s=float(width @ (rounds - busy)),
        overhead_s=float(weights @ step.overhead_s),
    )


def _plus(one: Pipelined, other: Pipelined) -> Pipelined:
    return Pipelined(*(a + b for a, b in zip(one, other, strict=True)))


@lru_cache(maxsize=65536)
def _shortest(prompts: Histogram, count: int, batches: int) -> float:
    """Mean of the shortest prompt of each batch: prompts are dealt out by length, so these are the shortest of all."""
    return -mean_of_largest(prompts, count, batches)[0]


@lru_cache(maxsize=65536)
def _ends(
    total: Histogram, negated_prompts: Histogram, cut: Decoding
) -> tuple[float, Ends, tuple[float, ...], Array]:
    """Where decoding starts and ends, and at which contexts its steps are priced.

    Contexts are the same for every cut, so that cuts share prices.

    Returns:
        Positions of the first pass; the pieces of the others; the contexts; and how the pieces follow from these,
        [contexts, pieces].
    """
    start = _shortest(negated_prompts, cut.num_sequences, cut.batches * cut.replicas)
    ends = static_ends(total, start, cut)
    contexts = np.linspace(1.0 - negated_prompts.values[-1], total.values[-1], _CONTEXTS)
    weights = np.array([np.interp(ends.middle, contexts, unit) for unit in np.eye(_CONTEXTS)])
    return start, ends, tuple(contexts.tolist()), weights


def static_generation(
    timer: StageTimer, at: Geometry, total: Histogram, negated_prompts: Histogram, cut: Decoding
) -> Pipelined:
    """A generate call of the engine in `hooks.generation`.

    Args:
        timer: of the model.
        at: the layout on its window.
        total: prompt and response together.
        negated_prompts: see `Histogram.negated`.
        cut: into batches.
    """
    start, ends, contexts, weights = _ends(total, negated_prompts, cut)
    wave = _prefill(timer, at, cut.rows, start, -(-cut.batches // cut.waves))
    first = Pipelined(*(cut.waves * part for part in wave))
    if len(ends.low) == 0:
        return first
    step = _Step(*(np.array(_step(timer, at, cut.rows, contexts)) @ weights))
    return _plus(first, _sum(step, ends.width, ends.batches, cut.waves * ends.any_left))


def first_pass_s(timer: StageTimer, at: Geometry, negated_prompts: Histogram, cut: Decoding) -> float:
    """Of the first decoding batch over the layers of the stage that is fastest, in a call of the static engine."""
    length = _shortest(negated_prompts, cut.num_sequences, cut.batches * cut.replicas)
    times = timer.times(at.stages, Pass.PREFILL, MicroBatch(cut.rows, length, length, cut.rows), at.grid)
    return min(time.seconds for time in times)


def cache_bytes_per_token(model: ModelSpec, at: Geometry) -> int:
    """Bytes of keys and values of one position on the rank that has most layers."""
    shape = model.shape
    heads = max(1, -(-shape.num_query_groups // at.grid.tp))
    layers = max(stage.num_layers for stage in at.stages)
    return 2 * layers * heads * shape.head_width * model.param_itemsize


def continuous_generation(
    timer: StageTimer,
    at: Geometry,
    lengths: tuple[Histogram, Histogram],
    cut: Decoding,
    capacity_bytes: int | None,
) -> Pipelined:
    """A generate call of an engine that drops finished rows and packs prompts.

    Args:
        timer: of the model.
        at: the layout on its window.
        lengths: of prompts, and of responses.
        cut: into batches that the stages go round; `rows` of each.
        capacity_bytes: of the key-value cache of a rank; None is no limit. All sequences of a replica are in the cache
            with their mean length; where that is too much they run in equal waves, one after the other.
    """
    prompts, responses = lengths
    prompt = float(prompts.values @ np.diff(np.concatenate(([0.0], prompts.below))))
    response = float(responses.values @ np.diff(np.concatenate(([0.0], responses.below))))
    waves = 1
    if capacity_bytes is not None:
        needed = cut.rows * cut.batches * (prompt + response) * cache_bytes_per_token(timer.model, at)
        waves = max(1, math.ceil(needed / capacity_bytes))
    rows = cut.rows / waves
    first = _prefill(timer, at, rows, prompt, cut.batches * waves)
    edges, left = _pieces(responses)
    if len(left) == 0:
        return first
    alive = 1.0 - (1.0 - left) ** (rows * cut.batches * cut.replicas)  # probability that any row is left
    found = np.empty((4, len(left)))
    middles = (edges[:-1] + edges[1:] - 1) / 2
    for index, (share, middle) in enumerate(zip(left, middles, strict=True)):
        one = _step(timer, at, max(1.0, rows * float(share)), (prompt + float(middle),))
        found[:, index] = [float(values[0]) for values in one]
    batches = cut.batches * (1.0 - (1.0 - left) ** (rows * cut.replicas))
    decoding = _sum(_Step(*found), np.diff(edges) * waves, batches, np.minimum(batches, alive))
    return _plus(first, decoding)


def _pieces(responses: Histogram) -> tuple[Array, Array]:
    """Positions after the first token in at most `_ROWS` pieces, and the mean share of responses left in each."""
    edges = np.concatenate(([1.0], np.maximum(responses.values, 1.0)))
    left = np.concatenate(([1.0], 1.0 - responses.below[:-1]))
    width = np.diff(edges)
    keep = width > 0
    edges, left, width = np.concatenate(([1.0], edges[1:][keep])), left[keep], width[keep]
    if len(left) > _ROWS:
        # Pieces of equal numbers of responses and positions alike: both where many end and where few are left.
        progress = np.cumsum(width) / width.sum() + np.cumsum(width * left) / (width @ left)
        group = np.minimum((progress * _ROWS / 2 - 1e-9).astype(np.int64), _ROWS - 1)
        _, starts = np.unique(group, return_index=True)
        sums = np.add.reduceat(width, starts)
        left = np.add.reduceat(width * left, starts) / sums
        edges = np.concatenate(([1.0], 1.0 + np.cumsum(sums)))
    return edges, left
