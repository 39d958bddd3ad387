"""The exact choice of options where every call's window is given, and some calls must be alike: small spaces.

Presets are made of these. Depth first: call after call takes its option, the best bound first; before the first call of
a group that must be alike, what the group has in common. A branch ends where its bound reaches the best plan so far, or
where memory cannot suffice. The bound is the exact period of what happens at least: every call for the seconds of its
fastest option that is left and fits beside what the others need, and the reallocations whose two ends are decided.

Invariants (tests/unit/plan_search/test_presets.py):
    - equal to trying every choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_real.dataflow import Call
from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.clocks import atoms_of, period
from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Choice, Event, Limits, Option, Progress, SearchProblem, Solution
from megatron_real.plan_search.steps import weights_stay
from megatron_real.plan_search.strategies.greedy import pareto

__all__ = ["Alike", "Family", "solve_families"]

_ROUNDING = 1e-9
"""Two sums of the same seconds may differ by this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Calls whose layouts must be equal in something."""

    calls: tuple[str, ...]
    of: Callable[[Layout], Hashable]
    """What must be equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Plans of a kind."""

    problem: SearchProblem
    """With the options that the kind allows, and a window pinned for every call."""
    alike: tuple[Alike, ...] = ()
    start: bool = False
    """A small part of another kind, searched before it: for a plan to start from."""


def solve_families(
    name: str,
    families: Sequence[Family],
    limits: Limits,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best plan of all families, in the declared order of calls or in the user's.

    Args:
        name: `Solution.strategy`.
        families: kinds of plans; none of them is infeasible.
        limits: all but `seed` hold.
        progress: called at each improvement.

    Returns:
        A solution whose lower bound holds for plans of these families.
    """
    run = _Run(limits, progress)
    searches = sorted(
        (_FamilySearch(family, run) for family in families),
        key=lambda search: (not search.start, search.root_bound_s),
    )
    least_s = min((search.root_bound_s for search in searches), default=float("inf"))
    for search in searches:
        if run.worth(search.root_bound_s):
            run.lower_bound_s = least_s if search.start else search.root_bound_s
            search.solve()
    cut = run.stopped()
    bound = min(run.best_s, least_s) if cut else run.best_s
    return Solution(
        strategy=name,
        assignment=run.best,
        order=run.best_order,
        period_s=run.best_s,
        lower_bound_s=bound,
        evaluations=run.evaluations,
        seconds=run.seconds,
        proven_infeasible=run.best is None and not cut,
        trace=tuple(run.trace),
    )


class _Run:
    """What the families share: the best plan, the limits."""

    def __init__(self, limits: Limits, progress: Callable[[Progress], None] | None) -> None:
        self._limits = limits
        self._progress = progress
        self._start = time.monotonic()
        self._cut = False
        self.best: dict[str, Choice] | None = None
        self.best_order: tuple[str, ...] | None = None
        self.best_s = float("inf")
        self.lower_bound_s = 0.0
        self.evaluations = 0
        self.trace: list[Progress] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def stopped(self) -> bool:
        """Whether a limit is reached (then for good)."""
        most = self._limits.evaluations
        if self.seconds > self._limits.time_s or (most is not None and self.evaluations >= most):
            self._cut = True
        if self.best is not None and self.best_s - self.lower_bound_s < self._limits.gap * self.best_s:
            self._cut = True
        return self._cut

    def worth(self, bound_s: float) -> bool:
        """Whether to look at plans with this lower bound."""
        return bound_s < self.best_s * (1 - _ROUNDING) and not self.stopped()

    def offer(self, problem: SearchProblem, kernel: Kernel, assignment: dict[str, Choice]) -> None:
        """Keep a plan if it fits and is faster."""
        self.evaluations += 1
        found = kernel.evaluate(assignment, problem.order)
        if found.fits and found.period_s < self.best_s:
            self.best, self.best_order, self.best_s = assignment, problem.order, found.period_s
            step = Progress(self.seconds, self.evaluations, self.best_s, self.lower_bound_s)
            self.trace.append(step)
            if self._progress is not None:
                self._progress(step)


class _Least(NamedTuple):
    """What the options that are left to a call need at least, one by one."""

    options: tuple[Option, ...]
    """Fastest first."""
    leave_s: float
    """Of the single call of a frozen model, if every option leaves."""
    return_s: float
    resident: tuple[int, ...]
    """Of a home, while the call at each position of the order runs, and at the start of the iteration."""
    own: tuple[int, ...]
    """Of each option, while the call itself runs: with what is resident of its copy."""


@dataclass(slots=True)
class _Node:
    """Options that are left, by call."""

    left: dict[str, _Least]
    decided: frozenset[str] = frozenset()
    alike: frozenset[int] = frozenset()
    """Groups whose common value is chosen."""


class _FamilySearch:
    def __init__(self, family: Family, run: _Run) -> None:
        self.start = family.start
        self._problem = family.problem
        self._graph = graph = family.problem.graph
        self._run = run
        self._kernel = Kernel(family.problem)
        self._windows = dict(self._problem.pinned)
        self._covers, self._num_atoms = atoms_of(list(self._windows.values()))
        self._order = graph.ordered(self._problem.order)
        self._position = {call.name: position for position, call in enumerate(self._order)}
        self._homes = {model: graph.home_call(model).name for model in graph.models}
        self._parents = {
            call.name: tuple(other.name for other in graph.parents(call)) for call in graph.calls
        }
        self._alike = [group for group in family.alike if len(group.calls) > 1]
        self._kept: dict[tuple[str, int], _Least] = {}
        self._root = _Node({call.name: self._least(call.name, self._options(call)) for call in self._order})
        self._branching = self._branching_order()
        self.root_bound_s = self._bound(self._root)

    def _branching_order(self) -> list[str]:
        """Calls that depend on each other, by a rank or by weights, in a row.

        The group with most work comes first, and in it the trainings, which need most of memory.
        """
        groups: list[list[str]] = []
        for call in self._order:
            near = [group for group in groups if any(self._are_near(call.name, other) for other in group)]
            groups = [group for group in groups if group not in near]
            groups.append([call.name, *(name for group in near for name in group)])

        def work(group: list[str]) -> float:
            return sum(
                self._root.left[name].options[0].seconds for name in group if self._root.left[name].options
            )

        ranked = sorted(groups, key=work, reverse=True)
        return [
            name
            for group in ranked
            for name in sorted(
                group, key=lambda name: (not self._graph.call(name).trains, self._position[name])
            )
        ]

    def _are_near(self, one: str, other: str) -> bool:
        model = self._graph.call(one).model
        same = model is not None and model == self._graph.call(other).model
        return same or self._windows[one].overlaps(self._windows[other])

    def _options(self, call: Call) -> tuple[Option, ...]:
        home = call.model is not None and self._homes[call.model] == call.name
        free = weights_stay(self._graph, call) and not any(call.name in group.calls for group in self._alike)
        return pareto(self._problem.options_on(call.name, self._windows[call.name]), home=home, alone=free)

    def solve(self) -> None:
        self._descend(self._root)

    def _descend(self, node: _Node) -> None:
        name = next((name for name in self._branching if name not in node.decided), None)
        if name is None:
            left = node.left.items()
            assignment = {call: Choice(self._windows[call], least.options[0]) for call, least in left}
            self._run.offer(self._problem, self._kernel, assignment)
            return
        open_groups = (
            index
            for index, group in enumerate(self._alike)
            if index not in node.alike and name in group.calls
        )
        index = next(open_groups, None)
        children = self._by_option(node, name) if index is None else self._by_common(node, index)
        ranked = [(self._bound(child), child) for child in children]
        for bound, child in sorted(ranked, key=lambda entry: entry[0]):
            if not self._run.worth(bound):
                return
            self._descend(child)

    def _by_option(self, node: _Node, name: str) -> Iterator[_Node]:
        for option in node.left[name].options:
            left = {**node.left, name: self._alone(name, option)}
            yield _Node(left, node.decided | {name}, node.alike)

    def _by_common(self, node: _Node, index: int) -> Iterator[_Node]:
        """Over what the calls of a group have in common."""
        group = self._alike[index]
        values = [{group.of(option.layout) for option in node.left[name].options} for name in group.calls]
        for value in sorted(set.intersection(*values), key=str):
            left = dict(node.left)
            for name in group.calls:
                same = tuple(option for option in left[name].options if group.of(option.layout) == value)
                left[name] = self._least(name, same)
            yield _Node(left, node.decided, node.alike | {index})

    def _alone(self, name: str, option: Option) -> _Least:
        key = name, id(option)
        if key not in self._kept:
            self._kept[key] = self._least(name, (option,))
        return self._kept[key]

    def _least(self, name: str, options: tuple[Option, ...]) -> _Least:
        if not options:
            return _Least((), 0.0, 0.0, (), ())
        options = tuple(sorted(options, key=lambda option: option.seconds))
        call = self._graph.call(name)
        home = call.model is not None and self._homes[call.model] == name
        # Only of a model's single call it is known where in the order the moves stand.
        frozen = home and not call.trains and len(self._graph.calls_of(call.model or "")) == 1
        away = [option.offload != "none" for option in options]
        resident = [self._resident(call, option) for option in options] if home else []
        return _Least(
            options=options,
            leave_s=min(option.leave_s * (option.offload == "host") for option in options)
            if frozen and all(away)
            else 0.0,
            return_s=min(option.return_s for option in options) if frozen and all(away) else 0.0,
            resident=tuple(map(min, zip(*resident, strict=True))),
            own=tuple(
                option.active_bytes + (option.weights_bytes + option.state_bytes if home else 0)
                for option in options
            ),
        )

    def _resident(self, call: Call, option: Option) -> tuple[int, ...]:
        """Of a home copy, by position in the order, then at the start."""
        positions = range(len(self._order) + 1)
        resident = self._problem.resident_bytes(call, option)
        if not option.drop_trained_weights:
            return (resident,) * len(positions)
        uses = [
            self._position[other.name] for other in self._graph.calls_of(call.model or "") if other != call
        ]
        train = self._position[call.name]
        gone = range(min(uses), train) if uses else range(0)
        return tuple(resident + (0 if at in gone else option.weights_bytes) for at in positions)

    def _bound(self, node: _Node) -> float:
        """No plan below `node` has a shorter period; infinite if none fits."""
        if not all(least.options for least in node.left.values()):
            return float("inf")
        seconds = self._least_seconds(node)
        if seconds is None:
            return float("inf")
        events = self._least_events(node, seconds)
        where = [tuple({atom for mesh in event.meshes for atom in self._covers[mesh]}) for event in events]
        return period(events, where, self._num_atoms)

    def _least_events(self, node: _Node, seconds: Mapping[str, float]) -> list[Event]:
        """What happens at least: runs, and moves of which it is known where in the order they stand."""
        events = []
        reallocs = self._reallocs(node)
        for call in self._order:
            least, mesh = node.left[call.name], self._windows[call.name]
            if least.return_s:
                events.append(Event("reload", (mesh,), least.return_s))
            if call.name in reallocs:
                events.append(reallocs[call.name])
            events.append(Event(f"run:{call.name}", (mesh,), seconds[call.name], self._parents[call.name]))
            if least.leave_s:
                events.append(Event("offload", (mesh,), least.leave_s))
        return events

    def _reallocs(self, node: _Node) -> dict[str, Event]:
        """By call. Of each model up to the first call that is open: that one's copy may serve the later ones."""
        events = {}
        for model, name in self._homes.items():
            copies: set[tuple[Mesh, Layout]] = set()
            for call in self._order:
                if call.model != model or call.name == name:
                    continue
                if call.name not in node.decided or name not in node.decided:
                    break
                copy = self._copy(node, call)
                if copy is None or copy[0].option.offload == "node":
                    continue
                if (key := (copy[1].mesh, copy[1].option.layout)) not in copies:
                    copies.add(key)
                    meshes = (copy[1].mesh, copy[0].mesh)
                    seconds = copy[1].option.exposed_s(self._problem.realloc_s(model, *copy))
                    events[call.name] = Event("realloc", meshes, seconds)
        return events

    def _copy(self, node: _Node, call: Call) -> tuple[Choice, Choice] | None:
        """Home and choice of a call that is decided to run on a copy of its own."""
        if call.model is None or self._homes[call.model] == call.name:
            return None
        name = self._homes[call.model]
        if call.name not in node.decided or name not in node.decided:
            return None
        home = Choice(self._windows[name], node.left[name].options[0])
        choice = Choice(self._windows[call.name], node.left[call.name].options[0])
        return None if choice.same_copy(home) else (home, choice)

    def _least_seconds(self, node: _Node) -> dict[str, float] | None:
        """Of each call's fastest option that fits beside what the others need at least; None if one has none."""
        homes = [(name, self._covers[self._windows[name]]) for name in self._homes.values()]
        capacity = self._problem.capacity_bytes
        seconds: dict[str, float] = {}
        for position in range(len(self._order) + 1):
            held = [0] * self._num_atoms
            for name, covered in homes:
                for atom in covered:
                    held[atom] += node.left[name].resident[position]
            if position == len(self._order):
                return seconds if max(held) <= capacity else None
            call = self._order[position]
            least = node.left[call.name]
            room = capacity - max(held[atom] for atom in self._covers[self._windows[call.name]])
            room += least.resident[position] if least.resident else 0
            copy = self._copy(node, call)
            if copy is not None:
                room -= copy[1].option.weights_bytes
            fitting = [option for option, own in zip(least.options, least.own, strict=True) if own <= room]
            if not fitting:
                return None
            seconds[call.name] = fitting[0].seconds
        raise AssertionError("the start is the last position")
