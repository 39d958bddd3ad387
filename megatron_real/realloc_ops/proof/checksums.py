"""A sum over the bits of a region of a tensor, in which every position has a weight of its own.

The region is named by its global coordinates, which both sides know; a position is counted from its start. Its last
axis is read as rows of 64-bit words (filled up with zeros), and rows are cut into chunks of a fixed width. With the low
half l and the high half h of word m in chunk r, and odd pseudo-random weights a, b and c:

    sum = Σ_r a(r) · Σ_m (l · b(m) + h · (2³² · b(m) + c(m)))   modulo 2⁶⁴

Sums are exact integers: strides, blocks, devices and numbers of threads do not change them.

What is found. A change within one 32-bit half, always: its difference is below 2³² and its weight is odd. Any other
change (swapped rows, columns, heads, layers or experts, a box that is shifted, a transposed square, a stale or missing
part) changes the sum unless weights that know nothing of it happen to cancel it. If v is the exponent of the power of
two that divides all differences of halves, the chance of that is below 2^-(56 - v). v is 0 for fp32 values of which one
differs in its last bit, at most 16 for such bf16 values, and 31 if nothing but signs changed: chances below 2^-56,
2^-40 and 2^-25. Against somebody who chooses the change it is no protection.

NaN is bits like others. But where the dtype changes, all NaNs of the new dtype count as one, because the conversion of
a NaN depends on the instruction that did it.

Cost: the bits are read once, in blocks that stay in the cache, with two multiplications per 64-bit word.

Invariants (tests/unit/realloc_ops/test_checksums.py, tests/property/test_realloc_verify.py):
    - the sum equals one in plain Python integers, however the region lies in memory;
    - memory beside the tensor is a few blocks of 2 MiB (32 MiB on CUDA).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache

import torch

from megatron_real.realloc_ops.planning.shards import Box

__all__ = ["as_delivered", "blocks_of", "sum_of"]

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 14
_CPU_BLOCK_BYTES = 1 << 21
"""A block and what is made of it stay in a core's cache."""
_CUDA_BLOCK_BYTES = 1 << 25
"""Large enough that launching kernels does not matter."""
_CHUNKS, _LOW, _HIGH = 0x1B873593, 0x5F356495, 0x38B34AE5
"""Tell the three kinds of weights apart."""
_TABLE_SIZE = 1 << 16
"""As many weights of each kind are kept."""


def blocks_of(box: Box, num_elements: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `num_elements` elements, in row-major order."""
    if box.num_elements <= num_elements:
        yield box
        return
    axis = next(index for index, extent in enumerate(box.shape) if extent > 1)
    step = max(num_elements // (box.num_elements // box.shape[axis]), 1)
    for first in range(0, box.shape[axis], step):
        count = min(step, box.shape[axis] - first)
        offset = (*box.offset[:axis], box.offset[axis] + first, *box.offset[axis + 1 :])
        yield from blocks_of(Box(offset, (*box.shape[:axis], count, *box.shape[axis + 1 :])), num_elements)


def sum_of(region: torch.Tensor, dtype: torch.dtype, *, converted: bool = False) -> torch.Tensor:
    """The sum of one region. No collective.

    Args:
        region: its elements, of any shape, strides and device.
        dtype: whose bits count: that of the destination. A region of another dtype is converted block by block.
        converted: source and destination have different dtypes, so all NaNs count as one; the same on both sides.

    Returns:
        An int64 tensor without axes, on the device of `region`.
    """
    region = region.detach() if region.dim() else region.detach().reshape(1)
    sums = [_sum_of_chunks(words, first) for first, words in _blocks(region, dtype, converted)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _blocks(region: torch.Tensor, dtype: torch.dtype, converted: bool) -> Iterator[tuple[int, torch.Tensor]]:
    """Chunks of words, as many at a time as a block holds, and the place of the first of them among all."""
    block_bytes = _CPU_BLOCK_BYTES if region.device.type == "cpu" else _CUDA_BLOCK_BYTES
    most = block_bytes // max(region.element_size(), dtype.itemsize)
    width = _CHUNK_WORDS * _WORD_BYTES // dtype.itemsize
    first = 0
    for chunks in region.split(width, dim=-1) if region.shape[-1] > width else (region,):
        if chunks.numel() <= most:
            parts: Iterable[torch.Tensor] = (chunks,)
        else:
            everything = Box((0,) * chunks.dim(), tuple(chunks.shape))
            parts = (chunks[block.slices_in(everything)] for block in blocks_of(everything, most))
        for part in parts:
            words = _words(as_delivered(part, dtype, converted=converted))
            yield first, words
            first += words.shape[0]


def as_delivered(part: torch.Tensor, dtype: torch.dtype, *, converted: bool) -> torch.Tensor:
    """A part of the source, or of the destination, as its bits are compared: in the destination's `dtype`."""
    bits = part if part.dtype == dtype else part.to(dtype)
    if converted and dtype.is_floating_point:
        bits = torch.where(torch.isnan(bits), torch.full((), math.nan, dtype=dtype, device=bits.device), bits)
    return bits


def _words(bits: torch.Tensor) -> torch.Tensor:
    """Rows of 64-bit words, without a copy where rows start and end at words in memory."""
    width, per_word = bits.shape[-1], _WORD_BYTES // bits.element_size()
    rows = bits.reshape(-1, width)
    in_place = (
        width % per_word == 0
        and rows.stride(1) == 1
        and rows.stride(0) % per_word == 0
        and rows.storage_offset() % per_word == 0
    )
    if not in_place:
        filled = rows.new_zeros((len(rows), -(-width // per_word) * per_word))
        filled[:, :width] = rows
        rows = filled
    return rows.view(torch.int64)


def _sum_of_chunks(words: torch.Tensor, first: int) -> torch.Tensor:
    """Weighted sum of chunks, of which the first has the number `first`; `words >> 32` is the signed high half."""
    num_chunks, num_words = words.shape
    low, high = (_weights(kind, 0, num_words, words.device) for kind in (_LOW, _HIGH))
    chunks = _weights(_CHUNKS, first, num_chunks, words.device)
    if words.device.type == "cpu":
        return torch.dot(torch.addmv(torch.mv(words, low), words >> 32, high), chunks)
    return (
        (words * low + (words >> 32) * high).sum(-1) * chunks
    ).sum()  # CUDA multiplies no integer matrices


def _weights(kind: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Of `count` indices from `first`."""
    if first + count <= _TABLE_SIZE:
        return _kept_weights(kind, first, count, device)
    return _mixed(torch.arange(first, first + count, dtype=torch.int64, device=device), kind)


@lru_cache(maxsize=1024)
def _kept_weights(kind: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    return _table(kind, device)[first : first + count]


@cache
def _table(kind: int, device: torch.device) -> torch.Tensor:
    return _mixed(torch.arange(_TABLE_SIZE, dtype=torch.int64, device=device), kind)


def _mixed(index: torch.Tensor, kind: int) -> torch.Tensor:
    """An odd pseudo-random int64 of each index: the mixing steps of splitmix64, with signed shifts."""
    mixed = (index + (kind << 32)) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1
