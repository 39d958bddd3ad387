"""Slices of tensors, and the byte-bounded messages that they are fused into.

Invariants (tests/unit/realloc_ops/test_buckets.py):
    - a message holds at most the bucket's bytes, and every message of a pair but its last holds exactly that many;
    - so a pair that moves n bytes needs at most n / bucket + 1 messages;
    - inside a message slices come in descending element size, so each starts at a multiple of its element size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.shards import Box

__all__ = ["Message", "Slice", "cut_range", "fill_messages"]

_BUCKET_STEP_BYTES = 16
"""Buckets are a multiple of the largest element, so that a bucket can always be filled to its last byte."""


class Slice(NamedTuple):
    """A region that a source shard and a destination shard have in common, or a part of it."""

    order: int
    """Position in the canonical order of the whole plan; parts of one region share it."""
    key: str
    src_box: Box
    dst_box: Box
    box: Box
    """The region, in global coordinates; inside both shards."""
    num_bytes: int
    """In the dtype of the source, which is the dtype on the wire."""

    @property
    def itemsize_bytes(self) -> int:
        return self.num_bytes // self.box.num_elements

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
    """Position among the messages of this pair."""
    slices: tuple[Slice, ...]
    """In the order in which they lie in the bucket, without gaps."""
    num_bytes: int

    def __str__(self) -> str:
        keys = list(dict.fromkeys(piece.key for piece in self.slices))
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        return (
            f"message {self.index} from rank {self.src} to rank {self.dst} ({self.num_bytes:,} bytes: "
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


def fill_messages(src: int, dst: int, slices: Iterable[Slice], bucket_bytes: int) -> tuple[Message, ...]:
    """Fuse what `src` sends to `dst` into messages; both ends derive the same ones from the same slices.

    A slice of at least a bucket first gives messages of its own, which need no packing where it is contiguous; only
    its remainder is fused with others.

    Raises:
        PlanError: the bucket is too small.
    """
    capacity_bytes = bucket_bytes // _BUCKET_STEP_BYTES * _BUCKET_STEP_BYTES
    if capacity_bytes <= 0:
        raise PlanError(
            f"reallocation: found a bucket of {bucket_bytes} bytes; expected at least {_BUCKET_STEP_BYTES}."
        )
    full: list[list[Slice]] = []
    current: list[Slice] = []
    room_bytes = capacity_bytes
    for whole in sorted(slices, key=lambda piece: (-piece.itemsize_bytes, piece.order)):
        per_message = capacity_bytes // whole.itemsize_bytes
        pending = [whole]
        while pending:
            piece = pending.pop(0)
            if piece.num_bytes >= capacity_bytes:
                head, tail = piece.cut(per_message)
                full.append(head)
                pending[:0] = tail
            elif piece.num_bytes <= room_bytes:
                current.append(piece)
                room_bytes -= piece.num_bytes
            else:
                head, tail = piece.cut(room_bytes // piece.itemsize_bytes)
                current.extend(head)
                room_bytes = 0
                pending[:0] = tail
            if room_bytes == 0:
                full.append(current)
                current, room_bytes = [], capacity_bytes
    buckets = [*full, current] if current else full
    return tuple(
        Message(
            src=src,
            dst=dst,
            index=index,
            slices=tuple(bucket),
            num_bytes=sum(piece.num_bytes for piece in bucket),
        )
        for index, bucket in enumerate(buckets)
    )
