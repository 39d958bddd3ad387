"""The best options of all calls where every call has its window.

Depth first over sets of options that are left for each call. `_narrow` removes options that cannot fit beside the least
of the others, or whose bound reaches the best choice so far; what is left is bounded by its fastest options. If these
fit together and their period is the bound, the node is done; else a set is split: that of a layout which the
reallocations depend on, or of the call that fills the fullest rank.

Invariant (tests/property/test_exact.py): the best of a leaf equals full enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from megatron_real.plan_search.kernel import Kernel, Seconds
from megatron_real.plan_search.problem import Choice, Evaluation
from megatron_real.plan_search.strategies.bounds import INFINITY, ReallocFloor, Serial
from megatron_real.plan_search.strategies.orders import distinct_orders
from megatron_real.plan_search.strategies.tables import Item, Tables

__all__ = ["LeafSolver", "SearchState"]

Domains = list[list[Item]]
Order = tuple[int, ...]

_OWN, _KEPT, _FULL = 0, 1, 2
_ROUNDING = 1e-9
_FIRST_ORDERS = 24
"""Orders that a candidate is tried in before its node is split."""
_ALL_ORDERS = 2000
"""Of a choice without alternatives; where there are more, the certificate falls back to the bound."""


class SearchState(Protocol):
    """The best choice so far, and what is known of the parts of the tree that were left out."""

    @property
    def cutoff(self) -> float:
        """Bounds from here on are not worth following."""

    def offer(self, choices: Sequence[Choice], order: Order, evaluation: Evaluation) -> None:
        """Here is a choice."""

    def leave_out(self, bound: float) -> None:
        """A part of the tree whose bound is this is not followed."""

    def stopped(self) -> bool:
        """Whether time is up."""


class _Leaf(NamedTuple):
    windows: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    points: tuple[tuple[int, ...], ...]
    """Calls that meet at a rank, for every such set that is maximal."""
    loads: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of the same ranks: calls, and tasks of reallocations."""
    prices: dict[int, dict[tuple[int, int], float]]
    """Of the reallocation of a call, by the layouts of its home and its own."""
    orders: tuple[Order, ...]
    all_orders: bool


class _Costs(NamedTuple):
    bound: float
    seconds: list[float]
    """By task."""
    slack: list[float]
    """By task: what it may add before a row reaches the cutoff."""


class LeafSolver:
    """Finds the best options of leaves, one after another."""

    def __init__(self, tables: Tables, serial: Serial, reallocs: ReallocFloor, kernel: Kernel) -> None:
        self._tables = tables
        self._serial = serial
        self._reallocs = reallocs
        self._kernel = kernel
        self._capacity = tables.problem.capacity_bytes
        self._home_calls = [call for call in range(tables.num_calls) if tables.is_home(call)]
        self._orders: dict[tuple[object, ...], tuple[tuple[Order, ...], bool]] = {}
        problem = tables.problem
        self._fixed_order: Order | None = None
        if problem.order is not None:
            number = {call.name: index for index, call in enumerate(tables.calls)}
            self._fixed_order = tuple(number[name] for name in next(problem.orders()))

    def solve(self, windows: Sequence[int], bound: float, state: SearchState) -> None:
        """Offer the best choices with these windows, of this bound, that beat the cutoff; leave out the rest."""
        leaf = self._open(tuple(windows))
        tables = self._tables
        domains = [list(tables.items[call][tables.tree.size[window]]) for call, window in enumerate(windows)]
        stack: list[tuple[float, Domains]] = [(bound, domains)]
        while stack:
            known, domains = stack.pop()
            if state.stopped():
                state.leave_out(min([known, *(rest for rest, _ in stack)]))
                return
            if known >= state.cutoff:
                state.leave_out(known)
                continue
            costs = self._narrow(leaf, domains, state)
            if costs is not None:
                stack += reversed(self._branch(leaf, domains, costs, state))

    def first(self, windows: Sequence[int], state: SearchState) -> None:
        """Offer only the candidate of the whole leaf: cheap, no certificate."""
        leaf = self._open(tuple(windows))
        tables = self._tables
        domains = [list(tables.items[call][tables.tree.size[window]]) for call, window in enumerate(windows)]
        costs = self._narrow(leaf, domains, state)
        if costs is not None:
            self._try(leaf, self._candidate(leaf, domains), costs.bound, state, final=False)

    def _open(self, windows: tuple[int, ...]) -> _Leaf:
        tables = self._tables
        tree = tables.tree
        meshes = [tree.windows[window] for window in windows]
        calls = range(tables.num_calls)
        overlaps = tuple(
            sum(1 << other for other in calls if other != call and meshes[call].overlaps(meshes[other]))
            for call in calls
        )
        here = {
            tuple(call for call in calls if start in meshes[call]): start
            for start in {mesh.start for mesh in meshes}
        }
        points = tuple(point for point in here if not any(set(point) < set(other) for other in here))
        loads = []
        for point, start in here.items():
            moves = tuple(
                self._serial.joint[call] if call in point else task
                for call, task in self._serial.realloc.items()
                if call in point or start in meshes[tables.home[call]]
            )
            loads.append((point, moves))
        prices = {
            call: self._reallocs.table(call, windows[tables.home[call]], windows[call])
            for call in self._serial.moved
        }
        orders, complete = self._orders_of(windows, overlaps)
        return _Leaf(
            windows, self._serial.find(overlaps).rows, points, tuple(loads), prices, orders, complete
        )

    def _orders_of(self, windows: Sequence[int], overlaps: Sequence[int]) -> tuple[tuple[Order, ...], bool]:
        """Orders to try, and whether these are all that differ."""
        if self._fixed_order is not None:
            return (self._fixed_order,), True
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
        key = (tuple(dependent), ranking)
        known = self._orders.get(key)
        if known is None:
            found = tuple(islice(distinct_orders(tables.before, dependent, ranking), _ALL_ORDERS + 1))
            known = (found[:_ALL_ORDERS], len(found) <= _ALL_ORDERS)
            self._orders[key] = known
        return known

    def _narrow(self, leaf: _Leaf, domains: Domains, state: SearchState) -> _Costs | None:
        """Remove what cannot be part of a better choice, in place; None if nothing is left."""
        for _ in range(6):
            limits = self._limits(leaf, domains)
            if limits is None:
                return None
            changed = self._remove_large(leaf, domains, limits)
            if not all(domains):
                return None
            cutoff = state.cutoff
            costs = self._costs(leaf, domains, cutoff)
            if costs.bound >= cutoff:
                state.leave_out(costs.bound)
                return None
            if self._remove_slow(leaf, domains, costs):
                state.leave_out(cutoff)
                changed = True
                if not all(domains):
                    return None
            if not changed:
                break
        return costs

    def _needs(self, leaf: _Leaf, domains: Domains, call: int) -> list[int]:
        """Bytes of its own of each option that is left."""
        home = self._tables.home[call]
        if home == call or leaf.windows[home] != leaf.windows[call]:
            return [item.own for item in domains[call]]
        layouts = {item.layout for item in domains[home]}
        return [item.shared if item.layout in layouts else item.own for item in domains[call]]

    def _limits(self, leaf: _Leaf, domains: Domains) -> list[list[int]] | None:
        """For each call the most bytes (own, kept, full) beside the least of the others; None if nothing fits."""
        full = self._tables.holds_full
        least = [
            (
                min(self._needs(leaf, domains, call)),
                min([item.kept for item in domains[call]]),
                min([item.full for item in domains[call]]),
            )
            for call in range(len(domains))
        ]
        limits = [[self._capacity] * 3 for _ in domains]
        for point in leaf.points:
            homes = [call for call in point if call in self._home_calls]
            slack = self._capacity - sum([least[home][2] for home in homes])
            if slack < 0:
                return None
            for home in homes:
                limits[home][2] = min(limits[home][2], least[home][2] + slack)
            for call in point:
                others = [(home, 2 if full[home][call] else 1) for home in homes if home != call]
                slack = self._capacity - least[call][0] - sum([least[home][at] for home, at in others])
                if slack < 0:
                    return None
                limits[call][0] = min(limits[call][0], least[call][0] + slack)
                for home, at in others:
                    limits[home][at] = min(limits[home][at], least[home][at] + slack)
        return limits

    def _remove_large(self, leaf: _Leaf, domains: Domains, limits: Sequence[Sequence[int]]) -> bool:
        changed = False
        for call, (own, kept, full) in enumerate(limits):
            needs = self._needs(leaf, domains, call)
            left = [
                item
                for item, need in zip(domains[call], needs, strict=True)
                if need <= own and item.kept <= kept and item.full <= full
            ]
            if len(left) < len(domains[call]):
                domains[call] = left
                if not left:
                    return True
                changed = True
        return changed

    def _costs(self, leaf: _Leaf, domains: Domains, cutoff: float) -> _Costs:
        serial = self._serial
        seconds = [domain[0].seconds for domain in domains] + [0.0] * (serial.num_tasks - len(domains))
        for call in serial.moved:
            joint, alone = seconds[call], 0.0
            if not self._may_share(leaf, call):
                floors = self._floors(leaf, domains, call)
                joint = min([item.seconds + floors[item.layout] for item in domains[call]])
                alone = min(floors.values())
            seconds[serial.realloc[call]] = alone
            seconds[serial.joint[call]] = joint
        slack = [INFINITY] * len(seconds)
        bound = 0.0
        for row in leaf.rows:
            total = 0.0
            for task in row:
                total += seconds[task]
            bound = max(bound, total)
            for task in row:
                slack[task] = min(slack[task], cutoff - total)
        loads = [min([item.load_s for item in domain]) for domain in domains]
        for calls, moves in leaf.loads:
            total = sum([loads[call] for call in calls])
            total += sum([seconds[task] for task in moves])
            # A joint task counts its call, which is counted already.
            total -= sum([seconds[call] for call in calls if serial.joint.get(call) in moves])
            bound = max(bound, total)
        return _Costs(bound, seconds, slack)

    def _may_share(self, leaf: _Leaf, call: int) -> bool:
        home = self._tables.home
        return any(
            other != call and home[other] == home[call] and leaf.windows[other] == leaf.windows[call]
            for other in self._serial.moved
        )

    def _floors(self, leaf: _Leaf, domains: Domains, call: int) -> dict[int, float]:
        """Least seconds of the reallocation to each layout of `call` that is left."""
        prices = leaf.prices[call]
        homes = {item.layout for item in domains[self._tables.home[call]]}
        return {
            layout: min([prices[home, layout] for home in homes])
            for layout in {item.layout for item in domains[call]}
        }

    def _remove_slow(self, leaf: _Leaf, domains: Domains, costs: _Costs) -> bool:
        changed = False
        for call, domain in enumerate(domains):
            limit = costs.seconds[call] + costs.slack[call]
            left = [item for item in domain if item.seconds < limit]
            joint = self._serial.joint.get(call)
            if joint is not None and not self._may_share(leaf, call):
                floors = self._floors(leaf, domains, call)
                limit = costs.seconds[joint] + costs.slack[joint]
                left = [item for item in left if item.seconds + floors[item.layout] < limit]
            if len(left) < len(domain):
                domains[call] = left
                changed = True
        return changed

    def _candidate(self, leaf: _Leaf, domains: Domains) -> list[Item]:
        """The fastest option of every call, and of each model the layouts that are fastest together."""
        chosen = [domain[0] for domain in domains]
        for home in self._home_calls:
            others = [call for call in self._serial.moved if self._tables.home[call] == home]
            if not others:
                continue
            best = INFINITY
            seen = set()
            for item in domains[home]:
                if item.seconds >= best or item.layout in seen:
                    continue
                seen.add(item.layout)
                total = item.seconds
                picks = []
                for call in others:
                    prices = leaf.prices[call]
                    seconds, position = min(
                        (
                            (other.seconds + prices[item.layout, other.layout], position)
                            for position, other in enumerate(domains[call])
                        )
                    )
                    total += seconds
                    picks.append(domains[call][position])
                if total < best:
                    best = total
                    chosen[home] = item
                    for call, pick in zip(others, picks, strict=True):
                        chosen[call] = pick
        return chosen

    def _branch(
        self, leaf: _Leaf, domains: Domains, costs: _Costs, state: SearchState
    ) -> list[tuple[float, Domains]]:
        """Try the candidate; the parts that are left, the promising one first."""
        chosen = self._candidate(leaf, domains)
        final = all(len(domain) == 1 for domain in domains)
        bound = costs.bound
        period = self._try(leaf, chosen, bound, state, final=final)
        if final or period is None:
            return []
        if period > bound * (1 + _ROUNDING):
            bound = max(bound, self._order_bound(leaf, domains, chosen, costs))
            if bound >= state.cutoff:
                state.leave_out(bound)
                return []
        parts = self._split_layouts(leaf, domains, chosen, costs)
        if parts is None:
            call, kind = self._fullest(leaf, domains, chosen)
            parts = [(call, part) for part in self._halves(domains[call], chosen[call], kind)]
        children = []
        for call, part in parts:
            child = [list(domain) for domain in domains]
            child[call] = part
            children.append((bound, child))
        return children

    def _try(
        self, leaf: _Leaf, chosen: Sequence[Item], bound: float, state: SearchState, *, final: bool
    ) -> float | None:
        """Offer a choice in its best orders; the least period of these, or None if one fits and reaches `bound`."""
        choices = self._choices(leaf, chosen)
        least = INFINITY
        for order in leaf.orders if final else leaf.orders[:_FIRST_ORDERS]:
            evaluation = self._kernel.evaluate_choices(choices, order)
            least = min(least, evaluation.period_s)
            if evaluation.fits:
                state.offer(choices, order, evaluation)
                if evaluation.period_s <= bound * (1 + _ROUNDING):
                    return None
        if final and not leaf.all_orders:
            state.leave_out(bound)
        return least

    def _choices(self, leaf: _Leaf, chosen: Sequence[Item]) -> list[Choice]:
        windows = self._tables.tree.windows
        return [
            Choice(windows[window], item.option) for window, item in zip(leaf.windows, chosen, strict=True)
        ]

    def _order_bound(self, leaf: _Leaf, domains: Domains, chosen: Sequence[Item], costs: _Costs) -> float:
        """The least period under any order if everything takes its least seconds; 0 if the steps may differ."""
        if not leaf.all_orders or len(leaf.orders) > _FIRST_ORDERS:
            return 0.0
        seconds: list[Seconds] = []
        for call, domain in enumerate(domains):
            moved = call in self._serial.realloc
            if moved and self._may_share(leaf, call):
                return 0.0
            moves = [self._tables.moves(call, item.option) for item in domain]
            if not self._tables.alone[call] and len({item.option.offload for item in domain}) > 1:
                return 0.0
            floor = costs.seconds[self._serial.realloc[call]] if moved else 0.0
            seconds.append(
                (
                    costs.seconds[call],
                    floor,
                    min([back for _, back in moves]),
                    min([away for away, _ in moves]),
                )
            )
        choices = self._choices(leaf, chosen)
        return min([self._kernel.period_with(choices, order, seconds) for order in leaf.orders])

    def _split_layouts(
        self, leaf: _Leaf, domains: Domains, chosen: Sequence[Item], costs: _Costs
    ) -> list[tuple[int, list[Item]]] | None:
        """By the layout of a home copy, where the bound takes a reallocation for cheaper than it can be."""
        for call in self._serial.moved:
            home = self._tables.home[call]
            price = leaf.prices[call][chosen[home].layout, chosen[call].layout]
            taken = costs.seconds[home] + costs.seconds[self._serial.joint[call]]
            real = chosen[home].seconds + chosen[call].seconds + price
            layouts = dict.fromkeys(item.layout for item in domains[home])
            if len(layouts) > 1 and real > taken * (1 + _ROUNDING):
                first = chosen[home].layout
                return [
                    (home, [item for item in domains[home] if item.layout == layout])
                    for layout in sorted(layouts, key=lambda layout: layout != first)
                ]
        return None

    def _fullest(self, leaf: _Leaf, domains: Domains, chosen: Sequence[Item]) -> tuple[int, int]:
        """The call that could give up most bytes on a rank that is over its capacity, and which: own, kept or full."""
        holds = self._tables.holds_full
        best = (-1, max(range(len(domains)), key=lambda call: len(domains[call])), _OWN)
        for point in leaf.points:
            homes = [call for call in point if call in self._home_calls]
            groups = [[(home, _FULL) for home in homes]]
            groups += [
                [
                    (call, _OWN),
                    *((home, _FULL if holds[home][call] else _KEPT) for home in homes if home != call),
                ]
                for call in point
            ]
            for group in groups:
                if sum([_bytes(chosen[call], at) for call, at in group]) <= self._capacity:
                    continue
                for call, at in group:
                    if len(domains[call]) > 1:
                        give = _bytes(chosen[call], at) - min([_bytes(item, at) for item in domains[call]])
                        best = max(best, (give, call, at))
        return best[1], best[2]

    def _halves(self, domain: list[Item], chosen: Item, kind: int) -> list[list[Item]]:
        limit = (min([_bytes(item, kind) for item in domain]) + _bytes(chosen, kind)) / 2
        small = [item for item in domain if _bytes(item, kind) <= limit]
        large = [item for item in domain if _bytes(item, kind) > limit]
        if not small or not large:
            half = len(domain) // 2
            small, large = domain[:half], domain[half:]
        return [small, large]


def _bytes(item: Item, kind: int) -> int:
    return (item.own, item.kept, item.full)[kind]
