"""Branch and bound: answers that can be worked out by hand, limits, and the certificate of realistic problems."""

import dataclasses
from collections.abc import Mapping

import pytest

from megatron_real.algorithms.graphs import remax_graph
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.problem import Choice, Limits, Option, Progress, SearchProblem
from megatron_real.plan_search.strategies import beam, exact, mcmc
from megatron_real.plan_search.strategies.bounds import WindowBound
from megatron_real.plan_search.strategies.reallocs import ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Tables, WindowTree
from tests.property.search_problems import (
    GRAPHS,
    aligned_meshes,
    graph_of,
    realistic_problem,
    with_frozen_models,
)


def _problem(
    graph: str,
    seconds: Mapping[tuple[str, int], float],
    *,
    devices: int = 2,
    weights: int = 0,
    capacity: int = 100,
    price: float = 0.0,
) -> SearchProblem:
    """One option for each call and size, of these seconds."""
    rows = GRAPHS[graph]
    models = {row[0]: row[1] for row in rows}
    return SearchProblem(
        graph=graph_of(rows),
        cluster=ClusterSpec(devices_per_node=devices),
        meshes=aligned_meshes(devices),
        capacity_bytes=capacity,
        options={
            (call, size): (
                Option(
                    layout=Layout(dp=size),
                    seconds=took,
                    weights_bytes=weights if models[call] is not None else 0,
                ),
            )
            for (call, size), took in seconds.items()
        },
        realloc_s=lambda model, home, other: price,
    )


def test_two_models_that_share_nothing_run_beside_each_other() -> None:
    # On both devices each takes 5 s: 10 s together. On one device each takes 8 s, at the same time.
    seconds = {("train_a", 2): 5.0, ("train_a", 1): 8.0, ("train_b", 2): 5.0, ("train_b", 1): 8.0}
    found = exact.solve(_problem("independent", {**seconds, ("look", 1): 1.0}), Limits())
    # `look` (1 s) goes on top of one of the trainings: 9 s.
    assert found.period_s == found.lower_bound_s == 9.0
    assert found.assignment is not None
    assert {found.assignment[name].mesh for name in ("train_a", "train_b")} == {Mesh(0, 1), Mesh(1, 2)}


def test_a_reference_runs_beside_the_reward_and_the_training_waits_for_both() -> None:
    seconds = {
        ("gen", 2): 10.0,
        ("score", 1): 4.0,
        ("ref", 1): 3.0,
        ("ref", 2): 2.5,
        ("train_a", 2): 6.0,
    }
    found = exact.solve(_problem("grpo", seconds), Limits())
    assert found.period_s == 10 + max(4, 3) + 6
    assert found.gap == 0


def test_the_price_of_a_reallocation_counts_where_it_cannot_be_avoided() -> None:
    seconds = {("gen", 1): 5.0, ("ref", 2): 1.0, ("score", 2): 1.0, ("train_a", 2): 4.0}
    found = exact.solve(_problem("grpo", seconds, price=2.0), Limits())
    assert found.period_s == 2 + 5 + 1 + 1 + 4
    cheaper = exact.solve(_problem("grpo", {**seconds, ("gen", 2): 6.0}, price=2.0), Limits())
    assert cheaper.period_s == 6 + 1 + 1 + 4, "the copy of the training generates"


def test_a_streamed_reallocation_counts_what_it_adds_though_its_call_takes_as_long() -> None:
    seconds = {("gen", 1): 5.0, ("ref", 2): 1.0, ("score", 2): 1.0, ("train_a", 2): 4.0}
    problem = _problem("grpo", seconds, price=2.0)
    (plain,) = problem.options["gen", 1]
    streamed = dataclasses.replace(plain, stream=True, first_share=0.5, first_pass_s=5.0)
    problem = dataclasses.replace(problem, options={**problem.options, ("gen", 1): (plain, streamed)})
    assert exact.solve(problem, Limits()).period_s == 0.5 * 2 + 5 + 1 + 1 + 4
    tables = Tables(problem)
    bound = WindowBound(tables, Serial(tables), ReallocFloor(tables))
    number = tables.tree.number
    windows = [number[Mesh(0, 1)] if call.name == "gen" else number[Mesh(0, 2)] for call in tables.calls]
    assert bound(windows).seconds == 0.5 * 2 + 5 + 1 + 1 + 4


def test_generations_on_one_window_fill_their_copy_once() -> None:
    # Both generate on one device from the copy of a training on both, which takes 2 s to bring there.
    seconds = {("gen", 1): 5.0, ("greedy", 1): 6.0, ("train_a", 2): 4.0}
    tables = Tables(_problem("two generations", seconds, price=2.0))
    bound = WindowBound(tables, Serial(tables), ReallocFloor(tables))
    windows = [tables.tree.number[mesh] for mesh in (Mesh(0, 1), Mesh(0, 1), Mesh(0, 2))]
    assert bound(windows).seconds == 2 + 5 + 6 + 4


def test_generations_take_turns_where_each_waits_for_the_copy_of_the_other() -> None:
    # Each generates on one device, from the copy of a training on both: it is filled when the other one is done.
    seconds = {("gen", 1): 5.0, ("greedy", 1): 6.0, ("train_a", 2): 4.0}
    problem = _problem("two generations", seconds, price=2.0)
    pins = {"gen": Mesh(0, 1), "greedy": Mesh(1, 2)}
    turns = exact.solve(dataclasses.replace(problem, pinned=pins), Limits())
    assert turns.period_s == 2 + 5 + 2 + 6 + 4
    assert exact.solve(problem, Limits()).period_s == 2 + 5 + 6 + 4, "on one device they share a copy"
    tables = Tables(problem)
    bound = WindowBound(tables, Serial(tables), ReallocFloor(tables))
    windows = [tables.tree.number[mesh] for mesh in (Mesh(0, 1), Mesh(1, 2), Mesh(0, 2))]
    assert bound(windows).seconds == turns.period_s, "the windows tell"
    # A training on one of the devices fills the copy on the other one first: 2 + 6 s there, beside the 5 s here.
    apart = exact.solve(_problem("two generations", {**seconds, ("train_a", 1): 7.0}, price=2.0), Limits())
    assert apart.period_s == 2 + 6 + 7
    assert apart.gap == 0


def test_nothing_fits() -> None:
    seconds = {("ref", 2): 1.0, ("train_a", 2): 1.0}
    assert exact.solve(_problem("dpo", seconds, weights=50), Limits()).period_s == 2.0
    found = exact.solve(_problem("dpo", seconds, weights=51), Limits())
    assert found.proven_infeasible
    assert found.assignment is None
    assert found.lower_bound_s == float("inf")
    assert exact.solve(_problem("dpo", {("ref", 2): 1.0}), Limits()).proven_infeasible, "no option at all"
    assert beam.solve(_problem("dpo", {("ref", 2): 1.0}), Limits()).proven_infeasible


def test_memory_moves_a_model_to_ranks_of_its_own() -> None:
    seconds = {("ref", 2): 1.0, ("ref", 1): 3.0, ("train_a", 1): 2.0}
    assert exact.solve(_problem("dpo", seconds, weights=50), Limits()).period_s == 3.0
    tight = exact.solve(_problem("dpo", seconds, weights=60), Limits())
    # The reference now fits beside the training only; the next one runs while this one is trained on.
    assert tight.period_s == 3.0
    assert tight.assignment is not None
    assert not tight.assignment["ref"].mesh.overlaps(tight.assignment["train_a"].mesh)


def test_windows_and_orders_of_the_user_are_kept() -> None:
    problem = realistic_problem(8, sequences=256)
    pinned = dataclasses.replace(problem, pinned={"ref_inf": Mesh(4, 8)})
    found = exact.solve(pinned, Limits(time_s=30, gap=0.01))
    assert found.assignment is not None
    assert found.assignment["ref_inf"].mesh == Mesh(4, 8)
    order = ("actor_gen", "critic_inf", "ref_inf", "rew_inf", "critic_train", "actor_train")
    ordered = exact.solve(dataclasses.replace(problem, order=order), Limits(time_s=30, gap=0.01))
    assert ordered.order == order
    free = exact.solve(problem, Limits(time_s=30, gap=0.01))
    assert free.lower_bound_s <= min(found.period_s, ordered.period_s)


def test_a_start_is_kept_where_nothing_better_is_found_in_time() -> None:
    problem = realistic_problem(16)
    good = exact.solve(problem, Limits(time_s=30, gap=0.01))
    assert good.gap <= 0.01 + 1e-9
    again = exact.solve(problem, Limits(time_s=0.0), start=good)
    assert again.period_s == good.period_s
    assert again.assignment == good.assignment
    assert again.lower_bound_s <= good.period_s
    assert exact.solve(problem, Limits(time_s=0.0)).assignment is None
    foreign = dataclasses.replace(
        good,
        assignment={
            **(good.assignment or {}),
            "rew_inf": Choice(Mesh(0, 1), Option(layout=Layout(), seconds=0.0)),
        },
    )
    assert exact.solve(problem, Limits(time_s=0.0), start=foreign).assignment is None, "not of this problem"


def test_progress_improves_and_is_part_of_the_answer() -> None:
    told: list[Progress] = []
    found = exact.solve(realistic_problem(64), Limits(time_s=60, gap=0.01), progress=told.append)
    assert found.trace
    assert [progress for progress in told if progress in found.trace] == list(found.trace)
    bounds = [progress.lower_bound_s for progress in told]
    assert bounds == sorted(bounds), "what was proven stays proven"
    periods = [progress.period_s for progress in told]
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] == found.period_s
    assert all(progress.lower_bound_s <= found.period_s for progress in told)


@pytest.mark.parametrize(("devices", "frozen"), [(16, 0), (128, 0), (64, 2)])
def test_realistic_problems_get_a_certificate(devices: int, frozen: int) -> None:
    graph = with_frozen_models(frozen)
    problem = realistic_problem(devices, graph=graph)
    found = exact.solve(problem, Limits(time_s=100, gap=0.05))
    assert found.gap <= 0.05 + 1e-9
    assert found.assignment is not None
    assert problem.evaluate(found.assignment, found.order).period_s == found.period_s
    wide = beam.solve(problem, Limits(time_s=60), width=8)
    assert wide.period_s >= found.lower_bound_s
    assert wide.lower_bound_s <= found.period_s


@pytest.mark.parametrize("reference", [False, True])
def test_independent_generations_of_one_model_get_a_certificate(reference: bool) -> None:
    problem = realistic_problem(32, graph=remax_graph(reference=reference))
    found = exact.solve(problem, Limits(time_s=60, evaluations=5000, gap=0.01))
    assert found.gap <= 0.01 + 1e-9
    assert found.assignment is not None
    assert problem.evaluate(found.assignment, found.order).period_s == found.period_s
    walked = mcmc.solve(problem, Limits(time_s=60, evaluations=10_000))
    assert found.lower_bound_s <= walked.period_s
    assert found.period_s <= walked.period_s * 1.01


def test_a_beam_bounds_what_the_tree_search_does_not_finish() -> None:
    problem = realistic_problem(64, graph=with_frozen_models(4))
    found = beam.solve(problem, Limits(time_s=60), width=2)
    assert found.assignment is not None
    assert 0 < found.lower_bound_s <= found.period_s


def test_equal_windows_are_tried_once() -> None:
    tree = WindowTree(aligned_meshes(16))
    assert [tree.size[window] for window in tree.placements(0)] == [16, 8, 4, 2, 1]
    corner = 1 << tree.number[Mesh(0, 1)]
    # Beside one rank that is taken: its five windows, and one free window of each size below 16.
    assert sorted(tree.size[window] for window in tree.placements(corner)) == sorted(
        [16, 8, 4, 2, 1, 1, 2, 4, 8, 4, 2, 2, 1, 1, 1]
    )
    uneven = WindowTree([Mesh(0, 6), Mesh(0, 2), Mesh(2, 4), Mesh(4, 6), Mesh(4, 5)])
    # The third pair has a window inside: it is not like the others.
    assert [uneven.windows[window] for window in uneven.placements(0)] == [
        Mesh(0, 6),
        Mesh(0, 2),
        Mesh(4, 6),
        Mesh(4, 5),
    ]


def test_dominated_options_are_dropped_where_they_serve_the_same() -> None:
    problem = realistic_problem(16)
    tables = Tables(problem)
    kept = {item.option for item in tables.items[1][8]}
    for option in problem.options["rew_inf", 8]:
        if option in kept:
            continue
        assert any(
            other.seconds <= option.seconds
            and other.leave_s * (other.offload == "host") <= option.leave_s * (option.offload == "host")
            and other.weights_bytes * (other.offload == "none")
            <= option.weights_bytes * (option.offload == "none")
            and other.weights_bytes + other.active_bytes <= option.weights_bytes + option.active_bytes
            for other in kept
        )
    assert 0 < len(kept) < len(problem.options["rew_inf", 8])
