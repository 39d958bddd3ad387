"""Losses over pairs against loops over pairs in Python floats, and their gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_real.algorithms.preference_losses import (
    DPOObjective,
    PreferenceLoss,
    RewardObjective,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
)
from megatron_real.backend import KEPT, MARGIN, Head, Objective
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import RealError

IDS = (2, 3, 6, 7, 10, 11, 40, 41)
LENGTHS = (3, 5, 1, 8, 6, 2, 4, 4)
KEPT_PAIRS = (1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
PAIRS = len(IDS) // 2


def _random(count: int, *scales: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [scale * torch.randn(count, generator=generator, dtype=torch.float64) for scale in scales]


def _batch(
    kept: tuple[float, ...] | None = None,
    ref_logprobs: torch.Tensor | None = None,
    margins: torch.Tensor | None = None,
) -> Batch:
    batch = Batch(ids=IDS, prompt_lengths=(2,) * len(IDS), response_lengths=LENGTHS)
    if ref_logprobs is not None:
        batch.put(KeySpec(name="ref_logprobs", per=Per.RESPONSE, dtype="float32"), ref_logprobs)
    if margins is not None:
        batch.put(MARGIN, margins)
    if kept is not None:
        batch.put(KEPT, torch.tensor(kept))
    return batch


def _negative_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_by_hand(smoothing: float) -> None:
    margins = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64)
    wanted = [
        (1 - smoothing) * _negative_log_sigmoid(0.5 * m) + smoothing * _negative_log_sigmoid(-0.5 * m)
        for m in margins.tolist()
    ]
    assert dpo_loss(margins, 0.5, smoothing).tolist() == pytest.approx(wanted, rel=1e-12)
    assert wanted[0] == pytest.approx(math.log(2))


def test_smoothing_is_the_expectation_over_a_flipped_label() -> None:
    (margins,) = _random(20, 2.0)
    expected = 0.9 * dpo_loss(margins, 0.3) + 0.1 * dpo_loss(-margins, 0.3)
    torch.testing.assert_close(dpo_loss(margins, 0.3, 0.1), expected, rtol=1e-12, atol=0)


def test_ipo_by_hand() -> None:
    # beta 0.25: the target margin is 2.
    assert ipo_loss(torch.tensor([2.0, 0.0, 5.0]), 0.25).tolist() == [0.0, 4.0, 9.0]


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = (
        torch.tensor([1.0, 0.0], dtype=torch.float64),
        torch.tensor([0.0, 2.0], dtype=torch.float64),
    )
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx(
        [_negative_log_sigmoid(1.0), _negative_log_sigmoid(-2.0)]
    )
    margins = torch.tensor([1.0, 0.5], dtype=torch.float64)
    assert bradley_terry_loss(chosen, rejected, margins).tolist() == pytest.approx(
        [math.log(2), _negative_log_sigmoid(-2.5)]
    )


def test_far_apart_pairs_do_not_overflow() -> None:
    margins = torch.tensor([1e4, -1e4], requires_grad=True)
    for losses in (dpo_loss(margins, 1.0, 0.1), bradley_terry_loss(margins, -margins)):
        (gradient,) = torch.autograd.grad(losses.sum(), margins)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kept", [None, KEPT_PAIRS])
@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_dpo_objective(kind: str, smoothing: float, kept: tuple[float, ...] | None) -> None:
    """A pair at a time; its loss counts for both its sequences."""
    new, ref = _random(sum(LENGTHS), 1.0, 1.0)
    objective = DPOObjective(beta=0.3, label_smoothing=smoothing, kind=PreferenceLoss(kind))
    loss, found = objective.loss({"logprobs": new, "entropy": new}, _batch(kept, ref_logprobs=ref))

    parts = [(own - its).tolist() for own, its in zip(new.split(LENGTHS), ref.split(LENGTHS), strict=True)]
    ratios = [sum(part) / (len(part) if kind == "ipo" else 1) for part in parts]
    wanted = dict.fromkeys(("accuracy", "margin", "chosen_reward", "rejected_reward"), 0.0)
    wanted_loss = 0.0
    for chosen, rejected, counts in zip(ratios[::2], ratios[1::2], (kept or (1.0,) * 8)[::2], strict=True):
        margin = chosen - rejected
        if kind == "ipo":
            one = (margin - 1 / (2 * 0.3)) ** 2
        else:
            right, wrong = _negative_log_sigmoid(0.3 * margin), _negative_log_sigmoid(-0.3 * margin)
            one = (1 - smoothing) * right + smoothing * wrong
        wanted_loss += 2 * counts * one
        wanted["accuracy"] += 2 * counts * (margin > 0)
        wanted["margin"] += 2 * counts * 0.3 * margin
        wanted["chosen_reward"] += 2 * counts * 0.3 * chosen
        wanted["rejected_reward"] += 2 * counts * 0.3 * rejected
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-12)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(wanted, rel=1e-12)
    assert 0 < wanted["accuracy"] < 2 * PAIRS
    assert objective.head is Head.LOGPROBS
    assert objective.per is Per.SEQUENCE
    assert not objective.stop_above


def test_a_pair_without_a_preference_counts_as_half_accurate() -> None:
    """Before DPO's first update the policy is the reference."""
    (logprobs,) = _random(sum(LENGTHS), 1.0)
    batch = _batch(None, ref_logprobs=logprobs)
    _, found = DPOObjective(beta=0.3).loss({"logprobs": logprobs, "entropy": logprobs}, batch)
    assert found["accuracy"].item() == 2 * PAIRS * 0.5


@pytest.mark.parametrize("with_margins", [False, True])
@pytest.mark.parametrize("centering", [0.0, 0.05])
def test_reward_objective(centering: float, with_margins: bool) -> None:
    scores, margins = _random(len(IDS), 1.0, 0.5)
    objective = RewardObjective(centering=centering)
    batch = _batch(KEPT_PAIRS, margins=margins.abs() if with_margins else None)
    loss, found = objective.loss({"scores": scores}, batch)
    wanted = dict.fromkeys(("accuracy", "margin", "chosen_reward", "rejected_reward"), 0.0)
    wanted_loss = 0.0
    for pair in range(PAIRS):
        if not KEPT_PAIRS[2 * pair]:
            continue
        chosen, rejected = scores[2 * pair].item(), scores[2 * pair + 1].item()
        least = abs(margins[2 * pair].item()) if with_margins else 0.0
        wanted_loss += 2 * _negative_log_sigmoid(chosen - rejected - least)
        wanted_loss += 2 * centering * (chosen + rejected) ** 2
        wanted["accuracy"] += 2 * (chosen > rejected)
        wanted["margin"] += 2 * (chosen - rejected)
        wanted["chosen_reward"] += 2 * chosen
        wanted["rejected_reward"] += 2 * rejected
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-12)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(wanted, rel=1e-12)
    assert objective.head is Head.SCORES
    assert objective.per is Per.SEQUENCE
    assert not objective.stop_above


@pytest.mark.parametrize(
    "objective",
    [
        DPOObjective(beta=0.4),
        DPOObjective(beta=0.4, label_smoothing=0.1),
        DPOObjective(beta=0.4, kind=PreferenceLoss.IPO),
    ],
)
def test_dpo_gradcheck(objective: Objective) -> None:
    new, ref = _random(sum(LENGTHS), 1.0, 1.0)
    batch = _batch(KEPT_PAIRS, ref_logprobs=ref)

    def loss(new: torch.Tensor) -> torch.Tensor:
        return objective.loss({"logprobs": new, "entropy": new}, batch)[0]

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(),))


@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_reward_gradcheck(centering: float) -> None:
    scores, margins = _random(len(IDS), 1.0, 0.5)
    objective, batch = RewardObjective(centering=centering), _batch(KEPT_PAIRS, margins=margins)
    assert torch.autograd.gradcheck(
        lambda scores: objective.loss({"scores": scores}, batch)[0], (scores.requires_grad_(),)
    )


def test_statistics_have_no_gradient() -> None:
    (scores,) = _random(len(IDS), 1.0)
    loss, found = RewardObjective().loss({"scores": scores.requires_grad_()}, _batch())
    assert loss.requires_grad
    assert not any(value.requires_grad for value in found.values())


def test_half_a_kept_pair_adds_nothing() -> None:
    (scores,) = _random(len(IDS), 1.0)
    whole, _ = RewardObjective().loss({"scores": scores}, _batch(KEPT_PAIRS))
    for half in ((1, 1, 1, 0, 1, 1, 1, 1), (1, 1, 0, 1, 1, 1, 1, 1)):
        assert RewardObjective().loss({"scores": scores}, _batch(tuple(map(float, half))))[0] == whole


@pytest.mark.parametrize("ids", [(0, 1, 2), (1, 2), (0, 2), (2, 1)])
def test_half_pairs_are_an_error(ids: tuple[int, ...]) -> None:
    batch = Batch(ids=ids, prompt_lengths=(1,) * len(ids), response_lengths=(1,) * len(ids))
    with pytest.raises(RealError, match=r"expected whole pairs 2k, 2k \+ 1 side by side"):
        RewardObjective().loss({"scores": torch.zeros(len(ids))}, batch)
