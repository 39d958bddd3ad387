"""The losses of PPO as sums over response tokens, with sums of what is worth watching.

Shape legend: R response tokens of a micro-batch. Sums and not means: the backend divides by the tokens of the
whole minibatch, so that a loss does not depend on how the minibatch was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_real.backend import Head
from megatron_real.batch import Batch

__all__ = ["PolicyObjective", "ValueObjective", "policy_loss", "value_loss"]

_MAX_LOG_RATIO = 20.0
"""Beyond exp(20) a ratio is clipped anyway; this keeps a stray token from overflowing fp32."""

Statistics = dict[str, torch.Tensor]


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, Statistics]:
    """Clipped surrogate of PPO (Schulman et al. 2017, eq. 7), to be minimised.

    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``, where the ratio is that of the new to the
    old probability of a token.

    Args:
        logprobs: [R], with gradient.
        old_logprobs: [R], when the tokens were sampled.
        advantages: [R].
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.

    Returns:
        The sum over tokens and sums of statistics: ``clip_fraction`` counts tokens whose gradient the
        clip cut off.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped).sum()
    with torch.no_grad():
        statistics = {
            "policy_loss": loss.detach(),
            "ratio": ratio.sum(),
            "ratio_deviation": (ratio - 1.0).abs().sum(),
            "clip_fraction": (clipped > plain).to(ratio.dtype).sum(),
            "approx_kl_k1": -log_ratio.sum(),
            "approx_kl_k3": (torch.expm1(log_ratio) - log_ratio).sum(),
        }
    return loss, {name: value.detach() for name, value in statistics.items()}


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, Statistics]:
    """Squared error of the critic, pessimistic between the value and the value clipped around the old one.

    ``0.5 * max((V - R)**2, (clip(V, V_old - clip, V_old + clip) - R)**2)``; without a clip
    ``0.5 * (V - R)**2``.

    Args:
        values: [R], with gradient.
        old_values: [R], from the critic's inference.
        returns: [R].
        clip: how far a value may move from the old one; None does not clip.

    Returns:
        The sum over tokens and sums of statistics.
    """
    plain = (values - returns).square()
    worst = plain
    cut = torch.zeros_like(plain)
    if clip is not None:
        moved = values - old_values
        worst = torch.maximum(plain, (old_values + moved.clamp(-clip, clip) - returns).square())
        # Without the first condition, rounding in the line above would count tokens far from the clip.
        cut = ((moved.abs() > clip) & (worst > plain)).to(plain.dtype)
    loss = 0.5 * worst.sum()
    with torch.no_grad():
        statistics = {
            "value_loss": loss,
            "value": values.sum(),
            "value_error": (values - returns).abs().sum(),
            "value_clip_fraction": cut.sum(),
        }
    return loss, {name: value.detach() for name, value in statistics.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The actor's loss: clipped surrogate minus an entropy bonus."""

    clip_low: float
    clip_high: float
    entropy_coefficient: float = 0.0
    head: Head = Head.LOGPROBS

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Statistics]:
        """See `megatron_real.backend.Objective`; `batch` has ``logprobs`` and ``advantages``."""
        loss, statistics = policy_loss(
            outputs["logprobs"],
            batch.data["logprobs"],
            batch.data["advantages"],
            self.clip_low,
            self.clip_high,
        )
        entropy = outputs["entropy"].sum()
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * entropy
        return loss, {**statistics, "entropy": entropy.detach()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """The critic's loss."""

    clip: float | None
    coefficient: float = 1.0
    head: Head = Head.VALUES

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Statistics]:
        """See `megatron_real.backend.Objective`; `batch` has ``values`` and ``returns``."""
        loss, statistics = value_loss(
            outputs["values"], batch.data["values"], batch.data["returns"], self.clip
        )
        return self.coefficient * loss, statistics
