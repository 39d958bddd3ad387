"""Losses over preference pairs: DPO and IPO for a policy, Bradley-Terry for a reward model.

Shape legend: S sequences, R response tokens and P = S / 2 pairs of a micro-batch. A pair is two sequences with the ids
2k (chosen) and 2k + 1 (rejected); whichever pairs a micro-batch has, they stand side by side in it.

A pair's loss and statistics count for both its sequences, so that the sum over sequences, divided by their number, is
the mean over pairs. Pairs are masked (`backend.KEPT`) as a whole: with one of its sequences masked a pair adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from megatron_real.backend import KEPT, MARGIN, Head
from megatron_real.batch import Batch
from megatron_real.dataflow import Per
from megatron_real.errors import RealError

__all__ = [
    "DPOObjective",
    "PreferenceLoss",
    "RewardObjective",
    "bradley_terry_loss",
    "dpo_loss",
    "ipo_loss",
    "sequence_log_ratios",
]

_NEVER: Mapping[str, float] = MappingProxyType({})


class PreferenceLoss(StrEnum):
    """What a `DPOObjective` minimises."""

    SIGMOID = "sigmoid"
    """DPO: see `dpo_loss`. Log-probabilities of a response are summed over its tokens."""
    IPO = "ipo"
    """See `ipo_loss`. Log-probabilities of a response are averaged over its tokens."""


def dpo_loss(margins: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, eq. 7), and its smoothed form.

    ``-(1 - e) * log sigmoid(beta * m) - e * log sigmoid(-beta * m)``: cDPO (Mitchell 2023, "A note on DPO with noisy
    preferences") when a label is wrong with probability ``e``.

    Args:
        margins: [P], log-ratio of the chosen response minus that of the rejected one; see `sequence_log_ratios`.
        beta: strength of the pull to the reference, above 0.
        label_smoothing: the probability ``e``, from 0 to below 0.5.

    Returns:
        [P].
    """
    logits = beta * margins
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(margins: torch.Tensor, beta: float) -> torch.Tensor:
    """Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, eq. 17): ``(m - 1 / (2 * beta))**2``.

    Unlike DPO's it has its minimum at a finite margin. The paper writes probabilities of whole responses;
    `DPOObjective` averages them over the tokens, as TRL does on the advice of the paper's authors, so that the target
    margin does not depend on the length.

    Args:
        margins: [P], as for `dpo_loss`.
        beta: the paper's tau, above 0.

    Returns:
        [P].
    """
    return (margins - 1.0 / (2.0 * beta)).square()


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor | None = None
) -> torch.Tensor:
    """Negative log-likelihood of the preferences in the Bradley-Terry model: ``-log sigmoid(chosen - rejected - m)``.

    Args:
        chosen: [P], scores of the better responses.
        rejected: [P], scores of the worse ones.
        margins: [P], by how much the scores should differ at least (Touvron et al. 2023, Llama 2, arXiv:2307.09288,
            eq. 2); None is 0.

    Returns:
        [P].
    """
    difference = chosen - rejected
    return -logsigmoid(difference if margins is None else difference - margins)


def sequence_log_ratios(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, batch: Batch, *, average: bool
) -> torch.Tensor:
    """How much likelier each response is to the policy than to the reference: ``sum_t (logprob_t - ref_logprob_t)``.

    Args:
        logprobs: [R], with gradient.
        ref_logprobs: [R].
        batch: the sequences' lengths.
        average: divide by the response's tokens.

    Returns:
        [S].
    """
    parts = (logprobs - ref_logprobs).split(list(batch.response_lengths))
    sums = torch.stack([part.sum() for part in parts]) if parts else logprobs
    if not average:
        return sums
    return sums / sums.new_tensor([max(length, 1) for length in batch.response_lengths])


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOObjective:
    """The loss of a policy over preference pairs, held to a reference model."""

    beta: float
    """See `dpo_loss` and `ipo_loss`."""
    label_smoothing: float = 0.0
    """Of `PreferenceLoss.SIGMOID`; without meaning for the other."""
    kind: PreferenceLoss = PreferenceLoss.SIGMOID
    head: ClassVar[Head] = Head.LOGPROBS
    per: ClassVar[Per] = Per.SEQUENCE
    stop_above: ClassVar[Mapping[str, float]] = _NEVER

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `megatron_real.backend.Objective`; `batch` has ``ref_logprobs``.

        Statistics: ``chosen_reward`` and ``rejected_reward`` (beta times the log-ratio that the loss takes: DPO's
        implicit reward), ``margin`` between them, and ``accuracy``, the share of pairs with a margin above 0; of 0, as
        before DPO's first update, a pair counts as half.

        Raises:
            RealError: the sequences are no whole pairs.
        """
        ipo = self.kind is PreferenceLoss.IPO
        log_ratios = sequence_log_ratios(outputs["logprobs"], batch.data["ref_logprobs"], batch, average=ipo)
        chosen, rejected = _pairs(log_ratios, batch)
        margins = chosen - rejected
        losses = ipo_loss(margins, self.beta) if ipo else dpo_loss(margins, self.beta, self.label_smoothing)
        return _sums(losses, self.beta * chosen, self.beta * rejected, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardObjective:
    """The loss of a reward model over preference pairs."""

    centering: float = 0.0
    """Weight of ``(chosen + rejected)**2`` (Eisenstein et al. 2023, arXiv:2312.09244): the preferences say
    nothing about the level of the scores, and this holds it near 0."""
    head: ClassVar[Head] = Head.SCORES
    per: ClassVar[Per] = Per.SEQUENCE
    stop_above: ClassVar[Mapping[str, float]] = _NEVER

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `megatron_real.backend.Objective`; `batch` may have `MARGIN`.

        Statistics: ``chosen_reward`` and ``rejected_reward`` (the scores), ``margin`` between them, and ``accuracy``,
        the share of pairs with a margin above 0; of 0 a pair counts as half.

        Raises:
            RealError: the sequences are no whole pairs.
        """
        chosen, rejected = _pairs(outputs["scores"], batch)
        margins = batch.data.get(MARGIN.name)
        losses = bradley_terry_loss(chosen, rejected, None if margins is None else _pairs(margins, batch)[0])
        if self.centering:
            losses = losses + self.centering * (chosen + rejected).square()
        return _sums(losses, chosen, rejected, batch)


def _pairs(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the chosen and of the rejected sequences: [S] -> [P], [P]."""
    ids = batch.ids
    whole = len(ids) % 2 == 0 and all(
        a % 2 == 0 and b == a + 1 for a, b in zip(ids[::2], ids[1::2], strict=False)
    )
    if not whole:
        raise RealError(
            f"preference pairs: found a micro-batch of the sequences {list(ids)[:8]}; expected whole pairs 2k, 2k + 1 "
            "side by side. The algorithm's Minibatching must have unit=2."
        )
    return values[::2], values[1::2]


def _sums(
    losses: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sums over sequences of the loss and of the statistics of pairs."""
    weights = torch.full_like(losses, 2.0)
    if KEPT.name in batch.data:
        first, second = _pairs(batch.data[KEPT.name].to(losses), batch)
        weights = weights * first * second
    with torch.no_grad():
        margin = chosen - rejected
        statistics = {
            "accuracy": (margin > 0).to(losses.dtype) + 0.5 * (margin == 0).to(losses.dtype),
            "margin": margin,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        sums = {name: (weights * value).sum() for name, value in statistics.items()}
    return (weights * losses).sum(), sums
