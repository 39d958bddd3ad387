"""The greedy start and its repair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_real.algorithms.graphs import graph_of
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.problem import Limits, Option, SearchProblem, Solution
from megatron_real.plan_search.strategies.greedy import fastest, pareto, rank_peaks, solve
from tests.property.search_problems import realistic_problem
from tests.property.small_problems import every_choice, small_problem


@pytest.mark.parametrize("seed", range(4))
def test_takes_each_calls_fastest_choice_where_it_fits(seed: int) -> None:
    problem = small_problem(seed, capacity=10**6)
    solution = solve(problem, Limits())
    assert solution.assignment is not None
    for call in problem.graph.calls:
        least = min(
            option.seconds
            for mesh in problem.meshes_of(call.name)
            for option in problem.options_on(call.name, mesh)
        )
        assert solution.assignment[call.name].option.seconds == least
    assert solution.period_s == problem.evaluate(solution.assignment).period_s
    assert (solution.evaluations, solution.lower_bound_s) == (1, 0.0)


@pytest.mark.parametrize("capacity", [215, 240, 270, 300])
@pytest.mark.parametrize("seed", range(4))
def test_repairs_what_does_not_fit(seed: int, capacity: int) -> None:
    problem = small_problem(seed, graph_of("grpo"), capacity=capacity, keep=0.4)
    fits = any(problem.evaluate(choices).fits for choices in every_choice(problem))
    solution = solve(problem, Limits())
    if solution.assignment is None:
        # Only where next to nothing fits may the repair find nothing.
        roomy = replace(problem, capacity_bytes=round(capacity * 1.2))
        assert not fits or solve(roomy, Limits()).assignment is not None
        return
    found = problem.evaluate(solution.assignment, solution.order)
    assert (found.fits, found.period_s) == (True, solution.period_s)
    again = solve(problem, Limits())
    assert (again.assignment, again.evaluations) == (solution.assignment, solution.evaluations)


def test_some_repairs_are_needed_and_succeed() -> None:
    repaired = 0
    for seed in range(12):
        problem = small_problem(seed, graph_of("grpo"), capacity=250, keep=0.4)
        if not problem.evaluate(fastest(problem)).fits:
            repaired += solve(problem, Limits()).assignment is not None
    assert repaired >= 3


def one_call(*options: Option, capacity: int) -> SearchProblem:
    """Of SFT's single call, on two ranks."""
    problem = small_problem(0, graph_of("sft"), meshes=(Mesh(0, 2),), capacity=capacity)
    return replace(problem, options={("actor_train", 2): options})


def test_the_move_is_the_one_with_least_time_per_byte() -> None:
    def option(seconds: float, active: int) -> Option:
        return Option(layout=Layout(dp=2), seconds=seconds, active_bytes=active)

    fastest_one, cheap, dear, small = option(1.0, 130), option(2.0, 95), option(1.5, 120), option(4.0, 20)
    # Too full by 30: cheap saves 30 of them for 1 s, small 30 for 3 s, dear 10 for 0.5 s.
    solution = solve(one_call(fastest_one, cheap, dear, small, capacity=100), Limits())
    assert solution.assignment is not None
    assert solution.assignment["actor_train"].option is cheap
    # At 115, dear does not fit yet, but it is on the way: 10 of 15 bytes for 0.5 s against 15 for 1 s.
    solution = solve(one_call(fastest_one, cheap, dear, small, capacity=115), Limits())
    assert solution.assignment is not None
    assert solution.assignment["actor_train"].option is cheap
    assert solution.evaluations > 3


def test_starts_from_what_it_is_given() -> None:
    problem = small_problem(1, capacity=10**6)
    other = next(every_choice(problem))
    start = Solution(
        strategy="test",
        assignment=other,
        order=None,
        period_s=1.0,
        lower_bound_s=0.25,
        evaluations=0,
        seconds=0.0,
    )
    solution = solve(problem, Limits(), start=start)
    assert solution.assignment == other
    assert solution.lower_bound_s == 0.25


def test_peaks_by_rank_have_the_evaluations_peak() -> None:
    problem = small_problem(2, meshes=(Mesh(0, 4), Mesh(0, 2), Mesh(2, 3)), capacity=100)
    for choices, _ in zip(every_choice(problem), range(200), strict=False):
        peaks = rank_peaks(problem, choices)
        assert max(peaks.values()) == problem.evaluate(choices).peak_bytes
        ranks = {rank for choice in choices.values() for rank in choice.mesh.ranks}
        assert {rank for piece in peaks for rank in piece.ranks} == ranks


def test_pareto() -> None:
    def option(seconds: float, weights: int, active: int, **more: object) -> Option:
        layout = Layout.parse(str(more.pop("layout", "d2t1p1")))
        return Option(layout=layout, seconds=seconds, weights_bytes=weights, active_bytes=active, **more)  # type: ignore[arg-type]

    best = option(1.0, 10, 10)
    beaten = option(1.1, 10, 10)
    smaller = option(2.0, 10, 5)
    other = option(3.0, 10, 10, layout="d1t2p1")
    away = option(4.0, 10, 10, offload="host")
    options = (best, beaten, smaller, other, away)
    assert pareto(options, home=True, alone=True) == (best, smaller, away)
    assert pareto(options, home=True, alone=False) == (best, smaller, other, away)
    assert pareto(options, home=False, alone=False) == (best, smaller, other)
    assert pareto(options, home=False, alone=True, lean=True) == (smaller,)


def test_a_large_cluster_takes_few_evaluations() -> None:
    problem = realistic_problem(64)
    solution = solve(problem, Limits(time_s=30))
    assert solution.assignment is not None
    assert problem.evaluate(solution.assignment, solution.order).fits
    assert solution.evaluations < 3000


def test_a_call_without_options_is_infeasible() -> None:
    problem = replace(small_problem(0, graph_of("sft")), options={})
    solution = solve(problem, Limits())
    assert (solution.assignment, solution.proven_infeasible) == (None, True)
    with pytest.raises(PlanError, match="a call without options"):
        fastest(problem)
