"""A reallocation keeps to the order of the stream that it is called on, and has finished when it returns."""

from __future__ import annotations

import pytest
import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import LocalNetwork
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from tests.synthetic_copies import FakeShardedTensor, expected_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the CPU has no streams"),
]
_SHAPE = (2048, 1024)
_CYCLES = 200_000_000
"""About a tenth of a second of the device's time."""


def _whole(dtype: torch.dtype) -> tuple[torch.Tensor, LocalShards]:
    data = torch.zeros(_SHAPE, dtype=dtype, device="cuda")
    tensor = FakeShardedTensor(
        key="w", data=data, local_shape=_SHAPE, global_shape=_SHAPE, global_offset=(0, 0)
    )
    return data, local_table([tensor], [("w", data)])


def _executors(
    dtype: torch.dtype, *, same_rank: bool
) -> tuple[torch.Tensor, torch.Tensor, LocalNetwork, dict[int, ReallocExecutor]]:
    """Rank 0 holds fp32; rank 1, or rank 0 as well, gets it in `dtype`: packed and unpacked, or copied."""
    source, src = _whole(torch.float32)
    target, dst = _whole(dtype)
    receiver = 0 if same_rank else 1
    plan = build_realloc_plan(
        ParamTable.of({0: src.entries}), ParamTable.of({receiver: dst.entries}), bucket_bytes=1 << 20
    )
    network = LocalNetwork(torch.device("cuda", torch.cuda.current_device()))
    executors = {
        rank: ReallocExecutor(
            plan.of(rank),
            src=src if rank == 0 else None,
            dst=dst if rank == receiver else None,
            transport=network.transport(rank),
            ledger=MemoryLedger(),
        )
        for rank in {0, receiver}
    }
    return source, target, network, executors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("same_rank", [True, False], ids=["copy", "message"])
def test_on_a_side_stream(dtype: torch.dtype, same_rank: bool) -> None:
    source, target, network, executors = _executors(dtype, same_rank=same_rank)
    expected = expected_values("w", (0, 0), _SHAPE).to("cuda")
    num_bytes = source.untyped_storage().nbytes()
    writer, mover = torch.cuda.Stream(), torch.cuda.Stream()
    for version in range(3):
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):  # still busy with the weights when the reallocation begins
            torch.cuda._sleep(_CYCLES)
            torch.add(expected, version, out=source)
        mover.wait_stream(writer)
        with torch.cuda.stream(mover):
            network.run({rank: executor.steps() for rank, executor in executors.items()})
        # On the default stream, at once: the source is freed, its memory used again, the target read.
        source.untyped_storage().resize_(0)
        rubbish = torch.full((num_bytes // 4,), float("nan"), device="cuda")
        assert torch.equal(target, (expected + version).to(dtype)), f"version {version}"
        del rubbish
        source.untyped_storage().resize_(num_bytes)
    assert all(executor.num_builds >= 1 for executor in executors.values())


def test_a_reader_on_another_stream_is_not_overwritten() -> None:
    """The target's old values are still being read when the next version arrives."""
    source, target, network, executors = _executors(torch.float32, same_rank=False)
    expected = expected_values("w", (0, 0), _SHAPE).to("cuda")
    source.copy_(expected)
    network.run({rank: executor.steps() for rank, executor in executors.items()})
    reader, kept = torch.cuda.Stream(), torch.empty_like(target)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(_CYCLES)
        kept.copy_(target)
    source.add_(1.0)
    torch.cuda.current_stream().wait_stream(reader)
    network.run({rank: executor.steps() for rank, executor in executors.items()})
    torch.cuda.synchronize()
    assert torch.equal(kept, expected), "the reader saw the next version"
    assert torch.equal(target, expected + 1.0)
