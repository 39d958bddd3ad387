"""What only a CUDA device can show: device memory, pinned host copies, NCCL, gloo that stages through the host."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_real.device_memory import MemoryLedger
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.storage.local_shards import LocalShards, gather_tables, local_table
from megatron_real.realloc_ops.storage.segments import SegmentSet
from tests.synthetic_copies import FakeShardedTensor, expected_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: tests device storages and NCCL"
    ),
]
_ROWS, _COLUMNS = 1024, 512


def test_segments_free_device_memory_and_use_pinned_host_copies() -> None:
    module = torch.nn.Linear(4096, 4096, device="cuda")
    weight = module.weight.detach().clone()
    ledger = MemoryLedger()
    before = torch.cuda.memory_allocated()
    segments = SegmentSet.adopt([module], owner="ref", ledger=ledger)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2**20, "the old storages must be gone"
    segments.to_host()
    assert before - torch.cuda.memory_allocated() >= segments.nbytes - 2**20
    assert all(segment._host is not None and segment._host.is_pinned() for segment in segments.segments)
    segments.from_host()
    assert torch.equal(module.weight, weight)
    assert ledger.current_bytes == segments.nbytes


def _matrix(rank: int, axis: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, LocalShards]:
    """A (rows, columns) matrix split along `axis` over `size` ranks, on the device."""
    shape, offset = [_ROWS, _COLUMNS], [0, 0]
    shape[axis] //= size
    offset[axis] = rank * shape[axis]
    data = torch.zeros(shape, dtype=dtype, device="cuda")
    tensor = FakeShardedTensor(
        key="w",
        data=data,
        local_shape=tuple(shape),
        global_shape=(_ROWS, _COLUMNS),
        global_offset=tuple(offset),
    )
    return data, local_table([tensor], [("w", data)])


def _expected(data: torch.Tensor, rank: int, axis: int) -> torch.Tensor:
    offset = tuple(rank * data.shape[axis] if index == axis else 0 for index in range(2))
    return expected_values("w", offset, tuple(data.shape)).to("cuda")


def _exchange(rank: int, size: int, folder: str, backend: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    source, src = _matrix(rank, 0, size, torch.float32)
    target, dst = _matrix(rank, 1, size, torch.bfloat16)
    source.copy_(_expected(source, rank, 0))
    plan = build_realloc_plan(
        gather_tables(src.entries, group), gather_tables(dst.entries, group), bucket_bytes=65536
    )
    executor = ReallocExecutor(
        plan.of(rank),
        src=src,
        dst=dst,
        transport=TorchTransport.connect(group, timeout_s=60.0),
        ledger=MemoryLedger(),
    )
    for _ in range(2):
        target.fill_(float("nan"))
        report = executor.run()
        assert torch.equal(target, _expected(target, rank, 1).to(torch.bfloat16))
        assert report.bytes_moved == report.bytes_bound == source.numel() // size * (size - 1) * 4
    assert executor.num_builds == 1
    dist.destroy_process_group()


def _launch(size: int, backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")  # CUDA does not survive a fork
        ranks = [
            context.Process(target=_exchange, args=(rank, size, folder, backend)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=120)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        assert codes == [0] * size


def test_nccl_with_one_rank_copies_on_the_device() -> None:
    _launch(1, "nccl")


def test_two_ranks_on_one_card_stage_through_the_host_over_gloo() -> None:
    _launch(2, "gloo")


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one"
)
def test_nccl_between_two_ranks() -> None:
    _launch(2, "nccl")
