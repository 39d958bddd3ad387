"""The rank executor over gloo: what arrives where, what runs at the same time, what is refused."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_real.errors import ConfigError, PeerError, RealError
from megatron_real.layout import parse_placement
from megatron_real.plan import Plan
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import compile_program
from megatron_real.runtime.executor import RankExecutor, RunParts
from megatron_real.runtime.observers import Observers
from megatron_real.runtime.prompts import ByteTokenizer, Prompts
from megatron_real.runtime.trainer import TrainConfig, train
from megatron_real.runtime.transfer import DataTransfers, acquire_groups
from tests.distributed.fake_backend import (
    FakeAlgorithm,
    FakeBackend,
    expected,
    ppo_like_graph,
    prompt_length,
    prompts_of,
    response_length,
)
from tests.harness import RankFailed, run_ranks

pytestmark = pytest.mark.dist

SEQUENCES = 16
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")


def make_plan(devices: int, placements: Mapping[str, str], default: str, **changes: Any) -> Plan:
    """A plan from text such as ``d2t2p1@0-3``; `changes` are further fields by call."""
    calls: dict[str, Any] = {}
    for call in CALLS:
        mesh, layout = parse_placement(placements.get(call, default))
        degrees = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
        calls[call] = {"ranks": [mesh.start, mesh.stop], "layout": degrees, **changes.get(call, {})}
    text = json.dumps({"algorithm": "fake", "cluster": {"devices_per_node": devices}, "calls": calls})
    return Plan.loads(text)


def mixed_plan() -> Plan:
    """Generation on all ranks, the two trainings on disjoint pairs, inference in other layouts."""
    return make_plan(
        4,
        {
            "actor_gen": "d4t1p1@0-3",
            "rew_inf": "d1t1p1@3-3",
            "ref_inf": "d1t1p2@1-2",
            "critic_inf": "d2t1p1@2-3",
            "actor_train": "d1t2p1@0-1",
            "critic_train": "d2t1p1@2-3",
        },
        "d1t1p1@0-0",
        actor_train={"num_microbatches": 2, "drop_trained_weights": True},
        ref_inf={"offload": "host"},
    )


PLANS: dict[str, Plan] = {
    "one": make_plan(1, {}, "d1t1p1@0-0"),
    "two-d2": make_plan(2, {}, "d2t1p1@0-1"),
    "two-halves": make_plan(2, {"actor_gen": "d1t1p1@0-0", "actor_train": "d1t1p1@0-0"}, "d1t1p1@1-1"),
    "symmetric-d4": make_plan(4, {}, "d4t1p1@0-3"),
    "symmetric-d2t2": make_plan(4, {}, "d2t2p1@0-3"),
    "symmetric-p4": make_plan(4, {}, "d1t1p4@0-3", actor_train={"num_microbatches": 4}),
    "symmetric-t2p2": make_plan(4, {}, "d1t2p2@0-3"),
    "halves": make_plan(
        4,
        {"actor_gen": "d2t1p1@0-1", "actor_train": "d1t2p1@0-1", "ref_inf": "d1t1p2@0-1"},
        "d2t1p1@2-3",
    ),
    "gen-right": make_plan(
        4,
        {
            "actor_gen": "d1t1p2@2-3",
            "rew_inf": "d2t1p1@1-2",
            "ref_inf": "d3t1p1@0-2",
            "critic_inf": "d1t3p1@1-3",
        },
        "d2t1p1@0-1",
    ),
    # Rank 2 gets gen>critic_train after rew>actor_train, which rank 0 sends later.
    "crossing": make_plan(4, {"actor_train": "d2t1p1@2-3", "critic_train": "d1t2p1@2-3"}, "d1t1p1@0-0"),
    "mixed": mixed_plan(),
}


class Recorder:
    """Tracer and fault injector of a test: keeps spans, and tells the backend which iteration it is in."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.spans: list[dict[str, Any]] = []

    def before(self, iteration: int, name: str, index: int) -> None:
        self.backend.iteration = iteration

    def span(self, name: str, kind: str, iteration: int, **facts: Any) -> Any:
        return _Span(self.spans, {"name": name, "kind": kind, "iteration": iteration}, facts)


class _Span:
    def __init__(self, spans: list[dict[str, Any]], head: dict[str, Any], facts: dict[str, Any]) -> None:
        self._spans, self._head, self.facts = spans, head, facts

    def __enter__(self) -> _Span:
        self._start = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        # The monotonic clock is the same for all processes of a machine.
        self._spans.append({**self._head, "start_s": self._start, "end_s": time.monotonic(), **self.facts})


def make_executor(
    plan: Plan, groups: ProcessGroups, timeout_s: float = 20.0, function: Any = None, **options: Any
) -> tuple[RankExecutor, FakeBackend, Recorder]:
    graph = ppo_like_graph(reward_model=function is None)
    program = compile_program(graph, plan)
    rank = dist.get_rank()
    backend = FakeBackend(graph=graph, plan=plan, rank=rank, **options)
    recorder = Recorder(backend)
    transfers = DataTransfers(program, rank, acquire_groups(groups, program), timeout_s=timeout_s)
    executor = RankExecutor(
        RunParts(
            program=program,
            rank=rank,
            backend=backend,
            algorithm=FakeAlgorithm(graph=graph, reward=function),
            transfers=transfers,
            tokenizer=ByteTokenizer(),
            observers=Observers(tracer=recorder, faults=recorder),
        )
    )
    return executor, backend, recorder


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
    executor._calls.assign_all = lambda state: (time.sleep(0.2), right(state))
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
    assert moves == [("offload", actor, "main_params"), ("reload", actor)] * 2
    ref = [entry[0] for entry in by_rank[2][0]["log"] if entry[0] in ("offload", "reload")]
    assert ref == ["reload", "offload"] * 2


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


def _reward_by_length(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    assert prompts == [f"prompt {n}" for n in number], "columns and prompts are of the same sequences"
    return [float(len(response)) for response in responses]


def _nan_for_seven(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    return [float("nan") if n == 7 else 1.0 for n in number]


def _fail_for_nine(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    if 9 in number:
        raise KeyError("no answer")
    return [1.0] * len(number)


def _run_function(case: int) -> Any:
    function = (_reward_by_length, _nan_for_seven, _fail_for_nine)[case]
    plan = make_plan(2, {"rew_inf": "d1t1p1@1-1"}, "d2t1p1@0-1")
    executor, backend, _ = make_executor(plan, ProcessGroups(timeout_s=20), function=function)
    lengths = []
    if case == 0:
        executor.algorithm.prepare = lambda call, iteration, scalars: (
            lengths.append(scalars.data["rewards"].tolist()) or (scalars, {})
        )
        backend.train = lambda copy, *rest: backend.versions.update({copy: 1}) or {}
    try:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    except ConfigError as error:
        return str(error)
    except PeerError:
        return "peer"  # rank 1 has failed and left; rank 0 was waiting for its rewards
    executor.transfers.fence()
    return lengths


def test_reward_functions() -> None:
    right = [len(_decoded(i)) for i in range(SEQUENCES)]
    for lengths in run_ranks(2, _run_function, 0):
        assert lengths == [right, right], "both train calls of both ranks"
    text = run_ranks(2, _run_function, 1)[1]
    assert "calls.rew_inf: reward function" in text
    assert "returned nan for sequence 7; expected a finite number" in text
    text = run_ranks(2, _run_function, 2)[1]
    assert "raised KeyError: 'no answer'; sequence 9 alone makes it raise" in text


def _decoded(sequence: int) -> str:
    prompt, response = prompt_length(0, sequence), response_length(0, sequence)
    return ByteTokenizer().decode(expected("tokens", 0, sequence, prompt + response).tolist()[prompt:])


def _late_peer() -> tuple[str, float]:
    plan = make_plan(2, {"actor_gen": "d1t1p1@0-0"}, "d1t1p1@1-1")
    executor, _, _ = make_executor(plan, ProcessGroups(timeout_s=20), timeout_s=1.0)
    if dist.get_rank() == 0:
        time.sleep(2.5)  # alive, but stuck before its generation
        return "", 0.0
    began_s = time.monotonic()
    with pytest.raises(PeerError) as caught:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    return str(caught.value), time.monotonic() - began_s


def test_a_late_peer_is_named() -> None:
    text, waited_s = run_ranks(2, _late_peer)[1]
    assert "transfer:actor_gen>lengths (iteration 0): rank 1 waited for rank 0 in vain (limit 1 s)" in text
    assert waited_s < 2.4


def _dead_peer() -> str:
    plan = make_plan(2, {"actor_gen": "d1t1p1@0-0"}, "d1t1p1@1-1")
    executor, _, _ = make_executor(plan, ProcessGroups(timeout_s=20), timeout_s=30.0)
    if dist.get_rank() == 0:
        return ""  # its sockets close
    with pytest.raises(PeerError) as caught:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    return str(caught.value)


def test_a_dead_peer_is_named_before_the_timeout() -> None:
    began_s = time.monotonic()
    text = run_ranks(2, _dead_peer)[1]
    assert "rank 1 waited for rank 0 in vain" in text
    assert time.monotonic() - began_s < 15


class _Sink:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        self.rows.append((iteration, call, sorted(values)))

    def end_iteration(self, iteration: int) -> None:
        self.rows.append((iteration, "end"))

    def wait_written(self, iteration: int) -> None:
        self.rows.append((iteration, "waited"))


def _train(first: int, limit: int | None) -> dict[str, Any]:
    executor, backend, _ = make_executor(PLANS["mixed"], ProcessGroups(timeout_s=20))
    executor.transfers.connect()
    for copy in backend.versions:
        backend.versions[copy] = first if copy.model in ("actor", "critic") else 0
    ticks = iter(range(1000))
    config = TrainConfig(
        num_iterations=5,
        first_iteration=first,
        save_folder=Path("/nowhere"),
        save_every=2,
        time_limit_s=limit,
    )
    sink = _Sink()
    save = backend.save
    backend.save = lambda folder, iteration, state: (
        sink.rows.append((iteration - 1, "saved")),
        save(folder, iteration, state),
    )
    result = train(
        config,
        executor,
        _FakePrompts(),
        sink,
        state={"batches": first} if first else None,
        clock=lambda: float(next(ticks)) if dist.get_rank() == 0 else 0.0,
    )
    saves = [entry[2:] for entry in backend.log if entry[0] == "save"]
    return {"saves": saves, "result": result, "rows": sink.rows}


class _FakePrompts(Prompts):
    def __init__(self) -> None:
        pass

    def batch(self, iteration: int) -> Any:
        return prompts_of(iteration, SEQUENCES)


def test_train_saves_resumes_and_stops() -> None:
    whole = run_ranks(4, _train, 0, None)
    for rank in whole:
        assert rank["saves"] == [(2, {"batches": 2}), (4, {"batches": 4}), (5, {"batches": 5})]
        assert (rank["result"].next_iteration, rank["result"].stopped_by_time) == (5, False)
        assert [row[0] for row in rank["rows"] if row[1] == "end"] == list(range(5))
    # All of an iteration is reported before its checkpoint is written, and rank 0 sees to it that it arrives.
    for rank, result in enumerate(whole):
        order = [row for row in result["rows"] if row[0] == 3]
        assert order[-1] == (3, "saved")
        after_calls = [word for _, word, *_ in order if word in ("end", "waited", "saved")]
        assert after_calls == (["end", "saved"] if rank else ["end", "waited", "saved"])
    words, placements = ("end", "waited", "saved"), PLANS["mixed"].calls
    told = [row for rank in whole for row in rank["rows"] if row[0] == 3 and row[1] not in words]
    assert sorted(map(str, told)) == sorted(
        map(
            str,
            [
                (3, None, ["reward"]),
                (3, None, ["reward"]),
                (3, "actor_train", ["loss"]),
                (3, "critic_train", ["loss"]),
                (3, "iteration", ["duration_s", "tokens"]),
                (3, "response", ["lengths"]),  # by the first generating rank alone
                *(
                    (
                        3,
                        "seconds",
                        [f"{call}/{rank}" for call in sorted(CALLS) if rank in placements[call].mesh],
                    )
                    for rank in range(4)
                ),
            ],
        )
    )
    resumed = run_ranks(4, _train, 2, None)
    assert resumed[0]["saves"] == [(4, {"batches": 4}), (5, {"batches": 5})]
    # Only rank 0's clock runs: all ranks stop where it says, at a checkpoint.
    stopped = run_ranks(4, _train, 0, 5)
    assert {rank["result"].next_iteration for rank in stopped} == {2}
    assert all(rank["result"].stopped_by_time for rank in stopped)


def _wrong_data() -> None:
    executor, backend, _ = make_executor(PLANS["halves"], ProcessGroups(timeout_s=20))
    right = backend.infer

    def swapped(*args: Any) -> torch.Tensor | None:
        values = right(*args)
        return None if values is None else values.flip(0)

    backend.infer = swapped
    executor.run_iteration(0, prompts_of(0, SEQUENCES))


def test_the_checks_can_fail() -> None:
    with pytest.raises(RankFailed, match="of sequence"):
        run_ranks(4, _wrong_data)
