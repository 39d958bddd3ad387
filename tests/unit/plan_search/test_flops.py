"""FLOPs against published formulas and numbers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.flops import forward_flops, head_flops, layer_flops, train_flops

GPT = ModelShape(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    num_query_groups=96,
    ffn_hidden_size=4 * 12288,
    padded_vocab_size=51200,
)
LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    padded_vocab_size=128256,
    gated_mlp=True,
)


def test_a_layer_by_hand() -> None:
    """Two sequences of 3 and 1 tokens; h=8, 4 heads of 2 in 2 groups, SwiGLU of 16.

    Per token: q 8x8, k and v 8x4 each, output 8x8, three matrices 8x16: 192 + 384 weights, two FLOPs each.
    Scores and values: 4 heads x 2 channels x (9 + 1) / 2 pairs x 2 products x 2 FLOPs.
    """
    shape = ModelShape(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=16,
        padded_vocab_size=10,
        gated_mlp=True,
    )
    assert layer_flops(shape, 0, 4, 10) == 4 * 2 * (192 + 384) + 8 * 5 * 2 * 2


def test_narayanan_et_al_2021_equation_3() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) counts forward twice (recomputation), attention in full and no triangle."""
    batch, length = 1536, 2048
    layers, hidden, vocab = GPT.num_layers, GPT.hidden_size, GPT.padded_vocab_size
    paper = 96 * batch * length * layers * hidden**2
    paper *= 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
    tokens, square = batch * length, batch * length**2
    body = forward_flops(GPT, tokens, 2 * square) - head_flops(GPT, tokens)
    assert 4 * body + 3 * head_flops(GPT, tokens) == pytest.approx(paper, rel=1e-12)


def test_llama_8b_takes_six_flops_per_weight_and_token() -> None:
    """8.03e9 parameters, 0.525e9 of which are the word embedding, that is looked up."""
    assert train_flops(LLAMA_8B, 1.0, 0.0) == pytest.approx(6 * (8.03e9 - 0.525e9), rel=1e-3)


def test_experts_count_as_those_that_a_token_visits() -> None:
    """Qwen3-30B-A3B: 3.3e9 of 30.5e9 parameters are active (model card), 0.31e9 are looked up."""
    shape = ModelShape(
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        head_size=128,
        ffn_hidden_size=6144,
        padded_vocab_size=151936,
        gated_mlp=True,
        num_experts=128,
        experts_per_token=8,
        expert_ffn_hidden_size=768,
    )
    assert forward_flops(shape, 1.0, 0.0) == pytest.approx(2 * (3.35e9 - 0.31e9), rel=0.02)


def test_leading_dense_layers() -> None:
    base: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "padded_vocab_size": 16,
        "ffn_hidden_size": 100,
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 10,
    }
    none, one = ModelShape(**base), ModelShape(**base, num_dense_layers=1)
    # One layer's 2 x 10 inner channels become 100: two matrices of h columns, two FLOPs, 5 tokens.
    assert forward_flops(one, 5, 0) - forward_flops(none, 5, 0) == 5 * 2 * 2 * 8 * 80


def test_a_scalar_head_is_one_column() -> None:
    shape = ModelShape(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=2,
        ffn_hidden_size=16,
        padded_vocab_size=1000,
        scalar_head=True,
    )
    assert head_flops(shape, 3) == 3 * 2 * 8
