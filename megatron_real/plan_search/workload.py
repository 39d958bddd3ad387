"""How much work an iteration is: prompts, lengths, minibatches.

Times are priced for expected lengths, memory for long ones.

Invariants (tests/unit/plan_search/test_workload.py):
    - weights of a distribution sum to one, lengths ascend;
    - a histogram has the moments and quantiles of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_real.dataflow import Call
from megatron_real.errors import ConfigError

__all__ = ["LengthDistribution", "Workload"]


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Token counts with their probabilities: a histogram."""

    lengths: tuple[int, ...]
    """Ascending, without repetition."""
    weights: tuple[float, ...]
    """Probabilities, in the order of `lengths`."""

    def __post_init__(self) -> None:
        sound = (
            len(self.lengths) == len(self.weights) > 0
            and all(length >= 1 for length in self.lengths)
            and list(self.lengths) == sorted(set(self.lengths))
            and all(weight >= 0 for weight in self.weights)
            and math.isclose(sum(self.weights), 1.0, rel_tol=1e-6)
        )
        if not sound:
            raise ConfigError(
                f"lengths: found {list(self.lengths)[:8]} with weights {list(self.weights)[:8]}; expected ascending "
                "lengths of at least 1 whose weights sum to 1."
            )

    @classmethod
    def constant(cls, length: int) -> LengthDistribution:
        """Every sequence has `length` tokens."""
        return cls((length,), (1.0,))

    @classmethod
    def of(cls, samples: Iterable[int]) -> LengthDistribution:
        """The histogram of measured lengths."""
        values, counts = np.unique(np.fromiter(samples, dtype=np.int64), return_counts=True)
        if len(values) == 0:
            raise ConfigError("lengths: found no samples; expected at least one.")
        return cls(tuple(map(int, values)), tuple(float(count) for count in counts / counts.sum()))

    @classmethod
    def lognormal(cls, mean: float, spread: float, cap: int, *, bins: int = 64) -> LengthDistribution:
        """A log-normal distribution cut off at `cap`, where what would be longer is gathered.

        Args:
            mean: of the distribution before the cut.
            spread: standard deviation of the logarithm.
            cap: the most tokens of a response.
        """
        if not (mean > 0 and spread > 0 and cap >= 1):
            raise ConfigError(
                f"lengths: found mean={mean}, spread={spread}, cap={cap}; expected positive values."
            )
        mu = math.log(mean) - spread**2 / 2
        edges = np.unique(np.round(np.linspace(0, cap, min(bins, cap) + 1)).astype(np.int64))
        with np.errstate(divide="ignore"):
            cdf = np.array(
                [
                    0.5 * (1 + math.erf((math.log(e) - mu) / (spread * math.sqrt(2)))) if e else 0.0
                    for e in edges
                ]
            )
        weights = np.diff(cdf)
        weights[-1] += 1.0 - cdf[-1]
        middles = np.maximum(1, (edges[:-1] + edges[1:] + 1) // 2)
        middles[-1] = cap
        keep = weights > 0
        return cls(
            tuple(map(int, middles[keep])), tuple(float(w) for w in weights[keep] / weights[keep].sum())
        )

    @property
    def mean(self) -> float:
        return float(np.dot(self.lengths, self.weights))

    @property
    def mean_square(self) -> float:
        return float(np.dot(np.square(self.lengths, dtype=np.float64), self.weights))

    @property
    def cap(self) -> int:
        """The longest length that has a weight."""
        return max(length for length, weight in zip(self.lengths, self.weights, strict=True) if weight > 0)

    def quantile(self, level: float) -> int:
        """The least length that at least `level` of the sequences do not exceed."""
        total = np.cumsum(self.weights)
        return self.lengths[min(int(np.searchsorted(total, level - 1e-9)), len(self.lengths) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What an iteration works on."""

    batch_size: int
    """Prompts per iteration; of data with answers their lines: prompt and answer, or a pair of answers."""
    prompt: LengthDistribution
    response: LengthDistribution
    group_size: int = 1
    """Responses to each prompt."""
    unit: int = 1
    """Sequences that a train call keeps in one micro-batch: 2 where a line is a pair of answers."""
    num_minibatches: int = 1
    """Optimizer steps of a train call over the batch."""
    num_epochs: int = 1
    """Passes of a train call over the batch."""
    memory_quantile: float = 0.99
    """Memory is planned for responses of this quantile; 1 is the cap."""
    function_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per sequence of a call that is a Python function; one that is missing has no price."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_size", "unit", "num_minibatches", "num_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload: found {name}={getattr(self, name)}; expected at least 1.")
        if not 0 < self.memory_quantile <= 1:
            raise ConfigError(
                f"workload: found memory_quantile={self.memory_quantile}; expected more than 0, at most 1."
            )

    @property
    def num_sequences(self) -> int:
        """Sequences of an iteration. Every call works on all of them, each set of sequences has as many."""
        return self.batch_size * self.group_size * self.unit

    def num_steps(self, call: Call) -> int:
        """Optimizer steps of a train call, 1 for others."""
        return self.num_minibatches * self.num_epochs if call.trains else 1

    def unit_of(self, call: Call) -> int:
        """Sequences that `call` keeps in one micro-batch."""
        return self.unit if call.trains else 1

    def step_units(self, call: Call) -> int:
        """What an optimizer step, or the whole call, deals out over replicas and micro-batches.

        Sequences, or what stays together of them, as in `data_plan.assign`.
        """
        units = self.num_sequences // self.unit_of(call)
        return units // self.num_minibatches if call.trains else units

    def step_sequences(self, call: Call) -> int:
        """Sequences of one optimizer step, or of the whole call."""
        return self.step_units(call) * self.unit_of(call)

    @property
    def mean_length(self) -> float:
        """Tokens of prompt and response."""
        return self.prompt.mean + self.response.mean

    @property
    def long_length(self) -> int:
        """Tokens of prompt and response for which memory is planned."""
        return self.prompt.cap + self.response.quantile(self.memory_quantile)

    @property
    def mean_square_length(self) -> float:
        """Mean of the squared number of tokens, for attention; prompt and response are taken as independent."""
        return self.prompt.mean_square + 2 * self.prompt.mean * self.response.mean + self.response.mean_square
