"""Refined prices against timelines by hand, and against ranks that slow each other down moment by moment."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.layout import Mesh
from megatron_real.plan_search import presets
from megatron_real.plan_search.contention import Refinement, busy_ranks, refine
from megatron_real.plan_search.costs.calls import CallCost
from megatron_real.plan_search.inputs import PlanInputs
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.planner_inputs import planner_of
from megatron_real.plan_search.pricing import Busy, Prices
from megatron_real.plan_search.problem import Choice, Limits
from megatron_real.plan_search.refined_search import _Searches
from megatron_real.plan_search.report import search_lines
from megatron_real.plan_search.simulator import Simulation, TransferTime, simulate
from megatron_real.plan_search.space import Pin, SpaceOptions
from megatron_real.program import Instruction, Program, Run, Transfer, compile_program
from tests.unit.plan_search.small_plan import planner as gpus
from tests.unit.plan_search.test_simulator import call, program_of

CORES = 2


def slowdown(busy: int) -> float:
    return max(1.0, busy / CORES)


class Table:
    """Prices from the seconds of each call by itself; transfers are free. Stands for `Prices` and `ProgramPrices`."""

    def __init__(
        self, alone: Mapping[str, float], ranks: int, busy: Mapping[str, Busy] | None = None
    ) -> None:
        self.alone = alone
        self.cluster = self
        self.devices_per_node = ranks
        self.busy = busy or {}

    def of_program(self, program: Program, busy: Mapping[str, Busy] | None = None) -> Table:
        return Table(self.alone, self.devices_per_node, busy)

    def call(self, name: str) -> CallCost:
        busy = self.busy.get(name, {self.devices_per_node: 1.0})
        costs = [(share, CallCost(compute_s=self.alone[name] * slowdown(n))) for n, share in busy.items()]
        return CallCost.mixed(costs)

    def seconds(self, instruction: Instruction) -> float:
        assert isinstance(instruction, Run)
        return self.call(instruction.call).seconds

    def transfer(self, instruction: Transfer) -> TransferTime:
        return TransferTime(0.0, 0.0, 0.0)


def refined(program: Program, alone: Mapping[str, float]) -> tuple[Table, Refinement, Simulation]:
    table = Table(alone, program.world_size)
    prices, refinement = refine(cast(Prices, table), program)
    return cast(Table, prices), refinement, simulate(program, prices)


def halves() -> Program:
    """Two calls on disjoint halves, and one on all ranks that needs both."""
    calls = (
        call("a", "x", "inference", outputs="m"),
        call("b", "y", "inference", outputs="n"),
        call("c", "z", "inference", inputs="m n", outputs="o"),
    )
    return program_of(calls, {"a": "d2t1p1@0-1", "b": "d2t1p1@2-3", "c": "d4t1p1@0-3"}, 4)


def test_calls_that_overlap_for_part_of_their_time() -> None:
    """Four ranks on two cores. a and b go at half their pace until a ends at 2; b has then done 1 of its 3 seconds, and
    does the other 2 by itself until 4; c takes twice its second."""
    prices, refinement, simulation = refined(halves(), {"a": 1.0, "b": 3.0, "c": 1.0})
    assert [prices.call(name).seconds for name in "abc"] == pytest.approx([2, 4, 2], rel=2e-3)
    assert simulation.period_s == pytest.approx(6, rel=2e-3)
    assert refinement.unrefined_s == pytest.approx(8)  # 2 * 3 + 2
    assert refinement.busy["b"] == pytest.approx({2: 0.5, 4: 0.5}, abs=5e-3)
    assert refinement.mean_busy() == pytest.approx({"a": 4, "b": 3, "c": 4}, rel=5e-3)


def test_a_rank_that_waits_is_not_busy() -> None:
    program = halves()
    table = Table({"a": 1.0, "b": 3.0, "c": 1.0}, 4)
    spans = simulate(program, table, iterations=6).spans  # a takes 2, b takes 6
    assert busy_ranks(spans, program, 4) == {
        "a": {4: 1.0},
        "b": {2: pytest.approx(2 / 3), 4: pytest.approx(1 / 3)},
        "c": {4: 1.0},
    }
    assert busy_ranks(spans, program, 2)["b"] == {2: 1.0}, "of its own node"


def moment_by_moment(program: Program, alone: Mapping[str, float], iterations: int = 12) -> float:
    """The period of ranks that walk their calls, all calls at the pace of that moment."""
    order = [item.call for item in program.instructions if isinstance(item, Run)]
    needs = {c.name: [p.name for p in program.graph.parents(c)] for c in program.graph.calls}
    ranks = {name: range(*program.plan.calls[name].ranks) for name in order}
    queues = {
        rank: [(i, name) for i in range(iterations) for name in order if rank in ranks[name]]
        for rank in range(program.world_size)
    }
    done: set[tuple[int, str]] = set()
    running: dict[tuple[int, str], float] = {}
    now, ends = 0.0, []
    while any(queues.values()):
        for rank in queues:
            at = queues[rank][0] if queues[rank] else None
            if at is not None and at not in running:
                first = all(queues[other] and queues[other][0] == at for other in ranks[at[1]])
                if first and all((at[0], name) in done for name in needs[at[1]]):
                    running[at] = alone[at[1]]
        pace = 1 / slowdown(sum(len(ranks[name]) for _, name in running))
        step = min(running.values()) / pace
        now += step
        running = {at: left - step * pace for at, left in running.items()}
        for at in [at for at, left in running.items() if left <= 1e-9]:
            del running[at]
            done.add(at)
            for rank in ranks[at[1]]:
                queues[rank].pop(0)
            if at[1] == order[-1]:
                ends.append(now)
    return (ends[-1] - ends[3]) / (len(ends) - 4)


@pytest.mark.parametrize("seed", range(12))
def test_it_settles_on_the_timeline_of_ranks_that_slow_each_other_down(seed: int) -> None:
    draw = random.Random(seed)
    windows = ["d4t1p1@0-3", "d2t1p1@0-1", "d2t1p1@2-3", "d1t1p1@0-0", "d1t1p1@2-2", "d1t1p1@3-3"]
    names = "abcdef"
    calls = [call(name, f"model_{name}", "inference", outputs=f"key_{name}") for name in names[:-2]]
    late = draw.choice(names[:-2])
    calls.append(call("e", "model_e", "inference", inputs=f"key_{late}", outputs="key_e"))
    keys = " ".join(f"key_{name}" for name in names[:-1])
    calls.append(call("f", "model_f", "inference", inputs=keys, outputs="key_f"))
    placements = {name: draw.choice(windows[1:]) for name in names[:-1]} | {"f": windows[0]}
    alone = {name: draw.uniform(0.2, 3.0) for name in names}
    program = program_of(calls, placements, 4)
    prices, refinement, simulation = refined(program, alone)
    assert refinement.change <= 1e-3
    assert refinement.rounds < 20
    assert simulation.period_s == pytest.approx(moment_by_moment(program, alone), rel=5e-3)
    for name in names:
        own = len(range(*program.plan.calls[name].ranks))
        assert alone[name] * slowdown(own) * (1 - 1e-9) <= prices.call(name).seconds
        assert prices.call(name).seconds <= alone[name] * slowdown(4) * (1 + 1e-9)


OPTIONS = SpaceOptions(
    offload=False,
    stream=False,
    recompute=("none",),
    microbatch_sizes=(16,),
    drop_trained_weights=False,
    max_tp=1,
)
LIMITS = Limits(time_s=60.0, gap=0.02)


@lru_cache(maxsize=2)
def ranks(number: int) -> Planner:
    """PPO on CPU ranks that share two cores."""
    tiny: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "position_embedding_type": "rope",
    }
    tree = {
        "cluster": {"devices_per_node": number, "device": "cpu"},
        "workload": {"batch_size": 16, "prompt": {"length": 16}, "response": {"length": 8}},
        "model": {"actor": {"name": "tiny", "megatron": tiny}},
    }
    return planner_of(PlanInputs.from_tree(tree), ppo_graph())


def test_the_search_compares_plans_at_refined_prices() -> None:
    one = ranks(4)
    found = one.search(limits=LIMITS, options=OPTIONS)
    again = one.estimate(found.plan)
    assert found.refined is not None
    assert found.estimate.refinement is not None
    assert found.estimate.period_s == again.period_s == found.refined.period_s
    assert 0 < found.refined.lower_bound_s <= found.refined.period_s
    assert found.solution.assignment is not None
    first = found.space.problem.to_plan(found.solution.assignment, found.solution.order)
    assert found.estimate.period_s <= one.estimate(first).period_s
    for name in ("symmetric", "split"):
        preset = one.search(name, limits=LIMITS, options=OPTIONS)
        assert found.estimate.period_s <= preset.estimate.period_s * (1 + 1e-9)
        assert found.refined.lower_bound_s <= preset.estimate.period_s
    predicted = found.plan.predicted
    assert predicted is not None
    assert predicted.model_extra is not None
    assert predicted.lower_bound_s == found.refined.lower_bound_s
    assert predicted.model_extra["refined"]["unrefined_s"] == found.estimate.refinement.unrefined_s
    text = "\n".join(search_lines(one, found))
    assert "at prices before they were refined" in text
    assert f"the best of {found.refined.compared} plans" in text
    assert "4 ranks share the 2 cores of a node" in text


def test_from_a_slow_plan_single_calls_are_changed_until_nothing_is_faster() -> None:
    one = ranks(4)
    problem = one.space(OPTIONS).problem
    slow = {
        call.name: Choice(Mesh(0, 1), problem.options_on(call.name, Mesh(0, 1))[-1])
        for call in one.graph.calls
    }
    searches = _Searches(one, "exact", problem, LIMITS, end=0.0)
    start = searches._new(slow, None)
    assert start is not None
    searches.change(until=0.0)
    assert searches.best is start  # no time
    searches.change(until=float("inf"))
    best = searches.best
    assert not best.estimate.problems
    assert best.estimate.period_s < 0.7 * start.estimate.period_s
    assert one.estimate(best.estimate.plan).period_s == best.estimate.period_s
    count = len(searches.found)
    searches.change(until=float("inf"))
    assert searches.best is best
    assert len(searches.found) - count <= 16


@pytest.mark.parametrize("name", presets.WHOLE_CLUSTER)
def test_calls_on_all_ranks_cost_the_same_whatever_is_assumed_beside_them(name: str) -> None:
    one = ranks(4)
    found = one.search(name, limits=LIMITS, options=OPTIONS)
    assert found.refined is not None
    assert found.refined.compared == 1
    assert found.estimate.refinement is not None
    assert found.estimate.period_s == pytest.approx(found.estimate.refinement.unrefined_s)
    assert all(busy == pytest.approx(4) for busy in found.estimate.refinement.mean_busy().values())


def test_refined_prices_lie_between_a_call_by_itself_and_one_among_all_ranks() -> None:
    one = ranks(4)
    plan = presets.split(one.graph, one.cluster.spec)
    estimate = one.estimate(plan)
    assert estimate.refinement is not None
    assert estimate.period_s < estimate.refinement.unrefined_s
    for item in one.graph.calls:
        placement = plan.calls[item.name]
        least, most = (one.prices.calls.price(item, placement, busy).seconds for busy in (2, 4))
        assert least < most
        assert least * (1 - 1e-9) <= estimate.calls[item.name].seconds <= most * (1 + 1e-9)


@pytest.mark.parametrize("one", [ranks(2), gpus(4)], ids=["cpu", "gpu"])
def test_ranks_with_cores_of_their_own_are_left_alone(one: Planner) -> None:
    plan = presets.split(one.graph, one.cluster.spec)
    estimate = one.estimate(plan)
    assert estimate.refinement is None
    assert estimate.plan.predicted is not None
    assert "refined" not in (estimate.plan.predicted.model_extra or {})
    program = compile_program(one.graph, plan)
    assert estimate.simulation == simulate(program, one.prices.of_program(program))
    for item in one.graph.calls:
        placement = plan.calls[item.name]
        assert one.prices.calls.price(item, placement, 1) is one.prices.calls.price(item, placement)
        assert one.prices.call(item, placement, {1: 0.5, 2: 0.5}) is one.prices.calls.price(item, placement)
    found = one.search("greedy", options=OPTIONS)
    assert found.refined is None
    assert found.proof is found.solution


def test_a_pins_price_is_at_refined_prices() -> None:
    one = ranks(4)
    pinned = one.search("greedy", limits=LIMITS, options=OPTIONS, pins={"actor_train": Pin(ranks=(0, 1))})
    (price,) = pinned.pin_prices
    free = one.search("greedy", limits=LIMITS, options=OPTIONS)
    assert price.period_without_s == pytest.approx(free.estimate.period_s)
    assert price.cost_s == pytest.approx(max(0.0, pinned.estimate.period_s - free.estimate.period_s))
