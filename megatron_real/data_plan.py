"""Which rank works on which sequence, and who sends what to whom. Pure: no torch, no processes.

Sequences are assigned to data-parallel ranks and micro-batches from the lengths alone, so every rank that knows the
lengths computes the same plan and nobody has to be asked.

Invariants (tests/property/test_data_plan.py):
    - a partition has every item once, part sizes differ by at most one;
    - each (key, sequence) reaches each rank that needs it exactly once per iteration, from a rank that holds it;
    - a rank that already holds a sequence receives no message for it;
    - bytes that a message's sender packs equal the bytes that its receiver expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from megatron_real.dataflow import SAMPLES, Call, CallType, Graph, Per, Scope
from megatron_real.errors import PlanError
from megatron_real.layout import Coordinates, Layout, Mesh, coordinates_of, rank_of
from megatron_real.plan import Placement, Plan

__all__ = [
    "CallAssignment",
    "Lengths",
    "Message",
    "TransferPlan",
    "assign",
    "balanced_partition",
    "build_transfer_plans",
    "holders",
    "is_first_stage",
    "is_last_stage",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompt and response tokens of every sequence of an iteration, by sequence id 0..S-1."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def of(self, per: Per, sequence: int) -> int:
        """Elements of one sequence in a key of this kind."""
        if per is Per.SEQUENCE:
            return 1
        response = self.response[sequence]
        return response if per is Per.RESPONSE else self.prompt[sequence] + response

    @property
    def count(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAssignment:
    """The sequences of one call, by optimizer step, data-parallel rank and micro-batch."""

    steps: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """``steps[minibatch][dp_rank][microbatch]`` = sequence ids. One step for calls that do not train."""

    def shard(self, dp_rank: int) -> tuple[int, ...]:
        """All sequences of a data-parallel rank, ascending."""
        return tuple(sorted(i for step in self.steps for microbatch in step[dp_rank] for i in microbatch))

    @property
    def everything(self) -> tuple[int, ...]:
        """All sequences, ascending."""
        return tuple(sorted(i for step in self.steps for shard in step for part in shard for i in part))


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split indices 0..n-1 into `parts` of nearly equal weight and of equal count (differing by at most one).

    Longest first, each to the lightest part that is not full: the LPT rule under a cardinality bound. Deterministic.

    Raises:
        PlanError: fewer items than parts.
    """
    count = len(weights)
    if count < parts:
        raise PlanError(
            f"data plan: {count} sequences cannot be split over {parts} parts. Use fewer parts or more sequences."
        )
    if parts == 1:
        return [list(range(count))]
    floor, extra = divmod(count, parts)
    result: list[list[int]] = [[] for _ in range(parts)]
    open_parts = [(0, 0, part) for part in range(parts)]  # a heap of (weight, items, part)
    for index in sorted(range(count), key=lambda i: (-weights[i], i)):
        load, size, part = heappop(open_parts)
        while size >= floor + (extra > 0):  # full, and stays so: `extra` only falls
            load, size, part = heappop(open_parts)
        extra -= size == floor
        result[part].append(index)
        heappush(open_parts, (load + weights[index], size + 1, part))
    return [sorted(part) for part in result]


def assign(
    call: Call, placement: Placement, lengths: Lengths, num_minibatches: int = 1, unit: int = 1
) -> CallAssignment:
    """Cut the batch by sequence id into minibatches, then each by tokens over dp ranks and micro-batches.

    A generate call is split by prompt lengths alone, since nothing else is known before it.

    Args:
        call: whose batch it is.
        placement: of the call.
        lengths: of its sequences.
        num_minibatches: optimizer steps of a pass over the batch.
        unit: sequences with consecutive ids that stay together in a micro-batch.

    Raises:
        PlanError: fewer sequences than the cut needs, naming what to change.
    """
    dp, num_micro = placement.parallel.dp, placement.num_microbatches
    needed = num_minibatches * dp * num_micro
    count, rest = divmod(lengths.count, unit)
    if rest or count < needed or (count // num_minibatches) // dp < num_micro:
        together = f" of {unit} each" if unit > 1 else ""
        raise PlanError(
            f"calls.{call.name}: {lengths.count} sequences cannot be cut into {num_minibatches} minibatches x dp={dp} "
            f"x {num_micro} micro-batches (at least {needed}{together}). Lower dp, num_microbatches or the number of "
            "minibatches, or raise the batch size."
        )
    generates = call.type is CallType.GENERATE
    each = [lengths.prompt[i] if generates else lengths.of(Per.TOKEN, i) for i in range(lengths.count)]
    weights = [sum(each[i * unit : (i + 1) * unit]) for i in range(count)]
    bounds = [count * step // num_minibatches for step in range(num_minibatches + 1)]
    steps = []
    for begin, end in pairwise(bounds):
        ids = range(begin, end)
        shards = _nested(balanced_partition([weights[i] for i in ids], dp), ids)
        steps.append(
            tuple(
                tuple(
                    _sequences(part, unit)
                    for part in _nested(balanced_partition([weights[i] for i in shard], num_micro), shard)
                )
                for shard in shards
            )
        )
    return CallAssignment(steps=tuple(steps))


def _sequences(units: Iterable[int], unit: int) -> tuple[int, ...]:
    return tuple(i * unit + member for i in units for member in range(unit))


def _nested(parts: Iterable[Iterable[int]], ids: Sequence[int]) -> list[list[int]]:
    return [[ids[index] for index in part] for part in parts]


def is_first_stage(rank: int, placement: Placement) -> bool:
    """Whether `rank` (of the placement's mesh) holds the embedding: it needs token ids."""
    return coordinates_of(rank, placement.mesh, placement.parallel).pp == 0


def is_last_stage(rank: int, placement: Placement) -> bool:
    """Whether `rank` (of the placement's mesh) computes the head: it needs labels and scalars and has the outputs."""
    return coordinates_of(rank, placement.mesh, placement.parallel).pp == placement.parallel.pp - 1


def holders(dp_rank: int, mesh: Mesh, layout: Layout) -> tuple[int, ...]:
    """Ranks that hold the outputs of a data-parallel rank: of the last pipeline stage, every tp rank."""
    return tuple(
        rank_of(Coordinates(tp=tp, cp=0, dp=dp_rank, pp=layout.pp - 1), mesh, layout)
        for tp in range(layout.tp)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One fused message: for each key in turn, the sequences in ascending id order."""

    src: int
    dst: int
    items: tuple[tuple[str, tuple[int, ...]], ...]
    """(key, sequence ids)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What moves from one producer call to one consumer call in one iteration."""

    producer: str
    consumer: str
    messages: tuple[Message, ...]

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Messages of `rank`, in order of destination."""
        return tuple(message for message in self.messages if message.src == rank)

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Messages to `rank`, in order of source."""
        return tuple(message for message in self.messages if message.dst == rank)


def build_transfer_plans(
    graph: Graph, plan: Plan, assignments: Mapping[str, CallAssignment], sequences: str = SAMPLES
) -> dict[tuple[str, str], TransferPlan]:
    """The transfers of one set of sequences in an iteration, by (producer, consumer), consumers in execution order.

    Tokens go to the first and the last pipeline stage of the consumer, everything else to the last. What a rank
    produced or received for an earlier consumer is not sent to it again.
    """
    router = _Router(graph, plan, assignments, sequences)
    plans: dict[tuple[str, str], TransferPlan] = {}
    for consumer in graph.ordered(plan.order):
        for producer in graph.parents(consumer):
            if producer.sequences != sequences:
                continue
            pairs: dict[tuple[int, int], list[tuple[str, tuple[int, ...]]]] = {}
            for entry in consumer.inputs:
                if entry.key in producer.outputs:
                    per = graph.key(entry.key).per
                    # Of another set only whole keys are taken, so whose sequences they are does not matter.
                    cut = assignments[consumer.name if consumer.sequences == sequences else producer.name]
                    wanted = _needs(per, entry.scope, plan.calls[consumer.name], cut)
                    for rank, ids in wanted.items():
                        for sender, part in router.deliver(entry.key, rank, ids):
                            pairs.setdefault((sender, rank), []).append((entry.key, part))
            plans[producer.name, consumer.name] = TransferPlan(
                producer=producer.name,
                consumer=consumer.name,
                messages=tuple(
                    Message(src=src, dst=dst, items=tuple(items))
                    for (src, dst), items in sorted(pairs.items())
                ),
            )
    return plans


def _needs(
    per: Per, scope: Scope, placement: Placement, assignment: CallAssignment
) -> dict[int, tuple[int, ...]]:
    if scope is Scope.FULL:
        parts = [assignment.everything] * placement.parallel.dp
    else:
        parts = [assignment.shard(dp) for dp in range(placement.parallel.dp)]
    wanted: dict[int, tuple[int, ...]] = {}
    for rank in placement.mesh.ranks:
        if is_last_stage(rank, placement) or (per is Per.TOKEN and is_first_stage(rank, placement)):
            at = coordinates_of(rank, placement.mesh, placement.parallel)
            wanted[rank] = parts[at.dp]
    return wanted


class _Router:
    """Chooses a sender for each (key, sequence) that a rank lacks, and remembers what it holds afterwards."""

    def __init__(
        self, graph: Graph, plan: Plan, assignments: Mapping[str, CallAssignment], sequences: str
    ) -> None:
        self._devices_per_node = plan.cluster.devices_per_node
        self._sources: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        """By key, for each data-parallel rank of its producer: the sequences, and the ranks that hold them."""
        self._held: dict[str, dict[int, set[int]]] = {}
        for call in graph.calls:
            if call.sequences != sequences:
                continue
            placement = plan.calls[call.name]
            mesh, layout = placement.mesh, placement.parallel
            shards = [
                (assignments[call.name].shard(dp), holders(dp, mesh, layout)) for dp in range(layout.dp)
            ]
            for key in call.outputs:
                self._sources[key] = shards
                by_rank = self._held.setdefault(key, {})
                for ids, ranks in shards:
                    for rank in ranks:
                        by_rank.setdefault(rank, set()).update(ids)

    def deliver(self, key: str, rank: int, ids: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(sender, sequence ids) that bring `rank` to hold `ids` of a key."""
        held = self._held[key].setdefault(rank, set())
        missing = set(ids) - held
        held |= missing
        for sequences, ranks in self._sources[key]:
            part = tuple(i for i in sequences if i in missing)
            if part:
                yield _nearest(rank, ranks, self._devices_per_node), part


def _nearest(rank: int, candidates: Sequence[int], devices_per_node: int) -> int:
    """A holder on the receiver's node if there is one; spread over equal candidates by the receiver's rank."""
    same_node = [other for other in candidates if other // devices_per_node == rank // devices_per_node]
    pool = same_node or list(candidates)
    return pool[rank % len(pool)]
