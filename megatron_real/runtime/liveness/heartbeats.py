"""Heartbeats over the store: a rank that dies, stops, fails or gets stuck ends every rank, and is named in a file.

Each rank has two daemon threads. ``talk`` owns a store client: it sends the rank's heartbeat, reads the others'
and the abort key, and may block when the store does. ``guard`` never touches the store: it looks at the
processes of its host, applies the rules of `watch.Watch` and ends the process. They run while the main thread is
blocked in a collective, and end the process with ``os._exit``, because a rank whose peers are gone cannot be
unwound.

The first failure that reaches the abort key is the failure of the job; every rank reports that one. Ranks leave
together: rank 0 may serve the store, and a launcher that sees a rank fail kills the others before they could
have written why.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch.distributed as dist

from megatron_real.errors import PeerError, RealError
from megatron_real.runtime.liveness.processes import ProcessId, ProcessState
from megatron_real.runtime.liveness.progress import Position, Progress, ProgressView
from megatron_real.runtime.liveness.store_client import open_client, served_by_launcher
from megatron_real.runtime.liveness.watch import Beat, Failure, FailureKind, Limits, Watch

__all__ = ["Limits", "Liveness", "failure_path", "is_communication_error"]

logger = logging.getLogger(__name__)

_GUARD_S = 0.25
"""Between two looks of the guard."""
_HURRY_S = 0.1
"""Between two exchanges with the store while the ranks agree on an end."""
_SUSPENDED_S = 3.0
"""A longer gap between two looks means that this process itself was suspended: it counts as this much."""
_AGREE_S = 2.0
"""How long a rank waits for the store to take its failure."""
_PEER_SIGNS = ("gloo", "nccl", "tcpstore", "connection closed by peer", "connection reset", "broken pipe")


def failure_path(folder: Path, rank: int) -> Path:
    """Where `rank` writes why it ended."""
    return folder / f"failure-rank{rank}.json"


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` looks like the consequence of another rank's end."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeerError | dist.DistError | ConnectionError):
            return True
        if isinstance(seen, RuntimeError) and any(sign in str(seen).lower() for sign in _PEER_SIGNS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class Liveness:
    """One rank's share in keeping the job alive; a context manager around the rank's work.

    An exception in the body ends every rank; the body's end waits until every rank has come to it.

    Args:
        store: the store that ``torch.distributed`` was initialised with.
        rank: this rank.
        world_size: number of ranks.
        folder: where ``failure-rank<r>.json`` is written.
        progress: what the executor tells its progress to.
        limits: after how long something is wrong.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        folder: Path,
        progress: Progress,
        limits: Limits | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._folder = folder
        self._progress = progress
        self._limits = limits or Limits()
        self._watch = Watch(rank, world_size, self._limits, launcher_serves_store=served_by_launcher())
        self._watch_lock = threading.Lock()
        self._processes: dict[int, ProcessId] = {}
        self._views: dict[int, ProgressView] = {}
        self._now = 0.0  # seconds that this process has been running; only the guard moves it
        self._count = 0
        self._done = False
        self._own_failure: Failure | None = None
        self._failure: Failure | None = None
        self._reported = self._acknowledged = False
        self._ending = threading.Lock()
        self._kick = threading.Event()
        self._met = threading.Event()
        self._agreed = threading.Event()
        self._everyone_knows = threading.Event()
        self._store_gone = threading.Event()
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to send heartbeats and to watch, and wait until every rank does. Collective over all ranks.

        The sooner after ``init_process_group`` the better: a rank that fails before is only missed.

        Raises:
            ConfigError: a kind of store that cannot be opened a second time.
        """
        failure_path(self._folder, self._rank).unlink(missing_ok=True)
        who, timeout_s = f"rank {self._rank}", self._limits.dead_after_s
        client = open_client(self._store, purpose="liveness", who=who, timeout_s=timeout_s)
        self._threads = [
            threading.Thread(target=self._talk, args=(client,), name="real-talk", daemon=True),
            threading.Thread(target=self._guard, name="real-guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._met.wait()  # the guard ends the process if a rank does not come

    def stop(self) -> None:
        """Say that this rank is done, and wait until every rank is. Collective over all ranks."""
        self._done = True
        self._progress.leave()
        self._kick.set()
        self._finished.wait()  # the guard ends the process if another rank fails meanwhile
        for thread in self._threads:
            thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """End every rank because of an exception on this one.

        An exception that looks like a consequence of another rank's end waits until that one is found out.
        """
        if is_communication_error(error):
            deadline = time.monotonic() + self._limits.dead_after_s + 2 * self._limits.beat_s
            while time.monotonic() < deadline and not self._ending.locked():
                time.sleep(_GUARD_S)
        if isinstance(error, RealError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
            if not self._ending.locked():
                os.write(2, "".join(traceback.format_exception(error)).encode())
        with self._watch_lock:
            self._watch.see(self._rank, ProcessState.ALIVE, self._progress.position())
            failure = self._watch.failure(FailureKind.RAISED, (self._rank,), reason)
        self._end(failure)

    def positions(self) -> dict[int, Position]:
        """On rank 0 the last known position of every rank, on others that of rank 0."""
        with self._watch_lock:
            return self._watch.positions()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.stop()
        else:
            self.fail(error)

    # The talking thread.

    def _talk(self, client: dist.Store) -> None:
        try:
            client.set(f"who/{self._rank}", json.dumps(ProcessId.own(self._progress.descriptor).to_json()))
            client.add("joined", 1)
            while not self._exchange(client):
                hurry = (
                    self._done
                    or not self._met.is_set()
                    or self._own_failure is not None
                    or self._failure is not None
                )
                self._kick.wait(_HURRY_S if hurry else self._limits.beat_s)
                self._kick.clear()
        except RuntimeError as error:  # what torch raises when the server is gone
            with self._watch_lock:
                self._watch.store_failed(str(error).partition("\n")[0])
                over = self._watch.all_done
            self._store_gone.set()
            self._agreed.set()
            self._everyone_knows.set()
            if over:
                self._finished.set()

    def _exchange(self, client: dist.Store) -> bool:
        """Send and read everything once; whether there is nothing more to say."""
        with self._watch_lock:
            suspects = self._watch.suspects
            ready = self._watch.ready
        self._send_beat(client, all_done=ready)
        self._meet(client)
        for other in self._watch.watched:
            if client.check([f"beat/{other}"]):
                beat = Beat.from_json(client.get(f"beat/{other}"))
                with self._watch_lock:
                    self._watch.hear(other, beat, self._now)
        with self._watch_lock:
            self._watch.confirm(suspects)
            self._watch.store_answered(self._now)
            all_done = self._watch.all_done
        if all_done:
            return self._leave(client)
        self._agree(client)
        return False

    def _send_beat(self, client: dist.Store, *, all_done: bool) -> None:
        self._count += 1
        beat = Beat(count=self._count, position=self._progress.position(), done=self._done, all_done=all_done)
        client.set(f"beat/{self._rank}", beat.to_json())
        if self._rank == 0:
            with self._watch_lock:
                self._watch.hear(0, beat, self._now)

    def _meet(self, client: dist.Store) -> None:
        """Learn which process each rank is, once all have come; rank 0 learns it as they come."""
        if self._met.is_set():
            return
        if self._rank != 0 and client.add("joined", 0) < self._world_size:
            return
        for other in range(self._world_size):
            if other not in self._processes and client.check([f"who/{other}"]):
                process = ProcessId(**json.loads(client.get(f"who/{other}")))
                if process.local and process.progress_fd >= 0:
                    try:
                        self._views[other] = ProgressView(process.pid, process.progress_fd)
                    except OSError as error:
                        logger.debug("no view of the progress of rank %d: %s", other, error)
                self._processes[other] = process
        if len(self._processes) == self._world_size:
            self._met.set()

    def _agree(self, client: dist.Store) -> None:
        """Settle the failure of the job, if there is one, and wait until every rank that can has learnt of it."""
        if self._failure is None:
            if self._own_failure is not None:
                agreed = client.compare_set("abort", "", self._own_failure.to_json())
            elif client.check(["abort"]):
                agreed = client.get("abort")
            else:
                return
            self._failure = Failure.from_json(agreed)
            self._agreed.set()
        if self._reported:
            if not self._acknowledged:
                client.add("known", 1)
                self._acknowledged = True
            lost = (
                0
                if self._failure.kind in (FailureKind.RAISED, FailureKind.STUCK)
                else len(self._failure.ranks)
            )
            if client.add("known", 0) >= self._world_size - lost:
                self._everyone_knows.set()

    def _leave(self, client: dist.Store) -> bool:
        """All are done. Rank 0, which may serve the store, leaves last."""
        if self._rank != 0:
            client.add("left", 1)
        else:
            deadline = time.monotonic() + self._limits.dead_after_s
            while client.add("left", 0) < self._world_size - 1 and time.monotonic() < deadline:
                time.sleep(_HURRY_S)
        self._finished.set()
        return True

    # The guarding thread.

    def _guard(self) -> None:
        last = time.monotonic()
        while not self._finished.wait(_GUARD_S):
            now = time.monotonic()
            self._now += min(now - last, _SUSPENDED_S)
            last = now
            looks = [(rank, process) for rank, process in list(self._processes.items()) if process.local]
            with self._watch_lock:
                for rank, process in looks:
                    view = self._views.get(rank)
                    self._watch.see(rank, process.state(), view.position() if view else None)
                if self._watch.suspects:
                    self._kick.set()
                verdict = self._failure or self._watch.verdict(self._now)
            if verdict is not None:
                self._end(verdict)

    def _end(self, failure: Failure) -> NoReturn:
        """Agree on the failure, write it down, and end this process."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the other thread is ending this process
        with self._watch_lock:
            reachable = not self._watch.store_gone(self._now)
        if reachable and not self._store_gone.is_set():
            self._own_failure = failure
            self._kick.set()
            self._agreed.wait(_AGREE_S)
        failure = self._failure or failure
        self._report(failure)
        if failure.kind is FailureKind.SILENT:
            self._kill(failure.ranks)
        if self._failure is not None:
            self._reported = True
            self._kick.set()
            self._everyone_knows.wait(self._limits.linger_s)
        if failure.kind is FailureKind.STUCK and not self._everyone_knows.is_set():
            self._kill(failure.ranks)  # so stuck that its own threads cannot end it
        os._exit(1)

    def _kill(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if rank != self._rank and rank in self._processes:
                self._processes[rank].kill()

    def _report(self, failure: Failure) -> None:
        path = failure_path(self._folder, self._rank)
        own = self._progress.position()
        record = {
            "culprit_rank": failure.ranks[0],
            "culprit_ranks": failure.ranks,
            **{key: value for key, value in asdict(failure).items() if key != "ranks"},
            "reported_by": self._rank,
            "own_iteration": own.iteration,
            "own_instruction": own.name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        where = f" ({path})"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            temporary.rename(path)
        except OSError as error:
            where = f" (not written: {error})"
        # Not through logging or sys.stderr: the blocked main thread may hold their locks.
        os.write(2, f"megatron_real: rank {self._rank} ends because of {failure}{where}\n".encode())
