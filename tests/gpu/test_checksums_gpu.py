"""Checksums on a CUDA device are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from megatron_real.realloc_ops.planning.shards import Box
from megatron_real.realloc_ops.proof.checksums import sum_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its integer kernels"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("box", [Box((0, 0), (3000, 4096)), Box((7, 5), (2000, 1001))])
def test_sums_are_those_of_the_cpu(dtype: torch.dtype, box: Box) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 2**31, (3000, 4096), dtype=torch.int32, generator=generator).view(torch.float32)
    part = whole.to(dtype)[box.slices_in(Box((0, 0), (3000, 4096)))]
    sums = [int(sum_of(part.to(device), dtype)) for device in ("cpu", "cuda")]
    assert sums[0] == sums[1] != 0
