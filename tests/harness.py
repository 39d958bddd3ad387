"""Run a function on several ranks of one machine: the harness of every multi-process test.

The parent imports torch (and, for Megatron tests, Megatron) once; `run_ranks` forks the ranks from it, so a launch
costs a fraction of a second. Ranks meet through a file store, so there is no port to collide on. The first rank that
fails decides the error text; the others are killed. A hang is reported with the ranks that were still running.
"""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailed", "run_ranks"]


class RankFailed(AssertionError):
    """A rank raised, died or hung; the text has its traceback."""


def _rank_main(
    rank: int, size: int, folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    outcome: tuple[str, Any]
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout_s)
        )
        outcome = ("ok", fn(*args))
    except BaseException:  # the parent shows it; a rank must never die silently
        outcome = ("error", traceback.format_exc())
    path = folder / f"result-{rank}"
    try:
        payload = pickle.dumps(outcome)
    except Exception:  # results that cannot be pickled are the test's fault: say so
        payload = pickle.dumps(
            ("error", f"result of rank {rank} cannot be pickled:\n{traceback.format_exc()}")
        )
    path.with_suffix(".tmp").write_bytes(payload)
    path.with_suffix(".tmp").rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome[0] == "ok" else 1)  # no atexit: forked ranks share the parent's handlers


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    group_timeout_s: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(*args)`` on `size` ranks with an initialised gloo group; return their results in rank order.

    The result of a rank in `may_die` is None if it ended without one.

    Raises:
        RankFailed: a rank raised or died, or some were still running after `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        pids: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _rank_main(rank, size, folder, fn, args, group_timeout_s)
            pids[pid] = rank
        results: dict[int, Any] = dict.fromkeys(may_die)
        return _collect(size, folder, pids, results, time.monotonic() + timeout_s)


def _collect(
    size: int, folder: Path, pids: dict[int, int], results: dict[int, Any], deadline: float
) -> list[Any]:
    started = time.monotonic()
    running = dict(pids)
    try:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > deadline:
                    raise RankFailed(
                        f"ranks {sorted(running.values())} of {size} still running after {deadline - started:.0f} s"
                    )
                time.sleep(0.01)
                continue
            if pid not in running:
                continue
            rank = running.pop(pid)
            path = folder / f"result-{rank}"
            if not path.exists():
                if rank in results:
                    continue
                raise RankFailed(f"rank {rank} of {size} died without a result (wait status {status})")
            kind, value = pickle.loads(path.read_bytes())
            if kind != "ok":
                raise RankFailed(f"rank {rank} of {size} failed:\n{value}")
            results[rank] = value
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)
    return [results[rank] for rank in range(size)]
