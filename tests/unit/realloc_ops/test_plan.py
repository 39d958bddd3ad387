"""Hand-computed plans, and what is refused. The general invariants are in tests/property/test_realloc_plan.py."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import Any

import pytest

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning import buckets
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, ShardEntry


def _rows(held: dict[int, tuple[int, int]], *, key: str = "w", rows: int = 4) -> ParamTable:
    """A (rows, 3) fp32 tensor; each rank holds rows [start, stop)."""
    return ParamTable.of(
        {
            rank: [ShardEntry(key, Box((start, 0), (stop - start, 3)), (rows, 3), "float32")]
            for rank, (start, stop) in held.items()
        }
    )


def test_a_merge_on_two_ranks() -> None:
    """Rows 0-1 on rank 0, rows 2-3 on rank 1; rank 0 shall hold all: one message of two rows, two rows stay."""
    plan = build_realloc_plan(_rows({0: (0, 2), 1: (2, 4)}), _rows({0: (0, 4)}))
    (message,) = plan.of(0).receives
    assert (message.src, message.dst, message.num_bytes) == (1, 0, 24)
    assert [piece.box for piece in message.slices] == [Box((2, 0), (2, 3))]
    assert [piece.box for piece in plan.of(0).copies] == [Box((0, 0), (2, 3))]
    assert list(plan.of(1).sends) == [message]
    assert plan.of(1).bytes_bound == plan.of(1).bytes_local == 0


def test_large_slices_are_fused_if_asked_for_but_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "ALONE_BYTES", 16)
    tables = [
        ParamTable.of({rank: [ShardEntry(key, Box((0, 0), (4, 3)), (4, 3), "float32") for key in ("v", "w")]})
        for rank in (0, 1)
    ]

    def sizes(**options: Any) -> list[int]:
        return [message.num_bytes for message in build_realloc_plan(*tables, **options).of(0).sends]

    assert sizes() == sizes(fuse_large=False) == sizes(fuse_large=True, order="in_place") == [48, 48]
    assert sizes(fuse_large=True) == [96]


def test_two_replicas_halve_one_tensor() -> None:
    """Ranks 0 and 1 both hold everything, rank 2 nothing: each sends half, cut inside the second row."""
    plan = build_realloc_plan(_rows({0: (0, 3), 1: (0, 3)}, rows=3), _rows({2: (0, 3)}, rows=3))
    first, second = sorted(plan.of(2).receives, key=lambda message: message.src)
    assert [piece.box for piece in first.slices] == [Box((0, 0), (1, 3)), Box((1, 0), (1, 1))]
    assert [piece.box for piece in second.slices] == [Box((1, 1), (1, 2)), Box((2, 0), (1, 3))]
    assert plan.of(0).bytes_sent == 16
    assert plan.of(1).bytes_sent == 20


def test_receivers_spread_over_replicas_without_extra_pairs() -> None:
    plan = build_realloc_plan(_rows({0: (0, 4), 1: (0, 4)}), _rows(dict.fromkeys(range(8), (0, 4))))
    assert [sorted(m.dst for m in plan.of(rank).sends) for rank in (0, 1)] == [[2, 3, 4], [5, 6, 7]]


def test_a_byte_enters_a_node_once_and_spreads_inside_it() -> None:
    """Ranks 4 to 7 are a node without a source: each takes a row from outside and relays it to the three others."""
    src, dst = _rows({0: (0, 4)}), _rows(dict.fromkeys(range(4, 8), (0, 4)))
    plan = build_realloc_plan(src, dst, devices_per_node=4)
    for row, rank in enumerate(range(4, 8)):
        first, *relays = plan.of(rank).receives
        assert (first.src, first.relayed, [piece.box for piece in first.slices]) == (
            0,
            False,
            [Box((row, 0), (1, 3))],
        )
        assert {message.src for message in relays} == {4, 5, 6, 7} - {rank}
        assert all(message.relayed and message.num_bytes == 12 for message in relays)
        assert {piece.src_box for message in relays for piece in message.slices} == {Box((0, 0), (4, 3))}
        assert [step.order[0] for step in plan.of(rank).steps] == [0, 1, 1, 1]
    assert plan.of(0).bytes_sent == 48
    assert "144 bytes are relayed inside nodes" in plan.summary()


def test_a_source_in_the_node_serves_it() -> None:
    """Both nodes have a replica, so nothing crosses; the third node is served by both, half each."""
    src, dst = _rows(dict.fromkeys((0, 2), (0, 4))), _rows(dict.fromkeys(range(5), (0, 4)))
    plan = build_realloc_plan(src, dst, devices_per_node=2)
    assert {rank: {m.src for m in plan.of(rank).receives} for rank in (1, 3)} == {1: {0}, 3: {2}}
    assert {m.src: m.num_bytes for m in plan.of(4).receives} == {0: 24, 2: 24}
    assert not any(message.relayed for part in plan.ranks.values() for message in part.sends)


def test_a_relayed_message_is_of_the_destination_dtype() -> None:
    src = _rows({0: (0, 4)})
    dst = ParamTable.of({rank: [ShardEntry("w", Box((0, 0), (4, 3)), (4, 3), "bfloat16")] for rank in (2, 3)})
    part = build_realloc_plan(src, dst, devices_per_node=2).of(2)
    assert [(message.relayed, message.num_bytes) for message in part.receives] == [(False, 24), (True, 12)]
    assert (part.wire_dtypes, part.relay_dtypes) == ({"w": "float32"}, {"w": "bfloat16"})
    assert part.bytes_bound == 36


def test_layers_travel_in_the_order_of_their_use() -> None:
    held = [
        ("output_layer.w", 0),
        ("decoder.layers.w", 0),
        ("decoder.layers.w", 1),
        ("embedding.w", 0),
        ("decoder.final_layernorm.w", 0),
    ]
    entries = [
        ShardEntry(key, Box((at, 0), (1, 4)), (2 if "layers." in key else 1, 4), "float32")
        for key, at in held
    ]
    tables = ParamTable.of({0: entries}), ParamTable.of({1: entries})
    plan = build_realloc_plan(*tables, bucket_bytes=16, order="layers")
    messages = list(plan.of(1).receives)
    assert [(piece.key, piece.box.offset[0]) for message in messages for piece in message.slices] == [
        ("embedding.w", 0),
        ("decoder.layers.w", 0),
        ("decoder.layers.w", 1),
        ("decoder.final_layernorm.w", 0),
        ("output_layer.w", 0),
    ]
    assert [message.wave for message in messages] == [0, 1, 2, 1 << 20, 1 << 21]
    assert [step.order[1] for step in plan.of(0).steps] == [message.wave for message in messages]


def test_a_node_without_devices_is_refused() -> None:
    with pytest.raises(PlanError, match="found 0 devices per node"):
        build_realloc_plan(_rows({0: (0, 4)}), _rows({0: (0, 4)}), devices_per_node=0)


def test_many_uneven_boxes_are_all_found() -> None:
    """More boxes than are scanned one by one; a long one starts far before the destination box."""
    edges = [0, 20, *range(21, 40)]
    src = _rows(dict(enumerate(itertools.pairwise(edges))), rows=39)
    plan = build_realloc_plan(src, _rows({90: (10, 25)}, rows=39))
    got = sorted((message.src, message.num_bytes // 12) for message in plan.of(90).receives)
    assert got == [(0, 10), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]


def test_the_summary_counts_each_message_once() -> None:
    plan = build_realloc_plan(_rows({0: (0, 2), 1: (2, 4)}), _rows({0: (0, 4)}), bucket_bytes=16)
    text = plan.summary()
    assert "      1      0               24          2" in text
    assert "moved 24 bytes in 2 messages of at most 16 bytes; 24 bytes stay" in text


def test_an_element_without_a_source_is_named() -> None:
    with pytest.raises(
        PlanError, match=r"w: 6 of 12 elements of the destination box \[0:4, 0:3\] have no source"
    ):
        build_realloc_plan(_rows({0: (0, 2)}), _rows({1: (0, 4)}))


def test_overlapping_unequal_sources_are_refused() -> None:
    with pytest.raises(PlanError, match=r"source boxes \[0:3, 0:3\] and \[2:4, 0:3\] overlap"):
        build_realloc_plan(_rows({0: (0, 3), 1: (2, 4)}), _rows({1: (0, 4)}))


def test_a_key_on_one_side_is_refused() -> None:
    with pytest.raises(PlanError, match="value_head: found it on the source side only"):
        build_realloc_plan(_rows({0: (0, 4)}, key="value_head"), _rows({0: (0, 4)}, key="output_layer"))


def test_a_rank_outside_the_plan_is_refused() -> None:
    plan = build_realloc_plan(_rows({0: (0, 4)}), _rows({1: (0, 4)}), rank=1)
    with pytest.raises(PlanError, match="found no part for rank 0"):
        plan.of(0)


def test_planning_imports_no_torch() -> None:
    code = "import sys, megatron_real.realloc_ops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _transformer(*, tp: int, dp: int, layers: int = 80) -> ParamTable:
    entries: dict[int, list[ShardEntry]] = {}
    for tp_rank in range(tp):
        mine = [
            ShardEntry(
                f"layers.{name}", Box((layer, tp_rank * rows // tp, 0), (1, rows // tp, 8192)), (layers, rows, 8192),
                "bfloat16",
            )
            for layer in range(layers)
            for name, rows in (("qkv", 10240), ("proj", 8192), ("gate", 28672), ("up", 28672), ("fc2", 28672))
        ]  # fmt: skip
        for dp_rank in range(dp):
            entries[tp_rank + tp * dp_rank] = mine
    return ParamTable.of(entries)


def test_one_rank_of_1024_plans_a_70b_model_in_a_moment() -> None:
    src, dst = _transformer(tp=8, dp=128), _transformer(tp=4, dp=256)
    started_s = time.process_time()
    part = build_realloc_plan(src, dst, rank=37, devices_per_node=8).of(37)
    assert time.process_time() - started_s < 2.0  # measured 0.05 s
    assert part.bytes_received == part.bytes_bound > 0
