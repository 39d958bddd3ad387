"""Start the ranks of a run on this machine, watch them, and leave none behind.

Every run has a rendezvous port of its own. Rank 0 writes to this terminal, the others to ``logs/rank-N.log``. When a
rank fails, the others get a grace period: they notice by themselves and write down what happened.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_real.errors import ConfigError

__all__ = ["RankExit", "free_port", "launch_ranks", "rank_environment"]

_POLL_S = 0.1
_TERMINATE_S = 5.0
_TAIL_LINES = 20
_RANGE = re.compile(r"\[(\d+)[\d,-]*\]")
_NODE = re.compile(rf"(?:[\w.-]|{_RANGE.pattern})+(?=,|$)")
"""The first of Slurm's nodes: ``node[01-04,07],other`` begins with ``node01``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a rank ended."""

    rank: int
    code: int
    """As `subprocess.Popen.returncode`: negative for a signal."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended with exit code {self.code}"
        return f"rank {self.rank} was ended by {signal.Signals(-self.code).name}"


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(base: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """What ``torchrun`` or ``srun`` says about this process, as torchrun's variables; None when neither started it.

    Raises:
        ConfigError: srun does not say on which host rank 0 runs.
    """
    base = os.environ if base is None else base
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(base):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {name: base[name] for name in names if name in base}
    if int(base.get("SLURM_STEP_NUM_TASKS", "1")) < 2 or "SLURM_PROCID" not in base:
        return None
    # The job number is the one thing that all tasks know and that other jobs on these nodes do not share.
    step = int(base.get("SLURM_JOB_ID", "0")) * 8 + int(base.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": base["SLURM_PROCID"],
        "WORLD_SIZE": base["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": base.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": base.get("MASTER_ADDR") or _first_host(base),
        "MASTER_PORT": base.get("MASTER_PORT") or str(20_000 + step % 20_000),
    }


def _first_host(base: Mapping[str, str]) -> str:
    """Where srun put task 0; ``SLURM_LAUNCH_NODE_IPADDR`` is where srun was called, perhaps a login node."""
    nodes = base.get("SLURM_STEP_NODELIST") or base.get("SLURM_JOB_NODELIST") or ""
    first = _NODE.match(nodes)
    if first is None:
        raise ConfigError(
            f"srun: found {nodes!r} in SLURM_STEP_NODELIST and SLURM_JOB_NODELIST; expected nodes such as "
            "node[01-04,07]. Set MASTER_ADDR to the host of rank 0."
        )
    return _RANGE.sub(r"\1", first[0])


def launch_ranks(
    command: Sequence[str], size: int, folder: Path, *, grace_s: float = 40.0
) -> tuple[RankExit, ...]:
    """Run `command` on `size` ranks until all have ended.

    Args:
        command: of every rank; it reads torchrun's environment variables.
        size: number of ranks.
        folder: rank N > 0 writes to ``folder/logs/rank-N.log``.
        grace_s: after the first failure, how long the others may take to end by themselves.

    Returns:
        The ranks that failed, in the order in which they were seen to end; those that were ended here come last.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    running: dict[int, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        stack.callback(_end, running)
        stack.enter_context(_terminated_by_sigterm())
        for rank in range(size):
            log = stack.enter_context((logs / f"rank-{rank}.log").open("wb")) if rank > 0 else None
            # Ranks share the cores: one thread each, as torchrun has it.
            environment = {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            running[rank] = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log and subprocess.STDOUT,
            )
        failed = _watch(running, grace_s)
    said_by_rank_0 = failed and any(end.rank == 0 and end.code == failed[0].code for end in failed)
    if failed and not said_by_rank_0:
        _show_log(logs / f"rank-{failed[0].rank}.log", failed[0])
    return tuple(failed)


def _watch(running: dict[int, subprocess.Popen[bytes]], grace_s: float) -> list[RankExit]:
    failed: list[RankExit] = []
    deadline = None
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code != 0:
                failed.append(RankExit(rank=rank, code=code))
        if failed and deadline is None:
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            late = dict(running)
            _end(running)
            failed += [RankExit(rank=rank, code=process.returncode) for rank, process in late.items()]
        elif running:
            time.sleep(_POLL_S)
    return failed


def _end(running: dict[int, subprocess.Popen[bytes]]) -> None:
    """End what still runs: politely, then not."""
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + _TERMINATE_S
    for process in running.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    running.clear()


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that its ranks are ended too."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _show_log(path: Path, first: RankExit) -> None:
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    sys.stderr.write(f"{first}; the end of {path}:\n" + "".join(f"  {line}\n" for line in lines))
