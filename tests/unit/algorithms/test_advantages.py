"""Advantages against loops over single sequences in Python floats, and cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_real.algorithms.advantages import (
    discounted_returns,
    exact_moments,
    explained_variance,
    gae,
    per_token,
    reward_tokens,
    sequence_sums,
    whiten,
)
from megatron_real.errors import RealError


def loop_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum of discounted temporal differences, from its definition: quadratic and without recursion."""
    length = len(rewards)
    padded = [*values, 0.0]
    deltas = [rewards[t] + gamma * padded[t + 1] - padded[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0), (0.0, 1.0)])
def test_gae_of_each_sequence(gamma: float, lam: float) -> None:
    lengths = [3, 1, 0, 17, 5, 1, 0]
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    found = gae(rewards, values, lengths, gamma=gamma, lam=lam)
    wanted = [
        advantage
        for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True)
        for advantage in loop_gae(r.tolist(), v.tolist(), gamma, lam)
    ]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_monte_carlo_by_hand() -> None:
    # gamma = lam = 1: the advantage is what is still to come minus the value.
    rewards, values = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.25, 8.0])
    assert gae(rewards, values, [3], gamma=1.0, lam=1.0).tolist() == [6.5, 5.75, -4.0]
    assert gae(rewards, values, [3], gamma=0.5, lam=0.0).tolist() == [0.625, 5.75, -4.0]


def test_gae_of_nothing() -> None:
    empty = torch.empty(0)
    assert gae(empty, empty, [], gamma=1.0, lam=1.0).shape == (0,)
    assert gae(empty, empty, [0, 0], gamma=1.0, lam=1.0).dtype == torch.float64


def test_gae_keeps_its_inputs() -> None:
    rewards, values = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    gae(rewards, values, [2, 2], gamma=1.0, lam=0.9)
    assert rewards.tolist() == values.tolist() == [1.0] * 4


def test_score_stands_on_the_last_token() -> None:
    penalties = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    rewards = reward_tokens(torch.tensor([10.0, 20.0]), penalties, [3, 1])
    assert rewards.tolist() == [-0.1, -0.2, 10.0 - 0.3, 20.0 - 0.4]
    assert penalties.tolist() == [0.1, 0.2, 0.3, 0.4]


def test_empty_response_has_no_place_for_its_score() -> None:
    with pytest.raises(RealError, match=r"responses \[1\] have no tokens"):
        reward_tokens(torch.zeros(2), torch.zeros(3), [3, 0])


def test_a_missing_score_leaves_its_neighbours_alone() -> None:
    rewards = reward_tokens(torch.tensor([math.nan, 2.0]), torch.full((3,), 0.5), [2, 1])
    assert rewards.tolist() == [-0.5, -0.5, 1.5]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(gamma: float) -> None:
    lengths = [3, 1, 0, 6]
    rewards = torch.randn(10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = discounted_returns(rewards, lengths, gamma=gamma)
    wanted = [
        sum(gamma ** (k - t) * part[k] for k in range(t, len(part)))
        for part in (part.tolist() for part in rewards.split(lengths))
        for t in range(len(part))
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_reinforce_plus_plus_by_sequence() -> None:
    """KL penalty and score in the reward of tokens, returns, then normalised over the tokens that are kept."""
    lengths, kept, coefficient, gamma = [2, 4, 3], [True, False, True], 0.1, 0.95
    scores = torch.tensor([1.0, math.nan, -0.5], dtype=torch.float64)
    kl = torch.randn(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    returns = discounted_returns(reward_tokens(scores, coefficient * kl, lengths), lengths, gamma=gamma)
    found = whiten(returns, kept=per_token(torch.tensor(kept), lengths), epsilon=0.0)

    wanted: list[list[float]] = []
    for score, penalties, keep in zip(scores.tolist(), kl.split(lengths), kept, strict=True):
        total, backwards = 0.0, []
        rewards = [-coefficient * k for k in penalties.tolist()]
        rewards[-1] += score
        for reward in reversed(rewards):
            total = reward + gamma * total
            backwards.append(total)
        wanted.append(backwards[::-1] if keep else [0.0] * len(rewards))
    tokens = wanted[0] + wanted[2]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((token - mean) ** 2 for token in tokens) / len(tokens))
    for part, sequence, keep in zip(found.split(lengths), wanted, kept, strict=True):
        expected = [(token - mean) / deviation if keep else 0.0 for token in sequence]
        assert part.tolist() == pytest.approx(expected, rel=1e-12)


def test_moments_are_exact() -> None:
    # A running float sum gives 0 or 2e16 here, and a sum in float32 worse.
    values = torch.tensor([1e16, 1.0, -1e16, 1.0] * 4, dtype=torch.float64)
    assert exact_moments(values)[0] == 0.5
    assert exact_moments(torch.empty(0)) == (0.0, 0.0)


def test_whiten() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 7 + 3
    white = whiten(values)
    assert white.dtype == torch.float64
    assert abs(white.mean().item()) < 1e-12
    assert abs(white.var(unbiased=False).item() - 1) < 1e-9
    assert whiten(torch.full((3,), 2.0)).tolist() == [0.0] * 3  # no variance: not a division by zero
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]


def test_whiten_what_is_kept() -> None:
    values, kept = torch.tensor([1.0, 100.0, 3.0, -7.0]), torch.tensor([True, False, True, False])
    assert whiten(values, kept=kept, epsilon=0.0).tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert whiten(values, kept=torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4
    assert torch.equal(whiten(values, kept=torch.ones(4, dtype=torch.bool)), whiten(values))


def test_a_value_for_each_token() -> None:
    assert per_token(torch.tensor([1.0, 2.0, 3.0]), [2, 0, 1]).tolist() == [1.0, 1.0, 3.0]


def test_sequence_sums() -> None:
    assert sequence_sums(torch.tensor([1.0, 2.0, 4.0]), [2, 0, 1]) == [3.0, 0.0, 4.0]


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 5.0, returns) == 1.0  # a constant offset is no unexplained variance
    assert explained_variance(torch.zeros(4), returns) == 0.0
    assert explained_variance(-returns, returns) == -3.0
    assert explained_variance(returns, torch.ones(4)) == 0.0
    assert math.isfinite(explained_variance(torch.empty(0), torch.empty(0)))
