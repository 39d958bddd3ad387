"""Between tensors and messages: staging buffers, and which messages need them.

A message that is one contiguous piece of a tensor, in the dtype of the wire and on the transport's device, goes
straight from or to its storage. All others are packed into, or unpacked from, a staging buffer per direction, in which
they lie one behind the other, from the start again when it is full. Equal bytes for several receivers are packed once.

Mixing. With ``mix`` a destination becomes ``old * (1 - mix) + source * mix``: both factors, both products and the sum
are rounded to fp32 (fp64 if either side is fp64), the result once more to the destination's dtype. Integers are copied.

Invariants (tests/unit/realloc_ops/test_packing.py, tests/property/test_realloc_execution.py):
    - bytes lie on the wire in the order of the message's slices, each row by row, whether direct or staged;
    - what a message finds packed is what it sends;
    - a staging buffer has at most its limit, whatever passes through it;
    - mixing holds at most `MIX_CHUNK_ELEMENTS` elements of each side in the wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_real.realloc_ops.execution.transports import Parcel
from megatron_real.realloc_ops.planning.buckets import Message, Slice
from megatron_real.realloc_ops.planning.plan import STAGING_SLOTS
from megatron_real.realloc_ops.storage.local_shards import with_memory

__all__ = ["MIX_CHUNK_ELEMENTS", "Direction", "Leg", "Staging", "copy_tensors", "mix_tensors"]

_ALIGN_BYTES = 16
"""Of a message in the staging buffer; no element is larger."""
MIX_CHUNK_ELEMENTS = 1 << 18
"""Mixing goes through a tensor in chunks of this size, which stay in a CPU's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One direction of one step: the parcel, and the parameters that its bytes come from or go to."""

    parcel: Parcel
    wave: int
    parts: tuple[torch.Tensor, ...]
    """Of this rank's shards, in the order of the message's slices."""
    staged: tuple[torch.Tensor, ...] = ()
    """The same slices in the staging buffer; none if the payload is the part itself."""
    place: range | None = None
    """Of the bytes in the staging buffer; None if direct."""
    packed: bool = True
    """False if they are there already, from an earlier leg."""


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
    """A message with its parts and their dtypes on the wire."""

    message: Message
    parts: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]


class Direction:
    """All messages that a rank sends, or all that it receives, bound to the tensors that they come from or go to."""

    def __init__(
        self,
        messages: Sequence[Message | None],
        *,
        part_of: Callable[[Message, Slice], torch.Tensor],
        dtype_of: Callable[[Message, Slice], torch.dtype],
        staging: Staging,
        sends: bool,
        direct: bool = True,
    ) -> None:
        """Find the tensors and decide which messages are staged; allocates nothing.

        Args:
            messages: one per step of the rank; None where a step has none in this direction.
            part_of: the part of this rank's shard that a slice covers, of the shape of the slice's box.
            dtype_of: dtype of a slice on the wire.
            staging: gives places to what is staged; of this direction only.
            sends: whether the messages are sent: only then can two of them be the same bytes.
            direct: False stages every message.
        """
        self._sends = sends
        self.staging = staging
        bound = [
            _Bound(
                message=message,
                parts=tuple(part_of(message, piece) for piece in message.slices),
                dtypes=tuple(dtype_of(message, piece) for piece in message.slices),
            )
            if message is not None
            else None
            for message in messages
        ]
        staged = [
            one is not None and not (direct and _is_direct(one.parts, one.dtypes, staging.device))
            for one in bound
        ]
        sizes = [one.message.num_bytes for one, packs in zip(bound, staged, strict=True) if one and packs]
        staging.expect(max(sizes, default=0))
        known: dict[object, range] | None = {} if sends else None
        self._legs = [
            (one, _place(one.message, staging, known) if packs else None) if one is not None else None
            for one, packs in zip(bound, staged, strict=True)
        ]

    def legs(self) -> tuple[Leg | None, ...]:
        """One leg per step; call it while the staging buffer is allocated."""
        return tuple(self._leg(*leg) if leg is not None else None for leg in self._legs)

    def _leg(self, bound: _Bound, staged_at: tuple[range, bool] | None) -> Leg:
        message = bound.message
        place, packed = staged_at or (None, True)
        if place is None:
            payload, staged = _bytes_of(bound.parts[0]), ()
        else:
            payload = self.staging.payload(place)
            staged = _lay_out(message, bound.dtypes, payload)
        peer = message.dst if self._sends else message.src
        return Leg(
            parcel=Parcel(peer=peer, payload=payload, label=str(message)),
            wave=message.wave,
            parts=bound.parts,
            staged=staged,
            place=place,
            packed=packed,
        )


def _place(message: Message, staging: Staging, known: dict[object, range] | None) -> tuple[range, bool]:
    """Where a message is staged, and whether it must be packed; `known` is what the buffer holds by then."""
    content = _content(message)
    if known is not None and content in known:
        return known[content], False
    place = staging.reserve(message.num_bytes)
    if known is not None:
        for other, there in list(known.items()):
            if there.start < place.stop and place.start < there.stop:
                del known[other]
        known[content] = place
    return place, True


def _is_direct(parts: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], device: torch.device) -> bool:
    if len(parts) != 1:
        return False
    part = parts[0]
    return bool(part.is_contiguous() and part.dtype == dtypes[0] and part.device.type == device.type)


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, also of a freed one; a tensor of one element may have any strides."""
    with with_memory(part):
        return part.as_strided((part.numel(),), (1,)).view(torch.uint8)


def _content(message: Message) -> object:
    """Equal for two messages of one rank that carry the same bytes."""
    return message.relayed, tuple((piece.key, piece.src_box, piece.box) for piece in message.slices)


def _lay_out(
    message: Message, dtypes: Sequence[torch.dtype], payload: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The slices of a message inside its payload, one behind the other, each with its dtype and shape."""
    staged: list[torch.Tensor] = []
    start = 0
    for piece, dtype in zip(message.slices, dtypes, strict=True):
        typed = payload[start : start + piece.num_bytes].view(dtype)
        staged.append(typed.view(piece.box.shape))
        start += piece.num_bytes
    assert start == message.num_bytes, f"{message}: its slices have {start} bytes"
    return tuple(staged)


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
