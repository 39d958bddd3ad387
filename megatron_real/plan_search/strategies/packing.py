"""The shortest time in which calls can run in nested windows, one after another where the windows overlap.

Exact for a tree of windows if memory, data and copies are left out: a window runs some of the calls itself, on all its
ranks, and its children share the others. Computed for all sets of calls at once: an array by bit set.

Invariant (tests/property/test_exact.py): equal to trying every placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megatron_real.plan_search.strategies.tables import Tables

__all__ = ["MAX_CALLS", "Packing", "bits"]

MAX_CALLS = 12
"""The time of a computation grows as the power of 3 of the number of calls."""

Times = NDArray[np.float64]
Indices = NDArray[np.int64]


def bits(mask: int) -> list[int]:
    """Positions of the ones."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


class Packing:
    """Packs calls by their seconds on a window of each size; a size that is missing has no option."""

    def __init__(self, tables: Tables, seconds: Sequence[Mapping[int, float]]) -> None:
        self._tree = tables.tree
        self._seconds = seconds
        self._allowed = [set(tables.candidates[call]) for call in range(tables.num_calls)]
        # A pinned call fits on one window only, so equal shapes may differ.
        self._by_window = bool(tables.problem.pinned)
        self._serial: dict[tuple[int, int], Times] = {}
        self._empty: dict[tuple[int, int], Times] = {}

    def least(self, calls: int) -> float:
        """Seconds of the calls of a bit set, on an empty cluster."""
        return self.on_top(calls, {})

    def on_top(self, calls: int, heights: Mapping[int, float]) -> float:
        """Seconds of the calls of a bit set and of what windows hold already (`heights`, in seconds, by window)."""
        taken = sum(1 << window for window in heights)
        return float(self._siblings(self._tree.roots, calls, heights, taken)[-1])

    def _siblings(
        self, windows: Iterable[int], calls: int, heights: Mapping[int, float], taken: int
    ) -> Times:
        best: Times | None = None
        for window in windows:
            if self._tree.inside[window] & taken:
                mine = self._window(window, calls, heights, taken)
            else:
                mine = self._untouched(window, calls)
            if best is None:
                best = mine
            else:
                parts, rests, starts = _pairs(calls.bit_count())
                best = np.minimum.reduceat(np.maximum(best[parts], mine[rests]), starts)
        assert best is not None, "a tree has windows"
        return best

    def _untouched(self, window: int, calls: int) -> Times:
        key = (window if self._by_window else self._tree.shape[window], calls)
        known = self._empty.get(key)
        if known is None:
            known = self._empty[key] = self._window(window, calls, {}, 0)
        return known

    def _window(self, window: int, calls: int, heights: Mapping[int, float], taken: int) -> Times:
        """By subset of `calls`: seconds of it inside the window."""
        best = self._all_here(window, calls)
        children = self._tree.children[window]
        if children:
            below = self._siblings(children, calls, heights, taken)
            parts, rests, starts = _pairs(calls.bit_count())
            best = np.minimum.reduceat(best[parts] + below[rests], starts)
        return best + heights[window] if window in heights else best

    def _all_here(self, window: int, calls: int) -> Times:
        """By subset of `calls`: the sum of their seconds on all ranks of the window."""
        key = (window if self._by_window else self._tree.shape[window], calls)
        known = self._serial.get(key)
        if known is None:
            known = np.zeros(1)
            for call in bits(calls):
                seconds = float("inf")
                if window in self._allowed[call]:
                    seconds = self._seconds[call].get(self._tree.size[window], seconds)
                known = np.concatenate([known, known + seconds])
            self._serial[key] = known
        return known


@cache
def _pairs(count: int) -> tuple[Indices, Indices, Indices]:
    """All splits of all subsets of `count` things: parts, rests, and where the splits of each subset start."""
    parts = np.zeros(1, dtype=np.int64)
    rests = np.zeros(1, dtype=np.int64)
    for thing in range(count):
        bit = 1 << thing
        parts, rests = (
            np.concatenate([parts, parts | bit, parts]),
            np.concatenate([rests, rests, rests | bit]),
        )
    order = np.argsort(parts | rests, kind="stable")
    parts, rests = parts[order], rests[order]
    return parts, rests, np.searchsorted(parts | rests, np.arange(1 << count))
