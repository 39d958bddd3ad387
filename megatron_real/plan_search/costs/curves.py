"""Curves and surfaces through measured times: interpolation between points, and what lies beyond them.

Invariants (tests/unit/plan_search/test_profiled.py):
    - a curve goes through its points and never falls: where noise made a larger input faster, both take their mean;
    - below the smallest point a curve falls by the first slope, at most in proportion, and a surface not at all; beyond
      the largest they grow in proportion, or by the last slope;
    - a surface never falls, neither with sequences nor with lengths;
    - one that grows by slopes grows, past the sequences measured at a length, as at the next shorter length times the
      ratio of lengths, and at most in proportion: by what each sequence and token takes, and not by what a step does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Curve", "Surface"]

Beyond = Literal["proportional", "slope"]

_FAR = 64.0
"""A surface that grows by its last slope does so up to this many times its largest length."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Time over one quantity."""

    xs: tuple[float, ...]
    """Ascending, positive."""
    ys: tuple[float, ...]
    """Not falling."""
    beyond: Beyond = "proportional"
    """How time grows past the largest point."""
    log: bool = False
    """Interpolate logarithms: for what grows with powers of the quantity."""

    @classmethod
    def through(
        cls, points: Mapping[float, float], *, beyond: Beyond = "proportional", log: bool = False
    ) -> Curve:
        """The curve through ``{x: seconds}``, at least one point."""
        xs = tuple(sorted(points))
        return cls(xs, _rising([points[x] for x in xs]), beyond, log)

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return self._below(x)
        if x >= xs[-1]:
            return self._above(x)
        right = bisect_right(xs, x)
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        if self.log and y0 > 0:
            share = math.log(x / x0) / math.log(x1 / x0)
            return y0 * math.exp(share * math.log(y1 / y0))
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def _below(self, x: float) -> float:
        x0, y0 = self.xs[0], self.ys[0]
        if len(self.xs) == 1:
            return y0
        slope = (self.ys[1] - y0) / (self.xs[1] - x0)
        return max(y0 - slope * (x0 - x), y0 * max(x, 0.0) / x0)

    def _above(self, x: float) -> float:
        x1, y1 = self.xs[-1], self.ys[-1]
        if self.beyond == "proportional" or len(self.xs) == 1:
            return y1 * x / x1
        return y1 + (y1 - self.ys[-2]) / (x1 - self.xs[-2]) * (x - x1)


@dataclass(frozen=True, slots=True)
class Surface:
    """Time over sequences and a length: one curve over sequences for each measured length.

    The grid may be ragged: few sequences at the largest lengths.
    """

    rows: tuple[tuple[float, Curve], ...]
    """Ascending lengths."""
    log: bool = True
    """Interpolate logarithms of lengths and times."""

    @classmethod
    def through(
        cls, points: Mapping[tuple[float, float], float], *, beyond: Beyond = "proportional", log: bool = True
    ) -> Surface:
        """The surface through ``{(sequences, length): seconds}``, at least one point.

        Args:
            points: seconds.
            beyond: how time grows past the largest length; and, with "slope", past the sequences of a length where a
                shorter one has more.
            log: interpolate logarithms.
        """
        by_length: dict[float, dict[float, float]] = {}
        for (sequences, length), seconds in points.items():
            by_length.setdefault(length, {})[sequences] = seconds
        if beyond == "slope":
            by_length = _filled(by_length)
        rows = [(length, Curve.through(by_length[length])) for length in sorted(by_length)]
        if beyond == "slope" and len(rows) > 1:
            (before, nearer), (last, farthest) = rows[-2:]
            share = (_FAR * last - last) / (last - before)
            far = {
                x: y + share * max(y - nearer(x), 0.0) for x, y in zip(farthest.xs, farthest.ys, strict=True)
            }
            rows.append((_FAR * last, Curve.through(far)))
        return cls(tuple(rows), log)

    def __call__(self, sequences: float, length: float) -> float:
        lengths = tuple(row for row, _ in self.rows)
        times = [curve(sequences) for _, curve in self.rows]
        return Curve(lengths, _rising(times), log=self.log)(max(length, lengths[0]))


def _filled(by_length: Mapping[float, Mapping[float, float]]) -> dict[float, dict[float, float]]:
    """Times at every length for all sequences that a shorter one has."""
    filled: dict[float, dict[float, float]] = {}
    shorter: tuple[float, Curve] | None = None
    for length in sorted(by_length):
        row = dict(by_length[length])
        if shorter is not None:
            ratio, curve = length / shorter[0], shorter[1]
            most = max(row)
            for sequences in (x for x in curve.xs if x > most):
                more = (curve(sequences) - curve(most)) * ratio
                row[sequences] = min(row[most] + more, row[most] * sequences / most)
        filled[length] = row
        shorter = length, Curve.through(row)
    return filled


def _rising(values: Iterable[float]) -> tuple[float, ...]:
    """The nearest values that never fall: neighbours out of order are pooled (isotonic regression)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            more, number = pools.pop()
            total, count = total + more, count + number
        pools.append((total, count))
    return tuple(total / count for total, count in pools for _ in range(count))
