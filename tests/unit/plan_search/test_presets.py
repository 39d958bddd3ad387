"""Plans without a search: where calls go, what is refused; and the best plans of a kind, against brute force."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import pytest

from megatron_real.algorithms.graphs import dpo_graph, graph_of, ppo_graph, reward_graph, sft_graph
from megatron_real.dataflow import CallType
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.presets import (
    PRESETS,
    least_memory,
    preset_families,
    solve_preset,
    split,
    symmetric,
)
from megatron_real.plan_search.problem import Choice, Limits, SearchProblem
from megatron_real.program import Realloc, compile_program
from tests.property.small_problems import every_choice, small_problem

FOUR = ClusterSpec(devices_per_node=4)
SHAPE = ModelShape(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    padded_vocab_size=64,
)
SHAPES = dict.fromkeys(("actor", "ref", "critic", "reward"), SHAPE)


@pytest.mark.parametrize("reward", ["model", "function"])
@pytest.mark.parametrize("reference", [True, False])
def test_symmetric_is_data_parallel_over_everything(reward: str, reference: bool) -> None:
    graph = ppo_graph(reward, reference=reference)
    plan = symmetric(graph, FOUR, SHAPES)
    assert set(plan.calls) == {call.name for call in graph.calls}
    assert {placement.ranks for placement in plan.calls.values()} == {(0, 4)}
    assert {str(placement.parallel) for placement in plan.calls.values()} == {"d4t1p1"}
    program = compile_program(graph, plan)
    assert not [entry for entry in program.instructions if isinstance(entry, Realloc)]


def test_symmetric_layout_and_its_exceptions() -> None:
    graph = ppo_graph("function")
    plan = symmetric(graph, FOUR, SHAPES, layout="d1t2p2v2l1.0.1.2s")
    for call in graph.calls:
        placement = plan.calls[call.name]
        layout = placement.parallel
        if call.model is None:
            assert layout == Layout(dp=4)
            assert placement.num_microbatches == 1
            continue
        assert (layout.tp, layout.pp, placement.num_microbatches) == (2, 2, 2)
        assert layout.sp is (call.type is not CallType.GENERATE)
        if call.trains:
            assert (layout.vpp, layout.layers) == (2, (1, 0, 1, 2))
        else:
            assert (layout.vpp, layout.layers) == (
                1,
                (2, 2),
            )  # stage 0 has chunks 0 and 2, stage 1 has 1 and 3


def test_num_microbatches_of_models_only() -> None:
    plan = symmetric(ppo_graph("function"), FOUR, num_microbatches=3)
    assert plan.calls["rew_inf"].num_microbatches == 1
    assert plan.calls["actor_gen"].num_microbatches == plan.calls["critic_train"].num_microbatches == 3


@pytest.mark.parametrize("reward", ["model", "function"])
def test_split_halves(reward: str) -> None:
    graph = ppo_graph(reward)
    plan = split(graph, FOUR, SHAPES, layouts={"actor": "d1t2p1", "critic_train": "d1t1p2"})
    first, second = Mesh(0, 2), Mesh(2, 4)
    where = {name: placement.mesh for name, placement in plan.calls.items()}
    assert where == {
        **dict.fromkeys(("actor_gen", "ref_inf", "actor_train"), first),
        **dict.fromkeys(("rew_inf", "critic_inf", "critic_train"), second),
    }
    layouts = {name: str(placement.parallel) for name, placement in plan.calls.items()}
    assert layouts["actor_gen"] == layouts["actor_train"] == "d1t2p1"
    assert layouts["critic_train"] == "d1t1p2"
    assert layouts["ref_inf"] == layouts["critic_inf"] == layouts["rew_inf"] == "d2t1p1"


def test_split_without_a_critic_or_reward() -> None:
    """Preference training has an actor and its reference only: the one that trains and the frozen one part."""
    plan = split(dpo_graph(), FOUR)
    assert (plan.calls["actor_train"].ranks, plan.calls["ref_inf"].ranks) == ((0, 2), (2, 4))
    for graph in (sft_graph(), reward_graph()):
        with pytest.raises(PlanError, match=f"all calls of {graph.name} on one half"):
            split(graph, FOUR)


def test_split_uneven_cluster() -> None:
    plan = split(ppo_graph(), ClusterSpec(devices_per_node=3))
    assert plan.calls["actor_train"].ranks == (0, 1)
    assert plan.calls["critic_train"].ranks == (1, 3)


def test_refusals() -> None:
    graph = ppo_graph()
    with pytest.raises(PlanError, match="at least 2"):
        split(graph, ClusterSpec(devices_per_node=1))
    with pytest.raises(PlanError, match=r"'d2t1p1' needs 2 ranks; the window 0-3 has 4"):
        symmetric(graph, FOUR, layout="d2t1p1")
    with pytest.raises(PlanError, match=r"\['actr'\].*actor_gen"):
        split(graph, FOUR, layouts={"actr": "d2t1p1"})
    with pytest.raises(PlanError, match="4 layers do not divide"):
        symmetric(graph, ClusterSpec(devices_per_node=3), SHAPES, layout="d1t1p3")
    with pytest.raises(PlanError, match="num_attention_heads=4"):
        symmetric(graph, ClusterSpec(devices_per_node=8), SHAPES, layout="d1t8p1")


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, megatron_real.plan_search.presets, megatron_real.algorithms.graphs\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


WORLD = Mesh(0, 4)


def degrees(choice: Choice) -> tuple[int, int, int]:
    layout = choice.option.layout
    return layout.dp, layout.tp, layout.pp


def is_of_kind(kind: str, problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    """The kinds, written down a second time for four devices in one node."""
    graph = problem.graph
    models = {name: choice for name, choice in choices.items() if graph.call(name).model is not None}
    meshes = {choice.mesh for choice in choices.values()}
    if kind == "split":
        return is_split(problem, choices)
    if meshes != {WORLD}:
        return False
    match kind:
        case "symmetric":
            return len(set(map(degrees, models.values()))) == 1
        case "heuristic":
            return set(map(degrees, models.values())) == {(1, 4, 1)}
        case "hybrid":
            return all(
                choice.option.layout.pp == 1 if name == "actor_gen" else degrees(choice) == (4, 1, 1)
                for name, choice in models.items()
            )
        case "colocated":
            return shares_training_layouts(problem, choices)
    raise AssertionError(kind)


def shares_training_layouts(problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    layouts: dict[str, set[tuple[int, int, int]]] = {}
    for call in problem.graph.calls:
        if call.model is not None and call.type is not CallType.GENERATE:
            layouts.setdefault(call.model, set()).add(degrees(choices[call.name]))
    return all(len(found) == 1 for found in layouts.values())


def is_split(problem: SearchProblem, choices: Mapping[str, Choice]) -> bool:
    def meshes(*names: str) -> set[Mesh]:
        return {choices[name].mesh for name in names if name in choices}

    actor, rest = meshes("actor_train", "ref_inf"), meshes("critic_inf", "critic_train", "rew_inf")
    groups = [actor, rest]
    if meshes("actor_gen") != actor:
        groups.append(meshes("actor_gen"))
    if any(len(group) != 1 for group in groups):
        return False
    windows = [next(iter(group)) for group in groups]
    covered = sorted(rank for mesh in windows for rank in mesh.ranks)
    return covered == [0, 1, 2, 3] and shares_training_layouts(problem, choices)


def brute(kind: str, problem: SearchProblem) -> float:
    periods = [
        found.period_s
        for choices in every_choice(problem)
        if is_of_kind(kind, problem, choices) and (found := problem.evaluate(choices, problem.order)).fits
    ]
    return min(periods, default=float("inf"))


MESHES = (WORLD, Mesh(0, 2), Mesh(2, 4), Mesh(2, 3), Mesh(3, 4))
FULL_NODE = ("d1t4p1", "d4t1p1")


def problem_of(seed: int, capacity: int, *, split: bool) -> SearchProblem:
    graph = graph_of("grpo", reward="model" if seed % 2 else "function")
    meshes = MESHES if split else (WORLD,)
    problem = small_problem(seed, graph, meshes=meshes, capacity=capacity, keep=0.35)
    if split:
        return problem
    # All layouts that calls could have in common are there.
    full = small_problem(seed, graph, meshes=meshes, capacity=capacity, keep=1.0)
    options = {
        key: tuple(option for option in found if option.num_microbatches <= 2)
        for key, found in full.options.items()
    }
    options = {
        key: tuple(
            option
            for option in found
            if str(option.layout) in FULL_NODE or option in problem.options[key] or key[0] == "rew_inf"
        )
        for key, found in options.items()
    }
    return replace(problem, options=options)


@pytest.mark.parametrize("capacity", [150, 260])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", PRESETS)
def test_a_preset_is_the_best_of_its_kind(kind: str, seed: int, capacity: int) -> None:
    problem = problem_of(seed, capacity, split=kind == "split")
    solution = solve_preset(kind, problem)
    best = brute(kind, problem)
    assert solution.period_s == pytest.approx(best, rel=1e-9)
    if solution.assignment is None:
        assert solution.proven_infeasible
        return
    assert is_of_kind(kind, problem, solution.assignment)
    found = problem.evaluate(solution.assignment, solution.order)
    assert (found.fits, found.period_s) == (True, solution.period_s)
    assert solution.lower_bound_s == solution.period_s
    problem.to_plan(solution.assignment, solution.order).check(problem.graph)


def test_kinds_contain_each_other() -> None:
    for seed in range(4):
        problem = small_problem(seed, graph_of("ppo"), meshes=MESHES, capacity=300, keep=1.0)
        periods = {kind: solve_preset(kind, problem, Limits(time_s=20)).period_s for kind in PRESETS[:2]}
        colocated = solve_preset("colocated", problem, Limits(time_s=20, gap=0.02))
        assert periods["symmetric"] <= periods["heuristic"]
        assert colocated.lower_bound_s <= periods["symmetric"] * (1 + 1e-9)
        assert colocated.period_s <= periods["symmetric"] * 1.02 + 1e-9
        symmetric = solve_preset("symmetric", problem, Limits(time_s=20))
        if symmetric.assignment is not None:  # which it starts from, so that it is no slower however it ends
            cut = solve_preset("colocated", problem, Limits(time_s=20, evaluations=symmetric.evaluations + 1))
            assert cut.period_s <= symmetric.period_s * (1 + 1e-9)
            assert cut.lower_bound_s <= cut.period_s


def test_tp_fills_the_node_and_pp_crosses_the_nodes() -> None:
    problem = small_problem(1, capacity=10**6, keep=1.0)
    for nodes, devices, expected in ((1, 4, (1, 4, 1)), (2, 2, (1, 2, 2)), (4, 1, (2, 1, 2))):
        cluster = ClusterSpec(num_nodes=nodes, devices_per_node=devices)
        solution = solve_preset("heuristic", replace(problem, cluster=cluster))
        assert solution.assignment is not None
        assert set(map(degrees, solution.assignment.values())) == {expected}


def test_every_way_to_split() -> None:
    problem = small_problem(0, meshes=MESHES, capacity=10**6)
    found = {
        tuple(family.problem.pinned[name] for name in ("actor_train", "critic_train", "actor_gen"))
        for family in preset_families("split", problem)
    }
    halves = (Mesh(0, 2), Mesh(2, 4))
    thirds = (Mesh(0, 2), Mesh(2, 3), Mesh(3, 4))
    assert found == {
        *((actor, rest, actor) for actor, rest in permutations(halves)),
        *permutations(thirds),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dpo", {(Mesh(0, 2), Mesh(2, 4)), (Mesh(2, 4), Mesh(0, 2))}),
        ("sft", {(Mesh(0, 4),)}),
    ],
)
def test_splits_of_graphs_without_a_generation(name: str, expected: set[tuple[Mesh, ...]]) -> None:
    problem = small_problem(0, graph_of(name), capacity=10**6)
    found = preset_families("split", problem)
    names = [call.name for call in problem.graph.calls]
    assert {tuple(family.problem.pinned[call] for call in names) for family in found} == expected


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("name", ["dpo", "sft", "reward", "remax", "rloo"])
def test_every_graph_has_every_preset(name: str, kind: str) -> None:
    problem = small_problem(0, graph_of(name), capacity=10**6, keep=1.0)
    solution = solve_preset(kind, problem)
    assert solution.assignment is not None
    assert solution.gap == 0
    problem.to_plan(solution.assignment, solution.order).check(problem.graph)


def test_pins_hold_and_may_leave_no_plan_of_the_kind() -> None:
    problem = replace(small_problem(0, capacity=10**6), pinned={"ref_inf": Mesh(0, 2)})
    solution = solve_preset("split", problem)
    assert solution.assignment is not None
    assert {solution.assignment[name].mesh for name in ("ref_inf", "actor_train")} == {Mesh(0, 2)}
    nothing = solve_preset("symmetric", problem)
    assert (nothing.assignment, nothing.proven_infeasible) == (None, True)


def test_a_limit_leaves_a_bound() -> None:
    problem = small_problem(0, capacity=260, keep=1.0)
    best = solve_preset("symmetric", problem)
    cut = solve_preset("symmetric", problem, Limits(evaluations=1))
    assert not cut.proven_infeasible
    assert cut.lower_bound_s <= best.period_s * (1 + 1e-9)
    assert cut.evaluations == 1


def test_least_memory_is_what_is_missing() -> None:
    problem = small_problem(3, graph_of("grpo", reward="function"), capacity=1, keep=0.25)
    found, missing = least_memory(problem, problem.capacity_bytes)
    assert found is not None
    assert missing == problem.evaluate(found).overflow_bytes
    best = min(problem.evaluate(choices).overflow_bytes for choices in every_choice(problem))
    assert best <= missing <= 1.15 * best


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(PlanError, match="'nemo'; expected one of heuristic, symmetric"):
        solve_preset("nemo", small_problem(0))
