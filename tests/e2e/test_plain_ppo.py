"""The plain-PyTorch reference itself: its optimizer, its gradients, its arithmetic, each against something else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.e2e.plain_ppo import (
    PlainAdamW,
    PlainConfig,
    PlainShape,
    advantages_and_returns,
    minibatches,
    policy_loss_of_sequence,
    reference_iteration,
    response_logprobs,
    response_values,
    value_loss_of_sequence,
)

SHAPE = PlainShape(num_layers=2, num_attention_heads=4, num_query_groups=2, vocab_size=11)
HIDDEN, FFN, PADDED = 8, 12, 16
SAMPLES = [((1, 2), (3, 4, 5)), ((6,), (7,)), ((8, 9, 10), (0, 1)), ((2, 2), (1, 5, 9, 3))]


def random_weights(seed: int, *, critic: bool = False, tied: bool = False) -> dict[str, torch.Tensor]:
    """Weights of a two-layer model under Megatron's names, far from any symmetry."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return 0.5 * torch.randn(*size, generator=generator, dtype=torch.float64)

    weights = {
        "embedding.word_embeddings.weight": draw(PADDED, HIDDEN),
        "decoder.final_layernorm.weight": 1 + draw(HIDDEN),
    }
    for index in range(SHAPE.num_layers):
        layer = f"decoder.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": 1 + draw(HIDDEN),
            f"{layer}.self_attention.linear_qkv.weight": draw(2 * (2 + 2) * 2, HIDDEN),
            f"{layer}.self_attention.linear_proj.weight": draw(HIDDEN, HIDDEN),
            f"{layer}.pre_mlp_layernorm.weight": 1 + draw(HIDDEN),
            f"{layer}.mlp.linear_fc1.weight": draw(2 * FFN, HIDDEN),
            f"{layer}.mlp.linear_fc2.weight": draw(HIDDEN, FFN),
        }
    if not tied:
        weights["output_layer.weight"] = draw(1 if critic else PADDED, HIDDEN)
    return weights


def test_probabilities_sum_to_one_and_causality() -> None:
    weights = random_weights(0)
    total = sum(
        response_logprobs(((1, 2), (token,)), weights, SHAPE, 0.7)[0].exp().item() for token in range(11)
    )
    assert total == pytest.approx(1.0)
    longer = response_logprobs(((1, 2), (3, 4, 5)), weights, SHAPE, 1.0)
    shorter = response_logprobs(((1, 2), (3, 4)), weights, SHAPE, 1.0)
    for long, short in zip(longer, shorter, strict=True):
        torch.testing.assert_close(long[:2], short)


def test_padded_vocabulary_does_not_matter() -> None:
    weights = random_weights(0)
    padded = {name: w.clone() for name, w in weights.items()}
    padded["output_layer.weight"][SHAPE.vocab_size :] += 100.0
    for before, after in zip(
        response_logprobs(SAMPLES[0], weights, SHAPE, 1.0),
        response_logprobs(SAMPLES[0], padded, SHAPE, 1.0),
        strict=True,
    ):
        assert torch.equal(before, after)


def test_entropy_of_a_flat_distribution() -> None:
    weights = random_weights(0)
    weights["output_layer.weight"] = torch.zeros(PADDED, HIDDEN, dtype=torch.float64)
    logprobs, entropy = response_logprobs(SAMPLES[0], weights, SHAPE, 1.0)
    assert entropy.tolist() == pytest.approx([math.log(11)] * 3)
    assert logprobs.tolist() == pytest.approx([-math.log(11)] * 3)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_by_finite_differences(role: str) -> None:
    weights = {name: w.requires_grad_() for name, w in random_weights(1, critic=role == "critic").items()}
    config = PlainConfig(entropy_coefficient=0.1)
    targets, old = [0.7, -1.2, 0.4], [-2.0, -2.6, -2.1]

    def loss() -> torch.Tensor:
        if role == "actor":
            return policy_loss_of_sequence(SAMPLES[0], weights, old, targets, SHAPE, config)[0]
        return value_loss_of_sequence(SAMPLES[0], weights, old, targets, SHAPE, config)

    gradients = torch.autograd.grad(loss(), list(weights.values()))
    step = 1e-6
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        flat = weight.detach().view(-1)
        index = int(gradient.abs().argmax())
        with torch.no_grad():
            flat[index] += step
            above = loss().item()
            flat[index] -= 2 * step
            below = loss().item()
            flat[index] += step
        assert (above - below) / (2 * step) == pytest.approx(
            gradient.view(-1)[index].item(), rel=1e-5, abs=1e-7
        ), name


@pytest.mark.parametrize("clip_grad", [0.0, 0.3])
def test_optimizer_equals_torch(clip_grad: float) -> None:
    config = PlainConfig(clip_grad=clip_grad, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    ours = {
        "w.weight": torch.randn(3, 4, generator=generator),
        "norm.weight": torch.randn(4, generator=generator),
    }
    ours["w.bias"] = torch.randn(2, 2, generator=generator)
    theirs = {name: w.clone().requires_grad_() for name, w in ours.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [theirs["w.weight"]], "weight_decay": 0.1},
            {"params": [theirs["norm.weight"], theirs["w.bias"]], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    plain = PlainAdamW(ours, 0.01, config)
    for _ in range(5):
        gradients = {name: torch.randn(w.shape, generator=generator) for name, w in ours.items()}
        norm = plain.step(gradients)
        for name, w in theirs.items():
            w.grad = gradients[name].clone()
        total = torch.nn.utils.clip_grad_norm_(theirs.values(), clip_grad if clip_grad > 0 else math.inf)
        assert norm == pytest.approx(total.item(), rel=1e-6)
        optimizer.step()
        for name, w in theirs.items():
            torch.testing.assert_close(ours[name], w.detach(), rtol=1e-5, atol=1e-6)


def test_advantages_of_a_perfect_critic_without_kl_are_zero() -> None:
    logprobs = [[-1.0] * 3, [-2.0]]
    values = [[5.0] * 3, [-2.0]]
    config = PlainConfig(lam=0.3, whiten=False)
    advantages, returns = advantages_and_returns(logprobs, logprobs, values, [5.0, -2.0], config)
    assert advantages == [[0.0] * 3, [0.0]]
    assert returns == values
    discounted = replace(config, gamma=0.5, lam=1.0)
    _, returns = advantages_and_returns(logprobs, logprobs, values, [8.0, 0.0], discounted)
    assert returns == [[2.0, 4.0, 8.0], [0.0]]


def test_minibatches_cover_each_epoch() -> None:
    steps = minibatches(7, PlainConfig(num_minibatches=3, num_epochs=2))
    assert steps[:3] == steps[3:]
    assert [i for ids in steps[:3] for i in ids] == list(range(7))


@pytest.mark.parametrize("tied", [False, True])
def test_iteration(tied: bool) -> None:
    actor, critic, ref = (
        random_weights(0, tied=tied),
        random_weights(1, critic=True),
        random_weights(2, tied=tied),
    )
    before = {name: w.clone() for name, w in actor.items()}
    rewards = [1.0, -1.0, 0.5, 2.0]
    config = {"num_minibatches": 2, "num_epochs": 2, "entropy_coefficient": 0.01}
    found = reference_iteration(actor, critic, ref, SHAPE, SAMPLES, rewards, config)
    assert all(torch.equal(actor[name], w) for name, w in before.items()), "inputs are not changed"
    assert found["actor"]["ratios"] == pytest.approx([1.0] * 4)  # the first minibatch has 3 + 1 tokens
    flat = [a for row in found["advantages"] for a in row]
    assert sum(flat) == pytest.approx(0.0, abs=1e-9)
    for role, weights in (("actor", actor), ("critic", critic)):
        result = found[role]
        assert len(result["losses"]) == len(result["grad_norms"]) == 4
        assert set(result["gradients"]) == set(result["weights"]) == set(weights)
        norm = math.sqrt(sum(float((g**2).sum()) for g in result["gradients"].values()))
        assert result["grad_norms"][0] == pytest.approx(norm)
        assert all(not torch.equal(result["weights"][name], weights[name]) for name in weights)
    # Ratio 1 in the first step: the surrogate is minus the mean advantage of its tokens, less the entropy bonus.
    entropy = sum(response_logprobs(SAMPLES[i], actor, SHAPE, 1.0)[1].sum().item() for i in (0, 1)) / 4
    expected = -sum(found["advantages"][0] + found["advantages"][1]) / 4 - 0.01 * entropy
    assert found["actor"]["losses"][0] == pytest.approx(expected)
    errors = [
        (v - r) ** 2 for i in (0, 1) for v, r in zip(found["values"][i], found["returns"][i], strict=True)
    ]
    assert found["critic"]["losses"][0] == pytest.approx(0.5 * sum(errors) / 4)
    assert found["values"][0] == response_values(SAMPLES[0], critic, SHAPE).tolist()
