"""Rows of metrics to Weights & Biases, where it is installed and wanted.

A resumed run goes on in the same W&B run, whose id stands in ``wandb_run.txt``. Rows have ``iteration`` for their axis:
those that a killed run had already sent are sent again and drawn over themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_real.runtime.run_state import write_atomically

__all__ = ["WandbTracker", "open_wandb"]

logger = logging.getLogger(__name__)


class WandbTracker:
    """A `Tracker` of one W&B run."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("*", step_metric="iteration")

    def log(self, row: Mapping[str, float]) -> None:
        """Send a row; W&B's own thread does it."""
        self._run.log(dict(row))

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_wandb(
    given: Mapping[str, Any], folder: Path, *, resume: bool, config: Mapping[str, Any]
) -> WandbTracker | None:
    """Open a run, or go on with the one that `folder` had; None, with a warning, where wandb is not installed.

    Args:
        given: arguments of ``wandb.init``, such as ``project``.
        folder: of the run.
        resume: whether the run is resumed.
        config: the run's options, to be shown with it.
    """
    try:
        import wandb  # imported late: it is no requirement, and takes a while
    except ImportError:
        logger.warning(
            "wandb: not installed; its rows are in metrics.jsonl. Install it with pip install wandb."
        )
        return None
    path = folder / "wandb_run.txt"
    name = path.read_text(encoding="utf-8").strip() if resume and path.exists() else None
    known = {} if name is None else {"id": name, "resume": "allow"}
    run = wandb.init(dir=str(folder), config=dict(config), **{**given, **known})
    write_atomically(path, f"{run.id}\n")
    return WandbTracker(run)
