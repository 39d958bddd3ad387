"""Writes sequences for people to read: ``samples.jsonl``, a line for each prompt with its response and reward.

``{"iteration": 20, "of": "evaluation", "sequence": 0, "prompt": "...", "response": "...", "rewards": 0.5}``; where
greedy responses are scored beside the sampled ones, ``greedy_response`` and ``greedy_rewards`` as well. A reward that
did not come is null. Samples of an evaluation have the iteration before which it was made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_real.runtime.run_state import write_atomically

__all__ = ["SampleWriter"]


class SampleWriter:
    """Writes into a folder. One process per run has one.

    Args:
        folder: of the run, which is there.
        first_iteration: lines of this iteration and later ones, which a run wrote that is now resumed, are dropped.
    """

    def __init__(self, folder: Path, *, first_iteration: int = 0) -> None:
        self.path = folder / "samples.jsonl"
        kept = [line for line in _lines(self.path) if json.loads(line)["iteration"] < first_iteration]
        write_atomically(self.path, "".join(kept))
        self._file = self.path.open("a", buffering=1, encoding="utf-8")

    def write(self, iteration: int, of: str, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what ranks told: ``SEQUENCE/CALL`` -> texts and scores, those of a sequence in one line."""
        lines: dict[int, dict[str, Any]] = {}
        for name, values in told.items():
            lines.setdefault(int(name.partition("/")[0]), {}).update(values)
        for sequence, values in sorted(lines.items()):
            line = {"iteration": iteration, "of": of, "sequence": sequence}
            line |= {name: None if _is_nan(value) else value for name, value in values.items()}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _lines(path: Path) -> Iterator[str]:
    """Whole lines; one that a killed writer left unfinished is no line."""
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")  # the writer was killed inside a character
        # Not splitlines: U+2028 and its like may stand in a text.
        yield from (line + "\n" for line in text.split("\n")[:-1])
