"""Advantages within groups against loops over responses in Python floats, and cases worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megatron_real.algorithms.groups import (
    greedy_advantages,
    group_advantages,
    informative_groups,
    leave_one_out_advantages,
    overlong_penalties,
)
from megatron_real.errors import RealError

NAN = math.nan
REWARDS = [1.0, 0.0, 0.5, 0.25, 2.0, NAN, -1.0, 0.5, NAN, 3.0, NAN, NAN, 0.1, 0.1, 0.1, 0.1]
"""Groups of four: whole, with one reward missing, with one reward left, and all the same."""


def _present(rewards: list[float], group_size: int) -> list[list[float]]:
    """For each response, the rewards of its group that came."""
    starts = [index // group_size * group_size for index in range(len(rewards))]
    return [[r for r in rewards[start : start + group_size] if not math.isnan(r)] for start in starts]


@pytest.mark.parametrize("scale", [True, False])
def test_group_advantages(scale: bool) -> None:
    found, kept = group_advantages(torch.tensor(REWARDS), 4, scale=scale, epsilon=0.01)
    rewards = torch.tensor(REWARDS).double().tolist()  # as fp32 has them
    for index, (reward, group) in enumerate(zip(rewards, _present(rewards, 4), strict=True)):
        counts = not math.isnan(reward) and len(group) >= 2
        wanted = 0.0
        if counts:
            wanted = reward - statistics.fmean(group)
            wanted /= statistics.stdev(group) + 0.01 if scale else 1.0
        assert kept[index].item() is counts
        assert found[index].item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert found.dtype == torch.float64


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0])
    assert group_advantages(rewards, 2, scale=False)[0].tolist() == [0.5, -0.5, -1.5, 1.5]
    # The deviation over n - 1 of two rewards is their distance over the root of 2.
    root = math.sqrt(0.5)
    assert group_advantages(rewards, 2, epsilon=0.0)[0].tolist() == pytest.approx([root, -root, -root, root])


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_a_group_without_spread_has_no_advantage(size: int) -> None:
    """Exactly: subtracting a rounded mean leaves a rest, which a small epsilon would blow up."""
    rewards = torch.full((size,), 0.1)
    for advantages, kept in (
        group_advantages(rewards, size, epsilon=1e-30),
        leave_one_out_advantages(rewards, size),
    ):
        assert advantages.tolist() == [0.0] * size
        assert kept.all()


def test_leave_one_out_advantages() -> None:
    found, kept = leave_one_out_advantages(torch.tensor(REWARDS), 4)
    rewards = torch.tensor(REWARDS).double().tolist()
    for index, reward in enumerate(rewards):
        start = index // 4 * 4
        others = [rewards[i] for i in range(start, start + 4) if i != index and not math.isnan(rewards[i])]
        counts = not math.isnan(reward) and bool(others)
        wanted = reward - sum(others) / len(others) if counts else 0.0
        assert kept[index].item() is counts
        assert found[index].item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_greedy_advantages() -> None:
    rewards, greedy = torch.tensor([1.0, NAN, 2.0, NAN]), torch.tensor([0.25, 1.0, NAN, NAN])
    advantages, kept = greedy_advantages(rewards, greedy)
    assert advantages.tolist() == [0.75, 0.0, 0.0, 0.0]
    assert kept.tolist() == [True, False, False, False]
    assert advantages.dtype == torch.float64


def test_groups_with_spread_are_kept_evenly() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, NAN, 1.0, 0.0, 2.0, NAN, NAN, 5.0, 6.0])
    spread = [False, True, False, True, False, True]
    for wanted, kept in (
        (1, [False, True] + [False] * 4),
        (2, [False, True, False, True, False, False]),  # places 0 and 3 // 2 of the three
        (3, spread),
        (9, spread),
    ):
        found = informative_groups(rewards, 2, wanted=wanted)
        assert found.tolist() == [flag for flag in kept for _ in range(2)]


def test_a_missing_reward_is_masked_in_a_group_that_is_kept() -> None:
    rewards = torch.tensor([1.0, NAN, 0.0, NAN, 2.0, 2.0])
    assert informative_groups(rewards, 3, wanted=2).tolist() == [True, False, True, False, False, False]


def test_overlong_penalties_by_hand() -> None:
    lengths = [0, 60, 80, 85, 90, 100, 120]
    found = overlong_penalties(lengths, limit=100, buffer=20)
    assert found.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert found.dtype == torch.float64
    assert overlong_penalties([50], limit=100, buffer=100).tolist() == [-0.5]
    assert overlong_penalties([], limit=100, buffer=1).shape == (0,)


def test_misuse_is_an_error() -> None:
    rewards = torch.zeros(6)
    for size in (0, 1, 4):
        for call in (
            lambda size: group_advantages(rewards, size),
            lambda size: leave_one_out_advantages(rewards, size),
            lambda size: informative_groups(rewards, size, wanted=1),
        ):
            with pytest.raises(RealError, match=rf"shape \(6,\) in groups of {size}; expected whole groups"):
                call(size)
    with pytest.raises(RealError, match="found wanted=0; expected at least 1"):
        informative_groups(rewards, 2, wanted=0)
    for buffer in (0, 11):
        with pytest.raises(RealError, match=f"a buffer of {buffer} tokens; expected 1 to the limit, 10"):
            overlong_penalties([1], limit=10, buffer=buffer)
