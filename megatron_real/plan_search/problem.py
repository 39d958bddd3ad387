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

from megatron_real.dataflow import Call, Graph
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from megatron_real.plan_search.clocks import atoms_of, period
from megatron_real.realloc_ops.plan import STAGING_SLOTS

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """A way to run a call on any window of a size. Bytes are of the rank that needs most."""

    layout: Layout
    num_microbatches: int = 1
    recompute: str = "none"
    offload: str = "none"
    drop_trained_weights: bool = False
    seconds: float
    """Of the run, with the data that it receives and sends."""
    weights_bytes: int = 0
    state_bytes: int = 0
    """Gradients and optimizer state, resident where the call trains."""
    active_bytes: int = 0
    """Activations, logits and key-value cache while the call runs."""
    leave_s: float = 0.0
    """Of the `Offload` of its copy (weights to the host, or dropped)."""
    return_s: float = 0.0
    """Of the `Reload` of its copy."""

    @property
    def size(self) -> int:
        return self.layout.size

    def placement(self, mesh: Mesh) -> Placement:
        """This option on `mesh`, as a plan has it."""
        layout = self.layout
        return Placement(
            ranks=(mesh.start, mesh.stop),
            layout=LayoutSpec(**{name: getattr(layout, name) for name in LayoutSpec.model_fields}),
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            offload=self.offload,
            drop_trained_weights=self.drop_trained_weights,
        )


class Choice(NamedTuple):
    """Where and how a call runs."""

    mesh: Mesh
    option: Option

    def same_copy(self, other: Choice) -> bool:
        """Whether two calls of one model share their weights."""
        return self.mesh == other.mesh and self.option.layout == other.option.layout


Assignment = Mapping[str, Choice]
"""A choice for every call."""


class Event(NamedTuple):
    """One instruction on a group of ranks that go through it together."""

    name: str
    """As the instruction's: ``run:actor_gen``, ``realloc:actor_gen``, ``reload:ref``, ``offload:ref``."""
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


class Step(NamedTuple):
    """An event without its numbers: they are those of one call's option."""

    kind: str
    """``run``, ``realloc``, ``reload`` or ``offload``."""
    name: str
    call: str
    """Whose option has the numbers: the call that runs or needs the copy, else the home call of the model."""
    meshes: tuple[Mesh, ...]
    needs: tuple[str, ...] = ()
    allocates: bool = False
    """The copy's weights, on the first mesh. A reload without this finds them there and costs nothing."""
    frees: bool = False


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
"""Seconds to bring a model's second copy to the weights of its first: ``price(model, home, other)``."""


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
        match step.kind:
            case "run":
                seconds, during = option.seconds, option.active_bytes if call.model is not None else 0
            case "realloc":
                assert call.model is not None
                home = assignment[self.graph.home_call(call.model).name]
                seconds = self.realloc_s(call.model, home, assignment[step.call])
                during = self.staging_bytes(home.option) + self.staging_bytes(option)
            case "reload":
                seconds, during = option.return_s if step.allocates else 0.0, 0
            case _:
                seconds, during = option.leave_s, 0
        return Event(
            step.name,
            step.meshes,
            seconds,
            step.needs,
            bytes_before=option.weights_bytes if step.allocates else 0,
            bytes_during=during,
            bytes_after=option.weights_bytes if step.frees else 0,
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
        if option.offload == "host" and not call.trains:
            return 0
        return option.state_bytes + (0 if option.drop_trained_weights else option.weights_bytes)

    def _peak(
        self,
        assignment: Assignment,
        events: Sequence[Event],
        covered: Mapping[Mesh, Sequence[int]],
        num_atoms: int,
    ) -> int:
        held = [0] * num_atoms
        for model in self.graph.models:
            call = self.graph.home_call(model)
            mesh, option = assignment[call.name]
            # At the start of an iteration a trained model's weights are there, dropped later or not.
            resident = self.resident_bytes(call, option)
            if option.drop_trained_weights:
                resident += option.weights_bytes
            for atom in covered[mesh]:
                held[atom] += resident
        peak = max(held, default=0)
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


class StepBuilder:
    """Builds the steps of one iteration by the rules of `program.compile_program`, for many choices of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._calls = {call.name: call for call in graph.calls}
        self._declared = tuple(call.name for call in graph.ordered())
        self._needs = {
            call.name: tuple(parent.name for parent in graph.parents(call)) for call in graph.calls
        }
        self._home = {model: graph.home_call(model).name for model in graph.models}
        self._trained = {model for model in graph.models if graph.trained(model)}

    def steps(self, assignment: Assignment, order: Sequence[str] | None = None) -> tuple[Step, ...]:
        """The instructions of an iteration; see `SearchProblem.steps`."""
        calls = [self._calls[name] for name in (order if order is not None else self._declared)]
        steps: list[Step] = []
        filled: list[tuple[str, Choice]] = []
        resident: set[str] = set()
        for position, call in enumerate(calls):
            choice = assignment[call.name]
            if call.model is None:
                steps.append(
                    Step("run", f"run:{call.name}", call.name, (choice.mesh,), self._needs[call.name])
                )
                continue
            later = [other for other in calls[position + 1 :] if other.model == call.model]
            home = assignment[self._home[call.model]]
            offloaded = call.model not in self._trained and home.option.offload == "host"
            if offloaded:
                steps.append(self._move("reload", call.model, home, allocates=call.model not in resident))
                resident.add(call.model)
            temporary = not choice.same_copy(home)
            if temporary and not _is_filled(filled, call.model, choice):
                filled.append((call.model, choice))
                meshes = (choice.mesh,) if choice.mesh == home.mesh else (choice.mesh, home.mesh)
                steps.append(Step("realloc", f"realloc:{call.name}", call.name, meshes, allocates=True))
            release = temporary and not _needed_later(assignment, call, choice, later)
            steps.append(
                Step(
                    "run",
                    f"run:{call.name}",
                    call.name,
                    (choice.mesh,),
                    self._needs[call.name],
                    frees=release,
                )
            )
            if call.trains or release:
                filled = [
                    (model, other)
                    for model, other in filled
                    if model != call.model or not (call.trains or other.same_copy(choice))
                ]
            if offloaded and not later:
                resident.discard(call.model)
                steps.append(self._move("offload", call.model, home, frees=True))
        return self._with_dropped_weights(steps, assignment)

    def _move(
        self, kind: str, model: str, home: Choice, *, allocates: bool = False, frees: bool = False
    ) -> Step:
        name = f"{kind}:{model}"
        return Step(kind, name, self._home[model], (home.mesh,), allocates=allocates, frees=frees)

    def _with_dropped_weights(self, steps: list[Step], assignment: Assignment) -> tuple[Step, ...]:
        """With `Offload` after the last use of a dropped home copy before its training, `Reload` before it."""
        for model, home_call in self._home.items():
            home = assignment[home_call]
            if not home.option.drop_trained_weights:
                continue
            uses = {f"run:{home_call}"}
            for call in self._calls.values():
                if call.model == model:
                    same = assignment[call.name].same_copy(home)
                    uses.add(f"run:{call.name}" if same else f"realloc:{call.name}")
            at = [index for index, step in enumerate(steps) if step.name in uses]
            train = next(i for i in at if steps[i].name == f"run:{home_call}")
            before = [index for index in at if index < train]
            if before:
                steps.insert(train, self._move("reload", model, home, allocates=True))
                steps.insert(before[-1] + 1, self._move("offload", model, home, frees=True))
        return tuple(steps)


def _is_filled(filled: Sequence[tuple[str, Choice]], model: str, choice: Choice) -> bool:
    return any(name == model and other.same_copy(choice) for name, other in filled)


def _needed_later(assignment: Assignment, call: Call, choice: Choice, later: Sequence[Call]) -> bool:
    """Whether a temporary copy serves one of the `later` calls of its model before the model is trained."""
    if call.trains:
        return False
    for other in later:
        if assignment[other.name].same_copy(choice) and not other.trains:
            return True
        if other.trains:
            return False
    return False


def _extensions(
    prefix: tuple[str, ...], rest: list[str], before: Mapping[str, set[str]]
) -> Iterator[tuple[str, ...]]:
    if not rest:
        yield prefix
        return
    for name in rest:
        if before[name] <= set(prefix):
            yield from _extensions((*prefix, name), [other for other in rest if other != name], before)
