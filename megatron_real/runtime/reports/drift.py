"""Says when a run leaves what its plan was priced for: longer or shorter responses, slower or faster calls.

A plan is made for a distribution of response lengths (times for its mean, memory for a high quantile) and for the
prices of its calls. `DriftMonitor` is told the lengths and the calls' seconds of every iteration and answers with what
has changed, once for each kind, and again only after it was back to normal for a while. It decides nothing and touches
no rank: the master's thread asks it.

What is watched:
    - the mean of the responses: two-sided cumulative sums (E. Page, 1954) of log(mean / planned mean), beyond +-10 %;
    - long responses: more of them beyond the length that memory was planned for than chance allows, over the last
      iterations (H. Chernoff's bound of the binomial tail);
    - the cap: one response longer than any that was planned for;
    - each call: cumulative sums of log(measured / predicted), beyond a factor of 1.5 either way.

Invariants (tests/unit/runtime/test_drift.py):
    - lengths that are drawn from the planned distribution are never reported, by small batches or large;
    - a single odd iteration is not reported, a lasting change within a few iterations;
    - a quantity that sways around its limit is reported once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_real.plan import Predicted

__all__ = ["CuSum", "DriftMonitor", "Notice", "Priced", "PricedLengths", "other_workload"]


_MEAN_SLACK = math.log(1.10)
_TIME_SLACK = math.log(1.5)
_MEAN_LIMIT = 0.3
_TIME_LIMIT = 0.3
_RARE = math.log(1e5)
"""Of the iterations between two false reports of the mean (D. Siegmund, 1985): small batches are noisy."""
_TIME_STEPS = 4
"""Iterations that it takes at least: one that was disturbed is no drift."""
_CALM = 5
"""Iterations back in the inner half of the range after which a kind may be reported again."""
_MEMORY = 20
"""Iterations whose long responses are counted together."""
_SURE = math.log(1e6)
"""Long responses are reported where chance would have so many once in a million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLengths:
    """The responses that a plan was priced for, in tokens."""

    mean: float
    deviation: float
    """Standard deviation."""
    long: int
    """The length for which memory was planned."""
    long_share: float
    """Share of the responses that were expected to be longer than `long`."""
    cap: int
    """The longest that were expected."""

    @classmethod
    def of(cls, workload: Mapping[str, Any]) -> PricedLengths | None:
        """From ``predicted.inputs.workload`` of a plan; None where it does not say."""
        response = workload.get("response")
        if not isinstance(response, Mapping):
            return None
        lengths = [
            int(n) for n in response.get("lengths", [response["length"]] if "length" in response else [])
        ]
        weights = [float(w) for w in response.get("weights", [1.0])]
        if not lengths or len(lengths) != len(weights):
            return None
        pairs = sorted((n, w / sum(weights)) for n, w in zip(lengths, weights, strict=True) if w > 0)
        mean = sum(n * w for n, w in pairs)
        level, total, long = float(workload.get("memory_quantile", 0.99)), 0.0, pairs[-1][0]
        for length, weight in pairs:
            total += weight
            if total >= level - 1e-9:
                long = length
                break
        return cls(
            mean=mean,
            deviation=math.sqrt(max(0.0, sum(w * (n - mean) ** 2 for n, w in pairs))),
            long=long,
            long_share=max(0.0, sum(w for n, w in pairs if n > long)),
            cap=pairs[-1][0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What a plan's prediction rests on."""

    lengths: PricedLengths | None
    calls: Mapping[str, float]
    """Seconds by call."""

    @classmethod
    def of(cls, predicted: Predicted | None) -> Priced | None:
        """From a plan; None where it has no prediction."""
        if predicted is None:
            return None
        lengths = PricedLengths.of(_workload(predicted))
        calls = {name: seconds for name, seconds in predicted.calls.items() if seconds > 0}
        return cls(lengths=lengths, calls=calls) if lengths is not None or calls else None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something has left its range."""

    kind: str
    """``response mean``, ``long responses``, ``response cap`` or ``time of CALL``."""
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True, kw_only=True)
class CuSum:
    """Two-sided cumulative sums of a logarithm that may stay within +-`slack`.

    `add` returns 1 or -1 in the iteration in which a drift up or down becomes certain, else 0. After that it is quiet
    until `level` has been within half the slack for a while.
    """

    slack: float
    limit: float
    steps: int = 2
    """Iterations that it takes to be certain at least."""
    level: float = 0.0
    """Exponentially weighted mean; an old value's weight is halved in two iterations."""
    _up: float = 0.0
    _down: float = 0.0
    _calm: int = 0
    _reported: int = 0
    _seen: int = 0

    @property
    def reported(self) -> int:
        """1 or -1 while a reported drift lasts."""
        return self._reported

    def add(self, value: float) -> int:
        """Take one iteration's value."""
        self._seen += 1
        weight = max(1 - 0.5**0.5, 1 / self._seen)
        self.level += weight * (value - self.level)
        if self._reported:
            self._calm = self._calm + 1 if abs(self.level) <= self.slack / 2 else 0
            if self._calm < _CALM:
                return 0
            self._reported, self._calm, self._up, self._down = 0, 0, 0.0, 0.0
        most = self.limit / (self.steps - 0.5)
        self._up = max(0.0, self._up + min(value - self.slack, most))
        self._down = max(0.0, self._down + min(-value - self.slack, most))
        self._reported = 1 if self._up > self.limit else -1 if self._down > self.limit else 0
        return self._reported


@dataclass(slots=True)
class _LongShare:
    """Counts responses that are longer than planned for; certain when chance does not make so many."""

    expected: float
    _counts: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _reported: bool = False

    def add(self, number: int, longer: int) -> bool:
        """Take one iteration; whether it has just become certain."""
        self._counts.append((number, longer))
        evidence = self._evidence()
        if self._reported:
            self._reported = evidence > 1.0
            return False
        self._reported = evidence > _SURE
        return self._reported

    @property
    def share(self) -> float:
        """Of the responses in the last iterations."""
        return sum(longer for _, longer in self._counts) / sum(number for number, _ in self._counts)

    def _evidence(self) -> float:
        """-log of a bound on the probability of so many or more."""
        number, share = sum(number for number, _ in self._counts), self.share
        if share <= self.expected:
            return 0.0
        if self.expected <= 0:
            return math.inf
        rest = (1 - share) * math.log((1 - share) / (1 - self.expected)) if share < 1 else 0.0
        return number * (share * math.log(share / self.expected) + rest)


class DriftMonitor:
    """Compares a run with what its plan was priced for. For one thread.

    Args:
        priced: from the plan.
    """

    def __init__(self, priced: Priced) -> None:
        self._priced = priced
        self._mean: CuSum | None = None
        self._variance = 0.0
        """Of the logarithm of a batch's mean."""
        self._long = _LongShare(priced.lengths.long_share) if priced.lengths is not None else None
        self._beyond_cap = False
        self._calls = {
            name: CuSum(slack=_TIME_SLACK, limit=_TIME_LIMIT, steps=_TIME_STEPS) for name in priced.calls
        }
        self._iterations = 0

    def observe(self, lengths: Sequence[int], seconds: Mapping[str, float]) -> tuple[Notice, ...]:
        """Take one iteration.

        Args:
            lengths: of all its responses, in tokens; may be empty.
            seconds: by call, without what its ranks waited for others.

        Returns:
            What has just become certain.
        """
        self._iterations += 1
        notices = []
        if lengths and self._priced.lengths is not None:
            notices += list(self._lengths(lengths, self._priced.lengths))
        if self._iterations > 1:  # the first one allocates, compiles and connects
            notices += list(self._times(seconds))
        return tuple(notices)

    def _lengths(self, lengths: Sequence[int], priced: PricedLengths) -> Iterator[Notice]:
        if self._mean is None:
            self._variance = (priced.deviation / priced.mean) ** 2 / len(lengths)
            limit = max(_MEAN_LIMIT, _RARE * self._variance / (2 * _MEAN_SLACK))
            self._mean = CuSum(slack=_MEAN_SLACK, limit=limit)
        ratio = max(statistics.fmean(lengths), 1e-9) / priced.mean
        direction = self._mean.add(math.log(ratio) + self._variance / 2)  # the mean of a logarithm is lower
        if direction:
            level = priced.mean * math.exp(self._mean.level)
            better = "the plan's times no longer hold" if direction > 0 else "another plan may be faster"
            yield Notice(
                "response mean",
                f"drift: found responses of {level:.0f} tokens in the mean; the plan was priced for {priced.mean:.0f} "
                f"(+-10 %), so {better}. Search a new plan with these lengths.",
            )
        longest = max(lengths)
        if longest > priced.cap and not self._beyond_cap:
            yield Notice(
                "response cap",
                f"drift: found a response of {longest} tokens; the plan was priced for at most {priced.cap}, so its "
                "memory may not suffice. Search a new plan with the new cap, or lower algorithm.max_new_tokens.",
            )
        self._beyond_cap = self._beyond_cap or longest > priced.cap
        assert self._long is not None, "made with the lengths"
        if priced.long < priced.cap and self._long.add(
            len(lengths), sum(length > priced.long for length in lengths)
        ):
            yield Notice(
                "long responses",
                f"drift: found {self._long.share:.1%} of the responses longer than {priced.long} tokens, for which the "
                f"plan's memory was made; expected {priced.long_share:.1%}. It may not suffice: search a new plan with "
                "these lengths.",
            )

    def _times(self, seconds: Mapping[str, float]) -> Iterator[Notice]:
        for name, sums in self._calls.items():
            value = seconds.get(name, 0.0)
            if value <= 0:
                continue
            predicted = self._priced.calls[name]
            if not sums.add(math.log(value / predicted)):
                continue
            ratio = math.exp(sums.level)
            longer = self._mean is not None and self._mean.reported
            advice = (
                "Responses have drifted too: search a new plan with the new lengths."
                if longer
                else "Responses are as planned, so the prices are wrong: profile this machine anew, then search again."
            )
            yield Notice(
                f"time of {name}",
                f"drift: found {name} to take {predicted * ratio:.3g} s, {ratio:.2g} times the {predicted:.3g} s that "
                f"the plan was priced with; expected a ratio of 0.67 to 1.5. {advice}",
            )


def other_workload(predicted: Predicted | None, run: Mapping[str, int]) -> str | None:
    """How a run's fixed numbers differ from those that its plan was priced for; None if they do not.

    Args:
        predicted: of the plan.
        run: ``batch_size``, ``num_minibatches``, ``num_epochs``, ``max_new_tokens``; more than the planned cap is told
            of the latter.
    """
    if predicted is None:
        return None
    workload = _workload(predicted)
    lengths = PricedLengths.of(workload)
    planned = {name: workload[name] for name in run if name in workload}
    if lengths is not None and run.get("max_new_tokens", 0) > lengths.cap:
        planned["max_new_tokens"] = lengths.cap
    differing = [
        f"{name}={run[name]} (priced for {value})" for name, value in planned.items() if run[name] != value
    ]
    if not differing:
        return None
    return (
        f"plan: found {', '.join(differing)}; its prediction is for another workload. Price it anew, or search again "
        "with these numbers."
    )


def _workload(predicted: Predicted) -> Mapping[str, Any]:
    inputs = (predicted.model_extra or {}).get("inputs")
    workload = inputs.get("workload") if isinstance(inputs, Mapping) else None
    return workload if isinstance(workload, Mapping) else {}
