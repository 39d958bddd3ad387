"""Compile a graph and a plan into the program that every rank runs, once per iteration.

The simulator walks a program with a cost model, the runtime walks it with real models; both see the same instructions
under the same names.

Invariants (tests/property/test_program.py):
    - all instructions of an iteration have one global order; a rank's steps are a subsequence of it, up to
    the receiving
      side of a transfer, which waits right before the consumer runs;
    - for every pair of ranks, messages are sent and received in the same order;
    - an abstract machine that blocks wherever a rank can block finishes every program (no deadlock);
    - a call never runs on weights of another version than the graph asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron_real.dataflow import Call, Graph
from megatron_real.layout import Mesh
from megatron_real.plan import CopyKey, Plan

__all__ = [
    "Instruction",
    "Offload",
    "Program",
    "Realloc",
    "Reload",
    "Run",
    "Save",
    "Side",
    "Step",
    "Transfer",
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

    @property
    def name(self) -> str:
        return f"realloc:{self.call}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.mesh.ranks, *self.target.mesh.ranks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Move a producer's outputs to a consumer; without a consumer, the lengths of a generation to everyone else."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Free a copy's storage; its values stay on the ``host`` or in the optimizer's ``main_params``."""

    copy: CopyKey
    to: str

    @property
    def name(self) -> str:
        return f"offload:{self.copy.model}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.copy.mesh.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Undo an `Offload`."""

    copy: CopyKey

    @property
    def name(self) -> str:
        return f"reload:{self.copy.model}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.copy.mesh.ranks)


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


Instruction = Run | Realloc | Transfer | Offload | Reload | Save


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One entry of a rank's program."""

    index: int
    """Position of the instruction in the global order of an iteration."""
    instruction: Instruction
    side: Side = Side.WHOLE

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

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What `rank` does in an iteration.

        A transfer's sends are posted right after the producer ran, its receives are waited for right before the
        consumer runs.
        """
        waiting: dict[str | None, list[Step]] = {}
        lengths: list[Step] = []
        steps: list[Step] = []
        for index, instruction in enumerate(self.instructions):
            if rank not in instruction.ranks:
                continue
            match instruction:
                case Transfer():
                    if rank in instruction.source:
                        steps.append(Step(index=index, instruction=instruction, side=Side.SEND))
                    if rank in instruction.targets:
                        receive = Step(index=index, instruction=instruction, side=Side.RECEIVE)
                        if instruction.consumer is None:
                            lengths.append(receive)
                        else:
                            waiting.setdefault(instruction.consumer, []).append(receive)
                case Run():
                    # Lengths first: they say which sequences the call works on, and how large its messages are.
                    steps += [*lengths, *waiting.pop(instruction.call, [])]
                    lengths = []
                    steps.append(Step(index=index, instruction=instruction))
                case _:
                    steps.append(Step(index=index, instruction=instruction))
        return tuple(steps)

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
        copy = self.plan.copy_of(self.graph.home_call(model))
        assert copy is not None, "a model has a copy"
        return copy


def compile_program(graph: Graph, plan: Plan) -> Program:
    """Compile one iteration. Pure; every rank computes the same program.

    Calls come in `Graph.ordered(plan.order)`. Before a call on a copy that is not its model's home copy stands the
    realloc that fills it; the copy is released after its last call before the next training. Transfers stand
    right after
    their producer.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    plan.check(graph)
    order = graph.ordered(plan.order)
    world = Mesh(0, plan.cluster.num_devices)
    instructions: list[Instruction] = []
    homes = {model: plan.copy_of(graph.home_call(model)) for model in graph.models}
    trained: set[str] = set()
    filled: set[CopyKey] = set()
    for position, call in enumerate(order):
        copy = plan.copy_of(call)
        if copy is not None:
            home = homes[copy.model]
            assert home is not None, "a model has a home copy"
            instructions += _arrive(graph, plan, call, copy, home, filled)
            filled.add(copy)
        last_use = copy is not None and not _needed_later(copy, call, order[position + 1 :], plan)
        temporary = copy is not None and copy != homes[copy.model]
        instructions.append(
            Run(
                call=call.name,
                copy=copy,
                mesh=plan.calls[call.name].mesh,
                version_offset=int(copy is not None and copy.model in trained),
                release=temporary and last_use,
            )
        )
        if copy is not None and call.trains:
            trained.add(copy.model)
            filled = {other for other in filled if other.model != copy.model}
        if copy is not None and temporary and last_use:
            filled.discard(copy)
        instructions += _depart(graph, plan, call, copy, order[position + 1 :])
        instructions += _transfers(graph, plan, call, order[position + 1 :])
    instructions.append(Save(world=world))
    placed = _drop_weights(graph, plan, instructions)
    return Program(graph=graph, plan=plan, instructions=tuple(placed), world_size=world.size)


def _arrive(
    graph: Graph, plan: Plan, call: Call, copy: CopyKey, home: CopyKey, filled: set[CopyKey]
) -> Iterator[Instruction]:
    if not graph.trained(copy.model) and plan.calls[graph.home_call(copy.model).name].offload == "host":
        yield Reload(copy=home)
    if copy != home and copy not in filled:
        yield Realloc(model=copy.model, source=home, target=copy, call=call.name)


def _depart(
    graph: Graph, plan: Plan, call: Call, copy: CopyKey | None, later: tuple[Call, ...]
) -> Iterator[Instruction]:
    if copy is None or graph.trained(copy.model):
        return
    home = graph.home_call(copy.model)
    if plan.calls[home.name].offload == "host" and all(other.model != copy.model for other in later):
        home_copy = plan.copy_of(home)
        assert home_copy is not None, "a model has a home copy"
        yield Offload(copy=home_copy, to="host")


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
        others = {rank for other in later for rank in plan.calls[other.name].mesh.ranks if rank not in source}
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
        home = plan.copy_of(home_call)
        assert home is not None, "a model has a home copy"
        uses = [
            index
            for index, instruction in enumerate(result)
            if (isinstance(instruction, Realloc) and instruction.source == home)
            or (isinstance(instruction, Run) and instruction.copy == home)
        ]
        train = next(
            i for i in uses if isinstance(result[i], Run) and result[i].name == f"run:{home_call.name}"
        )
        before = [i for i in uses if i < train]
        if before:
            result.insert(train, Reload(copy=home))
            result.insert(before[-1] + 1, Offload(copy=home, to="main_params"))
    return result
