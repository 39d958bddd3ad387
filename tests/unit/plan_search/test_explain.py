"""Neighbours of a plan: their numbers are those of their plans, and no better one is left unsaid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from megatron_real.capabilities import placement_problems
from megatron_real.dataflow import Call
from megatron_real.layout import Mesh
from megatron_real.plan import Placement, Plan
from megatron_real.plan_search.explain import Explanation, Kind, explain
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.space import candidates
from tests.unit.plan_search.small_plan import planner, split_plan


@pytest.fixture(scope="module")
def explained() -> Explanation:
    found = planner()
    return explain(found, split_plan(found), most=2)


def _with(plan: Plan, name: str, placement: Placement) -> Plan:
    return plan.model_copy(update={"calls": {**plan.calls, name: placement}})


def _neighbours(found: Planner, plan: Plan, call: Call, kind: Kind) -> Iterator[Placement]:
    """By brute force: everything that differs from the plan in one call as `kind` says."""
    now = plan.calls[call.name]
    sizes = {mesh.size for mesh in found.cluster.meshes()} if kind is Kind.WINDOW else {now.mesh.size}
    for size in sizes:
        windows = (
            [mesh for mesh in found.cluster.meshes() if mesh.size == size]
            if kind is Kind.WINDOW
            else [now.mesh]
        )
        for option in candidates(found.prices, call, size):
            for window in windows:
                then = option.placement(Mesh(window.start, window.stop))
                if any(placement_problems(call, then)) or then == now:
                    continue
                names = ("offload", "drop_trained_weights", "stream")
                stays = all(getattr(then, name) == getattr(now, name) for name in names)
                a, b = then.parallel, now.parallel
                if (kind is Kind.LAYOUT and a != b and stays) or (kind is Kind.WORK and a == b):
                    yield then
                elif kind is Kind.WINDOW and then.mesh != now.mesh and stays:
                    same_class = (a.tp, a.pp, a.cp, a.vpp, a.sp) == (b.tp, b.pp, b.cp, b.vpp, b.sp)
                    same_work = (then.num_microbatches, then.recompute) == (
                        now.num_microbatches,
                        now.recompute,
                    )
                    if same_class and (size != now.mesh.size or same_work):
                        yield then


def test_numbers_are_those_of_the_neighbours_plan(explained: Explanation) -> None:
    found = planner()
    assert len(explained.neighbours) > 20
    for one in explained.neighbours[::4]:
        estimate = found.estimate(one.plan)
        assert one.period_s == pytest.approx(estimate.period_s, rel=1e-9)
        assert one.delta_s == pytest.approx(estimate.period_s - explained.estimate.period_s, abs=1e-9)
        peak = max(group.peak_bytes for group in estimate.memory.groups)
        assert one.excess_bytes == peak - found.cluster.capacity_bytes
        changed = [
            name for name in one.plan.calls if one.plan.calls[name] != explained.estimate.plan.calls[name]
        ]
        assert changed == [one.call]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("name", ["actor_gen", "critic_inf", "actor_train"])
def test_no_neighbour_beats_those_that_are_reported(explained: Explanation, name: str, kind: Kind) -> None:
    found, plan = planner(), explained.estimate.plan
    call = found.graph.call(name)
    periods = [
        found.estimate(_with(plan, name, then), iterations=1).period_s
        for then in _neighbours(found, plan, call, kind)
    ]
    reported = [one.period_s for one in explained.of(name) if one.kind is kind and one.fits]
    assert bool(periods) == bool(reported)
    if periods:
        # The search folds data transfers into calls, so a rank may be off by what those take.
        assert min(reported) == pytest.approx(min(periods), rel=2e-3)


def test_a_neighbour_that_does_not_fit_says_by_how_much() -> None:
    found = planner(memory_gib=4.0)
    explanation = explain(
        found, split_plan(planner()).model_copy(update={"cluster": found.cluster.spec}), most=3
    )
    others = [one for one in explanation.neighbours if not one.fits]
    assert others
    for one in others[::5]:
        peak = max(group.peak_bytes for group in found.estimate(one.plan).memory.groups)
        assert one.excess_bytes == peak - 4 * 2**30 > 0
    assert all(one.fits for one in explanation.better)


def test_a_better_neighbour_is_said(explained: Explanation) -> None:
    better = explained.better
    assert better
    assert better[0].period_s < explained.estimate.period_s
    assert better[0].period_s == min(one.period_s for one in explained.neighbours if one.fits)


def test_no_neighbour_of_the_best_plan_is_better() -> None:
    found = planner(2)
    report = found.search("exact")
    explanation = explain(found, report.plan, most=1)
    assert report.solution.gap < 1e-6
    slack = 2e-3 * report.estimate.period_s  # see above
    assert [one for one in explanation.better if one.delta_s < -slack] == []


def test_the_critical_path_ends_with_the_iteration(explained: Explanation) -> None:
    path = explained.critical_path
    assert path
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(path))
    assert path[-1].end_s == max(span.end_s for span in explained.estimate.simulation.spans)
