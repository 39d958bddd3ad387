"""Freeing the source while the destination fills, so that both copies are never held whole.

For frozen models whose parameters lie in `SegmentSet`s. A destination segment gets memory when the first bytes for it
are about to be written; a source segment loses it after its last read: when its last direct message was sent, its last
staged message packed, and its last local copy made. The plan must be of the order ``in_place``, which lets every rank
free in proportion to what it receives.

How much memory. At most the larger copy, staging, what the messages to all receivers lag behind each other, and the
segments that are partly read or partly filled, which may be one for each stage that sends or receives. With messages
and segments of a quarter of a bucket (`part_bytes`: ``bucket_bytes`` of the plan, ``segment_bytes`` of the segments)
that is four buckets over the larger copy, for up to four stages, and a quarter of a bucket for each stage beyond. A
tensor that is larger than a segment counts whole, the largest of either side once: its storage cannot be freed in
parts. `Reallocator` plans with parts of a bucket itself; `InPlace.adopt` makes segments of that size.

After a failure half-way both copies are worthless: some segments of either have memory and some have none, and the
ledger holds exactly those that have. `allocate` or `free` of the sets makes them whole again; the version is the
caller's stamp.

Invariants (tests/unit/realloc_ops/test_in_place.py, tests/property/test_realloc_execution.py):
    - before a run the destination is freed, after it the source is freed and the destination allocated;
    - no segment is freed before its last read, none is written before it has memory;
    - the peak, staging included, is at most the larger copy, four buckets, and the two terms above, by the ledger and
      by storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES
from megatron_real.realloc_ops.planning.shards import Shard
from megatron_real.realloc_ops.storage.segments import Segment, SegmentSet

__all__ = ["InPlace", "Residence", "part_bytes", "require_inside"]

_PARTS_PER_BUCKET = 4


def part_bytes(bucket_bytes: int) -> int:
    """What messages and segments may have in place, so that the bound holds with buckets of `bucket_bytes`."""
    return bucket_bytes // _PARTS_PER_BUCKET


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """The segments of this rank that come and go during a run."""

    src: SegmentSet | None
    """Of the source copy; None outside its window, or if it stays (DDP's buffers can only be freed whole)."""
    dst: SegmentSet | None
    """Of the destination copy; None outside its window, or if it is allocated before the run."""

    @classmethod
    def adopt(
        cls,
        src: Sequence[torch.nn.Module] | None,
        dst: Sequence[torch.nn.Module] | None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ledger: MemoryLedger | None = None,
    ) -> InPlace:
        """Move the parameters of two frozen models into segments of a part of a bucket; before `Reallocator` is made.

        Args:
            src: chunks of the model that is read; None where a rank has none, or where it shall stay.
            dst: the same of the model that is written.
            bucket_bytes: as in `ReallocOptions`.
            ledger: books the segments, as source and destination.

        Raises:
            PlanError, CapacityError: as `SegmentSet.adopt`.
        """
        sets = [
            SegmentSet.adopt(model, owner=owner, ledger=ledger, segment_bytes=part_bytes(bucket_bytes))
            if model is not None
            else None
            for owner, model in (("source", src), ("destination", dst))
        ]
        return cls(src=sets[0], dst=sets[1])


class Residence:
    """Which segments have memory during one run."""

    def __init__(self, in_place: InPlace, reads: Iterable[Sequence[torch.Tensor]]) -> None:
        """Free the destination, and what nobody reads of the source.

        Args:
            in_place: the segments.
            reads: the tensors that `after_read` will be told of, once for each time.
        """
        self._src, self._dst = in_place.src, in_place.dst
        self._readers: Counter[Segment] = Counter()
        for tensors in reads:
            self._readers.update(self._segments_of(self._src, tensors))
        if self._dst is not None:
            self._dst.free()
        if self._src is not None:
            for segment in self._src.segments:
                if not self._readers[segment]:
                    self._src.free_segment(segment)

    def before_write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate what is about to be written.

        Raises:
            CapacityError: it does not fit.
        """
        if self._dst is not None:
            for segment in self._segments_of(self._dst, tensors):
                self._dst.allocate_segment(segment)

    def after_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Free what was read for the last time."""
        if self._src is not None:
            for segment in self._segments_of(self._src, tensors):
                self._readers[segment] -= 1
                if not self._readers[segment]:
                    self._src.free_segment(segment)

    def finish(self) -> None:
        """Allocate what nobody wrote to of the destination."""
        if self._dst is not None:
            self._dst.allocate()

    @staticmethod
    def _segments_of(segments: SegmentSet | None, tensors: Sequence[torch.Tensor]) -> list[Segment]:
        """Of each tensor; without those outside the set, such as a forwarded part of the destination."""
        if segments is None:
            return []
        found = (segments.segment_of(tensor) for tensor in tensors)
        return [segment for segment in found if segment is not None]


def require_inside(name: str, segments: SegmentSet | None, views: Mapping[Shard, torch.Tensor]) -> None:
    """Check that a copy's shards lie in its segments.

    Raises:
        PlanError: one does not, so its memory would stay.
    """
    for shard, view in views.items():
        if segments is not None and segments.segment_of(view) is None:
            raise PlanError(
                f"{name}: in place: found {shard.key} outside the segments of {segments.owner}; expected all of the "
                "copy in them. Adopt the copy after its parameters are bound to their storages."
            )
