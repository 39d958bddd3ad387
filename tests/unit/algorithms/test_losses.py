"""Losses and their statistics against loops over tokens in Python floats, and their gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_real.algorithms.losses import PolicyObjective, ValueObjective, policy_loss, value_loss
from megatron_real.backend import Head
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per

COUNT = 64


def _random(*scales: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        scale * torch.randn(COUNT, generator=generator, dtype=torch.float64).to(dtype) for scale in scales
    ]


def _batch(**data: torch.Tensor) -> Batch:
    batch = Batch(ids=(0, 1), prompt_lengths=(2, 2), response_lengths=(COUNT - 5, 5))
    for name, value in data.items():
        batch.put(KeySpec(name=name, per=Per.RESPONSE, dtype="float32"), value)
    return batch


def _policy_loop(
    new: list[float], old: list[float], advantages: list[float], low: float, high: float
) -> dict:
    sums = dict.fromkeys(("policy_loss", "ratio", "ratio_deviation", "clip_fraction", "k1", "k3"), 0.0)
    for lp, olp, advantage in zip(new, old, advantages, strict=True):
        ratio = math.exp(lp - olp)
        surrogate = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
        sums["policy_loss"] -= surrogate
        sums["ratio"] += ratio
        sums["ratio_deviation"] += abs(ratio - 1)
        sums["clip_fraction"] += (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
        sums["k1"] += olp - lp
        sums["k3"] += ratio - 1 - (lp - olp)
    return sums


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_policy_loss(low: float, high: float) -> None:
    new, old, advantages = _random(0.3, 0.3, 1.0)
    loss, found = policy_loss(new, old, advantages, low, high)
    wanted = _policy_loop(new.tolist(), old.tolist(), advantages.tolist(), low, high)
    assert loss.item() == pytest.approx(wanted["policy_loss"], rel=1e-12)
    assert 0 < found["clip_fraction"].item() < COUNT
    for ours, theirs in (("approx_kl_k1", "k1"), ("approx_kl_k3", "k3")):
        wanted[ours] = wanted.pop(theirs)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(wanted, rel=1e-10)


def test_policy_gradient_is_cut_where_clipped() -> None:
    new = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    loss, found = policy_loss(new, torch.zeros(5, dtype=torch.float64), advantages, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    # d(-ratio * A) = -ratio * A; nothing where the ratio has gone too far in the direction of the advantage.
    wanted = [0.0, math.exp(0.5), -math.exp(-0.5), 0.0, -2.0 * math.exp(0.1)]
    assert gradient.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found["clip_fraction"].item() == 2


def test_first_step_is_the_policy_gradient() -> None:
    old, advantages = _random(1.0, 1.0)
    new = old.clone().requires_grad_()
    loss, found = policy_loss(new, old, advantages, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(gradient, -advantages, rtol=0, atol=0)
    assert found["ratio"].item() == COUNT
    assert found["clip_fraction"].item() == found["ratio_deviation"].item() == 0


def test_a_stray_token_does_not_overflow() -> None:
    new = torch.tensor([0.0, 200.0], requires_grad=True)
    loss, found = policy_loss(new, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in found.values())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    values, old, returns = _random(0.5, 0.5, 0.5)
    loss, found = value_loss(values, old, returns, clip)
    total, cut, error = 0.0, 0, 0.0
    for value, old_value, target in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        candidates = [(value - target) ** 2]
        if clip is not None:
            candidates.append((max(old_value - clip, min(old_value + clip, value)) - target) ** 2)
        total += 0.5 * max(candidates)
        cut += max(candidates) > candidates[0]
        error += abs(value - target)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    wanted = {
        "value_loss": total,
        "value": values.sum().item(),
        "value_error": error,
        "value_clip_fraction": cut,
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(wanted, rel=1e-12)
    assert (0 < cut < COUNT) is (clip is not None)


def test_values_that_stay_near_are_not_clipped() -> None:
    """The clipped value differs from the value by rounding here, which must neither count nor change the gradient."""
    values, old, returns = _random(0.05, 0.05, 0.05, dtype=torch.float32)
    assert (old + (values - old) != values).any()
    loss, found = value_loss(values.requires_grad_(), old, returns, 1.0)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, (values - returns).detach(), rtol=1e-6, atol=1e-6)
    assert found["value_clip_fraction"].item() == 0


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.3])
def test_policy_gradcheck(entropy_coefficient: float) -> None:
    new, old, advantages, entropy = _random(0.3, 0.3, 1.0, 1.0)
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, entropy_coefficient=entropy_coefficient)
    batch = _batch(logprobs=old, advantages=advantages)

    def loss(new: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return objective.loss({"logprobs": new, "entropy": entropy}, batch)[0]

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(), entropy.requires_grad_()))


def test_value_gradcheck() -> None:
    values, old, returns = _random(0.5, 0.5, 0.5)
    objective = ValueObjective(clip=0.2, coefficient=0.5)
    batch = _batch(values=old, returns=returns)
    assert torch.autograd.gradcheck(
        lambda values: objective.loss({"values": values}, batch)[0], (values.requires_grad_(),)
    )


def test_objectives_weigh_and_report() -> None:
    new, old, advantages, entropy = _random(0.3, 0.3, 1.0, 1.0)
    batch = _batch(logprobs=old, advantages=advantages, values=old, returns=advantages)
    plain, _ = policy_loss(new, old, advantages, 0.2, 0.3)
    objective = PolicyObjective(clip_low=0.2, clip_high=0.3, entropy_coefficient=0.5)
    loss, found = objective.loss({"logprobs": new, "entropy": entropy}, batch)
    assert objective.head is Head.LOGPROBS
    assert loss.item() == pytest.approx(plain.item() - 0.5 * entropy.sum().item())
    assert found["policy_loss"].item() == plain.item()
    assert found["entropy"].item() == pytest.approx(entropy.sum().item())

    plain, _ = value_loss(new, old, advantages, 0.2)
    critic = ValueObjective(clip=0.2, coefficient=0.5)
    loss, found = critic.loss({"values": new}, batch)
    assert critic.head is Head.VALUES
    assert loss.item() == pytest.approx(0.5 * plain.item())
    assert found["value_loss"].item() == plain.item(), "the statistic is not weighed"


def test_sums_over_microbatches_add_up() -> None:
    new, old, advantages = _random(0.3, 0.3, 1.0)
    whole, found = policy_loss(new, old, advantages, 0.2, 0.2)
    parts = [
        policy_loss(new[cut], old[cut], advantages[cut], 0.2, 0.2) for cut in (slice(0, 9), slice(9, COUNT))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
    for name, value in found.items():
        assert sum(part[name].item() for _, part in parts) == pytest.approx(value.item(), rel=1e-12)


def test_statistics_have_no_gradient() -> None:
    new, old, advantages = _random(0.3, 0.3, 1.0)
    for loss_of in (
        policy_loss(new.requires_grad_(), old, advantages, 0.2, 0.2),
        value_loss(new, old, advantages, 0.2),
    ):
        loss, found = loss_of
        assert loss.requires_grad
        assert not any(value.requires_grad for value in found.values())
