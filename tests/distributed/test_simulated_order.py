"""What the executor really does on each rank, over gloo and without models, is what the simulator says that it does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron_real.algorithms.graphs import dpo_graph, grpo_graph, remax_graph, sft_graph
from megatron_real.dataflow import Graph, Update
from megatron_real.plan import Plan
from megatron_real.plan_search.simulator import TransferTime, simulate
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import Instruction, Run, Transfer, compile_program
from megatron_real.trace import Span, SpanKind
from tests.distributed.fake_backend import ppo_like_graph, prompts_of
from tests.distributed.fake_run import PLANS, SEQUENCES, make_executor, make_plan
from tests.harness import run_ranks

pytestmark = pytest.mark.dist

ITERATIONS = 3
SLEEPS = {
    "actor_gen": 0.4,
    "rew_inf": 0.1,
    "ref_inf": 0.15,
    "critic_inf": 0.2,
    "actor_train": 0.35,
    "critic_train": 0.8,
    "greedy_gen": 0.5,
    "greedy_rew_inf": 0.1,
}
"""So long that the messages and the runtime's own work are nothing beside them, even on a busy machine."""
APART = make_plan(
    2,
    {"critic_inf": "d1t1p1@1-1", "critic_train": "d1t1p1@1-1", "rew_inf": "d1t1p1@1-1"},
    "d1t1p1@0-0",
)
"""Actor and reference on rank 0; on rank 1 the critic, whose training is longer than the next generation."""
PPO = ppo_like_graph(reward_model=True)


def _plan(
    graph: Graph,
    devices: int,
    placements: dict[str, str],
    default: str,
    *,
    order: tuple[str, ...] | None = None,
    **changes: Any,
) -> Plan:
    names = [call.name for call in graph.calls]
    plan = make_plan(devices, placements, default, names, graph.name, **changes)
    return plan.model_copy(update={"order": order})


GREEDY_APART = {"greedy_gen": "d1t1p1@1-1", "greedy_rew_inf": "d1t1p1@1-1"}
ACTOR_FIRST = ("actor_gen", "greedy_gen", "rew_inf", "greedy_rew_inf", "actor_train")
GREEDY_FIRST = ("greedy_gen", *ACTOR_FIRST[:1], *ACTOR_FIRST[2:])
"""The reallocation for the greedy generation comes before the actor's ranks generate; else it waits until they have."""
FOLLOWING = replace(dpo_graph(), updates=(Update(target="ref", source="actor", mix=0.5),))
CASES: dict[str, tuple[Graph, Plan]] = {
    **{name: (PPO, plan) for name, plan in PLANS.items()},
    "apart": (PPO, APART),
    "remax": (remax_graph(), _plan(remax_graph(), 2, GREEDY_APART, "d1t1p1@0-0", order=GREEDY_FIRST)),
    "remax in turn": (
        remax_graph(),
        _plan(remax_graph(), 2, GREEDY_APART, "d1t1p1@0-0", order=ACTOR_FIRST),
    ),
    "remax, streamed": (
        remax_graph(),
        _plan(remax_graph(), 2, {"greedy_gen": "d1t2p1@0-1"}, "d2t1p1@0-1", greedy_gen={"stream": True}),
    ),
    "remax on three": (
        remax_graph(),  # rank 2 knows the greedy lengths long before it asks for the others
        _plan(
            remax_graph(),
            4,
            {
                "actor_gen": "d2t1p1@0-1",
                "greedy_gen": "d2t1p1@2-3",
                "rew_inf": "d1t2p1@1-2",
                "greedy_rew_inf": "d1t1p2@2-3",
            },
            "d2t2p1@0-3",
        ),
    ),
    "grpo": (
        grpo_graph(),
        _plan(grpo_graph(), 2, {"ref_inf": "d1t1p1@1-1", "rew_inf": "d1t1p1@1-1"}, "d2t1p1@0-1"),
    ),
    "dpo": (dpo_graph(), _plan(dpo_graph(), 2, {"ref_inf": "d1t1p1@1-1"}, "d1t1p1@0-0")),
    "dpo, following": (FOLLOWING, _plan(FOLLOWING, 2, {"ref_inf": "d1t1p1@1-1"}, "d2t1p1@0-1")),
    "sft": (sft_graph(), _plan(sft_graph(), 2, {}, "d2t1p1@0-1")),
}
"""Graphs with several generations, one, or none."""


class Sleeps:
    """Prices of calls that only sleep."""

    def seconds(self, instruction: Instruction) -> float:
        return SLEEPS[instruction.call] if isinstance(instruction, Run) else 0.001

    def transfer(self, instruction: Transfer) -> TransferTime:
        return TransferTime(0.001, 0.001, 0.001)


def _walk(names: list[str], iterations: int, sleeps: dict[str, float]) -> list[list[dict[str, Any]]]:
    groups = ProcessGroups(timeout_s=20)
    result = []
    for name in names:
        graph, plan = CASES[name]
        executor, backend, recorder = make_executor(plan, groups, graph=graph, sleep_s=sleeps)
        for iteration in range(iterations):
            backend.iteration = iteration
            answers = all(graph.generation(sequences) is None for sequences in graph.sequence_sets)
            executor.run_iteration(iteration, prompts_of(iteration, SEQUENCES, answers=answers))
        executor.transfers.fence()
        result.append(recorder.spans)
    return result


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_simulated_order_is_the_executed_one(size: int) -> None:
    names = [name for name, (_, plan) in CASES.items() if plan.cluster.num_devices == size]
    by_rank = run_ranks(size, _walk, names, ITERATIONS, {})
    for case, name in enumerate(names):
        program = compile_program(*CASES[name])
        simulated = simulate(program, Sleeps(), iterations=ITERATIONS).spans
        for rank in range(size):
            mine = [span for span in simulated if span.rank == rank]
            for before, after in itertools.pairwise(mine):
                assert before.end_s <= after.start_s, f"{name}: rank {rank}"
            told = [
                (span.iteration, span.name, str(span.kind), span.facts.get("side"))
                for span in mine
                if span.kind is not SpanKind.WAIT
            ]
            # The generating ranks tell each other how long responses are: the runtime's own, no instruction.
            did = [
                (span["iteration"], span["name"], span["kind"], span.get("side"))
                for span in by_rank[rank][case]
                if span.get("side") != "gather"
            ]
            assert told == did, f"{name}: rank {rank}"


@pytest.mark.parametrize("name", ["apart", "two-halves", "remax"])
def test_the_simulated_timeline_is_the_executed_one(name: str) -> None:
    """With calls that sleep, everything starts when the simulator says: what overlaps, and who waits for whom."""
    iterations = 4
    by_rank = run_ranks(2, _walk, [name], iterations, SLEEPS)
    program = compile_program(*CASES[name])
    result = simulate(program, Sleeps(), iterations=iterations)
    origin = min(spans[0][0]["start_s"] for spans in by_rank)
    for rank, (spans,) in enumerate(by_rank):
        for span in spans:
            if span["kind"] != "run":
                continue
            (right,) = [
                other.start_s
                for other in result.spans
                if (other.rank, other.iteration, other.name) == (rank, span["iteration"], span["name"])
                and other.kind is SpanKind.RUN
            ]
            # Every instruction of the runtime takes some milliseconds; they add up.
            slack = 0.1 * (span["iteration"] + 1)
            assert right - 0.02 <= span["start_s"] - origin <= right + slack, (rank, span, right)


def test_two_generations_are_simulated_side_by_side() -> None:
    """So the test above has them at the same time in a run too."""

    def last(name: str) -> tuple[dict[str, Span], float]:
        result = simulate(compile_program(*CASES[name]), Sleeps())
        runs = (span for span in result.spans if span.kind is SpanKind.RUN and span.iteration == 3)
        return {span.subject: span for span in runs}, result.period_s

    together, period_s = last("remax")
    assert abs(together["actor_gen"].start_s - together["greedy_gen"].start_s) < 0.01
    in_turn, longer_s = last("remax in turn")
    assert in_turn["greedy_gen"].start_s >= in_turn["actor_gen"].end_s
    assert longer_s - period_s == pytest.approx(SLEEPS["actor_gen"], abs=0.02)
