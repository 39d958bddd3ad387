"""Writes the metrics of a run: one JSON line per iteration, TensorBoard where it is installed, and what else is wanted.

A row is flat: names of the whole batch as they are (``reward``, ``kl``), those of a call behind its name
(``actor_train/loss``). Lists with one number per optimizer step (``actor_train/steps/loss``) are in the JSON
only. Of the responses there are statistics (``response/p99``), of the calls their seconds (``seconds/actor_gen``), of
rewards that did not come their number by reason (``rewards/missing/late``). An evaluation (``eval/reward``) stands in
the row of the iteration before which it was made, so that a row tells of one state of the models; that after the last
iteration has a row of its own.

Invariants (tests/unit/runtime/test_metrics.py, tests/unit/runtime/test_drift.py):
    - a resumed run leaves one row per iteration, that of its last try;
    - a call's seconds are those of `trace.attribute_waits`: what its ranks waited for each other does not count.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from megatron_real.dataflow import CallType
from megatron_real.errors import ConfigError
from megatron_real.layout import rank_groups
from megatron_real.program import Program
from megatron_real.runtime.reports.drift import DriftMonitor, Priced
from megatron_real.runtime.reports.samples import SampleWriter
from megatron_real.runtime.rewards.functions import reward_metrics
from megatron_real.runtime.run_state import write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "EVALUATION",
    "RESPONSE",
    "REWARDS",
    "SAMPLES",
    "SECONDS",
    "IterationRecorder",
    "MetricsWriter",
    "Tracker",
    "fold",
    "flatten",
    "goal_value",
    "meetings",
    "quantile",
    "read_metrics",
]

logger = logging.getLogger(__name__)

RESPONSE = "response"
"""Under this name the generating ranks tell ``lengths``, of all responses of an iteration."""
SECONDS = "seconds"
"""Under this name every rank tells what it spent in its calls: ``actor_gen/3`` is rank 3's."""
REWARDS = "rewards"
"""Under this name ranks that call reward functions tell what happened: ``3`` is what rank 3 counted."""
SAMPLES = "samples"
"""Under this name ranks tell sequences to read: see `SampleWriter`."""
EVALUATION = "eval"
"""Under this name rank 0 tells the numbers of an evaluation; its samples and rewards stand behind it."""

_KEPT_LENGTHS = 8192

Meetings = Mapping[str, Sequence[Sequence[int]]]
"""By call: the groups of ranks that go through it together. Groups do not wait for each other."""


def meetings(program: Program) -> Meetings:
    """Who waits for whom in a call: replicas of a model meet in training only, ranks of a function never."""
    result: dict[str, tuple[tuple[int, ...], ...]] = {}
    for call in program.graph.calls:
        placement = program.plan.calls[call.name]
        mesh, layout = placement.mesh, placement.parallel
        if call.type is CallType.TRAIN:
            result[call.name] = (tuple(mesh.ranks),)
        else:
            groups = rank_groups(mesh, layout, "tp", "cp", "pp") if call.model else [(r,) for r in mesh.ranks]
            result[call.name] = tuple(tuple(group) for group in groups)
    return result


def fold(
    metrics: Mapping[str | None, Mapping[str, Any]], together: Meetings
) -> dict[str | None, dict[str, Any]]:
    """Metrics with what ranks tell of responses and times brought together.

    Of ranks that meet in a call, the last one to come tells how long it takes: it waits for nobody, and spends the
    least time. A call whose groups do not meet takes as long as the slowest of them.
    """
    result = {call: dict(values) for call, values in metrics.items()}
    lengths = result.pop(RESPONSE, {}).get("lengths", ())
    if lengths:
        result[RESPONSE] = {
            "mean": statistics.fmean(lengths),
            "p50": quantile(lengths, 0.5),
            "p99": quantile(lengths, 0.99),
            "max": max(lengths),
        }
    for name in (REWARDS, f"{EVALUATION}/{REWARDS}"):
        if name in result:
            result[name] = reward_metrics(result[name].values())
    told = result.pop(SECONDS, {})
    if told:
        spent = {
            call: [[told.get(f"{call}/{rank}", math.nan) for rank in group] for group in groups]
            for call, groups in together.items()
        }
        result[SECONDS] = {
            call: max(map(min, groups))
            for call, groups in spent.items()
            if not any(math.isnan(value) for group in groups for value in group)
        }
    return result


def quantile(values: Iterable[float], level: float) -> float:
    """The least of `values` that at least `level` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(level * len(ordered) - 1e-9) - 1)]


def flatten(metrics: Mapping[str | None, Mapping[str, Any]]) -> dict[str, Any]:
    """One flat row from metrics by call; None or "" holds those of the whole batch."""
    row: dict[str, Any] = {}
    for call, values in sorted(metrics.items(), key=lambda item: item[0] or ""):
        for name, value in values.items():
            key = f"{call}/{name}" if call else name
            if isinstance(value, Mapping):
                row.update({f"{key}/{inner}": number for inner, number in value.items()})
            else:
                row[key] = value
    return row


def goal_value(row: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a flat row: the batch's, or else the one that a call reports; None where it is not."""
    names = (name for name in row if name.count("/") == 1 and not name.startswith(f"{EVALUATION}/"))
    name = metric if metric in row else next((n for n in names if n.endswith(f"/{metric}")), None)
    return None if name is None else float(row[name])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, in order; a last line that is cut off is ignored.

    Raises:
        ConfigError: it cannot be read, or a line before the last is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Give the metrics.jsonl of a run."
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # the writer was killed
            raise ConfigError(f"{path}:{number}: found {line[:60]!r}; expected a JSON object.") from error
    return rows


class Tracker(Protocol):
    """Where else rows go (`megatron_real.runtime.reports.wandb_tracker`)."""

    def log(self, row: Mapping[str, float]) -> None:
        """The numbers of a row, ``iteration`` among them."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class MetricsWriter:
    """Writes ``metrics.jsonl`` and TensorBoard events into a folder. One process per run has one.

    Args:
        folder: made if it is not there.
        first_iteration: rows of this iteration and later ones, which a run wrote that is now resumed, are
            dropped.
        tensorboard: write events as well.
        trackers: get each row as well.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_iteration: int = 0,
        tensorboard: bool = True,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = (
            [row for row in read_metrics(self.path) if row["iteration"] < first_iteration]
            if self.path.exists()
            else []
        )
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        self._events = _open_events(folder / "tensorboard", first_iteration) if tensorboard else None
        self._trackers = tuple(trackers)

    def write(self, iteration: int, metrics: Mapping[str | None, Mapping[str, Any]]) -> dict[str, Any]:
        """Write one iteration's metrics by call.

        Returns:
            The row as it was written.
        """
        row = {"iteration": iteration, **flatten(metrics)}
        self._file.write(json.dumps(row) + "\n")
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        if self._events is not None:
            for name, value in numbers.items():
                if name != "iteration":
                    self._events.add_scalar(name, value, iteration)
        for tracker in self._trackers:
            tracker.log(numbers)
        return row

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class IterationRecorder:
    """What the master does with a complete iteration: writes its row, and says where the run leaves its plan's range.

    The lengths of the last responses go to ``response_lengths.json`` for whoever searches a plan for them: when drift
    is reported, and at the end.

    Args:
        writer: of the run.
        program: that the run executes.
        later: other programs that it executes, by their first iteration.
        samples: takes the sequences to read; None drops them.
    """

    def __init__(
        self,
        writer: MetricsWriter,
        program: Program,
        *,
        later: Mapping[int, Program] | None = None,
        samples: SampleWriter | None = None,
    ) -> None:
        self._writer = writer
        self._samples = samples
        self._later = dict(later or {})
        self._lengths: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        self._follow(program)

    def _follow(self, program: Program) -> None:
        self._together = meetings(program)
        priced = Priced.of(program.plan.predicted)
        self._monitor = DriftMonitor(priced) if priced is not None else None

    def take(self, iteration: int, metrics: Mapping[str | None, Mapping[str, Any]]) -> None:
        """An iteration is complete; they come in order."""
        for first in sorted(first for first in self._later if first <= iteration):
            self._follow(self._later.pop(first))
        told = {
            name: values for name, values in metrics.items() if name is None or not name.endswith(SAMPLES)
        }
        if self._samples is not None:
            self._samples.write(iteration, "evaluation", metrics.get(f"{EVALUATION}/{SAMPLES}", {}))
            self._samples.write(iteration, "training", metrics.get(SAMPLES, {}))
        lengths = told.get(RESPONSE, {}).get("lengths", ())
        self._lengths.extend(lengths)
        folded = fold(told, self._together)
        self._writer.write(iteration, folded)
        if self._monitor is None or SECONDS not in told:
            return
        notices = self._monitor.observe(lengths, folded.get(SECONDS, {}))
        for notice in notices:
            logger.warning("iteration %d: %s", iteration + 1, notice)
        if notices:
            self._write_lengths()

    def close(self) -> None:
        """Write what is left, and close the writer."""
        self._write_lengths()
        self._writer.close()
        if self._samples is not None:
            self._samples.close()

    def _write_lengths(self) -> None:
        if self._lengths:
            path = self._writer.path.with_name("response_lengths.json")
            path.write_text(json.dumps(list(self._lengths)) + "\n")


def _open_events(folder: Path, first_iteration: int) -> SummaryWriter | None:
    try:
        # Imported late: it takes a second, and is not installed everywhere.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("metrics: tensorboard is not installed; only metrics.jsonl is written.")
        return None
    return SummaryWriter(log_dir=str(folder), purge_step=first_iteration or None)
