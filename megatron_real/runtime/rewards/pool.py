"""Runs calls of reward functions in processes, which are killed when they are late and replaced when they are gone.

The processes run `megatron_real.reward_worker`. They are started here and not by `multiprocessing`, which would run the
training script anew in each of them. A process leads a session of its own: Ctrl-C does not reach it, and what its
functions have started is killed with it.

Invariants (tests/unit/runtime/test_reward_pool.py):
    - results are in the order of the calls, whichever process comes first;
    - `run` returns at its deadline, up to two seconds later where a process runs async functions;
    - a process that crashes or is late costs the results of the call that it was in, and no other.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from megatron_real.errors import ConfigError
from megatron_real.reward_worker import FunctionCall, Reason, Result

__all__ = ["RewardPool"]

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from megatron_real.reward_worker import main; main()"
)
_POLL_S = 0.2
"""A process that is gone is seen after so long, where a child of it still holds its connection."""
_ASYNC_GRACE_S = 2.0
"""A process ends its async calls itself, and is killed only if it has not done so after this."""
_MAX_FAILED_STARTS = 3
_END_S = 1.0
"""How long a process may take to end after its connection was closed."""

Task = tuple[int, ...]
"""Positions of the calls that a process gets at once."""


class _Worker:
    """A process, and what it works on."""

    def __init__(self, names: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid())),
                    *(json.dumps(list(names)), json.dumps(sys.path)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        """It has loaded the functions."""
        self.task: Task | None = None
        self.timeout_s = 0.0
        self.kill_at = 0.0

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    def begin(self, task: Task, calls: Sequence[FunctionCall], timeout_s: float) -> None:
        """Give it a task; `receive` tells whether it was there to take it."""
        self.task, self.timeout_s = task, timeout_s
        self.kill_at = time.monotonic() + timeout_s + (_ASYNC_GRACE_S if calls[0].is_async else 0.0)
        with suppress(ConnectionError):
            self.connection.send((calls, timeout_s))

    def receive(self) -> list[Result] | str | None:
        """What it sent: None or a text when it started, results later.

        Raises:
            EOFError: its process is gone, or what came is no message.
        """
        try:
            message: list[Result] | str | None = self.connection.recv()
        except (OSError, pickle.UnpicklingError) as error:
            raise EOFError from error
        return message

    def end(self) -> str:
        """Kill it and what it started; returns how it had ended by itself."""
        try:
            code = self.process.wait(_POLL_S)  # the connection breaks a moment before the process ends
        except subprocess.TimeoutExpired:
            return "broke its connection"
        finally:
            self.kill()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill it and what it started."""
        self.connection.close()
        with suppress(ProcessLookupError):  # nothing is left of its session
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What is going on in `RewardPool.run`."""

    calls: Sequence[FunctionCall]
    timeout_s: float
    deadline: float
    queue: deque[Task]
    results: dict[int, Result] = field(default_factory=dict)


class RewardPool:
    """Processes that call reward functions. The first `run` starts them; they end with the thread that it is in.

    Args:
        names: ``module:function`` of each function.
        processes: how many to keep.
    """

    def __init__(self, names: Sequence[str], processes: int) -> None:
        self._names = tuple(names)
        self._processes = processes
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    def run(self, calls: Sequence[FunctionCall], *, timeout_s: float, deadline: float) -> list[Result]:
        """Run calls, each in some process; async calls of a process run at once.

        Args:
            calls: in the order in which they are begun.
            timeout_s: a call may take so long; its process is killed then.
            deadline: of all calls, by `time.monotonic`.

        Raises:
            ConfigError: a process cannot load the functions, which this one can.
        """
        while len(self._workers) < self._processes:
            self._workers.append(_Worker(self._names))
        batch = _Batch(calls=calls, timeout_s=timeout_s, deadline=deadline, queue=deque(self._tasks(calls)))
        try:
            while len(batch.results) < len(calls) and (self._at_work or time.monotonic() < deadline):
                self._hand_out(batch)
                self._take_in(batch)
        except BaseException:
            self._kill_all()  # or the next batch would get the results of this one
            raise
        what = f"had no turn in the time for the batch (processes: {self._processes})"
        return [
            batch.results[i] if i in batch.results else call.failure(Reason.LATE, what)
            for i, call in enumerate(calls)
        ]

    def close(self) -> None:
        """End all processes: those that have nothing to do by themselves, the others after a second."""
        for worker in self._workers:
            worker.connection.close()
        end_at = time.monotonic() + _END_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end_at - time.monotonic()))
        self._kill_all()

    @property
    def _at_work(self) -> bool:
        return any(worker.task is not None for worker in self._workers)

    def _tasks(self, calls: Sequence[FunctionCall]) -> Iterator[Task]:
        """Async calls in as many heaps as there are processes; other calls one by one."""
        together = [i for i, call in enumerate(calls) if call.is_async]
        for start in range(min(self._processes, len(together))):
            yield tuple(together[start :: self._processes])
        for i, call in enumerate(calls):
            if not call.is_async:
                yield (i,)

    def _hand_out(self, batch: _Batch) -> None:
        for number, worker in enumerate(self._workers):
            rest_s = batch.deadline - time.monotonic()
            if worker.idle and worker.gone:
                self._replace(number)
            elif worker.idle and batch.queue and rest_s > 0:
                task = batch.queue.popleft()
                worker.begin(task, [batch.calls[i] for i in task], min(batch.timeout_s, rest_s))

    def _take_in(self, batch: _Batch) -> None:
        """Wait until something happens; take what has come, and replace processes that are gone or late."""
        kill_at = [worker.kill_at for worker in self._workers if worker.task is not None]
        pause_s = max(0.0, min([_POLL_S, *(at - time.monotonic() for at in kill_at)]))
        told = wait([worker.connection for worker in self._workers if not worker.idle], pause_s)
        for number, worker in enumerate(self._workers):
            if worker.connection in told:
                try:
                    self._take(worker, batch)
                except EOFError:
                    self._lose(number, Reason.CRASHED, worker.end(), batch)
            elif not worker.idle and worker.gone and not worker.connection.poll():
                self._lose(number, Reason.CRASHED, worker.end(), batch)
            elif worker.task is not None and time.monotonic() >= worker.kill_at:
                self._lose(number, Reason.LATE, f"did not return within {worker.timeout_s:.3g} s", batch)

    def _take(self, worker: _Worker, batch: _Batch) -> None:
        message = worker.receive()
        if worker.task is None:
            if message is not None:
                raise ConfigError(f"reward.processes: in a process of its own, {message}")
            worker.ready = True
            self._failed_starts = 0
        else:
            assert isinstance(message, list), "a process answers calls with their results"
            batch.results.update(zip(worker.task, message, strict=True))
            worker.task = None

    def _lose(self, number: int, reason: Reason, what: str, batch: _Batch) -> None:
        """Replace a process, and say for its call `what` happened; or try its calls one by one."""
        task = self._workers[number].task
        self._replace(number)
        if task is None:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                raise ConfigError(
                    f"reward.processes: a process that loads {', '.join(self._names)} {what}, "
                    f"{_MAX_FAILED_STARTS} times in a row; expected that it loads them as this process does. Mend "
                    "their modules, or set reward.processes=0."
                )
        elif len(task) > 1:
            batch.queue.extend((i,) for i in task)
        else:
            if reason is Reason.CRASHED:
                what = f"crashed: its process {what}"
            batch.results[task[0]] = batch.calls[task[0]].failure(reason, what)

    def _replace(self, number: int) -> None:
        self._workers[number].kill()
        self._workers[number] = _Worker(self._names)

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
