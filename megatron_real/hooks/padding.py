"""From packed batches to the padded micro-batches that Megatron's models take, and back.

Sequences are padded on the right, so that with causal attention no padding is seen by a real token. A micro-batch is as
wide as its longest sequence (rounded up for sequence parallelism) and no wider: its shape follows from the lengths,
which every rank knows, so pipeline stages need not tell each other.

Invariants (tests/hooks/test_forward.py):
    - the shape of a micro-batch is the same on all ranks of its data-parallel replica, with or without data;
    - response token j of a sequence with P prompt tokens is read at position P + j - 1 and nowhere else.

Shape legend: b sequences of a micro-batch, s positions, R response tokens of all its sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_real.batch import Batch
from megatron_real.dataflow import Per
from megatron_real.errors import RealError

__all__ = ["PaddedMicrobatch", "Positions", "pad_microbatch", "pad_tokens", "to_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Places in a padded micro-batch, in the order of its packed data."""

    rows: torch.Tensor
    """int64, the sequence in the micro-batch."""
    columns: torch.Tensor
    """int64, the position in the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedMicrobatch:
    """One micro-batch as this rank needs it."""

    batch: Batch
    """Its sequences, packed, with the keys that are known here, on the model's device."""
    tokens: torch.Tensor | None
    """[b, s] int64; None on stages that have no tokens."""
    num_rows: int
    length: int
    """s"""

    @property
    def device(self) -> torch.device:
        assert self.tokens is not None
        return self.tokens.device

    def response_positions(self) -> Positions:
        """Where each response token is predicted, [R]: the position before it."""
        lengths = self.batch.response_lengths
        first = [prompt - 1 for prompt in self.batch.prompt_lengths]
        starts = [0, *itertools.accumulate(lengths)][:-1]
        count = torch.tensor(lengths, device=self.device)
        rows = torch.arange(self.num_rows, device=self.device).repeat_interleave(count)
        shift = torch.tensor([f - s for f, s in zip(first, starts, strict=True)], device=self.device)
        return Positions(rows=rows, columns=torch.arange(rows.numel(), device=self.device) + shift[rows])

    def last_positions(self) -> Positions:
        """The last token of each sequence, [b]."""
        lengths = torch.tensor(self.batch.lengths(Per.TOKEN), device=self.device)
        return Positions(rows=torch.arange(self.num_rows, device=self.device), columns=lengths - 1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its data on `device`; shares what is there already."""
    return Batch(
        ids=batch.ids,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        keys=dict(batch.keys),
        data={name: value.to(device, non_blocking=True) for name, value in batch.data.items()},
    )


def pad_tokens(flat: torch.Tensor, lengths: Sequence[int], width: int) -> torch.Tensor:
    """[b, width] from packed [sum(lengths)]: each sequence from column 0 on, zeros behind it."""
    padded = flat.new_zeros(len(lengths), width)
    ends = torch.tensor(lengths, device=flat.device)
    padded[torch.arange(width, device=flat.device) < ends.unsqueeze(-1)] = flat
    return padded


def pad_microbatch(
    batch: Batch, ids: Sequence[int], *, multiple: int, device: torch.device
) -> PaddedMicrobatch:
    """The sequences `ids` of `batch`, padded.

    Args:
        batch: this data-parallel rank's sequences; ``tokens`` may be missing.
        ids: the micro-batch.
        multiple: of what the width has to be (tp under sequence parallelism).
        device: the model's.

    Raises:
        RealError: the micro-batch is empty, has a sequence that is not here, or one without a prompt.
    """
    if not ids:
        raise RealError("micro-batch: found no sequences; expected at least one in each micro-batch.")
    chosen = to_device(batch.select(ids), device)
    if min(chosen.prompt_lengths) < 1:
        empty = [i for i, length in zip(chosen.ids, chosen.prompt_lengths, strict=True) if length < 1]
        raise RealError(
            f"micro-batch: sequences {empty[:8]} have no prompt tokens; expected at least one, since a model "
            "predicts a token from those before it."
        )
    lengths = chosen.lengths(Per.TOKEN)
    length = -(-max(lengths) // multiple) * multiple
    tokens = pad_tokens(chosen.data["tokens"], lengths, length) if "tokens" in chosen.data else None
    return PaddedMicrobatch(batch=chosen, tokens=tokens, num_rows=len(chosen.ids), length=length)
