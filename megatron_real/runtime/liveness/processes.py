"""Which process a rank is, and what has become of it; across hosts by name, on one host by looking at it."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

__all__ = ["ProcessId", "ProcessState"]


class ProcessState(StrEnum):
    """What is known about a process of this host."""

    ALIVE = "alive"
    STOPPED = "stopped"
    """By a signal or a debugger."""
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, told apart from later ones with the same number."""

    host: str
    """Names the machine and the PID namespace: containers may share a host name."""
    pid: int
    started: int
    """Start time in clock ticks since boot; 0 where /proc does not tell."""
    progress_fd: int = -1
    """Descriptor of the rank's `Progress` memory."""

    @classmethod
    def own(cls, progress_fd: int = -1) -> Self:
        """This process."""
        pid = os.getpid()
        stat = _stat(pid)
        return cls(host=_host(), pid=pid, started=stat[1] if stat else 0, progress_fd=progress_fd)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def local(self) -> bool:
        """Whether it runs where this process runs."""
        return self.host == _host()

    def state(self) -> ProcessState:
        """What has become of it; only for a local process. A zombie is gone."""
        if not self.started:
            return ProcessState.ALIVE if _exists(self.pid) else ProcessState.GONE
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.started or stat[0] in "ZX":
            return ProcessState.GONE
        return ProcessState.STOPPED if stat[0] in "Tt" else ProcessState.ALIVE

    def kill(self) -> None:
        """End it, even when it is stopped; nothing happens when it is gone or of another host."""
        if self.local and self.state() is not ProcessState.GONE:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return


def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process; None when it is gone or /proc is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
