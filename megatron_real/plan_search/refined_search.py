"""The choice among plans where ranks share the cores of their node: by refined prices (`contention`).

A strategy cannot search with refined prices: what runs beside a call depends on all other choices. So it searches
several times, each time under another assumption of what does: as many ranks as may be, none, and those of the best
plan so far, until that finds nothing new. Presets do the same. All plans that come out are estimated at refined prices,
and the best one is taken.

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
from typing import TYPE_CHECKING

from megatron_real.plan import Plan
from megatron_real.plan_search.comparison import decisions_hash
from megatron_real.plan_search.contention import beside, priced_beside
from megatron_real.plan_search.presets import PRESETS
from megatron_real.plan_search.pricing import Busy
from megatron_real.plan_search.problem import Limits, SearchProblem, Solution
from megatron_real.plan_search.space import Pin, SpaceOptions

if TYPE_CHECKING:
    from megatron_real.plan_search.planner import Estimate, Planner

__all__ = ["Refined", "refined_search"]

_SHARE = 0.5
"""Of the time of a search."""
_ROUNDS = 4
"""Searches, at most, under what is beside the calls of the best plan so far."""


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
    end = time.monotonic() + _SHARE * limits.time_s
    presets = () if strategy in PRESETS else PRESETS
    own = _Searches(planner, strategy, planner.space_for(strategy, options, pins).problem, limits, end)
    bound_s = own.compare(first)
    compared = dict(own.found)
    for kind in presets:
        other = _Searches(planner, kind, planner.space_for(kind, options, pins).problem, limits, end)
        other.compare(other.under(None))
        compared |= other.found
    best = min(compared.values(), key=_rank)
    return Refined(plan=best.plan, period_s=best.period_s, lower_bound_s=bound_s, compared=len(compared))


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
        self.found: dict[str, Estimate] = {}
        """By decisions."""

    def compare(self, first: Solution | None) -> float:
        """Find plans, beside `first`; returns a lower bound for all choices at refined prices."""
        self._is_new(first)
        alone = self.under({})
        self._is_new(alone)
        for _ in range(_ROUNDS if self.found else 0):
            best = min(self.found.values(), key=_rank)
            assert best.refinement is not None, "ranks share cores"
            others = beside(best.plan, best.refinement, self._planner.cluster.devices_per_node)
            if not self._is_new(self.under(others)):
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

    def _is_new(self, solution: Solution | None) -> bool:
        """Estimate what was found; False if it is known or nothing."""
        if solution is None or solution.assignment is None:
            return False
        plan = self._problem.to_plan(solution.assignment, solution.order)
        key = decisions_hash(plan)
        if key in self.found:
            return False
        self.found[key] = self._planner.estimate(plan)
        return True


def _rank(estimate: Estimate) -> tuple[bool, float]:
    return bool(estimate.problems), estimate.period_s
