"""The layout of a host store: counted element by element, and dealt out fairly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, ShardEntry, TensorSpec
from megatron_real.realloc_ops.planning.store_layout import nodes_of, store_bytes, store_offsets, store_table

_DTYPES = ("float32", "bfloat16", "uint8")


@st.composite
def _tables(draw: st.DrawFn) -> ParamTable:
    """Tensors cut along one axis over some ranks of the world, in replicas."""
    world = draw(st.integers(1, 6))
    entries: dict[int, list[ShardEntry]] = {rank: [] for rank in range(world)}
    for number in range(draw(st.integers(1, 4))):
        parts = draw(st.integers(1, 3))
        shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 3)))]
        axis = draw(st.integers(0, len(shape) - 1))
        shape[axis] *= parts
        dtype = draw(st.sampled_from(_DTYPES))
        for part in range(parts):
            offset, local = [0] * len(shape), list(shape)
            local[axis] //= parts
            offset[axis] = part * local[axis]
            box = Box(tuple(offset), tuple(local))
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                entries[rank].append(ShardEntry(f"w{number}", box, tuple(shape), dtype))
    return ParamTable.of(entries)


def _count(table: ParamTable, key: str, ranks: tuple[int, ...]) -> np.ndarray:
    counted = np.zeros(table.specs[key].global_shape, dtype=int)
    for rank in ranks:
        for shard in table.shards_of(rank):
            if shard.key == key:
                counted[tuple(slice(o, o + n) for o, n in zip(*shard.box, strict=True))] += 1
    return counted


@settings(deadline=None, max_examples=150)
@given(_tables(), st.integers(1, 4))
def test_every_node_has_each_element_once_and_receives_what_it_lacks(src: ParamTable, per_node: int) -> None:
    nodes = nodes_of(src.ranks, per_node)
    assert sorted(rank for node in nodes for rank in node) == list(src.ranks)
    store = store_table(src, nodes)
    assert store.specs == {key: src.specs[key] for key in store.specs}
    for node in nodes:
        for key in src.specs:
            assert (_count(store, key, node) == 1).all()
    plan = build_realloc_plan(src, store, bucket_bytes=16)
    for node in nodes:
        lacking = sum(
            int((_count(src, key, node) == 0).sum()) * spec.itemsize_bytes for key, spec in src.specs.items()
        )
        messages = [message for rank in node for message in plan.of(rank).receives]
        assert not any(message.src in node for message in messages)
        assert sum(message.num_bytes for message in messages) == lacking


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=6), st.integers(1, 5))
def test_ranks_that_hold_the_same_get_equal_parts(shapes: list[tuple[int, int]], size: int) -> None:
    entries = [
        ShardEntry(f"w{number}", Box((0, 0), shape), shape, "float32") for number, shape in enumerate(shapes)
    ]
    src = ParamTable.of(dict.fromkeys(range(size), entries))
    store = store_table(src, nodes_of(range(size), size))
    parts = [sum(shard.box.num_elements * 4 for shard in store.shards_of(rank)) for rank in range(size)]
    assert sum(parts) == sum(rows * columns * 4 for rows, columns in shapes)
    assert max(parts) - min(parts) <= 2 * 4


def test_a_store_has_room_for_each_tensor_in_its_dtype() -> None:
    specs = {
        "b": TensorSpec((3, 5), "bfloat16"),
        "a": TensorSpec((), "float32"),
        "c": TensorSpec((65,), "uint8"),
    }
    offsets, num_bytes = store_offsets(specs)
    assert offsets == {"a": 0, "b": 128, "c": 256}
    assert num_bytes == store_bytes(specs) == 384


def test_nodes_must_be_disjoint() -> None:
    src = ParamTable.of({0: [ShardEntry("w", Box((0,), (4,)), (4,), "float32")]})
    for nodes in ((), ((0, 1), (1, 2))):
        with pytest.raises(PlanError, match="each rank in one node"):
            store_table(src, nodes)


def test_the_store_may_have_another_dtype() -> None:
    src = ParamTable.of({0: [ShardEntry("w", Box((0,), (4,)), (4,), "float32")], 1: []})
    store = store_table(src, ((1,),), {"w": TensorSpec((4,), "bfloat16")})
    assert store.specs == {"w": TensorSpec((4,), "bfloat16")}
    assert build_realloc_plan(src, store).of(1).bytes_received == 16
