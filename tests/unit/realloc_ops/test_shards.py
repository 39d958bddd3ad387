from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, Shard, ShardEntry, require_same_tensors


def _points(box: Box) -> list[tuple[int, ...]]:
    """In row-major order."""
    axes = (range(first, first + extent) for first, extent in zip(box.offset, box.shape, strict=True))
    return list(itertools.product(*axes))


@st.composite
def _boxes(draw: st.DrawFn, ndim: int) -> Box:
    axis = st.tuples(st.integers(0, 3), st.integers(1, 4))
    pairs = draw(st.lists(axis, min_size=ndim, max_size=ndim))
    return Box(tuple(offset for offset, _ in pairs), tuple(extent for _, extent in pairs))


@given(st.integers(0, 3).flatmap(lambda ndim: st.tuples(_boxes(ndim), _boxes(ndim))))
@settings(max_examples=200, deadline=None)
def test_intersection_and_containment_are_those_of_sets(boxes: tuple[Box, Box]) -> None:
    one, other = boxes
    common = one.intersect(other)
    assert set(_points(common) if common else ()) == set(_points(one)) & set(_points(other))
    assert one.contains(other) == (set(_points(other)) <= set(_points(one)))


@given(st.integers(0, 3).flatmap(_boxes), st.integers(-1, 70))
@settings(max_examples=200, deadline=None)
def test_split_cuts_in_row_major_order(box: Box, count: int) -> None:
    head, tail = box.split(count)
    points = _points(box)
    assert [point for part in head for point in _points(part)] == points[: max(count, 0)]
    assert [point for part in tail for point in _points(part)] == points[max(count, 0) :]
    assert len(head) <= max(1, len(box.shape))
    assert len(tail) <= max(1, len(box.shape))


def test_slices_are_relative_to_the_outer_box() -> None:
    assert Box((2, 6), (1, 3)).slices_in(Box((2, 4), (1, 8))) == (slice(0, 1), slice(2, 5))


def test_a_table_groups_replicas() -> None:
    half, other = Box((0,), (2,)), Box((2,), (2,))
    table = ParamTable.of(
        {
            5: [ShardEntry("w", half, (4,), "float32")] * 2,
            1: [ShardEntry("w", half, (4,), "float32"), ShardEntry("w", other, (4,), "float32")],
            3: [],
        }
    )
    assert table.ranks == (1, 3, 5)
    assert table.owners == {Shard("w", half): (1, 5), Shard("w", other): (1,)}
    assert table.shards_of(5) == (Shard("w", half),)
    assert table.shards_of(3) == ()


def test_shards_of_equal_owners_share_one_tuple() -> None:
    """Also where ranks made their entries themselves, one of them in another order."""

    def entries(*keys: str) -> list[ShardEntry]:
        return [ShardEntry(key, Box((0,), (2,)), (2,), "float32") for key in keys]

    table = ParamTable.of({0: entries("a", "b"), 1: entries("a", "b"), 2: entries("b", "a"), 3: entries("c")})
    a, b, c = (table.owners[Shard(key, Box((0,), (2,)))] for key in "abc")
    assert a is b
    assert (a, c) == ((0, 1, 2), (3,))


def test_a_table_lists_every_contradiction() -> None:
    box = Box((0,), (2,))
    with pytest.raises(PlanError) as caught:
        ParamTable.of(
            {
                0: [
                    ShardEntry("shape", box, (4,), "float32"),
                    ShardEntry("dtype", box, (4,), "float32"),
                    ShardEntry("quantised", box, (4,), "float8_e4m3fn"),
                    ShardEntry("outside", Box((3,), (2,)), (4,), "float32"),
                ],
                1: [ShardEntry("shape", box, (6,), "float32"), ShardEntry("dtype", box, (4,), "bfloat16")],
            }
        )
    text = str(caught.value)
    assert "4 problems" in text
    assert "shape: found float32 [6] on rank 1; expected float32 [4]" in text
    assert "dtype: found bfloat16 [4] on rank 1" in text
    assert "quantised: found dtype float8_e4m3fn" in text
    assert "outside: found a shard at [3] of shape [2]" in text


def test_two_tables_must_describe_the_same_tensors() -> None:
    def table(**shapes: int) -> ParamTable:
        return ParamTable.of(
            {0: [ShardEntry(key, Box((0,), (rows,)), (rows,), "float32") for key, rows in shapes.items()]}
        )

    require_same_tensors(table(a=2, b=3), table(b=3, a=2))
    with pytest.raises(PlanError) as caught:
        require_same_tensors(table(head=1, vocab=1000, same=2), table(extra=1, vocab=1024, same=2))
    text = str(caught.value)
    assert "head: found it on the source side only" in text
    assert "extra: found it on the destination side only" in text
    assert "vocab: found global shape [1000] on the source side; expected [1024]" in text
    assert "same" not in text.replace("the same", "")
