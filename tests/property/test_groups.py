"""Advantages of groups: other groups, order and masked sequences do not matter, and counts never depend on rewards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.algorithms.groups import (
    group_advantages,
    informative_groups,
    leave_one_out_advantages,
    overlong_penalties,
)

Advantages = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
ESTIMATORS: dict[str, Advantages] = {
    "grpo": group_advantages,
    "dr-grpo": lambda rewards, size: group_advantages(rewards, size, scale=False),
    "rloo": leave_one_out_advantages,
}
every_estimator = pytest.mark.parametrize("advantages_of", ESTIMATORS.values(), ids=ESTIMATORS)
REWARD = st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.1, 1.0]), st.floats(-100.0, 100.0, width=32))


@st.composite
def groups(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Rewards of up to four groups, and their size."""
    size = draw(st.integers(2, 6))
    count = size * draw(st.integers(1, 4))
    return torch.tensor(draw(st.lists(REWARD, min_size=count, max_size=count))), size


@every_estimator
@settings(deadline=None, max_examples=60)
@given(case=groups(), data=st.data())
def test_order_and_other_groups_do_not_matter(
    advantages_of: Advantages, case: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    rewards, size = case
    found, kept = advantages_of(rewards, size)
    for start in range(0, rewards.numel(), size):
        order = data.draw(st.permutations(range(start, start + size)))
        own, own_kept = advantages_of(rewards[list(order)], size)
        assert torch.equal(own, found[list(order)]), "bit for bit"
        assert torch.equal(own_kept, kept[list(order)])


@every_estimator
@settings(deadline=None, max_examples=60)
@given(case=groups())
def test_masked_sequences_are_as_good_as_absent(
    advantages_of: Advantages, case: tuple[torch.Tensor, int]
) -> None:
    rewards, size = case
    found, kept = advantages_of(rewards, size)
    assert found.shape == kept.shape == rewards.shape
    for start in range(0, rewards.numel(), size):
        group = slice(start, start + size)
        came = ~rewards[group].isnan()
        count = int(came.sum())
        assert torch.equal(kept[group], came if count >= 2 else torch.zeros(size, dtype=torch.bool))
        assert not found[group][~kept[group]].any()
        if count >= 2:
            alone, _ = advantages_of(rewards[group][came], count)
            assert torch.equal(alone, found[group][came])


@every_estimator
@settings(deadline=None, max_examples=60)
@given(case=groups(), shift=st.integers(-1000, 1000))
def test_only_differences_of_rewards_matter(
    advantages_of: Advantages, case: tuple[torch.Tensor, int], shift: int
) -> None:
    rewards, size = case[0].double(), case[1]
    found, kept = advantages_of(rewards, size)
    moved, _ = advantages_of(rewards + shift, size)
    # In rewards that hardly differ the scale would blow up the rounding of the shift.
    missing = rewards.isnan()
    highest = rewards.masked_fill(missing, -math.inf).view(-1, size).amax(dim=1)
    lowest = rewards.masked_fill(missing, math.inf).view(-1, size).amin(dim=1)
    chosen = kept & (highest - lowest > 1e-3).repeat_interleave(size)
    torch.testing.assert_close(moved[chosen], found[chosen], rtol=1e-8, atol=1e-8)
    for part in found.split(size):
        assert abs(math.fsum(part.tolist())) < 1e-8


@settings(deadline=None, max_examples=60)
@given(case=groups(), wanted=st.integers(1, 5))
def test_dynamic_sampling(case: tuple[torch.Tensor, int], wanted: int) -> None:
    rewards, size = case
    kept = informative_groups(rewards, size, wanted=wanted)
    assert kept.shape == rewards.shape, "masked, never dropped"
    spread = []
    for number, (part, flags) in enumerate(zip(rewards.split(size), kept.split(size), strict=True)):
        came = part[~part.isnan()]
        if came.numel() >= 2 and came.max() > came.min():
            spread.append(number)
        if flags.any():
            assert spread[-1:] == [number]
            assert torch.equal(flags, ~part.isnan())
    taken = [number for number, flags in enumerate(kept.split(size)) if flags.any()]
    assert len(taken) == min(wanted, len(spread))
    gaps = [spread.index(later) - spread.index(one) for one, later in itertools.pairwise(taken)]
    assert not gaps or max(gaps) - min(gaps) <= 1, "spread evenly"


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    limit=st.integers(1, 200),
    data=st.data(),
)
def test_overlong_penalties(lengths: list[int], limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    for length, found in zip(
        lengths, overlong_penalties(lengths, limit=limit, buffer=buffer).tolist(), strict=True
    ):
        if length <= limit - buffer:
            wanted = 0.0
        elif length <= limit:
            wanted = ((limit - buffer) - length) / buffer
        else:
            wanted = -1.0
        assert found == pytest.approx(wanted, abs=1e-12)
