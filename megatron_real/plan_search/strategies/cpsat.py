"""Exact search with OR-tools' CP-SAT solver, on any windows: nested or not, of any size.

The model says the same as `SearchProblem.evaluate`, of all plans at once. Its objective is the period P: the events of
an iteration have start times x, and P is feasible if and only if there are x with ::

    x_f     >= x_e + d_e    for events e before f in an iteration, on a common rank or joined by data
    x_e + P >= x_f + d_f    for the same events on a common rank: e's next turn comes after f's

since those are the edges of the events' max-plus map and P its largest cycle mean. Durations of calls follow from
the chosen options, those of reallocations from the pair of chosen copies. Seconds are rounded down to ``_STEP`` of the
start's period, so the solver's bound is one; the answer is evaluated anew.

Memory is exact (see `cpsat_memory`), but where three or more calls share one temporary copy: it then counts twice at
calls between them. Such plans still fit; the bound then is not reported, as a plan may have been missed.

A model's updates toward another one are left out: then the answer may not be the best, the bound is one all the same.

Options that another one of the same layout and residence beats in everything are left out. Not for large spaces: the
reallocations alone are a table of all pairs of copies.

Invariants (tests/property/test_cpsat.py):
    - the optimum is full enumeration's, up to the rounding, over all orders;
    - the bound is one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan_search.problem import Choice, Limits, Progress, SearchProblem, Solution
from megatron_real.plan_search.strategies import greedy
from megatron_real.plan_search.strategies.cpsat_memory import add_memory, ranks_to_watch
from megatron_real.plan_search.strategies.cpsat_terms import Literal, Terms

__all__ = ["solve"]

_STEP = 1e-5
"""Unit of time, in periods of the start."""
_MAX_PAIRS = 400_000
"""Entries of a model's reallocation table."""


def solve(
    problem: SearchProblem,
    limits: Limits,
    *,
    start: Solution | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best plan, or the best one and a bound when time is over.

    Args:
        problem: what to choose from; its windows need not be nested.
        limits: `time_s`, `gap` and `seed`; evaluations are not counted.
        start: a plan to begin with; None is the greedy one.
        progress: called at each improvement.

    Raises:
        ConfigError: OR-tools is not installed.
        PlanError: the table of reallocations is too large.
    """
    cp_model = _ortools()
    began = time.monotonic()
    if start is None or start.assignment is None:
        start = greedy.solve(problem, limits)
    if start.proven_infeasible:
        return replace(start, strategy="cpsat")
    timing = _Timing(problem, cp_model.CpModel(), start)
    add_memory(timing.terms)
    timing.finish(start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, limits.time_s - (time.monotonic() - began))
    solver.parameters.random_seed = limits.seed % (1 << 31)
    solver.parameters.relative_gap_limit = limits.gap
    solver.parameters.num_workers = min(8, os.cpu_count() or 1)
    watch = _watch(cp_model, timing, progress, began)
    status = solver.solve(timing.terms.model, watch)
    bound = max(0.0, solver.best_objective_bound) * timing.unit_s if timing.exact else start.lower_bound_s
    found = start
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = _better(problem, timing.read(solver.boolean_value), start)
    return replace(
        found,
        strategy="cpsat",
        lower_bound_s=min(bound, found.period_s) if found.assignment is not None else bound,
        evaluations=start.evaluations + 1,
        seconds=time.monotonic() - began,
        proven_infeasible=status == cp_model.INFEASIBLE and timing.exact,
        trace=tuple(watch.trace),
    )


def _ortools() -> Any:
    try:
        from ortools.sat.python import cp_model  # takes a second: only those who ask for it wait
    except ImportError as error:
        raise ConfigError(
            "search.strategy: found cpsat without the package ortools; expected it to be installed. "
            "Run `pip install ortools`, or take strategy=exact."
        ) from error
    return cp_model


def _better(
    problem: SearchProblem, plan: tuple[dict[str, Choice], tuple[str, ...]], start: Solution
) -> Solution:
    found = problem.evaluate(*plan)
    if not found.fits and problem.graph.updates:  # neither time nor bytes of updates are in the model
        return start
    if not found.fits:
        raise AssertionError(f"cpsat: its plan exceeds the capacity by {found.overflow_bytes} bytes")
    if start.assignment is not None and start.period_s <= found.period_s:
        return start
    return replace(start, assignment=plan[0], order=plan[1], period_s=found.period_s)


def _watch(cp_model: Any, timing: _Timing, progress: Callable[[Progress], None] | None, began: float) -> Any:
    class Watch(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.trace: list[Progress] = []

        def on_solution_callback(self) -> None:
            period, bound = self.objective_value * timing.unit_s, self.best_objective_bound * timing.unit_s
            step = Progress(time.monotonic() - began, len(self.trace) + 1, period, max(0.0, bound))
            self.trace.append(step)
            if progress is not None:
                progress(step)

    return Watch()


class _Event(NamedTuple):
    """An event of an iteration, that may be there."""

    start: Any
    duration: Any
    windows: tuple[str, ...]
    """Calls on whose windows it is."""
    present: tuple[Literal, ...]
    """It is there where all of these hold."""


class _Timing:
    """Variables, events and their order in time."""

    def __init__(self, problem: SearchProblem, model: Any, start: Solution) -> None:
        self._problem = problem
        self.terms = terms = Terms(problem, model)
        self.exact = all(
            len(terms.siblings(name)) + (terms.stored(name) is not False) <= 2 for name in terms.home
        )
        reference = start.period_s
        if start.assignment is None:
            reference = problem.evaluate(greedy.fastest(problem), problem.order).period_s
        self.unit_s = max(reference, 1e-12) * _STEP
        self._most = sum(
            max(self._units(choice.option.seconds) for choice in found) for found in terms.choices.values()
        )
        self._blocks: dict[str, list[_Event]] = {}
        self._runs: dict[str, _Event] = {}
        self._reallocs = {
            name: self._realloc_table(name) for model in terms.home for name in terms.siblings(model)
        }
        for choices in terms.choices.values():
            moves = ("leave_s", "return_s", "state_leave_s", "state_return_s")
            self._most += max(
                sum(self._units(getattr(choice.option, field)) for field in moves) for choice in choices
            ) * len(terms.calls)
        for name in terms.calls:
            self._blocks[name] = list(self._events_of(name))

    def finish(self, start: Solution) -> None:
        """The period, all constraints on it, and the start as a hint."""
        most = self._most
        if start.assignment is not None:
            most = min(most, self._units(start.period_s) + 1)
        period = self.terms.model.new_int_var(0, max(1, most), "period")
        self._add_order(period)
        self._add_load(period)
        self.terms.model.minimize(period)
        if start.assignment is not None:
            for name, choices in self.terms.choices.items():
                for choice, variable in zip(choices, self.terms.chosen[name], strict=True):
                    self.terms.model.add_hint(variable, choice == start.assignment[name])

    def read(self, value: Callable[[Any], bool]) -> tuple[dict[str, Choice], tuple[str, ...]]:
        """The plan of a solution."""
        terms = self.terms
        assignment = {
            name: next(
                choice
                for choice, variable in zip(choices, terms.chosen[name], strict=True)
                if value(variable)
            )
            for name, choices in terms.choices.items()
        }

        def holds(literal: Literal) -> bool:
            return literal if isinstance(literal, bool) else value(literal)

        names = list(terms.calls)
        rank = {
            name: sum(holds(terms.before(other, name)) for other in names if other != name) for name in names
        }
        return assignment, tuple(sorted(names, key=rank.__getitem__))

    def _units_on(self, rank: int, choice: Choice) -> int:
        return self._units(choice.option.seconds) if rank in choice.mesh else 0

    def _units(self, seconds: float) -> int:
        return int(seconds / self.unit_s)

    def _start(self) -> Any:
        return self.terms.model.new_int_var(0, 1 << 40, "start")

    def _events_of(self, name: str) -> Iterable[_Event]:
        """A call's events, in their order in the program."""
        terms = self.terms
        model = terms.model_of(name)
        run = _Event(
            self._start(),
            terms.total(name, lambda choice: self._units(choice.option.seconds)),
            (name,),
            (),
        )
        self._runs[name] = run
        if model is None:
            yield run
            return
        home = terms.home[model]
        frozen = not terms.calls[home].trains
        if frozen:
            yield from self._reload(name, home)
        if name in self._reallocs:
            present = (terms.negated(terms.filled(name)), terms.negated(terms.stored(model)))
            yield _Event(self._start(), self._reallocs[name], (name, home), present)
        if frozen:
            yield run
            away = terms.where(home, lambda choice: choice.option.offload == "host")
            others = [other for other in (home, *terms.siblings(model)) if other != name]
            yield self._away(home, "leave_s", (away, *(terms.before(other, name) for other in others)))
        elif name == home:
            yield from self._training(name, terms.siblings(model), run)
        else:
            last = self._last_use(name)
            at_once = terms.all((terms.temporary(name), terms.negated(terms.streams(name))))
            yield self._away(home, "leave_s", (last, at_once))
            yield run
            yield self._away(home, "leave_s", (last, terms.negated(at_once)))

    def _training(self, home: str, siblings: list[str], run: _Event) -> Iterable[_Event]:
        """A training, and what comes back for it."""
        terms = self.terms
        parked = terms.where(home, lambda choice: choice.option.offload == "host")
        yield self._away(home, "state_return_s", (parked,))
        if siblings:
            dropped = terms.where(home, lambda choice: choice.option.drop_trained_weights)
            used = terms.any(terms.before(other, home) for other in siblings)
            yield self._away(home, "return_s", (dropped, used))
        yield run
        yield self._away(home, "state_leave_s", (parked,))

    def _away(self, home: str, field: str, present: tuple[Literal, ...]) -> _Event:
        """A move of a home copy."""
        duration = self.terms.total(home, lambda choice: self._units(getattr(choice.option, field)))
        return _Event(self._start(), duration, (home,), present)

    def _reload(self, name: str, home: str) -> Iterable[_Event]:
        terms = self.terms
        away = terms.where(home, lambda choice: choice.option.offload == "host")
        model = terms.model_of(name)
        assert model is not None
        others = [other for other in (home, *terms.siblings(model)) if other != name]
        first = terms.all(terms.before(name, other) for other in others)
        yield self._away(home, "return_s", (away, first))
        if first is not True:
            # What is there already takes no time, but the ranks of the home wait for each other all the same.
            yield _Event(self._start(), 0, (home,), (away, terms.negated(first)))
        if terms.stored(model) is not False:
            fresh = terms.negated(terms.found(name))
            duration = terms.total(name, lambda choice: self._units(choice.option.return_s))
            yield _Event(self._start(), duration, (name,), (terms.stored(model), fresh))

    def _last_use(self, name: str) -> Literal:
        """Whether the home's weights are dropped after this call: the last one before training that reads them."""
        terms = self.terms
        model = terms.model_of(name)
        assert model is not None
        home = terms.home[model]
        later = [
            terms.any((terms.filled(other), terms.before(other, name), terms.before(home, other)))
            for other in terms.siblings(model)
            if other != name
        ]
        dropped = terms.where(home, lambda choice: choice.option.drop_trained_weights)
        return terms.all((dropped, terms.before(name, home), terms.negated(terms.filled(name)), *later))

    def _realloc_table(self, name: str) -> Any:
        """Units of the reallocation to a call's copy, by that copy and the home's."""
        terms = self.terms
        model = terms.model_of(name)
        assert model is not None
        sources = _one_of_each(terms.choices[terms.home[model]])
        targets = {_exposure(choice): choice for choice in terms.choices[name]}
        taken = terms.grouped(name, _exposure)
        if len(sources) * len(targets) > _MAX_PAIRS:
            raise PlanError(
                f"cpsat: found {len(sources)} * {len(targets)} pairs of copies of {model} for {name}; expected at "
                f"most {_MAX_PAIRS}. Take strategy=exact, or fewer windows (search.min_mesh)."
            )
        duration = terms.model.new_int_var(0, 1 << 40, f"realloc:{name}")
        most = 0
        for key, target in targets.items():
            price = {
                other: 0
                if other == key[:2]
                else self._units(target.option.exposed_s(self._problem.realloc_s(model, source, target)))
                for other, source in sources.items()
            }
            most = max(most, *price.values())
            total = sum(
                units * terms.copies[terms.home[model]][other] for other, units in price.items() if units
            )
            terms.add(duration >= total, (taken[key],))
        terms.model.add(duration <= most)
        self._most += most
        return duration

    def _add_order(self, period: Any) -> None:
        """The two families of constraints of the module's text."""
        terms = self.terms
        names = list(terms.calls)
        for name in names:
            for parent in self._problem.graph.parents(terms.calls[name]):
                run = self._runs[parent.name]
                terms.model.add(self._runs[name].start >= run.start + run.duration)
            block = self._blocks[name]
            for at, first in enumerate(block):
                terms.add(period >= first.duration, first.present)
                terms.model.add(first.start <= self._most)
                for second in block[at + 1 :]:
                    for given in self._meetings(first, second):
                        terms.add(second.start >= first.start + first.duration, given)
                        terms.add(first.start + period >= second.start + second.duration, given)
        for at, one in enumerate(names):
            for other in names[at + 1 :]:
                for first in self._blocks[one]:
                    for second in self._blocks[other]:
                        self._add_turns(period, (one, first), (other, second))

    def _add_turns(self, period: Any, one: tuple[str, _Event], other: tuple[str, _Event]) -> None:
        terms = self.terms
        (name, first), (second_name, second) = one, other
        for given in self._meetings(first, second):
            terms.add(second.start >= first.start + first.duration, (*given, terms.before(name, second_name)))
            terms.add(
                first.start >= second.start + second.duration, (*given, terms.before(second_name, name))
            )
            terms.add(first.start + period >= second.start + second.duration, given)
            terms.add(second.start + period >= first.start + first.duration, given)

    def _meetings(self, first: _Event, second: _Event) -> list[tuple[Literal, ...]]:
        """Conditions under each of which two events are both there, on a common rank."""
        terms = self.terms
        both = (*first.present, *second.present)
        if any(literal is False for literal in both):
            return []
        found = {
            id(literal): literal
            for one in first.windows
            for other in second.windows
            if (literal := terms.overlap(one, other)) is not False
        }
        if any(literal is True for literal in found.values()):
            return [both]
        return [(*both, literal) for literal in found.values()]

    def _add_load(self, period: Any) -> None:
        """Redundant: each rank's calls take no longer than a period."""
        terms = self.terms
        for rank in ranks_to_watch(terms):
            load = sum(terms.total(name, partial(self._units_on, rank)) for name in terms.calls)
            terms.model.add(load <= period)


def _exposure(choice: Choice) -> tuple[Any, ...]:
    """What the price of a reallocation to a choice's copy depends on; the copy comes first."""
    option = choice.option
    streamed = (option.first_share, option.first_pass_s) if option.stream else ()
    return (choice.mesh, option.layout, *streamed)


def _one_of_each(choices: Iterable[Choice]) -> dict[Any, Choice]:
    return {(choice.mesh, choice.option.layout): choice for choice in choices}
