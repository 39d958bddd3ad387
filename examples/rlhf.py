"""RLHF from nothing on a CPU: pretrain, SFT, a reward model from preferences, PPO with it, and what came of it.

    python examples/rlhf.py                       # what `make rlhf` runs
    python examples/rlhf.py --output runs/mine    # elsewhere; a stage that is done there is not repeated

The task is to write a word in capitals (capitals.py). Demonstrations are by a writer who uses them for six letters of
ten. Preference pairs are made by the true rule, and PPO sees only the reward *model* that learned from them. At the end
both actors answer prompts that no stage has seen, and the true rule says which answer is better.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

SEED = 7
HELD_OUT_PROMPTS = 1_000

console = Console(highlight=False)

Facts = dict[str, Any]


class Pipeline:
    """Stages one after another, each with a folder; one that is done, as it is set now, is not repeated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ""
        self.seconds = 0.0

    def stage(self, name: str, settings: Mapping[str, Any], work: Callable[[Path], Facts]) -> Facts:
        """Do `work` in the stage's folder unless that was done with these settings, after the same stages.

        Returns:
            The facts that `work` returned, now or then; with ``seconds``.
        """
        folder = self.folder / name
        described = json.dumps([self._key, name, settings], default=str)
        self._key = hashlib.sha256(described.encode()).hexdigest()[:16]
        done = folder / "done.json"
        if done.exists() and (before := json.loads(done.read_text()))["key"] == self._key:
            console.print(f"[bold]{name}[/bold]: done before")
            return before
        console.print(f"[bold]{name}[/bold]: {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started_s = time.monotonic()
        facts = {"key": self._key, **work(folder), "seconds": time.monotonic() - started_s}
        partial = done.with_suffix(".partial")
        partial.write_text(json.dumps(facts))
        partial.rename(done)
        return facts
