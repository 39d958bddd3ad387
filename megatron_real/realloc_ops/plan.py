"""The plan of a reallocation: which rank sends which slice of which tensor to whom, in which order.

Source boxes of one tensor are disjoint (equal ones are replicas), so every element of a destination box has exactly
one source box. A destination that owns this box copies locally. The others form a queue in front of the box's owners:
for each set of owners, what it has to send is laid end to end, receiver after receiver in ascending rank, and cut
into equal parts, one per owner. Owners therefore send equally many bytes, whatever the sizes of the tensors, while a
receiver has few senders, mostly of nearby rank.

Invariants (tests/property/test_realloc_plan.py):
    - every element of every destination box is written exactly once;
    - every read lies inside a box that the sender owns;
    - what a rank already holds costs no message;
    - a rank receives exactly the bytes of its shards that it did not hold;
    - ranks that hold the same shards send the same bytes, to one element per receiver;
    - messages number at most bytes / bucket + pairs;
    - the plan of one rank equals that rank's part of the plan of all ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.buckets import Message, Slice, cut_range, fill_messages
from megatron_real.realloc_ops.shards import Box, ParamTable, require_same_tensors

__all__ = ["DEFAULT_BUCKET_BYTES", "STAGING_SLOTS", "RankPlan", "ReallocPlan", "Step", "build_realloc_plan"]

DEFAULT_BUCKET_BYTES = 32 * 2**20
"""Large enough to saturate a link, small enough that four staging buckets do not matter."""

STAGING_SLOTS = 2
"""Staging buffers per direction; also the number of steps in flight."""

_Owners = tuple[int, ...]
_Exchanges = dict[tuple[_Owners, _Owners], list[Slice]]
"""Slices by (owners of the source box, owners of the destination box), in canonical order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank sends and receives at the same time; the other ends do so in the step of equal order."""

    order: tuple[int, int]
    """Position in the total order of all steps of all ranks: (message index of the pair, distance of the pair)."""
    send: Message | None
    receive: Message | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a reallocation."""

    rank: int
    steps: tuple[Step, ...]
    """In ascending order; each exchanges at most one message in each direction."""
    copies: tuple[Slice, ...]
    """What the rank already holds and only moves inside its own memory."""
    bytes_bound: int
    """Bytes of this rank's destination shards that it does not hold: no plan can receive fewer."""
    wire_dtypes: Mapping[str, str]
    """Dtype on the wire by key: that of the source."""

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
            (m.src, m.dst, m.index): m for part in self.ranks.values() for m in (*part.sends, *part.receives)
        }
        for (src, dst, _), message in sorted(seen.items()):
            pairs.setdefault((src, dst), []).append(message.num_bytes)
        lines = ["   from     to            bytes   messages"]
        lines += [
            f"{src:7d}{dst:7d}{sum(sizes):17,d}{len(sizes):11,d}" for (src, dst), sizes in pairs.items()
        ]
        lines.append(
            f"moved {sum(map(sum, pairs.values())):,} bytes in {len(seen):,} messages of at most "
            f"{self.bucket_bytes:,} bytes; {sum(part.bytes_local for part in self.ranks.values()):,} bytes stay on "
            "their rank"
        )
        return "\n".join(lines)


def build_realloc_plan(
    src: ParamTable, dst: ParamTable, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, rank: int | None = None
) -> ReallocPlan:
    """Plan the messages and local copies that turn `src` shards into `dst` shards.

    Pure and deterministic: every rank computes the same from the same tables, and may compute only its own part.

    Args:
        src: what the ranks hold.
        dst: what the ranks shall hold; may be of another dtype, which is converted on arrival.
        bucket_bytes: the most bytes in one message (rounded down to a multiple of 16).
        rank: plan only this rank's part; None plans for all ranks of either table.

    Raises:
        PlanError: a tensor exists on one side only or has another global shape; an element of the destination has
            no source; or source boxes overlap without being equal.
    """
    require_same_tensors(src, dst)
    everyone = sorted({*src.ranks, *dst.ranks})
    planner = _Planner(
        exchanges=_exchanges(src, dst),
        position={member: index for index, member in enumerate(everyone)},
        bucket_bytes=bucket_bytes,
        wire_dtypes={key: spec.dtype for key, spec in src.specs.items()},
    )
    wanted = everyone if rank is None else [rank]
    return ReallocPlan(
        bucket_bytes=bucket_bytes, ranks={member: planner.part_of(member) for member in wanted}
    )


class _Planner:
    """Shares the work between the ranks whose parts are planned together."""

    def __init__(
        self,
        *,
        exchanges: _Exchanges,
        position: Mapping[int, int],
        bucket_bytes: int,
        wire_dtypes: Mapping[str, str],
    ) -> None:
        self._exchanges = exchanges
        self._position = position
        self._bucket_bytes = bucket_bytes
        self._wire_dtypes = wire_dtypes
        self._messages: dict[tuple[int, int], tuple[Message, ...]] = {}
        self._queues: dict[_Owners, dict[int, int]] = {}
        """Bytes by receiver, ascending in rank, for each set of source owners."""
        queues: dict[_Owners, dict[int, int]] = {}
        for (senders, receivers), slices in exchanges.items():
            num_bytes = sum(piece.num_bytes for piece in slices)
            queue = queues.setdefault(senders, {})
            for receiver in set(receivers).difference(senders):
                queue[receiver] = queue.get(receiver, 0) + num_bytes
        self._queues = {senders: dict(sorted(queue.items())) for senders, queue in queues.items()}

    def part_of(self, rank: int) -> RankPlan:
        by_order: dict[tuple[int, int], list[Message | None]] = {}
        for src, dst in self._pairs_of(rank):
            distance = (self._position[dst] - self._position[src]) % len(self._position)
            for message in self._messages_of(src, dst):
                ends = by_order.setdefault((message.index, distance), [None, None])
                ends[0 if src == rank else 1] = message
        copies: list[Slice] = []
        bytes_needed = 0
        for (senders, receivers), slices in self._exchanges.items():
            if rank in receivers:
                bytes_needed += sum(piece.num_bytes for piece in slices)
                if rank in senders:
                    copies.extend(slices)
        return RankPlan(
            rank=rank,
            steps=tuple(
                Step(order=order, send=ends[0], receive=ends[1]) for order, ends in sorted(by_order.items())
            ),
            copies=tuple(sorted(copies)),
            bytes_bound=bytes_needed - sum(piece.num_bytes for piece in copies),
            wire_dtypes=self._wire_dtypes,
        )

    def _pairs_of(self, rank: int) -> set[tuple[int, int]]:
        pairs: set[tuple[int, int]] = set()
        for senders, queue in self._queues.items():
            if rank in queue:
                pairs.update((sender, rank) for sender, _, _ in self._serving(senders, rank))
            if rank in senders:
                share = self._share(senders, rank)
                start = 0
                for receiver, num_bytes in queue.items():
                    if start < share.stop and share.start < start + num_bytes:
                        pairs.add((rank, receiver))
                    start += num_bytes
        return pairs

    def _messages_of(self, src: int, dst: int) -> tuple[Message, ...]:
        if (src, dst) not in self._messages:
            slices = [
                piece
                for senders, queue in self._queues.items()
                if src in senders and dst in queue
                for sender, start, stop in self._serving(senders, dst)
                if sender == src
                for piece in cut_range(self._queued(senders, dst), start, stop)
            ]
            self._messages[src, dst] = fill_messages(src, dst, slices, self._bucket_bytes)
        return self._messages[src, dst]

    def _share(self, senders: _Owners, sender: int) -> range:
        """The bytes of the queue, laid end to end, that `sender` serves."""
        total_bytes = sum(self._queues[senders].values())
        index = senders.index(sender)
        return range(total_bytes * index // len(senders), total_bytes * (index + 1) // len(senders))

    def _serving(self, senders: _Owners, receiver: int) -> Iterator[tuple[int, int, int]]:
        """The senders of `receiver`, each with the bytes [start, stop) of the receiver's slices that it sends."""
        queue = self._queues[senders]
        begin = 0
        for member, num_bytes in queue.items():
            if member == receiver:
                break
            begin += num_bytes
        for sender in senders:
            share = self._share(senders, sender)
            start, stop = max(share.start - begin, 0), min(share.stop - begin, queue[receiver])
            if start < stop:
                yield sender, start, stop

    def _queued(self, senders: _Owners, receiver: int) -> list[Slice]:
        """What `receiver` needs from `senders`, in canonical order."""
        return sorted(
            piece
            for (owners, receivers), slices in self._exchanges.items()
            if owners == senders and receiver in receivers
            for piece in slices
        )


def _exchanges(src: ParamTable, dst: ParamTable) -> _Exchanges:
    """Intersect all source boxes with all destination boxes, tensor by tensor.

    Leading axes along which every box of a tensor has extent 1 (layers, experts) are looked up, not searched, so
    the work grows with the boxes and their intersections and not with their product.
    """
    depths = _lookup_depths(src, dst)
    sources = _by_place(src, depths)
    exchanges: _Exchanges = {}
    order = 0
    targets = _by_place(dst, depths)
    for place in sorted(targets):
        prefix, key = place
        itemsize_bytes = src.specs[key].itemsize_bytes
        candidates = _Candidates(key, sources.get(place, []), axis=len(prefix))
        for dst_box, receivers in targets[place]:
            missing = dst_box.num_elements
            for src_box, senders in candidates.near(dst_box):
                common = src_box.intersect(dst_box)
                if common is None:
                    continue
                num_elements = common.num_elements
                missing -= num_elements
                piece = Slice(order, key, src_box, dst_box, common, num_elements * itemsize_bytes)
                exchanges.setdefault((senders, receivers), []).append(piece)
                order += 1
            if missing:
                raise PlanError(
                    f"reallocation: {key}: {missing} of {dst_box.num_elements} elements of the destination box "
                    f"{dst_box} have no source; ranks {list(src.ranks)} together must hold all of it. Gather the "
                    "source table over all ranks of its layout."
                )
    return exchanges


class _Candidates:
    """The source boxes of one tensor, sorted for lookup along one axis."""

    def __init__(self, key: str, boxes: list[tuple[Box, _Owners]], *, axis: int) -> None:
        self._axis = axis
        self._boxes = sorted(boxes)
        _check_disjoint(key, [box for box, _ in self._boxes])
        self._searchable = len(boxes) > 8 and axis < len(self._boxes[0][0].shape)
        if self._searchable:
            self._starts = [box.offset[axis] for box, _ in self._boxes]
            self._longest = max(box.shape[axis] for box, _ in self._boxes)

    def near(self, box: Box) -> list[tuple[Box, _Owners]]:
        """A superset of the boxes that meet `box`, ascending."""
        if not self._searchable:
            return self._boxes
        start = box.offset[self._axis]
        first = bisect_right(self._starts, start - self._longest)
        return self._boxes[first : bisect_left(self._starts, start + box.shape[self._axis])]


def _check_disjoint(key: str, boxes: list[Box]) -> None:
    if len(boxes) < 2:
        return
    shape = boxes[0].shape
    if all(box.shape == shape and not any(map(int.__mod__, box.offset, shape)) for box in boxes):
        return  # different cells of one regular grid
    for one, other in combinations(boxes, 2):
        if one.intersect(other) is not None:
            raise PlanError(
                f"reallocation: {key}: source boxes {one} and {other} overlap; expected boxes that are equal "
                "(replicas) or disjoint. The model's sharding metadata is inconsistent."
            )


def _lookup_depths(*tables: ParamTable) -> dict[str, int]:
    """By key, the number of leading axes along which every box of every table has extent 1."""
    depths: dict[str, int] = {}
    for table in tables:
        for key, box in table.owners:
            limit = depths.get(key, len(box.shape))
            depth = 0
            while depth < limit and box.shape[depth] == 1:
                depth += 1
            depths[key] = depth
    return depths


def _by_place(
    table: ParamTable, depths: Mapping[str, int]
) -> dict[tuple[tuple[int, ...], str], list[tuple[Box, _Owners]]]:
    """Boxes and owners by (leading offsets, key): layer by layer, then tensor by tensor."""
    places: dict[tuple[tuple[int, ...], str], list[tuple[Box, _Owners]]] = {}
    for (key, box), owners in table.owners.items():
        places.setdefault((box.offset[: depths[key]], key), []).append((box, owners))
    for boxes in places.values():
        boxes.sort()
    return places
