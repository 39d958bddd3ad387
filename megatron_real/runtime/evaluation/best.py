"""The best checkpoint of a run: a folder of its own, and at no moment none.

``best/`` has a Megatron checkpoint of each trained model and ``best.json``. The next one is written beside it, as
``best.new/``, and takes its place when it is complete: ``best.json`` is its last file.

Invariants (tests/unit/runtime/test_best.py):
    - whenever the writer is killed, a complete checkpoint is found afterwards, the former best or the new one.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_real.backend import Goal
from megatron_real.errors import ConfigError
from megatron_real.runtime.run_state import write_atomically

__all__ = ["Best", "BestCheckpoint", "recover"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What ``best.json`` says."""

    iteration: int
    """Iterations that the models were trained for."""
    metric: str
    value: float
    error: float | None = None
    """Standard error of the value."""

    @classmethod
    def read(cls, folder: Path) -> Best | None:
        """Of the best checkpoint in `folder`; None where there is none.

        Raises:
            ConfigError: ``best.json`` is not one.
        """
        path = next((path for path in _places(folder) if path.exists()), None)
        if path is None:
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: found no best.json of a run ({error}). Remove its folder.") from error


class BestCheckpoint:
    """Keeps the best checkpoint of a run in a folder; on every rank alike.

    Args:
        folder: of the best checkpoint.
        goal: says which of two values is better.
        known: the best so far, as of `Best.read` when a run is resumed.
    """

    def __init__(self, folder: Path, goal: Goal, known: Best | None = None) -> None:
        self.folder = folder
        self.known = known
        self._goal = goal

    def beaten_by(self, value: float) -> bool:
        """Whether `value` is better than all before it; NaN is better than none."""
        if self.known is None:
            return not math.isnan(value)
        return value > self.known.value if self._goal.higher_is_better else value < self.known.value

    def keep(self, best: Best, write: Callable[[Path], None], *, first_rank: bool) -> None:
        """Write a checkpoint, and let it take the place of the one before. Collective if `write` is.

        Args:
            best: what the checkpoint is.
            write: writes the checkpoint into a new folder.
            first_rank: the rank that moves folders.

        Raises:
            OSError: the folder cannot be written.
        """
        new = _new(self.folder)
        if first_rank:
            recover(self.folder)
            shutil.rmtree(new, ignore_errors=True)
        write(new)
        if first_rank:
            write_atomically(new / "best.json", json.dumps(asdict(best), indent=1) + "\n")
            recover(self.folder)
        self.known = best


def _new(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.new")


def _places(folder: Path) -> tuple[Path, Path]:
    """Where ``best.json`` is: of a new checkpoint that is complete, else of the one that it is to replace."""
    return _new(folder) / "best.json", folder / "best.json"


def recover(folder: Path) -> None:
    """Let a new checkpoint take its place if it is complete, also where that was begun. One process."""
    new, old = _new(folder), folder.with_name(f"{folder.name}.old")
    if (new / "best.json").exists():
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
