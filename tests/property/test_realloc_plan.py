"""The invariants of realloc plans, by brute force over elements."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import LocalNetwork
from megatron_real.realloc_ops.planning.plan import ReallocOrder, ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, Shard, ShardEntry
from tests.property.plan_invariants import assert_invariants
from tests.synthetic_copies import Copy, SyntheticLayout, SyntheticModel, build_copy

_NUM_RANKS = 8
_PER_NODE = st.sampled_from([None, 1, 2, 3, 4])
_ORDERS: st.SearchStrategy[ReallocOrder] = st.sampled_from(["fused", "layers", "in_place"])


_NAMES = ["", "embedding.", "decoder.layers.", "decoder.layers.3.", "mtp.layers.0."]


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
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=len(shapes), max_size=len(shapes)))
    tables = []
    src_dtypes = [draw(st.sampled_from(["float32", "bfloat16", "float64"])) for _ in shapes]
    for side in ("src", "dst"):
        window = draw(_windows())
        entries: dict[int, list[ShardEntry]] = {rank: [] for rank in window}
        for index, shape in enumerate(shapes):
            dtype = src_dtypes[index] if side == "src" else draw(st.sampled_from(["float32", "bfloat16"]))
            for rank, boxes in draw(_grids(shape, window)).items():
                entries[rank].extend(
                    ShardEntry(f"{names[index]}t{index}", box, shape, dtype) for box in boxes
                )
        tables.append(ParamTable.of(entries))
    return tables[0], tables[1]


def assert_balanced(src: ParamTable, plan: ReallocPlan) -> None:
    """Ranks that hold the same shards send the same bytes, but for the elements that a cut falls into."""
    egress: dict[tuple[Shard, ...], list[int]] = {}
    for rank, part in plan.ranks.items():
        egress.setdefault(src.shards_of(rank), []).append(part.bytes_sent)
    for shards, sent in egress.items():
        owner_sets = {src.owners[shard] for shard in shards}
        assert max(sent) - min(sent) <= 3 * 8 * len(owner_sets)


@given(_tables(), st.sampled_from([16, 48, 1024]), _PER_NODE, _ORDERS)
@settings(max_examples=200, deadline=None)
def test_any_two_shardings_keep_the_invariants(
    tables: tuple[ParamTable, ParamTable], bucket_bytes: int, per_node: int | None, order: ReallocOrder
) -> None:
    plan = build_realloc_plan(*tables, bucket_bytes=bucket_bytes, devices_per_node=per_node, order=order)
    assert_invariants(*tables, plan, per_node=per_node, large="apart" if order == "in_place" else "alone")
    if per_node is None:
        assert not any(message.relayed for part in plan.ranks.values() for message in part.receives)
        assert_balanced(tables[0], plan)


@given(_tables(), _PER_NODE, _ORDERS)
@settings(max_examples=40, deadline=None)
def test_a_rank_plans_its_part_as_all_do(
    tables: tuple[ParamTable, ParamTable], per_node: int | None, order: ReallocOrder
) -> None:
    options = {"bucket_bytes": 64, "devices_per_node": per_node, "order": order}
    plan = build_realloc_plan(*tables, **options)
    for rank in plan.ranks:
        assert build_realloc_plan(*tables, **options, rank=rank).of(rank) == plan.of(rank)


@given(_tables(), _PER_NODE, _ORDERS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_plan_does_not_depend_on_how_tables_list_their_shards(
    tables: tuple[ParamTable, ParamTable], per_node: int | None, order: ReallocOrder, random: random.Random
) -> None:
    shuffled = []
    for table in tables:
        owners = list(table.owners.items())
        random.shuffle(owners)
        shuffled.append(replace(table, owners=dict(owners)))
    plans = [
        build_realloc_plan(*pair, bucket_bytes=64, devices_per_node=per_node, order=order)
        for pair in (tables, shuffled)
    ]
    assert plans[0] == plans[1]


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
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
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
