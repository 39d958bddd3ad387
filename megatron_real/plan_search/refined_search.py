"""The choice among plans where ranks share the cores of their node: by refined prices (`contention`).

A strategy cannot search with refined prices: what runs beside a call depends on all other choices. So it searches
several times, each time under another assumption of what does: as many ranks as may be, none, and those of the best
plan so far, until that finds nothing new. Presets do the same. All plans that come out are estimated at refined prices.
From the best one on, single calls are changed as long as that makes it faster.

A bound is known all the same. No call is faster than beside nothing, so the lower bound of that search holds for every
choice at refined prices.

Invariants (tests/unit/plan_search/test_contention.py):
    - the plan is no slower, at refined prices, than what the strategy or a preset finds without them;
    - no plan is faster than the lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from megatron_real.plan import Plan
from megatron_real.plan_search.comparison import decisions_hash
from megatron_real.plan_search.contention import beside, option_beside, priced_beside
from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.presets import PRESETS, WHOLE_CLUSTER
from megatron_real.plan_search.pricing import Busy
from megatron_real.plan_search.problem import Assignment, Choice, Limits, SearchProblem, Solution
from megatron_real.plan_search.space import Pin, SpaceOptions

if TYPE_CHECKING:
    from megatron_real.plan_search.planner import Estimate, Planner

__all__ = ["Refined", "refined_search"]

_SHARE = 0.5
"""Of the time of a search."""
_ROUNDS = 4
"""Searches, at most, under what is beside the calls of the best plan so far."""
_CHANGES = 0.3
"""Of the time for refined prices, for changes of single calls."""
_HOPEFUL = 1.1
"""A change is estimated if, with what was beside each call before it, it makes the period longer by this at most."""
_TRIED = 16
"""Changes of a plan, at most, that are estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """What was chosen at refined prices."""

    plan: Plan
    period_s: float
    lower_bound_s: float
    """Of the period of every choice at refined prices; 0 is unknown."""
    compared: int
    """Different plans."""

    @property
    def gap(self) -> float:
        """(period - lower bound) / period."""
        return max(0.0, 1 - self.lower_bound_s / self.period_s)


def refined_search(
    planner: Planner,
    strategy: str,
    first: Solution,
    limits: Limits,
    options: SpaceOptions | None = None,
    pins: Mapping[str, Pin] | None = None,
) -> Refined:
    """The best of several plans at refined prices.

    Args:
        planner: of a cluster whose ranks share cores.
        strategy: that found `first`; if it is no preset, what presets find is compared too.
        first: with a choice.
        limits: of each search; the time is for all of them together, half as much as for `first`.
        options: as for `first`.
        pins: as for `first`.
    """
    time_s = _SHARE * limits.time_s
    end = time.monotonic() + time_s
    presets = () if strategy in PRESETS else PRESETS
    until = end - _CHANGES * time_s if presets else end
    own = _Searches(planner, strategy, planner.space_for(strategy, options, pins).problem, limits, until)
    bound_s = own.compare(first)
    for kind in presets:
        other = _Searches(planner, kind, planner.space_for(kind, options, pins).problem, limits, until)
        other.compare(other.under(None))
        own.found |= other.found
    if presets:
        own.change(until=end)
    best = own.best.estimate
    return Refined(plan=best.plan, period_s=best.period_s, lower_bound_s=bound_s, compared=len(own.found))


@dataclass(frozen=True, slots=True)
class _Found:
    """A choice at refined prices."""

    assignment: Assignment
    order: tuple[str, ...] | None
    estimate: Estimate

    @property
    def rank(self) -> tuple[bool, float]:
        """The least is the best."""
        return bool(self.estimate.problems), self.estimate.period_s


class _Searches:
    """Those of one strategy, under different assumptions."""

    def __init__(
        self, planner: Planner, strategy: str, problem: SearchProblem, limits: Limits, end: float
    ) -> None:
        self._planner = planner
        self._strategy = strategy
        self._problem = problem
        self._limits = limits
        self._end = end
        self.found: dict[str, _Found] = {}
        """By decisions."""

    @property
    def best(self) -> _Found:
        return min(self.found.values(), key=lambda one: one.rank)

    def compare(self, first: Solution | None) -> float:
        """Find plans, beside `first`; returns a lower bound for all choices at refined prices."""
        self._is_new(first)
        if self._strategy in WHOLE_CLUSTER:  # whatever is assumed, nothing runs beside a call
            return first.lower_bound_s if first is not None else 0.0
        alone = self.under({})
        self._is_new(alone)
        for _ in range(_ROUNDS if self.found else 0):
            if not self._is_new(self.under(self._beside(self.best))):
                break
        return alone.lower_bound_s if alone is not None else 0.0

    def under(self, others: Mapping[str, Busy] | None) -> Solution | None:
        """What the strategy finds if so many others are busy beside each call, in half of the time that is left.

        Returns:
            None after the end.
        """
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            return None
        problem = self._problem
        if others is not None:
            problem = priced_beside(self._planner.prices, problem, others)
        return self._planner.solve(problem, self._strategy, replace(self._limits, time_s=left_s / 2))

    def change(self, until: float) -> None:
        """Change single calls of the best plan, as long as that makes it faster, until a time."""
        best = self.best
        while (better := self._changed(best, until)) is not None:
            best = better

    def _changed(self, plan: _Found, until: float) -> _Found | None:
        """A plan that is faster by a change of one call; None if none was found, or after the end."""
        prices, others = self._planner.prices, self._beside(plan)
        problem = priced_beside(prices, self._problem, others)
        kernel = Kernel(problem)
        now = {
            name: Choice(choice.mesh, option_beside(prices, problem, others, name, choice.option))
            for name, choice in plan.assignment.items()
        }
        longest_s = _HOPEFUL * kernel.evaluate(now, plan.order).period_s
        hopeful: list[tuple[float, str, Choice]] = []
        for name in now:
            for mesh in problem.meshes_of(name):
                if time.monotonic() > until:
                    return None
                for option in problem.options_on(name, mesh):
                    choice = Choice(mesh, option)
                    then = kernel.evaluate({**now, name: choice}, plan.order)
                    if then.fits and then.period_s <= longest_s:
                        hopeful.append((then.period_s, name, choice))
        for _, name, choice in nsmallest(_TRIED, hopeful, key=lambda one: one[0]):
            if time.monotonic() > until:
                return None
            found = self._new({**plan.assignment, name: choice}, plan.order)
            if found is not None and found.rank < plan.rank:
                return found
        return None

    def _beside(self, plan: _Found) -> dict[str, Busy]:
        estimate = plan.estimate
        assert estimate.refinement is not None, "ranks share cores"
        return beside(estimate.plan, estimate.refinement, self._planner.cluster.devices_per_node)

    def _is_new(self, solution: Solution | None) -> bool:
        """Estimate what was found; False if it is known or nothing."""
        if solution is None or solution.assignment is None:
            return False
        return self._new(solution.assignment, solution.order) is not None

    def _new(self, assignment: Assignment, order: tuple[str, ...] | None) -> _Found | None:
        """Estimate a choice; None if it is known."""
        plan = self._problem.to_plan(assignment, order)
        key = decisions_hash(plan)
        if key in self.found:
            return None
        self.found[key] = _Found(assignment, order, self._planner.estimate(plan))
        return self.found[key]
