"""Writes the metrics of a run: one JSON line per iteration, and TensorBoard where it is installed.

A row is flat: names of the whole batch as they are (``reward``, ``kl``), those of a call behind its name
(``actor_train/loss``). Lists with one number per optimizer step (``actor_train/steps/loss``) are in the JSON
only.

Invariant (tests/unit/runtime/test_metrics.py): a resumed run leaves one row per iteration, that of its last
try.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_real.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsWriter", "flatten", "read_metrics"]

logger = logging.getLogger(__name__)


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


class MetricsWriter:
    """Writes ``metrics.jsonl`` and TensorBoard events into a folder. One process per run has one.

    Args:
        folder: made if it is not there.
        first_iteration: rows of this iteration and later ones, which a run wrote that is now resumed, are
            dropped.
        tensorboard: write events as well.
    """

    def __init__(self, folder: Path, *, first_iteration: int = 0, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = (
            [row for row in read_metrics(self.path) if row["iteration"] < first_iteration]
            if self.path.exists()
            else []
        )
        self._file = self.path.open("w", buffering=1, encoding="utf-8")
        for row in kept:
            self._file.write(json.dumps(row) + "\n")
        self._events = _open_events(folder / "tensorboard", first_iteration) if tensorboard else None

    def write(self, iteration: int, metrics: Mapping[str | None, Mapping[str, Any]]) -> dict[str, Any]:
        """Write one iteration's metrics by call.

        Returns:
            The row as it was written.
        """
        row = {"iteration": iteration, **flatten(metrics)}
        self._file.write(json.dumps(row) + "\n")
        if self._events is not None:
            for name, value in row.items():
                if name != "iteration" and isinstance(value, (int, float)):
                    self._events.add_scalar(name, value, iteration)
        return row

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _open_events(folder: Path, first_iteration: int) -> SummaryWriter | None:
    try:
        # Imported late: it takes a second, and is not installed everywhere.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("metrics: tensorboard is not installed; only metrics.jsonl is written.")
        return None
    return SummaryWriter(log_dir=str(folder), purge_step=first_iteration or None)
