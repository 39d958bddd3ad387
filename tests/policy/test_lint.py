"""Lint, as tests: one command and one exit code for everything. `make lint` runs the same tools by themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_a_tool_finds_nothing(command: list[str]) -> None:
    program = str(Path(sys.executable).with_name(command[0]))
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
