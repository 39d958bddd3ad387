"""Policy gradients without a critic whose baseline is made of other responses, with the KL penalty in the reward.

With one minibatch and one epoch the ratio is 1 and nothing is clipped: the gradient is that of REINFORCE.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron_real.algorithms.advantages import discounted_returns, per_token, reward_tokens, sequence_sums
from megatron_real.algorithms.base import Advantages, PenalisedAlgorithm, Responses
from megatron_real.algorithms.configs import ReinforcePPConfig, ReMaxConfig, RLOOConfig
from megatron_real.algorithms.groups import greedy_advantages, group_advantages, leave_one_out_advantages
from megatron_real.backend import Sampling
from megatron_real.dataflow import SAMPLES, Call

__all__ = ["RLOO", "ReMax", "ReinforcePP"]


class RLOO(PenalisedAlgorithm[RLOOConfig]):
    """Leave-one-out: the baseline of a response is the mean reward of the others in its group (arXiv:2402.14740)."""

    def advantages(self, iteration: int, responses: Responses) -> Advantages:
        """A whole response is one action: its reward less its KL penalty, relative to that of the others."""
        lengths = responses.lengths
        penalties, metrics = self.penalties(iteration, responses)
        totals = responses.scores - torch.tensor(sequence_sums(penalties, lengths), dtype=torch.float64)
        advantages, kept = leave_one_out_advantages(totals, self.config.samples_per_prompt)
        return Advantages(tokens=per_token(advantages, lengths), kept=kept, metrics=metrics)


class ReinforcePP(PenalisedAlgorithm[ReinforcePPConfig]):
    """REINFORCE++: the return of each token, normalised over the whole batch (arXiv:2501.03262)."""

    def advantages(self, iteration: int, responses: Responses) -> Advantages:
        """What follows each token: the penalties from there on and, at the end, the response's score."""
        lengths, scores = responses.lengths, responses.scores
        kept = ~scores.isnan()
        if self.config.group_baseline:
            scores, kept = group_advantages(scores, self.config.samples_per_prompt, scale=False)
        penalties, metrics = self.penalties(iteration, responses)
        rewards = reward_tokens(scores, penalties, lengths)
        returns = discounted_returns(rewards, lengths, gamma=self.config.gamma)
        return Advantages(tokens=returns, kept=kept, whiten=True, metrics=metrics)


class ReMax(PenalisedAlgorithm[ReMaxConfig]):
    """The greedy response to the same prompt is the baseline (arXiv:2310.10505)."""

    def sampling(self, call: Call) -> Sampling:
        """As the options say, or greedily for the other set of sequences."""
        return dataclasses.replace(super().sampling(call), greedy=call.sequences != SAMPLES)

    def advantages(self, iteration: int, responses: Responses) -> Advantages:
        """Reward less that of the greedy response, on the last token; KL penalties on all, and what follows each."""
        lengths = responses.lengths
        greedy = self.shaped(responses.data["greedy_rewards"])
        differences, kept = greedy_advantages(responses.scores, greedy)
        penalties, metrics = self.penalties(iteration, responses)
        rewards = reward_tokens(differences, penalties, lengths)
        return Advantages(tokens=discounted_returns(rewards, lengths, gamma=1.0), kept=kept, metrics=metrics)
