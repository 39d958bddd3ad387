"""KL estimators against the exact divergence; the adaptive coefficient by hand, repeated, resumed and misused."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_real.algorithms.kl import AdaptiveKL, FixedKL, KLEstimator, estimate_kl
from megatron_real.errors import ConfigError, RealError


def test_estimators_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert estimate_kl(logprobs, ref, KLEstimator.K1).tolist() == [0.5, -1.0]
    assert estimate_kl(logprobs, ref, KLEstimator.K2).tolist() == [0.125, 0.5]
    expected = [2.718281828**-0.5 - 1 + 0.5, 2.718281828 - 1 - 1.0]
    assert estimate_kl(logprobs, ref, KLEstimator.K3).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_unbiased(estimator: KLEstimator) -> None:
    """The expectation over the policy, taken exactly, is the divergence."""
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.log_softmax(torch.randn(2, 50, generator=generator, dtype=torch.float64), dim=-1)
    divergence = (policy.exp() * (policy - ref)).sum()
    expectation = (policy.exp() * estimate_kl(policy, ref, estimator)).sum()
    torch.testing.assert_close(expectation, divergence, rtol=1e-12, atol=0)


def test_gradient_of_the_expectation() -> None:
    """What each estimator does as a term of the loss, over tokens that the policy sampled, exactly."""
    generator = torch.Generator().manual_seed(4)
    logits, ref_logits = torch.randn(2, 20, generator=generator, dtype=torch.float64)
    ref = torch.log_softmax(ref_logits, dim=-1)
    logits.requires_grad_()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    policy = torch.log_softmax(logits, dim=-1)
    sampled = policy.exp().detach()
    reverse = gradient((policy.exp() * (policy - ref)).sum())
    forward = gradient((ref.exp() * (ref - policy)).sum())
    wanted = {KLEstimator.K1: torch.zeros_like(reverse), KLEstimator.K2: reverse, KLEstimator.K3: forward}
    for estimator, expected in wanted.items():
        found = gradient((sampled * estimate_kl(policy, ref, estimator)).sum())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (reverse - forward).abs().max() > 0.01


def test_k3_of_a_stray_token_is_finite() -> None:
    logprobs = torch.tensor([-200.0, 0.0], requires_grad=True)
    found = estimate_kl(logprobs, torch.tensor([0.0, -200.0]), KLEstimator.K3)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx([2.718281828459045**20 - 21, 199.0])
    assert gradient.tolist() == pytest.approx([0.0, 1.0])


def test_k3_is_never_negative() -> None:
    difference = torch.linspace(-3, 3, 101)
    assert (estimate_kl(difference, torch.zeros(101), KLEstimator.K3) >= 0).all()


def test_fixed_never_moves() -> None:
    kl = FixedKL(0.3)
    kl.observe(0, 1e9, 1)
    assert kl.coefficient(0) == kl.coefficient(7) == 0.3
    kl.load_state_dict(kl.state_dict())


def test_adaptive_by_hand() -> None:
    kl = AdaptiveKL(0.2, target=6.0, horizon=1000.0)
    assert kl.coefficient(0) == 0.2
    kl.observe(0, 6.6, 50)  # 10 % above the target
    assert kl.coefficient(1) == pytest.approx(0.2 * (1 + 0.1 * 50 / 1000))
    kl.observe(1, 600.0, 100)  # clipped to 20 %
    assert kl.coefficient(2) == pytest.approx(0.2 * 1.005 * (1 + 0.2 * 100 / 1000))
    kl.observe(2, -5.0, 100)
    assert kl.coefficient(3) == pytest.approx(0.2 * 1.005 * 1.02 * (1 - 0.2 * 100 / 1000))


def test_two_train_calls_agree() -> None:
    """On one rank (each call asks and observes in turn) as on two (each has its own controller)."""
    shared, alone = AdaptiveKL(0.2, target=1.0, horizon=100.0), AdaptiveKL(0.2, target=1.0, horizon=100.0)
    for iteration, seen in enumerate([0.5, 1.5, 1.1, 0.0]):
        first = shared.coefficient(iteration)
        shared.observe(iteration, seen, 8)
        second = shared.coefficient(iteration)
        shared.observe(iteration, seen, 8)
        other = alone.coefficient(iteration)
        alone.observe(iteration, seen, 8)
        assert first == second == other
    assert shared.state_dict() == alone.state_dict()
    assert shared.coefficient(4) != 0.2


def test_misuse_is_an_error() -> None:
    kl = AdaptiveKL(0.2, target=1.0, horizon=100.0)
    with pytest.raises(RealError, match="found iteration 1; expected 0"):
        kl.observe(1, 1.0, 8)
    kl.observe(0, 1.0, 8)
    kl.observe(1, 1.0, 8)
    with pytest.raises(RealError, match="found iteration 0; expected 2"):
        kl.coefficient(0)
    with pytest.raises(RealError, match="different data"):
        kl.observe(1, 1.5, 8)
    for arguments in ({"target": 0.0, "horizon": 1.0}, {"target": 1.0, "horizon": -1.0}):
        with pytest.raises(ConfigError, match="above 0"):
            AdaptiveKL(0.2, **arguments)


def test_resume() -> None:
    kl = AdaptiveKL(0.2, target=1.0, horizon=100.0)
    kl.observe(0, 3.0, 8)
    resumed = AdaptiveKL(0.9, target=1.0, horizon=100.0)
    resumed.load_state_dict(json.loads(json.dumps(kl.state_dict())))
    assert resumed.coefficient(0) == kl.coefficient(0) == 0.2
    assert resumed.coefficient(1) == kl.coefficient(1)
    resumed.observe(0, 3.0, 8)  # the other train call of the iteration
    assert resumed.state_dict() == kl.state_dict()
    with pytest.raises(ConfigError, match="coefficient"):
        resumed.load_state_dict(FixedKL(0.2).state_dict())
