"""Memory while one copy turns into another: what is freed and allocated when, how much at most, and after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, PlanError, RealError
from megatron_real.realloc_ops.execution.executor import InPlace, ReallocExecutor
from megatron_real.realloc_ops.execution.transports import LocalNetwork
from megatron_real.realloc_ops.planning.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.storage.segments import Segment, SegmentSet
from tests.synthetic_copies import Copy, SyntheticLayout, SyntheticModel, build_copy

MODEL = SyntheticModel(layers=40, hidden=16, ffn=16, vocab=32)
LARGE = SyntheticModel(layers=40, hidden=64, ffn=48, vocab=32)
"""With tensors of up to three buckets."""
BUCKET_BYTES = 8192
PART_BYTES = BUCKET_BYTES // 4
"""Of messages and segments; no tensor of `MODEL` is larger."""
HALVES = tuple(range(20)), tuple(range(20, 40))
LAYOUTS = {
    "t4": SyntheticLayout(tp=4),
    "d4": SyntheticLayout(dp=4),
    "p4": SyntheticLayout(stages=tuple(tuple(range(first, first + 10)) for first in range(0, 40, 10))),
    "t2p2": SyntheticLayout(tp=2, stages=HALVES),
    "t2": SyntheticLayout(tp=2),
    "t2 behind": SyntheticLayout(tp=2, start=2),
    "t8": SyntheticLayout(tp=8),
    "p8": SyntheticLayout(stages=tuple(tuple(range(first, first + 5)) for first in range(0, 40, 5))),
    "p8 turned": SyntheticLayout(stages=tuple(tuple(range(first, 40, 8)) for first in range(8))),
    "p4t2": SyntheticLayout(
        tp=2, stages=tuple(tuple(range(first, first + 10)) for first in range(0, 40, 10))
    ),
}


class _Rank:
    """Both copies of one rank, in one ledger."""

    def __init__(self, rank: int, here: str, there: str, model: SyntheticModel) -> None:
        self._model = model
        self.ledger = MemoryLedger(name=f"rank {rank}")
        self.src = self._build(here, rank, "source")
        self.dst = self._build(there, rank, "destination")

    def _build(self, layout: str, rank: int, owner: str) -> Copy | None:
        copy = build_copy(self._model, LAYOUTS[layout], rank)
        if copy is not None:
            copy.rebind()  # out of the segments that it was made with
            copy.segments = SegmentSet.adopt(
                [copy.module], owner=owner, ledger=self.ledger, segment_bytes=PART_BYTES
            )
            copy = Copy(module=copy.module, shard=copy.shard, segments=copy.segments)
        return copy

    @property
    def sets(self) -> list[SegmentSet]:
        return [copy.segments for copy in (self.src, self.dst) if copy is not None]

    @property
    def in_place(self) -> InPlace:
        return InPlace(
            src=self.src.segments if self.src else None, dst=self.dst.segments if self.dst else None
        )

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Of all parameters, each once."""
        copies = [copy for copy in (self.src, self.dst) if copy is not None]
        parameters = [parameter for copy in copies for parameter in copy.module.parameters()]
        return {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters}


def _setup(
    here: str, there: str, model: SyntheticModel = MODEL, num_ranks: int = 4
) -> tuple[ReallocPlan, list[_Rank]]:
    ranks = [_Rank(rank, here, there, model) for rank in range(num_ranks)]
    tables = [
        ParamTable.of({rank: copy.shards.entries if copy else () for rank, copy in enumerate(side)})
        for side in ([rank.src for rank in ranks], [rank.dst for rank in ranks])
    ]
    for rank in ranks:
        if rank.src:
            rank.src.fill()
        if rank.dst:
            rank.dst.segments.free()
        rank.ledger.reset_peak()
    return build_realloc_plan(*tables, bucket_bytes=PART_BYTES, order="in_place"), ranks


def _executors(plan: ReallocPlan, ranks: list[_Rank], network: LocalNetwork) -> dict[int, ReallocExecutor]:
    return {
        number: ReallocExecutor(
            plan.of(number),
            src=rank.src.shards if rank.src else None,
            dst=rank.dst.shards if rank.dst else None,
            transport=network.transport(number),
            ledger=rank.ledger,
            in_place=rank.in_place,
        )
        for number, rank in enumerate(ranks)
    }


@contextmanager
def _watched(monkeypatch: pytest.MonkeyPatch, ranks: list[_Rank]) -> Iterator[list[int]]:
    """The most bytes that storages of parameters really held, by rank: asked of torch, not of any count of ours."""
    storages = [rank.storages() for rank in ranks]
    peaks = [0] * len(ranks)
    allocate = Segment.allocate

    def spy(segment: Segment) -> None:
        allocate(segment)
        for number, held in enumerate(storages):
            if segment.flat.untyped_storage()._cdata in held:
                peaks[number] = max(peaks[number], sum(storage.nbytes() for storage in held.values()))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "allocate", spy)
        yield peaks


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("t4", "d4"),
        ("d4", "t4"),
        ("p4", "t4"),
        ("t4", "p4"),
        ("t2p2", "d4"),
        ("t2", "t2 behind"),
        ("t2p2", "t2p2"),
    ],
)
def test_the_peak_is_the_larger_copy_and_four_buckets(
    monkeypatch: pytest.MonkeyPatch, here: str, there: str
) -> None:
    plan, ranks = _setup(here, there)
    sizes = [[part.nbytes for part in rank.sets] for rank in ranks]
    assert (
        max(segment.num_bytes for rank in ranks for part in rank.sets for segment in part.segments)
        <= PART_BYTES
    )
    network = LocalNetwork()
    executors = _executors(plan, ranks, network)
    with _watched(monkeypatch, ranks) as peaks:
        network.run({number: executor.steps() for number, executor in executors.items()})
    for number, rank in enumerate(ranks):
        assert rank.dst is None or not rank.dst.mismatches()
        assert rank.src is None or rank.src.segments.allocated_bytes == 0
        bound = max(sizes[number]) + 4 * BUCKET_BYTES
        assert peaks[number] <= rank.ledger.peak_bytes <= bound, f"rank {number}"
        assert len(sizes[number]) == 1 or sum(sizes[number]) > bound, "both copies at once would exceed it"


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=["small tensors", "large tensors"])
@pytest.mark.parametrize(
    ("here", "there"), [("p8", "t8"), ("t8", "p8"), ("p4t2", "t8"), ("p8", "p8 turned"), ("p8", "p4t2")]
)
def test_more_stages_and_larger_tensors(here: str, there: str, model: SyntheticModel) -> None:
    """A segment more for each stage beyond four; of each side the largest tensor counts whole if it is larger."""
    plan, ranks = _setup(here, there, model, 8)
    network = LocalNetwork()
    executors = _executors(plan, ranks, network)
    network.run({number: executor.steps() for number, executor in executors.items()})
    num_stages = max(len(LAYOUTS[layout].stages) for layout in (here, there))
    for number, rank in enumerate(ranks):
        assert not rank.dst.mismatches()
        larger = max(part.nbytes for part in rank.sets)
        largest = [max(segment.num_bytes for segment in part.segments) for part in rank.sets]
        bound = larger + 4 * BUCKET_BYTES + max(num_stages - 4, 0) * PART_BYTES
        bound += sum(size for size in largest if size > PART_BYTES)
        assert rank.ledger.peak_bytes <= bound, f"rank {number}"


def test_the_second_run_binds_nothing() -> None:
    plan, ranks = _setup("t2p2", "t4")
    network = LocalNetwork()
    executors = _executors(plan, ranks, network)
    for _ in range(2):
        for rank in ranks:
            rank.src.segments.allocate()
            rank.src.fill()
        network.run({number: executor.steps() for number, executor in executors.items()})
        for rank in ranks:
            assert not rank.dst.mismatches()
            assert rank.ledger.held() == {"destination": rank.dst.segments.nbytes}
            rank.dst.segments.free()
    assert {executor.num_builds for executor in executors.values()} == {1}


def test_what_does_not_fit_stops_half_way_and_leaves_what_the_ledger_says() -> None:
    plan, ranks = _setup("t4", "d4")
    network = LocalNetwork()
    executors = _executors(plan, ranks, network)
    ranks[2].ledger.capacity_bytes = ranks[2].dst.segments.nbytes * 2 // 3
    with pytest.raises(CapacityError, match="rank 2: destination asks for"):
        network.run({number: executor.steps() for number, executor in executors.items()})
    for rank in ranks:
        held = rank.ledger.held()
        for owner, copy in (("source", rank.src), ("destination", rank.dst)):
            assert held.get(owner, 0) == copy.segments.allocated_bytes
    assert 0 < ranks[2].dst.segments.allocated_bytes < ranks[2].dst.segments.nbytes
    assert ranks[2].src.segments.allocated_bytes < ranks[2].src.segments.nbytes

    with pytest.raises(RealError, match="found its storage freed"):  # the source is not whole any more
        next(executors[2].steps())
    ranks[2].ledger.capacity_bytes = None
    for rank in ranks:
        rank.dst.segments.free()
        rank.src.segments.allocate()
        rank.src.fill()
        assert rank.ledger.held() == {"source": rank.src.segments.nbytes}
    network = LocalNetwork()
    executors = _executors(plan, ranks, network)
    network.run({number: executor.steps() for number, executor in executors.items()})
    for rank in ranks:
        assert not rank.dst.mismatches()
        assert rank.ledger.held() == {"destination": rank.dst.segments.nbytes}


def test_only_one_side_in_place() -> None:
    plan, ranks = _setup("t4", "d4")
    network = LocalNetwork()
    for rank in ranks:
        rank.dst.segments.allocate()
    executors = {
        number: ReallocExecutor(
            plan.of(number),
            src=rank.src.shards,
            dst=rank.dst.shards,
            transport=network.transport(number),
            in_place=InPlace(src=rank.src.segments, dst=None),
        )
        for number, rank in enumerate(ranks)
    }
    network.run({number: executor.steps() for number, executor in executors.items()})
    for rank in ranks:
        assert not rank.dst.mismatches()
        assert rank.src.segments.allocated_bytes == 0


def test_a_parameter_outside_the_segments_is_refused() -> None:
    plan, ranks = _setup("t4", "d4")
    ranks[0].dst.rebind()
    executors = _executors(plan, ranks, LocalNetwork())
    with pytest.raises(PlanError, match=r"in place: found .* outside the segments of destination"):
        next(executors[0].steps())
    assert ranks[0].src.segments.allocated_bytes == ranks[0].src.segments.nbytes, "nothing was freed"


def test_options_that_contradict_each_other_are_refused() -> None:
    plan, ranks = _setup("t4", "d4")
    transport = LocalNetwork().transport(0)
    with pytest.raises(PlanError, match=r"found mix=0\.5 in place"):
        ReallocExecutor(
            plan.of(0), src=None, dst=None, transport=transport, mix=0.5, in_place=ranks[0].in_place
        )
