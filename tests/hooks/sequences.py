"""Sequences of many lengths, and how a layout's ranks see them, for the tests of forward passes and generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from megatron_real.hooks.parallel_state import ParallelLayout

__all__ = ["TOKENS", "WEIGHTS", "make_batch", "microbatches_of", "seen_by"]

TOKENS = KeySpec(name="tokens", per=Per.TOKEN, dtype="int64")
WEIGHTS = KeySpec(name="weights", per=Per.RESPONSE, dtype="float32")


def make_batch(count: int, *, vocab_size: int = 120, responses: bool = True, seed: int = 5) -> Batch:
    """`count` sequences with prompts of 1 to 9 and responses of 0 to 11 tokens, and a weight per response token."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high + 1, (count,), generator=generator).tolist())

    prompts = lengths(1, 9)
    batch = Batch(
        ids=tuple(range(count)),
        prompt_lengths=prompts,
        response_lengths=(0, *lengths(1, 11)[1:]) if responses else (0,) * count,
    )
    batch.put(TOKENS, torch.randint(vocab_size, (batch.num_tokens,), generator=generator))
    batch.put(WEIGHTS, torch.randn(sum(batch.response_lengths), generator=generator))
    return batch


def microbatches_of(ids: Sequence[int], parallel: ParallelLayout, count: int) -> tuple[tuple[int, ...], ...]:
    """This rank's part of `ids`, in `count` micro-batches of mixed lengths."""
    assert parallel.pg_collection is not None
    mine = list(ids)[parallel.pg_collection.dp.rank() :: parallel.layout.dp]
    return tuple(tuple(mine[start::count]) for start in range(count))


def seen_by(parallel: ParallelLayout, batch: Batch, ids: Sequence[int]) -> Batch:
    """The sequences `ids` with the keys that this pipeline stage gets: tokens at both ends, the rest on the last."""
    assert parallel.pg_collection is not None
    stage = parallel.pg_collection.pp.rank()
    if stage == parallel.layout.pp - 1:
        return batch.select(ids)
    return batch.select(ids, ["tokens"] if stage == 0 else [])
