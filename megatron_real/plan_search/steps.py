"""The instructions of an iteration that `program.compile_program` would make of a choice, without compiling a plan.

Invariant (tests/property/test_search_problem.py): the steps of a choice are the instructions of its compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_real.dataflow import Call, Graph, Update
from megatron_real.layout import Mesh
from megatron_real.plan_search.choices import Assignment, Choice

__all__ = ["Step", "StepBuilder", "weights_stay"]


class Step(NamedTuple):
    """An event without its numbers: they are those of one call's option."""

    kind: str
    """``run``, ``realloc``, ``mix``, ``reload`` or ``offload``; ``reload_state`` and ``offload_state`` of a trained
    copy."""
    name: str
    call: str
    """Whose option has the numbers: the call that runs or needs the copy, else the home call of the model."""
    meshes: tuple[Mesh, ...]
    needs: tuple[str, ...] = ()
    allocates: bool = False
    """The copy's weights (or its optimizer state), on the first mesh. A reload without this finds them there and
    costs nothing."""
    frees: bool = False
    streams: bool = False
    """Of a reallocation and of the run that it goes on beside."""


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
        self._updates = graph.updates

    def steps(self, assignment: Assignment, order: Sequence[str] | None = None) -> tuple[Step, ...]:
        """The instructions of an iteration; see `SearchProblem.steps`."""
        calls = [self._calls[name] for name in (order if order is not None else self._declared)]
        steps: list[Step] = []
        filled: list[tuple[str, Choice]] = []
        resident: set[str] = set()
        for position, call in enumerate(calls):
            choice = assignment[call.name]
            if call.model is None:
                steps.append(self._run(call, choice))
                continue
            later = [other for other in calls[position + 1 :] if other.model == call.model]
            home = assignment[self._home[call.model]]
            frozen = call.model not in self._trained
            stored = frozen and home.option.offload == "node"
            offloaded = frozen and home.option.offload == "host"
            if offloaded:
                steps.append(self._move("reload", call.model, home, allocates=call.model not in resident))
                resident.add(call.model)
            temporary = stored or not choice.same_copy(home)
            streams = False
            if temporary and not _is_filled(filled, call.model, choice):
                filled.append((call.model, choice))
                streams = choice.option.stream and not stored
                steps.append(self._fill(call, choice, home, stored=stored))
            release = temporary and not _needed_later(assignment, call, choice, later)
            parks = call.trains and choice.option.offload == "host"
            if parks:
                steps.append(self._move("reload_state", call.model, home, allocates=True))
            steps.append(self._run(call, choice, frees=release, streams=streams))
            if parks:
                steps.append(self._move("offload_state", call.model, home, frees=True))
            if call.trains or release:
                filled = [
                    (model, other)
                    for model, other in filled
                    if model != call.model or not (call.trains or other.same_copy(choice))
                ]
            if offloaded and not later:
                resident.discard(call.model)
                steps.append(self._move("offload", call.model, home, frees=True))
        steps += [self._mix(update, assignment) for update in self._updates]
        return self._with_dropped_weights(steps, assignment)

    def _mix(self, update: Update, assignment: Assignment) -> Step:
        target, source = (assignment[self._home[model]] for model in (update.target, update.source))
        meshes = (target.mesh,) if target.mesh == source.mesh else (target.mesh, source.mesh)
        arrives = target.option.offload == "host"
        return Step(
            "mix", f"mix:{update.target}", self._home[update.target], meshes, allocates=arrives, frees=arrives
        )

    def _run(self, call: Call, choice: Choice, *, frees: bool = False, streams: bool = False) -> Step:
        return Step(
            "run",
            f"run:{call.name}",
            call.name,
            (choice.mesh,),
            self._needs[call.name],
            frees=frees,
            streams=streams,
        )

    def _fill(self, call: Call, choice: Choice, home: Choice, *, stored: bool) -> Step:
        """What brings the weights into the copy of a call."""
        if stored:
            return Step("reload", f"reload:{call.model}", call.name, (choice.mesh,), allocates=True)
        meshes = (choice.mesh,) if choice.mesh == home.mesh else (choice.mesh, home.mesh)
        streams = choice.option.stream
        return Step("realloc", f"realloc:{call.name}", call.name, meshes, allocates=True, streams=streams)

    def _move(
        self, kind: str, model: str, home: Choice, *, allocates: bool = False, frees: bool = False
    ) -> Step:
        action, _, state = kind.partition("_")
        name = f"{action}:{model}.{state}" if state else f"{action}:{model}"
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
            at = [
                index
                for index, step in enumerate(steps)
                if step.name in uses or (step.streams and self._calls[step.call].model == model)
            ]
            train = next(i for i in at if steps[i].name == f"run:{home_call}")
            before = [index for index in at if index < train]
            if before:
                steps.insert(train, self._move("reload", model, home, allocates=True))
                steps.insert(before[-1] + 1, self._move("offload", model, home, frees=True))
        return tuple(steps)


def weights_stay(graph: Graph, call: Call) -> bool:
    """Whether no weights move to or from the copy of a call, so that its layout matters to itself alone."""
    model = call.model
    if model is None:
        return True
    updated = any(model in (update.source, update.target) for update in graph.updates)
    return len(graph.calls_of(model)) == 1 and not updated


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
