"""Staging, local transport and error paths. Whole reallocations: tests/property and tests/distributed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, ConfigError, PeerError, PlanError, RealError
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.regions import Regions
from megatron_real.realloc_ops.execution.transports import LocalNetwork, Parcel
from megatron_real.realloc_ops.planning.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from tests.synthetic_copies import FakeShardedTensor


def _shards(rows: torch.Tensor, first_row: int, num_rows: int) -> LocalShards:
    tensor = FakeShardedTensor(
        key="w", data=rows, local_shape=tuple(rows.shape), global_shape=(num_rows, rows.shape[1]),
        global_offset=(first_row, 0),
    )  # fmt: skip
    return local_table([tensor], [("w", rows)])


def _pair(
    bucket_bytes: int, *, dtype: torch.dtype = torch.float32, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor, ReallocPlan, dict[int, ReallocExecutor], LocalNetwork]:
    """Rank 0 sends an (8, 4) fp32 tensor to rank 1."""
    source = torch.arange(32.0).view(8, 4)
    target = torch.zeros(4, 8, dtype=dtype).t() if transposed else torch.zeros(8, 4, dtype=dtype)
    src, dst = _shards(source, 0, 8), _shards(target, 0, 8)
    plan = build_realloc_plan(
        ParamTable.of({0: src.entries}), ParamTable.of({1: dst.entries}), bucket_bytes=bucket_bytes
    )
    network = LocalNetwork()
    executors = {
        0: ReallocExecutor(
            plan.of(0), src=src, dst=None, transport=network.transport(0), ledger=MemoryLedger()
        ),
        1: ReallocExecutor(
            plan.of(1), src=None, dst=dst, transport=network.transport(1), ledger=MemoryLedger()
        ),
    }
    return source, target, plan, executors, network


@pytest.mark.parametrize(
    ("dtype", "transposed", "staging"),
    [(torch.float32, False, (0, 0)), (torch.bfloat16, False, (0, 64)), (torch.float32, True, (0, 64))],
)
def test_only_what_is_not_contiguous_or_changes_dtype_is_staged(
    dtype: torch.dtype, transposed: bool, staging: tuple[int, int]
) -> None:
    source, target, plan, executors, network = _pair(32, dtype=dtype, transposed=transposed)
    network.run({rank: executor.steps() for rank, executor in executors.items()})
    assert torch.equal(target, source.to(dtype))
    assert tuple(executor.report.staging_peak_bytes for executor in executors.values()) == staging
    assert network.messages_by_pair == {(0, 1): 4}
    assert plan.of(1).bytes_received == network.bytes_by_pair[0, 1] == 128


@pytest.mark.parametrize("pick", [min, max], ids=["sender first", "receiver first"])
def test_messages_in_flight_do_not_share_a_buffer(pick: Callable[[list[int]], int]) -> None:
    """Both ends staged. The end that goes first posts two messages before the other end takes or gives any."""
    source = torch.arange(32.0).view(4, 8).t()
    target = torch.zeros(4, 8).t()
    src, dst = _shards(source, 0, 8), _shards(target, 0, 8)
    plan = build_realloc_plan(
        ParamTable.of({0: src.entries}), ParamTable.of({1: dst.entries}), bucket_bytes=16
    )
    network = LocalNetwork()
    sender = ReallocExecutor(plan.of(0), src=src, dst=None, transport=network.transport(0))
    receiver = ReallocExecutor(plan.of(1), src=None, dst=dst, transport=network.transport(1))
    network.run({0: sender.steps(), 1: receiver.steps()}, pick=pick)
    assert torch.equal(target, source)
    assert sender.report.staging_peak_bytes == receiver.report.staging_peak_bytes == 32


def test_staging_is_booked_and_given_back() -> None:
    *_, executors, network = _pair(32, transposed=True)
    ledger = executors[1]._ledger
    assert ledger is not None
    network.run({rank: executor.steps() for rank, executor in executors.items()})
    assert (ledger.peak_bytes, ledger.current_bytes) == (64, 0)
    ledger.capacity_bytes = 63
    with pytest.raises(CapacityError, match="realloc staging asks for 64 bytes"):
        executors[1].run()
    ledger.capacity_bytes = None
    network.run({rank: executor.steps() for rank, executor in executors.items()})


def test_a_run_alone_reports_the_deadlock() -> None:
    *_, executors, network = _pair(32)
    with pytest.raises(
        RealError, match=r"ranks \[1\] wait for each other: \['message 0 from rank 0 to rank 1"
    ):
        network.run({1: executors[1].steps()})
    *_, others, _ = _pair(32)
    with pytest.raises(PeerError, match="can only complete under LocalNetwork"):
        others[0].run()
    with pytest.raises(RealError, match="no run has finished on rank 1"):
        _ = executors[1].report


def test_messages_of_unequal_size_are_refused() -> None:
    network = LocalNetwork()
    network.transport(0).exchange(
        Parcel(peer=1, memory=Regions(torch.zeros(4, dtype=torch.uint8)), label="m"), None
    )
    with pytest.raises(RealError, match="m: found 4 bytes sent; expected 5"):
        network.transport(1).exchange(
            None, Parcel(peer=0, memory=Regions(torch.zeros(5, dtype=torch.uint8)), label="m")
        )


def test_shards_of_another_copy_are_refused() -> None:
    *_, plan, _, network = _pair(32)
    other = _shards(torch.zeros(4, 4), 0, 8)
    executor = ReallocExecutor(plan.of(1), src=None, dst=other, transport=network.transport(1))
    with pytest.raises(PlanError, match=r"the plan uses w \[0:8, 0:4\] of the destination on rank 1"):
        executor.run()


def test_a_freed_copy_is_refused_before_anything_moves() -> None:
    source, _, _, executors, network = _pair(32)
    source.untyped_storage().resize_(0)
    with pytest.raises(RealError, match="w: found its storage freed"):
        executors[0].run()
    assert not network.bytes_by_pair


@pytest.mark.parametrize("mix", [0.0, -0.1, 1.5])
def test_shares_outside_the_unit_interval_are_refused(mix: float) -> None:
    *_, plan, _, network = _pair(32)
    with pytest.raises(ConfigError, match="expected more than 0 and at most 1"):
        ReallocExecutor(plan.of(1), src=None, dst=None, transport=network.transport(1), mix=mix)


def test_mixing_does_not_go_with_relays() -> None:
    source = _shards(torch.zeros(8, 4), 0, 8)
    targets = {rank: _shards(torch.zeros(8, 4), 0, 8) for rank in (2, 3)}
    plan = build_realloc_plan(
        ParamTable.of({0: source.entries}),
        ParamTable.of({rank: shards.entries for rank, shards in targets.items()}),
        devices_per_node=2,
    )
    assert any(message.relayed for message in plan.of(2).sends)
    with pytest.raises(PlanError, match=r"found mix=0\.5 with a plan of two hops"):
        ReallocExecutor(plan.of(2), src=None, dst=targets[2], transport=LocalNetwork().transport(2), mix=0.5)


def test_nothing_is_received_straight_into_what_is_mixed() -> None:
    source, target, _, executors, network = _pair(32)
    target.fill_(100.0)
    executors[1] = ReallocExecutor(
        executors[1]._plan, src=None, dst=executors[1]._dst, transport=network.transport(1), mix=0.25
    )
    network.run({rank: executor.steps() for rank, executor in executors.items()})
    assert torch.equal(target, source * 0.25 + 75.0)
    assert executors[1].report.staging_peak_bytes == 64
