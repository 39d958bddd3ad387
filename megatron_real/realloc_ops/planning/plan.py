"""The plan of a reallocation: which rank sends which slice of which tensor to whom, in which order.

Source boxes of one tensor are disjoint (equal ones are replicas), so every element of a destination box has exactly
one source box. A destination that owns this box copies locally. The others are served by the owners (`queues`), the
nearest first, in equal parts.

With several nodes a plan has two hops. In hop 0 owners send; every byte enters a node that has no owner of it once, at
one of the ranks that need it. In hop 1 that rank relays it, from its destination shard, to the others of its node. A
rank starts hop 1 when its own hop 0 is complete.

Waves say when slices travel: see `exchanges.ReallocOrder`. All steps of all ranks have one total order, by hop, then by
wave, so ranks can wait for each other without a cycle (argument in `executor`).

Invariants (tests/property/test_realloc_plan.py, tests/property/test_moves.py):
    - every element of every destination box is written exactly once;
    - every read lies inside a box that the sender owns, or in hop 1 in a part of its destination box that it has
      received in hop 0;
    - what a rank already holds costs no message;
    - a rank receives exactly the bytes of its shards that it did not hold;
    - of each destination box, bytes enter a node once if no rank there owns them, and else not at all;
    - owners of the same shards that stand in nodes alike send the same bytes, to one element per receiver;
    - messages number at most bytes / bucket + pairs in each hop, beside large slices that travel alone (`buckets`); in
      place two more for each wave that fills a bucket; none is beside them if all is fused;
    - steps ascend in hop, then wave;
    - the plan of one rank equals that rank's part of the plan of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.buckets import Large, Message, Slice, fill_messages
from megatron_real.realloc_ops.planning.exchanges import Exchanges, ReallocOrder
from megatron_real.realloc_ops.planning.queues import Queues, RelayGroup, Stretch
from megatron_real.realloc_ops.planning.shards import ParamTable, require_same_tensors

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "STAGING_SLOTS",
    "PlanOptions",
    "RankPlan",
    "ReallocOrder",
    "ReallocPlan",
    "Step",
    "build_realloc_plan",
]

DEFAULT_BUCKET_BYTES = 32 * 2**20
"""Large enough to saturate a link, small enough that four staging buckets do not matter."""

STAGING_SLOTS = 2
"""Buckets per direction that a rank stages, and has in flight."""

_Pair = tuple[int, int, bool]
"""(source, destination, relayed)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank sends and receives at the same time; the other ends do so in the step of equal order."""

    order: tuple[int, int, int, int]
    """Position in the total order of all steps of all ranks: (hop, wave, message index of the pair, distance of the
    pair). Hop 1 has the relayed messages; their distance is that inside the node."""
    send: Message | None
    receive: Message | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a reallocation."""

    rank: int
    bucket_bytes: int
    """The most bytes of a message."""
    steps: tuple[Step, ...]
    """In ascending order; each exchanges at most one message in each direction."""
    copies: tuple[Slice, ...]
    """What the rank already holds and only moves inside its own memory; ascending in wave, then order."""
    bytes_bound: int
    """Bytes of this rank's destination shards that it does not hold: no plan can receive fewer. Each element counts in
    the dtype in which it comes."""
    wire_dtypes: Mapping[str, str]
    """Dtype on the wire by key: that of the source."""
    relay_dtypes: Mapping[str, str]
    """The same of relayed messages: that of the destination."""

    @property
    def sends(self) -> Iterator[Message]:
        return (step.send for step in self.steps if step.send is not None)

    @property
    def receives(self) -> Iterator[Message]:
        return (step.receive for step in self.steps if step.receive is not None)

    @property
    def bytes_sent(self) -> int:
        return sum(message.num_bytes for message in self.sends)

    @property
    def bytes_received(self) -> int:
        return sum(message.num_bytes for message in self.receives)

    @property
    def bytes_local(self) -> int:
        return sum(piece.num_bytes for piece in self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReallocPlan:
    """A reallocation as all ranks see it, or the part of it that was asked for."""

    bucket_bytes: int
    ranks: Mapping[int, RankPlan]

    def of(self, rank: int) -> RankPlan:
        """The part of `rank`.

        Raises:
            PlanError: the plan was built for other ranks.
        """
        if rank not in self.ranks:
            raise PlanError(
                f"reallocation: found no part for rank {rank}; expected one of {sorted(self.ranks)}. Build the "
                "plan from tables that were gathered over all its ranks."
            )
        return self.ranks[rank]

    def summary(self) -> str:
        """A table: bytes and messages of each pair that this plan knows, and totals."""
        pairs: dict[tuple[int, int], list[int]] = {}
        seen = {
            (m.src, m.dst, m.relayed, m.index): m
            for part in self.ranks.values()
            for m in (*part.sends, *part.receives)
        }
        for (src, dst, _, _), message in sorted(seen.items()):
            pairs.setdefault((src, dst), []).append(message.num_bytes)
        lines = ["   from     to            bytes   messages"]
        lines += [
            f"{src:7d}{dst:7d}{sum(sizes):17,d}{len(sizes):11,d}" for (src, dst), sizes in pairs.items()
        ]
        relayed = sum(message.num_bytes for message in seen.values() if message.relayed)
        lines.append(
            f"moved {sum(map(sum, pairs.values())):,} bytes in {len(seen):,} messages of at most "
            f"{self.bucket_bytes:,} bytes; {sum(part.bytes_local for part in self.ranks.values()):,} bytes stay on "
            "their rank" + (f"; {relayed:,} bytes are relayed inside nodes" if relayed else "")
        )
        return "\n".join(lines)


class PlanOptions(TypedDict, total=False):
    """How weights travel."""

    bucket_bytes: int
    """The most bytes in one message (rounded down to a multiple of 16)."""
    devices_per_node: int | None
    """Consecutive ranks of one node, from multiples of it; None is one node."""
    order: ReallocOrder
    """What travels first."""
    fuse_large: bool
    """Fuse large slices with others too: for a transport that gathers with all ranks. In place they travel apart."""


def build_realloc_plan(
    src: ParamTable, dst: ParamTable, *, rank: int | None = None, **options: Unpack[PlanOptions]
) -> ReallocPlan:
    """Plan the messages and local copies that turn `src` shards into `dst` shards.

    Pure and deterministic: every rank computes the same from the same tables, and may compute only its own part.

    Args:
        src: what the ranks hold.
        dst: what the ranks shall hold; may be of another dtype, which is converted on arrival.
        rank: plan only this rank's part; None plans for all ranks of either table.
        options: see `PlanOptions`.

    Raises:
        PlanError: a tensor exists on one side only or has another global shape; an element of the destination has
            no source; or source boxes overlap without being equal.
    """
    require_same_tensors(src, dst)
    how = _How(**options)
    planner = _Planner(src, dst, how)
    wanted = sorted({*src.ranks, *dst.ranks}) if rank is None else [rank]
    return ReallocPlan(
        bucket_bytes=how.bucket_bytes, ranks={member: planner.part_of(member) for member in wanted}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """`PlanOptions`, all of them."""

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    devices_per_node: int | None = None
    order: ReallocOrder = "fused"
    fuse_large: bool = False

    def __post_init__(self) -> None:
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise PlanError(
                f"reallocation: found {self.devices_per_node} devices per node; expected at least 1."
            )

    @property
    def large(self) -> Large:
        if self.order == "in_place":
            return "apart"
        return "fused" if self.fuse_large else "alone"


class _Planner:
    """Shares the work between the ranks whose parts are planned together."""

    def __init__(self, src: ParamTable, dst: ParamTable, how: _How) -> None:
        self._exchanges = Exchanges(src, dst, how.order)
        self._queues = Queues(self._exchanges, how.devices_per_node)
        self._large = how.large
        self._bucket_bytes = how.bucket_bytes
        self._per_node = how.devices_per_node
        self._position = {member: at for at, member in enumerate(sorted({*src.ranks, *dst.ranks}))}
        self._wire_dtypes = {key: spec.dtype for key, spec in src.specs.items()}
        self._relay_dtypes = {key: spec.dtype for key, spec in dst.specs.items()}
        self._messages: dict[_Pair, tuple[Message, ...]] = {}

    def part_of(self, rank: int) -> RankPlan:
        queues, exchanges = self._queues, self._exchanges
        by_pair: dict[_Pair, list[Slice]] = {}
        for stretch in queues.sent_by(rank):
            by_pair.setdefault((rank, stretch.peer, False), []).extend(self._slices(stretch))
        for stretch in queues.received_by(rank):
            by_pair.setdefault((stretch.peer, rank, False), []).extend(self._slices(stretch))
        bytes_bound = sum(line.num_bytes for line in queues.near(rank))
        for group in queues.far(rank):
            bytes_bound += self._relay(rank, group, by_pair)
        copies = [
            piece
            for line in queues.local(rank)
            for piece in exchanges.slices(line.source, line.target, 0, line.num_bytes)
        ]
        return RankPlan(
            rank=rank,
            bucket_bytes=self._bucket_bytes,
            steps=self._steps(rank, by_pair),
            copies=tuple(sorted(copies, key=lambda piece: (piece.wave, piece.order))),
            bytes_bound=bytes_bound,
            wire_dtypes=self._wire_dtypes,
            relay_dtypes=self._relay_dtypes,
        )

    def _relay(self, rank: int, group: RelayGroup, by_pair: dict[_Pair, list[Slice]]) -> int:
        """Add what a rank relays of its part of a line, and what it gets of the others'; returns bytes of the line."""
        if len(group.members) == 1:
            return group.line.num_bytes
        mine = self._slices(group.part_of(group.slot))
        relayed = [self._exchanges.relayed(piece) for piece in mine]
        for slot, peer in enumerate(group.members):
            if slot != group.slot:
                by_pair.setdefault((rank, peer, True), []).extend(relayed)
                theirs = map(self._exchanges.relayed, self._slices(group.part_of(slot)))
                by_pair.setdefault((peer, rank, True), []).extend(theirs)
        others = group.line.target_bytes - sum(piece.num_bytes for piece in relayed)
        return others + sum(piece.num_bytes for piece in mine)

    def _slices(self, stretch: Stretch) -> list[Slice]:
        return self._exchanges.slices(stretch.source, stretch.target, stretch.start_bytes, stretch.stop_bytes)

    def _steps(self, rank: int, by_pair: Mapping[_Pair, Iterable[Slice]]) -> tuple[Step, ...]:
        ends: dict[tuple[int, int, int, int], list[Message | None]] = {}
        for pair, slices in by_pair.items():
            src, dst, relayed = pair
            if pair not in self._messages:
                self._messages[pair] = fill_messages(
                    src, dst, slices, self._bucket_bytes, relayed=relayed, large=self._large
                )
            if relayed:
                assert self._per_node is not None, "only nodes relay"
                distance = (dst - src) % self._per_node
            else:
                distance = (self._position[dst] - self._position[src]) % len(self._position)
            for message in self._messages[pair]:
                order = int(relayed), message.wave, message.index, distance
                ends.setdefault(order, [None, None])[0 if src == rank else 1] = message
        return tuple(Step(order=order, send=ends[order][0], receive=ends[order][1]) for order in sorted(ends))
