"""Means and standard errors: against plain loops, and against the spread of many samples."""

from __future__ import annotations

import math
import statistics
from itertools import batched

import pytest
import torch

from megatron_real.algorithms.losses import SFTObjective
from megatron_real.algorithms.preference_losses import RewardObjective
from megatron_real.backend import KEPT
from megatron_real.batch import Batch
from megatron_real.dataflow import Per
from megatron_real.runtime.evaluation.estimates import Estimate, Measured, Sums, mean_of


def _batch(lengths: list[int], kept: list[float] | None = None) -> Batch:
    batch = Batch(
        ids=tuple(range(len(lengths))), prompt_lengths=(1,) * len(lengths), response_lengths=tuple(lengths)
    )
    if kept is not None:
        batch.put(KEPT, torch.tensor(kept))
    return batch


def _means(objective: Measured, parts: list[tuple[dict[str, torch.Tensor], Batch]]) -> Sums:
    """As a backend makes them, over micro-batches."""
    count, totals = 0, dict[str, float]()
    for outputs, batch in parts:
        loss, sums = objective.loss(outputs, batch)
        kept = batch.data[KEPT.name].tolist() if KEPT.name in batch.data else [1.0] * len(batch.ids)
        count += round(sum(k * n for k, n in zip(kept, batch.lengths(objective.per), strict=True)))
        for name, value in {"loss": loss, **sums}.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return Sums.of_means(count, {name: value / count for name, value in totals.items()})


def test_what_did_not_come_is_left_out() -> None:
    found = mean_of([1.0, math.nan, 3.0, 5.0])
    assert found == Estimate(mean=3.0, error=2.0 / math.sqrt(3))
    assert mean_of([2.0, math.nan]) == Estimate(mean=2.0, error=None)
    assert mean_of([math.nan]) is None


@pytest.mark.parametrize("kept", [None, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
def test_pairs(kept: list[float] | None) -> None:
    """Accuracy and its error are those of the pairs, whatever the micro-batches."""
    scores = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.5, 0.4, -1.0, 2.0])
    batch = _batch([3, 1, 4, 1, 5, 9, 2, 6], kept)
    objective = Measured(inner=RewardObjective(), metric="accuracy", unit=2)
    parts = [({"scores": scores[list(ids)]}, batch.select(ids)) for ids in ((0, 1, 2, 3), (4, 5), (6, 7))]
    sums = _means(objective, parts)
    right = [1.0, 0.0, 1.0, 0.0] if kept is None else [1.0, 1.0, 0.0]
    found = sums.estimate("accuracy")
    assert found is not None
    assert found.mean == pytest.approx(statistics.fmean(right))
    assert found.error == pytest.approx(statistics.stdev(right) / math.sqrt(len(right)))
    plain, statistics_ = RewardObjective().loss({"scores": scores}, batch)
    assert sums.means() == pytest.approx(
        {name: float(value) / sums.count for name, value in {"loss": plain, **statistics_}.items()}
    )


def test_tokens_of_sequences() -> None:
    """A mean over tokens has the error of the ratio estimator over sequences, and batches add up."""
    lengths = [3, 1, 4, 2, 5]
    logprobs = -torch.arange(1.0, 16.0) / 7
    outputs = {"logprobs": logprobs, "entropy": 2 * logprobs.abs()}
    objective = Measured(inner=SFTObjective(), metric="loss", unit=1)
    batch, parts, begin = _batch(lengths), [], 0
    for ids in batched(range(5), 2):
        end = begin + sum(lengths[i] for i in ids)
        parts.append(({name: value[begin:end] for name, value in outputs.items()}, batch.select(ids)))
        begin = end
    sums = _means(objective, parts[:1]) + _means(objective, parts[1:])
    losses = [float(-part.sum()) for part in logprobs.split(lengths)]
    mean = sum(losses) / sum(lengths)
    residuals = [x - mean * n for x, n in zip(losses, lengths, strict=True)]
    error = math.sqrt(5 / 4 * sum(r * r for r in residuals)) / sum(lengths)
    found = sums.estimate("loss")
    assert found is not None
    assert (found.mean, found.error) == pytest.approx((mean, error))
    assert sums.means() == pytest.approx({"loss": mean, "entropy": 2 * mean})


def test_the_error_of_a_ratio_is_its_spread() -> None:
    """Over many samples of sequences the estimate varies as much as its error says."""
    torch.manual_seed(0)
    means, errors = [], []
    for _ in range(400):
        lengths = torch.randint(1, 12, (40,)).tolist()
        levels = torch.randn(40) + 3.0
        tokens = torch.cat([level + 0.3 * torch.randn(n) for level, n in zip(levels, lengths, strict=True)])
        objective = Measured(inner=SFTObjective(), metric="loss", unit=1)
        found = _means(objective, [({"logprobs": -tokens, "entropy": tokens}, _batch(lengths))]).estimate(
            "loss"
        )
        assert found is not None
        assert found.error is not None
        means.append(found.mean)
        errors.append(found.error)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.15)


def test_a_metric_of_another_call_is_no_estimate() -> None:
    objective = Measured(inner=SFTObjective(), metric="accuracy", unit=1)
    assert objective.per is Per.RESPONSE
    sums = _means(objective, [({"logprobs": -torch.ones(2), "entropy": torch.ones(2)}, _batch([2]))])
    assert sums.estimate("accuracy") is None
    assert sums.means() == {"loss": 1.0, "entropy": 1.0}
