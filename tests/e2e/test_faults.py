"""A rank of a real PPO run is killed, stopped, fails or gets stuck: all end in time, name it, and the run can go on.

The ranks are processes without a launcher (see `tests.e2e.tiny_run`): nothing ends them but themselves. Each job has a
fault in iteration 1, after the checkpoint of iteration 0. Jobs start one after the other's fault, so that they wait for
each other's heartbeats at the same time, but do not share the cores while they work.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_real.runtime.liveness.heartbeats import failure_path
from megatron_real.runtime.reports.metrics import read_metrics
from tests.e2e.tiny_run import Job, start, wait, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

WORLD = range(4)
LIMIT_S = 30.0
STUCK_AFTER_S = 8.0

FAULTS = {
    # fault: (culprit, instruction, kinds)
    "kill@1:1:actor_gen": (1, "run:actor_gen", {"dead"}),
    "kill@2:1:realloc:actor_gen": (2, "realloc:actor_gen", {"dead"}),
    "kill@0:1:actor_train": (0, "run:actor_train", {"dead", "silent"}),
    "kill@3:1:save": (3, "save", {"dead"}),
    "stop@3:1:actor_gen": (3, "run:actor_gen", {"silent"}),
    "stop@1:1:realloc:actor_gen": (1, "realloc:actor_gen", {"silent"}),
    "stop@0:1:actor_train": (0, "run:actor_train", {"dead", "silent"}),
    "raise@1:1:actor_train": (1, "run:actor_train", {"raised"}),
    "sleep@2:1:critic_train:600": (2, "run:critic_train", {"stuck"}),
}


def options_of(folder: Path, fault: str | None = None) -> dict[str, Any]:
    changes: dict[str, Any] = {"fault": [fault]} if fault is not None else {}
    if fault is not None and fault.startswith("sleep"):
        changes["liveness"] = {"stuck_after_s": STUCK_AFTER_S}
    return write_run(folder, **changes)


def wait_for_fault(jobs: dict[str, Job], fault: str, timeout_s: float = 90.0) -> None:
    deadline, job = time.monotonic() + timeout_s, jobs[fault]
    while job.fault_s is None and len(job.codes) < len(WORLD) and time.monotonic() < deadline:
        time.sleep(0.1)
        for other in jobs.values():  # of all, to see when their ranks end
            other.poll()
    assert job.fault_s is not None, f"{fault}: it was not injected\n{job.logs()}"


def check_failed(job: Job, fault: str) -> dict[str, Any]:
    """What the survivors wrote; the same on all of them."""
    culprit, instruction, kinds = FAULTS[fault]
    assert sorted(job.codes) == list(WORLD), f"{fault}: some ranks did not end\n{job.logs()}"
    assert job.fault_s is not None
    took_s = max(job.ended_s.values()) - job.fault_s
    limit_s = LIMIT_S + (STUCK_AFTER_S if kinds == {"stuck"} else 0)
    assert took_s < limit_s, f"{fault}: {took_s:.0f} s\n{job.logs()}"
    killed = fault.startswith(("kill", "stop"))
    failures = []
    for rank in WORLD:
        if rank == culprit and killed:
            assert job.codes[rank] == -signal.SIGKILL, "the survivors kill a rank that was stopped"
            continue
        assert job.codes[rank] == 1, f"{fault}: rank {rank}\n{job.logs()}"
        failures.append(json.loads(failure_path(job.folder, rank).read_text()))
        # The ranks of a mesh wait for each other inside a call, so those of a stuck one are named together.
        who = "ranks 2, 3" if kinds == {"stuck"} else f"rank {culprit}"
        named = f"megatron_real: rank {rank} ends because of {who} in iteration 1, {instruction}"
        assert named in job.log(rank), f"{fault}\n{job.logs()}"
        assert "Traceback" not in job.log(rank), f"{fault}\n{job.logs()}"
    for failure in failures:
        found = (failure["culprit_rank"], failure["iteration"], failure["instruction"])
        assert found == (culprit, 1, instruction), f"{fault}: {failure}"
        assert failure["kind"] in kinds, f"{fault}: {failure}"
    assert len({failure["kind"] for failure in failures}) == 1, failures
    return {"fault": fault, "ended_after_s": round(took_s, 1), "kind": failures[0]["kind"]}


@pytest.mark.timeout(600)
def test_every_fault_ends_all_ranks_and_the_run_goes_on(tmp_path: Path) -> None:
    jobs: dict[str, Job] = {}
    try:
        for fault in FAULTS:
            jobs[fault] = start(options_of(tmp_path / fault.replace(":", "-"), fault))
            wait_for_fault(jobs, fault)
        wait(list(jobs.values()), 2 * LIMIT_S)
        for fault, job in jobs.items():
            print(json.dumps(check_failed(job, fault)))
    finally:
        for job in jobs.values():
            job.kill()
    # The last checkpoint loads, and what comes after it is what would have come without the fault.
    whole = start(options_of(tmp_path / "whole"))
    wait([whole], 120)
    assert whole.codes == dict.fromkeys(WORLD, 0), whole.logs()
    folder = jobs["kill@3:1:save"].folder  # the hardest: a checkpoint is there in part
    resumed = start(options_of(folder) | {"resume": True}, tag="resumed")
    wait([resumed], 120)
    assert resumed.codes == dict.fromkeys(WORLD, 0), resumed.logs()
    assert numbers(folder) == pytest.approx(numbers(whole.folder), rel=1e-6)
    assert not list(folder.glob("failure-rank*")), "they are of the run that failed"


def numbers(folder: Path) -> dict[str, float]:
    """The metrics of iteration 1 that do not depend on the clock."""
    (row,) = [row for row in read_metrics(folder / "metrics.jsonl") if row["iteration"] == 1]
    found = {name: value for name, value in row.items() if isinstance(value, float | int)}
    timed = {name for name in found if name.endswith(("_s", "per_s")) or name.startswith("seconds/")}
    assert {"reward", "actor_train/loss", "critic_train/loss"} <= found.keys()
    return {name: value for name, value in found.items() if name not in timed}
