"""Rows to Weights & Biases, which is not here: a module in its place notes what it is called with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_real.runtime.reports.metrics import MetricsWriter
from megatron_real.runtime.reports.wandb_tracker import open_wandb


class FakeRun:
    def __init__(self, **given: Any) -> None:
        self.given = given
        self.id = given.get("id", "run-1")
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.finished = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that were opened."""
    opened: list[FakeRun] = []
    module = ModuleType("wandb")

    def init(**given: Any) -> FakeRun:
        opened.append(FakeRun(**given))
        return opened[-1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


def test_rows_are_those_of_the_file(tmp_path: Path, runs: list[FakeRun]) -> None:
    tracker = open_wandb({"project": "p", "tags": ("a",)}, tmp_path, resume=False, config={"seed": 1})
    assert tracker is not None
    with MetricsWriter(tmp_path, tensorboard=False, trackers=[tracker]) as writer:
        writer.write(3, {None: {"reward": 0.5}, "actor_train": {"loss": 2.0, "steps": {"loss": [1.0, 3.0]}}})
    (run,) = runs
    assert run.given == {"dir": str(tmp_path), "config": {"seed": 1}, "project": "p", "tags": ("a",)}
    assert run.axes == {"*": "iteration"}
    assert run.rows == [{"iteration": 3, "reward": 0.5, "actor_train/loss": 2.0}], "lists stay in the file"
    assert run.finished


def test_a_resumed_run_goes_on_in_its_run(tmp_path: Path, runs: list[FakeRun]) -> None:
    for resume in (False, True, False):
        open_wandb({"project": "p"}, tmp_path, resume=resume, config={})
    first, resumed, other = (run.given for run in runs)
    assert (resumed["id"], resumed["resume"]) == ("run-1", "allow")
    assert "id" not in first
    assert "id" not in other


def test_nothing_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert open_wandb({"project": "p"}, tmp_path, resume=False, config={}) is None
    assert "wandb: not installed" in caplog.text
