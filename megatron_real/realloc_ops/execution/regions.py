"""Where the bytes of tensors lie in memory, for transports that take them from there and put them there themselves.

Invariants (tests/unit/realloc_ops/test_regions.py):
    - the regions of a table, in order, are the bytes of the tensors in order, each row by row;
    - nothing is remembered of where a storage was: it may come and go between two tables.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Regions", "Runs", "bytes_from"]


class Runs(NamedTuple):
    """The pieces without gaps that a tensor consists of, all of one size."""

    num_bytes: int
    """Of each."""
    grid: tuple[tuple[int, int], ...]
    """(Extent, bytes from one to the next) of the axes that they are laid out on, the outermost first."""

    @property
    def num_regions(self) -> int:
        return math.prod(extent for extent, _ in self.grid)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Runs:
        """The longest ones; of shape and strides alone."""
        itemsize = tensor.element_size()
        run, grid = itemsize, list[tuple[int, int]]()
        for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            step = stride * itemsize
            if extent == 1:
                continue
            if not grid and step == run:
                run *= extent
            elif grid and step == grid[-1][0] * grid[-1][1]:
                grid[-1] = (grid[-1][0] * extent, grid[-1][1])
            else:
                grid.append((extent, step))
        return cls(run, tuple(reversed(grid)))

    def offsets(self) -> np.ndarray:
        """In bytes from the start of the tensor; int64 [num_regions]."""
        found = np.zeros(1, np.int64)
        for extent, step in self.grid:
            found = (
                (found[:, None] + np.arange(0, extent * step, step)).ravel() if step else found.repeat(extent)
            )
        return found


class Regions:
    """The bytes of some tensors on the CPU, one behind the other, each row by row."""

    __slots__ = ("_dense", "_runs", "num_bytes", "tensors")

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Read shapes and strides; storages may be freed."""
        self.tensors = tensors
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._runs = [Runs.of(tensor) for tensor in tensors]
        self._dense = not any(runs.grid for runs in self._runs)

    def table(self) -> np.ndarray:
        """Address and size of every region, where they lie now: int64 [regions, 2], as `struct iovec` has them."""
        if self._dense:
            pairs = zip(self.tensors, self._runs, strict=True)
            return np.array([(tensor.data_ptr(), runs.num_bytes) for tensor, runs in pairs], np.int64)
        parts: list[np.ndarray] = []
        for tensor, runs in zip(self.tensors, self._runs, strict=True):
            part = np.empty((runs.num_regions, 2), np.int64)
            part[:, 0] = runs.offsets() + tensor.data_ptr()
            part[:, 1] = runs.num_bytes
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def content(self) -> bytes:
        """A copy of all bytes."""
        return b"".join(ctypes.string_at(address, num_bytes) for address, num_bytes in self.table().tolist())

    def fill(self, content: bytes) -> None:
        """Overwrite all bytes; as many as there are."""
        start = 0
        for address, num_bytes in self.table().tolist():
            ctypes.memmove(address, content[start : start + num_bytes], num_bytes)
            start += num_bytes


def bytes_from(table: np.ndarray, start: int, most: int, stop: int | None = None) -> np.ndarray:
    """The regions of a table from one byte on, at most so many; a copy where the first or last one is cut.

    Args:
        table: int64 [regions, 2].
        start: the byte, before the end of the last region.
        most: regions.
        stop: no byte from here on.
    """
    ends = table[:, 1].cumsum()
    first = int(ends.searchsorted(start, side="right")) if start else 0
    last = first + most
    if stop is not None:
        last = min(last, int(ends.searchsorted(stop, side="left")) + 1)
    window = table[first:last]
    before = start - int(ends[first - 1]) if first else start
    behind = int(ends[first + len(window) - 1]) - stop if stop is not None else 0
    if before or behind > 0:
        window = window.copy()
        window[0, 0] += before
        window[0, 1] -= before
        window[-1, 1] -= max(behind, 0)
    return window
