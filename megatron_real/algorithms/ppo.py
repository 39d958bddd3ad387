"""Proximal policy optimisation with a critic."""

from __future__ import annotations

from megatron_real.algorithms.advantages import explained_variance, gae, per_token, reward_tokens
from megatron_real.algorithms.base import Advantages, PenalisedAlgorithm, Responses, moments, require_training
from megatron_real.algorithms.configs import PPOConfig
from megatron_real.algorithms.losses import ValueObjective
from megatron_real.backend import Objective
from megatron_real.dataflow import Call, KeySpec, Per

__all__ = ["PPO"]

_RETURNS = KeySpec(name="returns", per=Per.RESPONSE, dtype="float32")


class PPO(PenalisedAlgorithm[PPOConfig]):
    """A critic, a KL penalty per token and whitened advantages (Schulman et al. 2017; Ziegler et al. 2019)."""

    def objective(self, call: Call) -> Objective:
        """The loss of ``actor_train`` or ``critic_train``."""
        if call.model != "critic":
            return super().objective(call)
        require_training(call)
        return ValueObjective(clip=self.config.value_clip, coefficient=self.config.value_coefficient)

    def advantages(self, iteration: int, responses: Responses) -> Advantages:
        """Generalised advantage estimation; adds ``returns``, which are what the critic learns."""
        config, lengths, values = self.config, responses.lengths, responses.data["values"]
        penalties, metrics = self.penalties(iteration, responses)
        rewards = reward_tokens(responses.scores, penalties, lengths)
        advantages = gae(rewards, values, lengths, gamma=config.gamma, lam=config.lam)
        returns = advantages + values
        kept = ~responses.scores.isnan()
        counted = per_token(kept, lengths)
        # Against the rewards that followed alone: returns at lam < 1 contain the values that are judged.
        followed = gae(rewards, values, lengths, gamma=config.gamma, lam=1.0) + values
        return Advantages(
            tokens=advantages,
            kept=kept,
            whiten=config.whiten,
            keys={_RETURNS: returns},
            metrics={
                **moments("return", returns[counted]),
                "explained_variance": explained_variance(values[counted], followed[counted]),
                **metrics,
            },
        )
