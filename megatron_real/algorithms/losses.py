"""Losses over response tokens: policy, value and supervised, with the statistics worth watching.

The functions give one number per token; the objectives add them up over a micro-batch. Sums and not means: the backend
divides by the tokens or sequences of the whole minibatch, so that a loss does not depend on how the minibatch was cut.

Shape legend: R response tokens of a micro-batch.

Invariants (tests/property/test_losses.py):
    - the sums over any cut of a minibatch add up to those of the whole, in any order of its sequences;
    - a masked sequence (`backend.KEPT`) adds nothing, to the loss, to its gradient or to a statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar

import torch

from megatron_real.algorithms.kl import KLEstimator, estimate_kl
from megatron_real.backend import KEPT, Head
from megatron_real.batch import Batch
from megatron_real.dataflow import Per
from megatron_real.errors import ConfigError

__all__ = [
    "RATIO_STATISTICS",
    "Average",
    "PolicyObjective",
    "SFTObjective",
    "ValueObjective",
    "policy_loss",
    "token_weights",
    "value_loss",
]

RATIO_STATISTICS = ("ratio", "ratio_deviation", "clip_fraction", "approx_kl_k1", "approx_kl_k3")
"""Statistics that tell how far a policy has moved since it sampled: what `PolicyObjective.stop_above` may limit."""

_MAX_LOG_RATIO = 20.0
"""Beyond exp(20) a ratio is clipped anyway; this keeps a stray token from overflowing fp32."""

_NEVER: Mapping[str, float] = MappingProxyType({})

Statistics = dict[str, torch.Tensor]


class Average(StrEnum):
    """What a token counts for in the loss of a policy.

    With L_s response tokens in sequence s, of S kept sequences in the minibatch:
    """

    TOKENS = "tokens"
    """``sum over all tokens / sum of L_s``: every token alike. PPO; DAPO (arXiv:2503.14476, section 3.3)."""
    SEQUENCES = "sequences"
    """``sum over s of (sum over its tokens / L_s) / S``: every sequence alike. GRPO (arXiv:2402.03300, eq. 3)."""
    CONSTANT = "constant"
    """``sum over all tokens / (S * constant)``: Dr. GRPO (arXiv:2503.20783, section 3), whose constant is the longest
    response that can be. Long wrong responses are not let off lightly, as they are by SEQUENCES."""


def token_weights(batch: Batch, average: Average, like: torch.Tensor, constant: int = 1) -> torch.Tensor:
    """What each response token counts for: the loss is the weighted sum, divided by tokens (TOKENS) or sequences.

    Args:
        batch: lengths, and `KEPT` if some of its sequences are masked.
        average: see there.
        like: dtype and device.
        constant: the divisor of CONSTANT.

    Returns:
        [R], 0 for tokens of masked sequences.
    """
    lengths = batch.response_lengths
    counts = torch.tensor(lengths, dtype=torch.int64, device=like.device)
    weights = torch.ones(len(lengths), dtype=like.dtype, device=like.device)
    if KEPT.name in batch.data:
        weights = batch.data[KEPT.name].to(like)
    if average is Average.SEQUENCES:
        weights = weights / counts.clamp(min=1)
    elif average is Average.CONSTANT:
        weights = weights / constant
    return weights.repeat_interleave(counts, output_size=sum(lengths))


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, Statistics]:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), to be minimised.

    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``, where the ratio is that of the new to the
    old probability of a token. A `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476, eq. 10), which
    lets rare tokens grow. The dual clip (Ye et al. 2019, arXiv:1912.09729) bounds what the plain one leaves
    unbounded: where A is negative the loss is at most ``-dual_clip * A``.

    Args:
        logprobs: [R], with gradient.
        old_logprobs: [R], when the tokens were sampled.
        advantages: [R].
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: above 1 (the paper's is 3); None does not bound.

    Returns:
        Each token's loss and `RATIO_STATISTICS`, all [R]: ``clip_fraction`` is 1 for tokens whose gradient a clip
        cut off.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(plain, clipped)
    cut = clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        too_far = (advantages < 0) & (losses > bound)
        losses = torch.where(too_far, bound, losses)
        cut = cut | too_far
    with torch.no_grad():
        statistics = {
            "ratio": ratio.detach(),
            "ratio_deviation": (ratio - 1.0).abs(),
            "clip_fraction": cut.to(ratio.dtype),
            "approx_kl_k1": -log_ratio,
            "approx_kl_k3": torch.expm1(log_ratio) - log_ratio,
        }
    return losses, statistics


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, Statistics]:
    """Squared error of the critic, pessimistic between the value and the value clipped around the old one.

    ``0.5 * max((V - R)**2, (clip(V, V_old - clip, V_old + clip) - R)**2)``; without a clip ``0.5 * (V - R)**2``
    (baselines' PPO2; Huang et al. 2022, "The 37 implementation details of PPO", 9).

    Args:
        values: [R], with gradient.
        old_values: [R], from the critic's inference.
        returns: [R].
        clip: how far a value may move from the old one; None does not clip.

    Returns:
        Each token's loss and statistics, all [R].
    """
    plain = (values - returns).square()
    worst = plain
    cut = torch.zeros_like(plain)
    if clip is not None:
        moved = values - old_values
        worst = torch.maximum(plain, (old_values + moved.clamp(-clip, clip) - returns).square())
        # Without the first condition, rounding in the line above would count tokens far from the clip.
        cut = ((moved.abs() > clip) & (worst > plain)).to(plain.dtype)
    losses = 0.5 * worst
    with torch.no_grad():
        statistics = {
            "value_loss": losses.detach(),
            "value": values.detach(),
            "value_error": (values - returns).abs(),
            "value_clip_fraction": cut.detach(),
        }
    return losses, statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The actor's loss: clipped surrogate, plus a KL penalty, minus an entropy bonus.

    Raises:
        ConfigError: `constant` is missing or has no use, or `stop_above` names something else than `RATIO_STATISTICS`.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    """See `policy_loss`."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference *in the loss*; above 0 the batch must have ``ref_logprobs``."""
    kl_estimator: KLEstimator = KLEstimator.K3
    """Of that divergence; `KLEstimator` says which of them have a useful gradient."""
    average: Average = Average.TOKENS
    constant: int | None = None
    """Tokens that `Average.CONSTANT` divides by."""
    stop_above: Mapping[str, float] = field(default_factory=dict)
    """Early stop: one of `RATIO_STATISTICS` -> the mean of a minibatch above which the policy has moved too far."""
    head: ClassVar[Head] = Head.LOGPROBS

    def __post_init__(self) -> None:
        divides, given = self.average is Average.CONSTANT, self.constant is not None
        if divides != given or (self.constant is not None and self.constant < 1):
            raise ConfigError(
                f"policy loss: found average={self.average} with constant={self.constant}; expected a number of "
                "tokens, at least 1, with average=constant and none otherwise."
            )
        unknown = sorted(set(self.stop_above) - set(RATIO_STATISTICS))
        if unknown:
            raise ConfigError(
                f"policy loss: found stop_above for {', '.join(unknown)}; expected some of "
                f"{', '.join(RATIO_STATISTICS)}."
            )

    @property
    def per(self) -> Per:
        """Response tokens, or sequences where these are averaged."""
        return Per.RESPONSE if self.average is Average.TOKENS else Per.SEQUENCE

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Statistics]:
        """See `megatron_real.backend.Objective`; `batch` has ``logprobs`` and ``advantages``.

        Statistics: ``policy_loss`` and, with a coefficient, ``reference_kl`` are the loss's own terms, weighed as it
        weighs tokens. The others are means over tokens or, unless the average is over tokens, means over sequences
        of a sequence's mean.
        """
        logprobs = outputs["logprobs"]
        losses, statistics = policy_loss(
            logprobs,
            batch.data["logprobs"],
            batch.data["advantages"],
            self.clip_low,
            self.clip_high,
            self.dual_clip,
        )
        weights = token_weights(batch, self.average, logprobs, self.constant or 1)
        terms = {"policy_loss": (losses * weights).sum()}
        loss = terms["policy_loss"]
        if self.kl_coefficient:
            divergence = estimate_kl(logprobs, batch.data["ref_logprobs"], self.kl_estimator)
            terms["reference_kl"] = (divergence * weights).sum()
            loss = loss + self.kl_coefficient * terms["reference_kl"]
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * (outputs["entropy"] * weights).sum()
        if self.average is Average.CONSTANT:
            weights = token_weights(batch, Average.SEQUENCES, logprobs)
        statistics["entropy"] = outputs["entropy"]
        return loss, {name: term.detach() for name, term in terms.items()} | _sums(statistics, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """The critic's loss, averaged over response tokens."""

    clip: float | None
    coefficient: float = 1.0
    head: ClassVar[Head] = Head.VALUES
    per: ClassVar[Per] = Per.RESPONSE
    stop_above: ClassVar[Mapping[str, float]] = _NEVER

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Statistics]:
        """See `megatron_real.backend.Objective`; `batch` has ``values`` and ``returns``."""
        values = outputs["values"]
        losses, statistics = value_loss(values, batch.data["values"], batch.data["returns"], self.clip)
        weights = token_weights(batch, Average.TOKENS, values)
        return self.coefficient * (losses * weights).sum(), _sums(statistics, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTObjective:
    """Cross entropy of the response tokens, averaged over them: supervised fine-tuning on answers."""

    head: ClassVar[Head] = Head.LOGPROBS
    per: ClassVar[Per] = Per.RESPONSE
    stop_above: ClassVar[Mapping[str, float]] = _NEVER

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Statistics]:
        """See `megatron_real.backend.Objective`; nothing but the outputs is read, and `KEPT` if it is there."""
        logprobs = outputs["logprobs"]
        weights = token_weights(batch, Average.TOKENS, logprobs)
        return -(logprobs * weights).sum(), _sums({"entropy": outputs["entropy"]}, weights)


@torch.no_grad()
def _sums(statistics: Statistics, weights: torch.Tensor) -> Statistics:
    return {name: (value.detach() * weights).sum() for name, value in statistics.items()}
