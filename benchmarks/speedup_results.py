"""Runs of `make bench-speedup`: what their traces tell of each plan, and the lines that judge all plans together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_real.plan_search.comparison import instruction_seconds, iteration_seconds
from megatron_real.plan_search.planner import Estimate
from megatron_real.runtime.reports.summary import summarize
from megatron_real.trace import Span, SpanKind, attribute_waits, read_spans

SEARCHED = "searched"
"""The plan that the search finds, beside those of presets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How the iterations of a run are spread over its turns. The first one of each does not count.

    It begins when no earlier one is under way: its time says nothing of a period.
    """

    number: int
    iterations: int
    """Of each turn, that count."""

    def by_iteration(self) -> list[int]:
        """The turn of each iteration of the run."""
        return [turn for turn in range(self.number) for _ in range(1 + self.iterations)]

    def counted(self) -> set[int]:
        """The iterations that count."""
        size = 1 + self.iterations
        return {iteration for iteration in range(self.number * size) if iteration % size}


@dataclass(slots=True, kw_only=True)
class Result:
    """A plan of a setting, and what its run was."""

    name: str
    estimate: Estimate | None
    """None: no such plan fits."""
    folder: Path
    same_as: str | None = None
    """The first plan of the setting with the same decisions."""
    run_of: Result | None = None
    """The same plan under less device memory, whose run this one shares."""
    turns: Turns = Turns(number=2, iterations=2)
    periods: tuple[float, ...] = ()
    line: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Predicted and measured seconds by instruction."""

    def take(self, other: Result) -> None:
        """The measurements of another one."""
        self.periods, self.line, self.calls = other.periods, other.line, other.calls

    @property
    def measured_s(self) -> float:
        return statistics.fmean(self.periods)

    @property
    def ci95_s(self) -> float:
        count = len(self.periods)
        if count < 2:
            return math.inf
        return student(count - 1) * statistics.stdev(self.periods) / math.sqrt(count)


type Settings = Mapping[tuple[int, str, str], Sequence[Result]]
"""Plans by number of ranks, workload and device memory."""


def measure(result: Result) -> None:
    """Read a run's trace."""
    assert result.estimate is not None, "only plans that fit are run"
    spans = read_spans(result.folder / "trace")
    counted = result.turns.counted()
    result.periods = tuple(seconds for i, seconds in iteration_seconds(spans).items() if i in counted)
    waited = attribute_waits(spans)
    measured = instruction_seconds(waited, counted)
    simulated = result.estimate.simulation.spans
    predicted = instruction_seconds(simulated, {max(span.iteration for span in simulated)})
    result.calls = {
        name: (predicted[kind, name], seconds)
        for (kind, name), seconds in measured.items()
        if kind is SpanKind.RUN and (kind, name) in predicted
    }
    result.line = {
        **shares(waited, counted, result.turns.by_iteration()),
        "call_communication_share": call_communication(result.estimate),
    }
    peaks = [int(span.facts["peak_bytes"] or 0) for span in spans if "peak_bytes" in span.facts]
    forecast = result.estimate.plan.predicted
    assert forecast is not None, "an estimate fills it in"
    result.line["predicted_peak_bytes"] = max(forecast.peak_memory_bytes.values())
    result.line["peak_bytes"] = max(peaks, default=None)


def shares(spans: Sequence[Span], counted: set[int], turns: Sequence[int]) -> dict[str, float]:
    """Of all ranks' time in the counted iterations, turn by turn."""
    by_turn: dict[int, list[Span]] = {}
    for span in spans:
        if span.iteration in counted:
            by_turn.setdefault(turns[span.iteration], []).append(span)
    parts = [summarize(turn, []) for turn in by_turn.values()]
    names = {"idle_share": "wait_share", "communication_share": "transfer_share"}
    names |= {name: name for name in ("realloc_share", "runtime_share")}
    return {new: round(statistics.fmean(part[old] for part in parts), 4) for new, old in names.items()}


def call_communication(estimate: Estimate) -> float:
    """Predicted share of all ranks' time in collectives and messages inside calls."""
    spent = sum(
        cost.communication_s * estimate.plan.calls[name].mesh.size for name, cost in estimate.calls.items()
    )
    return round(spent / (estimate.period_s * estimate.plan.cluster.num_devices), 4)


def sum_up(settings: Settings) -> Iterator[dict[str, Any]]:
    """The lines that judge the whole, against the aims."""
    for ranks in sorted({key[0] for key in settings}):
        mine = {key: results for key, results in settings.items() if key[0] == ranks}
        own = {key: [r for r in results if r.periods and r.same_as is None] for key, results in mine.items()}
        errors = [
            predicted(r) / r.measured_s - 1 for results in own.values() for r in results if r.run_of is None
        ]
        yield {
            "summary": "predicted iteration time",
            "ranks": ranks,
            "plans": len(errors),
            "median_error": round(statistics.median(map(abs, errors)), 4),
            "bias": round(statistics.median(errors), 4),
            "max_error": round(max(map(abs, errors)), 4),
            "aim": "median <= 0.15 on two ranks",
        }
        yield {"summary": "order of plans", "ranks": ranks, **order_of(list(own.values()))}
        yield {"summary": "measured / predicted by call", "ranks": ranks, **ratios(own)}
    yield {"summary": "speed-up over heuristic", **speedups(settings)}
    yield {"summary": "searched plan against presets", **against_presets(settings)}


def order_of(groups: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Whether plans that differ by more than their intervals come in the predicted order."""
    right = wrong = 0
    correlations, regrets = [], []
    for results in groups:
        for i, one in enumerate(results):
            for other in results[:i]:
                gap = one.measured_s - other.measured_s
                if abs(gap) <= math.hypot(one.ci95_s, other.ci95_s):
                    continue
                agree = (predicted(one) - predicted(other)) * gap > 0
                right, wrong = right + agree, wrong + (not agree)
        expected, found = [predicted(r) for r in results], [r.measured_s for r in results]
        if len(set(expected)) > 2 and len(set(found)) > 2:
            correlations.append(statistics.correlation(expected, found, method="ranked"))
        if results:
            best = min(r.measured_s for r in results)
            regrets.append(min(results, key=predicted).measured_s / best - 1)
    return {
        "median_rank_correlation": round(statistics.median(correlations), 3) if correlations else None,
        "pairs_in_order": right,
        "pairs_out_of_order": wrong,
        "mean_regret": round(statistics.fmean(regrets), 4) if regrets else None,
    }


def predicted(result: Result) -> float:
    """Seconds per iteration."""
    assert result.estimate is not None, "it has run"
    return result.estimate.period_s


def ratios(groups: Settings) -> dict[str, Any]:
    """Median by workload and call."""
    found: dict[str, dict[str, list[float]]] = {}
    for (_, workload, _), results in groups.items():
        for result in results:
            for name, (expected, seconds) in result.calls.items():
                found.setdefault(workload, {}).setdefault(name.partition(":")[2], []).append(
                    seconds / expected
                )
    return {
        workload: {name: round(statistics.median(values), 2) for name, values in calls.items()}
        for workload, calls in found.items()
    }


def speedups(settings: Settings) -> dict[str, Any]:
    """Of the searched plan over the heuristic one."""
    found = {}
    for (ranks, workload, memory), results in settings.items():
        by_name = {result.name: result for result in results if result.periods}
        if SEARCHED in by_name and "heuristic" in by_name:
            ratio = by_name["heuristic"].measured_s / by_name[SEARCHED].measured_s
            found[f"{ranks} ranks, {workload}, {memory}"] = round(ratio, 3)
    long = [value for name, value in found.items() if ", long," in name]
    return {
        "by_setting": found,
        "geometric_mean": round(statistics.geometric_mean(found.values()), 3) if found else None,
        "aim": 1.54,
        "long_responses": round(statistics.geometric_mean(long), 3) if long else None,
        "aim_long_responses": 1.81,
    }


def against_presets(settings: Settings) -> dict[str, Any]:
    """By setting, the best preset's time over the searched plan's; and where one is faster beyond the intervals."""
    ahead, behind = {}, []
    for (ranks, workload, memory), results in settings.items():
        by_name = {result.name: result for result in results if result.periods}
        mine = by_name.pop(SEARCHED, None)
        if mine is None:
            continue
        where = f"{ranks} ranks, {workload}, {memory}"
        if by_name:
            best = min(by_name.values(), key=lambda result: result.measured_s)
            ahead[where] = {best.name: round(best.measured_s / mine.measured_s, 3)}
        for preset in by_name.values():
            slower = mine.measured_s - preset.measured_s
            if slower > math.hypot(mine.ci95_s, preset.ci95_s):
                behind.append(f"{where}: {preset.name} by {slower / preset.measured_s:.1%}")
    return {"best_preset_over_searched": ahead, "slower_than": behind, "aim": "slower_than is empty"}


_STUDENT = {
    1: 12.71,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
}


def student(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    return _STUDENT.get(degrees, 1.96 + 2.4 / degrees)
