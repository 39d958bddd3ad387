"""What a run amounts to: its goal at start and end, and where the time went. Pure functions of spans and metrics.

Times per iteration are over the whole run, its first iteration included. ``wait`` is what
`trace.attribute_waits` finds. A rank's time is from the start of its first span to the end of its last;
checkpoints (``save``) and evaluations are told apart and count in no share.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_real.backend import Goal
from megatron_real.runtime.reports.metrics import EVALUATION, goal_value
from megatron_real.trace import EVALUATION_SPAN, Span, SpanKind, attribute_waits

__all__ = ["concurrent_s", "summarize"]

_WINDOW = 5
"""Iterations at either end whose means are compared."""

_Interval = tuple[float, float]


def summarize(
    spans: Iterable[Span], metrics: Sequence[Mapping[str, Any]], goal: Goal | None = None
) -> dict[str, Any]:
    """Summarize a run.

    Args:
        spans: of all ranks, as measured (or simulated).
        metrics: a row per iteration, in order, with the goal and, where there is a critic, ``explained_variance``; and
            what evaluations found.
        goal: of the algorithm; None is ``reward``.

    Returns:
        The content of ``summary.json``; a number that the input does not tell is None. Some need words:

        - ``concurrent_s_per_iteration``: at least two train calls had all their ranks at work, so neither waited;
        - ``shorter_train_s``: of the train call that is shorter, from the first rank's start (of work, where it is
          known that ranks wait for each other) to the last one's end;
        - ``realloc_s_per_iteration``, ``transfer_s_per_iteration``: of the rank that spent most on it, waits excluded;
        - ``wait_share`` and the other shares: of all ranks' time;
        - ``runtime_share``: rank time in no instruction and no wait, such as planning;
        - ``peak_memory_bytes``: by rank, the most device memory that it had booked at once in an instruction;
        - ``goal_first``, ``goal_last``: of training, means over a few iterations at either end;
        - ``goal_standard_error``: of ``goal_last - goal_first``, from the variance of the iterations' means;
        - ``eval_first``, ``eval_last``, ``eval_best``: of the evaluations, where there are any; with the standard
          errors of the first and the last one.
    """
    spans = tuple(spans)
    goal = goal or Goal(metric="reward")
    return {
        **_goals(metrics, goal),
        **_evaluations(metrics, goal),
        **_times(attribute_waits(spans)),
        **_memory(spans),
    }


def _goals(metrics: Sequence[Mapping[str, Any]], goal: Goal) -> dict[str, Any]:
    found = [value for row in metrics if (value := goal_value(row, goal.metric)) is not None]
    window = min(_WINDOW, len(found) // 2) or len(found)
    first, last = found[:window], found[-window:]
    error = None
    if window > 1:
        error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / window)
    explained = [float(row["explained_variance"]) for row in metrics if "explained_variance" in row][
        -_WINDOW:
    ]
    return {
        "iterations": sum(any(_trained(name) for name in row) for row in metrics),
        "goal": goal.metric,
        "goal_first": statistics.fmean(first) if first else None,
        "goal_last": statistics.fmean(last) if last else None,
        "goal_standard_error": error,
        "explained_variance": statistics.fmean(explained) if explained else None,
    }


def _trained(name: str) -> bool:
    """Whether a metric is of training, and not of an evaluation."""
    return name != "iteration" and not name.startswith(f"{EVALUATION}/")


def _evaluations(metrics: Sequence[Mapping[str, Any]], goal: Goal) -> dict[str, Any]:
    name = f"{EVALUATION}/{goal.metric}"
    rows = [row for row in metrics if name in row]
    if not rows:
        return {}
    better = max if goal.higher_is_better else min
    return {
        "eval_first": rows[0][name],
        "eval_first_error": rows[0].get(f"{name}_error"),
        "eval_last": rows[-1][name],
        "eval_last_error": rows[-1].get(f"{name}_error"),
        "eval_best": better(row[name] for row in rows),
    }


def _memory(spans: Sequence[Span]) -> dict[str, Any]:
    peaks: dict[int, int] = {}
    for span in spans:
        peak = span.facts.get("peak_bytes")
        if isinstance(peak, int | float):
            peaks[span.rank] = max(peaks.get(span.rank, 0), int(peak))
    return {"peak_memory_bytes": {str(rank): peaks[rank] for rank in sorted(peaks)}} if peaks else {}


def _times(spans: Sequence[Span]) -> dict[str, Any]:
    if not spans:
        return {}
    evaluated = [span for span in spans if span.name == EVALUATION_SPAN]
    iterations = len({span.iteration for span in spans if span.name != EVALUATION_SPAN}) or 1
    saved_s, evaluated_s = _seconds_by_rank(spans, SpanKind.SAVE), _seconds_by_rank(evaluated, SpanKind.OTHER)
    lifetime_s = {
        rank: max(span.end_s for span in mine)
        - min(span.start_s for span in mine)
        - saved_s.get(rank, 0.0)
        - evaluated_s.get(rank, 0.0)
        for rank, mine in _by_rank(spans).items()
    }
    total_s = sum(lifetime_s.values()) or math.inf
    spent_s: dict[SpanKind, float] = defaultdict(float)
    for span in spans:
        spent_s[span.kind] += span.duration_s
    worked_s = sum(spent_s[kind] for kind in SpanKind if kind not in (SpanKind.SAVE, SpanKind.OTHER))
    trains = _train_calls(spans)
    together = [_extents(mine, inner=True) for mine in trains.values()]
    shares = {kind: spent_s[kind] / total_s for kind in SpanKind}
    busiest = {
        kind: max(_seconds_by_rank(spans, kind).values(), default=0.0) / iterations for kind in SpanKind
    }
    run_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return {
        "ranks": len(lifetime_s),
        "iteration_s": (run_s - sum(max(each.values(), default=0.0) for each in (saved_s, evaluated_s)))
        / iterations,
        "concurrent_s_per_iteration": concurrent_s(together) / iterations,
        "shorter_train_s": min(
            (_length(_extents(mine, inner=False)) / iterations for mine in trains.values()), default=0.0
        ),
        "realloc_s_per_iteration": busiest[SpanKind.REALLOC],
        "transfer_s_per_iteration": busiest[SpanKind.TRANSFER],
        "offload_s_per_iteration": busiest[SpanKind.OFFLOAD],
        "save_s": max(saved_s.values(), default=0.0),
        "evaluation_s": max(evaluated_s.values(), default=0.0),
        "run_share": shares[SpanKind.RUN],
        "realloc_share": shares[SpanKind.REALLOC],
        "transfer_share": shares[SpanKind.TRANSFER],
        "offload_share": shares[SpanKind.OFFLOAD],
        "wait_share": shares[SpanKind.WAIT],
        "runtime_share": max(0.0, 1.0 - worked_s / total_s) if math.isfinite(total_s) else 0.0,
        "calls": _calls(spans, total_s, iterations),
    }


def _calls(spans: Sequence[Span], total_s: float, iterations: int) -> dict[str, dict[str, Any]]:
    """Per call: wall-clock seconds per iteration, and share of all ranks' time."""
    runs = [span for span in spans if span.kind is SpanKind.RUN]
    result: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(span.name for span in sorted(runs, key=lambda span: span.start_s)):
        mine = [span for span in runs if span.name == name]
        extents = _extents(mine, inner=False)
        result[mine[0].subject] = {
            "s_per_iteration": _length(extents) / iterations,
            "share": sum(span.duration_s for span in mine) / total_s,
            "ranks": sorted({span.rank for span in mine}),
        }
    return result


def _train_calls(spans: Sequence[Span]) -> dict[str, list[Span]]:
    runs: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind is SpanKind.RUN and span.facts.get("type") == "train":
            runs[span.name].append(span)
    return runs


def _extents(runs: Iterable[Span], *, inner: bool) -> list[_Interval]:
    """By iteration, from when to when any rank (or, `inner`, every rank at once) was in the call."""
    by_iteration: dict[int, list[Span]] = defaultdict(list)
    for span in runs:
        by_iteration[span.iteration].append(span)
    result = []
    for _, mine in sorted(by_iteration.items()):
        starts, ends = [span.start_s for span in mine], [span.end_s for span in mine]
        start, end = (max(starts), min(ends)) if inner else (min(starts), max(ends))
        if start < end:
            result.append((start, end))
    return result


def concurrent_s(calls: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Seconds in which at least two of `calls` ran; each is a list of disjoint intervals."""
    events = sorted(
        [(start, 1) for intervals in calls for start, _ in intervals]
        + [(end, -1) for intervals in calls for _, end in intervals]
    )
    total = 0.0
    running = 0
    since = 0.0
    for time_s, change in events:
        if running >= 2:
            total += time_s - since
        running += change
        since = time_s
    return total


def _length(intervals: Iterable[_Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    result: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        result[span.rank].append(span)
    return result


def _seconds_by_rank(spans: Iterable[Span], kind: SpanKind) -> dict[int, float]:
    result: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind is kind:
            result[span.rank] += span.duration_s
    return result
