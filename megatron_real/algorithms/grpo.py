"""Group relative policy optimisation, with what DAPO and Dr. GRPO change as options.

=============  ===========================  ==============================================================
option         GRPO (arXiv:2402.03300)      others
=============  ===========================  ==============================================================
average        sequences                    DAPO (arXiv:2503.14476): tokens; Dr. GRPO (2503.20783): constant
scale_rewards  true                         Dr. GRPO: false
kl_coefficient 0.04, in the loss            both: 0, and no reference
clip_ratio     0.2 to both sides            DAPO: clip_ratio_high 0.28
further                                     DAPO: dynamic_sampling, overlong_buffer
=============  ===========================  ==============================================================

conf/algorithm/dapo.yaml and dr_grpo.yaml set them.
"""

from __future__ import annotations

import dataclasses

from megatron_real.algorithms.advantages import per_token
from megatron_real.algorithms.base import Advantages, PolicyAlgorithm, Responses
from megatron_real.algorithms.configs import GRPOConfig
from megatron_real.algorithms.groups import group_advantages, informative_groups
from megatron_real.algorithms.kl import KLEstimator
from megatron_real.algorithms.losses import PolicyObjective

__all__ = ["GRPO"]


class GRPO(PolicyAlgorithm[GRPOConfig]):
    """The rewards of a group take the place of a critic, and the KL divergence is a term of the loss."""

    def policy_objective(self) -> PolicyObjective:
        """Adds the KL divergence from the reference."""
        return dataclasses.replace(
            super().policy_objective(),
            kl_coefficient=self.config.kl_coefficient,
            kl_estimator=KLEstimator(self.config.kl_estimator),
        )

    def advantages(self, iteration: int, responses: Responses) -> Advantages:
        """A response's reward relative to those of its group, for each of its tokens."""
        config = self.config
        size = config.samples_per_prompt
        advantages, kept = group_advantages(responses.scores, size, scale=config.scale_rewards)
        metrics: dict[str, float] = {}
        if config.dynamic_sampling:
            num_groups = len(responses.lengths) // size
            wanted = max(int(num_groups / config.oversampling), 1)
            # Of the rewards as they came: lengths differ in every group, and DAPO asks whether answers are right.
            kept &= informative_groups(responses.data["rewards"], size, wanted=wanted)
            metrics["groups_kept"] = int(kept.view(num_groups, size).any(dim=1).sum()) / num_groups
        return Advantages(tokens=per_token(advantages, responses.lengths), kept=kept, metrics=metrics)
