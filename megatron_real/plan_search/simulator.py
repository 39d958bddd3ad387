"""Walk a program with prices: the timeline that the runtime would have, and its steady-state period.

The same `program.Program` that the runtime executes; spans have the same names. Ranks that lie in the same windows do
the same, so the walk is over such groups of ranks and its spans are copied to each of them.

A run, a realloc, a mix, an offload or a reload starts when the last of its ranks is there. A transfer's send takes its
producer's ranks for a while, then travels; its receive is over once everything arrived. The buffers of a send are given
back at the end of the next iteration: there the sender waits until it was received.

Invariants (tests/unit/plan_search/test_simulator.py, tests/distributed/test_simulated_order.py):
    - hand-worked schedules; every rank's spans are those of a rank that walks `Program.steps` by itself;
    - the period is the growth per iteration in the long run (a rank that never waits for the slowest one, or clocks
      that alternate, included);
    - the order of spans on each rank is what the runtime executes; spans of a rank do not overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from megatron_real.layout import Mesh
from megatron_real.plan_search.clocks import TOLERANCE, cycle_mean
from megatron_real.program import (
    Instruction,
    Mix,
    Offload,
    Program,
    Realloc,
    Reload,
    Run,
    Save,
    Side,
    Step,
    Transfer,
)
from megatron_real.trace import Span, SpanKind

__all__ = ["InstructionPrices", "PathStep", "Simulation", "TransferTime", "simulate"]

_KINDS: Mapping[type, SpanKind] = {
    Run: SpanKind.RUN,
    Realloc: SpanKind.REALLOC,
    Mix: SpanKind.REALLOC,
    Transfer: SpanKind.TRANSFER,
    Offload: SpanKind.OFFLOAD,
    Reload: SpanKind.OFFLOAD,
}


class TransferTime(NamedTuple):
    """Seconds of a transfer."""

    send_s: float
    """The producer's ranks pack and post."""
    wire_s: float
    """From the post until everything has arrived."""
    receive_s: float
    """The consumer's ranks unpack."""


class InstructionPrices(Protocol):
    """What the simulator asks for."""

    def seconds(self, instruction: Instruction) -> float:
        """Of a run, realloc, offload or reload; of a mix what an iteration has of it in the mean."""
        ...

    def transfer(self, instruction: Transfer) -> TransferTime:
        """Of a transfer."""
        ...


class PathStep(NamedTuple):
    """An interval of the critical path."""

    name: str
    iteration: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a program amounts to under prices."""

    period_s: float
    """Seconds per iteration in the steady state."""
    first_iteration_s: float
    """Until the last rank is done with the first iteration."""
    spans: tuple[Span, ...]
    """Of every rank and the recorded iterations, waits included."""
    critical_path: tuple[PathStep, ...]
    """What the last recorded iteration's end waited for, back to the end of the one before it, in order of time."""


@dataclass(slots=True)
class _Group:
    """Ranks that do the same."""

    mesh: Mesh
    steps: tuple[Step, ...]
    position: int = 0
    clock: float = 0.0
    last: int = -1
    """The record of what ran last."""
    records: list[_Record] = field(default_factory=list)


class _Record(NamedTuple):
    name: str
    kind: SpanKind
    iteration: int
    entered_s: float
    start_s: float
    end_s: float
    side: Side
    cause: int
    """Index of the record that the start waited for; -1 at the beginning."""


def simulate(program: Program, prices: InstructionPrices, *, iterations: int = 4) -> Simulation:
    """Simulate `iterations` iterations, and more without spans where the period does not show in them.

    Args:
        program: compiled from the plan.
        prices: of its instructions; asked once per instruction.
        iterations: that spans are recorded of.
    """
    walk = _Walk(program, prices)
    history = [walk.state()]
    ends: list[float] = []
    recorded: list[_Record] = []
    steady = None
    while len(ends) < iterations or (steady is None and len(ends) < len(history[0])):
        walk.iterate(len(ends))
        history.append(walk.state())
        ends.append(max(group.clock for group in walk.groups))
        steady = _common_growth(history[-2], history[-1])
        if len(ends) == iterations:
            recorded = list(walk.records)
    return Simulation(
        period_s=steady if steady is not None else cycle_mean(history[: len(history[0]) + 1]),
        first_iteration_s=ends[0],
        spans=tuple(walk.spans(iterations)),
        critical_path=_critical_path(recorded, iterations - 1),
    )


def _common_growth(before: Sequence[float], after: Sequence[float]) -> float | None:
    """What all times have grown by, if it is the same."""
    growth = [late - early for early, late in zip(before, after, strict=True)]
    largest = max(growth)
    return largest if largest - min(growth) <= TOLERANCE * max(largest, 1e-12) else None


class _Walk:
    def __init__(self, program: Program, prices: InstructionPrices) -> None:
        self.program = program
        self.prices = prices
        self.groups = [_Group(mesh, program.steps(mesh.start)) for mesh in _groups(program)]
        self.records: list[_Record] = []
        self._iteration = 0
        self._members = {
            index: [group for group in self.groups if group.mesh.start in ranks]
            for index, instruction in enumerate(program.instructions)
            for ranks in [set(instruction.ranks)]
        }
        self._transfer_indices = [
            index
            for index, instruction in enumerate(program.instructions)
            if isinstance(instruction, Transfer)
        ]
        self._seconds: dict[int, float] = {}
        self._transfers: dict[int, TransferTime] = {}
        self._arrivals: dict[int, tuple[float, int]] = {}
        self._received: dict[int, float] = {}
        self._received_before: dict[int, float] = {}

    def state(self) -> tuple[float, ...]:
        """All that the next iteration depends on: the groups' clocks, and when each transfer was last received."""
        received = (self._received.get(index, 0.0) for index in self._transfer_indices)
        return (*(group.clock for group in self.groups), *received)

    def iterate(self, iteration: int) -> None:
        """One iteration on every group."""
        self._iteration = iteration
        self._received_before, self._received = self._received, {}
        self._arrivals = {}
        for group in self.groups:
            group.position = 0
        for index, instruction in enumerate(self.program.instructions):
            match instruction:
                case Save():
                    continue
                case Transfer():
                    self._send(index, instruction)
                case _:
                    self._together(index, instruction)
        for group in self.groups:
            for step in group.steps:  # buffers of the sends of the iteration before
                if step.side is Side.SEND and step.index in self._received_before:
                    group.clock = max(group.clock, self._received_before[step.index])

    def _send(self, index: int, instruction: Transfer) -> None:
        time = self._transfer_time(index, instruction)
        for group in self._members[index]:
            if group.mesh.start in instruction.source:
                end = group.clock + time.send_s
                record = self._record(group, instruction, group.clock, end, Side.SEND, group.last)
                self._arrivals[index] = max(self._arrivals.get(index, (0.0, -1)), (end + time.wire_s, record))

    def _receive(self, group: _Group) -> None:
        """The receives that stand before the group's next whole step."""
        while group.position < len(group.steps):
            step = group.steps[group.position]
            if step.side is Side.WHOLE:
                return
            group.position += 1
            if step.side is Side.SEND:
                continue
            assert isinstance(step.instruction, Transfer)
            arrival, sender = self._arrivals[step.index]
            receive_s = self._transfer_time(step.index, step.instruction).receive_s
            start = max(group.clock, arrival)
            cause = sender if arrival > group.clock else group.last
            end = start + receive_s
            self._record(group, step.instruction, start, end, Side.RECEIVE, cause)
            self._received[step.index] = max(self._received.get(step.index, 0.0), end)

    def _together(self, index: int, instruction: Instruction) -> None:
        members = self._members[index]
        for group in members:
            self._receive(group)
            group.position += 1
        latest = max(members, key=lambda group: group.clock)
        start, cause = latest.clock, latest.last
        if index not in self._seconds:
            self._seconds[index] = self.prices.seconds(instruction)
        for group in members:
            self._record(group, instruction, start, start + self._seconds[index], Side.WHOLE, cause)

    def _record(
        self, group: _Group, instruction: Instruction, start: float, end: float, side: Side, cause: int
    ) -> int:
        """Book what a group does next, from `start`, which it may have waited for, to `end`."""
        kind = _KINDS[type(instruction)]
        record = _Record(instruction.name, kind, self._iteration, group.clock, start, end, side, cause)
        self.records.append(record)
        group.records.append(record)
        group.last = len(self.records) - 1
        group.clock = end
        return group.last

    def _transfer_time(self, index: int, instruction: Transfer) -> TransferTime:
        if index not in self._transfers:
            self._transfers[index] = self.prices.transfer(instruction)
        return self._transfers[index]

    def spans(self, iterations: int) -> Sequence[Span]:
        result = []
        facts: dict[str, dict[str, str | int | float | bool | None]] = {
            f"run:{call.name}": {"type": call.type.value, "model": call.model}
            for call in self.program.graph.calls
        }
        for group in self.groups:
            for rank in group.mesh.ranks:
                for record in group.records:
                    if record.iteration >= iterations:
                        break
                    known = dict(facts.get(record.name, {}))
                    if record.side is not Side.WHOLE:
                        known["side"] = record.side.value
                    if record.start_s > record.entered_s:
                        result.append(
                            Span(rank=rank, iteration=record.iteration, name=record.name, kind=SpanKind.WAIT,
                                 start_s=record.entered_s, end_s=record.start_s, facts=known)
                        )  # fmt: skip
                    result.append(
                        Span(rank=rank, iteration=record.iteration, name=record.name, kind=record.kind,
                             start_s=record.start_s, end_s=record.end_s, facts=known)
                    )  # fmt: skip
        return result


def _groups(program: Program) -> list[Mesh]:
    """Ranks in pieces that lie in the same windows."""
    borders = {0, program.world_size}
    for placement in program.plan.calls.values():
        borders |= {placement.mesh.start, placement.mesh.stop}
    ordered = sorted(borders)
    return [Mesh(start, stop) for start, stop in pairwise(ordered)]


def _critical_path(records: Sequence[_Record], iteration: int) -> tuple[PathStep, ...]:
    inside = [index for index, record in enumerate(records) if record.iteration == iteration]
    if not inside:
        return ()
    index = max(inside, key=lambda i: records[i].end_s)
    path: list[PathStep] = []
    while index >= 0 and records[index].iteration >= iteration - 1:
        record = records[index]
        path.append(PathStep(record.name, record.iteration, record.start_s, record.end_s))
        index = record.cause
    path.reverse()
    ends = [step.end_s for step in path if step.iteration < iteration]
    start = ends[-1] if ends else 0.0
    return tuple(step for step in path if step.end_s > start or step.iteration == iteration)
