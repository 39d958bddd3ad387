"""What the options that are left in a leaf of the tree cost at least, and which of them no better choice has.

A rank is busy for the `Item.load_s` of its calls, offloads and reloads included; along a row (`strategies/rows.py`)
only the runs and reallocations count. Calls that share a window may find the copy of each other filled: they count a
share of its price each, where they are together.

Invariants (tests/property/test_exact.py):
    - no bound exceeds the best choice of what is left;
    - what is removed is part of no choice below the cutoff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_real.plan_search.kernel import Kernel, Seconds
from megatron_real.plan_search.problem import Choice, Option
from megatron_real.plan_search.strategies.placed import Placed
from megatron_real.plan_search.strategies.reallocs import INFINITY, shared_joint
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Item, Tables

__all__ = ["Costs", "Domains", "Floors"]

Domains = list[list[Item]]
"""Options that are left for each call, fastest first."""
_FEW_PRICES = 64
"""Prices of reallocations that may be asked for a sharper bound."""


class Costs(NamedTuple):
    """Of what is left."""

    bound: float
    seconds: list[float]
    """By task, those of groups (see `Placed.groups`) after the others."""
    loads: list[float]
    """By call: its least load."""
    slack: list[float]
    """By task: what it may add before a row or a rank reaches the cutoff."""
    room: list[float]
    """By call: what its load may add before a rank reaches the cutoff."""


class Floors:
    """Bounds the choices of options in leaves."""

    def __init__(self, tables: Tables, serial: Serial, kernel: Kernel) -> None:
        self._tables = tables
        self._serial = serial
        self._kernel = kernel
        self._stored: dict[Option, Option] = {}

    def costs(self, leaf: Placed, domains: Domains, cutoff: float, *, reallocs: bool) -> Costs:
        """Of all choices from `domains`; without `reallocs`, these are free."""
        serial = self._serial
        seconds = self._task_seconds(leaf, domains, reallocs=reallocs)
        loads = [min([item.load_s for item in domain]) for domain in domains]
        slack = [INFINITY] * len(seconds)
        room = [INFINITY] * len(domains)
        bound = 0.0
        for row in leaf.rows:
            total = 0.0
            for task in row:
                total += seconds[task]
            bound = max(bound, total)
            for task in row:
                slack[task] = min(slack[task], cutoff - total + self._shares(leaf, row, task, seconds))
        for calls, _, moves in leaf.meetings:
            total = sum([loads[call] for call in calls])
            total += sum([seconds[task] for task in moves])
            # A joint task counts its call, which is counted already.
            total -= sum([seconds[call] for call in calls if serial.joint.get(call) in moves])
            bound = max(bound, total)
            for task in moves:
                slack[task] = min(slack[task], cutoff - total + self._shares(leaf, moves, task, seconds))
            for call in calls:
                if serial.joint.get(call) not in moves:
                    room[call] = min(room[call], cutoff - total)
        return Costs(bound, seconds, loads, slack, room)

    def _task_seconds(self, leaf: Placed, domains: Domains, *, reallocs: bool) -> list[float]:
        serial = self._serial
        seconds = [domain[0].seconds for domain in domains]
        seconds += [0.0] * (serial.num_tasks - len(domains) + len(leaf.groups))
        for call in serial.moved:
            joint, alone = seconds[call], 0.0
            if reallocs and call not in leaf.shared:
                prices, homes = leaf.prices[call], self._home_layouts(domains, call)
                joint = prices.joint(homes, domains[call])
                if len(homes) * len(_layouts(domains[call])) <= _FEW_PRICES:
                    alone = min([prices.floor(homes, item) for item in domains[call]])
            seconds[serial.realloc[call]] = alone
            seconds[serial.joint[call]] = joint
        if reallocs:
            for task, group in enumerate(leaf.groups, serial.num_tasks):
                homes = self._home_layouts(domains, group[0])
                pairs = [leaf.prices[call] for call in group]
                together = shared_joint(pairs, homes, [domains[call] for call in group])
                seconds[task] = max(0.0, together - sum([seconds[call] for call in group]))
        return seconds

    def _shares(self, leaf: Placed, tasks: Sequence[int], task: int, seconds: Sequence[float]) -> float:
        """What a group's task counts of the same sum for the price of a copy that the call of `task` may fill."""
        if task not in leaf.shared_joints:
            return 0.0
        return sum([seconds[other] for other in tasks if other >= self._serial.num_tasks])

    def remove_slow(self, leaf: Placed, domains: Domains, costs: Costs, *, reallocs: bool) -> bool:
        """Remove options that no choice below the cutoff has, in place; whether there were any."""
        changed = False
        for call, domain in enumerate(domains):
            seconds = costs.seconds[call] + costs.slack[call]
            load = costs.loads[call] + costs.room[call]
            joint = self._serial.joint.get(call)
            if joint is not None:
                seconds = min(seconds, costs.seconds[joint] + costs.slack[joint])
            left = [item for item in domain if item.seconds < seconds and item.load_s < load]
            if reallocs and joint is not None and call not in leaf.shared:
                homes = self._home_layouts(domains, call)
                if homes and len(homes) * len(_layouts(left)) <= _FEW_PRICES:
                    floor = leaf.prices[call].floor
                    left = [item for item in left if item.seconds + floor(homes, item) < seconds]
            if len(left) < len(domain):
                domains[call] = left
                changed = True
        return changed

    def order_bound(self, leaf: Placed, domains: Domains, chosen: Sequence[Choice], costs: Costs) -> float:
        """The least period under any order if everything takes its least seconds; 0 if the steps may differ.

        Args:
            leaf: the windows.
            domains: what is left.
            chosen: a choice of it, of whose steps the seconds are taken.
            costs: of `domains`, with reallocations.
        """
        if not leaf.all_orders:
            return 0.0
        choices = list(chosen)
        seconds: list[Seconds] = []
        for call, domain in enumerate(domains):
            home = self._tables.home[call]
            moves = [self._tables.moves(call, item.option) for item in domain]
            back, away, state_back, state_away = map(min, zip(*moves, strict=True))
            floor = 0.0
            if not self._tables.alone[call]:
                if self._steps_differ(leaf, domains, chosen, call):
                    return 0.0
                if call in self._serial.realloc and call not in leaf.shared:
                    floor = costs.seconds[self._serial.realloc[call]]
                if call == home and self._loose(domains, call):
                    choices[call] = chosen[call]._replace(option=self._in_store(chosen[call].option))
                    back = away = 0.0
            seconds.append((costs.seconds[call], floor, back, away, 0.0, state_back, state_away))
        return min([self._kernel.period_with(choices, order, seconds) for order in leaf.orders])

    def _steps_differ(self, leaf: Placed, domains: Domains, chosen: Sequence[Choice], call: int) -> bool:
        """Whether other options that are left may lack steps of the chosen ones that others have to wait for.

        A step right before or after the run of its call on the same window makes no other call wait.
        """
        tables = self._tables
        home = tables.home[call]
        if self._loose(domains, home):
            return False
        if call != home:
            # Calls of one window fill one copy or several.
            same = [
                other
                for other in range(len(domains))
                if tables.home[other] == home != other and leaf.windows[other] == leaf.windows[call]
            ]
            at_home = leaf.windows[call] == leaf.windows[home]
            layouts = {chosen[other].option.layout for other in same}
            if len(same) > 1 and (at_home or len(layouts) > 1):
                return True
        # A dropped home stays until the streamed call has ended.
        streams = {item.option.stream for item in domains[call]}
        drops = {item.option.drop_trained_weights for item in domains[home]}
        return True in streams and True in drops and len(streams) + len(drops) > 2

    def _loose(self, domains: Domains, home: int) -> bool:
        """Whether the copies of a frozen model may come from several places: as if from the nodes' host stores, then.

        A copy is filled there right before its call, on its window alone.
        """
        places = {item.option.offload for item in domains[home]}
        return not self._tables.calls[home].trains and (len(places) > 1 or "node" in places)

    def _in_store(self, option: Option) -> Option:
        if option not in self._stored:
            self._stored[option] = replace(option, offload="node")
        return self._stored[option]

    def _home_layouts(self, domains: Domains, call: int) -> set[int]:
        return {item.layout for item in domains[self._tables.home[call]]}


def _layouts(items: Sequence[Item]) -> set[int]:
    return {item.layout for item in items}
