"""`flops.train_flops` is what Megatron's own counter says, over dense, grouped, gated, expert and ragged cases."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.flops import train_flops

pytestmark = pytest.mark.megatron


def _arguments(shape: ModelShape, seq_length: int) -> Namespace:
    """Megatron's arguments of `shape`, as far as its counter reads them."""
    experts: dict[str, Any] = {"num_experts": None, "moe_layer_freq": 1, "moe_router_topk": 1}
    if shape.num_experts:
        pattern = [int(shape.has_experts(layer)) for layer in range(shape.num_layers)]
        experts = {
            "num_experts": shape.num_experts,
            "moe_layer_freq": pattern,
            "moe_router_topk": shape.experts_per_token,
        }
    return Namespace(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        group_query_attention=shape.num_query_groups != shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_width,
        ffn_hidden_size=shape.ffn_hidden_size,
        padded_vocab_size=shape.padded_vocab_size,
        swiglu=shape.gated_mlp,
        seq_length=seq_length,
        moe_ffn_hidden_size=shape.expert_ffn_hidden_size,
        moe_shared_expert_intermediate_size=shape.shared_expert_ffn_hidden_size or None,
        moe_latent_size=None,
        mtp_num_layers=None,
        multi_latent_attention=False,
        attention_output_gate=False,
        experimental_attention_variant=None,
        hybrid_layer_pattern=None,
        hybrid_override_pattern=None,
        is_hybrid_model=False,
        **experts,
    )


def _shape(**changes: Any) -> ModelShape:
    options: dict[str, Any] = {
        "num_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "ffn_hidden_size": 256,
        "padded_vocab_size": 1024,
        **changes,
    }
    return ModelShape(**options)


@pytest.mark.parametrize(
    "shape",
    [
        _shape(),
        _shape(num_query_groups=2, gated_mlp=True, ffn_hidden_size=176),
        _shape(head_size=32, num_query_groups=4),
        _shape(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=48, gated_mlp=True),
        _shape(num_experts=8, experts_per_token=3, shared_expert_ffn_hidden_size=80, num_dense_layers=2),
    ],
    ids=["gpt", "llama", "wide heads", "experts", "shared expert after dense layers"],
)
def test_equal_to_megatron(shape: ModelShape) -> None:
    training = pytest.importorskip("megatron.training.training")
    count = training.num_floating_point_operations
    arguments = _arguments(shape, seq_length=128)
    assert train_flops(shape, 4 * 128, 4 * 128**2) == pytest.approx(count(arguments, 4), rel=1e-12)
    lengths = [3, 77, 128, 12]
    square = sum(length**2 for length in lengths)
    ragged = count(arguments, 4, seqlen_squared_sum_in_batch=square, total_real_tokens_in_batch=sum(lengths))
    assert train_flops(shape, sum(lengths), square) == pytest.approx(ragged, rel=1e-12)
