"""Between tensors and messages: staging buffers, and which messages need them.

A message that is one contiguous piece of a tensor, in the dtype of the wire and on the transport's device, goes
straight from or to its storage. All others are packed into, or unpacked from, two staging buffers per direction, used
in turn.

Invariants (tests/unit/realloc_ops/test_executor.py, tests/property/test_realloc_plan.py):
    - bytes lie on the wire in the order of the message's slices, each row by row, whether direct or staged;
    - two messages that are next to each other among the staged ones never share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_real.realloc_ops.buckets import Message, Slice
from megatron_real.realloc_ops.plan import STAGING_SLOTS
from megatron_real.realloc_ops.transports import Parcel

__all__ = ["Direction", "Leg", "Staging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One direction of one step: the parcel, and the copies between it and the parameters (none if direct)."""

    parcel: Parcel
    staged: tuple[torch.Tensor, ...] = ()
    params: tuple[torch.Tensor, ...] = ()


class Staging:
    """The staging buffers of one direction; their storage exists only between `allocate` and `free`."""

    def __init__(self, message_bytes: Sequence[int], device: torch.device) -> None:
        """Allocates nothing.

        Args:
            message_bytes: sizes of the staged messages, in order; message i uses buffer i modulo the slots.
            device: where the transport wants its payloads.
        """
        self._sizes = [max(message_bytes[slot::STAGING_SLOTS], default=0) for slot in range(STAGING_SLOTS)]
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(STAGING_SLOTS)]
        self.num_bytes = sum(self._sizes)

    def allocate(self) -> None:
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            storage = buffer.untyped_storage()
            storage.resize_(size)
            if buffer.numel() != size:  # the first time
                buffer.set_(storage, 0, (size,))

    def free(self) -> None:
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def payload(self, number: int, num_bytes: int) -> torch.Tensor:
        """The bytes of staged message `number`; call it while allocated, the view stays valid after that."""
        return self._buffers[number % STAGING_SLOTS][:num_bytes]


class Direction:
    """All messages that a rank sends, or all that it receives, bound to the tensors that they come from or go to."""

    def __init__(
        self,
        messages: Sequence[Message | None],
        *,
        part_of: Callable[[Slice], torch.Tensor],
        wire_dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ) -> None:
        """Find the tensors and decide which messages are staged; allocates nothing.

        Args:
            messages: one per step of the rank; None where a step has none in this direction.
            part_of: the part of this rank's shard that a slice covers, of the shape of the slice's box.
            wire_dtypes: dtype on the wire by key.
            device: where the transport wants its payloads.
        """
        self._wire_dtypes = wire_dtypes
        self._device = device
        self._bound = [
            (message, tuple(part_of(piece) for piece in message.slices)) if message is not None else None
            for message in messages
        ]
        sizes = [
            bound[0].num_bytes for bound in self._bound if bound is not None and not self._is_direct(*bound)
        ]
        self.staging = Staging(sizes, device)

    def legs(self, rank: int) -> tuple[Leg | None, ...]:
        """One leg per step; call it while the staging buffers are allocated."""
        legs: list[Leg | None] = []
        num_staged = 0
        for bound in self._bound:
            if bound is None:
                legs.append(None)
                continue
            message, parts = bound
            peer = message.dst if message.src == rank else message.src
            if self._is_direct(message, parts):
                payload = parts[0].reshape(-1).view(torch.uint8)
                legs.append(Leg(parcel=Parcel(peer=peer, payload=payload, label=str(message))))
                continue
            payload = self.staging.payload(num_staged, message.num_bytes)
            num_staged += 1
            legs.append(
                Leg(
                    parcel=Parcel(peer=peer, payload=payload, label=str(message)),
                    staged=self._lay_out(message, payload),
                    params=parts,
                )
            )
        return tuple(legs)

    def _is_direct(self, message: Message, parts: Sequence[torch.Tensor]) -> bool:
        return (
            len(parts) == 1
            and parts[0].is_contiguous()
            and parts[0].dtype == self._wire_dtypes[message.slices[0].key]
            and parts[0].device.type == self._device.type
        )

    def _lay_out(self, message: Message, payload: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The slices of a message inside its payload, one behind the other, each with its dtype and shape."""
        staged: list[torch.Tensor] = []
        start = 0
        for piece in message.slices:
            typed = payload[start : start + piece.num_bytes].view(self._wire_dtypes[piece.key])
            staged.append(typed.view(piece.box.shape))
            start += piece.num_bytes
        assert start == message.num_bytes, f"{message}: its slices have {start} bytes"
        return tuple(staged)
