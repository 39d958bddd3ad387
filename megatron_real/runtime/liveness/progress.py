"""Where a rank is in its program, readable by the other processes of its host even after the rank was killed.

A rank notes each instruction that it enters in 256 bytes of anonymous shared memory. Other ranks of the host open
that memory once, through ``/proc``; it lives as long as someone has it open and leaves no file behind. Ranks of
other hosts learn the position from the heartbeat, which is up to a second old.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Position", "Progress", "ProgressView"]

_SIZE = 256
_HEAD = struct.Struct("<qqqqH")
_NAME_BYTES = _SIZE - _HEAD.size
_READ_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """An instruction that a rank is in, or after which it has not entered another one yet."""

    serial: int = 0
    """Counts entered and left instructions: equal serials mean no progress."""
    iteration: int = -1
    index: int = -1
    """Position of the instruction in the global order of an iteration; -1 before the first."""
    name: str = ""
    """Empty when the rank is between instructions."""

    @property
    def order(self) -> tuple[int, int, bool]:
        """Compares positions in the global order; between instructions comes after the one that was left."""
        return (self.iteration, self.index, not self.name)

    def __str__(self) -> str:
        if self.iteration < 0:
            return "before the first instruction"
        if not self.name:
            after = f"after instruction {self.index}" if self.index >= 0 else "before its first instruction"
            return f"iteration {self.iteration}, {after}"
        return f"iteration {self.iteration}, {self.name}"

    def to_json(self) -> dict[str, Any]:
        return {"serial": self.serial, "iteration": self.iteration, "index": self.index, "name": self.name}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**{key: values[key] for key in ("serial", "iteration", "index", "name")})


def _read(memory: mmap.mmap) -> Position:
    for _ in range(_READ_TRIES):
        data = memory[:_SIZE]
        serial, iteration, index, check, length = _HEAD.unpack_from(data)
        if serial == check == _HEAD.unpack_from(memory)[0]:
            break
    # A rank that died in the middle of a write leaves a torn record; its numbers are still the best that there is.
    name = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
    return Position(serial=serial, iteration=iteration, index=index, name=name)


class Progress:
    """What the executor tells about its progress; costs about a microsecond per instruction."""

    def __init__(self) -> None:
        self._fd = -1
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("megatron_real-progress")
            os.ftruncate(self._fd, _SIZE)
            self._memory = mmap.mmap(self._fd, _SIZE)
        else:  # not Linux: heartbeats alone tell the position
            self._memory = mmap.mmap(-1, _SIZE)
        self._serial = 0
        self._iteration = self._index = -1
        self._write("")

    @property
    def descriptor(self) -> int:
        """File descriptor of the shared memory in this process, -1 where there is none."""
        return self._fd

    def enter(self, iteration: int, step_index: int, name: str) -> None:
        """The rank starts instruction `name`, at `step_index` in the global order of `iteration`."""
        self._iteration = iteration
        self._index = step_index
        self._write(name)

    def leave(self) -> None:
        """The rank has finished the instruction that it entered last."""
        self._write("")

    def position(self) -> Position:
        """Where the rank is. Any thread may ask."""
        return _read(self._memory)

    def _write(self, name: str) -> None:
        self._serial += 1
        text = name.encode()[:_NAME_BYTES]
        record = _HEAD.pack(self._serial, self._iteration, self._index, self._serial, len(text)) + text
        self._memory[: len(record)] = record


class ProgressView:
    """The progress of another process of this host, also after its death."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """Open the memory of process `pid`.

        Raises:
            OSError: the process is gone, belongs to another user, or has no such descriptor.
        """
        fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            self._memory = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def position(self) -> Position:
        """Where the process is, or was when it died."""
        return _read(self._memory)
