"""The tree searches against full enumeration, on problems small enough for it."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Choice, Limits, SearchProblem, Solution
from megatron_real.plan_search.strategies import beam, brute, exact
from megatron_real.plan_search.strategies.bounds import WindowBound
from megatron_real.plan_search.strategies.floors import Floors
from megatron_real.plan_search.strategies.orders import distinct_orders
from megatron_real.plan_search.strategies.packing import Packing
from megatron_real.plan_search.strategies.placed import Placer
from megatron_real.plan_search.strategies.reallocs import ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Tables
from tests.property.search_problems import GRAPHS, MANY_COPIES, random_problem

KINDS = [*GRAPHS, *MANY_COPIES]
ROUNDING = 1e-9


def _check_answer(problem: SearchProblem, solution: Solution) -> None:
    """The solution is a choice of the problem and has the period that it says."""
    assert solution.assignment is not None
    for name, choice in solution.assignment.items():
        assert choice.mesh in problem.meshes_of(name)
        assert choice.option in problem.options_on(name, choice.mesh)
    evaluation = problem.evaluate(solution.assignment, solution.order)
    assert evaluation.fits
    assert evaluation.period_s == solution.period_s
    assert solution.order in set(problem.orders())


@pytest.mark.parametrize("seed", range(225))
def test_strategies_against_full_enumeration(seed: int) -> None:
    problem = random_problem(random.Random(seed), kind=KINDS[seed % len(KINDS)], most=1200)
    best = brute.solve(problem, Limits())
    found = exact.solve(problem, Limits())
    early = exact.solve(problem, Limits(evaluations=1 + seed % 5))
    coarse = exact.solve(problem, Limits(gap=0.1))
    near = beam.solve(problem, Limits(), width=2)
    assert found.proven_infeasible == best.proven_infeasible
    for other in (early, coarse, near):
        assert other.lower_bound_s <= best.period_s * (1 + ROUNDING)
        assert other.period_s >= best.period_s * (1 - ROUNDING)
        assert best.proven_infeasible or not other.proven_infeasible
        if other.assignment is not None:
            _check_answer(problem, other)
    if best.assignment is None:
        assert found.assignment is None
        return
    assert found.period_s == pytest.approx(best.period_s, rel=ROUNDING)
    assert found.lower_bound_s == found.period_s
    assert found.gap == 0
    assert coarse.gap <= 0.1 + ROUNDING
    _check_answer(problem, found)


def _bound_of(problem: SearchProblem) -> tuple[Tables, WindowBound]:
    tables = Tables(problem)
    return tables, WindowBound(tables, Serial(tables), ReallocFloor(tables))


@pytest.mark.parametrize("seed", range(1000, 1045))
def test_bounds_hold_below_any_windows(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, kind=KINDS[seed % len(KINDS)], most=1200)
    tables, bound = _bound_of(problem)
    if not all(tables.candidates):
        assert exact.solve(problem, Limits()).proven_infeasible
        return
    for _ in range(4):
        windows = [rng.choice(tables.candidates[call]) for call in range(tables.num_calls)]
        placed = rng.sample(range(tables.num_calls), rng.randint(0, tables.num_calls))
        partial = [window if call in placed else -1 for call, window in enumerate(windows)]
        pinned = {tables.calls[call].name: tables.tree.windows[windows[call]] for call in placed}
        below = brute.solve(dataclasses.replace(problem, pinned={**problem.pinned, **pinned}), Limits())
        assert bound(partial).seconds <= below.period_s * (1 + ROUNDING)


def _streamed_or_not(problem: SearchProblem) -> SearchProblem:
    """With every option of a copy that is filled in both ways, as the real choices have it."""
    homes = {problem.graph.home_call(model).name for model in problem.graph.models}
    filled = {call.name for call in problem.graph.calls if call.model is not None} - homes
    options = {
        (name, size): tuple(
            dataclasses.replace(option, stream=stream)
            for option in found
            for stream in ((False, True) if name in filled else (option.stream,))
        )
        for (name, size), found in problem.options.items()
    }
    return dataclasses.replace(problem, options=options)


def _drawn_windows(rng: random.Random, tables: Tables) -> list[int]:
    """A window for every call, that of another call of its model now and then."""
    windows: list[int] = []
    for call, allowed in enumerate(tables.candidates):
        near = [windows[other] for other in range(call) if tables.home[other] == tables.home[call]]
        near = [window for window in near if window in allowed]
        windows.append(rng.choice(near if near and rng.random() < 0.6 else allowed))
    return windows


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_what_a_leaf_counts_and_removes(seed: int) -> None:
    rng = random.Random(seed)
    problem = _streamed_or_not(random_problem(rng, kind=KINDS[seed % len(KINDS)], most=600))
    tables, bound = _bound_of(problem)
    if not all(tables.candidates):
        return
    serial = Serial(tables)
    placer, floors = Placer(tables, serial, ReallocFloor(tables)), Floors(tables, serial, Kernel(problem))
    for _ in range(3):
        windows = _drawn_windows(rng, tables)
        leaf = placer.place(windows)
        meshes = [tables.tree.windows[window] for window in windows]
        names = [call.name for call in tables.calls]
        pinned = dataclasses.replace(problem, pinned=dict(zip(names, meshes, strict=True)))
        best = brute.solve(pinned, Limits()).period_s
        domains = [list(tables.items[call][tables.tree.size[window]]) for call, window in enumerate(windows)]
        for call, pair in leaf.prices.items():
            least = min(item.seconds + pair.floor(pair.sources, item) for item in domains[call])
            assert pair.joint(pair.sources, domains[call]) == least
        costs = floors.costs(leaf, domains, best, reallocs=True)
        assert bound(windows).seconds <= best * (1 + ROUNDING)
        assert costs.bound <= best * (1 + ROUNDING)
        for _ in range(4):
            chosen = [
                Choice(mesh, rng.choice(domain).option) for mesh, domain in zip(meshes, domains, strict=True)
            ]
            assert floors.order_bound(leaf, domains, chosen, costs) <= best * (1 + ROUNDING)
        if best == math.inf:
            continue
        for reallocs in (False, True):
            costs = floors.costs(leaf, domains, best * (1 + 1e-6), reallocs=reallocs)
            floors.remove_slow(leaf, domains, costs, reallocs=reallocs)
        left = {
            (name, mesh.size): tuple(item.option for item in domain)
            for name, mesh, domain in zip(names, meshes, domains, strict=True)
        }
        again = brute.solve(dataclasses.replace(pinned, options=left), Limits())
        assert again.period_s == pytest.approx(best, rel=ROUNDING)


@pytest.mark.parametrize("seed", range(30))
def test_packing_equals_every_placement(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, kind="ppo", most=50_000)
    tables = Tables(problem)
    if not tables.tree.laminar:
        return
    seconds = [
        {size: rng.uniform(1, 9) for size, items in tables.items[call].items() if items}
        for call in range(tables.num_calls)
    ]
    calls = rng.sample(range(tables.num_calls), 3)
    holds = {rng.randrange(len(tables.tree.windows)): rng.uniform(1, 9) for _ in range(rng.randint(0, 2))}
    meshes = tables.tree.windows
    best = math.inf
    for windows in itertools.product(*(tables.candidates[call] for call in calls)):
        heights = [
            sum(height for window, height in holds.items() if rank in meshes[window])
            + sum(
                seconds[call][meshes[window].size]
                for call, window in zip(calls, windows, strict=True)
                if rank in meshes[window]
            )
            for rank in range(problem.cluster.num_devices)
        ]
        best = min(best, max(heights))
    mask = sum(1 << call for call in calls)
    assert Packing(tables, seconds).on_top(mask, holds) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_distinct_orders_are_one_of_each_kind(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    before = [0] * count
    dependent = [0] * count
    for one, two in itertools.combinations(range(count), 2):
        if rng.random() < 0.3:
            before[two] |= 1 << one
        if rng.random() < 0.3:
            dependent[one] |= 1 << two
            dependent[two] |= 1 << one
    ranking = rng.sample(range(count), count)

    def kind(order: tuple[int, ...]) -> frozenset[tuple[int, int]]:
        """Which of each two calls that cannot change places comes first."""
        return frozenset(
            (a, b)
            for a, b in itertools.combinations(order, 2)
            if dependent[a] >> b & 1 or before[b] >> a & 1 or before[a] >> b & 1
        )

    legal = [
        order
        for order in itertools.permutations(range(count))
        if all(before[call] & ~sum(1 << c for c in order[:at]) == 0 for at, call in enumerate(order))
    ]
    found = list(distinct_orders(before, dependent, ranking))
    assert set(found) <= set(legal)
    assert len({kind(order) for order in found}) == len(found)
    assert {kind(order) for order in found} == {kind(order) for order in legal}
