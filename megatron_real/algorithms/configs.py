"""The options of every algorithm, as ``algorithm.NAME=VALUE`` gives them. No torch: planning reads them too.

=====================  ===============================================================
`TrainingConfig`       how a train call cuts its batch
`PolicyConfig`         what all algorithms share that generate and score responses
`PenalisedConfig`      those that take the KL penalty into the reward
=====================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_real.algorithms.options import Options, option
from megatron_real.errors import Problem

__all__ = [
    "DPOConfig",
    "GRPOConfig",
    "PPOConfig",
    "PenalisedConfig",
    "PolicyConfig",
    "RLOOConfig",
    "ReMaxConfig",
    "ReinforcePPConfig",
    "RewardConfig",
    "SFTConfig",
    "TrainingConfig",
]

_ESTIMATORS = ("k1", "k2", "k3")
_AVERAGES = ("tokens", "sequences", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(Options):
    """How a train call cuts its batch."""

    num_minibatches: int = option(1, at_least=1)
    """Optimizer steps per epoch."""
    num_epochs: int = option(1, at_least=1)
    """Passes over the batch per iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig(TrainingConfig):
    """What all algorithms share that generate responses, score them and train on them."""

    samples_per_prompt: int = option(1, at_least=1)
    """Responses to each prompt: its group."""
    max_new_tokens: int = option(128, at_least=1)
    """Longest response, the end token included."""
    temperature: float = option(1.0, above=0)
    """Of sampling, and of log-probs and entropy everywhere."""
    top_k: int = option(0, at_least=0)
    """0 keeps all."""
    top_p: float = option(1.0, above=0, at_most=1)
    stop: tuple[str, ...] = ()
    """Texts that end a response, as the end token does: it keeps the token that completes the first of them."""
    seed: int = 0
    """Of sampling."""

    reward_bias: float = 0.0
    """A reward becomes ``clip((reward - reward_bias) * reward_scale, +-reward_clip)``."""
    reward_scale: float = option(1.0, other_than=0)
    reward_clip: float | None = option(None, above=0)
    """None does not clip."""
    overlong_buffer: int = option(0, at_least=0)
    """Tokens before `max_new_tokens` over which a penalty for long responses grows from 0 to `overlong_penalty`; 0 has
    none (DAPO, arXiv:2503.14476, eq. 13)."""
    overlong_penalty: float = option(1.0, at_least=0)
    """What the longest response loses of its reward, after the clip."""

    reference: bool = True
    """Whether there is a reference model; without one `kl_coefficient` must be 0."""
    reference_ema: float = option(0.0, at_least=0, at_most=1)
    """Share of the difference to the actor that the reference takes after training; 0 leaves it what it was."""
    reference_ema_every: int = option(1, at_least=1)
    """Iterations from one such update to the next."""
    kl_coefficient: float = option(0.1, at_least=0)
    """Weight of the KL divergence from the reference."""
    kl_estimator: str = option("k1", choices=_ESTIMATORS)
    """See `megatron_real.algorithms.kl.KLEstimator`."""

    clip_ratio: float = option(0.2, above=0, below=1)
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio_high]."""
    clip_ratio_high: float | None = option(None, above=0)
    """None is the same as `clip_ratio`."""
    dual_clip: float | None = option(None, above=1)
    """Bounds the loss of a token with a negative advantage to this times the advantage (Ye et al. 2019,
    arXiv:1912.09729, eq. 3); None does not."""
    average: str = option("tokens", choices=_AVERAGES)
    """What a token counts for in the loss; see `megatron_real.algorithms.losses.Average`. ``constant`` divides by
    `max_new_tokens`."""
    entropy_coefficient: float = option(0.0, at_least=0)
    """Weight of the entropy bonus."""
    stop_ratio: float | None = option(None, above=1)
    """Mean ratio of a minibatch above which its update and the rest of the iteration's are skipped; None never does."""
    stop_kl: float | None = option(None, above=0)
    """The same for the mean KL divergence (k3) from the policy that sampled."""

    def problems(self) -> Iterator[Problem]:
        """Adds what options must agree on."""
        yield from TrainingConfig.problems(self)
        if not self.reference and self.kl_coefficient != 0:
            yield Problem(
                path="kl_coefficient",
                found=str(self.kl_coefficient),
                expected="0, since there is no reference model (reference=false)",
            )
        if not self.reference and self.reference_ema != 0:
            yield Problem(
                path="reference_ema",
                found=str(self.reference_ema),
                expected="0, since there is no reference model (reference=false)",
            )
        if not all(self.stop):
            yield Problem(path="stop", found=str(list(self.stop)), expected="texts of at least one character")
        if self.overlong_buffer > self.max_new_tokens:
            yield Problem(
                path="overlong_buffer",
                found=str(self.overlong_buffer),
                expected=f"at most max_new_tokens={self.max_new_tokens}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PenalisedConfig(PolicyConfig):
    """Of algorithms that take the KL penalty into the reward of each token."""

    kl_adaptive: bool = False
    """Whether the coefficient is steered to hold `kl_target`, from `kl_coefficient` on."""
    kl_target: float = option(6.0, above=0)
    """Nats per sequence (summed over its response)."""
    kl_horizon: float = option(10_000.0, above=0)
    """Sequences over which the coefficient adapts."""

    def problems(self) -> Iterator[Problem]:
        """Adds that an adaptive coefficient has something to start from."""
        yield from PolicyConfig.problems(self)
        if self.kl_adaptive and self.kl_coefficient == 0:
            yield Problem(
                path="kl_coefficient",
                found="0 with kl_adaptive",
                expected="above 0: it is adapted by a factor",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(PenalisedConfig):
    """Proximal policy optimisation (Schulman et al. 2017) with a critic."""

    num_minibatches: int = option(4, at_least=1)
    gamma: float = option(1.0, at_least=0, at_most=1)
    """Discount per token."""
    lam: float = option(0.95, at_least=0, at_most=1)
    """Decay of generalised advantage estimation: 1 is Monte Carlo, 0 one-step."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over all response tokens of the batch."""
    value_clip: float | None = option(0.2, above=0)
    """How far the critic may move from its inference before its loss stops falling; None does not clip."""
    value_coefficient: float = option(1.0, above=0)
    """Weight of the critic's loss: the critic is a model of its own, so this only scales its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOOConfig(PenalisedConfig):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

    samples_per_prompt: int = option(4, at_least=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePPConfig(PenalisedConfig):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""

    gamma: float = option(1.0, at_least=0, at_most=1)
    """Discount per token."""
    group_baseline: bool = False
    """Subtract the mean reward of the group (``REINFORCE++-baseline``); needs two responses to a prompt."""

    def problems(self) -> Iterator[Problem]:
        """Adds that a group has something to compare."""
        yield from PenalisedConfig.problems(self)
        if self.group_baseline and self.samples_per_prompt < 2:
            yield Problem(
                path="samples_per_prompt",
                found=f"{self.samples_per_prompt} with group_baseline",
                expected="at least 2",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMaxConfig(PenalisedConfig):
    """ReMax (Li et al. 2023, arXiv:2310.10505): the greedy response's reward is the baseline."""

    samples_per_prompt: int = option(1, at_least=1, at_most=1)
    """1: every response has a greedy one beside it."""
    reference: bool = False
    kl_coefficient: float = option(0.0, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(PolicyConfig):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), DAPO and Dr. GRPO."""

    samples_per_prompt: int = option(8, at_least=2)
    scale_rewards: bool = True
    """Divide by the standard deviation of the group's rewards; Dr. GRPO (arXiv:2503.20783) does not."""
    kl_coefficient: float = option(0.04, at_least=0)
    """Of the KL divergence in the loss."""
    kl_estimator: str = option("k3", choices=("k2", "k3"))
    """k1 has no gradient to speak of."""
    average: str = option("sequences", choices=_AVERAGES)
    """``sequences`` is GRPO's, ``tokens`` DAPO's, ``constant`` that of Dr. GRPO."""
    dynamic_sampling: bool = False
    """Mask groups whose rewards are all the same: they have no gradient (DAPO, arXiv:2503.14476, section 3.2)."""
    oversampling: float = option(1.0, at_least=1)
    """With dynamic sampling, at most ``data.batch_size / oversampling`` groups are trained on and those left over are
    masked, so that about as many have an effect in every iteration. The batch is generated at once: how many prompts
    are generated never depends on rewards."""

    def problems(self) -> Iterator[Problem]:
        """Adds that there is something to choose from."""
        yield from PolicyConfig.problems(self)
        if self.oversampling != 1 and not self.dynamic_sampling:
            yield Problem(
                path="oversampling",
                found=f"{self.oversampling} without dynamic_sampling",
                expected="1, or dynamic_sampling=true",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(TrainingConfig):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: float = option(0.1, above=0)
    """How strongly the policy is held to the reference; of IPO: tau."""
    loss: str = option("sigmoid", choices=("sigmoid", "ipo"))
    """``sigmoid`` is DPO, ``ipo`` is IPO (Azar et al. 2023, arXiv:2310.12036)."""
    label_smoothing: float = option(0.0, at_least=0, below=0.5)
    """The share of pairs that are taken to be the wrong way round."""
    reference_ema: float = option(0.0, at_least=0, at_most=1)
    """Share of the difference to the actor that the reference takes after training (TR-DPO, Gorbatovski et al. 2024,
    arXiv:2404.09656); 0 leaves it what it was."""
    reference_ema_every: int = option(1, at_least=1)
    """Iterations from one such update to the next."""

    def problems(self) -> Iterator[Problem]:
        """Adds that only DPO smooths labels."""
        yield from TrainingConfig.problems(self)
        if self.loss == "ipo" and self.label_smoothing:
            yield Problem(path="label_smoothing", found=f"{self.label_smoothing} with loss=ipo", expected="0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(TrainingConfig):
    """A reward model from preference pairs (Bradley-Terry)."""

    centering: float = option(0.0, at_least=0)
    """Weight of the squared sum of a pair's scores, which holds their level near 0 (arXiv:2312.09244)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""
