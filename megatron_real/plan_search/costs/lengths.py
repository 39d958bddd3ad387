"""How long padded micro-batches and decoding batches get: order statistics of a workload's histograms.

`data_plan.balanced_partition` deals sequences out longest first, so the longest of each of k parts are exactly the k
longest of all. A padded micro-batch is therefore as wide as one of those, which is more than the longest of as many
random sequences.

Invariants (tests/unit/plan_search/test_stage_prices.py, tests/property/test_call_prices.py):
    - padded lengths are those that `data_plan.assign` makes of sampled lengths;
    - longer sequences never give shorter batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_real.plan_search.workload import LengthDistribution, Workload

__all__ = ["Histogram", "Padded", "mean_of_largest", "padded_length", "total_histogram"]

_MAX_BINS = 96
_EXACT_PARTS = 48
"""Up to this many parts the number of sequences in the tail is binomial; from there on it is near its mean."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Values, ascending, with their probabilities; compared by identity, so that results are cached by it."""

    values: Array
    weights: Array
    below: Array
    """Of each value, the probability of that value or less; the last is 1."""

    @classmethod
    def of(cls, values: Array, weights: Array) -> Histogram:
        below = np.cumsum(weights)
        below /= below[-1]
        below[-1] = 1.0
        return cls(values, weights, below)

    @classmethod
    def of_lengths(cls, lengths: LengthDistribution) -> Histogram:
        return cls.of(np.array(lengths.lengths, dtype=np.float64), np.array(lengths.weights))

    def longest_of(self, count: int) -> Histogram:
        """Of the largest of `count` independent values."""
        return Histogram.of(self.values, np.diff(np.concatenate(([0.0], self.below**count))))

    def negated(self) -> Histogram:
        """Of the values with the other sign: its longest are this one's shortest."""
        return Histogram.of(-self.values[::-1], self.weights[::-1])


def total_histogram(workload: Workload, *, longest_of: int = 1) -> Histogram:
    """Prompt and response together, taken as independent. At most 96 bins; each keeps its mean.

    Args:
        workload: with the lengths.
        longest_of: responses to one prompt, of which the longest counts.
    """
    prompt, response = (Histogram.of_lengths(one) for one in (workload.prompt, workload.response))
    response = response.longest_of(longest_of)
    values = np.add.outer(prompt.values, response.values).ravel()
    weights = np.multiply.outer(prompt.weights, response.weights).ravel()
    unique, place = np.unique(values, return_inverse=True)
    if len(unique) > _MAX_BINS:
        width = (unique[-1] - unique[0]) / _MAX_BINS
        # The longest keeps a bin of its own: the end of a batch follows from it.
        bins = np.where(
            values == unique[-1], _MAX_BINS, np.minimum((values - unique[0]) // width, _MAX_BINS - 1)
        )
        _, place = np.unique(bins, return_inverse=True)
    mass = np.bincount(place, weights=weights)
    if len(unique) <= _MAX_BINS:
        return Histogram.of(unique, mass)
    means = np.bincount(place, weights=weights * values) / np.where(mass > 0, mass, 1.0)
    means[-1] = unique[-1]
    return Histogram.of(means[mass > 0], mass[mass > 0])


@dataclass(frozen=True, slots=True)
class Padded:
    """Width of a micro-batch."""

    length: float
    mean_square: float


@lru_cache(maxsize=65536)
def _top_weights(histogram: Histogram, count: int, parts: int) -> Array:
    """Share of each value in the mean of the `parts` largest of `count` independent draws.

    Of the draws, N are at least as large as a value, and min(parts, N) of these are among the largest; N is binomial.
    """
    reach = 1.0 - np.concatenate(([0.0], histogram.below[:-1]))  # probability of at least each value
    if parts > _EXACT_PARTS or parts == count:
        taken = np.minimum(parts, count * reach)
    else:
        number = np.arange(parts, dtype=np.float64)
        steps = np.log((count - number[:-1]) / (number[:-1] + 1))
        log_choose = np.concatenate(([0.0], np.cumsum(steps)))
        clipped = np.clip(reach, 1e-300, 1 - 1e-16)[:, None]
        log_mass = log_choose + number * np.log(clipped) + (count - number) * np.log1p(-clipped)
        taken = parts - np.exp(log_mass) @ (parts - number)
        taken[0] = parts
    shares: Array = -np.diff(np.concatenate((taken, [0.0]))) / parts
    return shares


def mean_of_largest(histogram: Histogram, count: int, parts: int) -> tuple[float, float]:
    """Mean, and mean square, of the `parts` largest of `count` draws."""
    shares = _top_weights(histogram, count, min(parts, count))
    return float(shares @ histogram.values), float(shares @ np.square(histogram.values))


@lru_cache(maxsize=65536)
def padded_length(histogram: Histogram, count: int, replicas: int, microbatches: int) -> Padded:
    """Mean width of the micro-batches of the slowest of `replicas` data-parallel ranks.

    `count` sequences are dealt out longest first over the replicas, and in each over its micro-batches. The slowest
    replica has the longest of all. Replicas get equally many tokens, so the fewer sequences a micro-batch has, the more
    of that is made up for by its shorter ones.
    """
    mean, square = mean_of_largest(histogram, count, replicas * microbatches)
    longest, longest_square = mean_of_largest(histogram, count, 1)
    first, first_square = mean_of_largest(histogram, count, replicas)
    excess = (1 - min(1.0, replicas * microbatches / count)) / microbatches
    return Padded(mean + excess * (longest - first), square + excess * (longest_square - first_square))
