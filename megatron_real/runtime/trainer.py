"""The loop over iterations, on every rank: evaluate, run, report, save every so often, stop.

An iteration is reported before its checkpoint is written, so that a run which is killed and resumed has the
metrics of every iteration; the reported duration is without the checkpoint.

All ranks take the same decisions: they follow from the configuration, and the one that does not (the time
limit) is rank 0's and is spread at a fence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_real.errors import ConfigError
from megatron_real.runtime.data.dataset import Dataset
from megatron_real.runtime.evaluation.evaluator import Evaluator
from megatron_real.runtime.execution.executor import RankExecutor
from megatron_real.runtime.execution.plan_change import executor_for
from megatron_real.runtime.reports.reporting import MetricsSink, NoMetrics, SinkReporter

__all__ = ["TrainConfig", "TrainResult", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long a run goes on, and when it saves.

    Raises:
        ConfigError: a number is out of range, or saving is asked for without a folder.
    """

    num_iterations: int
    """Iterations of the whole run, those before a resume included."""
    first_iteration: int = 0
    """Where a resumed run goes on: the iteration of its checkpoint."""
    state: Mapping[str, Any] | None = None
    """Of the algorithm, from that checkpoint."""
    save_folder: Path | None = None
    """None saves nothing."""
    save_every: int = 0
    """Iterations between checkpoints; 0 saves at the end only. The last iteration is always saved."""
    time_limit_s: float | None = None
    """After this time the run stops at its next checkpoint; needs `save_every`."""
    samples_every: int = 0
    """Iterations from one to the next of which some sequences are written for people to read; 0 writes none."""
    num_samples: int = 0
    """How many of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_iteration <= self.num_iterations:
            raise ConfigError(
                f"train: found first_iteration={self.first_iteration} of "
                f"num_iterations={self.num_iterations}; expected "
                "0 <= first_iteration <= num_iterations. Raise num_iterations to train on."
            )
        if self.save_every < 0:
            raise ConfigError(
                f"train: found save_every={self.save_every}; expected 0 (only at the end) or more."
            )
        if (self.save_every or self.time_limit_s is not None) and self.save_folder is None:
            raise ConfigError("train: found save_every or time_limit_s without save_folder; name the folder.")
        if self.time_limit_s is not None and not self.save_every:
            raise ConfigError(
                "train: found time_limit_s without save_every; a run stops at a checkpoint, so set both."
            )

    def samples_of(self, iteration: int) -> int:
        """How many sequences of this iteration are written for people to read."""
        return self.num_samples if self.samples_every and iteration % self.samples_every == 0 else 0

    def saves_after(self, iteration: int) -> bool:
        """Whether a checkpoint is written at the end of this iteration."""
        if self.save_folder is None:
            return False
        done = iteration + 1
        return done == self.num_iterations or bool(self.save_every and done % self.save_every == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    next_iteration: int
    """The first iteration that was not run."""
    stopped_by_time: bool
    duration_s: float


def train(
    config: TrainConfig,
    executor: RankExecutor,
    data: Dataset,
    metrics: MetricsSink | None = None,
    *,
    evaluator: Evaluator | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Run iterations `first_iteration` to `num_iterations`; every rank calls with the same arguments.

    Collective over WORLD. At the iteration of its `change` another executor takes the place of `executor`.

    Args:
        config: how long, and when to save.
        executor: of this rank.
        data: of the run.
        metrics: gets what this rank reports.
        evaluator: makes the evaluations, with the executors' `RankExecutor.evaluation`; None makes none.
        clock: seconds, for the time limit.

    Raises:
        RealError: as `RankExecutor.run_iteration`.
    """
    reporter = SinkReporter(sink=metrics or NoMetrics(), rank=executor.rank, clock=clock)
    began_s = clock()
    if config.state is not None:
        executor.algorithm.load_state_dict(config.state)
    stopped = False
    iteration = config.first_iteration
    while iteration < config.num_iterations and not stopped:
        executor = executor_for(executor, iteration)
        if evaluator is not None:
            evaluator.before(iteration, executor, reporter)
        reporter.start_s = clock()
        reporter.tells_lengths = _tells_lengths(executor)
        save = config.save_folder if config.saves_after(iteration) else None
        executor.run_iteration(
            iteration,
            data.batch(iteration),
            save=save,
            reporter=reporter,
            num_samples=config.samples_of(iteration),
        )
        if save is not None:
            if executor.rank == 0:
                logger.info("iteration %d: checkpoint written to %s", iteration + 1, save)
            stopped = config.time_limit_s is not None and _is_over(
                executor, clock() - began_s, config.time_limit_s
            )
        iteration += 1
    if evaluator is not None and iteration == config.num_iterations:
        evaluator.before(iteration, executor, reporter)
        reporter.sink.end_iteration(iteration)
    executor.transfers.fence()
    return TrainResult(
        next_iteration=iteration,
        stopped_by_time=stopped and iteration < config.num_iterations,
        duration_s=clock() - began_s,
    )


def _tells_lengths(executor: RankExecutor) -> bool:
    program = executor.program
    generation = program.graph.generation()
    return generation is not None and executor.rank == program.plan.calls[generation.name].mesh.start


def _is_over(executor: RankExecutor, elapsed_s: float, limit_s: float) -> bool:
    """Whether rank 0's time is up: asked right after a checkpoint, a fence. Collective over WORLD."""
    word = executor.transfers.broadcast_bytes(b"stop" if elapsed_s >= limit_s else b"more", src=0)
    return word == b"stop"
