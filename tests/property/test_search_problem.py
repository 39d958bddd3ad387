"""`SearchProblem` and its kernel against the compiled program and against clocks that run for many iterations."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.plan_search.clocks import atoms_of, cycle_mean
from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Assignment, Choice, SearchProblem
from megatron_real.program import Mix, Offload, Realloc, Reload, Run, compile_program
from tests.property.search_problems import GRAPHS, random_choice, random_problem

SEEDS = st.integers(0, 2**32)


def _drawn(seed: int, kind: str | None = None) -> tuple[SearchProblem, dict[str, Choice], tuple[str, ...]]:
    """A problem, a choice for every call, and an order."""
    rng = random.Random(seed)
    while True:
        problem = random_problem(rng, kind=kind, most=100_000)
        assignment = random_choice(problem, rng)
        if assignment is not None:
            return problem, assignment, rng.choice(list(problem.orders()))


@pytest.mark.parametrize("kind", GRAPHS)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_events_are_the_instructions_of_the_program(kind: str, seed: int) -> None:
    problem, assignment, order = _drawn(seed, kind)
    program = compile_program(problem.graph, problem.to_plan(assignment, order))
    instructions = [i for i in program.instructions if isinstance(i, Run | Realloc | Mix | Reload | Offload)]
    steps = problem.steps(assignment, order)
    assert [step.name for step in steps] == [instruction.name for instruction in instructions]
    for step, instruction in zip(steps, instructions, strict=True):
        assert {rank for mesh in step.meshes for rank in mesh.ranks} == set(instruction.ranks)
        if isinstance(instruction, Run):
            assert step.frees == instruction.release
            assert step.needs == tuple(
                parent.name for parent in problem.graph.parents(problem.graph.call(instruction.call))
            )
        if isinstance(instruction, Mix):
            assert step.meshes[0] == instruction.target.mesh, "where weights come to from the host"
            assert step.allocates == step.frees == instruction.from_host
        if isinstance(instruction, Realloc):
            assert set(step.meshes) == {instruction.target.mesh, instruction.source.mesh}
            assert step.meshes[0] == instruction.target.mesh, "where the copy is allocated"
    assert [event.name for event in problem.events(assignment, order)] == [step.name for step in steps]


@pytest.mark.parametrize("kind", GRAPHS)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_the_kernel_equals_the_problem_bit_for_bit(kind: str, seed: int) -> None:
    problem, _, _ = _drawn(seed, kind)
    kernel = Kernel(problem)
    rng = random.Random(seed)
    orders = list(problem.orders())
    for _ in range(10):  # one kernel: programs come back
        assignment = random_choice(problem, rng)
        assert assignment is not None
        order = rng.choice([None, *orders])
        assert kernel.evaluate(assignment, order) == problem.evaluate(assignment, order)


def _walk(
    problem: SearchProblem, assignment: Assignment, order: Sequence[str], iterations: int
) -> list[list[float]]:
    """Clocks of every rank after each iteration: nothing but the rule that an event waits for ranks and inputs."""
    events = problem.events(assignment, order)
    clocks = dict.fromkeys(range(problem.cluster.num_devices), 0.0)
    done: dict[str, float] = {}
    history = []
    for _ in range(iterations):
        for event in events:
            ranks = {rank for mesh in event.meshes for rank in mesh.ranks}
            end = max([clocks[r] for r in ranks] + [done[n] for n in event.needs]) + event.seconds
            clocks.update(dict.fromkeys(ranks, end))
            done[event.name.removeprefix("run:")] = end
        history.append(list(clocks.values()))
    return history


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_the_period_is_the_growth_after_many_iterations(seed: int) -> None:
    problem, assignment, order = _drawn(seed)
    span = 840  # clocks may alternate, over as many iterations as there are atoms (1 to 8)
    history = _walk(problem, assignment, order, 60 + span)
    growth = max(after - before for after, before in zip(history[-1], history[59], strict=True)) / span
    assert problem.evaluate(assignment, order).period_s == pytest.approx(growth, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_longer_durations_never_shorten_the_period(seed: int) -> None:
    problem, assignment, order = _drawn(seed)
    rng = random.Random(seed)
    longer = {
        name: Choice(
            choice.mesh,
            dataclasses.replace(
                choice.option,
                seconds=choice.option.seconds * rng.choice([1.0, 1.5]),
                leave_s=choice.option.leave_s + rng.choice([0.0, 0.5]),
            ),
        )
        for name, choice in assignment.items()
    }
    before, after = problem.evaluate(assignment, order), problem.evaluate(longer, order)
    assert after.period_s >= before.period_s * (1 - 1e-9)
    assert after.peak_bytes == before.peak_bytes


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_rank_loads_and_the_cycle_of_a_training_are_lower_bounds(seed: int) -> None:
    problem, assignment, order = _drawn(seed)
    period = problem.evaluate(assignment, order).period_s * (1 + 1e-9)
    events = problem.events(assignment, order)
    for rank in range(problem.cluster.num_devices):
        assert sum(e.seconds for e in events if any(rank in mesh for mesh in e.meshes)) <= period
    for train in (call for call in problem.graph.calls if call.trains):
        for parent in problem.graph.parents(train):
            for first in (parent, *problem.graph.parents(parent)):
                if first.model == train.model:  # it waits for the training before
                    names = dict.fromkeys([first.name, parent.name, train.name])
                    assert sum(assignment[name].option.seconds for name in names) <= period


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_the_peak_is_at_least_what_stays_and_what_runs(seed: int) -> None:
    problem, assignment, order = _drawn(seed)
    evaluation = problem.evaluate(assignment, order)
    assert evaluation.overflow_bytes == evaluation.peak_bytes - problem.capacity_bytes
    for rank in range(problem.cluster.num_devices):
        resident = sum(
            problem.resident_bytes(call, assignment[call.name].option)
            for call in problem.graph.calls
            if rank in assignment[call.name].mesh
        )
        assert resident <= evaluation.peak_bytes
    for call in problem.graph.calls:
        option = assignment[call.name].option
        if call.model is not None:
            assert option.weights_bytes + option.active_bytes <= evaluation.peak_bytes


def test_clocks_that_alternate_have_the_mean_of_their_cycle() -> None:
    # Two clocks hand each other their times, 1 s one way and 3 s the other: growths alternate, the mean is 2 s.
    history, clocks = [[0.0, 0.0]], [0.0, 0.0]
    for _ in range(2):
        clocks = [clocks[1] + 1, clocks[0] + 3]
        history.append(clocks)
    assert cycle_mean(history) == 2.0


def test_ranks_in_the_same_windows_are_one_atom() -> None:
    problem, assignment, _ = _drawn(3, "ppo")
    meshes = [choice.mesh for choice in assignment.values()]
    covered, num_atoms = atoms_of(meshes)
    by_rank = {
        tuple(mesh for mesh in dict.fromkeys(meshes) if rank in mesh)
        for rank in range(problem.cluster.num_devices)
    }
    assert num_atoms == len(by_rank - {()})
    assert {len(covered[mesh]) for mesh in meshes} == {
        sum(mesh in atom for atom in by_rank) for mesh in meshes
    }
