"""Where `make kills` says that a kill hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kills
from megatron_real.runtime.liveness.watch import Failure, FailureKind
from tests.e2e.tiny_run import Job


@pytest.mark.parametrize(
    ("iteration", "instruction", "where"),
    [
        (-1, "", "during set-up"),
        (2, "run:actor_gen", "iteration 2, run:actor_gen"),
        (2, "", "iteration 2, between two instructions"),
    ],
)
def test_where_a_kill_hit(tmp_path: Path, iteration: int, instruction: str, where: str) -> None:
    failure = Failure(
        kind=FailureKind.DEAD,
        ranks=(1,),
        iteration=iteration,
        instruction=instruction,
        reason="",
        detected_by=0,
    )
    (tmp_path / "failure-rank0.json").write_text(failure.to_json())
    assert kills._where(Job(folder=tmp_path, pids={}, tag=""), tmp_path) == where
