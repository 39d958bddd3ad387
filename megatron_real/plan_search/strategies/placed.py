"""What is known of a leaf of the tree, where every call has its window, before options are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from megatron_real.plan_search.strategies.orders import distinct_orders
from megatron_real.plan_search.strategies.reallocs import PairPrices, ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Tables

__all__ = ["Meeting", "Order", "Placed", "Placer"]

Order = tuple[int, ...]

_FIRST_ORDERS = 24
_ALL_ORDERS = 2000
"""Most orders that are made; where there are more, the certificate falls back to the bound."""


class Meeting(NamedTuple):
    """Calls whose windows meet at a rank."""

    calls: tuple[int, ...]
    homes: tuple[int, ...]
    """Those of them that are their model's home."""
    moves: tuple[int, ...]
    """Tasks of the reallocations there; a joint task stands for a call of `calls` and its reallocation."""


class Placed(NamedTuple):
    """Windows of all calls, and what follows from them."""

    windows: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    """Of tasks (see `Serial`), then of groups."""
    meetings: tuple[Meeting, ...]
    largest: tuple[Meeting, ...]
    """Those whose calls are not all part of another one."""
    prices: dict[int, PairPrices]
    """Of the reallocation of each call that is not its model's home."""
    orders: tuple[Order, ...]
    """The first orders that differ in what happens."""
    all_orders: bool
    """Whether there are no others."""
    kind: tuple[tuple[int, ...], Order]
    """What the orders follow from: calls that cannot change places, and a ranking."""
    shared: frozenset[int]
    """Calls whose copy another call may have filled."""
    shared_joints: frozenset[int]
    """Their joint tasks."""
    sharing: dict[int, int]
    """How many calls the group of each of these has."""
    groups: tuple[tuple[int, ...], ...]
    """Calls of one model on one window. Each group has a task more, numbered on from `Serial.num_tasks`, in the rows
    and meetings that all of them are in: what they need to fill their copies."""


class Placer:
    """Makes `Placed` for one problem."""

    def __init__(self, tables: Tables, serial: Serial, reallocs: ReallocFloor) -> None:
        self._tables = tables
        self._serial = serial
        self._reallocs = reallocs
        self._orders: dict[tuple[object, int], tuple[tuple[Order, ...], bool]] = {}
        problem = tables.problem
        self._fixed_order: Order | None = None
        if problem.order is not None:
            number = {call.name: index for index, call in enumerate(tables.calls)}
            self._fixed_order = tuple(number[name] for name in next(problem.orders()))

    def place(self, windows: Sequence[int]) -> Placed:
        """Everything about these windows."""
        tables = self._tables
        meshes = [tables.tree.windows[window] for window in windows]
        calls = range(tables.num_calls)
        overlaps = tuple(
            sum(1 << other for other in calls if other != call and meshes[call].overlaps(meshes[other]))
            for call in calls
        )
        groups = self._groups(windows)
        prices = {
            call: self._reallocs.pair(call, windows[tables.home[call]], windows[call])
            for call in self._serial.moved
        }
        kind = self._kind(windows, overlaps)
        orders, complete = self.orders(kind, _FIRST_ORDERS)
        meetings = tuple(
            one._replace(moves=self._with_groups(one.moves, groups)) for one in self._meetings(windows)
        )
        shared = frozenset(call for group in groups for call in group)
        return Placed(
            windows=tuple(windows),
            rows=tuple(self._with_groups(row, groups) for row in self._serial.find(overlaps).rows),
            meetings=meetings,
            largest=tuple(
                one for one in meetings if not any(set(one.calls) < set(other.calls) for other in meetings)
            ),
            prices=prices,
            orders=orders,
            all_orders=complete,
            kind=kind,
            shared=shared,
            shared_joints=frozenset(self._serial.joint[call] for call in shared),
            sharing={call: len(group) for group in groups for call in group},
            groups=groups,
        )

    def _meetings(self, windows: Sequence[int]) -> tuple[Meeting, ...]:
        tables = self._tables
        meshes = [tables.tree.windows[window] for window in windows]
        found = {}
        for start in {mesh.start for mesh in meshes}:
            calls = tuple(call for call in range(tables.num_calls) if start in meshes[call])
            moves = tuple(
                self._serial.joint[call] if call in calls else task
                for call, task in self._serial.realloc.items()
                if call in calls or start in meshes[tables.home[call]]
            )
            found[calls] = Meeting(calls, tuple(call for call in calls if tables.is_home(call)), moves)
        return tuple(found.values())

    def _groups(self, windows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, int], list[int]] = {}
        for call in self._serial.moved:
            found.setdefault((self._tables.home[call], windows[call]), []).append(call)
        return tuple(tuple(calls) for calls in found.values() if len(calls) > 1)

    def _with_groups(self, tasks: tuple[int, ...], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
        joint = self._serial.joint
        here = [
            number
            for number, group in enumerate(groups, self._serial.num_tasks)
            if all(joint[call] in tasks for call in group)
        ]
        return (*tasks, *here)

    def orders(
        self, kind: tuple[tuple[int, ...], Order], most: int = _ALL_ORDERS
    ) -> tuple[tuple[Order, ...], bool]:
        """Orders of a kind that differ in what happens, at most so many, and whether these are all."""
        if self._fixed_order is not None:
            return (self._fixed_order,), True
        known = self._orders.get((kind, most))
        if known is None:
            found = tuple(islice(distinct_orders(self._tables.before, *kind), most + 1))
            known = self._orders[kind, most] = (found[:most], len(found) <= most)
        return known

    def _kind(self, windows: Sequence[int], overlaps: Sequence[int]) -> tuple[tuple[int, ...], Order]:
        tables = self._tables
        calls = range(tables.num_calls)
        # A call also runs on its home copy's ranks: the reallocation, the reload and the offload stand there.
        reach = [overlaps[call] | overlaps[tables.home[call]] | 1 << tables.home[call] for call in calls]
        dependent = [
            sum(
                1 << other
                for other in calls
                if other != call
                and (
                    reach[call] & (1 << other | 1 << tables.home[other])
                    or reach[other] & (1 << call | 1 << tables.home[call])
                    or tables.home[call] == tables.home[other]
                )
            )
            for call in calls
        ]
        ranking = tuple(sorted(calls, key=lambda call: (-tables.tree.size[windows[call]], call)))
        return tuple(dependent), ranking
