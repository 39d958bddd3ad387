"""What a rank tells of an iteration, and to whom.

The executor knows a `Reporter`, which gets the metrics before a checkpoint says that the iteration is done; the loop
gives it a `SinkReporter`, which publishes them name by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_real.runtime.reports.metrics import EVALUATION, RESPONSE, REWARDS, SAMPLES, SECONDS

__all__ = ["IterationMetrics", "MetricsSink", "NoMetrics", "NoReporter", "Reporter", "SinkReporter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMetrics:
    """What this rank reports of an iteration."""

    batch: dict[str, float]
    """Of the whole batch, such as ``reward``; on the reporting rank of each train call, with the same values.
    """
    calls: dict[str, dict[str, Any]]
    """Call -> name -> number, on the reporting rank of that call."""
    num_tokens: int = 0
    """Tokens of all sequences of the iteration, where their lengths are known."""
    response_lengths: tuple[int, ...] = ()
    """Of all sequences, where they are known."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What this rank spent in each call, waiting for others in it included."""
    samples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sequences to read, as `CallRunner.samples` has them."""
    reward_counts: Mapping[str, float] = field(default_factory=dict)
    """What happened where this rank called reward functions (`Scorer.take_counts`)."""


class Reporter(Protocol):
    """Takes the metrics of an iteration from the executor, before a checkpoint says that the iteration is done."""

    def report(self, iteration: int, metrics: IterationMetrics) -> None:
        """All calls have run; called once per iteration, before its save. Must not block."""
        ...

    def settle(self, iteration: int) -> None:
        """Every rank has reported, and the save is about to be written; may wait a little, must not fail."""
        ...


class NoReporter:
    """A `Reporter` that tells nobody."""

    def report(self, iteration: int, metrics: IterationMetrics) -> None:
        pass

    def settle(self, iteration: int) -> None:
        pass


class MetricsSink(Protocol):
    """Takes what this rank reports (`megatron_real.runtime.reports.reports.MetricsPublisher`)."""

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        """Metrics of a call, or (None) of the whole batch. Must not block."""
        ...

    def end_iteration(self, iteration: int) -> None:
        """This rank has published all of this iteration. Must not block."""
        ...

    def wait_written(self, iteration: int) -> object:
        """Every rank has ended this iteration: wait a little until its metrics are on disk. Must not fail."""
        ...


class NoMetrics:
    """A `MetricsSink` that keeps nothing."""

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        pass

    def end_iteration(self, iteration: int) -> None:
        pass

    def wait_written(self, iteration: int) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class SinkReporter:
    """Publishes what the executor reports (`Reporter`), and what an evaluation does."""

    sink: MetricsSink
    rank: int
    clock: Callable[[], float] = time.monotonic
    tells_lengths: bool = False
    """One rank tells the lengths of the sampled responses: the first of the generating ones."""
    start_s: float = 0.0
    """When the iteration began."""

    def report(self, iteration: int, metrics: IterationMetrics) -> None:
        if metrics.batch:
            self.sink.publish(iteration, None, metrics.batch)
        for call, values in metrics.calls.items():
            self.sink.publish(iteration, call, values)
        if self.tells_lengths:
            self.sink.publish(iteration, RESPONSE, {"lengths": metrics.response_lengths})
        if metrics.seconds:
            self.sink.publish(
                iteration, SECONDS, {f"{call}/{self.rank}": value for call, value in metrics.seconds.items()}
            )
        if metrics.samples:
            self.sink.publish(iteration, SAMPLES, metrics.samples)
        if metrics.reward_counts:
            self.sink.publish(iteration, REWARDS, {str(self.rank): metrics.reward_counts})
        if self.rank == 0:
            timing = {"duration_s": self.clock() - self.start_s, "tokens": metrics.num_tokens}
            self.sink.publish(iteration, "iteration", timing)
        self.sink.end_iteration(iteration)

    def evaluated(
        self,
        iteration: int,
        metrics: Mapping[str, float],
        samples: Mapping[str, Mapping[str, Any]],
        reward_counts: Mapping[str, float],
    ) -> None:
        """Publish an evaluation before `iteration`: its numbers, which all ranks have, and what this rank adds."""
        if self.rank == 0:
            self.sink.publish(iteration, EVALUATION, metrics)
        if samples:
            self.sink.publish(iteration, f"{EVALUATION}/{SAMPLES}", samples)
        if reward_counts:
            self.sink.publish(iteration, f"{EVALUATION}/{REWARDS}", {str(self.rank): reward_counts})

    def settle(self, iteration: int) -> None:
        if self.rank == 0:
            self.sink.wait_written(iteration)
