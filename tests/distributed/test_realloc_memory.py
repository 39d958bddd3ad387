"""What a reallocation really takes beside its two copies: the peak of each process, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.storage.local_shards import LocalShards, gather_tables, local_table
from tests.harness import run_ranks
from tests.synthetic_copies import FakeShardedTensor

pytestmark = pytest.mark.dist

_MIB = 2**20
_BUCKET_BYTES = _MIB
_SLACK_BYTES = 3 * _MIB
"""Thread stacks, gloo's own memory, and what the kernel counts late."""


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _growth_bytes(run: Callable[[], object]) -> int:
    """How much the process's memory grew at most while `run` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _rows(
    count: int, rows: int, columns: int, *, first: int, held: int, stored_by_column: bool
) -> LocalShards:
    """`held` rows from `first` of each of `count` tensors."""
    sharded, named = [], []
    for index in range(count):
        data = torch.full((held, columns), float(index))
        if stored_by_column:
            data = data.t().contiguous().t()
        sharded.append(
            FakeShardedTensor(
                key=f"w{index}", data=data, local_shape=(held, columns), global_shape=(rows, columns),
                global_offset=(first, 0),
            )
        )  # fmt: skip
        named.append((f"w{index}", data))
    return local_table(sharded, named)


def _merge(count: int, rows: int, columns: int, receivers: list[int]) -> tuple[int, int]:
    """Rows over all ranks to whole tensors on `receivers`: bytes that the second run needs, and staging in its report.

    The destination is stored by column, so that nothing goes straight into it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    held = rows // size
    src = _rows(count, rows, columns, first=rank * held, held=held, stored_by_column=False)
    dst = (
        _rows(count, rows, columns, first=0, held=rows, stored_by_column=True) if rank in receivers else None
    )
    group = dist.new_group(backend="gloo")
    tables = [gather_tables(side.entries if side else (), group) for side in (src, dst)]
    plan = build_realloc_plan(*tables, bucket_bytes=_BUCKET_BYTES, rank=rank)
    executor = ReallocExecutor(plan.of(rank), src=src, dst=dst, transport=TorchTransport.connect(group))
    executor.run()
    dist.barrier()
    growth = _growth_bytes(executor.run)
    return growth, executor.report.staging_peak_bytes


@pytest.mark.parametrize(
    ("count", "rows", "columns"),
    [(1, 4096, 4096), (200, 320, 256)],
    ids=["one tensor of 64 buckets", "200 tensors"],
)
def test_beside_the_copies_a_reallocation_takes_four_buckets(count: int, rows: int, columns: int) -> None:
    for growth, staging in run_ranks(2, _merge, count, rows, columns, [1]):
        assert staging <= 4 * _BUCKET_BYTES
        assert growth <= 4 * _BUCKET_BYTES + _SLACK_BYTES


def test_no_rank_gathers_for_the_others() -> None:
    growths = [growth for growth, _ in run_ranks(4, _merge, 4, 1024, 1024, [0, 1, 2, 3])]
    copies = 4 * (1 + 1 / 4) * 4 * _MIB
    assert (max(growths) - min(growths)) / (copies + min(growths)) <= 0.1
