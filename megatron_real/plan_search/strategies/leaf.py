"""The best options of all calls where every call has its window.

Depth first over sets of options that are left for each call. `_narrow` removes options that cannot fit beside the least
of the others, or whose bound reaches the best choice so far; what is left is bounded by its fastest options. If these
fit together and their period is the bound, the node is done; else a set is split: that of the call that fills the
fullest rank, of a layout which the reallocations depend on, or of a call that takes longer than the bound counts.

Invariant (tests/property/test_exact.py): the best of a leaf equals full enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Choice, Evaluation
from megatron_real.plan_search.strategies.floors import Costs, Domains, Floors
from megatron_real.plan_search.strategies.placed import Order, Placed, Placer
from megatron_real.plan_search.strategies.reallocs import INFINITY, ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Item, Tables

__all__ = ["LeafSolver", "Part", "SearchState"]

Part = tuple[float, Domains]
"""Options that are left for each call, and the bound of what can be made of them."""
_OWN, _KEPT, _FULL, _SHARED = 0, 1, 2, 3
_ROUNDING = 1e-9

_Split = tuple[int, list[list[Item]]]
"""A call, and the parts of its options."""


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


class LeafSolver:
    """Finds the best options of leaves, one after another."""

    def __init__(self, tables: Tables, serial: Serial, reallocs: ReallocFloor, kernel: Kernel) -> None:
        self._tables = tables
        self._serial = serial
        self._kernel = kernel
        self._capacity = tables.problem.capacity_bytes
        self._home_calls = [call for call in range(tables.num_calls) if tables.is_home(call)]
        self._placer = Placer(tables, serial, reallocs)
        self._floors = Floors(tables, serial, kernel)

    def solve(
        self,
        windows: Sequence[int],
        state: SearchState,
        parts: Sequence[Part],
        most: int | None = None,
    ) -> list[Part]:
        """Offer the best choices with these windows that beat the cutoff.

        Args:
            windows: of all calls.
            state: takes the choices, and the bounds of what is left out.
            parts: what of the leaf to look at (`whole`, or what an earlier call returned), the last one first.
            most: nodes to look at.

        Returns:
            What is left to do: empty unless time or nodes ran out.
        """
        leaf = self._placer.place(windows)
        stack = list(parts)
        nodes = 0
        while stack and not state.stopped() and (most is None or nodes < most):
            known, options = stack.pop()
            nodes += 1
            if known >= state.cutoff:
                state.leave_out(known)
                continue
            domains = [list(domain) for domain in options]
            costs = self._narrow(leaf, domains, state)
            if costs is not None:
                stack += reversed(self._branch(leaf, domains, costs, state))
        return stack

    def whole(self, windows: Sequence[int], bound: float) -> Part:
        """All options of these windows, of this bound."""
        tables = self._tables
        return bound, [
            list(tables.items[call][tables.tree.size[window]]) for call, window in enumerate(windows)
        ]

    def _narrow(self, leaf: Placed, domains: Domains, state: SearchState) -> Costs | None:
        """Remove what cannot be part of a better choice, in place; None if nothing is left."""
        for turn in range(6):
            limits = self._limits(leaf, domains)
            if limits is None:
                return None
            changed = self._remove_large(leaf, domains, limits)
            if not all(domains):
                return None
            cutoff = state.cutoff
            # First without reallocations: what is removed before they are priced needs no price.
            costs = self._floors.costs(leaf, domains, cutoff, reallocs=turn > 0)
            if costs.bound >= cutoff:
                state.leave_out(costs.bound)
                return None
            if self._floors.remove_slow(leaf, domains, costs, reallocs=turn > 0):
                state.leave_out(cutoff)
                changed = True
                if not all(domains):
                    return None
            if not changed and turn > 0:
                break
        return costs

    def _needs(self, leaf: Placed, domains: Domains, call: int) -> list[int]:
        """Bytes of its own of each option that is left."""
        home = self._tables.home[call]
        if home == call or leaf.windows[home] != leaf.windows[call]:
            return [item.own for item in domains[call]]
        layouts = {item.layout for item in domains[home]}
        return [item.shared if item.layout in layouts else item.own for item in domains[call]]

    def _limits(self, leaf: Placed, domains: Domains) -> list[list[int]] | None:
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
        for calls, homes, _ in leaf.largest:
            slack = self._capacity - sum([least[home][2] for home in homes])
            if slack < 0:
                return None
            for home in homes:
                limits[home][2] = min(limits[home][2], least[home][2] + slack)
            for call in calls:
                others = [(home, 2 if full[home][call] else 1) for home in homes if home != call]
                slack = self._capacity - least[call][0] - sum([least[home][at] for home, at in others])
                if slack < 0:
                    return None
                limits[call][0] = min(limits[call][0], least[call][0] + slack)
                for home, at in others:
                    limits[home][at] = min(limits[home][at], least[home][at] + slack)
        return limits

    def _remove_large(self, leaf: Placed, domains: Domains, limits: Sequence[Sequence[int]]) -> bool:
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

    def _candidate(self, leaf: Placed, domains: Domains) -> list[Item]:
        """The option of least load of every call, and of each model the layouts that take least together."""
        chosen = [min(domain, key=_load) for domain in domains]
        for home in self._home_calls:
            others = [call for call in self._serial.moved if self._tables.home[call] == home]
            if not others:
                continue
            best = INFINITY
            seen = set()
            for item in sorted(domains[home], key=_load):
                if item.load_s >= best:
                    break
                if item.layout in seen:
                    continue
                seen.add(item.layout)
                picks = [self._fastest_from(leaf, item, call, domains[call]) for call in others]
                total = item.load_s + sum([seconds for seconds, _ in picks])
                if total < best:
                    best = total
                    chosen[home] = item
                    for call, (_, pick) in zip(others, picks, strict=True):
                        chosen[call] = pick
        return chosen

    def _fastest_from(
        self, leaf: Placed, home: Item, call: int, domain: Sequence[Item]
    ) -> tuple[float, Item]:
        """The option that is fastest with its reallocation from `home`, or its part of a shared one."""
        best, pick = INFINITY, domain[0]
        for item in domain:
            if item.seconds >= best:
                break
            total = item.seconds + leaf.prices[call].price(home.layout, item) / leaf.sharing.get(call, 1)
            if total < best:
                best, pick = total, item
        return best, pick

    def _branch(self, leaf: Placed, domains: Domains, costs: Costs, state: SearchState) -> list[Part]:
        """Try the candidate; the parts that are left, the promising one first."""
        chosen = self._candidate(leaf, domains)
        final = all(len(domain) == 1 for domain in domains)
        bound = costs.bound
        full = self._fullest(leaf, domains, chosen)
        if full is None:
            period = self._try(leaf, chosen, bound, state, final=final)
            if period is None:
                return []
            if period > bound * (1 + _ROUNDING) and not final:
                choices = self._choices(leaf, chosen)
                bound = max(bound, self._floors.order_bound(leaf, domains, choices, costs))
                if bound >= state.cutoff:
                    state.leave_out(bound)
                    return []
        if final:
            return []
        call, parts = (
            self._split_layouts(leaf, domains, chosen, costs)
            or self._split_bytes(domains, chosen, full)
            or self._split_times(domains, chosen, costs)
            or self._split_kinds(leaf, domains, chosen)
            or self._split_longest(domains, chosen)
        )
        return [(bound, [*domains[:call], part, *domains[call + 1 :]]) for part in parts]

    def _try(
        self, leaf: Placed, chosen: Sequence[Item], bound: float, state: SearchState, *, final: bool
    ) -> float | None:
        """Offer a choice in its best orders; the least period of these, or None if one fits and reaches `bound`."""
        choices = self._choices(leaf, chosen)
        least = INFINITY
        orders, complete = leaf.orders, leaf.all_orders
        if final and not complete:
            more, complete = self._placer.orders(leaf.kind)
            orders = more if complete else orders  # some of too many prove nothing
        for order, evaluation in zip(orders, self._kernel.evaluate_orders(choices, orders), strict=True):
            least = min(least, evaluation.period_s)
            if evaluation.fits:
                state.offer(choices, order, evaluation)
                if evaluation.period_s <= bound * (1 + _ROUNDING):
                    return None
        if final and not complete:
            state.leave_out(bound)
        return least

    def _choices(self, leaf: Placed, chosen: Sequence[Item]) -> list[Choice]:
        windows = self._tables.tree.windows
        return [
            Choice(windows[window], item.option) for window, item in zip(leaf.windows, chosen, strict=True)
        ]

    def _split_layouts(
        self, leaf: Placed, domains: Domains, chosen: Sequence[Item], costs: Costs
    ) -> _Split | None:
        """By the layout of a home copy, where the bound takes a reallocation for cheaper than it can be."""
        for call in self._serial.moved:
            home = self._tables.home[call]
            sharing = leaf.sharing.get(call, 1)
            price = leaf.prices[call].price(chosen[home].layout, chosen[call]) / sharing
            taken = costs.loads[home] + costs.seconds[self._serial.joint[call]]
            for task, group in enumerate(leaf.groups, self._serial.num_tasks):
                taken += costs.seconds[task] / sharing if call in group else 0.0
            real = chosen[home].load_s + chosen[call].seconds + price
            layouts = dict.fromkeys(item.layout for item in domains[home])
            if len(layouts) > 1 and real > taken * (1 + _ROUNDING):
                first = chosen[home].layout
                ranked = sorted(layouts, key=lambda layout: layout != first)
                return home, [[item for item in domains[home] if item.layout == layout] for layout in ranked]
        return None

    def _split_bytes(
        self, domains: Domains, chosen: Sequence[Item], full: tuple[int, int] | None
    ) -> _Split | None:
        """By what a call holds of a rank that is too full."""
        if full is None or len(domains[full[0]]) == 1:
            return None
        call, kind = full
        return call, self._halves(domains[call], chosen[call], kind)

    def _split_times(self, domains: Domains, chosen: Sequence[Item], costs: Costs) -> _Split | None:
        """By what a call takes longer than the bound counts, in its run or on its ranks."""
        gap, call, takes = max(
            [
                (takes(chosen[call]) - least[call], call, takes)
                for takes, least in ((_seconds, costs.seconds), (_load, costs.loads))
                for call in range(len(domains))
            ],
            key=lambda one: one[0],
        )
        limit = takes(chosen[call]) - gap / 2
        less = [item for item in domains[call] if takes(item) <= limit]
        more = [item for item in domains[call] if takes(item) > limit]
        return (call, [less, more]) if less and more else None

    def _split_kinds(self, leaf: Placed, domains: Domains, chosen: Sequence[Item]) -> _Split | None:
        """By what decides on the steps of an iteration: then their order tells more."""
        for call, domain in enumerate(domains):
            if self._tables.alone[call]:
                continue
            shared = call in leaf.shared
            mine = _kind(chosen[call], shared=shared)
            same = [item for item in domain if _kind(item, shared=shared) == mine]
            if len(same) < len(domain):
                return call, [same, [item for item in domain if _kind(item, shared=shared) != mine]]
        return None

    def _split_longest(self, domains: Domains, chosen: Sequence[Item]) -> _Split:
        call = max(range(len(domains)), key=lambda call: len(domains[call]))
        return call, self._halves(domains[call], chosen[call], _OWN)

    def _fullest(self, leaf: Placed, domains: Domains, chosen: Sequence[Item]) -> tuple[int, int] | None:
        """The call that could give up most bytes on a rank that is over its capacity under every order, and which.

        None: no rank is. What is left for each call fits beside the least of the others, so some call can give.
        """
        holds = self._tables.holds_full
        home_of = self._tables.home
        best: tuple[int, int, int] | None = None
        for calls, homes, _ in leaf.largest:
            groups = [[(home, _FULL) for home in homes]]
            for call in calls:
                home = home_of[call]
                same = leaf.windows[home] == leaf.windows[call] and chosen[home].layout == chosen[call].layout
                own = _SHARED if home != call and same else _OWN
                rest = [(other, _FULL if holds[other][call] else _KEPT) for other in homes if other != call]
                groups.append([(call, own), *rest])
            for group in groups:
                if sum([_bytes(chosen[call], kind) for call, kind in group]) <= self._capacity:
                    continue
                for call, kind in group:
                    give = -1
                    if len(domains[call]) > 1:
                        give = _bytes(chosen[call], kind) - min(
                            [_bytes(item, kind) for item in domains[call]]
                        )
                    best = max(best or (give, call, kind), (give, call, kind))
        return best[1:] if best is not None else None

    def _halves(self, domain: list[Item], chosen: Item, kind: int) -> list[list[Item]]:
        limit = (min([_bytes(item, kind) for item in domain]) + _bytes(chosen, kind)) / 2
        small = [item for item in domain if _bytes(item, kind) <= limit]
        large = [item for item in domain if _bytes(item, kind) > limit]
        if not small or not large:
            half = len(domain) // 2
            small, large = domain[:half], domain[half:]
        return [small, large]


def _seconds(item: Item) -> float:
    return item.seconds


def _load(item: Item) -> float:
    return item.load_s


def _kind(item: Item, *, shared: bool) -> tuple[object, ...]:
    option = item.option
    return option.offload, option.drop_trained_weights, option.stream, item.layout if shared else None


def _bytes(item: Item, kind: int) -> int:
    return (item.own, item.kept, item.full, item.shared)[kind]
