"""Tasks that run one after another in every iteration: what lower bounds of the period add up.

Tasks are the calls and the reallocations.

* *row*: of each two tasks one always ends before the other starts, and the last one must end before the first one
  starts anew. Data orders two tasks, or a common rank (a reallocation runs on the windows of both copies), or a
  reallocation between them: it follows the call that comes first and precedes its own;
* *frame*: calls (`middle`) that all run in the same part of the iteration, and of which only some have windows. The
  part begins when one of `heads` ends and it is over before `ends`, a row, start.

Generation, inference and training of one model are a row; so are two generations of it on windows that share no rank
but meet the window of the training.

Invariant (tests/property/test_exact.py): no bound exceeds the optimum that full enumeration finds below the same
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron_real.plan_search.strategies.packing import bits
from megatron_real.plan_search.strategies.tables import Tables

__all__ = ["Frame", "Rows", "Serial"]


class Frame(NamedTuple):
    """Calls between others: `middle` runs after one of `heads` and before all of `ends`, in each iteration."""

    heads: tuple[int, ...]
    """Tasks that start only when `ends` are over; none: the calls of `middle` themselves do."""
    ends: tuple[int, ...]
    middle: int
    """Bit set of calls."""


class Rows(NamedTuple):
    """Of windows that overlap in one way."""

    rows: tuple[tuple[int, ...], ...]
    frames: tuple[Frame, ...]


class Serial:
    """Finds rows and frames. Tasks are the calls, then a reallocation for each call that is not its model's home.

    There is none for calls of a model that may be in the nodes' host stores. A row names a call together with its
    reallocation by a third number, ``joint``: their sum has a better bound than its parts.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.num_calls = tables.num_calls
        self.moved = [
            call
            for call in range(self.num_calls)
            if tables.calls[call].model is not None
            and not tables.is_home(call)
            and not tables.may_be_stored[call]
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
        calls = range(self.num_calls)
        self._sources = [
            [call for call in bits(tables.before[end]) if not tables.before[call]] for end in calls
        ]
        """Calls that need no data, of those before each call."""
        self._siblings = [
            sum(
                1 << other
                for other in self.moved
                if other != call and tables.home[other] == tables.home[call]
            )
            for call in calls
        ]
        """Calls that may have filled the copy of each call before it."""
        self.find: Callable[[tuple[int, ...]], Rows] = lru_cache(maxsize=1 << 17)(self._find)

    def _find(self, overlaps: tuple[int, ...]) -> Rows:
        """Rows and frames of calls whose windows surely overlap as the bit sets `overlaps` say."""
        conflict = self._conflicts(overlaps)
        chained = self._chained(conflict)
        over = self._over(conflict)
        serial = [
            conflict[task] | self._after[task] | self._before[task] | chained[task]
            for task in range(len(conflict))
        ]
        rows: set[int] = set()
        frames: set[Frame] = set()
        for first in range(len(conflict)):
            if first in self.realloc:
                continue  # the row that starts with its reallocation is longer
            for clique in _cliques(self._after[first], serial):
                row = self._closed(clique, self._after, over[first])
                rows.add(row | 1 << first)
                frames.update(self._frames(first, row))
        for last in range(self.num_calls):
            if len(self._sources[last]) > 1:
                waits = sum(1 << task for task in range(len(over)) if over[task] >> last & 1)
                for clique in _cliques(self._before[last], serial):
                    rows.add(self._closed(clique, self._before, waits) | 1 << last)
                frames.update(self._frames_before(last, waits))
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

    def _over(self, conflict: Sequence[int]) -> list[int]:
        """Bit sets of the tasks that end before each task starts anew in the next iteration.

        A common rank sees to it, of a task or what follows it and the other task or what that one waits for.
        """
        over = []
        for task in range(len(conflict)):
            found = 0
            for one in (task, *bits(self._before[task])):
                found |= conflict[one] | 1 << one
            for one in bits(found):
                found |= self._before[one]
            over.append(found)
        return over

    def _chained(self, conflict: Sequence[int]) -> list[int]:
        """Bit sets of the calls that no common rank orders, but the reallocation of whichever comes second.

        That of a call on a copy of its own stands right before it and waits for the other call. Only calls that none
        but the other one can have filled the copy for: if it did, the two share their window.
        """
        chained = [0] * len(conflict)
        for one in self.moved:
            for two in self.moved:
                pair = 1 << one | 1 << two
                alone = not (self._siblings[one] | self._siblings[two]) & ~pair
                meet = conflict[self.realloc[one]] >> two & 1 and conflict[self.realloc[two]] >> one & 1
                if one != two and alone and meet:
                    chained[one] |= 1 << two
        return chained

    def _closed(self, clique: int, beyond: Sequence[int], closes: int) -> int:
        """The largest part of a clique whose tasks with nothing `beyond` them in it are all in `closes`.

        Those are the last ones of a row, which must end before its first task starts anew, or its first ones, which
        must wait for the last.
        """
        while True:
            open_ends = 0
            for task in bits(clique):
                if not beyond[task] & clique and not closes >> task & 1:
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
                found.append(Frame((self.joint[call] if first != call else call,), tuple(chosen), middle))
        return found

    def _frames_before(self, last: int, waits: int) -> list[Frame]:
        """Frames between the end of `last` and its next start, where several calls that wait for it come first."""
        heads = [call for call in self._sources[last] if waits >> self.realloc.get(call, call) & 1]
        if len(heads) < 2:
            return []
        middle = 0
        for head in heads:
            middle |= self._tables.after[head] & self._tables.before[last]
        everything = middle | sum(1 << head for head in heads)
        found = [Frame((), (last,), everything)]
        if middle:
            found.append(Frame(tuple(self.joint.get(head, head) for head in heads), (last,), middle))
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
