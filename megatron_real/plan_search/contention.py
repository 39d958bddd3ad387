"""Prices of calls whose ranks share the cores of their node: from how many ranks are busy beside each of them.

Beforehand a call is priced as if every rank of its node that may be busy were, all the time. `refine` finds out from
the timeline. That depends on the prices in turn, so it simulates, counts the busy ranks, prices again and goes on until
prices stay. A rank is busy in every span but a wait. A call that takes P(b) beside b busy ranks does dt / P(b) of its
work in dt (`CallCost.mixed`), so the result is the timeline in which every call goes at the pace of its surroundings,
moment by moment.

The search itself cannot do so: what is beside a call depends on all other choices. It gets prices under an assumption
of what is beside each call (`beside`, `priced_beside`): nothing, or what is beside it in the best plan so far.

Nothing of this concerns clusters whose ranks have cores of their own.

Invariants (tests/unit/plan_search/test_contention.py):
    - the refined timeline of calls on disjoint windows that overlap for part of their time is that by hand;
    - a refined price is at least that of the call alone, and at most that with all ranks of the node busy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from megatron_real.layout import Mesh
from megatron_real.plan import Plan
from megatron_real.plan_search.pricing import Busy, Prices, ProgramPrices
from megatron_real.plan_search.problem import Option, SearchProblem
from megatron_real.plan_search.simulator import simulate
from megatron_real.program import Program
from megatron_real.trace import Span, SpanKind

__all__ = ["Refinement", "beside", "busy_ranks", "option_beside", "priced_beside", "refine"]

_ITERATIONS = 6
_COUNTED = (3, 4)
"""Iterations of them in which ranks are counted: after the first ones, and not the last, which nothing runs beside."""
_ROUNDS = 30
_SETTLED = 1e-3
"""Relative change of a call's seconds from round to round."""
_SLOW = 0.7
"""Of the change of the round before: if more is left of it, the next step is half as large."""
_LEAST_STEP = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """How prices were refined."""

    busy: Mapping[str, Busy]
    """By call."""
    unrefined_s: float
    """The period at the prices before."""
    rounds: int
    change: float
    """The largest relative change of a call's seconds in the last round."""

    def mean_busy(self) -> dict[str, float]:
        """By call: ranks of its node that are busy while it runs, its own included."""
        return {name: _mean(busy) for name, busy in self.busy.items()}

    def summary(self) -> dict[str, Any]:
        """For ``predicted`` of a plan."""
        return {
            "unrefined_s": self.unrefined_s,
            "busy_ranks": {name: round(mean, 3) for name, mean in self.mean_busy().items()},
            "rounds": self.rounds,
            "change": self.change,
        }


def refine(prices: Prices, program: Program) -> tuple[ProgramPrices, Refinement]:
    """Prices of a program for the ranks that really are busy beside each call."""
    names = [call.name for call in program.graph.calls]
    per_node = prices.cluster.devices_per_node
    busy: dict[str, Busy] = {}
    now = prices.of_program(program)
    simulation = simulate(program, now, iterations=_ITERATIONS)
    unrefined_s, step, change, rounds = simulation.period_s, 1.0, float("inf"), 0
    while change > _SETTLED and rounds < _ROUNDS:
        found = busy_ranks(simulation.spans, program, per_node)
        busy = {name: _between(busy.get(name, shares), shares, step) for name, shares in found.items()}
        then = prices.of_program(program, busy)
        before, change = (
            change,
            max(_change(now.call(name).seconds, then.call(name).seconds) for name in names),
        )
        if change > _SLOW * before:
            step = max(step / 2, _LEAST_STEP)
        now, rounds = then, rounds + 1
        simulation = simulate(program, now, iterations=_ITERATIONS)
    return now, Refinement(busy=busy, unrefined_s=unrefined_s, rounds=rounds, change=change)


def busy_ranks(spans: Sequence[Span], program: Program, per_node: int) -> dict[str, Busy]:
    """By call: how many ranks of its node are busy while it runs, in the fullest node of its window.

    Args:
        spans: simulated, of all ranks and `_ITERATIONS` iterations.
        program: that was simulated.
        per_node: ranks of a node.
    """
    by_node: dict[int, list[Span]] = defaultdict(list)
    runs: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind is not SpanKind.WAIT:
            by_node[span.rank // per_node].append(span)
        if span.kind is SpanKind.RUN and span.iteration in _COUNTED:
            runs[span.name, span.rank].append(span)
    nodes = {node: _Node(found) for node, found in by_node.items()}
    result: dict[str, Busy] = {}
    for call in program.graph.calls:
        mesh = program.plan.calls[call.name].mesh
        found = [
            _shares(nodes[node], runs[f"run:{call.name}", max(mesh.start, node * per_node)])
            for node in range(mesh.start // per_node, (mesh.stop - 1) // per_node + 1)
        ]
        fullest = max(found, key=_mean)
        if fullest:
            result[call.name] = fullest
    return result


class _Node:
    """How many ranks of a node are busy over time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        changes: dict[float, int] = defaultdict(int)
        for span in spans:
            changes[span.start_s] += 1
            changes[span.end_s] -= 1
        self.times = sorted(changes)
        self.busy = list(accumulate(changes[time] for time in self.times))
        """From each time on."""

    def within(self, start_s: float, end_s: float) -> Mapping[int, float]:
        """Seconds of an interval by the number of busy ranks."""
        seconds: dict[int, float] = defaultdict(float)
        first, last = bisect_right(self.times, start_s) - 1, bisect_right(self.times, end_s)
        edges = [start_s, *self.times[first + 1 : last], end_s]
        for index, (low, high) in enumerate(pairwise(edges)):
            seconds[self.busy[first + index]] += high - low
        return seconds


def _shares(node: _Node, runs: Sequence[Span]) -> Busy:
    """Of the time of runs; empty if they take none."""
    seconds: dict[int, float] = defaultdict(float)
    for run in runs:
        for number, part in node.within(run.start_s, run.end_s).items():
            seconds[number] += part
    total = sum(seconds.values())
    return {number: part / total for number, part in sorted(seconds.items()) if part > 0}


def _mean(busy: Busy) -> float:
    return sum(number * share for number, share in busy.items())


def _between(old: Busy, new: Busy, step: float) -> Busy:
    """`step` of the way from old shares to new ones."""
    numbers = sorted({*old, *new})
    return {number: old.get(number, 0.0) * (1 - step) + new.get(number, 0.0) * step for number in numbers}


def _change(before: float, after: float) -> float:
    return abs(after - before) / before if before > 0 else 0.0


def beside(plan: Plan, refinement: Refinement, per_node: int) -> dict[str, Busy]:
    """By call of a plan: shares of its time by the number of *other* ranks of its node that are busy."""
    return {
        name: {number - min(plan.calls[name].mesh.size, per_node): share for number, share in busy.items()}
        for name, busy in refinement.busy.items()
    }


def priced_beside(prices: Prices, problem: SearchProblem, others: Mapping[str, Busy]) -> SearchProblem:
    """A problem whose options are priced as if so many other ranks were busy beside each call, where there is room.

    Args:
        prices: of the problem's options.
        problem: to price anew.
        others: by call, shares of its time by the number of other busy ranks of its node; a call that is missing has
            its node for itself.
    """
    return replace(
        problem,
        options={
            (name, size): tuple(
                sorted(
                    (option_beside(prices, problem, others, name, option) for option in options),
                    key=lambda option: option.seconds,
                )
            )
            for (name, size), options in problem.options.items()
        },
    )


def option_beside(
    prices: Prices, problem: SearchProblem, others: Mapping[str, Busy], name: str, option: Option
) -> Option:
    """One of them, of the call `name`."""
    per_node = prices.cluster.devices_per_node
    own = min(option.size, per_node)
    busy: dict[int, float] = defaultdict(float)
    for number, share in others.get(name, {0: 1.0}).items():
        busy[min(own + number, per_node)] += share
    placement = option.placement(Mesh(0, option.size))
    return replace(option, seconds=prices.call_s(problem.graph.call(name), placement, busy))
