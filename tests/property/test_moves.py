"""Bytes of reallocations in closed form against plans over boxes, and prices of equal and moved copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.traffic import Window, realloc_traffic
from megatron_real.plan_search.parameters import param_table
from megatron_real.realloc_ops.plan import build_realloc_plan

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
    plan = build_realloc_plan(*tables, bucket_bytes=bucket_bytes)
    found = realloc_traffic(shape, itemsize, source, target, per_node=per_node, bucket_bytes=bucket_bytes)
    origin = min(source.start, target.start)
    for rank, part in plan.ranks.items():
        at = rank - origin
        assert found.received[at] == part.bytes_received
        assert found.sent[at] == part.bytes_sent
        assert found.local[at] == part.bytes_local
        sends, receives = list(part.sends), list(part.receives)
        near = [m.num_bytes for m in sends if m.dst // per_node == rank // per_node]
        assert found.sent_within[at] == sum(near)
        near = [m.num_bytes for m in receives if m.src // per_node == rank // per_node]
        assert found.received_within[at] == sum(near)
        assert found.messages_sent[at] == len(sends)
        assert found.messages_received[at] == len(receives)
    inside = set(plan.ranks)
    for at in range(len(found.local)):
        if at + origin not in inside:
            assert not found.received[at] + found.sent[at] + found.local[at]
