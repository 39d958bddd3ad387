"""Bytes of reallocations in closed form against plans over boxes, and prices of equal and moved copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.traffic import Window, realloc_traffic
from megatron_real.plan_search.parameters import param_table
from megatron_real.realloc_ops.planning.buckets import Message
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Shard

WORLD = 16
DENSE = ModelShape(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=8,
    num_query_groups=2,
    ffn_hidden_size=32,
    padded_vocab_size=32,
)
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 16}


@st.composite
def _shapes(draw: st.DrawFn) -> ModelShape:
    changes: dict[str, Any] = {
        name: draw(st.booleans())
        for name in ("tied_embeddings", "scalar_head", "gated_mlp", "linear_bias", "norm_bias", "qk_norm")
    }
    changes["learned_positions"] = draw(st.sampled_from([0, 6]))
    if draw(st.booleans()):
        changes |= EXPERTS
        changes["shared_expert_ffn_hidden_size"] = draw(st.sampled_from([0, 16]))
        changes["num_dense_layers"] = draw(st.sampled_from([0, 1]))
    return replace(DENSE, **changes)


@st.composite
def _windows(draw: st.DrawFn, shape: ModelShape) -> Window:
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 1, 2]))
    rest = WORLD // (tp * pp)
    dp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16) if n * cp <= rest] or [1]))
    cp = cp if dp * cp <= rest else 1
    options: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    if pp == 2 and draw(st.booleans()):
        options["vpp"] = 2
    elif pp == 2 and draw(st.booleans()):
        options["layers"] = draw(st.sampled_from([(1, 3), (3, 1)]))
    if shape.num_experts:
        stage = dp * tp * cp
        cells = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if stage % (ep * etp) == 0]
        options["ep"], options["etp"] = draw(st.sampled_from(cells))
    layout = Layout(**options)
    return Window(draw(st.integers(0, WORLD - layout.size)), layout)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_traffic_is_that_of_the_plan(data: st.DataObject) -> None:
    shape = data.draw(_shapes())
    source, target = data.draw(_windows(shape)), data.draw(_windows(shape))
    per_node = data.draw(st.sampled_from([2, 4, 16]))
    bucket_bytes = data.draw(st.sampled_from([256, 4096, 1 << 25]))
    dtype, itemsize = data.draw(st.sampled_from([("float32", 4), ("bfloat16", 2)]))
    tables = [
        param_table(shape, layout, Mesh(start, start + layout.size), dtype)
        for start, layout in (source, target)
    ]
    plan = build_realloc_plan(*tables, bucket_bytes=bucket_bytes, devices_per_node=per_node)
    found = realloc_traffic(shape, itemsize, source, target, per_node=per_node, bucket_bytes=bucket_bytes)
    origin = min(source.start, target.start)
    for rank, part in plan.ranks.items():
        at = rank - origin
        assert found.received[at] == part.bytes_received
        assert found.sent[at] == part.bytes_sent
        assert found.local[at] == part.bytes_local
        sent, received = _sums(part.sends, rank, per_node), _sums(part.receives, rank, per_node)
        assert (found.sent_within[at], found.sent_across[at], found.sent_relayed[at]) == sent[:3]
        assert (found.received_within[at], found.received_across[at], found.received_relayed[at]) == received[
            :3
        ]
        assert (found.messages_sent[at], found.relays_sent[at]) == sent[3:]
        assert (found.messages_received[at], found.relays_received[at]) == received[3:]
    inside = set(plan.ranks)
    for at in range(len(found.local)):
        if at + origin not in inside:
            assert not found.received[at] + found.sent[at] + found.local[at]


def _sums(messages: Iterable[Message], rank: int, per_node: int) -> tuple[int, ...]:
    """Bytes inside the node, between nodes and relayed; messages of both hops."""
    sums = [0] * 5
    for message in messages:
        peer = message.dst if message.src == rank else message.src
        near = peer // per_node == rank // per_node
        assert near or not message.relayed
        sums[2 if message.relayed else 0 if near else 1] += message.num_bytes
        sums[4 if message.relayed else 3] += 1
    return tuple(sums)


@pytest.mark.parametrize(
    ("source", "target", "start"),
    [
        ("d2t8p1", "d16t1p1", 0),
        ("d2t4p2", "d4t4p1", 0),
        ("d4t2p2", "d16t1p1", 0),
        ("d4t2p1", "d2t4p1", 8),
        ("d8t1p1", "d8t1p1", 8),
        ("d4t2p2e4x1", "d8t2p1e2x1", 0),
    ],
)
def test_replicas_share_the_sending_in_both_hops(source: str, target: str, start: int) -> None:
    layouts = Layout.parse(source), Layout.parse(target)
    shape = replace(DENSE, **EXPERTS) if layouts[0].ep > 1 else DENSE
    src, dst = (
        param_table(shape, layout, Mesh(first, first + layout.size))
        for layout, first in zip(layouts, (0, start), strict=True)
    )
    plan = build_realloc_plan(src, dst, devices_per_node=4)
    assert any(message.src // 4 != rank // 4 for rank in plan.ranks for message in plan.of(rank).receives)
    for table, relayed in ((src, False), (dst, True)):
        egress: dict[tuple[Shard, ...], list[int]] = {}
        for rank in table.ranks:
            sent = sum(message.num_bytes for message in plan.of(rank).sends if message.relayed == relayed)
            egress.setdefault(table.shards_of(rank), []).append(sent)
        for sent_bytes in egress.values():
            assert max(sent_bytes) <= 1.2 * sum(sent_bytes) / len(sent_bytes)
