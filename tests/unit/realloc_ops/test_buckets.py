from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.buckets import Slice, cut_range, fill_messages
from megatron_real.realloc_ops.planning.shards import Box


def _slice(order: int, shape: tuple[int, ...], itemsize_bytes: int) -> Slice:
    box = Box((0,) * len(shape), shape)
    return Slice(order, f"t{order}", box, box, box, box.num_elements * itemsize_bytes)


def _slices() -> st.SearchStrategy[list[Slice]]:
    shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
    items = st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=6)
    return items.map(lambda found: [_slice(order, *item) for order, item in enumerate(found)])


@given(_slices(), st.sampled_from([16, 32, 40, 256]))
@settings(max_examples=200, deadline=None)
def test_messages_are_full_aligned_and_complete(slices: list[Slice], bucket_bytes: int) -> None:
    messages = fill_messages(0, 1, slices, bucket_bytes)
    capacity_bytes = bucket_bytes // 16 * 16
    total_bytes = sum(piece.num_bytes for piece in slices)
    assert [message.index for message in messages] == list(range(len(messages)))
    assert [message.num_bytes for message in messages[:-1]] == [capacity_bytes] * (len(messages) - 1)
    assert sum(message.num_bytes for message in messages) == total_bytes
    assert len(messages) <= total_bytes / capacity_bytes + 1
    elements: dict[str, int] = {}
    for message in messages:
        start = 0
        for piece in message.slices:
            assert start % piece.itemsize_bytes == 0
            start += piece.num_bytes
            elements[piece.key] = elements.get(piece.key, 0) + piece.box.num_elements
        assert start == message.num_bytes
    assert elements == {piece.key: piece.box.num_elements for piece in slices}


@given(_slices(), st.lists(st.integers(0, 3), min_size=6, max_size=6), st.sampled_from([16, 32, 48, 256]))
@settings(max_examples=500, deadline=None)
def test_messages_follow_the_waves(slices: list[Slice], waves: list[int], bucket_bytes: int) -> None:
    slices = [piece._replace(wave=wave) for piece, wave in zip(slices, waves, strict=False)]
    messages = fill_messages(0, 1, slices, bucket_bytes, relayed=True)
    total_bytes = sum(piece.num_bytes for piece in slices)
    assert len(messages) <= total_bytes / bucket_bytes + 1
    assert [message.index for message in messages] == list(range(len(messages)))
    moved = [piece for message in messages for piece in message.slices]
    for piece in slices:
        parts = [found.box for found in moved if found.order == piece.order]
        assert sum(box.num_elements for box in parts) == piece.box.num_elements
        assert not any(one.intersect(other) for one, other in itertools.combinations(parts, 2))
    for message in messages:
        assert message.relayed
        assert message.num_bytes == sum(piece.num_bytes for piece in message.slices) <= bucket_bytes
        assert message.wave == min(piece.wave for piece in message.slices)
        layout = [(-piece.itemsize_bytes, piece.wave) for piece in message.slices]
        assert layout == sorted(layout)
    for message, following in itertools.pairwise(messages):
        assert message.wave <= following.wave
        early = sum(piece.num_bytes for piece in message.slices if piece.wave > following.wave)
        assert early < max(piece.itemsize_bytes for piece in slices)


def test_what_is_left_of_a_wave_does_not_wait_for_large_slices_of_the_next() -> None:
    """The gap behind the small slice takes the last rows of the large one, whose first rows stay whole messages."""
    small, large = _slice(0, (12,), 4), _slice(1, (12, 4), 4)._replace(wave=1)
    first, *whole, rest = fill_messages(0, 1, [large, small], 64)
    assert [(piece.key, piece.box) for piece in first.slices] == [
        ("t0", small.box),
        ("t1", Box((11, 0), (1, 4))),
    ]
    assert [piece.box for message in whole for piece in message.slices] == [
        Box((0, 0), (4, 4)),
        Box((4, 0), (4, 4)),
    ]
    assert (first.wave, whole[0].wave, rest.wave) == (0, 1, 1)


def test_a_large_wave_shares_no_message_if_it_is_apart() -> None:
    """In place its tensor would be begun with the wave before it, and kept until that after it."""
    before, large, after = _slice(0, (12,), 4), _slice(1, (9, 4), 4)._replace(wave=1), _slice(2, (2,), 4)
    after = after._replace(wave=2)
    messages = fill_messages(0, 1, [after, large, before], 64, large="apart")
    assert [[piece.key for piece in message.slices] for message in messages] == [
        ["t0"],
        *[["t1"]] * 3,
        ["t2"],
    ]
    assert [message.num_bytes for message in messages] == [48, 64, 64, 16, 8]


def test_a_gap_that_a_large_element_leaves_is_filled_with_small_ones() -> None:
    slices = [
        _slice(0, (7,), 2),
        _slice(1, (1,), 4)._replace(wave=1),
        _slice(2, (3,), 2)._replace(wave=2),
    ]
    first, second = fill_messages(0, 1, slices, 16)
    assert [(piece.key, piece.num_bytes) for piece in first.slices] == [("t0", 14), ("t2", 2)]
    assert [(piece.key, piece.num_bytes) for piece in second.slices] == [("t1", 4), ("t2", 4)]


@given(_slices(), st.lists(st.integers(0, 2000), max_size=4))
@settings(max_examples=200, deadline=None)
def test_adjacent_ranges_neither_overlap_nor_leave_a_gap(slices: list[Slice], cuts: list[int]) -> None:
    total_bytes = sum(piece.num_bytes for piece in slices)
    edges = [0, *sorted(min(cut, total_bytes) for cut in cuts), total_bytes]
    taken = [piece for low, high in itertools.pairwise(edges) for piece in cut_range(slices, low, high)]
    merged: dict[int, int] = {}
    for piece in taken:
        merged[piece.order] = merged.get(piece.order, 0) + piece.box.num_elements
    assert merged == {piece.order: piece.box.num_elements for piece in slices}
    assert [piece.order for piece in taken] == sorted(piece.order for piece in taken)


def test_a_large_tensor_gets_whole_messages_of_its_own() -> None:
    small, large = _slice(0, (3,), 4), _slice(1, (10, 4), 4)
    first, second, rest = fill_messages(0, 1, [small, large], 64)
    assert [piece.box for piece in first.slices] == [Box((0, 0), (4, 4))]
    assert [piece.box for piece in second.slices] == [Box((4, 0), (4, 4))]
    assert [(piece.key, piece.box) for piece in rest.slices] == [
        ("t0", small.box),
        ("t1", Box((8, 0), (2, 4))),
    ]


def test_what_needs_no_copy_if_it_is_alone_travels_alone() -> None:
    shard = Box((0, 0), (1024, 256))
    rows, columns = Box((512, 0), (256, 256)), Box((0, 128), (1024, 128))
    pieces = {
        "rows of both": (shard, shard, rows),
        "rows of one": (shard, Box((512, 0), (512, 512)), rows),
        "columns": (shard, shard, columns),
        "small": (shard, shard, Box((0, 0), (255, 256))),
        "one that is the whole shard": (columns, shard, columns),
    }
    slices = [
        Slice(order, key, src, dst, box, box.num_elements * 4)
        for order, (key, (src, dst, box)) in enumerate(pieces.items())
    ]
    messages = fill_messages(0, 1, slices, 32 << 20)
    assert [[piece.key for piece in message.slices] for message in messages] == [
        ["rows of both"],
        ["rows of one"],
        ["one that is the whole shard"],
        ["columns", "small"],
    ]
    (fused,) = fill_messages(0, 1, slices, 32 << 20, large="fused")
    assert [piece.key for piece in fused.slices] == list(pieces)
    late = slices[0]._replace(wave=1)
    first, second = fill_messages(0, 1, [late, slices[3]], 32 << 20)
    assert [first.slices[0].key, second.slices[0].key] == ["small", "rows of both"]


def test_many_small_tensors_need_few_messages() -> None:
    slices = [_slice(order, (1024,), 4) for order in range(18_432)]
    assert len(fill_messages(0, 1, slices, 32 << 20)) == -(-18_432 * 4096 // (32 << 20))


def test_a_bucket_smaller_than_an_element_is_refused() -> None:
    with pytest.raises(PlanError, match="found a bucket of 15 bytes; expected at least 16"):
        fill_messages(0, 1, [_slice(0, (3,), 4)], 15)


def test_a_message_names_its_tensors() -> None:
    (message,) = fill_messages(3, 5, [_slice(order, (2,), 4) for order in range(5)], 64)
    assert str(message) == "message 0 from rank 3 to rank 5 (40 bytes: t0, t1, t2 and 2 more)"
