"""Time marks inside real calls: host time on a CPU, events of the current stream on CUDA, which disturb nothing.

Invariants (tests/e2e/test_profile.py):
    - seconds between marks are those of the work between them, on either device;
    - a probed method is the original again after the block.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["Marks", "median", "probed", "quartile_range", "timed"]


class Marks:
    """Points in time, by name, in the order in which they were set."""

    def __init__(self) -> None:
        self._on_cuda = torch.cuda.is_available()
        self._marks: dict[str, list[Any]] = {}

    def __call__(self, name: str) -> None:
        """Set a mark."""
        mark: Any
        if self._on_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.setdefault(name, []).append(mark)

    def count(self, name: str) -> int:
        """How often a mark was set."""
        return len(self._marks.get(name, []))

    def seconds(self, start: str, start_index: int, end: str, end_index: int) -> float:
        """From one mark to another; on CUDA only after `finish`."""
        first, last = self._marks[start][start_index], self._marks[end][end_index]
        if self._on_cuda:
            return float(first.elapsed_time(last)) / 1e3
        return float(last - first)

    def finish(self) -> None:
        """Wait until all marks have passed."""
        if self._on_cuda:
            torch.cuda.synchronize()


@contextlib.contextmanager
def probed(owner: Any, method: str, marks: Marks, name: str) -> Iterator[None]:
    """Mark ``NAME begin`` and ``NAME end`` around every call of a bound method, for a block."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def probe(*args: Any, **kwargs: Any) -> Any:
        marks(f"{name} begin")
        result = original(*args, **kwargs)
        marks(f"{name} end")
        return result

    owner.__dict__[method] = probe
    try:
        yield
    finally:
        del owner.__dict__[method]


def timed(work: Callable[[], object], repetitions: int) -> float:
    """Seconds of one run of `work`, from several in a row."""
    _wait()
    began_s = time.perf_counter()
    for _ in range(repetitions):
        work()
    _wait()
    return (time.perf_counter() - began_s) / repetitions


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two middle ones."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def quartile_range(values: Sequence[float]) -> float:
    """Distance between the quartiles."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[(3 * last + 2) // 4] - ordered[last // 4]
