"""Reallocation between real processes over gloo: many layouts in one launch."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import PeerError, PlanError, RealError
from megatron_real.realloc_ops.execution.executor import ReallocExecutor, ReallocReport
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.proof.versions import VersionStamp
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.harness import run_ranks
from tests.synthetic_copies import Copy, SyntheticLayout, SyntheticModel, build_copy

pytestmark = pytest.mark.dist

_BUCKET_BYTES = 1024
_UNEVEN = ((0,), (1, 2, 3, 4))
_INTERLEAVED = ((0, 2, 4), (1, 3))
_BF16 = torch.bfloat16
CASES = [
    (SyntheticLayout(tp=2, stages=_UNEVEN), SyntheticLayout(dp=4)),
    (SyntheticLayout(dp=4), SyntheticLayout(tp=2, stages=_INTERLEAVED)),
    (SyntheticLayout(tp=4), SyntheticLayout(stages=((0,), (1,), (2,), (3, 4)))),
    (SyntheticLayout(tp=2), SyntheticLayout(tp=1, dp=2, start=2)),
    (SyntheticLayout(tp=1), SyntheticLayout(tp=1, start=3)),
    (SyntheticLayout(tp=2, start=1), SyntheticLayout(tp=4)),
    (SyntheticLayout(tp=2, dp=2, dtype=_BF16), SyntheticLayout(tp=4, dtype=_BF16)),
    (SyntheticLayout(tp=2, dp=2), SyntheticLayout(tp=4, dtype=_BF16)),
    (SyntheticLayout(tp=2, dp=2), SyntheticLayout(tp=2, dp=2)),
]
"""Splits, merges, uneven and interleaved stages, disjoint and overlapping windows, idle ranks, a change of dtype."""
ORDERS = ("fused", "layers", "in_place")


def _make_executor(
    here: Copy | None,
    there: Copy | None,
    group: dist.ProcessGroup,
    ledger: MemoryLedger,
    timeout_s: float = 30.0,
    node_links: bool = True,
    **options: object,
) -> ReallocExecutor:
    src = gather_tables(here.shards.entries if here else (), group)
    dst = gather_tables(there.shards.entries if there else (), group)
    rank = dist.get_rank()
    return ReallocExecutor(
        build_realloc_plan(src, dst, bucket_bytes=_BUCKET_BYTES, rank=rank, **options).of(rank),
        src=here.shards if here else None,
        dst=there.shards if there else None,
        transport=TorchTransport.connect(group, timeout_s=timeout_s, node_links=node_links),
        ledger=ledger,
    )


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("an object collective in a reallocation")


def _run_cases(node_links: bool) -> list[ReallocReport]:
    group = dist.new_group(backend="gloo")
    model = SyntheticModel(layers=5, hidden=16, ffn=32, tied=True, fp32_bias=True, kv_groups=4)
    reports: list[ReallocReport] = []
    for number, (here_layout, there_layout) in enumerate(CASES):
        here = build_copy(model, here_layout, dist.get_rank())
        there = build_copy(model, there_layout, dist.get_rank())
        ledger = MemoryLedger()
        executor = _make_executor(
            *(here, there, group, ledger),
            node_links=node_links,
            order=ORDERS[number % 3],
            devices_per_node=2 if number % 2 else None,
        )
        narrowest = _BF16 if _BF16 in (here_layout.dtype, there_layout.dtype) else torch.float32
        if here:
            here.fill()
        gather, dist.all_gather_object = dist.all_gather_object, _refuse
        try:
            for _ in range(2):
                if there:
                    there.segments.free()  # the second run writes to other addresses
                    there.segments.allocate()
                    there.poison()
                reports.append(executor.run())
                assert there is None or not there.mismatches(narrowest)
                assert executor.num_builds == 1
        finally:
            dist.all_gather_object = gather
        assert ledger.current_bytes == 0
        assert ledger.peak_bytes == reports[-1].staging_peak_bytes
        if there:
            there.rebind()
        executor.run()
        assert there is None or (executor.num_builds == 2 and not there.mismatches(narrowest))
    return reports


@pytest.mark.parametrize("node_links", [True, False], ids=["memory", "gloo"])
def test_all_cases_twice(node_links: bool) -> None:
    by_rank = run_ranks(4, _run_cases, node_links)
    for reports in zip(*by_rank, strict=True):
        for report in reports:
            assert report.bytes_moved == report.bytes_bound
            assert report.staging_peak_bytes <= 4 * _BUCKET_BYTES
        assert sum(r.bytes_moved for r in reports) == sum(r.bytes_sent for r in reports)
    assert sum(r.bytes_moved for reports in by_rank for r in reports) > 0
    assert not any(r.bytes_moved for reports in by_rank for r in reports[-2:]), "equal layouts move nothing"


def _run_with_an_absent_peer() -> str | None:
    """Rank 1 never comes; rank 0 must say so, and the copy must not claim the new version."""
    group = dist.new_group(backend="gloo")
    model = SyntheticModel(layers=5)
    here, there = (build_copy(model, SyntheticLayout(start=start), dist.get_rank()) for start in (1, 0))
    executor = _make_executor(here, there, group, MemoryLedger(), timeout_s=1.0)
    if dist.get_rank() == 1:
        time.sleep(2.5)
        return None
    stamp = VersionStamp("actor d1t1p1@0-0")
    stamp.set(6)
    with pytest.raises(PeerError) as caught, stamp.updating(7):
        executor.run()
    with pytest.raises(RealError, match="expected version 7"):
        stamp.require(7)
    with pytest.raises(RealError, match="half-way"):
        stamp.require(6)
    return str(caught.value)


def test_an_absent_peer_is_named() -> None:
    text, _ = run_ranks(2, _run_with_an_absent_peer)
    assert "rank 1 to rank 0" in text
    assert "decoder" in text or "embedding" in text
    assert "Look at rank 1 first" in text


def _gather_with_a_problem(fail: bool) -> str:
    group = dist.new_group(backend="gloo")
    broken = fail and dist.get_rank() == 1
    try:
        gather_tables(PlanError("fc1.weight: found a copy") if broken else (), group)
    except RealError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_problem_on_one_rank_ends_the_gathering_on_all() -> None:
    texts = run_ranks(3, _gather_with_a_problem, True)
    assert texts[1] == "PlanError: fc1.weight: found a copy"
    for text in (texts[0], texts[2]):
        assert text.startswith("PeerError")
        assert "ranks [1]" in text
        assert "fc1.weight: found a copy" in text


def _stream_beside_collectives() -> tuple[list[int], ReallocReport]:
    """Two models arrive in the background, one behind the other, while another group is busy in this thread."""
    group, busy = (dist.new_group(backend="gloo") for _ in range(2))
    transport = TorchTransport.connect(group, timeout_s=30.0)
    model = SyntheticModel(layers=5, hidden=16, ffn=32, tied=True, kv_groups=4)
    executors, targets = [], []
    for layouts in (
        (SyntheticLayout(tp=4), SyntheticLayout(dp=4)),
        (SyntheticLayout(dp=2), SyntheticLayout(tp=4)),
    ):
        here, there = (build_copy(model, layout, dist.get_rank()) for layout in layouts)
        executor = _make_executor(here, there, group, MemoryLedger(), order="layers")
        executor._transport = transport
        executors.append(executor)
        targets.append(there)
        if here:
            here.fill()
        there.poison()
    streams = [executor.start() for executor in executors]
    sums = []
    for _ in range(30):
        number = torch.ones(1)
        dist.all_reduce(number, group=busy)
        sums.append(int(number))
    for stream, there in zip(streams, targets, strict=True):
        for item in there.sharded:
            stream.wait(stream.wave_of(item.data))
        assert not there.mismatches()
    first, second = (stream.finish() for stream in streams)
    assert second.bytes_moved == second.bytes_bound
    return sums, first


def test_streams_run_beside_collectives_of_other_groups() -> None:
    for sums, report in run_ranks(4, _stream_beside_collectives):
        assert sums == [4] * 30
        assert report.bytes_moved == report.bytes_bound > 0


def _run_after_a_failure() -> list[str]:
    """The receiver fails before its second message; afterwards both ends refuse this group, and another one works."""
    rank = dist.get_rank()
    model = SyntheticModel(layers=5)
    here, there = (build_copy(model, SyntheticLayout(start=start), rank) for start in (1, 0))
    if here:
        here.fill()
    executor = _make_executor(here, there, dist.new_group(backend="gloo"), MemoryLedger(), timeout_s=2.0)
    texts = []
    exchange, calls = executor._transport.exchange, iter(range(100))

    def fail(*parcels: object) -> object:
        if rank == 0 and next(calls) == 1:
            raise MemoryError("the receiver fails")
        return exchange(*parcels)

    executor._transport.exchange = fail
    with pytest.raises((MemoryError, PeerError)) as caught:
        executor.run()
    texts.append(str(caught.value))
    executor._transport.exchange = exchange
    with pytest.raises(RealError, match="over a new group") as caught:
        executor.run()
    texts.append(str(caught.value))
    again = _make_executor(here, there, dist.new_group(backend="gloo"), MemoryLedger())
    again.run()
    assert there is None or not there.mismatches()
    return texts


def test_a_failed_run_ends_the_use_of_its_group() -> None:
    receiver, sender = run_ranks(2, _run_after_a_failure)
    assert receiver[0] == "the receiver fails"
    assert "rank 1 to rank 0" in sender[0]
    assert "Look at rank 0 first" in sender[0]
    for texts in (receiver, sender):
        assert "realloc failed or was interrupted earlier" in texts[1]
