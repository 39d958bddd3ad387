"""Sums against plain Python integers, whatever the memory layout."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.realloc_ops.planning.shards import Box
from megatron_real.realloc_ops.proof.checksums import blocks_of, sum_of

_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def _weight(index: int, kind: int) -> int:
    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    z = signed((index + (kind << 32)) * 0x9E3779B97F4A7C15)
    z = signed((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9)
    z = signed((z ^ (z >> 27)) * 0x94D049BB133111EB)
    return (z ^ (z >> 31)) | 1


def _by_hand(region: torch.Tensor) -> int:
    """The sum as the docstring of `checksums.py` defines it; for rows of one chunk."""
    matrix = region.reshape(-1, region.shape[-1]) if region.dim() else region.reshape(1, 1)
    total = 0
    for row, elements in enumerate(matrix):
        data = elements.contiguous().view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 8)
        inner = 0
        lows, highs = np.frombuffer(data, "<u4")[::2].tolist(), np.frombuffer(data, "<i4")[1::2].tolist()
        for word, (low, high) in enumerate(zip(lows, highs, strict=True)):
            b, c = _weight(word, 0x5F356495), _weight(word, 0x38B34AE5)
            inner += low * b + high * (2**32 * b + c)
        total += inner * _weight(row, 0x1B873593)
    return total % 2**64


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def _sum(region: torch.Tensor) -> int:
    return int(sum_of(region, region.dtype)) % 2**64


@given(
    st.lists(st.integers(1, 9), max_size=3).map(tuple), st.sampled_from(_DTYPES), st.booleans(), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_a_region_whatever_its_strides(
    shape: tuple[int, ...], dtype: torch.dtype, transposed: bool, inside: bool
) -> None:
    region = _random(shape, dtype)
    expected = _by_hand(region)
    if inside and shape:  # columns of a wider storage that starts anywhere
        wider = _random((*shape[:-1], shape[-1] + 3), dtype)
        wider[..., 1:-2] = region
        region = wider[..., 1:-2]
    if transposed and shape:
        region = region.movedim(-1, 0).contiguous().movedim(0, -1)
    assert _sum(region) == expected


def test_many_blocks_and_chunks() -> None:
    rows = _random((700, 512), torch.float32)  # several blocks, cut between rows
    assert _sum(rows) == _by_hand(rows) == _sum(rows.t().contiguous().t()) == _sum(rows.view(7, 100, 512))
    for long in (_random((200_000,), torch.float32), _random((3, 150_000), torch.bfloat16)):
        total = _sum(long)
        assert total == _sum(long.clone())
        for place in (0, 1, 32_768, 65_536, long.shape[-1] - 1):  # in every chunk
            changed = long.clone()
            changed.view(torch.uint8)[..., place * long.element_size()] ^= 1
            assert _sum(changed) != total
    tall = torch.zeros(70_000, 1)  # more rows than weights are kept
    found = set()
    for row in (0, 65_535, 65_536, 69_999):
        tall.zero_()[row] = 1.0
        found.add(_sum(tall))
    one = int(torch.ones(1).view(torch.int32))
    expected = [
        one * _weight(0, 0x5F356495) * _weight(row, 0x1B873593) % 2**64 for row in (0, 65_535, 65_536, 69_999)
    ]
    assert found == set(expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_blocks_partition_a_box(shape: list[int], most: int) -> None:
    box = Box(tuple(range(len(shape))), tuple(shape))
    blocks = list(blocks_of(box, most))
    assert all(block.num_elements <= most and box.contains(block) for block in blocks)
    assert sum(block.num_elements for block in blocks) == box.num_elements
    counted = torch.zeros(shape)
    for block in blocks:
        counted[block.slices_in(box)] += 1
    assert (counted == 1).all()


def test_a_converted_source_has_the_sum_of_what_arrives() -> None:
    values = torch.tensor([[1.0, -0.0, float("nan"), 1e-45, 3e38, -float("inf"), 1.0000001, 0.1]]).repeat(
        5, 9
    )
    values.view(torch.int32)[2, 2] = 0x7F800001  # another NaN
    for dtype in (torch.bfloat16, torch.float64):
        arrived = torch.empty_like(values, dtype=dtype)
        arrived.copy_(values)
        assert int(sum_of(values, dtype, converted=True)) == int(sum_of(arrived, dtype, converted=True))
        arrived[3, 1] = 0.0  # it was -0.0
        assert int(sum_of(values, dtype, converted=True)) != int(sum_of(arrived, dtype, converted=True))
