"""Fast evaluation of choices: `SearchProblem.evaluate`, compiled once per structure.

The steps of an iteration depend on the windows, on which calls share a copy, on what is offloaded or dropped, and on
the order; not on the costs. A program holds them as integers; one that comes back costs only the two inner loops.

Invariant (tests/property/test_search_problem.py): equal to `SearchProblem.evaluate`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_real.layout import Layout
from megatron_real.plan_search.clocks import TOLERANCE, atoms_of, cycle_mean
from megatron_real.plan_search.problem import (
    Assignment,
    Choice,
    Evaluation,
    Option,
    SearchProblem,
    Step,
    StepBuilder,
)

__all__ = ["Kernel", "Seconds"]

_MAX_PROGRAMS = 200_000
_RUN, _REALLOC, _RELOAD, _OFFLOAD, _MIX, _RELOAD_STATE, _OFFLOAD_STATE = range(7)
_KINDS = {
    "run": _RUN,
    "realloc": _REALLOC,
    "reload": _RELOAD,
    "offload": _OFFLOAD,
    "mix": _MIX,
    "reload_state": _RELOAD_STATE,
    "offload_state": _OFFLOAD_STATE,
}

Atoms = tuple[int, ...]
Seconds = tuple[float, float, float, float, float, float, float]
"""Of a call's run, its reallocation, its copy's reload, offload and update, and reload and offload of its optimizer
state."""


class _Op(NamedTuple):
    kind: int
    call: int
    atoms: Atoms
    needs: tuple[int, ...]
    """Calls whose outputs must be there."""
    first: Atoms
    """Atoms of the window on which the copy is allocated or freed."""
    allocates: bool
    frees: bool
    streams: bool
    has_model: bool


class _Pattern(NamedTuple):
    """What a program depends on beside the order: how windows cut the ranks, and what becomes of the copies."""

    num_atoms: int
    atoms: tuple[Atoms, ...]
    """Of each call's window."""
    copies: tuple[object, ...]
    """Of each call with a model: what its home copy does, or the first call of the same copy and whether it streams."""


class _Program(NamedTuple):
    num_atoms: int
    ops: tuple[_Op, ...]
    homes: tuple[tuple[int, Atoms], ...]
    """Home calls of the models, and their atoms."""


class Kernel:
    """Evaluates choices of one problem. It keeps what it compiled: use one for a whole search."""

    def __init__(self, problem: SearchProblem) -> None:
        graph = problem.graph
        self._problem = problem
        self.names = tuple(call.name for call in graph.calls)
        self.evaluations = 0
        self._number = {name: index for index, name in enumerate(self.names)}
        self._calls = graph.calls
        self._home = tuple(
            -1 if call.model is None else self._number[graph.home_call(call.model).name]
            for call in graph.calls
        )
        self._home_calls = tuple(dict.fromkeys(home for home in self._home if home >= 0))
        self._same_model = tuple(
            tuple(sorted((other for other, its in enumerate(self._home) if its == home), key=home.__ne__))
            for home in self._home
        )
        """The home call of each call's model, then its others."""
        self._sources = {
            self._number[graph.home_call(update.target).name]: (
                update,
                self._number[graph.home_call(update.source).name],
            )
            for update in graph.updates
        }
        """Of the home call of a model that is updated: the update, and the home call of its source."""
        self._declared = tuple(self._number[call.name] for call in graph.ordered())
        self._layouts: dict[Layout, int] = {}
        self._known: dict[int, tuple[Option, int]] = {}
        self._programs: dict[tuple[tuple[int, ...], _Pattern], _Program] = {}
        self._steps = StepBuilder(graph)
        self._atoms: dict[tuple[tuple[int, int], ...], tuple[tuple[Atoms, ...], int]] = {}
        """Atoms of each call's window, and their number, by all windows."""

    def evaluate(self, assignment: Assignment, order: Sequence[str] | None = None) -> Evaluation:
        """What `SearchProblem.evaluate` returns."""
        numbers = self._declared if order is None else tuple([self._number[name] for name in order])
        return self.evaluate_choices([assignment[name] for name in self.names], numbers)

    def evaluate_choices(self, choices: Sequence[Choice], order: tuple[int, ...]) -> Evaluation:
        """The same of choices in the declared order of the calls, run in `order` (numbers of calls)."""
        return next(self.evaluate_orders(choices, (order,)))

    def evaluate_orders(
        self, choices: Sequence[Choice], orders: Iterable[tuple[int, ...]]
    ) -> Iterator[Evaluation]:
        """The same under one order after another."""
        pattern = self._pattern(choices)
        for order in orders:
            self.evaluations += 1
            program = self._program(pattern, choices, order)
            period = self._period(program, [self._seconds(op, choices) for op in program.ops], len(choices))
            peak = self._peak(program, choices)
            yield Evaluation(period, peak - self._problem.capacity_bytes, peak)

    def period_with(
        self, choices: Sequence[Choice], order: tuple[int, ...], seconds: Sequence[Seconds]
    ) -> float:
        """The period that the steps of these choices would have if each took what `seconds` says for its call."""
        program = self._program(self._pattern(choices), choices, order)
        taken = [
            0.0 if op.kind == _RELOAD and not op.allocates else seconds[op.call][op.kind]
            for op in program.ops
        ]
        return self._period(program, taken, len(choices))

    def _layout(self, option: Option) -> int:
        known = self._known.get(id(option))
        if known is None:
            known = (option, self._layouts.setdefault(option.layout, len(self._layouts)))
            self._known[id(option)] = known  # the option is kept, so that its id stays its own
        return known[1]

    def _pattern(self, choices: Sequence[Choice]) -> _Pattern:
        windows = tuple([(choice.mesh.start, choice.mesh.stop) for choice in choices])
        atoms = self._atoms.get(windows)
        if atoms is None:
            if len(self._atoms) >= _MAX_PROGRAMS:
                self._atoms.clear()
            covered, num_atoms = atoms_of([choice.mesh for choice in choices])
            atoms = self._atoms[windows] = (tuple(covered[choice.mesh] for choice in choices), num_atoms)
        copies: list[object] = []
        for call, home in enumerate(self._home):
            if home == call:
                option = choices[call].option
                copies.append((option.offload, option.drop_trained_weights))
            elif home >= 0:
                own = (windows[call], self._layout(choices[call].option))
                for other in self._same_model[call]:
                    if windows[other] == own[0] and self._layout(choices[other].option) == own[1]:
                        copies.append((other, choices[call].option.stream))
                        break
        return _Pattern(atoms[1], atoms[0], tuple(copies))

    def _program(self, pattern: _Pattern, choices: Sequence[Choice], order: tuple[int, ...]) -> _Program:
        key = (order, pattern)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._compile(choices, order, pattern)
        return program

    def _compile(self, choices: Sequence[Choice], order: tuple[int, ...], pattern: _Pattern) -> _Program:
        assignment = dict(zip(self.names, choices, strict=True))
        steps = self._steps.steps(assignment, [self.names[number] for number in order])
        covered = {choice.mesh: parts for choice, parts in zip(choices, pattern.atoms, strict=True)}
        return _Program(
            pattern.num_atoms,
            tuple(self._op(step, [covered[mesh] for mesh in step.meshes]) for step in steps),
            tuple((home, pattern.atoms[home]) for home in self._home_calls),
        )

    def _op(self, step: Step, atoms: Sequence[Atoms]) -> _Op:
        return _Op(
            _KINDS[step.kind],
            self._number[step.call],
            tuple(sorted({atom for part in atoms for atom in part})),
            tuple(self._number[name] for name in step.needs),
            atoms[0],
            step.allocates,
            step.frees,
            step.streams,
            self._calls[self._number[step.call]].model is not None,
        )

    def _seconds(self, op: _Op, choices: Sequence[Choice]) -> float:
        option = choices[op.call].option
        if op.kind == _RUN:
            return option.seconds
        if op.kind == _REALLOC:
            model = self._calls[op.call].model
            assert model is not None
            home = choices[self._home[op.call]]
            return option.exposed_s(self._problem.realloc_s(model, home, choices[op.call]))
        if op.kind == _RELOAD:
            return option.return_s if op.allocates else 0.0
        if op.kind == _OFFLOAD:
            return option.leave_s
        if op.kind == _MIX:
            update, source = self._sources[op.call]
            return self._problem.mix_s(update, choices[source], choices[op.call])
        return option.state_return_s if op.kind == _RELOAD_STATE else option.state_leave_s

    def _period(self, program: _Program, seconds_of: Sequence[float], num_calls: int) -> float:
        steps = [
            (op.atoms, op.needs, seconds, op.call if op.kind == _RUN else -1)
            for op, seconds in zip(program.ops, seconds_of, strict=True)
        ]
        clocks = [0.0] * program.num_atoms
        before = clocks[:]
        history = [before]
        done = [0.0] * (num_calls + 1)
        for _ in range(program.num_atoms):
            for atoms, needs, seconds, call in steps:
                start = 0.0
                for atom in atoms:
                    if clocks[atom] > start:
                        start = clocks[atom]
                for need in needs:
                    if done[need] > start:
                        start = done[need]
                start += seconds
                for atom in atoms:
                    clocks[atom] = start
                done[call] = start
            growth = [after - former for after, former in zip(clocks, before, strict=True)]
            longest = max(growth)
            if longest - min(growth) <= TOLERANCE * longest:
                return longest
            before = clocks[:]
            history.append(before)
        return cycle_mean(history)

    def _peak(self, program: _Program, choices: Sequence[Choice]) -> int:
        held, peak = self._at_start(program, choices)
        staging = self._problem.staging_bytes
        for kind, call, atoms, _, first, allocates, frees, streams, has_model in program.ops:
            option = choices[call].option
            moved = option.weights_bytes if kind <= _MIX else option.state_bytes
            if allocates:
                for atom in first:
                    held[atom] += moved
            during = option.active_bytes if kind == _RUN and has_model else 0
            if streams:
                during += staging(option)
            elif kind == _REALLOC:
                during = staging(option) + staging(choices[self._home[call]].option)
            elif kind == _MIX:
                during = staging(option) + staging(choices[self._sources[call][1]].option)
            for atom in atoms:
                if held[atom] + during > peak:
                    peak = held[atom] + during
            if frees:
                for atom in first:
                    held[atom] -= moved
        return peak

    def _at_start(self, program: _Program, choices: Sequence[Choice]) -> tuple[list[int], int]:
        """What atoms hold when an iteration starts, and the most that one of them holds between iterations."""
        held = [0] * program.num_atoms
        parked: list[tuple[Atoms, int]] = []
        for home, atoms in program.homes:
            option = choices[home].option
            size = self._resident(home, choices)
            if size:
                for atom in atoms:
                    held[atom] += size
            if option.offload == "host" and self._calls[home].trains:
                parked.append((atoms, option.state_bytes))
        peak = max(held)
        for atoms, size in parked:
            peak = max([peak, *[held[atom] + size for atom in atoms]])
        return held, peak

    def _resident(self, home: int, choices: Sequence[Choice]) -> int:
        """What a home copy holds when an iteration starts."""
        option = choices[home].option
        trains = self._calls[home].trains
        size = 0
        if option.offload == "none":
            size = option.state_bytes + option.weights_bytes
        elif trains or option.drop_trained_weights:
            size = option.weights_bytes
        if any(choices[call].option.stream for call in self._same_model[home]):
            size += self._problem.staging_bytes(option)
        return size
