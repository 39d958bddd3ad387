"""The table of parameters by hand and by covering, and the closed forms against sums over it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh, coordinates_of
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.parameters import (
    chunk_elements,
    expert_data_parallel,
    num_parameters,
    param_table,
    rank_entries,
    separate_experts,
    stage_parameters,
)
from megatron_real.realloc_ops.planning.shards import Box

DENSE = ModelShape(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=8,
    num_query_groups=2,
    ffn_hidden_size=32,
    padded_vocab_size=32,
    gated_mlp=True,
)
SHAPES = {
    "gated": DENSE,
    "tied": replace(DENSE, tied_embeddings=True, learned_positions=6, gated_mlp=False),
    "value": replace(DENSE, scalar_head=True, tied_embeddings=True, qk_norm=True, linear_bias=False),
    "experts": replace(
        DENSE, num_experts=4, expert_ffn_hidden_size=16, shared_expert_ffn_hidden_size=8, norm_bias=False
    ),
    "mixed": replace(DENSE, num_experts=4, num_dense_layers=1, linear_bias=False, qkv_bias=True),
}
LAYOUTS = [
    Layout(),
    Layout(dp=2, tp=2),
    Layout(tp=4, sp=True),
    Layout(pp=2, layers=(1, 3)),
    Layout(tp=2, pp=2, vpp=2, dp=2),
    Layout(pp=4, cp=2),
]
EXPERT_LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(dp=2, tp=2, ep=4, etp=1),
    Layout(dp=2, tp=2, pp=2, ep=2),
    Layout(tp=2, etp=1),
    Layout(dp=4, ep=2, etp=2, pp=2),
]
CASES = [(name, layout) for name in SHAPES for layout in LAYOUTS] + [
    (name, layout) for name in ("experts", "mixed") for layout in EXPERT_LAYOUTS
]


def test_the_size_of_a_known_model() -> None:
    llama = ModelShape(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        padded_vocab_size=128256,
        gated_mlp=True,
        linear_bias=False,
        norm_bias=False,
    )
    assert num_parameters(llama) == 8_030_261_248  # Llama 3 8B, as its checkpoint has them
    mixtral = replace(llama, padded_vocab_size=32000, num_experts=8, experts_per_token=2)
    assert num_parameters(mixtral) == 46_702_792_704  # Mixtral 8x7B


def test_the_size_of_gpt2() -> None:
    gpt2 = ModelShape(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_query_groups=12,
        ffn_hidden_size=3072,
        padded_vocab_size=50257,
        tied_embeddings=True,
        learned_positions=1024,
    )
    assert num_parameters(gpt2) == 124_439_808  # GPT-2 small


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_closed_forms_are_sums_over_the_table(name: str, layout: Layout) -> None:
    shape, mesh = SHAPES[name], Mesh(3, 3 + layout.size)
    for rank in mesh.ranks:
        dense = expert = 0
        for entry in rank_entries(shape, layout, mesh, rank):
            if ".experts.experts." in entry.key:
                expert += entry.box.num_elements
            else:
                dense += entry.box.num_elements
        stage = coordinates_of(rank, mesh, layout).pp
        assert stage_parameters(shape, layout)[stage] == (dense, expert)
        chunks = chunk_elements(shape, layout)[stage]
        assert sum(chunk.total for chunk in chunks) == dense + expert
        if separate_experts(layout):
            assert sum(chunk.expert for chunk in chunks) == expert
    assert len(chunk_elements(shape, layout)[0]) == layout.vpp


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_a_replica_covers_every_tensor(name: str, layout: Layout) -> None:
    shape, mesh = SHAPES[name], Mesh(0, layout.size)
    table = param_table(shape, layout, mesh)
    covered = {key: np.zeros(spec.global_shape, dtype=np.int64) for key, spec in table.specs.items()}
    for shard in table.owners:
        whole = Box((0,) * len(shard.box.offset), covered[shard.key].shape)
        covered[shard.key][shard.box.slices_in(whole)] += 1
    assert all((count == 1).all() for count in covered.values())
    assert sum(prod(spec.global_shape) for spec in table.specs.values()) == num_parameters(shape)
    # Replicas: experts over their own group, everything else of a stage over the others.
    tied = shape.tied_embeddings and not shape.scalar_head and layout.pp > 1
    for shard, owners in table.owners.items():
        if ".experts.experts." in shard.key:
            copies = expert_data_parallel(layout)
            if shard.key.endswith("linear_fc2.bias"):
                copies *= layout.etp if layout.etp is not None else layout.tp
            assert len(owners) == copies
        elif shard.key == "embedding.word_embeddings.weight":
            assert len(owners) == layout.dp * layout.cp * (2 if tied else 1)


def test_a_layer_by_hand() -> None:
    shape = replace(DENSE, num_layers=1, norm_bias=False)
    entries = {}
    for entry in rank_entries(shape, Layout(tp=2), Mesh(0, 2), 1):
        entries.setdefault(entry.key.removeprefix("decoder.layers."), []).append(entry.box)
    assert entries["self_attention.linear_qkv.weight"] == [Box((0, 12, 0), (1, 12, 16))]  # 16 + 2 * 4 rows
    assert entries["self_attention.linear_proj.weight"] == [Box((0, 0, 8), (1, 16, 8))]
    assert entries["self_attention.linear_proj.bias"] == [Box((0, 0), (1, 16))]
    assert entries["mlp.linear_fc1.weight"] == [Box((0, 16, 0), (1, 16, 16)), Box((0, 48, 0), (1, 16, 16))]
    assert entries["mlp.linear_fc2.weight"] == [Box((0, 0, 16), (1, 16, 16))]
    assert entries["embedding.word_embeddings.weight"] == [Box((16, 0), (16, 16))]


def test_rounding_is_of_every_parameter_by_itself() -> None:
    shape = replace(DENSE, num_layers=1, norm_bias=False, linear_bias=False)
    # Norms 16 -> 64 three times; qkv 24*16 = 384, proj 256, fc1 1024, fc2 512, embedding and head 512 each.
    exact = 3 * 16 + 384 + 256 + 1024 + 512 + 1024
    (((one,),), ((rounded,),)) = chunk_elements(shape, Layout()), chunk_elements(shape, Layout(), 64)
    assert one.total == exact
    assert rounded.total == exact + 3 * (64 - 16)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match=r"linear_qkv.weight has 24 .* a multiple of 16"):
        stage_parameters(DENSE, Layout(tp=16))
    with pytest.raises(PlanError, match="found ep=3"):
        stage_parameters(SHAPES["experts"], Layout(dp=3, ep=3))
