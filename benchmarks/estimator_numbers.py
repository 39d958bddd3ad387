"""What `make bench-estimator` says of predictions: errors, regret, rank correlation, and fitted factors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from validation_rows import Row, RowError

from megatron_real.errors import PlanError

MIN_GROUP = 5
"""Rows of a group before a rank correlation says anything."""
NOISE = 0.15
"""Relative error that a row is taken to have when a factor is fitted."""
PRIOR = 0.25
"""Standard deviation of the logarithm of a fitted factor, before any row was seen."""


class Sample(NamedTuple):
    """One row's group, model and measured value, and its prediction under a factor."""

    group: str
    model: str
    measured: float
    predict: Callable[[float], float]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank. NaN where one side is constant."""
    ranks = []
    for values in (np.asarray(left), np.asarray(right)):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[place])
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def errors_of(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of (predicted, measured) pairs."""
    ratios = np.array([predicted / measured - 1 for predicted, measured in pairs])
    return {
        "median_error": rounded(float(np.median(abs(ratios)))),
        "p90_error": rounded(float(np.quantile(abs(ratios), 0.9))),
        "bias": rounded(float(np.median(ratios))),
    }


def choices_of(groups: dict[str, list[tuple[float, float]]]) -> dict[str, float | int]:
    """Regret and rank correlation of (predicted, measured) pairs, by group."""
    regrets, correlations = [], []
    for pairs in groups.values():
        if len(pairs) > 1:
            chosen = min(pairs)[1]
            regrets.append(chosen / min(measured for _, measured in pairs) - 1)
        if len(pairs) >= MIN_GROUP:
            correlations.append(spearman(*zip(*pairs, strict=True)))
    if not regrets:
        return {}
    found: dict[str, float | int] = {
        "groups": len(regrets),
        "regret": rounded(float(np.mean(regrets))),
        "max_regret": rounded(max(regrets)),
    }
    if correlations:
        found["rank_correlation"] = rounded(float(np.nanmean(correlations)))
    return found


def judge(samples: Sequence[Sample], factors: Sequence[float]) -> dict[str, Any]:
    """All metrics of samples, each predicted under its factor."""
    pairs, groups = [], defaultdict(list)
    for sample, factor in zip(samples, factors, strict=True):
        pair = (sample.predict(factor), sample.measured)
        pairs.append(pair)
        groups[sample.group].append(pair)
    return {**errors_of(pairs), **choices_of(groups)}


def fit(samples: Sequence[Sample], *, prior: float = PRIOR) -> float:
    """The factor that the samples and the prior make most likely, by golden-section search over its logarithm."""

    def loss(log_factor: float) -> float:
        factor = math.exp(log_factor)
        misses = [math.log(sample.predict(factor) / sample.measured) / NOISE for sample in samples]
        return sum(min(miss * miss, 9.0) for miss in misses) + (log_factor / prior) ** 2

    low, high, golden = -4 * prior, 4 * prior, (math.sqrt(5) - 1) / 2
    while high - low > 0.01:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def leave_one_model_out(
    samples: Sequence[Sample], *, prior: float = PRIOR
) -> tuple[list[float], list[float]]:
    """The factor of each sample, fitted to the other models; and the distinct factors."""
    by_model = {
        model: fit([sample for sample in samples if sample.model != model], prior=prior)
        for model in sorted({sample.model for sample in samples})
    }
    return [by_model[sample.model] for sample in samples], [rounded(value) for value in by_model.values()]


def rounded(value: float) -> float:
    """As it is printed."""
    return round(value, 4)


def priced(rows: Sequence[Row], make: Callable[[Row], Sample], left_out: Counter[str]) -> list[Sample]:
    """The rows' samples; `left_out` counts reasons."""
    found = []
    for row in rows:
        try:
            sample = make(row)
            sample.predict(1.0)
        except (RowError, PlanError) as error:
            left_out[str(error)[:80]] += 1
        else:
            found.append(sample)
    return found
