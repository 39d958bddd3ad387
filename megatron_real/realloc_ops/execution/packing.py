"""Between tensors and messages: staging buffers, and which messages need them.

A message that is one contiguous piece of a tensor, in the dtype of the wire and on the transport's device, goes
straight from or to its storage. All others are packed into, or unpacked from, a staging buffer per direction, in which
they lie one behind the other, from the start again when it is full. Equal bytes for several receivers are packed once.

Where the transport gathers and scatters with the peer, any slice of a message may go straight from or to its storage,
and does if its pieces there are not too short; the others of the same message are staged.

Mixing. With ``mix`` a destination becomes ``old * (1 - mix) + source * mix``: both factors, both products and the sum
are rounded to fp32 (fp64 if either side is fp64), the result once more to the destination's dtype. Integers are copied.

Invariants (tests/unit/realloc_ops/test_packing.py, tests/property/test_realloc_execution.py):
    - bytes lie on the wire in the order of the message's slices, each row by row, whether direct or staged;
    - what is sent is in one piece, or in at most `MOST_SENT_REGIONS` for a peer that gathers them;
    - what a message finds packed is what it sends;
    - a staging buffer has at most its limit, whatever passes through it;
    - mixing holds at most `MIX_CHUNK_ELEMENTS` elements of each side in the wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from megatron_real.realloc_ops.execution.node_links import MOST_SENT_REGIONS
from megatron_real.realloc_ops.execution.regions import Regions, Runs
from megatron_real.realloc_ops.execution.transports import Parcel
from megatron_real.realloc_ops.planning.buckets import Message, Slice
from megatron_real.realloc_ops.planning.plan import STAGING_SLOTS
from megatron_real.realloc_ops.storage.local_shards import with_memory

__all__ = ["MIX_CHUNK_ELEMENTS", "Direction", "Leg", "Staging", "copy_tensors", "mix_tensors"]

_ALIGN_BYTES = 16
"""Of a message in the staging buffer; no element is larger."""
_LEAST_SENT_BYTES = 16384
"""Of a piece that is gathered where it lies: 2.6 GB/s were measured, and 2.0 with packing first; 1.2 at 4 KiB."""
_LEAST_RECEIVED_BYTES = 4096
"""Of a piece that is scattered to where it belongs: 2.6 GB/s, and 2.0 by staging; 1.3 and 1.7 at 512 bytes."""
MIX_CHUNK_ELEMENTS = 1 << 18
"""Mixing goes through a tensor in chunks of this size, which stay in a CPU's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One direction of one step: the parcel, and the parameters that its bytes come from or go to."""

    parcel: Parcel
    wave: int
    direct: tuple[torch.Tensor, ...]
    """Parts of this rank's shards that the transport itself reads or writes."""
    parts: tuple[torch.Tensor, ...]
    """Those that are packed or unpacked, in the order of the message's slices."""
    staged: tuple[torch.Tensor, ...]
    """The latter in the staging buffer."""
    place: range | None
    """Of their bytes in the staging buffer; None if there are none."""
    packed: bool
    """Whether to pack them first: they may be there already, from an earlier leg."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Staging:
    """The staging buffer of one direction; its storage exists only between `allocate` and `free`."""

    def __init__(self, device: torch.device, limit_bytes: int, *, lean: bool = False) -> None:
        """Empty.

        Args:
            device: where the transport wants its payloads.
            limit_bytes: the most it may have; at least a message.
            lean: have no more than `STAGING_SLOTS` of the largest message.
        """
        self.device = device
        self._limit_bytes = limit_bytes
        self._lean = lean
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._next = 0
        self.num_bytes = 0

    def expect(self, largest_bytes: int) -> None:
        """Say how large the largest message is, before the first `reserve`."""
        if self._lean:
            self._limit_bytes = min(self._limit_bytes, STAGING_SLOTS * _aligned(largest_bytes))

    def reserve(self, num_bytes: int) -> range:
        """A place for the next message, behind the former one or at the start again; before the first `allocate`."""
        size = _aligned(num_bytes)
        start = self._next if self._next + size <= self._limit_bytes else 0
        self._next = start + size
        self.num_bytes = max(self.num_bytes, self._next)
        return range(start, start + num_bytes)

    def allocate(self) -> None:
        storage = self._buffer.untyped_storage()
        storage.resize_(self.num_bytes)
        if self._buffer.numel() != self.num_bytes:  # the first time
            self._buffer.set_(storage, 0, (self.num_bytes,))

    def free(self) -> None:
        self._buffer.untyped_storage().resize_(0)

    @property
    def allocated_bytes(self) -> int:
        return int(self._buffer.untyped_storage().nbytes())

    def payload(self, place: range) -> torch.Tensor:
        """The bytes of a place; call it while allocated, the view stays valid after that."""
        return self._buffer[place.start : place.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A message with its parts, their dtypes on the wire, and which of them need no staging."""

    message: Message
    parts: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    direct: tuple[bool, ...]

    @property
    def staged_slices(self) -> tuple[Slice, ...]:
        return tuple(self._of(self.message.slices, direct=False))

    @property
    def staged_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.staged_slices)

    @property
    def content(self) -> object:
        """Equal for two messages of one rank that stage the same bytes."""
        slices = self.staged_slices
        return self.message.relayed, tuple((piece.key, piece.src_box, piece.box) for piece in slices)

    def direct_parts(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._of(self.parts, direct=True))

    def staged_parts(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._of(self.parts, direct=False))

    def lay_out(self, payload: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The staged slices in the staging buffer, one behind the other, each with its dtype and shape."""
        staged: list[torch.Tensor] = []
        start = 0
        dtypes = self._of(self.dtypes, direct=False)
        for piece, dtype in zip(self.staged_slices, dtypes, strict=True):
            typed = payload[start : start + piece.num_bytes].view(dtype)
            staged.append(typed.view(piece.box.shape))
            start += piece.num_bytes
        return tuple(staged)

    def pieces(self, payload: torch.Tensor | None) -> list[torch.Tensor]:
        """What the transport takes: neighbours in the staging buffer are one piece."""
        found: list[torch.Tensor] = []
        start = 0
        for is_direct, group in groupby(
            zip(self.direct, self.parts, self.message.slices, strict=True), itemgetter(0)
        ):
            if is_direct:
                found.extend(part for _, part, _ in group)
                continue
            assert payload is not None, "what is staged has a place"
            stop = start + sum(piece.num_bytes for *_, piece in group)
            found.append(payload[start:stop])
            start = stop
        return found

    def _of[T](self, items: Sequence[T], *, direct: bool) -> Iterator[T]:
        return (item for item, is_direct in zip(items, self.direct, strict=True) if is_direct is direct)


PartOf = Callable[[Message, Slice], tuple[torch.Tensor, torch.dtype]]
"""The part of a shard that a slice covers, of the shape of the slice's box, and its dtype on the wire."""


class Direction:
    """All messages that a rank sends, or all that it receives, bound to the tensors that they come from or go to."""

    def __init__(
        self,
        messages: Sequence[Message | None],
        *,
        part_of: PartOf,
        staging: Staging,
        sends: bool,
        direct: bool = True,
        gathers: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Find the tensors and decide which slices are staged; allocates nothing.

        Args:
            messages: one per step of the rank; None where a step has none in this direction.
            part_of: finds the part of this rank's shard that a slice covers.
            staging: gives places to what is staged; of this direction only.
            sends: whether the messages are sent: only then can two of them be the same bytes.
            direct: False stages every slice.
            gathers: `Transport.gathers`.
        """
        self._sends = sends
        self._direct = direct
        self.staging = staging
        bound = [self._bind(message, part_of, gathers) for message in messages]
        staging.expect(max((one.staged_bytes for one in bound if one is not None), default=0))
        known: dict[object, range] | None = {} if sends else None
        self._legs = [(one, _place(one, staging, known)) if one is not None else None for one in bound]

    def legs(self) -> tuple[Leg | None, ...]:
        """One leg per step; call it while the staging buffer is allocated."""
        return tuple(self._leg(*leg) if leg is not None else None for leg in self._legs)

    def _peer(self, message: Message) -> int:
        return message.dst if self._sends else message.src

    def _bind(
        self, message: Message | None, part_of: PartOf, gathers: Callable[[int], bool]
    ) -> _Bound | None:
        if message is None:
            return None
        parts, dtypes = zip(*(part_of(message, piece) for piece in message.slices), strict=True)
        as_they_are = [
            self._direct and part.dtype == dtype and part.device.type == self.staging.device.type
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        if gathers(self._peer(message)):
            direct = self._long_enough(parts, as_they_are)
        else:
            direct = [len(parts) == 1 and as_they_are[0] and parts[0].is_contiguous()] * len(parts)
        return _Bound(message=message, parts=parts, dtypes=dtypes, direct=tuple(direct))

    def _long_enough(self, parts: Sequence[torch.Tensor], possible: Sequence[bool]) -> list[bool]:
        """Those of long pieces; of what is sent, the first ones, which leave room for all others behind each."""
        found: list[bool] = []
        least = _LEAST_SENT_BYTES if self._sends else _LEAST_RECEIVED_BYTES
        room = MOST_SENT_REGIONS - 1
        for part, can in zip(parts, possible, strict=True):
            runs = Runs.of(part)
            # Whatever is staged before it is one more region.
            found.append(
                can and runs.num_bytes >= least and (not self._sends or runs.num_regions + 1 <= room)
            )
            if found[-1]:
                room -= runs.num_regions + 1
        return found

    def _leg(self, bound: _Bound, staged_at: tuple[range, bool] | None) -> Leg:
        message = bound.message
        place, packed = staged_at or (None, False)
        payload = self.staging.payload(place) if place is not None else None
        pieces = bound.pieces(payload)
        if len(pieces) == 1 and pieces[0].is_contiguous():
            pieces = [_bytes_of(pieces[0])]
        return Leg(
            parcel=Parcel(
                peer=self._peer(message),
                memory=Regions(*pieces),
                label=str(message),
                staged=place is not None,
            ),
            wave=message.wave,
            direct=bound.direct_parts(),
            parts=bound.staged_parts(),
            staged=bound.lay_out(payload) if payload is not None else (),
            place=place,
            packed=packed,
        )


def _place(bound: _Bound, staging: Staging, known: dict[object, range] | None) -> tuple[range, bool] | None:
    """Where a message is staged, if it is, and whether it must be packed; `known` is what the buffer holds by then."""
    if all(bound.direct):
        return None
    content = bound.content
    if known is not None and content in known:
        return known[content], False
    place = staging.reserve(bound.staged_bytes)
    if known is not None:
        for other, there in list(known.items()):
            if there.start < place.stop and place.start < there.stop:
                del known[other]
        known[content] = place
    return place, True


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, also of a freed one; a tensor of one element may have any strides."""
    with with_memory(part):
        return part.as_strided((part.numel(),), (1,)).view(torch.uint8)


def copy_tensors(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, converting dtypes and crossing devices where they differ."""
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def mix_tensors(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], mix: float) -> None:
    """Mix each source into its target, by the rule at the head of this module."""
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            if not (source.is_floating_point() and target.is_floating_point()):
                target.copy_(source)
                continue
            for old, new in _chunks(target, source):
                wide = torch.float64 if torch.float64 in (old.dtype, new.dtype) else torch.float32
                new = new.to(device=old.device, dtype=wide)
                old.copy_(old.to(wide).mul(1.0 - mix).add_(new.mul(mix)))


def _chunks(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape, cut alike into pieces of at most `MIX_CHUNK_ELEMENTS`."""
    if target.numel() <= MIX_CHUNK_ELEMENTS:
        yield target, source
        return
    axis = next(index for index, extent in enumerate(target.shape) if extent > 1)
    rows = max(1, MIX_CHUNK_ELEMENTS * target.shape[axis] // target.numel())
    for pair in zip(target.split(rows, axis), source.split(rows, axis), strict=True):
        yield from _chunks(*pair)
