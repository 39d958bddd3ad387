"""Advantages of whole responses from the rewards of their group, and which groups count.

A group is the responses to one prompt: `group_size` sequences with consecutive ids. A reward that did not come is NaN;
its sequence is masked, and the others are compared among themselves. A masked sequence has advantage 0.

Everything is float64 [S] in sequence-id order on the CPU, with exactly rounded sums, as in `advantages`.

Invariants (tests/property/test_groups.py):
    - a group's results do not depend on other groups, but for `informative_groups`, which counts them;
    - permuting a group permutes its results, bit for bit; a masked sequence is as good as one that is not there;
    - how many sequences there are never depends on a reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megatron_real.errors import RealError

__all__ = [
    "greedy_advantages",
    "group_advantages",
    "informative_groups",
    "leave_one_out_advantages",
    "overlong_penalties",
]


def group_advantages(
    rewards: torch.Tensor, group_size: int, *, scale: bool = True, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO's advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): a reward relative to its group.

    ``A_i = (r_i - mean(r)) / (std(r) + epsilon)``, with the deviation over n - 1 as verl, OpenRLHF and TRL have it.
    Without the scale it is that of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3): dividing by the deviation
    gives weight to prompts that are almost always, or almost never, solved.

    Args:
        rewards: [S], NaN where one did not come.
        group_size: responses to a prompt, at least 2.
        scale: whether to divide by the group's deviation.
        epsilon: added to the deviation. A group without any spread has advantages of 0 whatever it is.

    Returns:
        Advantages [S] float64, and [S] bool which sequences are kept: those with a reward in a group that has at least
        two of them.

    Raises:
        RealError: `group_size` is below 2, or the sequences are no whole groups.
    """

    def relative(values: Sequence[float]) -> list[float]:
        centred = _centred(values)
        if not scale:
            return centred
        deviation = math.sqrt(math.fsum(value**2 for value in centred) / (len(values) - 1))
        return [value / (deviation + epsilon) for value in centred]

    return _within_groups(rewards, group_size, relative)


def leave_one_out_advantages(rewards: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO's advantage (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    ``A_i = r_i - mean of the other rewards of the group``: the baseline does not depend on the response that it judges,
    so the gradient is unbiased. RLOO takes the KL penalty into the reward: subtract it before.

    Args:
        rewards: [S], NaN where one did not come.
        group_size: responses to a prompt, at least 2.

    Returns:
        As `group_advantages`.

    Raises:
        RealError: `group_size` is below 2, or the sequences are no whole groups.
    """

    def against_the_others(values: Sequence[float]) -> list[float]:
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1).
        return [value * len(values) / (len(values) - 1) for value in _centred(values)]

    return _within_groups(rewards, group_size, against_the_others)


def greedy_advantages(
    rewards: torch.Tensor, greedy_rewards: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMax's advantage (Li et al. 2023, arXiv:2310.10505, algorithm 1).

    ``A = r - r_greedy``: the reward of the greedy response to the same prompt is the baseline.

    Args:
        rewards: [S] of the sampled responses, NaN where one did not come.
        greedy_rewards: [S] of the greedy responses to the same prompts, NaN where one did not come.

    Returns:
        Advantages [S] float64, and [S] bool which sequences are kept: those with both rewards.
    """
    advantages = rewards.double() - greedy_rewards.double()
    kept = ~advantages.isnan()
    return advantages.masked_fill(~kept, 0.0), kept


def informative_groups(rewards: torch.Tensor, group_size: int, *, wanted: int) -> torch.Tensor:
    """DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2) over a fixed number of groups.

    DAPO generates until it has `wanted` groups whose rewards differ: others have no gradient. Here the calls of an
    iteration are fixed, so more groups than `wanted` are generated from the start; of those with spread `wanted` are
    kept and all others masked. They are spread evenly, so that minibatches, which are cut by id, keep their shares.
    When too few have spread, those few are kept.

    Args:
        rewards: [S] to look for spread in, NaN where one did not come.
        group_size: responses to a prompt, at least 2.
        wanted: groups to keep.

    Returns:
        [S] bool: the sequences with a reward in a group that is kept.

    Raises:
        RealError: `group_size` is below 2, `wanted` below 1, or the sequences are no whole groups.
    """
    if wanted < 1:
        raise RealError(f"groups: found wanted={wanted}; expected at least 1 group to keep.")
    groups = list(_groups(rewards, group_size))
    found = [
        number
        for number, group in enumerate(groups)
        if len({value for value in group if not math.isnan(value)}) > 1
    ]
    if len(found) > wanted:
        found = [found[place * len(found) // wanted] for place in range(wanted)]
    chosen = set(found)
    kept = [
        number in chosen and not math.isnan(value) for number, group in enumerate(groups) for value in group
    ]
    return torch.tensor(kept, dtype=torch.bool)


def overlong_penalties(lengths: Sequence[int], *, limit: int, buffer: int) -> torch.Tensor:
    """DAPO's soft penalty for long responses (arXiv:2503.14476, eq. 13), to be added to the rewards.

    0 up to ``limit - buffer`` tokens, then falling linearly to -1 at `limit` tokens.

    Args:
        lengths: response tokens of each sequence.
        limit: the longest response that can be.
        buffer: tokens before it over which the penalty grows; more than 0 and at most `limit`.

    Returns:
        [S] float64, between -1 and 0.

    Raises:
        RealError: the buffer is not between 1 and `limit`.
    """
    if not 1 <= buffer <= limit:
        raise RealError(
            f"overlong penalty: found a buffer of {buffer} tokens; expected 1 to the limit, {limit}."
        )
    excess = torch.tensor(list(lengths), dtype=torch.float64) - (limit - buffer)
    return -(excess / buffer).clamp(0.0, 1.0)


def _within_groups(
    rewards: torch.Tensor, group_size: int, compare: Callable[[Sequence[float]], list[float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compare` applied to the rewards that came of each group with at least two of them; 0 elsewhere."""
    advantages = torch.zeros(rewards.numel(), dtype=torch.float64)
    kept = torch.zeros(rewards.numel(), dtype=torch.bool)
    for number, group in enumerate(_groups(rewards, group_size)):
        present = [i for i, value in enumerate(group) if not math.isnan(value)]
        if len(present) < 2:
            continue
        at = torch.tensor(present) + number * group_size
        advantages[at] = torch.tensor(compare([group[i] for i in present]), dtype=torch.float64)
        kept[at] = True
    return advantages, kept


def _centred(values: Sequence[float]) -> list[float]:
    """Values minus their mean: exactly 0 where all are equal, which subtracting a rounded mean is not."""
    total, count = math.fsum(values), len(values)
    return [(count * value - total) / count for value in values]


def _groups(rewards: torch.Tensor, group_size: int) -> list[list[float]]:
    if group_size < 2 or rewards.dim() != 1 or rewards.numel() % group_size:
        raise RealError(
            f"groups: found rewards of shape {tuple(rewards.shape)} in groups of {group_size}; expected whole groups "
            "of at least 2 sequences. Set samples_per_prompt to 2 or more."
        )
    numbers = rewards.double().tolist()
    return [numbers[start : start + group_size] for start in range(0, len(numbers), group_size)]
