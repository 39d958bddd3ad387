"""Compile a graph and a plan into the program that every rank runs, once per iteration.

The simulator walks a program with a cost model, the runtime walks it with real models; both see the same instructions
under the same names.

Invariants (tests/property/test_program.py):
    - all instructions of an iteration have one global order; a rank's steps are a subsequence of it, up to the
      receiving side of a transfer, which waits right before the consumer runs;
    - for every pair of ranks, messages are sent and received in the same order;
    - an abstract machine that blocks wherever a rank can block finishes every program (no deadlock);
    - the source of a streamed realloc does not change before all of it is sent;
    - a call never runs on weights of another version than the graph asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from megatron_real.dataflow import Call, Graph, Update
from megatron_real.layout import Mesh
from megatron_real.plan import CopyKey, OffloadTo, Plan

__all__ = [
    "Instruction",
    "Mix",
    "Offload",
    "Program",
    "Realloc",
    "Reload",
    "Run",
    "Save",
    "Side",
    "Step",
    "Transfer",
    "What",
    "compile_program",
]


class Side(StrEnum):
    """What a rank does in an instruction."""

    WHOLE = "whole"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Execute a call on its copy."""

    call: str
    copy: CopyKey | None
    mesh: Mesh
    version_offset: int = 0
    """The copy's version minus the iteration: 1 after the model was trained in this iteration."""
    release: bool = False
    """Free the copy afterwards: it is inference-only and nothing needs it before its next realloc."""

    @property
    def name(self) -> str:
        return f"run:{self.call}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.mesh.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Realloc:
    """Bring a copy of a model to the weights of another."""

    model: str
    source: CopyKey
    target: CopyKey
    call: str
    """The call that needs it."""
    stream: bool = False
    """Start and go on: the call waits for each of its layers, and its ranks for the whole when it ends. Ranks outside
    the call go on to what else they have (see `Step.finish`)."""

    @property
    def name(self) -> str:
        return f"realloc:{self.call}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.mesh.ranks, *self.target.mesh.ranks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Move the weights of a model's home copy toward those of another model's: a `dataflow.Update` on its copies."""

    update: Update
    source: CopyKey
    target: CopyKey
    from_host: bool = False
    """The target rests on the host: its weights come to the device for this, and go back."""

    @property
    def name(self) -> str:
        return f"mix:{self.target.model}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.mesh.ranks, *self.target.mesh.ranks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Move a producer's outputs to a consumer; without a consumer, the lengths of a generation to all who need them."""

    producer: str
    consumer: str | None
    source: Mesh
    targets: tuple[int, ...]
    """Ranks that may receive."""

    @property
    def name(self) -> str:
        return f"transfer:{self.producer}>{self.consumer or 'lengths'}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.ranks, *self.targets}))


What = Literal["weights", "state"]
"""What of a copy is moved: its parameters, or a trained one's gradients and optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Free a copy's storage; its values stay on the ``host`` or in the optimizer's ``main_params``."""

    copy: CopyKey
    to: Literal["host", "main_params"]
    what: What = "weights"

    @property
    def name(self) -> str:
        return f"offload:{_moved(self.copy, self.what)}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.copy.mesh.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Undo an `Offload`; from a ``node``: fill a copy of a frozen model from the host store of each node."""

    copy: CopyKey
    source: Literal["host", "main_params", "node"]
    what: What = "weights"

    @property
    def name(self) -> str:
        return f"reload:{_moved(self.copy, self.what)}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.copy.mesh.ranks)


def _moved(copy: CopyKey, what: What) -> str:
    return copy.model if what == "weights" else f"{copy.model}.{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write a checkpoint: a fence that every rank joins, in the iterations that the runtime chooses."""

    world: Mesh

    @property
    def name(self) -> str:
        return "save"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.world.ranks)


Instruction = Run | Realloc | Mix | Transfer | Offload | Reload | Save


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One entry of a rank's program."""

    index: int
    """Position of the instruction in the global order of an iteration."""
    instruction: Instruction
    side: Side = Side.WHOLE
    finish: tuple[Realloc, ...] = ()
    """Streamed reallocs to other ranks that this rank must have sent before it begins; a `Save` ends them all, whether
    it is written or not."""

    @property
    def name(self) -> str:
        return self.instruction.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The instructions of one iteration, in their global order; every iteration runs the same."""

    graph: Graph
    plan: Plan
    instructions: tuple[Instruction, ...]
    world_size: int
    whole: Graph | None = None
    """The algorithm's graph, where `graph` has only the calls of an evaluation."""

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What `rank` does in an iteration.

        A transfer's sends are posted right after the producer ran, its receives are waited for right before the
        consumer runs; lengths right before the first call that needs them.
        """
        waiting: dict[str | None, list[Step]] = {}
        lengths: dict[str, Step] = {}
        steps: list[Step] = []
        sending: list[Realloc] = []
        for index, instruction in enumerate(self.instructions):
            if rank not in instruction.ranks:
                continue
            finish = tuple(realloc for realloc in sending if self._waits_for(instruction, realloc))
            sending = [realloc for realloc in sending if realloc not in finish]
            if (
                isinstance(instruction, Realloc)
                and instruction.stream
                and rank not in instruction.target.mesh
            ):
                sending.append(instruction)
            match instruction:
                case Transfer():
                    if rank in instruction.source:
                        steps.append(Step(index=index, instruction=instruction, side=Side.SEND))
                    if rank in instruction.targets:
                        receive = Step(index=index, instruction=instruction, side=Side.RECEIVE)
                        if instruction.consumer is None:
                            lengths[self.graph.call(instruction.producer).sequences] = receive
                        else:
                            waiting.setdefault(instruction.consumer, []).append(receive)
                case Run():
                    # Lengths first: they say which sequences the call works on, and how large its messages are.
                    needed = self.graph.sequences_needed(self.graph.call(instruction.call))
                    arriving = [lengths.pop(name) for name in tuple(lengths) if name in needed]
                    steps += [*arriving, *waiting.pop(instruction.call, [])]
                    steps.append(Step(index=index, instruction=instruction, finish=finish))
                case _:
                    steps.append(Step(index=index, instruction=instruction, finish=finish))
        return tuple(steps)

    def _waits_for(self, instruction: Instruction, realloc: Realloc) -> bool:
        """Whether a rank that still sends `realloc` must have finished before `instruction`.

        It changes or frees the source, or sends messages of the same kind, which match by their order.
        """
        match instruction:
            case Realloc() | Mix() | Save():
                return True
            case Run(copy=copy, call=call):
                return copy == realloc.source and self.graph.call(call).trains
            case Offload(copy=copy, what="weights"):
                return copy == realloc.source
            case _:
                return False

    def copies(self) -> tuple[CopyKey, ...]:
        """Every copy that the program uses, in order of first use."""
        seen: dict[CopyKey, None] = {}
        for instruction in self.instructions:
            match instruction:
                case Run(copy=copy) if copy is not None:
                    seen[copy] = None
                case Realloc(source=source, target=target):
                    seen[source] = seen[target] = None
        return tuple(seen)

    def home(self, model: str) -> CopyKey:
        """The copy in which a model lives between calls: trained models at their train call."""
        return _home(self.whole or self.graph, self.plan, model)


def compile_program(graph: Graph, plan: Plan, *, evaluation: Collection[str] = ()) -> Program:
    """Compile one iteration. Pure; every rank computes the same program.

    Calls come in `Graph.ordered(plan.order)`. Before a call on a copy that is not its model's home copy stands the
    realloc that fills it; the copy is released after its last call before the next training. A model in the nodes' host
    stores has no home on devices: a reload stands where the realloc would. Transfers stand right after their producer,
    the graph's updates after all calls, so that no training waits for another model's.

    With `evaluation` only these calls run, between two iterations; train calls among them compute their loss, no more.

    Raises:
        PlanError: the plan does not fit the graph, or a call of the evaluation needs one that is not.
    """
    plan.check(graph)
    order = tuple(call for call in graph.ordered(plan.order) if not evaluation or call.name in evaluation)
    world = Mesh(0, plan.cluster.num_devices)
    instructions: list[Instruction] = []
    homes = {model: _home(graph, plan, model) for model in graph.models}
    trained: set[str] = set()
    filled: set[CopyKey] = set()
    for position, call in enumerate(order):
        copy = plan.copy_of(call)
        if copy is not None:
            lives = (homes[copy.model], _rests_on(graph, plan, copy.model))
            instructions += _arrive(plan, call, copy, lives, filled)
            filled.add(copy)
        last_use = copy is not None and not _needed_later(copy, call, order[position + 1 :], plan)
        temporary = copy is not None and (
            copy != homes[copy.model] or _rests_on(graph, plan, copy.model) == "node"
        )
        run = Run(
            call=call.name,
            copy=copy,
            mesh=plan.calls[call.name].mesh,
            version_offset=int(copy is not None and copy.model in trained),
            release=temporary and last_use,
        )
        trains = call.trains and not evaluation
        if copy is not None and trains and plan.calls[call.name].offload == "host":
            instructions += [
                Reload(copy=copy, source="host", what="state"),
                run,
                Offload(copy=copy, to="host", what="state"),
            ]
        else:
            instructions.append(run)
        if copy is not None and trains:
            trained.add(copy.model)
            filled = {other for other in filled if other.model != copy.model}
        if copy is not None and temporary and last_use:
            filled.discard(copy)
        instructions += _depart(graph, plan, copy, order[position + 1 :])
        instructions += _transfers(graph, plan, call, order[position + 1 :])
    if evaluation:
        names = tuple(call.name for call in order)
        part, ordered = graph.only(names), plan.model_copy(update={"order": names})
        placed = tuple(instructions)
        return Program(graph=part, plan=ordered, instructions=placed, world_size=world.size, whole=graph)
    placed = tuple(_drop_weights(graph, plan, [*instructions, *_updates(graph, plan), Save(world=world)]))
    return Program(graph=graph, plan=plan, instructions=placed, world_size=world.size)


def _home(graph: Graph, plan: Plan, model: str) -> CopyKey:
    copy = plan.copy_of(graph.home_call(model))
    assert copy is not None, "a model has a copy"
    return copy


def _rests_on(graph: Graph, plan: Plan, model: str) -> OffloadTo:
    """Where the weights of a model are between its calls."""
    return "none" if graph.trained(model) else plan.calls[graph.home_call(model).name].offload


def _arrive(
    plan: Plan, call: Call, copy: CopyKey, lives: tuple[CopyKey, OffloadTo], filled: set[CopyKey]
) -> Iterator[Instruction]:
    home, rests_on = lives
    if rests_on == "host":
        yield Reload(copy=home, source="host")
    if copy in filled:
        return
    if rests_on == "node":
        yield Reload(copy=copy, source="node")
    elif copy != home:
        stream = plan.calls[call.name].stream
        yield Realloc(model=copy.model, source=home, target=copy, call=call.name, stream=stream)


def _depart(graph: Graph, plan: Plan, copy: CopyKey | None, later: tuple[Call, ...]) -> Iterator[Instruction]:
    if copy is None or _rests_on(graph, plan, copy.model) != "host":
        return
    if all(other.model != copy.model for other in later):
        yield Offload(copy=_home(graph, plan, copy.model), to="host")


def _updates(graph: Graph, plan: Plan) -> Iterator[Instruction]:
    for update in graph.updates:
        source, target = (_home(graph, plan, model) for model in (update.source, update.target))
        from_host = _rests_on(graph, plan, update.target) == "host"
        yield Mix(update=update, source=source, target=target, from_host=from_host)


def _needed_later(copy: CopyKey, call: Call, later: tuple[Call, ...], plan: Plan) -> bool:
    """Whether `copy` serves another call before its model is trained (after `call`)."""
    if call.trains:
        return False
    for other in later:
        if other.model == copy.model:
            if plan.copy_of(other) == copy and not other.trains:
                return True
            if other.trains:
                return False
    return False


def _transfers(graph: Graph, plan: Plan, call: Call, later: tuple[Call, ...]) -> Iterator[Instruction]:
    source = plan.calls[call.name].mesh
    if call.type == "generate":
        users = [other for other in later if call.sequences in graph.sequences_needed(other)]
        others = {rank for other in users for rank in plan.calls[other.name].mesh.ranks if rank not in source}
        if others:
            yield Transfer(producer=call.name, consumer=None, source=source, targets=tuple(sorted(others)))
    for consumer in later:
        if any(entry.key in call.outputs for entry in consumer.inputs):
            yield Transfer(
                producer=call.name,
                consumer=consumer.name,
                source=source,
                targets=tuple(plan.calls[consumer.name].mesh.ranks),
            )


def _drop_weights(graph: Graph, plan: Plan, instructions: list[Instruction]) -> list[Instruction]:
    """Add `Offload` after the last use of a dropped home copy before its training, and `Reload` before the training."""
    result = list(instructions)
    for model in graph.models:
        home_call = graph.home_call(model)
        if not plan.calls[home_call.name].drop_trained_weights:
            continue
        home = _home(graph, plan, model)
        # A streamed realloc reads the weights until the call that it brings them to has ended.
        streamed = {
            one.call for one in result if isinstance(one, Realloc) and one.stream and one.source == home
        }
        uses = [
            index
            for index, instruction in enumerate(result)
            if (isinstance(instruction, Realloc) and instruction.source == home)
            or (isinstance(instruction, Run) and (instruction.copy == home or instruction.call in streamed))
        ]
        train = next(
            i for i in uses if isinstance(result[i], Run) and result[i].name == f"run:{home_call.name}"
        )
        before = [i for i in uses if i < train]
        if before:
            result.insert(train, Reload(copy=home, source="main_params"))
            result.insert(before[-1] + 1, Offload(copy=home, to="main_params"))
    return result
