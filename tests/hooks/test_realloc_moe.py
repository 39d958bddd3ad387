"""Reallocation of models with experts: ep and etp on either side, shared experts, biases of the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.harness import run_ranks
from tests.hooks.moving import check_move, check_pairs, hold, losses_after_moves, mean_losses, transport
from tests.hooks.tiny import descent, experts, layouts, tiny_role, train_step

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

PLACEMENTS = (
    "d1t1p1@3-3",
    "d2t1p1e2@1-2",
    "d4t1p1e4@0-3",
    "d1t2p1e2x1@2-3",  # experts over tensor-parallel ranks
    "d2t2p1e2x2@0-3",
    "d1t2p2x2@0-3",
    "d2t1p2e2@0-3",
    "d1t1p2v2@0-1",
)
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "routed": (experts(), PLACEMENTS),
    "shared expert, router bias, bf16": (
        experts(
            moe_shared_expert_intermediate_size=32,
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            dtype=torch.bfloat16,
        ),
        PLACEMENTS,
    ),
    # Megatron takes biases of experts with etp = 1 only
    "biases of experts": (
        experts(add_bias_linear=True),
        ("d1t1p1@3-3", "d2t1p1e2@1-2", "d4t1p1e4@0-3", "d1t2p1e2x1@0-1"),
    ),
    "dense layers first": (experts(moe_layer_freq=[0, 1, 1, 0]), PLACEMENTS[:6]),
    "gate, up and down of eight": (
        experts(num_moe_experts=8),
        ("d2t2p2e4x1@0-7", "d1t1p1@7-7", "d8t1p1e8@0-7"),
    ),
}


def _check_all(changes: dict[str, Any], placements: tuple[str, ...]) -> int:
    return check_pairs(tiny_role(**changes), placements)


@pytest.mark.parametrize("name", KINDS)
def test_experts_between_all_pairs_of_layouts(name: str) -> None:
    changes, placements = KINDS[name]
    size = 8 if any(text.endswith("-7") for text in placements) else 4
    assert set(run_ranks(size, _check_all, changes, placements)) == {len(placements) * (len(placements) - 1)}


def _check_router_bias() -> None:
    """Biases that need more than the eight bits of a bf16 mantissa, in bf16 models, bit for bit; also after a pass."""
    role = tiny_role(
        **experts(
            moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", dtype=torch.bfloat16
        )
    )
    with layouts() as made:
        over = transport(made)
        train = hold(made, "d2t1p1e2@0-1", role, training=descent())
        generate = hold(made, "d1t1p1@1-1", role)
        biases = [filled for filled in generate.filled if filled.key.endswith("router.expert_bias")]
        for _, tensor, values in biases:
            assert tensor.dtype == torch.float32
            assert not torch.equal(values.to(torch.bfloat16).float(), values)
        check_move(train, generate, over, "train -> generate")
        if train.copy is not None:
            train.copy.weights_arrived(1)
            train_step(train.copy, torch.arange(48).reshape(4, 12) % 120)
        check_move(generate, train, over, "generate -> train, after a step")
        made.groups.release(range(2), purpose="realloc")


def test_router_bias_keeps_its_own_dtype() -> None:
    run_ranks(2, _check_router_bias)


def _losses() -> dict[str, list[float]]:
    role = tiny_role(**experts(moe_shared_expert_intermediate_size=32))
    return losses_after_moves(
        role, "d2t1p1e2@0-1", ("d1t1p1@0-0", "d4t1p1e4@0-3", "d2t1p2e2@0-3", "d1t2p1e2x1s@2-3")
    )


def test_a_model_computes_the_same_after_its_experts_moved() -> None:
    means = mean_losses(run_ranks(4, _losses))
    assert len(means) == 5
    assert means == pytest.approx(dict.fromkeys(means, means["d2t1p1e2@0-1"]), rel=1e-6)
