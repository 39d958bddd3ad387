"""The invariants of realloc plans, by brute force over elements."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_real.realloc_ops.buckets import Slice
from megatron_real.realloc_ops.executor import ReallocExecutor
from megatron_real.realloc_ops.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.shards import DTYPE_BYTES, Box, ParamTable, Shard, ShardEntry
from megatron_real.realloc_ops.transports import LocalNetwork
from tests.synthetic_copies import Copy, SyntheticLayout, SyntheticModel, build_copy

_NUM_RANKS = 8
Element = tuple[str, tuple[int, ...]]


def _elements(key: str, box: Box) -> list[Element]:
    axes = (range(first, first + extent) for first, extent in zip(box.offset, box.shape, strict=True))
    return [(key, point) for point in itertools.product(*axes)]


@st.composite
def _grids(draw: st.DrawFn, shape: tuple[int, ...], ranks: range) -> dict[int, list[Box]]:
    """A random partition of a tensor along random cuts, each box on a random set of ranks."""
    edges = []
    for extent in shape:
        cuts = draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else set()
        edges.append([0, *sorted(cuts), extent])
    held: dict[int, list[Box]] = {}
    for cell in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        box = Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for rank in draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=len(ranks))):
            held.setdefault(rank, []).append(box)
    return held


@st.composite
def _windows(draw: st.DrawFn) -> range:
    start = draw(st.integers(0, _NUM_RANKS - 1))
    return range(start, draw(st.integers(start + 1, _NUM_RANKS)))


@st.composite
def _tables(draw: st.DrawFn) -> tuple[ParamTable, ParamTable]:
    """Any two shardings of the same tensors on any two windows: equal, overlapping or disjoint."""
    shapes = draw(
        st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple), min_size=1, max_size=3)
    )
    tables = []
    src_dtypes = [draw(st.sampled_from(["float32", "bfloat16", "float64"])) for _ in shapes]
    for side in ("src", "dst"):
        window = draw(_windows())
        entries: dict[int, list[ShardEntry]] = {rank: [] for rank in window}
        for index, shape in enumerate(shapes):
            dtype = src_dtypes[index] if side == "src" else draw(st.sampled_from(["float32", "bfloat16"]))
            for rank, boxes in draw(_grids(shape, window)).items():
                entries[rank].extend(ShardEntry(f"t{index}", box, shape, dtype) for box in boxes)
        tables.append(ParamTable.of(entries))
    return tables[0], tables[1]


def _holdings(table: ParamTable, rank: int) -> set[Element]:
    return {element for shard in table.shards_of(rank) for element in _elements(*shard)}


def assert_invariants(src: ParamTable, dst: ParamTable, plan: ReallocPlan, bucket_bytes: int) -> None:
    """The list in the docstring of `plan.py`, checked element by element."""
    ends: Counter[object] = Counter()
    for rank, part in plan.ranks.items():
        held, needed = _holdings(src, rank), Counter[tuple[Shard, Element]]()
        for shard in dst.shards_of(rank):
            needed.update((shard, element) for element in _elements(*shard))
        written: Counter[tuple[Shard, Element]] = Counter()
        received: Counter[Element] = Counter()
        pieces: list[tuple[int, Slice]] = [(rank, piece) for piece in part.copies]
        for message in part.receives:
            assert message.dst == rank != message.src
            assert message.num_bytes == sum(piece.num_bytes for piece in message.slices) <= bucket_bytes
            pieces.extend((message.src, piece) for piece in message.slices)
            received.update(
                element for piece in message.slices for element in _elements(piece.key, piece.box)
            )
        for reader, piece in pieces:
            assert reader in src.owners[Shard(piece.key, piece.src_box)]
            assert piece.src_box.contains(piece.box)
            assert piece.dst_box.contains(piece.box)
            assert piece.num_bytes == piece.box.num_elements * DTYPE_BYTES[src.specs[piece.key].dtype]
            written.update(
                (Shard(piece.key, piece.dst_box), element) for element in _elements(piece.key, piece.box)
            )
        assert written == needed
        assert not held & received.keys()
        bound = sum(
            DTYPE_BYTES[src.specs[shard.key].dtype]
            for shard, element in needed.elements()
            if element not in held
        )
        assert part.bytes_received == part.bytes_bound == bound
        assert len(list(part.receives)) <= bound / bucket_bytes + len(
            {message.src for message in part.receives}
        )
        orders = [step.order for step in part.steps]
        assert orders == sorted(set(orders))
        for step in part.steps:
            ends.update((step.order, message) for message in (step.send, step.receive) if message is not None)
    assert set(ends.values()) <= {2}, "a message must be in a step of equal order on both ends"


def assert_balanced(src: ParamTable, plan: ReallocPlan) -> None:
    """Ranks that hold the same shards send the same bytes, but for the elements that a cut falls into."""
    egress: dict[tuple[Shard, ...], list[int]] = {}
    for rank, part in plan.ranks.items():
        egress.setdefault(src.shards_of(rank), []).append(part.bytes_sent)
    for shards, sent in egress.items():
        owner_sets = {src.owners[shard] for shard in shards}
        assert max(sent) - min(sent) <= 3 * 8 * len(owner_sets)


@given(_tables(), st.sampled_from([16, 48, 1024]))
@settings(max_examples=120, deadline=None)
def test_any_two_shardings_keep_the_invariants(
    tables: tuple[ParamTable, ParamTable], bucket_bytes: int
) -> None:
    plan = build_realloc_plan(*tables, bucket_bytes=bucket_bytes)
    assert_invariants(*tables, plan, bucket_bytes)
    assert_balanced(tables[0], plan)


@given(_tables())
@settings(max_examples=40, deadline=None)
def test_a_rank_plans_its_part_as_all_do(tables: tuple[ParamTable, ParamTable]) -> None:
    plan = build_realloc_plan(*tables, bucket_bytes=64)
    for rank in plan.ranks:
        assert build_realloc_plan(*tables, bucket_bytes=64, rank=rank).of(rank) == plan.of(rank)


@given(_tables())
@settings(max_examples=40, deadline=None)
def test_a_copy_to_itself_sends_nothing(tables: tuple[ParamTable, ParamTable]) -> None:
    plan = build_realloc_plan(tables[0], tables[0])
    assert not any(part.steps for part in plan.ranks.values())


@st.composite
def _layouts(draw: st.DrawFn, model: SyntheticModel) -> SyntheticLayout:
    tp, pp = draw(
        st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3), (4, 2), (1, 4), (2, 4), (8, 1)])
    )
    order = list(range(model.layers))
    if draw(st.booleans()):  # interleaved chunks: layers of a stage are not neighbours
        stages = tuple(tuple(order[stage::pp]) for stage in range(pp))
    else:
        cuts = sorted(draw(st.sets(st.integers(1, model.layers - 1), min_size=pp - 1, max_size=pp - 1)))
        stages = tuple(tuple(order[low:high]) for low, high in itertools.pairwise([0, *cuts, model.layers]))
    dp = draw(st.integers(1, _NUM_RANKS // (tp * pp)))
    start = draw(st.integers(0, _NUM_RANKS - tp * pp * dp))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return SyntheticLayout(start=start, dp=dp, tp=tp, stages=stages, dtype=dtype)


@st.composite
def _models(draw: st.DrawFn) -> tuple[SyntheticModel, SyntheticLayout, SyntheticLayout]:
    model = SyntheticModel(layers=5, tied=draw(st.booleans()), fp32_bias=draw(st.booleans()), kv_groups=4)
    return model, draw(_layouts(model)), draw(_layouts(model))


def _table_of(copies: dict[int, Copy | None]) -> ParamTable:
    return ParamTable.of({rank: copy.shards.entries if copy else () for rank, copy in copies.items()})


# Without shrinking, which would take minutes.
@given(_models(), st.sampled_from([64, 1024, 1 << 20]), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_models_move_there_and_back_bit_for_bit(
    case: tuple[SyntheticModel, SyntheticLayout, SyntheticLayout], bucket_bytes: int, seed: int
) -> None:
    model, here, there = case
    ranks = range(_NUM_RANKS)
    here_copies = {rank: build_copy(model, here, rank) for rank in ranks}
    there_copies = {rank: build_copy(model, there, rank) for rank in ranks}
    narrowest = torch.bfloat16 if torch.bfloat16 in (here.dtype, there.dtype) else torch.float32
    for copy in here_copies.values():
        if copy:
            copy.fill()
    pick = random.Random(seed).choice
    for sources, targets in ((here_copies, there_copies), (there_copies, here_copies)):
        plan = build_realloc_plan(_table_of(sources), _table_of(targets), bucket_bytes=bucket_bytes)
        network = LocalNetwork()
        executors = {
            rank: ReallocExecutor(
                plan.of(rank),
                src=sources[rank].shards if sources[rank] else None,
                dst=targets[rank].shards if targets[rank] else None,
                transport=network.transport(rank),
            )
            for rank in ranks
        }
        for copy in targets.values():
            if copy:
                copy.poison()
        network.run({rank: executor.steps() for rank, executor in executors.items()}, pick=pick)
        for copy in targets.values():
            assert copy is None or not copy.mismatches(narrowest)
        for executor in executors.values():
            assert executor.report.staging_peak_bytes <= 4 * bucket_bytes
        assert sum(network.bytes_by_pair.values()) == sum(part.bytes_bound for part in plan.ranks.values())


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (SyntheticLayout(tp=2, dp=4), SyntheticLayout(tp=1, dp=8)),
        (SyntheticLayout(tp=1, dp=4), SyntheticLayout(tp=4, start=4)),
        (SyntheticLayout(tp=1, dp=3), SyntheticLayout(tp=1, dp=1, start=7)),
        (SyntheticLayout(tp=2, dp=2, stages=((0, 1, 2), (3, 4))), SyntheticLayout(tp=1, dp=8)),
        (SyntheticLayout(tp=2, dp=2), SyntheticLayout(tp=2, dp=2, start=4)),
    ],
)
def test_replicas_share_the_sending(here: SyntheticLayout, there: SyntheticLayout) -> None:
    model = SyntheticModel(layers=5)
    tables = [
        _table_of({rank: build_copy(model, layout, rank) for rank in range(_NUM_RANKS)})
        for layout in (here, there)
    ]
    plan = build_realloc_plan(*tables)
    by_shards: dict[tuple[Shard, ...], list[int]] = {}
    for rank in here.ranks(model):
        by_shards.setdefault(tables[0].shards_of(rank), []).append(plan.of(rank).bytes_sent)
    for sent in by_shards.values():
        assert max(sent) <= 1.2 * sum(sent) / len(sent)
