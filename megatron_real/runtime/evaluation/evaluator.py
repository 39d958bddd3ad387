"""Evaluations of a run: the goal on held-out data, between two iterations, under the plan of the run.

Where responses are generated, the generation and what scores it run on held-out prompts; elsewhere the inferences and
the loss of each train call. An evaluation before iteration n is of the models that iteration n starts with. It leaves
nothing behind: draws have keys of their own, models and algorithm are as they were.

Invariants (tests/distributed/test_evaluation.py):
    - a run has the same numbers with evaluations and without;
    - an evaluation has the same numbers whenever it is repeated on the same weights;
    - when it is made depends on the iteration alone, so that a resumed run makes those that the other would have made.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_real.backend import Goal
from megatron_real.dataflow import Call, Graph
from megatron_real.errors import PlanError
from megatron_real.runtime.data.dataset import DataBatch
from megatron_real.runtime.evaluation.best import Best, BestCheckpoint
from megatron_real.runtime.evaluation.estimates import Estimate, Sums, mean_of
from megatron_real.runtime.execution.calls import HeldOut, reporting_rank, spread
from megatron_real.runtime.execution.executor import RankExecutor
from megatron_real.runtime.execution.observers import NoTrace, Observers
from megatron_real.runtime.reports.reporting import SinkReporter
from megatron_real.trace import EVALUATION_SPAN

__all__ = ["EvaluationConfig", "Evaluator", "evaluated_calls", "observed"]

logger = logging.getLogger(__name__)


def evaluated_calls(graph: Graph, goal: Goal) -> tuple[str, ...]:
    """The calls that run in an evaluation.

    Raises:
        PlanError: the graph generates responses, and no call makes the goal's key.
    """
    if not any(graph.generation(sequences) for sequences in graph.sequence_sets):
        return tuple(call.name for call in graph.calls)
    scoring = next((call for call in graph.calls if goal.key in call.outputs), None)
    if scoring is None:
        raise PlanError(
            f"graph {graph.name}: found no call that makes {goal.key!r}, the key of the algorithm's goal; expected one."
        )
    needed: dict[str, Call] = {}
    left = [scoring]
    while left:
        call = left.pop()
        needed[call.name] = call
        left += graph.parents(call)
    return tuple(call.name for call in graph.calls if call.name in needed)


def _scores(graph: Graph) -> bool:
    """Whether an evaluation with this graph scores responses, and does not take the loss of what the data set has."""
    return not any(call.trains for call in graph.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """Tells progress, and asks for faults, under names of the evaluation."""

    observers: Observers

    def enter(self, iteration: int, step_index: int, name: str) -> None:
        self.observers.progress.enter(iteration, step_index, f"eval:{name}")

    def leave(self) -> None:
        self.observers.progress.leave()

    def before(self, iteration: int, name: str, index: int) -> None:
        self.observers.faults.before(iteration, f"eval:{name}", index)


def observed(observers: Observers) -> Observers:
    """Who watches the executor of an evaluation: it has one span, whatever it does."""
    named = _Named(observers=observers)
    return Observers(tracer=NoTrace(), progress=named, faults=named)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When a run is evaluated, and what is told of it."""

    num_iterations: int
    """Of the whole run: one evaluation follows them, one precedes them."""
    every: int = 0
    """Iterations from one to the next; 0 makes those two alone."""
    greedy: bool = False
    """Take the likeliest token, whatever the algorithm samples with."""
    num_samples: int = 0
    """Sequences to write for people to read."""

    def due(self, iteration: int) -> bool:
        """Whether one is made before `iteration`."""
        return iteration in (0, self.num_iterations) or (self.every > 0 and iteration % self.every == 0)


@dataclass(slots=True, kw_only=True)
class _Found:
    """What this rank has seen in the batches of an evaluation."""

    goals: dict[int, float] = field(default_factory=dict)
    """By sequence, counted through all batches: those that this rank tells of."""
    lengths: dict[int, float] = field(default_factory=dict)
    count: int = 0
    """Sequences of all ranks."""
    measured: dict[str, Sums] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    reward_counts: Counter[str] = field(default_factory=Counter)


class Evaluator:
    """Evaluates a run.

    Args:
        config: when and how.
        goal: of the algorithm.
        batches: held-out data; the executors' plans can cut each of them.
        best: keeps the best checkpoint; None keeps none.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        goal: Goal,
        batches: Sequence[DataBatch],
        best: BestCheckpoint | None = None,
    ) -> None:
        self._config = config
        self._goal = goal
        self._batches = tuple(batches)
        self._best = best

    def before(self, iteration: int, executor: RankExecutor, reporter: SinkReporter) -> None:
        """Make the evaluation that is due before `iteration`, if one is.

        Collective over WORLD. The run's metrics get the numbers, and the best checkpoint is kept.

        Raises:
            RealError: as `RankExecutor.run_iteration`.
        """
        if not self._config.due(iteration):
            return
        began_s = time.monotonic()
        with executor.observers.tracer.span(EVALUATION_SPAN, "other", iteration):
            found, metrics, goal = self._evaluate(iteration, executor)
            if goal is not None and self._best is not None and self._best.beaten_by(goal.mean):
                self._keep(iteration, goal, executor, self._best)
        metrics["duration_s"] = time.monotonic() - began_s
        reporter.evaluated(iteration, metrics, found.samples, found.reward_counts)

    def _evaluate(
        self, iteration: int, executor: RankExecutor
    ) -> tuple[_Found, dict[str, float], Estimate | None]:
        walker = executor.evaluation
        assert walker is not None, "an executor of a run with evaluations has one"
        scores = _scores(walker.program.graph)
        state = copy.deepcopy(executor.algorithm.state_dict())
        found = _Found()
        for index, data in enumerate(self._batches):
            self._run(
                walker,
                iteration,
                HeldOut(index=index, metric=self._goal.metric, greedy=self._config.greedy),
                data,
                found,
            )
        if not scores:  # then batches were prepared
            executor.algorithm.load_state_dict(state)
        executor.transfers.fence()
        walker.transfers.fence()
        metrics, goal = (self._of_responses if scores else self._of_losses)(walker, found)
        if goal is not None:
            metrics[self._goal.metric] = goal.mean
            if goal.error is not None:
                metrics[f"{self._goal.metric}_error"] = goal.error
        return found, metrics, goal

    def _run(
        self, walker: RankExecutor, iteration: int, held_out: HeldOut, data: DataBatch, found: _Found
    ) -> None:
        """Evaluate a batch, and take what this rank can tell of it."""
        state, calls = walker.evaluate(iteration, data, held_out)
        size = len(data.records)
        if _scores(walker.program.graph):
            told = calls.told(self._goal.key, state)
            found.goals |= {found.count + i: float(value) for i, value in told.items()}
            if told:
                lengths = state.known_lengths(walker.program.graph.producer(self._goal.key))
                found.lengths |= {found.count + i: float(lengths.response[i]) for i in told}
            if held_out.index == 0:
                found.samples = calls.samples(spread(size, self._config.num_samples), state)
        for call, sums in state.measured.items():
            found.measured[call] = found.measured[call] + sums if call in found.measured else sums
        found.reward_counts.update(state.reward_counts)
        found.count += size

    def _of_responses(self, walker: RankExecutor, found: _Found) -> tuple[dict[str, float], Estimate | None]:
        values = walker.transfers.gather_numbers(found.goals, found.count)
        lengths = walker.transfers.gather_numbers(found.lengths, found.count)
        missing = sum(value != value for value in values)
        metrics = {"response_length": sum(lengths) / found.count, "reward_missing": missing / found.count}
        return metrics, mean_of(values)

    def _of_losses(self, walker: RankExecutor, found: _Found) -> tuple[dict[str, float], Estimate | None]:
        metrics: dict[str, float] = {}
        goal: Estimate | None = None
        trains = [call for call in walker.program.graph.calls if call.trains]
        for call in trains:
            source = reporting_rank(walker.program.plan.calls[call.name])
            mine = found.measured.get(call.name)
            payload = b"" if mine is None else json.dumps([mine.count, dict(mine.totals)]).encode()
            count, totals = json.loads(walker.transfers.broadcast_bytes(payload, source))
            sums = Sums(count=count, totals=totals)
            prefix = f"{call.name}/" if len(trains) > 1 else ""
            metrics |= {f"{prefix}{name}": value for name, value in sums.means().items()}
            goal = goal or sums.estimate(self._goal.metric)
        return metrics, goal

    def _keep(self, iteration: int, goal: Estimate, executor: RankExecutor, best: BestCheckpoint) -> None:
        first = executor.rank == 0
        executor.observers.progress.enter(iteration, -1, "eval:save")
        executor.observers.faults.before(iteration, "eval:save", -1)
        found = Best(iteration=iteration, metric=self._goal.metric, value=goal.mean, error=goal.error)
        best.keep(found, lambda folder: executor.checkpoint(folder, iteration), first_rank=first)
        executor.observers.progress.leave()
        if first:
            logger.info(
                "iteration %d: the best %s so far; checkpoint written to %s",
                iteration,
                self._goal.metric,
                best.folder,
            )
