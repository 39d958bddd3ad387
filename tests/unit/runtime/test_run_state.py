"""What a start notices of the options of the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_real.runtime.run_state import take_options

OPTIONS: dict[str, Any] = {
    "seed": 1,
    "resume": False,
    "plan": "a.json",
    "data": {"batch_size": 8, "columns": {}},
    "algorithm": {"name": "ppo"},
    "liveness": {"dead_after_s": 12.0},
}


def test_only_what_losses_depend_on_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    assert take_options(folder, OPTIONS) == []
    assert take_options(folder, OPTIONS) == []
    other = OPTIONS | {"resume": True, "plan": "b.json", "liveness": {"dead_after_s": 30.0}}
    assert take_options(folder, other) == []
    changed = other | {"data": {"batch_size": 16, "columns": {}}, "algorithm": {"name": "ppo", "gamma": 0.9}}
    assert take_options(folder, changed) == [
        "algorithm.gamma was None, is 0.9",
        "data.batch_size was 8, is 16",
    ]
    assert take_options(folder, changed) == [], "it was told"
    (folder / "options.json").write_text("{")
    assert take_options(folder, changed) == []
