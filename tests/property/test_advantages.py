"""Advantages for any lengths: neighbours do not matter, order does not matter, loops agree."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.algorithms.advantages import (
    discounted_returns,
    exact_moments,
    gae,
    per_token,
    reward_tokens,
    whiten,
)

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)
UNIT = st.floats(0.0, 1.0, width=32)
SEED = st.integers(0, 2**31)


def _data(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(lengths), generator=generator)
    return scores, *torch.randn(2, sum(lengths), generator=generator)


def _recursion(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    result: list[float] = []
    next_value = next_advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        result.append(next_advantage)
    return result[::-1]


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, gamma=UNIT, lam=UNIT, seed=SEED)
def test_equals_a_loop_over_sequences(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    scores, penalties, values = _data(lengths, seed)
    rewards = reward_tokens(scores, penalties, lengths)
    found = gae(rewards, values, lengths, gamma=gamma, lam=lam).split(lengths)
    parts = zip(scores.tolist(), penalties.split(lengths), values.split(lengths), strict=True)
    for advantages, (score, penalty, value) in zip(found, parts, strict=True):
        expected = [-p for p in penalty.tolist()]
        expected[-1] += score
        wanted = _recursion(expected, value.tolist(), gamma, lam)
        torch.testing.assert_close(
            advantages, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, seed=SEED, data=st.data())
def test_order_of_sequences_does_not_matter(lengths: list[int], seed: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(lengths))))
    scores, penalties, values = _data(lengths, seed)

    def compute(chosen: list[int]) -> list[torch.Tensor]:
        cut = [lengths[i] for i in chosen]
        penalty = torch.cat([penalties.split(lengths)[i] for i in chosen])
        value = torch.cat([values.split(lengths)[i] for i in chosen])
        rewards = reward_tokens(scores[chosen], penalty, cut)
        return list(whiten(gae(rewards, value, cut, gamma=0.99, lam=0.95)).split(cut))

    straight = compute(list(range(len(lengths))))
    for position, permuted in zip(order, compute(list(order)), strict=True):
        assert torch.equal(permuted, straight[position]), "bit for bit"


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, seed=SEED)
def test_neighbours_do_not_matter(lengths: list[int], seed: int) -> None:
    _, rewards, values = _data(lengths, seed)
    together = gae(rewards, values, lengths, gamma=0.9, lam=0.9).split(lengths)
    for index, length in enumerate(lengths):
        own = gae(rewards.split(lengths)[index], values.split(lengths)[index], [length], gamma=0.9, lam=0.9)
        assert torch.equal(own, together[index])


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=50))
def test_whitened_moments(values: list[float]) -> None:
    white = whiten(torch.tensor(values))
    mean, variance = exact_moments(white)
    assert abs(mean) < 1e-6
    assert variance < 1 + 1e-6


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, seed=SEED, data=st.data())
def test_masked_sequences_are_as_good_as_absent(lengths: list[int], seed: int, data: st.DataObject) -> None:
    """REINFORCE++ over the whole batch: the kept ones get the bits that they get alone."""
    flags = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    kept = torch.tensor(flags)
    scores, penalties, _ = _data(lengths, seed)
    scores[~kept] = float("nan")

    def compute(scores: torch.Tensor, penalties: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        rewards = reward_tokens(scores, penalties, lengths)
        return discounted_returns(rewards, lengths, gamma=0.99)

    tokens = per_token(kept, lengths)
    found = whiten(compute(scores, penalties, lengths), kept=tokens)
    chosen = [length for length, keep in zip(lengths, flags, strict=True) if keep]
    alone = whiten(compute(scores[kept], penalties[tokens], chosen))
    assert torch.equal(found[tokens], alone)
    assert not found[~tokens].any()
