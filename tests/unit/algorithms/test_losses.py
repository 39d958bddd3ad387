"""Losses and their statistics against loops over sequences in Python floats, and their gradients in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron_real.algorithms.kl import KLEstimator
from megatron_real.algorithms.losses import (
    RATIO_STATISTICS,
    Average,
    PolicyObjective,
    SFTObjective,
    ValueObjective,
    policy_loss,
    value_loss,
)
from megatron_real.backend import KEPT, Head, Objective
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import ConfigError

LENGTHS = (23, 1, 0, 35, 5)
COUNT = sum(LENGTHS)
MASKED = (1.0, 1.0, 1.0, 0.0, 1.0)


def _random(*scales: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        scale * torch.randn(COUNT, generator=generator, dtype=torch.float64).to(dtype) for scale in scales
    ]


def _batch(kept: tuple[float, ...] | None = None, **data: torch.Tensor) -> Batch:
    batch = Batch(
        ids=tuple(range(len(LENGTHS))), prompt_lengths=(2,) * len(LENGTHS), response_lengths=LENGTHS
    )
    for name, value in data.items():
        batch.put(KeySpec(name=name, per=Per.RESPONSE, dtype="float32"), value)
    if kept is not None:
        batch.put(KEPT, torch.tensor(kept))
    return batch


def _by_sequence(values: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(list(LENGTHS))]


def _numbers(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}


def _policy_token(
    new: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> dict[str, float]:
    """From the definition, one token at a time."""
    ratio = math.exp(new - old)
    surrogate = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    bounded = dual is not None and advantage < 0 and surrogate < dual * advantage
    if bounded:
        surrogate = dual * advantage
    too_far = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return {
        "policy_loss": -surrogate,
        "ratio": ratio,
        "ratio_deviation": abs(ratio - 1),
        "clip_fraction": float(too_far or bounded),
        "approx_kl_k1": old - new,
        "approx_kl_k3": ratio - 1 - (new - old),
    }


@pytest.mark.parametrize("dual", [None, 1.3])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_policy_loss(low: float, high: float, dual: float | None) -> None:
    new, old, advantages = _random(0.3, 0.3, 1.0)
    losses, found = policy_loss(new, old, advantages, low, high, dual)
    wanted = [
        _policy_token(*token, low, high, dual)
        for token in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    assert tuple(found) == RATIO_STATISTICS
    for name, values in {"policy_loss": losses, **found}.items():
        assert values.tolist() == pytest.approx([token[name] for token in wanted], rel=1e-10, abs=1e-12)
    assert 0 < found["clip_fraction"].sum().item() < COUNT


def test_policy_gradient_is_cut_where_clipped() -> None:
    new = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    losses, found = policy_loss(new, torch.zeros(5, dtype=torch.float64), advantages, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    # d(-ratio * A) = -ratio * A; nothing where the ratio has gone too far in the direction of the advantage.
    wanted = [0.0, math.exp(0.5), -math.exp(-0.5), 0.0, -2.0 * math.exp(0.1)]
    assert gradient.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found["clip_fraction"].tolist() == [1, 0, 0, 1, 0]


def test_dual_clip_bounds_a_negative_advantage_alone() -> None:
    new = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64, requires_grad=True)  # ratios 7.4, 7.4 and 2.7
    advantages = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    losses, found = policy_loss(new, torch.zeros(3, dtype=torch.float64), advantages, 0.2, 0.2, 3.0)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert losses.tolist() == pytest.approx([3.0, -1.2, math.e])
    assert gradient.tolist() == pytest.approx([0.0, 0.0, math.e])
    assert found["clip_fraction"].tolist() == [1, 1, 0]


def test_first_step_is_the_policy_gradient() -> None:
    old, advantages = _random(1.0, 1.0)
    new = old.clone().requires_grad_()
    losses, found = policy_loss(new, old, advantages, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    torch.testing.assert_close(gradient, -advantages, rtol=0, atol=0)
    assert found["ratio"].tolist() == [1.0] * COUNT
    assert found["clip_fraction"].sum().item() == found["ratio_deviation"].sum().item() == 0


def test_a_stray_token_does_not_overflow() -> None:
    new = torch.tensor([0.0, 200.0, -200.0], requires_grad=True)
    old, advantages = torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])
    batch = Batch(ids=(0,), prompt_lengths=(1,), response_lengths=(3,))
    for name, value in {"logprobs": old, "ref_logprobs": old, "advantages": advantages}.items():
        batch.put(KeySpec(name=name, per=Per.RESPONSE, dtype="float32"), value)
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)
    loss, found = objective.loss({"logprobs": new, "entropy": old}, batch)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in found.values())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    values, old, returns = _random(0.5, 0.5, 0.5)
    losses, found = value_loss(values, old, returns, clip)
    wanted: dict[str, list[float]] = {name: [] for name in found}
    for value, old_value, target in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        candidates = [(value - target) ** 2]
        if clip is not None:
            candidates.append((max(old_value - clip, min(old_value + clip, value)) - target) ** 2)
        wanted["value_loss"].append(0.5 * max(candidates))
        wanted["value"].append(value)
        wanted["value_error"].append(abs(value - target))
        wanted["value_clip_fraction"].append(float(max(candidates) > candidates[0]))
    for name, numbers in wanted.items():
        assert found[name].tolist() == pytest.approx(numbers, rel=1e-12)
    assert torch.equal(losses, found["value_loss"])
    assert (0 < sum(wanted["value_clip_fraction"]) < COUNT) is (clip is not None)


def test_values_that_stay_near_are_not_clipped() -> None:
    """The clipped value differs from the value by rounding here, which must neither count nor change the gradient."""
    values, old, returns = _random(0.05, 0.05, 0.05, dtype=torch.float32)
    assert (old + (values - old) != values).any()
    losses, found = value_loss(values.requires_grad_(), old, returns, 1.0)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    torch.testing.assert_close(gradient, (values - returns).detach(), rtol=1e-6, atol=1e-6)
    assert found["value_clip_fraction"].sum().item() == 0


def _penalty(new: float, ref: float, estimator: KLEstimator) -> float:
    d = new - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


@pytest.mark.parametrize("kept", [None, MASKED])
@pytest.mark.parametrize("average", list(Average))
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_policy_objective(average: Average, estimator: KLEstimator, kept: tuple[float, ...] | None) -> None:
    """A sequence at a time: its tokens' terms, then what its tokens count for."""
    new, old, advantages, entropy, ref = _random(0.3, 0.3, 1.0, 1.0, 0.4)
    objective = PolicyObjective(
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=1.5,
        entropy_coefficient=0.5,
        kl_coefficient=0.7,
        kl_estimator=estimator,
        average=average,
        constant=40 if average is Average.CONSTANT else None,
    )
    batch = _batch(kept, logprobs=old, advantages=advantages, ref_logprobs=ref)
    loss, found = objective.loss({"logprobs": new, "entropy": entropy}, batch)

    wanted = dict.fromkeys(("policy_loss", "reference_kl", "entropy", *RATIO_STATISTICS), 0.0)
    wanted_loss = 0.0
    for index, sequence in enumerate(
        zip(*map(_by_sequence, (new, old, advantages, entropy, ref)), strict=True)
    ):
        if kept is not None and not kept[index]:
            continue
        length = len(sequence[0])
        share = {"tokens": 1.0, "sequences": 1.0 / max(length, 1), "constant": 1.0 / 40}[average]
        seen = 1.0 if average is Average.TOKENS else 1.0 / max(length, 1)
        for n, o, a, h, r in zip(*sequence, strict=True):
            token = _policy_token(n, o, a, 0.2, 0.3, 1.5)
            penalty = _penalty(n, r, estimator)
            wanted_loss += share * (token["policy_loss"] - 0.5 * h + 0.7 * penalty)
            wanted["policy_loss"] += share * token["policy_loss"]
            wanted["reference_kl"] += share * penalty
            wanted["entropy"] += seen * h
            for name in RATIO_STATISTICS:
                wanted[name] += seen * token[name]
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-10)
    assert _numbers(found) == pytest.approx(wanted, rel=1e-10)
    assert objective.head is Head.LOGPROBS
    assert objective.per is (Per.RESPONSE if average is Average.TOKENS else Per.SEQUENCE)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_objective(clip: float | None) -> None:
    values, old, returns = _random(0.5, 0.5, 0.5)
    objective = ValueObjective(clip=clip, coefficient=0.25)
    loss, found = objective.loss({"values": values}, _batch(MASKED, values=old, returns=returns))
    parts = [
        value_loss(*sequence, clip)
        for index, sequence in enumerate(
            zip(*(x.split(list(LENGTHS)) for x in (values, old, returns)), strict=True)
        )
        if MASKED[index]
    ]
    assert loss.item() == pytest.approx(0.25 * sum(losses.sum().item() for losses, _ in parts), rel=1e-12)
    for name, value in found.items():  # not weighed by the coefficient
        assert value.item() == pytest.approx(sum(part[name].sum().item() for _, part in parts), rel=1e-12)
    assert objective.head is Head.VALUES
    assert objective.per is Per.RESPONSE


def test_sft_objective() -> None:
    logprobs, entropy = _random(1.0, 1.0)
    objective = SFTObjective()
    loss, found = objective.loss({"logprobs": logprobs, "entropy": entropy}, _batch(MASKED))
    wanted = [0.0, 0.0]
    for index, (own, its) in enumerate(zip(_by_sequence(logprobs), _by_sequence(entropy), strict=True)):
        if MASKED[index]:
            wanted = [wanted[0] - sum(own), wanted[1] + sum(its)]
    assert [loss.item(), found["entropy"].item()] == pytest.approx(wanted, rel=1e-12)
    assert objective.head is Head.LOGPROBS
    assert objective.per is Per.RESPONSE


def _policy(average: Average, estimator: KLEstimator = KLEstimator.K3, **options: Any) -> PolicyObjective:
    return PolicyObjective(
        clip_low=0.2,
        clip_high=0.25,
        kl_coefficient=0.3,
        kl_estimator=estimator,
        average=average,
        constant=30 if average is Average.CONSTANT else None,
        **options,
    )


@pytest.mark.parametrize(
    "objective",
    [
        PolicyObjective(clip_low=0.2, clip_high=0.2),
        PolicyObjective(clip_low=0.2, clip_high=0.2, entropy_coefficient=0.3, dual_clip=1.4),
        *(_policy(Average.TOKENS, estimator) for estimator in KLEstimator),
        _policy(Average.SEQUENCES, entropy_coefficient=0.3),
        _policy(Average.CONSTANT, dual_clip=1.2),
        SFTObjective(),
    ],
)
def test_policy_gradcheck(objective: Objective) -> None:
    new, old, advantages, entropy, ref = _random(0.3, 0.3, 1.0, 1.0, 0.3)
    batch = _batch(MASKED, logprobs=old, advantages=advantages, ref_logprobs=ref)

    def loss(new: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return objective.loss({"logprobs": new, "entropy": entropy}, batch)[0]

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(), entropy.requires_grad_()))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_gradcheck(clip: float | None) -> None:
    values, old, returns = _random(0.5, 0.5, 0.5)
    objective = ValueObjective(clip=clip, coefficient=0.5)
    batch = _batch(MASKED, values=old, returns=returns)
    assert torch.autograd.gradcheck(
        lambda values: objective.loss({"values": values}, batch)[0], (values.requires_grad_(),)
    )


def test_statistics_have_no_gradient() -> None:
    new, old, advantages = _random(0.3, 0.3, 1.0)
    batch = _batch(logprobs=old, ref_logprobs=old, advantages=advantages, values=old, returns=advantages)
    new.requires_grad_()
    outputs = {"logprobs": new, "entropy": new * 2, "values": new}
    for objective in (
        _policy(Average.TOKENS),
        _policy(Average.CONSTANT),
        ValueObjective(clip=0.2),
        SFTObjective(),
    ):
        loss, found = objective.loss(outputs, batch)
        assert loss.requires_grad
        assert not any(value.requires_grad for value in found.values())


def test_early_stop_is_about_the_ratio() -> None:
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, stop_above={"ratio_deviation": 0.3})
    assert objective.stop_above == {"ratio_deviation": 0.3}
    for other in (PolicyObjective(clip_low=0.2, clip_high=0.2), ValueObjective(clip=None), SFTObjective()):
        assert not other.stop_above
    with pytest.raises(ConfigError, match="found stop_above for kl; expected some of ratio, ratio_deviation"):
        PolicyObjective(clip_low=0.2, clip_high=0.2, stop_above={"kl": 1.0})


@pytest.mark.parametrize(
    ("average", "constant"),
    [(Average.CONSTANT, None), (Average.CONSTANT, 0), (Average.TOKENS, 7), (Average.SEQUENCES, 7)],
)
def test_the_constant_goes_with_its_average(average: Average, constant: int | None) -> None:
    with pytest.raises(ConfigError, match="expected a number of tokens, at least 1"):
        PolicyObjective(clip_low=0.2, clip_high=0.2, average=average, constant=constant)
