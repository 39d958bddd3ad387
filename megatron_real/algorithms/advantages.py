"""Rewards per token, returns, generalised advantage estimation and whitening over packed responses of unequal length.

Everything is float64 and flat, [R] response tokens or [S] sequences, in sequence-id order, on the CPU. Sums
are exactly rounded (`math.fsum`): no thread count, device or order of additions makes two ranks disagree in a
bit.

A response ends where it ends: one that was cut off at the length limit is treated like one that the end token
closed (the value after its last token is 0), as verl and OpenRLHF do. Nothing is bootstrapped.

Advantages of whole responses, from the rewards of their group, are in `groups`; `per_token` gives them to tokens.

Invariants (tests/property/test_advantages.py):
    - results of a sequence do not depend on its neighbours, but for whitening;
    - permuting the sequences permutes the results, bit for bit, whitening included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_real.errors import RealError

__all__ = [
    "discounted_returns",
    "exact_moments",
    "explained_variance",
    "gae",
    "per_token",
    "reward_tokens",
    "sequence_sums",
    "whiten",
]


def reward_tokens(scores: torch.Tensor, penalties: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Reward of each response token: minus its penalty, plus the sequence's score on the last token.

    Args:
        scores: [S]. NaN, of a reward that did not come, adds nothing: the sequence is to be masked.
        penalties: [R], what each token costs (KL coefficient * KL estimate).
        lengths: response tokens of each sequence, all at least 1.

    Returns:
        [R] float64.

    Raises:
        RealError: a response is empty, so that its score has no token to stand on.
    """
    if min(lengths, default=1) < 1:
        empty = [index for index, length in enumerate(lengths) if length < 1]
        raise RealError(f"advantages: responses {empty[:8]} have no tokens; expected at least 1 in each.")
    rewards = -penalties.double()
    last = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
    rewards[last] += scores.double().masked_fill(scores.isnan(), 0.0)
    return rewards


def gae(
    rewards: torch.Tensor, values: torch.Tensor, lengths: Sequence[int], *, gamma: float, lam: float
) -> torch.Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), each response an episode of its own.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``, with ``V`` and
    ``A`` zero after the last token.

    Args:
        rewards: [R].
        values: [R], value of the state before each token.
        lengths: response tokens of each sequence; 0 is allowed.
        gamma: discount per token.
        lam: 1 is Monte Carlo, 0 one-step.

    Returns:
        [R] float64.
    """
    values = values.double()
    if not values.numel():
        return values.clone()
    counts = torch.tensor(lengths, dtype=torch.int64)
    starts = counts.cumsum(0) - counts
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    time = torch.arange(values.numel()) - starts[sequence]
    next_values = torch.cat([values[1:], values.new_zeros(1)])
    next_values[time == counts[sequence] - 1] = 0.0
    deltas = rewards.double() + gamma * next_values - values
    # Time first: a step works on a contiguous row. Rows beyond a response hold zero, so no mask is needed.
    rows = deltas.new_zeros(int(counts.max()), len(lengths))
    rows[time, sequence] = deltas
    for step in range(rows.shape[0] - 2, -1, -1):
        rows[step].add_(rows[step + 1], alpha=gamma * lam)
    return rows[time, sequence]


def discounted_returns(rewards: torch.Tensor, lengths: Sequence[int], *, gamma: float) -> torch.Tensor:
    """What is still to come at each token, ``G_t = r_t + gamma * G_{t+1}``.

    With a KL penalty in `rewards` (`reward_tokens`) and whitened over the batch this is the advantage of REINFORCE++
    (Hu 2025, arXiv:2501.03262), which has neither critic nor groups.

    Args:
        rewards: [R].
        lengths: response tokens of each sequence; 0 is allowed.
        gamma: discount per token.

    Returns:
        [R] float64.
    """
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma=gamma, lam=1.0)


def per_token(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The value of a sequence, such as its advantage or whether it is kept, for each of its tokens: [S] -> [R]."""
    return values.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def exact_moments(values: torch.Tensor) -> tuple[float, float]:
    """Mean and variance (over n, not n - 1) of all elements, from exactly rounded sums; (0, 0) of none."""
    numbers = values.double().tolist()
    if not numbers:
        return 0.0, 0.0
    mean = math.fsum(numbers) / len(numbers)
    return mean, math.fsum((number - mean) ** 2 for number in numbers) / len(numbers)


def whiten(values: torch.Tensor, *, kept: torch.Tensor | None = None, epsilon: float = 1e-8) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1.

    Args:
        values: [R].
        kept: [R] bool, which of them to do it over; None is all. The others become 0.
        epsilon: added to the variance.

    Returns:
        [R] float64.
    """
    mean, variance = exact_moments(values if kept is None else values[kept])
    white = (values.double() - mean) / math.sqrt(variance + epsilon)
    return white if kept is None else white.masked_fill(~kept, 0.0)


def sequence_sums(values: torch.Tensor, lengths: Sequence[int]) -> list[float]:
    """Exactly rounded sum of each sequence: [R] -> S numbers."""
    return [math.fsum(part.tolist()) for part in values.double().split(list(lengths))]


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """``1 - var(returns - values) / var(returns)``: 1 for a perfect critic, 0 for one that knows nothing.

    0 as well when all returns are equal, where nothing can be explained.
    """
    _, variance = exact_moments(returns)
    if variance == 0.0:
        return 0.0
    _, residual = exact_moments(returns.double() - values.double())
    return 1.0 - residual / variance
