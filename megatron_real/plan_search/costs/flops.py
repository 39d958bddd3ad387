"""How many floating-point operations a transformer takes. A multiplication and its addition are two.

Backward is twice forward for matrices (input and weight gradients). Causal attention counts the lower triangle only,
so that a sequence of L tokens takes ``2 * query_width * L^2`` per layer for both of its products.

Invariants (tests/unit/plan_search/test_flops.py; against Megatron in tests/hooks/test_flops_against_megatron.py):
    - `train_flops` is what Megatron's ``num_floating_point_operations`` counts, ragged lengths included.
"""

from __future__ import annotations

from megatron_real.model_shape import ModelShape

__all__ = [
    "attention_flops",
    "forward_flops",
    "head_flops",
    "layer_flops",
    "mlp_flops",
    "projection_flops",
    "train_flops",
]

_BACKWARD = 2


def projection_flops(shape: ModelShape, tokens: float) -> float:
    """Query, key, value and output projections of one layer, forward."""
    return 2 * tokens * shape.hidden_size * (2 * shape.query_width + 2 * shape.key_width)


def attention_flops(shape: ModelShape, square_sum: float) -> float:
    """Scores and weighted values of one layer, forward and causal.

    Args:
        shape: the model's.
        square_sum: the sum of the sequences' squared lengths.
    """
    return 2 * shape.query_width * square_sum


def mlp_flops(hidden: int, width: float, tokens: float, *, gated: bool) -> float:
    """An MLP of `width` inner channels over `tokens`, forward."""
    return 2 * tokens * hidden * width * (3 if gated else 2)


def layer_flops(shape: ModelShape, layer: int, tokens: float, square_sum: float) -> float:
    """One decoder layer, forward. The router (``2 * hidden * experts`` per token) is left out, as Megatron does."""
    flops = projection_flops(shape, tokens) + attention_flops(shape, square_sum)
    width: float = shape.ffn_hidden_size
    if shape.has_experts(layer):
        width = shape.experts_per_token * shape.expert_width + shape.shared_expert_ffn_hidden_size
    return flops + mlp_flops(shape.hidden_size, width, tokens, gated=shape.gated_mlp)


def head_flops(shape: ModelShape, positions: float) -> float:
    """Logits (or the scalar head) of `positions`, forward."""
    return 2 * positions * shape.hidden_size * shape.output_width


def forward_flops(shape: ModelShape, tokens: float, square_sum: float) -> float:
    """The whole model over sequences with `tokens` tokens in all, forward, with the logits of each."""
    dense = shape.num_dense_layers if shape.num_experts else shape.num_layers
    experts = shape.num_layers - dense
    flops = dense * layer_flops(shape, 0, tokens, square_sum) if dense else 0.0
    if experts:
        flops += experts * layer_flops(shape, shape.num_layers - 1, tokens, square_sum)
    return flops + head_flops(shape, tokens)


def train_flops(shape: ModelShape, tokens: float, square_sum: float) -> float:
    """Forward and backward, without recomputation: the FLOPs that model utilisation is told in."""
    return (1 + _BACKWARD) * forward_flops(shape, tokens, square_sum)
