"""Lower bounds of the period when only some calls have a window, or windows but no options.

Every bound is a sum of seconds that some cycle of the repeated events, or some rank, must spend in one period:

* *rank load*: all calls whose windows contain a rank, and the reallocations that it takes part in;
* *row*: calls that run one after another in every iteration, because data or a common rank orders each pair, and of
  which the last one must end before the first one starts anew. Generation, inference and training of one model are
  one; a reallocation counts as a call that runs on the windows of both copies;
* *frame*: a row whose middle calls have no window yet: they need at least the time of their best packing into nested
  windows, and at least their area over the number of ranks;
* *area*: seconds times ranks, over the number of ranks.

Invariant (tests/property/test_exact.py): no bound exceeds the optimum that full enumeration finds below the same
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron_real.plan_search.strategies.packing import MAX_CALLS, Packing, bits
from megatron_real.plan_search.strategies.reallocs import ReallocFloor
from megatron_real.plan_search.strategies.tables import Tables

__all__ = ["Bound", "Frame", "Serial", "WindowBound"]

INFINITY = float("inf")
_MAX_PACKED = 9
"""Most free calls that are packed above placed ones, at every node."""

Windows = Sequence[int]
"""Window of each call; -1 where it has none yet."""


class Frame(NamedTuple):
    """Tasks around `middle`: all of them run before or after every call of `middle`, in each iteration."""

    around: tuple[int, ...]
    middle: int
    """Bit set of calls."""


class Rows(NamedTuple):
    rows: tuple[tuple[int, ...], ...]
    frames: tuple[Frame, ...]


class Serial:
    """Finds rows and frames. Tasks are the calls, then a reallocation for each call that is not its model's home.

    A row names a call together with its reallocation by a third number, ``joint``: their sum has a better bound than
    its parts.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.num_calls = tables.num_calls
        self.moved = [
            call
            for call in range(self.num_calls)
            if tables.calls[call].model is not None and not tables.is_home(call)
        ]
        self.realloc = {call: self.num_calls + index for index, call in enumerate(self.moved)}
        self.joint = {call: task + len(self.moved) for call, task in self.realloc.items()}
        self.num_tasks = self.num_calls + 2 * len(self.moved)
        self._after = [*tables.after]
        self._before = [*tables.before]
        for call in self.moved:
            self._after.append(tables.after[call] | 1 << call)
            self._before.append(0)
        for call, task in self.realloc.items():
            for later in [call, *bits(tables.after[call])]:
                self._before[later] |= 1 << task
        self.find: Callable[[tuple[int, ...]], Rows] = lru_cache(maxsize=1 << 17)(self._find)

    def _find(self, overlaps: tuple[int, ...]) -> Rows:
        """Rows and frames of calls whose windows surely overlap as the bit sets `overlaps` say."""
        conflict = self._conflicts(overlaps)
        serial = [conflict[task] | self._after[task] | self._before[task] for task in range(len(conflict))]
        rows: set[int] = set()
        frames: set[Frame] = set()
        for first in range(len(conflict)):
            if first in self.realloc:
                continue  # the row that starts with its reallocation is longer
            for clique in _cliques(self._after[first], serial):
                row = self._closed(clique, conflict[first])
                rows.add(row | 1 << first)
                frames.update(self._frames(first, row))
        maximal = [row for row in rows if not any(row != other and row & other == row for other in rows)]
        return Rows(tuple(self._named(row) for row in maximal), tuple(frames))

    def _conflicts(self, overlaps: tuple[int, ...]) -> list[int]:
        """Bit sets of the tasks with which each task shares a rank."""
        conflict = list(overlaps)
        for call in self.moved:
            home = self._tables.home[call]
            conflict.append(overlaps[call] | overlaps[home] | 1 << call | 1 << home)
        for call, task in self.realloc.items():
            for other in bits(conflict[task]):
                conflict[other] |= 1 << task
            for other, row in self.realloc.items():
                parts = overlaps[other] | 1 << other | overlaps[self._tables.home[other]]
                parts |= 1 << self._tables.home[other]
                if other != call and parts & (1 << call | 1 << self._tables.home[call]):
                    conflict[task] |= 1 << row
                    conflict[row] |= 1 << task
        return conflict

    def _closed(self, clique: int, closes: int) -> int:
        """The largest part of a clique whose last calls all end before the first task starts anew."""
        while True:
            open_ends = 0
            for task in bits(clique):
                if not self._after[task] & clique and not closes >> task & 1:
                    open_ends |= 1 << task
            if not open_ends:
                return clique
            clique &= ~open_ends

    def _frames(self, first: int, row: int) -> list[Frame]:
        call = self.moved[first - self.num_calls] if first >= self.num_calls else first
        if first != call and not row >> call & 1:
            return []
        ends = [task for task in bits(row) if not self._after[task] & row and task != call]
        found = []
        for chosen in [ends, *([end] for end in ends if len(ends) > 1)]:
            middle = self._tables.after[call] if chosen else 0
            for end in chosen:
                middle &= self._before[end]
            middle &= (1 << self.num_calls) - 1
            if middle & (middle - 1):
                around = (self.joint[call] if first != call else call, *chosen)
                found.append(Frame(around, middle))
        return found

    def _named(self, row: int) -> tuple[int, ...]:
        for call, task in self.realloc.items():
            both = 1 << call | 1 << task
            if row & both == both:
                row = row & ~both | 1 << self.joint[call]
        return tuple(bits(row))


def _cliques(among: int, adjacent: Sequence[int]) -> list[int]:
    """All maximal cliques (Bron and Kerbosch, 1973) of the tasks of a bit set; at least the empty one."""
    found: list[int] = []

    def grow(clique: int, open_tasks: int, done: int) -> None:
        if not open_tasks:
            if not done:
                found.append(clique)
            return
        pivot = max(bits(open_tasks | done), key=lambda task: (open_tasks & adjacent[task]).bit_count())
        for task in bits(open_tasks & ~(adjacent[pivot] & ~(1 << pivot))):
            near = adjacent[task] & ~(1 << task)
            grow(clique | 1 << task, open_tasks & near, done & near)
            open_tasks &= ~(1 << task)
            done |= 1 << task

    grow(0, among, 0)
    return found


class Bound(NamedTuple):
    """Of all choices below a node of the tree."""

    seconds: float
    """Infinite: nothing below fits."""
    spread: float
    """Sum over ranks of their load squared, to break ties: even loads leave most room for the calls to come."""


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
        area = self._area(windows, placed, seconds)
        num_ranks = self._tables.tree.num_ranks
        bound = max(self._root_load, area / num_ranks)
        found = self._serial.find(self._overlaps(windows, placed))
        for row in found.rows:
            total = 0.0
            for task in row:
                total += seconds[task]
            if total > bound:
                bound = total
        bound = max(bound, self._rank_load(windows, placed, seconds))
        for frame in found.frames:
            if bound >= cutoff:
                break
            total = sum([seconds[task] for task in frame.around])
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

    def _rank_load(self, windows: Windows, placed: Sequence[int], seconds: Sequence[float]) -> float:
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
