"""Training on what a data set has: answers, or preference pairs of a chosen and a rejected one."""

from __future__ import annotations

from typing import ClassVar

from megatron_real.algorithms.base import TrainingAlgorithm, require_training
from megatron_real.algorithms.configs import DPOConfig, RewardConfig, SFTConfig
from megatron_real.algorithms.losses import SFTObjective
from megatron_real.algorithms.preference_losses import DPOObjective, PreferenceLoss, RewardObjective
from megatron_real.backend import Goal
from megatron_real.dataflow import Call

__all__ = ["DPO", "SFT", "RewardModelling"]


class SFT(TrainingAlgorithm[SFTConfig]):
    """Supervised fine-tuning: cross entropy of the answers' tokens."""

    def objective(self, call: Call) -> SFTObjective:
        """The actor's loss."""
        require_training(call)
        return SFTObjective()


class DPO(TrainingAlgorithm[DPOConfig]):
    """Direct preference optimisation (arXiv:2305.18290), or IPO (arXiv:2310.12036)."""

    goal: ClassVar[Goal] = Goal(metric="accuracy")

    def objective(self, call: Call) -> DPOObjective:
        """The actor's loss."""
        require_training(call)
        config = self.config
        return DPOObjective(
            beta=config.beta, label_smoothing=config.label_smoothing, kind=PreferenceLoss(config.loss)
        )


class RewardModelling(TrainingAlgorithm[RewardConfig]):
    """A reward model that ranks the chosen answer above the rejected one (Bradley-Terry)."""

    goal: ClassVar[Goal] = Goal(metric="accuracy")

    def objective(self, call: Call) -> RewardObjective:
        """The reward model's loss."""
        require_training(call)
        return RewardObjective(centering=self.config.centering)
