"""A set of token sequences with their per-token and per-sequence data, packed.

One flat tensor per key plus lengths: nothing is padded at the borders between calls; only a backend pads.
Shape legend: S sequences, T tokens of prompt + response over all sequences, R response tokens over all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import RealError

__all__ = ["Batch"]


@dataclass(slots=True, kw_only=True)
class Batch:
    """Sequences `ids` of one iteration, in that order, with the keys that are known of them here."""

    ids: tuple[int, ...]
    """Sequence ids: the position of a sequence in the iteration's batch."""
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    """Zero for a sequence that was not generated yet."""
    keys: dict[str, KeySpec] = field(default_factory=dict)
    data: dict[str, torch.Tensor] = field(default_factory=dict)
    """Flat tensors: [T], [R] or [S] by the key's `per`."""

    def lengths(self, per: Per) -> tuple[int, ...]:
        """Elements of each sequence in a key of this kind."""
        if per is Per.SEQUENCE:
            return (1,) * len(self.ids)
        if per is Per.RESPONSE:
            return self.response_lengths
        return tuple(p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True))

    def put(self, spec: KeySpec, value: torch.Tensor) -> None:
        """Set a key from its flat tensor.

        Raises:
            RealError: the tensor has another number of elements than the lengths say.
        """
        expected = sum(self.lengths(spec.per))
        if value.dim() != 1 or value.numel() != expected:
            raise RealError(
                f"batch: key {spec.name!r} ({spec.per} data) has shape {tuple(value.shape)}; expected ({expected},)."
            )
        self.keys[spec.name] = spec
        self.data[spec.name] = value

    def put_list(self, spec: KeySpec, values: Iterable[torch.Tensor]) -> None:
        """Set a key from one tensor per sequence, in the order of `ids`."""
        parts = [value.reshape(-1) for value in values]
        dtype = getattr(torch, spec.dtype)
        self.put(spec, torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype))

    def split(self, key: str) -> list[torch.Tensor]:
        """Views of a key, one per sequence in the order of `ids`."""
        return list(self.data[key].split(list(self.lengths(self.keys[key].per))))

    def select(self, ids: Sequence[int], keys: Iterable[str] | None = None) -> Batch:
        """The sequences `ids`, in that order, with all keys or only `keys`.

        Raises:
            RealError: one of the sequences is not here.
        """
        where = {sequence: index for index, sequence in enumerate(self.ids)}
        missing = [sequence for sequence in ids if sequence not in where]
        if missing:
            raise RealError(
                f"batch: sequences {missing[:8]} are not here; this batch has {list(self.ids)[:8]}..."
            )
        index = [where[sequence] for sequence in ids]
        chosen = Batch(
            ids=tuple(ids),
            prompt_lengths=tuple(self.prompt_lengths[i] for i in index),
            response_lengths=tuple(self.response_lengths[i] for i in index),
        )
        for name in self.data if keys is None else keys:
            parts = self.split(name)
            chosen.keys[name] = self.keys[name]
            chosen.data[name] = torch.cat([parts[i] for i in index]) if index else self.data[name][:0]
        return chosen

    @staticmethod
    def merge(batches: Sequence[Batch]) -> Batch:
        """One batch of all sequences, in ascending id order, with the keys that all parts have.

        Raises:
            RealError: two parts have the same sequence.
        """
        ids = [sequence for batch in batches for sequence in batch.ids]
        if len(set(ids)) != len(ids):
            raise RealError("batch: merge found a sequence in two parts; each must come once.")
        merged = Batch(
            ids=tuple(ids),
            prompt_lengths=tuple(n for batch in batches for n in batch.prompt_lengths),
            response_lengths=tuple(n for batch in batches for n in batch.response_lengths),
        )
        common = (
            [name for name in batches[0].data if all(name in batch.data for batch in batches)]
            if batches
            else []
        )
        for name in common:
            merged.keys[name] = batches[0].keys[name]
            merged.data[name] = torch.cat([batch.data[name] for batch in batches])
        return merged.select(sorted(ids))

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt + response over all sequences."""
        return sum(self.lengths(Per.TOKEN))
