"""The search as a table: which options each call has, what they cost, and what a choice of one for each amounts to.

Strategies see nothing else. `evaluate` walks the instructions that `program.compile_program` would make of a choice,
over *atoms* (groups of ranks that lie in the same windows) instead of ranks. Sends and receives of data are folded
into the calls' seconds. The objective is the steady-state period (`plan_search/clocks.py`).

`plan_search/kernel.py` does the same much faster.

Invariants (tests/property/test_search_problem.py):
    - the events of a choice are the instructions of its compiled program;
    - longer durations never shorten the period;
    - a rank's load and the cycle from a training to the next one are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_real.dataflow import Call, Graph, Update
from megatron_real.errors import PlanError
from megatron_real.layout import Mesh
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.plan_search.choices import Assignment, Choice, Option
from megatron_real.plan_search.clocks import atoms_of, period
from megatron_real.plan_search.steps import Step, StepBuilder
from megatron_real.realloc_ops.planning.plan import STAGING_SLOTS

__all__ = [
    "Assignment",
    "Choice",
    "Evaluation",
    "Event",
    "Limits",
    "Option",
    "Progress",
    "SearchProblem",
    "Solution",
    "Step",
    "StepBuilder",
]


class Event(NamedTuple):
    """One instruction on a group of ranks that go through it together."""

    name: str
    """As the instruction's: ``run:actor_gen``, ``realloc:actor_gen``, ``mix:ref``, ``reload:ref``,
    ``offload:actor.state``."""
    meshes: tuple[Mesh, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    """Calls whose outputs must be there."""
    bytes_before: int = 0
    """Allocated on the first mesh when the event starts: a copy's weights."""
    bytes_during: int = 0
    """On all meshes, beside what is resident, until the event ends."""
    bytes_after: int = 0
    """Freed on the first mesh at its end."""


class Evaluation(NamedTuple):
    """What a choice amounts to."""

    period_s: float
    overflow_bytes: int
    """By how much the fullest rank exceeds the capacity; 0 or less fits."""
    peak_bytes: int

    @property
    def fits(self) -> bool:
        return self.overflow_bytes <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a strategy stops."""

    time_s: float = 60.0
    gap: float = 0.0
    """(period - lower bound) / period at which the answer is good enough."""
    evaluations: int | None = None
    seed: int = 0


class Progress(NamedTuple):
    """What a strategy knows while it runs."""

    seconds: float
    evaluations: int
    period_s: float
    """Of the best choice so far; infinite before the first."""
    lower_bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a strategy found."""

    strategy: str
    assignment: Assignment | None
    """None: nothing fits, or nothing was found in time."""
    order: tuple[str, ...] | None
    period_s: float
    lower_bound_s: float
    """No choice of this problem has a shorter period."""
    evaluations: int
    seconds: float
    proven_infeasible: bool = False
    trace: tuple[Progress, ...] = ()
    """Improvements, in order."""

    @property
    def gap(self) -> float:
        """(period - lower bound) / period."""
        if self.assignment is None:
            return float("inf")
        return max(0.0, (self.period_s - self.lower_bound_s) / self.period_s)


ReallocPrice = Callable[[str, Choice, Choice], float]
"""Seconds to bring a model's second copy to the weights of its first: ``price(model, home, other)``. Of the windows and
layouts alone; what a streamed one adds is `Option.exposed_s`."""


MixPrice = Callable[[Update, Choice, Choice], float]
"""Seconds per iteration of an update: ``price(update, home of its source, home of its target)``. Windows, layouts and
the target's offload count. Lower bounds leave updates out."""


def _no_updates(update: Update, source: Choice, target: Choice) -> float:
    raise PlanError(f"search: found an update of {update.target}; expected its price in the search problem.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchProblem:
    """Everything that a strategy may look at."""

    graph: Graph
    cluster: ClusterSpec
    meshes: tuple[Mesh, ...]
    """Windows that calls may take, largest first. With `laminar` they are nested or disjoint."""
    capacity_bytes: int
    options: Mapping[tuple[str, int], tuple[Option, ...]]
    """By call and window size, fastest first; a pair that is missing has none."""
    realloc_s: ReallocPrice
    mix_s: MixPrice = _no_updates
    bucket_bytes: int = 0
    """The largest message of a reallocation: its ranks stage a few of them (see `staging_bytes`)."""
    laminar: bool = True
    pinned: Mapping[str, Mesh] = field(default_factory=dict)
    """Windows that the user fixed."""
    order: tuple[str, ...] | None = None
    """The order that the user fixed."""

    def meshes_of(self, call: str) -> tuple[Mesh, ...]:
        """Windows on which `call` has an option, largest first."""
        if call in self.pinned:
            return (self.pinned[call],)
        return tuple(mesh for mesh in self.meshes if self.options.get((call, mesh.size)))

    def options_on(self, call: str, mesh: Mesh) -> tuple[Option, ...]:
        return self.options.get((call, mesh.size), ())

    def staging_bytes(self, option: Option) -> int:
        """Of a reallocation from or to a copy of this option, at most: no message is larger than what a rank holds."""
        return STAGING_SLOTS * min(self.bucket_bytes, option.weights_bytes)

    def staging_of(self, choice: Choice) -> int:
        """The same of a choice."""
        return self.staging_bytes(choice.option)

    def orders(self) -> Iterator[tuple[str, ...]]:
        """Every order of the calls that respects the data, the declared one first; the user's alone, if it is fixed.

        Their number grows with the factorial of the independent calls.
        """
        if self.order is not None:
            yield tuple(call.name for call in self.graph.ordered(self.order))
            return
        calls = [call.name for call in self.graph.calls]
        before = {
            call.name: {parent.name for parent in self.graph.parents(call)} for call in self.graph.calls
        }
        yield from _extensions((), calls, before)

    def steps(self, assignment: Assignment, order: Sequence[str] | None = None) -> tuple[Step, ...]:
        """The instructions of an iteration, in their global order (see `program.compile_program`).

        They depend on the windows, on which calls share copies and on what is offloaded or dropped, not on any cost.
        """
        return StepBuilder(self.graph).steps(assignment, order)

    def events(self, assignment: Assignment, order: Sequence[str] | None = None) -> tuple[Event, ...]:
        """The steps with their seconds and bytes."""
        return tuple(self._event(step, assignment) for step in self.steps(assignment, order))

    def _event(self, step: Step, assignment: Assignment) -> Event:
        option = assignment[step.call].option
        call = self.graph.call(step.call)
        seconds, during, moved = 0.0, 0, option.weights_bytes
        match step.kind:
            case "run":
                seconds, during = option.seconds, option.active_bytes if call.model is not None else 0
                during += self.staging_bytes(option) if step.streams else 0
            case "realloc":
                assert call.model is not None
                home = assignment[self.graph.home_call(call.model).name]
                seconds = option.exposed_s(self.realloc_s(call.model, home, assignment[step.call]))
                during = self.staging_bytes(option)
                during += 0 if step.streams else self.staging_bytes(home.option)
            case "mix":
                assert call.model is not None
                update = self.graph.update_of(call.model)
                assert update is not None
                source = assignment[self.graph.home_call(update.source).name]
                seconds = self.mix_s(update, source, assignment[step.call])
                during = self.staging_bytes(option) + self.staging_bytes(source.option)
            case "reload":
                seconds = option.return_s if step.allocates else 0.0
            case "offload":
                seconds = option.leave_s
            case "reload_state":
                seconds, moved = option.state_return_s, option.state_bytes
            case _:
                seconds, moved = option.state_leave_s, option.state_bytes
        return Event(
            step.name,
            step.meshes,
            seconds,
            step.needs,
            bytes_before=moved if step.allocates else 0,
            bytes_during=during,
            bytes_after=moved if step.frees else 0,
        )

    def evaluate(self, assignment: Assignment, order: Sequence[str] | None = None) -> Evaluation:
        """Period and peak memory of a choice under an order (None: the declared one)."""
        events = self.events(assignment, order)
        covered, num_atoms = atoms_of([choice.mesh for choice in assignment.values()])
        where = [tuple(sorted({atom for mesh in event.meshes for atom in covered[mesh]})) for event in events]
        peak = self._peak(assignment, events, covered, num_atoms)
        return Evaluation(period(events, where, num_atoms), peak - self.capacity_bytes, peak)

    def to_plan(self, assignment: Assignment, order: Sequence[str] | None = None) -> Plan:
        """The plan without estimates."""
        declared = tuple(call.name for call in self.graph.ordered())
        return Plan(
            algorithm=self.graph.name,
            cluster=self.cluster,
            calls={
                call.name: assignment[call.name].option.placement(assignment[call.name].mesh)
                for call in self.graph.calls
            },
            order=tuple(order) if order is not None and tuple(order) != declared else None,
        )

    def resident_bytes(self, call: Call, option: Option) -> int:
        """What a copy keeps on each of its ranks over the whole iteration, if it is its model's home."""
        if call.model is None or self.graph.home_call(call.model).name != call.name:
            return 0
        if option.offload != "none":
            # Of a frozen model everything is away, of a trained one gradients and optimizer state.
            return option.weights_bytes if call.trains and not option.drop_trained_weights else 0
        return option.state_bytes + (0 if option.drop_trained_weights else option.weights_bytes)

    def _peak(
        self,
        assignment: Assignment,
        events: Sequence[Event],
        covered: Mapping[Mesh, Sequence[int]],
        num_atoms: int,
    ) -> int:
        held, peak = self._at_start(assignment, covered, num_atoms)
        for event in events:
            for atom in covered[event.meshes[0]]:
                held[atom] += event.bytes_before
            for mesh in event.meshes:
                for atom in covered[mesh]:
                    if held[atom] + event.bytes_during > peak:
                        peak = held[atom] + event.bytes_during
            if event.bytes_after:
                for atom in covered[event.meshes[0]]:
                    held[atom] -= event.bytes_after
        return peak

    def _at_start(
        self, assignment: Assignment, covered: Mapping[Mesh, Sequence[int]], num_atoms: int
    ) -> tuple[list[int], int]:
        """What atoms hold when an iteration starts, and the most that one of them holds between iterations."""
        held = [0] * num_atoms
        parked: list[tuple[Mesh, int]] = []
        for model in self.graph.models:
            call = self.graph.home_call(model)
            mesh, option = assignment[call.name]
            # At the start of an iteration a trained model's weights are there, dropped later or not.
            resident = self.resident_bytes(call, option)
            if option.drop_trained_weights:
                resident += option.weights_bytes
            if any(assignment[other.name].option.stream for other in self.graph.calls_of(model)):
                # Its ranks may send until the iteration ends.
                resident += self.staging_bytes(option)
            if call.trains and option.offload == "host":
                parked.append((mesh, option.state_bytes))
            for atom in covered[mesh]:
                held[atom] += resident
        peak = max(held, default=0)
        for mesh, size in parked:  # built, saved and loaded beside what rests
            peak = max([peak, *(held[atom] + size for atom in covered[mesh])])
        return held, peak


def _extensions(
    prefix: tuple[str, ...], rest: list[str], before: Mapping[str, set[str]]
) -> Iterator[tuple[str, ...]]:
    if not rest:
        yield prefix
        return
    for name in rest:
        if before[name] <= set(prefix):
            yield from _extensions((*prefix, name), [other for other in rest if other != name], before)
