"""A rank that dies, stops, fails or gets stuck ends every rank and is named; real processes, no launcher.

Each job is three forked processes that run a sleeping program; rank 0 serves the store. Many jobs run at the same time.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from megatron_real.runtime.liveness.faults import FaultInjector, parse_faults
from megatron_real.runtime.liveness.heartbeats import Limits, Liveness, failure_path
from megatron_real.runtime.liveness.progress import Progress

pytestmark = pytest.mark.dist

WORLD_SIZE = 3


def work(rank: int, folder: Path, specs: tuple[str, ...], stuck_after_s: float, gloo: bool) -> None:
    """The program of one rank."""
    timeout = datetime.timedelta(seconds=120)
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD_SIZE, True, timeout, wait_for_workers=False)
        port.with_suffix(".tmp").write_text(str(store.port))
        port.with_suffix(".tmp").rename(port)
    else:
        while not port.exists():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), WORLD_SIZE, False, timeout)
    if gloo:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    progress = Progress()
    join_s = 60.0
    if specs == ("absent",):
        if rank == 2:
            os._exit(0)
        # Many jobs start at once on few cores: the others count from when both are there, and long enough for the first
        # heartbeat of either.
        store.set(f"there/{rank}", "")
        store.wait(["there/0", "there/1"])
        specs, join_s = (), 15
    limits = Limits(dead_after_s=6, stuck_after_s=stuck_after_s, join_s=join_s)
    injector = FaultInjector(parse_faults(specs), rank)
    with Liveness(store, rank, WORLD_SIZE, folder=folder, progress=progress, limits=limits):
        for iteration in range(4):
            for index, name in enumerate(["run:actor_gen", "realloc:actor_train", "run:actor_train"]):
                progress.enter(iteration, index, name)
                injector.before(iteration, name, index)
                time.sleep(0.1)
                if gloo:
                    dist.all_reduce(torch.ones(1))
                elif name.startswith("realloc"):
                    store.add(f"{iteration}", 1)  # a barrier, on the main thread's own client
                    while store.add(f"{iteration}", 0) < WORLD_SIZE:
                        time.sleep(0.05)
                progress.leave()
    with Liveness(store, rank, WORLD_SIZE, folder=folder, progress=progress, limits=limits):
        pass  # a second run on the same store


def _child(rank: int, folder: Path, *args: Any) -> NoReturn:
    code = 1
    try:
        stderr = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stderr, 2)
        work(rank, folder, *args)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


@dataclass
class Job:
    """The processes of one job, and what came of them."""

    pids: dict[int, int]
    folder: Path
    started: float
    codes: dict[int, int] = field(default_factory=dict)
    """By rank; the negative signal number of a killed one."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """Seconds after the start, by rank."""

    def poll(self) -> bool:
        """Whether all have ended."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    self.ended_s[rank] = time.monotonic() - self.started
        return len(self.codes) == WORLD_SIZE

    def failure(self, rank: int) -> dict[str, Any]:
        path = failure_path(self.folder, rank)
        assert path.exists(), f"rank {rank} wrote no failure:\n{self.stderr(rank)}"
        return json.loads(path.read_text())

    def stderr(self, rank: int) -> str:
        return (self.folder / f"stderr-{rank}").read_text()


def start(folder: Path, *specs: str, stuck_after_s: float = 600, gloo: bool = False) -> Job:
    folder.mkdir()
    pids = {}
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            _child(rank, folder, specs, stuck_after_s, gloo)
        pids[rank] = pid
    return Job(pids=pids, folder=folder, started=time.monotonic())


def finish(jobs: dict[str, Job], timeout_s: float) -> None:
    """Wait for all; what still runs after `timeout_s` is killed."""
    deadline = time.monotonic() + timeout_s
    while sum(not job.poll() for job in jobs.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for job in jobs.values():
        for rank, pid in job.pids.items():
            if rank not in job.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


CASES = {
    # name: (fault, culprit, instruction, kinds)
    "kill rank 1 in generation": ("kill@1:1:actor_gen", 1, "run:actor_gen", {"dead"}),
    "kill rank 2 in realloc": ("kill@2:1:realloc:actor_train", 2, "realloc:actor_train", {"dead"}),
    "kill rank 0 in training": ("kill@0:1:actor_train", 0, "run:actor_train", {"silent", "dead"}),
    "stop rank 0 in realloc": ("stop@0:1:realloc:actor_train", 0, "realloc:actor_train", {"silent", "dead"}),
    "stop rank 2 in generation": ("stop@2:1:actor_gen", 2, "run:actor_gen", {"silent"}),
    "raise on rank 0": ("raise@0:1:actor_train", 0, "run:actor_train", {"raised"}),
    "raise on rank 1": ("raise@1:1:actor_gen", 1, "run:actor_gen", {"raised"}),
}


def check_failed(job: Job, culprit: int, instruction: str, kinds: set[str]) -> None:
    codes = job.codes
    text = "\n".join(job.stderr(rank) for rank in range(WORLD_SIZE))
    assert sorted(codes) == list(range(WORLD_SIZE)), f"some did not end: {codes}\n{text}"
    assert max(job.ended_s.values()) < 30
    assert all(codes.values()), codes
    for rank in range(WORLD_SIZE):
        if rank == culprit and not kinds & {"raised", "stuck"}:
            assert codes[rank] == -signal.SIGKILL, "the survivors kill a stopped culprit"
            continue
        assert codes[rank] == 1, text
        failure = job.failure(rank)
        found = (failure["culprit_rank"], failure["iteration"], failure["instruction"])
        assert found == (culprit, 1, instruction), failure
        assert failure["kind"] in kinds, failure
        lines = [line for line in job.stderr(rank).splitlines() if line.startswith("megatron_real:")]
        assert len(lines) == 1, text
        assert lines[0].startswith(
            f"megatron_real: rank {rank} ends because of rank {culprit} in iteration 1, "
        )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("gloo", [False, True], ids=["store", "gloo"])
def test_every_fault_ends_all_ranks(tmp_path: Path, gloo: bool) -> None:
    """With gloo the survivors also get exceptions of broken connections, which must not hide the culprit."""
    jobs = {name: start(tmp_path / name, case[0], gloo=gloo) for name, case in CASES.items()}
    finish(jobs, 60)
    for name, (_, culprit, instruction, kinds) in CASES.items():
        check_failed(jobs[name], culprit, instruction, kinds)


@pytest.mark.timeout(120)
def test_stuck_slow_and_normal_end(tmp_path: Path) -> None:
    jobs = {
        "stuck": start(tmp_path / "stuck", "sleep@2:1:actor_gen:100", stuck_after_s=3),
        "slow": start(tmp_path / "slow", "sleep@2:1:actor_gen:5"),
        # Ranks 0 and 1 wait 10 s in the reallocation, longer than the limit, but rank 2 still makes progress.
        "waiting": start(
            tmp_path / "waiting",
            "sleep@2:1:actor_gen:5",
            "sleep@2:1:realloc:actor_train:5",
            stuck_after_s=8,
        ),
        "normal": start(tmp_path / "normal"),
        "late end": start(tmp_path / "late end", "sleep@1:3:actor_train:4"),
        "fails when others are done": start(tmp_path / "end", "raise@1:3:actor_train"),
        "absent": start(tmp_path / "absent", "absent"),
        "killed when others are done": start(tmp_path / "kill", "kill@1:3:actor_train"),
    }
    finish(jobs, 60)
    check_failed(jobs["stuck"], 2, "run:actor_gen", {"stuck"})
    for name in ("slow", "waiting", "normal", "late end"):
        assert jobs[name].codes == {0: 0, 1: 0, 2: 0}, name
        assert not list(jobs[name].folder.glob("failure-*")), name
        assert "megatron_real" not in jobs[name].stderr(1)
    assert min(jobs["late end"].ended_s.values()) > 4, "all ranks wait for the last"
    assert set(jobs["fails when others are done"].codes.values()) == {1}
    assert jobs["fails when others are done"].failure(0)["culprit_rank"] == 1
    assert jobs["killed when others are done"].codes == {0: 1, 1: -signal.SIGKILL, 2: 1}
    assert jobs["killed when others are done"].failure(2)["culprit_rank"] == 1
    assert jobs["absent"].codes == {0: 1, 1: 1, 2: 0}
    assert [jobs["absent"].failure(rank)["culprit_ranks"] for rank in (0, 1)] == [[2], [2]]
