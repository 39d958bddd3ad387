"""The best options of all calls where every call has its window.

Depth first over sets of options that are left for each call. `_narrow` removes options that cannot fit beside the least
of the others, or whose bound reaches the best choice so far; what is left is bounded by its fastest options. If these
fit together and their period is the bound, the node is done; else a set is split: that of a layout which the
reallocations depend on, or of the call that fills the fullest rank.

Invariant (tests/property/test_exact.py): the best of a leaf equals full enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron_real.plan_search.kernel import Kernel, Seconds
from megatron_real.plan_search.problem import Choice, Evaluation
from megatron_real.plan_search.strategies.bounds import INFINITY
from megatron_real.plan_search.strategies.placed import Order, Placed, Placer
from megatron_real.plan_search.strategies.reallocs import ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Item, Tables

__all__ = ["LeafSolver", "Part", "SearchState"]

Domains = list[list[Item]]
Part = tuple[float, Domains]
"""Options that are left for each call, and the bound of what can be made of them."""
_OWN, _KEPT, _FULL, _SHARED = 0, 1, 2, 3
_ROUNDING = 1e-9
_FEW_PRICES = 64
"""Prices of reallocations that may be asked for a sharper bound."""


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
        self._kernel = kernel
        self._capacity = tables.problem.capacity_bytes
        self._home_calls = [call for call in range(tables.num_calls) if tables.is_home(call)]
        self._placer = Placer(tables, serial, reallocs)

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

    def _narrow(self, leaf: Placed, domains: Domains, state: SearchState) -> _Costs | None:
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
            costs = self._costs(leaf, domains, cutoff, reallocs=turn > 0)
            if costs.bound >= cutoff:
                state.leave_out(costs.bound)
                return None
            if self._remove_slow(leaf, domains, costs, reallocs=turn > 0):
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

    def _costs(self, leaf: Placed, domains: Domains, cutoff: float, *, reallocs: bool) -> _Costs:
        serial = self._serial
        seconds = [domain[0].seconds for domain in domains] + [0.0] * (serial.num_tasks - len(domains))
        for call in serial.moved:
            joint, alone = seconds[call], 0.0
            if reallocs and call not in leaf.shared:
                prices, homes = leaf.prices[call], self._home_layouts(domains, call)
                joint = prices.joint(homes, domains[call])
                if len(homes) * len(_layouts(domains[call])) <= _FEW_PRICES:
                    alone = min([prices.floor(homes, item) for item in domains[call]])
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
        for calls, _, moves in leaf.meetings:
            total = sum([loads[call] for call in calls])
            total += sum([seconds[task] for task in moves])
            # A joint task counts its call, which is counted already.
            total -= sum([seconds[call] for call in calls if serial.joint.get(call) in moves])
            bound = max(bound, total)
        return _Costs(bound, seconds, slack)

    def _home_layouts(self, domains: Domains, call: int) -> set[int]:
        return {item.layout for item in domains[self._tables.home[call]]}

    def _remove_slow(self, leaf: Placed, domains: Domains, costs: _Costs, *, reallocs: bool) -> bool:
        changed = False
        for call, domain in enumerate(domains):
            limit = costs.seconds[call] + costs.slack[call]
            left = [item for item in domain if item.seconds < limit]
            joint = self._serial.joint.get(call)
            if reallocs and joint is not None and call not in leaf.shared:
                homes = self._home_layouts(domains, call)
                if homes and len(homes) * len(_layouts(left)) <= _FEW_PRICES:
                    limit = costs.seconds[joint] + costs.slack[joint]
                    floor = leaf.prices[call].floor
                    left = [item for item in left if item.seconds + floor(homes, item) < limit]
            if len(left) < len(domain):
                domains[call] = left
                changed = True
        return changed

    def _candidate(self, leaf: Placed, domains: Domains) -> list[Item]:
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
                picks = [self._fastest_from(leaf, item, call, domains[call]) for call in others]
                total = item.seconds + sum([seconds for seconds, _ in picks])
                if total < best:
                    best = total
                    chosen[home] = item
                    for call, (_, pick) in zip(others, picks, strict=True):
                        chosen[call] = pick
        return chosen

    def _fastest_from(
        self, leaf: Placed, home: Item, call: int, domain: Sequence[Item]
    ) -> tuple[float, Item]:
        """The option that is fastest with its reallocation from `home`."""
        best, pick = INFINITY, domain[0]
        for item in domain:
            if item.seconds >= best:
                break
            total = item.seconds + leaf.prices[call].price(home.layout, item)
            if total < best:
                best, pick = total, item
        return best, pick

    def _branch(
        self, leaf: Placed, domains: Domains, costs: _Costs, state: SearchState
    ) -> list[tuple[float, Domains]]:
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
                bound = max(bound, self._order_bound(leaf, domains, chosen, costs))
                if bound >= state.cutoff:
                    state.leave_out(bound)
                    return []
        if final:
            return []
        parts = self._split_layouts(leaf, domains, chosen, costs)
        if parts is None:
            call, kind = full if full is not None else (-1, _OWN)
            if call < 0 or len(domains[call]) == 1:
                call = max(range(len(domains)), key=lambda call: len(domains[call]))
            parts = [(call, part) for part in self._halves(domains[call], chosen[call], kind)]
        children = []
        for call, part in parts:
            child = [*domains]
            child[call] = part
            children.append((bound, child))
        return children

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

    def _order_bound(self, leaf: Placed, domains: Domains, chosen: Sequence[Item], costs: _Costs) -> float:
        """The least period under any order if everything takes its least seconds; 0 if the steps may differ."""
        if not leaf.all_orders:
            return 0.0
        seconds: list[Seconds] = []
        for call, domain in enumerate(domains):
            moved = call in self._serial.realloc
            if moved and call in leaf.shared:
                return 0.0
            if not self._tables.alone[call] and self._steps_differ(domains, call):
                return 0.0
            floor = costs.seconds[self._serial.realloc[call]] if moved else 0.0
            moves = [self._tables.moves(call, item.option) for item in domain]
            back, away, state_back, state_away = map(min, zip(*moves, strict=True))
            seconds.append((costs.seconds[call], floor, back, away, 0.0, state_back, state_away))
        choices = self._choices(leaf, chosen)
        return min([self._kernel.period_with(choices, order, seconds) for order in leaf.orders])

    def _steps_differ(self, domains: Domains, call: int) -> bool:
        """Whether the options that are left of a call make other steps than each other, in other places."""
        tables = self._tables
        if tables.may_be_stored[call] or len({item.option.offload for item in domains[call]}) > 1:
            return True
        # A dropped home stays until the streamed call has ended.
        streams = {item.option.stream for item in domains[call]}
        drops = {item.option.drop_trained_weights for item in domains[tables.home[call]]}
        return True in streams and True in drops and len(streams) + len(drops) > 2

    def _split_layouts(
        self, leaf: Placed, domains: Domains, chosen: Sequence[Item], costs: _Costs
    ) -> list[tuple[int, list[Item]]] | None:
        """By the layout of a home copy, where the bound takes a reallocation for cheaper than it can be."""
        for call in self._serial.moved:
            home = self._tables.home[call]
            price = leaf.prices[call].price(chosen[home].layout, chosen[call])
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


def _layouts(items: Sequence[Item]) -> set[int]:
    return {item.layout for item in items}


def _bytes(item: Item, kind: int) -> int:
    return (item.own, item.kept, item.full, item.shared)[kind]
