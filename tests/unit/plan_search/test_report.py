"""Tables and lines say what the estimate says."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from megatron_real.plan_search import report
from megatron_real.plan_search.explain import explain
from megatron_real.plan_search.planner import Estimate
from megatron_real.plan_search.problem import Limits
from megatron_real.plan_search.space import Pin
from tests.unit.plan_search.small_plan import planner, split_plan

_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    found = planner()
    return found.estimate(split_plan(found))


def _rows(table: Any) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=400)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        for line in text.splitlines()
        if "│" in line or "┃" in line
    ]


def _seconds(text: str) -> float:
    value, _, unit = text.partition(" ")
    return float(value) * _UNITS[unit] if unit else 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (12.345, "12.3 s"),
        (1234.5, "1234 s"),
        (0.0123, "12.3 ms"),
        (-0.5, "-500 ms"),
        (4.2e-6, "4.20 µs"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert report.seconds_text(seconds) == text


def test_bytes() -> None:
    assert report.bytes_text(3.5 * 2**30) == "3.50 GiB"
    assert report.bytes_text(2**20) == "1.00 MiB"


def test_parts_of_a_call_add_up(estimate: Estimate) -> None:
    rows = _rows(report.costs_table(planner(), estimate))
    header, body = rows[0], rows[1:]
    assert header[2:8] == ["compute", "communication", "bubble", "optimizer", "overhead", "call"]
    assert sorted(row[0] for row in body) == sorted(estimate.plan.calls)
    for row in body:
        *parts, total = map(_seconds, row[2:8])
        assert sum(parts) == pytest.approx(total, rel=0.02)
        assert total == pytest.approx(estimate.calls[row[0]].seconds, rel=0.01)
        realloc = estimate.reallocs.get(row[0])
        assert (row[8] == "") == (realloc is None)
    assert [row[9] != "" for row in body if row[0] == "actor_gen"] == [False]  # it waits for no data
    assert all(row[9] for row in body if row[0] != "actor_gen")


def test_shares_are_of_the_period(estimate: Estimate) -> None:
    for row in _rows(report.calls_table(estimate, title="x"))[1:]:
        share = float(row[6].removesuffix(" %"))
        assert share == pytest.approx(100 * estimate.calls[row[0]].seconds / estimate.period_s, abs=0.51)


def test_memory_is_that_of_the_fullest_rank(estimate: Estimate) -> None:
    rows = _rows(report.memory_table(planner(), estimate))
    assert [row[0] for row in rows[1:]] == ["0-1", "2-3"]
    peaks = [
        max(g.peak_bytes for g in estimate.memory.groups if g.mesh.start in half) for half in ((0, 1), (2, 3))
    ]
    assert [row[5] for row in rows[1:]] == [report.bytes_text(peak) for peak in peaks]
    (line,) = [line for line in report.estimate_lines(planner(), estimate) if line.startswith("memory")]
    assert report.bytes_text(max(peaks)) in line
    assert report.bytes_text(planner().cluster.capacity_bytes - max(peaks)) in line


def test_what_does_not_fit_is_not_executable() -> None:
    small = planner(memory_gib=1.0)
    plan = split_plan(planner()).model_copy(update={"cluster": small.cluster.spec})
    estimate = small.estimate(plan)
    line = report.executable_line(small, estimate)
    assert line.startswith("executable: no: it does not fit: ")
    assert report.executable_line(planner(), planner().estimate(split_plan(planner()))) == "executable: yes"


def test_a_search_says_how_good_its_plan_is_and_what_a_pin_costs() -> None:
    found = planner(2)
    pins = {"actor_gen": Pin(layout={"pp": 2})}
    lines = "\n".join(report.search_lines(found, found.search("exact", limits=Limits(time_s=60), pins=pins)))
    assert "exact: optimal among the choices" in lines
    cost, without = re.findall(
        r"pin of actor_gen \(pp=2\): costs (.*) per iteration; without it (.*)", lines
    )[0]
    free, bound = found.search("exact"), found.search("exact", pins=pins)
    assert _seconds(without) == pytest.approx(free.solution.period_s, rel=0.01)
    assert _seconds(cost) == pytest.approx(
        bound.solution.period_s - free.solution.period_s, rel=0.01, abs=1e-6
    )
    assert _seconds(cost) > 0


def test_two_plans_are_compared_call_by_call(estimate: Estimate) -> None:
    plan = estimate.plan
    placement = plan.calls["ref_inf"].model_copy(update={"num_microbatches": 4})
    other = planner().estimate(plan.model_copy(update={"calls": {**plan.calls, "ref_inf": placement}}))
    decisions = report.decisions_table(estimate, other, ("a", "b"))
    assert [row[0] for row in _rows(decisions)[1:]] == ["ref_inf"]
    assert report.decisions_table(estimate, estimate, ("a", "b")) is None
    rows = {row[0]: row for row in _rows(report.differences_table(estimate, other, ("a", "b")))}
    assert rows["critic_inf"][3] == "0"
    difference = other.calls["ref_inf"].seconds - estimate.calls["ref_inf"].seconds
    assert rows["ref_inf"][3] == report.signed_seconds(difference)


def test_a_verdict_is_seconds_or_bytes() -> None:
    found = planner(memory_gib=4.0)
    plan = split_plan(planner()).model_copy(update={"cluster": found.cluster.spec})
    explanation = explain(found, plan, most=2)
    verdicts = [
        row[2] for call in plan.calls for row in _rows(report.neighbours_table(explanation, call))[1:]
    ]
    assert len(verdicts) == len(explanation.neighbours)
    assert any(re.fullmatch(r"does not fit by [\d.]+ [GM]iB \(.*\)", verdict) for verdict in verdicts)
    assert any(re.fullmatch(r"\+[\d.]+ (s|ms|µs)", verdict) for verdict in verdicts)
