"""The front door: a plan, its proof, its estimate."""

from __future__ import annotations

from functools import lru_cache

import pytest

from megatron_real.errors import CapacityError, ConfigError, PlanError
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.plan_search import presets
from megatron_real.plan_search.planner import Planner, SearchReport
from megatron_real.plan_search.problem import Limits
from megatron_real.plan_search.space import Pin, SpaceOptions
from megatron_real.plan_search.workload import LengthDistribution, Workload
from tests.unit.plan_search.test_space import planner as make_planner

LIMITS = Limits(time_s=30.0, gap=0.01)


@lru_cache(maxsize=1)
def planner() -> Planner:
    return make_planner(gpus=4)


@lru_cache(maxsize=1)
def searched() -> SearchReport:
    return planner().search(limits=LIMITS)


def test_a_search_ends_with_a_plan_a_bound_and_an_estimate() -> None:
    report = searched()
    solution, estimate = report.solution, report.estimate
    assert solution.gap <= 0.01
    assert not estimate.problems
    predicted = report.plan.predicted
    assert predicted is not None
    assert predicted.iteration_s == estimate.period_s
    assert predicted.lower_bound_s == solution.lower_bound_s
    assert set(predicted.calls) == set(report.plan.calls)
    assert len(predicted.peak_memory_bytes) == 4
    assert max(predicted.peak_memory_bytes.values()) <= planner().cluster.capacity_bytes
    assert Plan.loads(report.plan.dumps()) == report.plan


def test_the_searchs_period_is_the_simulators() -> None:
    """The search folds transfers into calls, so the two may differ by what transfers take."""
    report = searched()
    assert report.estimate.period_s == pytest.approx(report.solution.period_s, rel=0.01)


def test_no_preset_beats_the_search() -> None:
    one = planner()
    best = searched().solution
    for name in presets.PRESETS:
        try:
            found = one.search(name, limits=LIMITS)
        except CapacityError:
            continue
        assert found.solution.period_s >= best.lower_bound_s * (1 - 1e-9)
        assert found.estimate.period_s >= best.lower_bound_s * 0.99


def test_a_pin_has_a_price() -> None:
    one = planner()
    pins = {"actor_gen": Pin(ranks=(0, 1))}
    report = one.search(limits=LIMITS, pins=pins)
    (price,) = report.pin_prices
    free = searched().solution
    assert price.period_without_s == pytest.approx(free.period_s, rel=0.011)
    assert price.cost_s == pytest.approx(report.solution.period_s - price.period_without_s)
    assert price.cost_s > 0


def test_memory_that_is_short_changes_the_plan_and_is_kept() -> None:
    roomy = searched()
    peak = max(roomy.estimate.memory.by_rank().values())
    tight = make_planner(memory=int(peak * 0.6), gpus=4).search(limits=LIMITS)
    assert max(tight.estimate.memory.by_rank().values()) <= int(peak * 0.6)
    assert tight.solution.period_s >= roomy.solution.lower_bound_s


def test_what_does_not_fit_together_says_so() -> None:
    one = make_planner(memory=4 * 2**30, gpus=4)
    with pytest.raises(
        CapacityError,
        match=r"found no exact plan that fits; each call by itself does.*GiB per device too large",
    ):
        one.search(limits=LIMITS, options=SpaceOptions(offload=False))
    assert one.search(limits=LIMITS).estimate.problems == (), "optimizer state on the host makes room"


def test_estimates_of_equal_inputs_have_equal_hashes() -> None:
    one, other = make_planner(), make_planner()
    assert one.inputs_hash() == other.inputs_hash()
    longer = Workload(
        batch_size=64,
        prompt=LengthDistribution.constant(256),
        response=LengthDistribution.constant(512),
        num_minibatches=4,
    )
    assert Planner(one.graph, one.prices.models, one.cluster.spec, longer).inputs_hash() != one.inputs_hash()


def test_bad_input_is_one_clear_error() -> None:
    one = planner()
    with pytest.raises(
        ConfigError, match=r"search.strategy: found 'best'; expected one of exact, .*heuristic"
    ):
        one.search("best")
    with pytest.raises(PlanError, match="found no model for actor"):
        Planner(one.graph, {}, one.cluster.spec, one.workload)
    plan = one.search("greedy").plan
    larger = Planner(
        one.graph,
        one.prices.models,
        ClusterSpec(num_nodes=2, devices_per_node=8, device="h100"),
        one.workload,
    )
    with pytest.raises(PlanError, match="found a cluster of 4 devices; expected 16"):
        larger.estimate(plan)
