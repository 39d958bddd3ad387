"""Means over held-out sequences, and how sure they are.

Of responses there is a number each. Of a loss the backend has sums only, over micro-batches and ranks: `Measured` adds
the sums of squares that a standard error needs.

Shape legend: u units (sequences, or pairs) with the sum ``x_i`` of a quantity over ``n_i`` tokens or sequences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import batched

import torch

from megatron_real.backend import KEPT, Head, Objective
from megatron_real.batch import Batch
from megatron_real.dataflow import Per

__all__ = ["Estimate", "Measured", "Sums", "mean_of"]

_UNITS, _SQUARES, _PRODUCTS, _COUNTS = "_units", "_squares", "_products", "_count_squares"
"""What `Measured` adds: u, and the sums of x_i**2, x_i * n_i and n_i**2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    error: float | None
    """None where one value alone tells nothing of it."""


def mean_of(values: Iterable[float]) -> Estimate | None:
    """The mean of independent values; those that are NaN did not come, and None says that none did."""
    came = [value for value in values if not math.isnan(value)]
    if not came:
        return None
    error = statistics.stdev(came) / math.sqrt(len(came)) if len(came) > 1 else None
    return Estimate(mean=statistics.fmean(came), error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums of an objective's statistics over held-out sequences; those of two batches add up."""

    count: int
    """Tokens or sequences: what `Objective.per` says."""
    totals: Mapping[str, float]

    @classmethod
    def of_means(cls, count: int, means: Mapping[str, float]) -> Sums:
        """From what `ModelBackend.evaluate` returns."""
        return cls(count=count, totals={name: mean * count for name, mean in means.items()})

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            count=self.count + other.count,
            totals={name: value + other.totals[name] for name, value in self.totals.items()},
        )

    def means(self) -> dict[str, float]:
        """The objective's own statistics, averaged."""
        return {
            name: value / max(self.count, 1)
            for name, value in self.totals.items()
            if name not in (_UNITS, _SQUARES, _PRODUCTS, _COUNTS)
        }

    def estimate(self, metric: str) -> Estimate | None:
        """The metric that `Measured` took the squares of; None if nothing was counted, or it is of another train call.

        The mean is R = sum(x_i) / sum(n_i), a ratio of sums over independent units, with the variance
        u / (u - 1) * sum((x_i - R * n_i)**2) / sum(n_i)**2 (W. Cochran, Sampling Techniques, 1977, eq. 6.13).
        """
        units = round(self.totals.get(_UNITS, 0.0))
        if metric not in self.totals or units == 0:
            return None
        mean = self.totals[metric] / self.count
        if units == 1:
            return Estimate(mean=mean, error=None)
        squares, products, counts = (self.totals[name] for name in (_SQUARES, _PRODUCTS, _COUNTS))
        variance = units / (units - 1) * (squares - 2 * mean * products + mean * mean * counts)
        # Rounding may leave less than nothing.
        return Estimate(mean=mean, error=math.sqrt(max(0.0, variance)) / self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An objective that is taken unit by unit, so that its metric's standard error can be told; for no training."""

    inner: Objective
    metric: str
    """``loss``, or one of its statistics; another one is of another train call, and adds nothing."""
    unit: int
    """Sequences that belong together: see `Minibatching.unit`."""

    @property
    def head(self) -> Head:
        """Of the objective."""
        return self.inner.head

    @property
    def per(self) -> Per:
        """Of the objective."""
        return self.inner.per

    @property
    def stop_above(self) -> Mapping[str, float]:
        """Nothing is updated, so nothing is skipped."""
        return {}

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `Objective.loss`; the sums are float64."""
        parts = {
            name: value.split(list(batch.lengths(Per.SEQUENCE if name == Head.SCORES else Per.RESPONSE)))
            for name, value in outputs.items()
        }
        rows: list[dict[str, torch.Tensor]] = []
        for at in batched(range(len(batch.ids)), self.unit):
            unit = batch.select([batch.ids[i] for i in at])
            mine = {name: torch.cat([pieces[i] for i in at]) for name, pieces in parts.items()}
            loss, statistics = self.inner.loss(mine, unit)
            row = {name: value.detach().double() for name, value in {"loss": loss, **statistics}.items()}
            rows.append(row | self._squares(row, unit))
        sums = {name: torch.stack([row[name] for row in rows]).sum() for name in rows[0]}
        return sums.pop("loss"), sums

    def _squares(self, row: Mapping[str, torch.Tensor], unit: Batch) -> dict[str, torch.Tensor]:
        if self.metric not in row:
            return {}
        x = row[self.metric]
        kept = unit.data[KEPT.name].double() if KEPT.name in unit.data else x.new_ones(len(unit.ids))
        n = (kept * x.new_tensor(unit.lengths(self.per))).sum()
        return {_UNITS: (n > 0).double(), _SQUARES: x * x, _PRODUCTS: x * n, _COUNTS: n * n}
