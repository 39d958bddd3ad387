"""Lower bounds of the period when only some calls have a window, or windows but no options.

Every bound is a sum of seconds that some cycle of the repeated events, or some rank, must spend in one period:

* *rank load*: all calls whose windows contain a rank, and the reallocations that it takes part in;
* *row*, *frame*: see `strategies/rows.py`. Calls of a frame without a window need at least the time of their best
  packing into nested windows, and at least their area over the number of ranks;
* *area*: seconds times ranks, over the number of ranks.

Invariant (tests/property/test_exact.py): no bound exceeds the optimum that full enumeration finds below the same
windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_real.plan_search.strategies.packing import MAX_CALLS, Packing, bits
from megatron_real.plan_search.strategies.reallocs import INFINITY, ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Tables

__all__ = ["Bound", "WindowBound"]

_MAX_PACKED = 9
"""Most free calls that are packed above placed ones, at every node."""

Windows = Sequence[int]
"""Window of each call; -1 where it has none yet."""


class Bound(NamedTuple):
    """Of all choices below a node of the tree."""

    seconds: float
    """Infinite: nothing below fits."""
    spread: float
    """Sum over ranks of their load squared, to break ties: even loads leave most room for the calls to come."""


class _Group(NamedTuple):
    """Calls of one model on one window."""

    joints: frozenset[int]
    """Their joint tasks (see `Serial`)."""
    window: int
    seconds: float
    """What they need beside their runs, to fill copies that they may share."""


class WindowBound:
    """Bounds a partial choice of windows."""

    def __init__(self, tables: Tables, serial: Serial, reallocs: ReallocFloor) -> None:
        self._tables = tables
        self._serial = serial
        self._reallocs = reallocs
        num = tables.num_calls
        by_size = [
            {size: items[0].seconds for size, items in tables.items[call].items() if items}
            for call in range(num)
        ]
        loads = [
            {size: min(item.load_s for item in items) for size, items in tables.items[call].items() if items}
            for call in range(num)
        ]
        self._loads = loads
        self._packing = Packing(tables, by_size)
        self._load_packing = Packing(tables, loads)
        windows = [tables.candidates[call] for call in range(num)]
        size = tables.tree.size
        self._free_seconds = [
            min((by_size[call][size[w]] for w in windows[call]), default=INFINITY) for call in range(num)
        ]
        self._free_area = [
            min((loads[call][size[w]] * size[w] for w in windows[call]), default=INFINITY)
            for call in range(num)
        ]
        self._free_middle = [
            min((by_size[call][size[w]] * size[w] for w in windows[call]), default=INFINITY)
            for call in range(num)
        ]
        self._meets = [
            [
                all(tables.tree.overlap(window, other) for other in windows[call])
                for window in range(len(size))
            ]
            for call in range(num)
        ]
        self._always = self._forced_overlaps()
        self._least = [
            {
                s: (min(i.kept for i in items), min(i.full for i in items))
                for s, items in tables.items[call].items()
                if items
            }
            for call in range(num)
        ]
        homes = dict.fromkeys(tables.home[call] for call in serial.moved)
        families = [(home, [call for call in serial.moved if tables.home[call] == home]) for home in homes]
        self._families = [(home, calls) for home, calls in families if len(calls) > 1]
        everything = (1 << num) - 1
        self._packs = tables.tree.laminar and all(tables.candidates)
        self._root_load = self._load_packing.least(everything) if self._packs and num <= MAX_CALLS else 0.0

    def _forced_overlaps(self) -> list[int]:
        """Bit sets of calls that overlap a call whichever windows the two take."""
        num = self._tables.num_calls
        always = [0] * num
        for one in range(num):
            for two in range(num):
                if one != two and all(self._meets[two][w] for w in self._tables.candidates[one]):
                    always[one] |= 1 << two
        return always

    def least_area(self, call: int) -> float:
        """Rank-seconds of a call where it needs fewest."""
        return self._free_area[call]

    def __call__(self, windows: Windows, cutoff: float = INFINITY, *, reallocs: bool = True) -> Bound:
        """Of all choices with these windows. At least `cutoff` is as good as infinite: work stops there.

        Without `reallocs`, these are taken for free: their prices take time.
        """
        placed = [call for call, window in enumerate(windows) if window >= 0]
        seconds = self._task_seconds(windows, placed, reallocs=reallocs)
        if seconds is None:
            return Bound(INFINITY, INFINITY)
        groups = self._groups(windows, seconds) if reallocs else []
        area = self._area(windows, placed, seconds)
        area += sum([group.seconds * self._tables.tree.size[group.window] for group in groups])
        num_ranks = self._tables.tree.num_ranks
        bound = max(self._root_load, area / num_ranks)
        found = self._serial.find(self._overlaps(windows, placed))
        for row in found.rows:
            total = 0.0
            for task in row:
                total += seconds[task]
            for group in groups:
                if group.joints.issubset(row):
                    total += group.seconds
            if total > bound:
                bound = total
        bound = max(bound, self._rank_load(windows, placed, seconds, groups))
        for frame in found.frames:
            if bound >= cutoff:
                break
            total = sum([seconds[task] for task in frame.ends])
            total += min([seconds[task] for task in frame.heads], default=0.0)
            bound = max(bound, total + self._middle(frame.middle, windows, seconds))
        return Bound(bound, self._spread(windows, placed, seconds))

    def _spread(self, windows: Windows, placed: Sequence[int], seconds: Sequence[float]) -> float:
        tree = self._tables.tree
        total = 0.0
        for position, one in enumerate(placed):
            size = tree.size[windows[one]]
            total += seconds[one] ** 2 * size
            for two in placed[:position]:
                if tree.overlap(windows[one], windows[two]):
                    shared = min(size, tree.size[windows[two]])
                    total += 2 * seconds[one] * seconds[two] * shared
        return total

    def _overlaps(self, windows: Windows, placed: Sequence[int]) -> tuple[int, ...]:
        overlap = self._tables.tree.overlap
        overlaps = self._always[:]
        for position, one in enumerate(placed):
            for two in placed[:position]:
                if overlap(windows[one], windows[two]):
                    overlaps[one] |= 1 << two
                    overlaps[two] |= 1 << one
        if len(placed) < len(windows):
            for free in range(len(windows)):
                if windows[free] >= 0:
                    continue
                meets = self._meets[free]
                for one in placed:
                    if meets[windows[one]]:
                        overlaps[free] |= 1 << one
                        overlaps[one] |= 1 << free
        return tuple(overlaps)

    def _task_seconds(self, windows: Windows, placed: Sequence[int], *, reallocs: bool) -> list[float] | None:
        """Least seconds of every task; None if the placed calls cannot fit beside each other.

        A reallocation alone counts nothing, only together with its call.
        """
        seconds = self._free_seconds + [0.0] * (self._serial.num_tasks - len(windows))
        fastest = self._fastest(windows, placed)
        if fastest is None:
            return None
        for call, least in fastest.items():
            seconds[call] = least
        for call, joint in self._serial.joint.items():
            home = self._tables.home[call]
            seconds[joint] = seconds[call]
            if reallocs and windows[call] >= 0 and windows[home] >= 0 and not self._may_share(call, windows):
                pair = self._reallocs.pair(call, windows[home], windows[call])
                seconds[joint] = max(seconds[call], pair.least_joint)
        return seconds

    def _groups(self, windows: Windows, seconds: Sequence[float]) -> list[_Group]:
        """Calls of one model that share a window with each other, and with no call that has none yet."""
        found = []
        for home, calls in self._families:
            by_window: dict[int, list[int]] = {}
            for call in calls:
                by_window.setdefault(windows[call], []).append(call)
            if windows[home] < 0 or -1 in by_window:
                continue
            for window, group in by_window.items():
                if len(group) > 1:
                    together = self._reallocs.together(group, windows[home], window)
                    extra = max(0.0, together - sum([seconds[call] for call in group]))
                    found.append(_Group(frozenset(self._serial.joint[call] for call in group), window, extra))
        return found

    def _may_share(self, call: int, windows: Windows) -> bool:
        """Whether another call may have filled the copy before."""
        tables = self._tables
        return any(
            other != call
            and tables.home[other] == tables.home[call]
            and windows[other] in (-1, windows[call])
            for other in self._serial.moved
        )

    def _fastest(self, windows: Windows, placed: Sequence[int]) -> dict[int, float] | None:
        """Seconds of the fastest option of each placed call that fits beside the least of the others."""
        tables = self._tables
        capacity = tables.problem.capacity_bytes
        meshes = tables.tree.windows
        room = dict.fromkeys(placed, capacity)
        least = self._least
        size = tables.tree.size
        homes = [call for call in placed if tables.is_home(call)]
        kept = {call: least[call][size[windows[call]]] for call in homes}
        for start in {meshes[windows[call]].start for call in placed}:
            here = [call for call in homes if start in meshes[windows[call]]]
            if not here:
                continue
            if sum([kept[home][1] for home in here]) > capacity:
                return None
            for call in placed:
                if start in meshes[windows[call]]:
                    full = tables.holds_full
                    others = sum([kept[home][full[home][call]] for home in here if home != call])
                    room[call] = min(room[call], capacity - others)
        result = {}
        for call in placed:
            at_home = windows[tables.home[call]] in (-1, windows[call])
            limit = room[call]
            for item in tables.items[call][size[windows[call]]]:
                if (item.shared if at_home else item.own) <= limit:
                    result[call] = item.seconds
                    break
            else:
                return None
        return result

    def _area(self, windows: Windows, placed: Sequence[int], seconds: Sequence[float]) -> float:
        tables = self._tables
        area = 0.0
        for call, window in enumerate(windows):
            if window < 0:
                area += self._free_area[call]
            else:
                size = tables.tree.size[window]
                area += max(seconds[call], self._loads[call][size]) * size
        for call, joint in self._serial.joint.items():
            if windows[call] >= 0:
                area += (seconds[joint] - seconds[call]) * tables.tree.size[windows[call]]
        return area

    def _rank_load(
        self,
        windows: Windows,
        placed: Sequence[int],
        seconds: Sequence[float],
        groups: Sequence[_Group],
    ) -> float:
        meshes = self._tables.tree.windows
        size = self._tables.tree.size
        best = 0.0
        for start in {meshes[windows[call]].start for call in placed}:
            total = 0.0
            for call in placed:
                if start in meshes[windows[call]]:
                    total += max(seconds[call], self._loads[call][size[windows[call]]])
            for call, joint in self._serial.joint.items():
                if windows[call] >= 0 and start in meshes[windows[call]]:
                    total += seconds[joint] - seconds[call]
            for group in groups:
                if start in meshes[group.window]:
                    total += group.seconds
            best = max(best, total)
        return best

    def _middle(self, middle: int, windows: Windows, seconds: Sequence[float]) -> float:
        """Least time between the first and the last tasks of a frame."""
        tree = self._tables.tree
        area = 0.0
        free = 0
        heights: dict[int, float] = {}
        for call in bits(middle):
            window = windows[call]
            if window < 0:
                area += self._free_middle[call]
                free |= 1 << call
            else:
                area += seconds[call] * tree.size[window]
                heights[window] = heights.get(window, 0.0) + seconds[call]
        best = area / tree.num_ranks
        if not self._packs or not free:
            return best
        if free.bit_count() <= _MAX_PACKED:
            return max(best, self._packing.on_top(free, heights))
        return max(best, self._packing.least(middle)) if middle.bit_count() <= MAX_CALLS else best
