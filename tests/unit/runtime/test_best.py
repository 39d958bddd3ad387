"""The best checkpoint: which is better, and what a killed writer leaves."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_real.backend import Goal
from megatron_real.errors import ConfigError
from megatron_real.runtime.evaluation.best import Best, BestCheckpoint, recover


class Killed(Exception):
    """The process ends here."""


def best(iteration: int, value: float) -> Best:
    return Best(iteration=iteration, metric="reward", value=value, error=0.1)


def writer(iteration: int) -> Callable[[Path], None]:
    """Writes two models and the state, as a backend does."""

    def write(folder: Path) -> None:
        for model in ("actor", "critic"):
            path = folder / model / f"iter_{iteration:07d}"
            path.mkdir(parents=True)
            (path / "weights").write_text(str(iteration))
        (folder / "run_state.json").write_text(str(iteration))

    return write


def whole(folder: Path, iteration: int) -> bool:
    models = [folder / model / f"iter_{iteration:07d}" / "weights" for model in ("actor", "critic")]
    return all(path.exists() for path in [*models, folder / "run_state.json"])


@pytest.mark.parametrize(
    ("higher", "better"), [(True, [True, True, False, False]), (False, [True, False, False, True])]
)
def test_the_goal_says_which_is_better(higher: bool, better: list[bool], tmp_path: Path) -> None:
    keeper = BestCheckpoint(tmp_path / "best", Goal(metric="reward", higher_is_better=higher))
    assert not keeper.beaten_by(math.nan)
    found = []
    for iteration, value in enumerate((1.0, 2.0, 2.0, 0.5)):
        found.append(keeper.beaten_by(value))
        if found[-1]:
            keeper.keep(best(iteration, value), writer(iteration), first_rank=True)
    assert found == better, "an equal one is not better"
    last = max(i for i, kept in enumerate(better) if kept)
    assert Best.read(tmp_path / "best") == keeper.known == best(last, [1.0, 2.0, 2.0, 0.5][last])
    assert whole(tmp_path / "best", last)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each change of a folder in turn: the former or the new one is found, and a next one replaces it."""
    found_by_step = []
    for step in itertools.count():
        folder = tmp_path / str(step) / "best"
        folder.parent.mkdir()
        goal = Goal(metric="reward")
        BestCheckpoint(folder, goal).keep(best(1, 1.0), writer(1), first_rank=True)
        left = iter(range(step))
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "mkdir"), (shutil, "rmtree")):
                patch.setattr(owner, name, _until(left, getattr(owner, name)))
            keeper = BestCheckpoint(folder, goal, best(1, 1.0))
            try:
                keeper.keep(best(2, 2.0), writer(2), first_rank=True)
                killed = False
            except Killed:
                killed = True
        found = Best.read(folder)
        assert found in (best(1, 1.0), best(2, 2.0))
        recover(folder)
        assert Best.read(folder) == found
        assert whole(folder, found.iteration)
        BestCheckpoint(folder, goal, found).keep(best(3, 3.0), writer(3), first_rank=True)
        assert Best.read(folder) == best(3, 3.0)
        assert whole(folder, 3)
        assert [path.name for path in folder.parent.iterdir()] == ["best"]
        found_by_step.append(found.iteration)
        if not killed:
            break
    assert found_by_step == sorted(found_by_step)
    assert {1, 2} == set(found_by_step)
    assert len(found_by_step) > 8


def _until(left: Any, right: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return right(*args, **options)

    return call


def test_what_is_no_best(tmp_path: Path) -> None:
    assert Best.read(tmp_path / "best") is None
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text('{"value": 1}')
    with pytest.raises(ConfigError, match="Remove its folder"):
        Best.read(tmp_path / "best")
