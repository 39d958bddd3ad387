"""Slices of tensors, and the byte-bounded messages that they are fused into.

Slices have a wave: the moment at which they should travel (see `plan`). A message takes what comes next by wave, so its
slices may be of several waves; messages of a pair follow each other in ascending wave.

Invariants (tests/unit/realloc_ops/test_buckets.py):
    - a message holds at most the bucket's bytes;
    - a large slice that lies in one piece in a shard of either end travels alone, so that this end needs no copy of it
      (unless "fused");
    - the other n bytes of a pair need at most n / bucket + 1 messages, where they do not make room for such a slice
      (and with "apart", for a wave that fills a bucket);
    - inside a message slices come in descending element size, then ascending wave, so each starts at a multiple of its
      element size; where all elements are of one size, slices ascend in wave;
    - no message begins with a later wave than the next one, and whatever a message holds of a later wave than the next
      one begins with is less than the largest element: it fills a gap at the end that no larger element fits in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.shards import Box

__all__ = ["ALONE_BYTES", "Large", "Message", "Slice", "cut_range", "fill_messages"]

_BUCKET_STEP_BYTES = 16
"""Buckets are a multiple of the largest element, so that a bucket can always be filled to its last byte."""
ALONE_BYTES = 256 * 1024
"""From here on a copy costs more than a message."""


Large = Literal["alone", "apart", "fused"]
"""What becomes of large slices. ``alone``: one of at least `ALONE_BYTES` travels alone if one end then needs no copy of
it. ``apart``: so does it, and a wave that fills a bucket shares no message with other waves, so that no end touches a
large tensor before or after its time; that costs up to two messages for each such wave. ``fused``: it is fused with
others, where neither end needs a copy for that (`Transport.gathers`)."""


class Slice(NamedTuple):
    """A region that a source shard and a destination shard have in common, or a part of it."""

    order: int
    """Position in the canonical order of the whole plan; parts of one region share it."""
    key: str
    src_box: Box
    """Of the shard that it is read from; in a relayed message that is the sender's destination shard."""
    dst_box: Box
    box: Box
    """The region, in global coordinates; inside both shards."""
    num_bytes: int
    """In the dtype on the wire: that of the source, or that of the destination in a relayed message."""
    wave: int = 0
    """When it should travel: 0 unless the plan has an order of its own (`plan.ReallocOrder`)."""

    @property
    def itemsize_bytes(self) -> int:
        return self.num_bytes // self.box.num_elements

    @property
    def in_one_piece(self) -> bool:
        """Whether it lies without gaps in the shard that it is read from, or in the one that it is written to."""
        return self.box.is_dense_in(self.src_box) or self.box.is_dense_in(self.dst_box)

    def cut(self, num_elements: int) -> tuple[list[Slice], list[Slice]]:
        """The first `num_elements` in row-major order, and the rest."""
        itemsize_bytes = self.itemsize_bytes
        head, tail = self.box.split(num_elements)
        return (
            [self._replace(box=box, num_bytes=box.num_elements * itemsize_bytes) for box in head],
            [self._replace(box=box, num_bytes=box.num_elements * itemsize_bytes) for box in tail],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One bucket of slices that travels from one rank to another."""

    src: int
    dst: int
    index: int
    """Position among the messages of this pair that are relayed, or among those that are not."""
    slices: tuple[Slice, ...]
    """In the order in which they lie in the bucket, without gaps."""
    num_bytes: int
    wave: int = 0
    """The lowest wave of its slices."""
    relayed: bool = False
    """The sender reads its destination shards, which it received itself, in the destination's dtype."""

    def __str__(self) -> str:
        keys = list(dict.fromkeys(piece.key for piece in self.slices))
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        kind = "relayed message" if self.relayed else "message"
        return (
            f"{kind} {self.index} from rank {self.src} to rank {self.dst} ({self.num_bytes:,} bytes: "
            f"{', '.join(keys[:3])}{more})"
        )


def cut_range(slices: Sequence[Slice], start_bytes: int, stop_bytes: int) -> list[Slice]:
    """The part of a sequence of slices, laid end to end, between two byte positions.

    A position inside an element counts as the start of that element, so adjacent ranges never overlap or leave a gap.
    """
    taken: list[Slice] = []
    position = 0
    for piece in slices:
        first, last = start_bytes - position, stop_bytes - position
        position += piece.num_bytes
        if last <= 0:
            break
        if first >= piece.num_bytes:
            continue
        if first <= 0 and last >= piece.num_bytes:
            taken.append(piece)
            continue
        itemsize_bytes = piece.itemsize_bytes
        begin, end = max(first, 0) // itemsize_bytes, min(last, piece.num_bytes) // itemsize_bytes
        if begin < end:
            rest = [piece] if begin == 0 else piece.cut(begin)[1]
            taken.extend(_first_elements(rest, end - begin))
    return taken


def _first_elements(slices: Iterable[Slice], num_elements: int) -> list[Slice]:
    taken: list[Slice] = []
    for piece in slices:
        if num_elements <= 0:
            break
        taken.extend(piece.cut(num_elements)[0])
        num_elements -= piece.box.num_elements
    return taken


def fill_messages(
    src: int,
    dst: int,
    slices: Iterable[Slice],
    bucket_bytes: int,
    *,
    relayed: bool = False,
    large: Large = "alone",
) -> tuple[Message, ...]:
    """Fuse what `src` sends to `dst` into messages; both ends derive the same ones from the same slices.

    A slice of at least a bucket gives messages of its own, of which only the remainder is fused with others.

    Args:
        src: who sends.
        dst: who receives.
        slices: all that it sends, in any order.
        bucket_bytes: the most bytes of a message.
        relayed: in the second hop.
        large: what else is not fused.

    Raises:
        PlanError: the bucket is too small.
    """
    capacity_bytes = bucket_bytes // _BUCKET_STEP_BYTES * _BUCKET_STEP_BYTES
    if capacity_bytes <= 0:
        raise PlanError(
            f"reallocation: found a bucket of {bucket_bytes} bytes; expected at least {_BUCKET_STEP_BYTES}."
        )
    ordered = sorted(slices, key=lambda piece: (piece.wave, -piece.itemsize_bytes, piece.order))
    return tuple(
        Message(
            src=src,
            dst=dst,
            index=index,
            slices=tuple(bucket),
            num_bytes=sum(piece.num_bytes for piece in bucket),
            wave=min(piece.wave for piece in bucket),
            relayed=relayed,
        )
        for index, bucket in enumerate(_Filler(ordered, capacity_bytes, large).buckets())
    )


class _Filler:
    """Cuts slices, sorted by wave, into buckets."""

    def __init__(self, slices: Iterable[Slice], capacity_bytes: int, large: Large) -> None:
        self._large = large
        self._waves = deque(deque(pieces) for _, pieces in groupby(slices, key=lambda piece: piece.wave))
        self._capacity_bytes = capacity_bytes
        self._done: list[list[Slice]] = []
        self._current: list[Slice] = []
        self._room_bytes = capacity_bytes

    def buckets(self) -> list[list[Slice]]:
        while self._waves:
            pending = self._waves[0]
            apart = self._large == "apart" and self._fills_a_bucket(pending)
            if apart and self._current:
                self._close()
            carried = bool(
                self._current
            )  # of an earlier wave, which must not wait for large slices of this one
            while pending:
                piece = pending.popleft()
                if carried and self._travels_alone(piece):
                    self._close()
                    carried = False
                elif carried and piece.num_bytes >= self._capacity_bytes:
                    piece = self._fill_from_the_end(piece, pending)
                    carried = False
                pending.extendleft(reversed(self._take(piece)))
                if not self._current:
                    carried = False
            self._waves.popleft()
            if apart and self._current:
                self._close()
        if self._current:
            self._close()
        return self._done

    def _fills_a_bucket(self, pieces: Iterable[Slice]) -> bool:
        return sum(piece.num_bytes for piece in pieces) >= self._capacity_bytes

    def _travels_alone(self, piece: Slice) -> bool:
        return (
            self._large != "fused"
            and ALONE_BYTES <= piece.num_bytes <= self._capacity_bytes
            and piece.in_one_piece
        )

    def _fill_from_the_end(self, piece: Slice, pending: deque[Slice]) -> Slice:
        """Close the current bucket with the last elements of a large slice, whose start stays in one piece."""
        head, tail = piece.cut(piece.box.num_elements - self._room_bytes // piece.itemsize_bytes)
        for part in tail:
            self._add(part)
        if self._current:  # a gap is left that is smaller than an element
            self._fill_gap()
        pending.extendleft(reversed(head[1:]))
        return head[0]

    def _take(self, piece: Slice) -> list[Slice]:
        """Put a slice into buckets; returns what is left of it."""
        if self._travels_alone(piece):
            self._done.append([piece])
            return []
        if piece.num_bytes >= self._capacity_bytes:
            head, tail = piece.cut(self._capacity_bytes // piece.itemsize_bytes)
            self._done.append(head)
            return tail
        if piece.num_bytes <= self._room_bytes:
            self._add(piece)
            return []
        head, tail = piece.cut(self._room_bytes // piece.itemsize_bytes)
        for part in head:
            self._add(part)
        if self._current:
            self._fill_gap()
        return tail

    def _add(self, piece: Slice) -> None:
        self._current.append(piece)
        self._room_bytes -= piece.num_bytes
        if self._room_bytes == 0:
            self._close()

    def _fill_gap(self) -> None:
        """Fill what is left of the current bucket with smaller elements of later slices, if there are any."""
        while self._current:
            found = next(
                (
                    (pending, at)
                    for pending in self._waves
                    for at, piece in enumerate(pending)
                    if piece.itemsize_bytes <= self._room_bytes
                ),
                None,
            )
            if found is None:
                self._close()
                return
            pending, at = found
            piece = pending[at]
            head, tail = piece.cut(self._room_bytes // piece.itemsize_bytes)
            del pending[at]
            for part in reversed(tail):
                pending.insert(at, part)
            for part in head:
                self._add(part)

    def _close(self) -> None:
        self._done.append(sorted(self._current, key=lambda piece: -piece.itemsize_bytes))
        self._current, self._room_bytes = [], self._capacity_bytes
