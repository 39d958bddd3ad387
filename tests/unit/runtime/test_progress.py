"""A rank's position can be read by another process after it was killed."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_real.runtime.liveness.processes import ProcessId, ProcessState
from megatron_real.runtime.liveness.progress import Position, Progress, ProgressView


def test_positions() -> None:
    progress = Progress()
    assert str(progress.position()) == "before the first instruction"
    progress.enter(3, 4, "run:actor_gen")
    inside = progress.position()
    assert (inside.iteration, inside.index, inside.name) == (3, 4, "run:actor_gen")
    assert str(inside) == "iteration 3, run:actor_gen"
    progress.leave()
    after = progress.position()
    assert (after.iteration, after.index, after.name) == (3, 4, "")
    assert after.serial == inside.serial + 1
    assert inside.order < after.order < Position(iteration=3, index=5, name="x").order
    assert Position.from_json(after.to_json()) == after
    progress.enter(3, 5, "x" * 1000)
    assert progress.position().name == "x" * len(progress.position().name)
    assert len(progress.position().name) > 200


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux: memfd_create and /proc")
def test_a_killed_process_leaves_its_position() -> None:
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        progress = Progress()
        os.write(told, str(progress.descriptor).encode())
        iteration = 0
        while True:
            iteration += 1
            progress.enter(iteration, 7, "run:actor_train")
            if iteration == 1000:
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGKILL)
    view = ProgressView(pid, int(os.read(ready, 16)))
    os.waitpid(pid, os.WUNTRACED)
    assert view.position().iteration == 1000
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)
    assert str(view.position()) == "iteration 1000, run:actor_train"
    with pytest.raises(OSError, match="No such file"):
        ProgressView(pid, 3)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_processes() -> None:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        process = ProcessId.own(progress_fd=5)
        os.write(tell, f"{process.host}|{process.pid}|{process.started}".encode())
        signal.pause()
    host, number, started = os.read(told, 1000).decode().split("|")
    process = ProcessId(host=host, pid=int(number), started=int(started))
    assert process.local
    assert process.pid == pid
    assert process.state() is ProcessState.ALIVE
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert process.state() is ProcessState.STOPPED
    other = ProcessId(host=host, pid=pid, started=int(started) + 1)  # the number was used again
    assert other.state() is ProcessState.GONE
    other.kill()
    elsewhere = ProcessId(host="elsewhere", pid=pid, started=int(started))
    assert not elsewhere.local
    elsewhere.kill()
    assert process.state() is ProcessState.STOPPED
    process.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process.state() is ProcessState.GONE, "a zombie"
    os.waitpid(pid, 0)
    process.kill()
    assert process.state() is ProcessState.GONE
