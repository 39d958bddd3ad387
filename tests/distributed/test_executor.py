"""The rank executor over gloo: what arrives where, what runs at the same time, what is refused."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_real.algorithms.graphs import dpo_graph, remax_graph, sft_graph
from megatron_real.dataflow import Graph
from megatron_real.errors import RealError
from megatron_real.plan import Plan
from megatron_real.process_groups import ProcessGroups
from tests.distributed.fake_backend import (
    ppo_like_graph,
    prompts_of,
    response_length,
)
from tests.distributed.fake_run import CALLS, PLANS, SEQUENCES, make_executor, make_plan
from tests.harness import RankFailed, run_ranks

pytestmark = pytest.mark.dist


def _run_plans(names: list[str], iterations: int) -> list[dict[str, Any]]:
    groups = ProcessGroups(timeout_s=20)
    results = []
    for name in names:
        executor, backend, recorder = make_executor(PLANS[name], groups)
        reports = []
        for iteration in range(iterations):
            save = Path("/nowhere") if iteration == iterations - 1 else None
            reports.append(executor.run_iteration(iteration, prompts_of(iteration, SEQUENCES), save=save))
        executor.transfers.fence()
        results.append(
            {
                "compared": (backend.compared, executor.algorithm.compared),
                "prepared": executor.algorithm.prepared,
                "log": backend.log,
                "calls": [sorted(report.calls) for report in reports],
                "rewards": [report.batch.get("reward") for report in reports],
                "steps": [step.name for step in executor.program.steps(dist.get_rank())],
                "spans": recorder.spans,
                "resident": sorted(map(str, backend.versions)),
            }
        )
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_arrive_where_they_are_needed(size: int) -> None:
    names = [name for name, plan in PLANS.items() if plan.cluster.num_devices == size]
    iterations = 3
    by_rank = run_ranks(size, _run_plans, names, iterations)
    for case, name in enumerate(names):
        ranks = [results[case] for results in by_rank]
        _check_training(ranks, PLANS[name], iterations, name)
        _check_reports(ranks, iterations, name)
        # Every rank went through its program, in order, in every iteration.
        for rank, result in enumerate(ranks):
            walked = [span["name"] for span in result["spans"] if span.get("side") != "gather"]
            without_save = [step for step in result["steps"] if step != "save"]
            assert walked == without_save * (iterations - 1) + result["steps"], f"{name}: rank {rank}"
            _check_spans(result["spans"], PLANS[name], rank, iterations)
        _check_senders([result["spans"] for result in ranks], name)


def _check_training(ranks: list[dict[str, Any]], plan: Plan, iterations: int, name: str) -> None:
    """Each train call saw each sequence once per minibatch pass, with global counts, on every stage."""
    for call in ("actor_train", "critic_train"):
        placement = plan.calls[call]
        for iteration in range(iterations):
            entries = {
                rank: entry
                for rank, result in enumerate(ranks)
                for entry in result["log"]
                if entry[:3] == ("train", call, iteration)
            }
            assert sorted(entries) == list(placement.mesh.ranks), name
            seen = sorted(i for entry in entries.values() for i in entry[3])
            copies = placement.layout.tp * placement.layout.pp
            assert seen == sorted(list(range(SEQUENCES)) * copies), f"{name}: {call}"
            first_half = range(SEQUENCES // 2)
            tokens = sum(response_length(iteration, i) for i in first_half)
            for entry in entries.values():
                minibatches = entry[4]
                assert len(minibatches) == 4, "two minibatches, two epochs"
                assert minibatches[0] == minibatches[2]
                assert (minibatches[0].num_tokens, minibatches[0].num_sequences) == (tokens, SEQUENCES // 2)
                assert {i for part in minibatches[0].microbatches for i in part} <= set(first_half)


def _check_spans(spans: list[dict[str, Any]], plan: Plan, rank: int, iterations: int) -> None:
    """Spans do not overlap, a gathering follows each generation, calls name who goes through them together."""
    for before, after in itertools.pairwise(spans):
        assert before["end_s"] <= after["start_s"]
        if before["name"] == "run:actor_gen" and plan.calls["actor_gen"].mesh.size > 1:
            assert (after["name"], after["side"]) == ("transfer:actor_gen>lengths", "gather")
            assert after["joint"] == str(plan.calls["actor_gen"].mesh)
    for call in CALLS:
        placement = plan.calls[call]
        mesh, layout = placement.mesh, placement.layout
        runs = [span for span in spans if span["name"] == f"run:{call}"]
        assert len(runs) == (iterations if rank in mesh else 0)
        stage, place = layout.dp * layout.tp, (rank - mesh.start) % (layout.dp * layout.tp) // layout.tp
        replica = [r for r in mesh.ranks if (r - mesh.start) % stage // layout.tp == place]
        for run in runs:
            if call.endswith("_train"):
                assert run.get("joint") == (str(mesh) if mesh.size > 1 else None)
            else:
                assert run.get("joint") == (",".join(map(str, replica)) if len(replica) > 1 else None)
            assert run["tokens"] > 0


def _check_senders(by_rank: list[list[dict[str, Any]]], name: str) -> None:
    """Who is said to send something does, and a rank to which something comes says from whom."""
    for spans in by_rank:
        for span in spans:
            if span.get("side") != "receive":
                continue
            senders = [int(rank) for rank in span["from"].split(",") if rank]
            if "bytes" in span:
                assert bool(senders) == (span["bytes"] > 0), f"{name}: {span}"
            for sender in senders:
                (sent,) = [
                    other
                    for other in by_rank[sender]
                    if (other["name"], other["iteration"]) == (span["name"], span["iteration"])
                    and other.get("side") == "send"
                ]
                assert sent.get("bytes", 1) > 0, f"{name}: {span}"


def _slow_rank() -> list[dict[str, Any]]:
    """Rank 0 generates half a second longer; planning takes a fifth of a second everywhere."""
    slow = {"actor_gen": 0.5 if dist.get_rank() == 0 else 0.0}
    executor, _, recorder = make_executor(PLANS["two-d2"], ProcessGroups(timeout_s=20), sleep_s=slow)
    right = executor._calls.assign_all
    executor._calls.assign_all = lambda *args: (time.sleep(0.2), right(*args))
    executor.run_iteration(0, prompts_of(0, SEQUENCES))
    return recorder.spans


def test_waiting_and_planning_are_no_generation() -> None:
    slow, fast = run_ranks(2, _slow_rank)
    generation, gathering = fast[0], fast[1]
    assert generation["name"] == "run:actor_gen"
    assert generation["end_s"] - generation["start_s"] < 0.3
    assert gathering["end_s"] - gathering["start_s"] > 0.2
    for spans in (slow, fast):
        assert spans[2]["start_s"] - spans[1]["end_s"] >= 0.2, "planning is in no span"
        assert spans[1]["end_s"] - slow[1]["start_s"] < 0.2


def _check_reports(ranks: list[dict[str, Any]], iterations: int, name: str) -> None:
    for iteration in range(iterations):
        told = sorted(call for result in ranks for call in result["calls"][iteration])
        assert told == ["actor_train", "critic_train"], f"{name}: each call is reported once"
        rewards = {result["rewards"][iteration] for result in ranks} - {None}
        assert len(rewards) == 1, f"{name}: every reporting rank has the same batch metrics"
    saves = [entry for result in ranks for entry in result["log"] if entry[0] == "save"]
    assert saves == [("save", "/nowhere", iterations, {"batches": iterations})] * len(ranks), name


def test_released_and_dropped_copies() -> None:
    """After an iteration only home copies are resident; offloads and reloads come in pairs around their use."""
    by_rank = run_ranks(4, _run_plans, ["mixed"], 2)
    plan = PLANS["mixed"]
    homes = {
        "actor:d1t2p1@0-1": (0, 1),
        "critic:d2t1p1@2-3": (2, 3),
        "ref:d1t1p2@1-2": (1, 2),
        "reward:d1t1p1@3-3": (3,),
    }
    for rank, (result,) in enumerate(by_rank):
        assert result["resident"] == sorted(copy for copy, ranks in homes.items() if rank in ranks)
    moves = [entry for entry in by_rank[0][0]["log"] if entry[0] in ("offload", "reload")]
    actor = str(plan.copy_of(ppo_like_graph(reward_model=True).call("actor_train")))
    there, back = ("offload", actor, "main_params", "weights"), ("reload", actor, "main_params", "weights")
    assert moves == [there, back] * 2
    ref = [entry[0] for entry in by_rank[2][0]["log"] if entry[0] in ("offload", "reload")]
    assert ref == ["reload", "offload"] * 2


def test_what_moves_beside_and_between_calls() -> None:
    by_rank = run_ranks(4, _run_plans, ["mechanisms"], 2)
    homes = {"actor:d1t2p1@0-1": (0, 1), "critic:d2t1p1@2-3": (2, 3), "reward:d1t1p1@3-3": (3,)}
    for rank, (result,) in enumerate(by_rank):
        assert result["resident"] == sorted(copy for copy, ranks in homes.items() if rank in ranks)
        spans = [span for span in result["spans"] if span["name"] == "run:actor_gen"]
        assert all(span["stream_wait_s"] == 0.0 for span in spans), "what the call waited is told with it"
        assert all(span["stream"] for span in result["spans"] if span["kind"] == "realloc")
    log = [entry for entry in by_rank[0][0]["log"] if entry[0] in ("offload", "reload", "train", "realloc")]
    told = [
        entry[0] + ":" + str(entry[-1] if entry[0] in ("offload", "reload") else entry[1]) for entry in log
    ]
    # The weights stay until the generation that they are streamed to has ended; state comes back before them.
    assert told[: len(told) // 2] == [
        "realloc:actor:d1t2p1@0-1",
        "offload:weights",
        "reload:state",
        "reload:weights",
        "train:actor_train",
        "offload:state",
    ]
    ref = [entry for entry in by_rank[1][0]["log"] if entry[0] == "reload" and entry[1].startswith("ref")]
    assert [entry[2:] for entry in ref] == [("node", "weights")] * 2


def _overlap() -> list[dict[str, Any]]:
    groups = ProcessGroups(timeout_s=20)
    executor, _, recorder = make_executor(
        PLANS["mixed"], groups, sleep_s={"actor_train": 0.3, "critic_train": 0.3, "actor_gen": 0.1}
    )
    for iteration in range(2):
        executor.run_iteration(iteration, prompts_of(iteration, SEQUENCES))
    executor.transfers.fence()
    return recorder.spans


def test_calls_on_disjoint_meshes_overlap() -> None:
    spans = run_ranks(4, _overlap)

    def interval(rank: int, name: str, iteration: int) -> tuple[float, float]:
        (span,) = [s for s in spans[rank] if s["name"] == name and s["iteration"] == iteration]
        return span["start_s"], span["end_s"]

    for iteration in range(2):
        actor, critic = interval(0, "run:actor_train", iteration), interval(2, "run:critic_train", iteration)
        overlap = min(actor[1], critic[1]) - max(actor[0], critic[0])
        assert overlap > 0.2, f"iteration {iteration}: both sleep 0.3 s and share {overlap:.2f} s"
    # On-policy: generation of iteration 1 starts after the actor's training of iteration 0.
    assert interval(0, "run:actor_gen", 1)[0] >= interval(0, "run:actor_train", 0)[1]


def _bad_version() -> str:
    executor, _, _ = make_executor(PLANS["mixed"], ProcessGroups(timeout_s=20), stuck=frozenset({"critic"}))
    text = ""
    try:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    except RealError as error:
        text = str(error)
    dist.barrier()  # a rank that left now would close the connections of the others
    return text


def _stale_version() -> str:
    """A copy whose weights are of an older step than the program says."""
    executor, backend, _ = make_executor(PLANS["symmetric-d4"], ProcessGroups(timeout_s=20))
    for copy in backend.versions:
        backend.versions[copy] = 3 if copy.model == "actor" else backend.versions[copy]
    with pytest.raises(RealError) as caught:
        executor.run_iteration(4, prompts_of(4, SEQUENCES))
    return str(caught.value)


def test_wrong_versions_are_refused() -> None:
    texts = run_ranks(4, _bad_version)
    assert texts[0] == texts[1] == ""
    assert texts[2] == (
        "run:critic_train (iteration 0) on rank 2: critic:d2t1p1@2-3 has version 0 after training; expected 1. "
        "The backend must advance the version once per train call."
    )
    texts = run_ranks(4, _stale_version)
    assert texts[1] == (
        "run:actor_gen (iteration 4) on rank 1: actor:d4t1p1@0-3 has weights of version 3; expected version 4. "
        "A realloc or a training step before it failed, or was left out."
    )


def _wrong_data() -> None:
    executor, backend, _ = make_executor(PLANS["halves"], ProcessGroups(timeout_s=20))
    right = backend.infer

    def swapped(*args: Any) -> torch.Tensor | None:
        values = right(*args)
        return None if values is None else values.flip(0)

    backend.infer = swapped
    executor.run_iteration(0, prompts_of(0, SEQUENCES))


def test_the_checks_can_fail() -> None:
    with pytest.raises(RankFailed, match="rewards of 0"):
        run_ranks(4, _wrong_data)


_REMAX = ("actor_gen", "greedy_gen", "rew_inf", "greedy_rew_inf", "actor_train")
_OTHER_GRAPHS: dict[str, tuple[Graph, Plan, int]] = {
    "remax, symmetric": (remax_graph(), make_plan(4, {}, "d2t2p1@0-3", _REMAX, "remax"), 1),
    "remax, generations apart": (
        remax_graph(),
        make_plan(
            4,
            {
                "actor_gen": "d2t1p1@0-1",
                "rew_inf": "d2t1p1@0-1",
                "greedy_gen": "d1t2p1@2-3",
                "greedy_rew_inf": "d1t1p2@2-3",
                "actor_train": "d2t1p2@0-3",
            },
            "d1t1p1@0-0",
            _REMAX,
            "remax",
        ),
        1,
    ),
    "dpo, in units of two": (
        dpo_graph(),
        make_plan(
            4,
            {"ref_inf": "d1t1p2@1-2", "actor_train": "d2t1p2@0-3"},
            "d1t1p1@0-0",
            ("ref_inf", "actor_train"),
            "dpo",
            actor_train={"num_microbatches": 2},
        ),
        2,
    ),
    "sft": (
        sft_graph(),
        make_plan(4, {"actor_train": "d4t1p1@0-3"}, "d1t1p1@0-0", ("actor_train",), "sft"),
        1,
    ),
}
"""Graphs with two generations, or with none: with a plan, and how many sequences stay together."""


def _run_graphs(iterations: int) -> list[dict[str, Any]]:
    groups = ProcessGroups(timeout_s=20)
    results = []
    for graph, plan, unit in _OTHER_GRAPHS.values():
        executor, backend, recorder = make_executor(plan, groups, graph=graph, unit=unit)
        answers = graph.generation() is None
        for iteration in range(iterations):
            backend.iteration = iteration
            executor.run_iteration(iteration, prompts_of(iteration, SEQUENCES, answers=answers))
        executor.transfers.fence()
        trained = [entry for entry in backend.log if entry[0] == "train"]
        results.append({"compared": backend.compared, "trained": trained, "spans": recorder.spans})
    return results


def test_graphs_with_several_generations_or_none() -> None:
    by_rank = run_ranks(4, _run_graphs, 2)
    for case, (name, (_, plan, unit)) in enumerate(_OTHER_GRAPHS.items()):
        ranks = [results[case] for results in by_rank]
        placement = plan.calls["actor_train"]
        assert all(result["compared"] > 0 for result in ranks), name
        for iteration in range(2):
            entries = [entry for result in ranks for entry in result["trained"] if entry[2] == iteration]
            seen = sorted(i for entry in entries for i in entry[3])
            assert seen == sorted(list(range(SEQUENCES)) * placement.layout.tp * placement.layout.pp), name
            for part in (part for entry in entries for step in entry[4] for part in step.microbatches):
                assert [i // unit for i in part[::unit]] == [i // unit for i in part[unit - 1 :: unit]], name


def _run_apart() -> list[dict[str, Any]]:
    graph, plan, _ = _OTHER_GRAPHS["remax, generations apart"]
    executor, _, recorder = make_executor(
        plan, ProcessGroups(timeout_s=20), graph=graph, sleep_s={"actor_gen": 0.6, "greedy_gen": 0.6}
    )
    executor.run_iteration(0, prompts_of(0, SEQUENCES))
    executor.transfers.fence()
    return recorder.spans


def test_two_generations_run_at_the_same_time() -> None:
    spans = [span for spans in run_ranks(4, _run_apart) for span in spans]
    sampled, greedy = (
        [span for span in spans if span["name"] == f"run:{name}"] for name in ("actor_gen", "greedy_gen")
    )
    assert max(span["start_s"] for span in [*sampled, *greedy]) < min(
        span["end_s"] for span in [*sampled, *greedy]
    )
