"""The CP-SAT model against full enumeration, and against the exact search."""

from __future__ import annotations

import builtins
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_real.algorithms.graphs import graph_of
from megatron_real.dataflow import Graph
from megatron_real.errors import ConfigError, PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Limits, Option, Progress, SearchProblem
from megatron_real.plan_search.strategies import cpsat, greedy
from tests.property.search_problems import GRAPHS, UPDATES, random_problem, realistic_problem
from tests.property.small_problems import every_choice, small_problem

pytest.importorskip("ortools")

ROUNDING = 1e-3
THREE = (Mesh(0, 3), Mesh(0, 2), Mesh(1, 3), Mesh(0, 1), Mesh(2, 3))
"""Windows that are neither nested nor disjoint."""


def optimum(problem: SearchProblem) -> float:
    kernel = Kernel(problem)
    orders = list(problem.orders())
    found = (
        kernel.evaluate(choices, order) for choices, order in itertools.product(every_choice(problem), orders)
    )
    return min((one.period_s for one in found if one.fits), default=math.inf)


def check(problem: SearchProblem, best: float) -> None:
    solution = cpsat.solve(problem, Limits(time_s=150))
    if best == math.inf:
        assert solution.proven_infeasible
        assert solution.assignment is None
        return
    assert solution.assignment is not None
    found = problem.evaluate(solution.assignment, solution.order)
    assert (found.fits, found.period_s) == (True, solution.period_s)
    problem.to_plan(solution.assignment, solution.order).check(problem.graph)
    assert solution.period_s == pytest.approx(best, rel=ROUNDING)
    assert best * (1 - ROUNDING) <= solution.lower_bound_s <= best * (1 + 1e-9)


def equal_weights(problem: SearchProblem) -> SearchProblem:
    """With weights that follow from call, size and layout, as they do."""

    def settled(call: str, option: Option) -> Option:
        model = problem.graph.call(call).model
        weights = random.Random(f"{model}{option.layout}").randint(2, 40)
        return replace(option, weights_bytes=weights)

    options = {
        (call, size): tuple(settled(call, option) for option in found)
        for (call, size), found in problem.options.items()
    }
    return replace(problem, options=options)


@pytest.mark.parametrize("kind", sorted(GRAPHS.keys() - UPDATES.keys()))
def test_random_problems(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(3):
        problem = equal_weights(random_problem(rng, kind=kind, most=800))
        check(problem, optimum(problem))


@pytest.mark.parametrize("capacity", [210, 260, 400])
@pytest.mark.parametrize("name", ["grpo", "remax", "dpo"])
def test_windows_that_are_not_nested(name: str, capacity: int) -> None:
    options = {"reward": "function"} if name != "dpo" else {}
    problem = small_problem(
        capacity, graph_of(name, **options), meshes=THREE[:4], capacity=capacity, keep=0.08, laminar=False
    )
    check(problem, optimum(problem))


def middle_sized() -> Iterator[SearchProblem]:
    for seed in range(6):
        yield small_problem(seed, graph_of("ppo"), capacity=(270, 300, 500)[seed % 3], keep=0.15)
    for seed in range(4):
        graph = graph_of("grpo" if seed % 2 else "remax", reward="function")
        yield small_problem(seed, graph, capacity=(230, 300)[seed // 2], keep=0.4)


@pytest.mark.parametrize("problem", list(middle_sized()), ids=range(10))
def test_agrees_with_the_exact_search(problem: SearchProblem) -> None:
    exact = pytest.importorskip("megatron_real.plan_search.strategies.exact")
    best = exact.solve(problem, Limits(time_s=60))
    assert best.gap == 0 or best.proven_infeasible
    check(problem, best.period_s)


def test_no_power_of_two_is_needed() -> None:
    """On 6 devices, three frozen models that do not scale run side by side on thirds, but not on halves."""
    base = graph_of("grpo")
    rewards = ("rew_inf", "rew2_inf", "rew3_inf")
    inference = base.call("rew_inf")
    extra = tuple(replace(inference, name=name, model=name, outputs=()) for name in rewards[1:])
    gen, train = base.call("actor_gen"), base.call("actor_train")
    train = replace(train, inputs=tuple(entry for entry in train.inputs if entry.key != "ref_logprobs"))
    graph = replace(base, calls=(gen, inference, *extra, train))
    seconds = {"actor_gen": 4.0, "actor_train": 3.0, **dict.fromkeys(rewards, 1.0)}
    options = {
        (name, size): (Option(layout=Layout(dp=size), seconds=time),)
        for name, time in seconds.items()
        for size in ((2, 3) if name in rewards else (6,))
    }
    meshes = tuple(Mesh(at, at + size) for size in (6, 3, 2) for at in range(0, 7 - size, size))
    base_problem = small_problem(0, graph, meshes=(Mesh(0, 6),), capacity=1)
    problem = replace(base_problem, meshes=meshes, options=options, laminar=False)
    halves = replace(problem, meshes=tuple(mesh for mesh in meshes if mesh.size != 2))
    assert cpsat.solve(problem, Limits(time_s=60)).period_s == pytest.approx(4.0 + 1.0 + 3.0)
    assert cpsat.solve(halves, Limits(time_s=60)).period_s == pytest.approx(4.0 + 2.0 + 3.0)


def on_two_ranks(graph: Graph, options: dict[str, Option], capacity: int) -> SearchProblem:
    """One option for each call, all of them on the same two ranks."""
    problem = small_problem(0, graph, meshes=(Mesh(0, 2),))
    table = {(call, 2): (option,) for call, option in options.items()}
    return replace(problem, options=table, capacity_bytes=capacity, bucket_bytes=0)


@pytest.mark.parametrize(("capacity", "fits"), [(60, True), (59, False)])
def test_dropped_weights_make_room_for_a_generation(capacity: int, fits: bool) -> None:
    train = Option(
        layout=Layout(tp=2),
        seconds=1.0,
        weights_bytes=10,
        state_bytes=20,
        active_bytes=5,
        drop_trained_weights=True,
    )
    gen = Option(layout=Layout(dp=2), seconds=1.0, weights_bytes=10, active_bytes=30)
    score = Option(layout=Layout(dp=2), seconds=0.1)
    graph = graph_of("grpo", reward="function", reference=False)
    options = {"actor_gen": gen, "rew_inf": score, "actor_train": train}
    problem = on_two_ranks(graph, options, capacity)
    # While the generation runs: state 20, its copy 10, activations 30.
    solution = cpsat.solve(problem, Limits(time_s=30))
    assert (solution.assignment is not None) is fits
    assert solution.proven_infeasible is not fits


def test_a_shared_copy_waits_for_its_second_call() -> None:
    gen = Option(layout=Layout(dp=2), seconds=1.0, weights_bytes=20, active_bytes=5)
    reward = Option(layout=Layout(tp=2), seconds=1.0, weights_bytes=5, active_bytes=30)
    train = Option(layout=Layout(tp=2), seconds=1.0, weights_bytes=10, state_bytes=10, active_bytes=5)
    problem = on_two_ranks(
        graph_of("remax"),
        {
            "actor_gen": gen,
            "greedy_gen": gen,
            "rew_inf": reward,
            "greedy_rew_inf": reward,
            "actor_train": train,
        },
        60,
    )
    # Beside 25 resident bytes, a reward's 30 leave no room for the generations' copy of 20.
    between = ("actor_gen", "rew_inf", "greedy_gen", "greedy_rew_inf", "actor_train")
    assert cpsat.solve(replace(problem, order=between), Limits(time_s=30)).proven_infeasible
    solution = cpsat.solve(problem, Limits(time_s=30))
    order = [call.name for call in problem.graph.ordered(solution.order)]
    assert set(order[:2]) == {"actor_gen", "greedy_gen"}
    assert solution.lower_bound_s == pytest.approx(optimum(problem), rel=ROUNDING)


def test_three_sharers_of_a_copy_give_a_plan_without_a_bound() -> None:
    rows = "abc"
    graph = graph_of("grpo", reward="function")
    extra = tuple(
        replace(graph.call("actor_gen"), name=f"gen_{name}", outputs=(), sequences=name) for name in rows
    )
    graph = replace(graph, calls=(*extra, *graph.calls))
    problem = small_problem(0, graph, meshes=(Mesh(0, 2),), capacity=500, keep=0.2)
    solution = cpsat.solve(problem, Limits(time_s=8))
    assert solution.assignment is not None
    assert problem.evaluate(solution.assignment, solution.order).fits
    assert solution.lower_bound_s == 0.0


def test_a_time_limit_leaves_the_start_and_a_bound() -> None:
    problem = realistic_problem(16, billions={"actor": 7.0, "ref": 7.0})
    told: list[Progress] = []
    solution = cpsat.solve(problem, Limits(time_s=8), progress=told.append)
    assert solution.period_s <= greedy.solve(problem, Limits()).period_s
    assert 0 <= solution.lower_bound_s <= solution.period_s
    assert tuple(told) == solution.trace


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "_MAX_PAIRS", 3)
    with pytest.raises(PlanError, match="pairs of copies of actor for actor_gen; expected at most 3"):
        cpsat.solve(small_problem(0, graph_of("grpo")), Limits(time_s=5))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("ortools"):
            raise ImportError(name)
        return importing(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="pip install ortools"):
        cpsat.solve(small_problem(0), Limits())
