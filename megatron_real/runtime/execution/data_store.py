"""What a rank holds of an iteration's batch, by key and sequence, and how a message packs it.

A message is one flat tensor of bytes: for each item (a key with ascending sequence ids) the values of its
sequences one after the other, padded to `ALIGNMENT` bytes so that every item can be viewed in its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_real.data_plan import Lengths, Message
from megatron_real.dataflow import Graph, KeySpec
from megatron_real.errors import RealError

__all__ = ["ALIGNMENT", "DataStore", "message_bytes", "pack", "unpack"]

ALIGNMENT = 8
"""Bytes: the largest dtype of a key is int64."""


class DataStore:
    """The data of one iteration on one rank: key -> sequence id -> flat tensor."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, torch.Tensor]] = {}

    def put(self, key: str, ids: Sequence[int], parts: Iterable[torch.Tensor]) -> None:
        """Keep one tensor per sequence."""
        self._parts.setdefault(key, {}).update(zip(ids, parts, strict=True))

    def parts(self, key: str, ids: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of `ids`, in that order.

        Raises:
            RealError: some are not here.
        """
        known = self._parts.get(key, {})
        missing = [sequence for sequence in ids if sequence not in known]
        if missing:
            raise RealError(
                f"data store: key {key!r} has no sequences {missing[:8]} here (it has {len(known)} others). "
                "The producer returned other sequences than its shard, or did not run."
            )
        return [known[sequence] for sequence in ids]

    def clear(self) -> None:
        """Forget everything."""
        self._parts.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where one item lies in a message."""

    spec: KeySpec
    ids: tuple[int, ...]
    counts: tuple[int, ...]
    """Elements of each sequence."""
    begin: int
    """First byte."""

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.spec.dtype)
        assert isinstance(dtype, torch.dtype), "KeySpec names a torch dtype"
        return dtype

    @property
    def size_bytes(self) -> int:
        itemsize: int = self.dtype.itemsize
        return sum(self.counts) * itemsize


def _slots(message: Message, graph: Graph, lengths: Lengths) -> tuple[list[_Slot], int]:
    slots, at = [], 0
    for key, ids in message.items:
        spec = graph.key(key)
        slot = _Slot(spec=spec, ids=ids, counts=tuple(lengths.of(spec.per, i) for i in ids), begin=at)
        slots.append(slot)
        at += -(-slot.size_bytes // ALIGNMENT) * ALIGNMENT
    return slots, max(at, ALIGNMENT)  # never an empty message


def message_bytes(message: Message, graph: Graph, lengths: Lengths) -> int:
    """Size of a packed message. Sender and receiver compute it from the same lengths."""
    return _slots(message, graph, lengths)[1]


def pack(
    message: Message, graph: Graph, lengths: Lengths, store: DataStore, device: torch.device
) -> torch.Tensor:
    """One uint8 tensor on `device` with the message's data.

    Raises:
        RealError: a sequence is not in the store, or has another length than `lengths` says.
    """
    slots, total = _slots(message, graph, lengths)
    flat = torch.zeros(total, dtype=torch.uint8, device=device)
    for slot in slots:
        parts = store.parts(slot.spec.name, slot.ids)
        found = tuple(part.numel() for part in parts)
        if found != slot.counts:
            wrong = next(i for i in range(len(found)) if found[i] != slot.counts[i])
            raise RealError(
                f"transfer to rank {message.dst}: key {slot.spec.name!r} of sequence {slot.ids[wrong]} has "
                f"{found[wrong]} elements; expected {slot.counts[wrong]}. Its producer must keep the lengths "
                "of the batch."
            )
        part_bytes = torch.cat(parts).to(device=device, dtype=slot.dtype).contiguous().view(torch.uint8)
        flat[slot.begin : slot.begin + slot.size_bytes] = part_bytes
    return flat


def unpack(flat: torch.Tensor, message: Message, graph: Graph, lengths: Lengths, store: DataStore) -> None:
    """Put a received message into `store`, as views of `flat`; the inverse of `pack`."""
    for slot in _slots(message, graph, lengths)[0]:
        values = flat[slot.begin : slot.begin + slot.size_bytes].view(slot.dtype)
        store.put(slot.spec.name, slot.ids, values.split(list(slot.counts)))
