"""PPO with weights that are streamed, reference and reward in the nodes' host stores, and optimizer state on the host.

All of it at once, on two nodes of two ranks, against the same plan without: losses, tokens and weights bit for bit, and
no rank takes more device memory than was planned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.invariance_cases import Case, place
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ITERATIONS = 2
SHORT = {
    "data": {"batch_size": 16},
    "algorithm": {"num_minibatches": 2, "num_epochs": 1, "max_new_tokens": 6},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "actor_gen": {"stream": True},
    "critic_inf": {"stream": True},
    "ref_inf": {"offload": "node"},
    "rew_inf": {"offload": "node"},
    "actor_train": {"offload": "host", "drop_trained_weights": True},
    "critic_train": {"offload": "host"},
}


def calls_of(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every call in a layout of its own; rank 3 sends weights to a critic's inference that it is no part of."""
    calls = {
        "actor_gen": place(0, 4, dp=4, micro=1),
        "rew_inf": place(2, 4, tp=2),
        "ref_inf": place(1, 3, pp=2),
        "critic_inf": place(1, 3, dp=2),
        "actor_train": place(0, 2, tp=2),
        "critic_train": place(2, 4, tp=2),
    }
    return {name: {**call, **options.get(name, {})} for name, call in calls.items()}


class Spans:
    """A tracer that keeps the facts of every instruction."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []

    def span(self, name: str, kind: str, iteration: int, **facts: Any) -> Any:
        self.facts = facts
        self.found.append((name, facts))
        return self

    def __enter__(self) -> Spans:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def planned_bytes(job: Any, backend: Any) -> dict[str, int]:
    """Peak by rank, for the longest prompts and responses that may come."""
    from megatron_real.plan_search.cluster import Cluster
    from megatron_real.plan_search.memory import MemoryModel
    from megatron_real.plan_search.memory_report import memory_report
    from megatron_real.plan_search.models import ModelSpec
    from megatron_real.plan_search.workload import LengthDistribution, Workload

    config = job.algorithm.config
    workload = Workload(
        batch_size=job.options.data.batch_size,
        prompt=LengthDistribution.constant(max(len(record.tokens) for record in job.data.records)),
        response=LengthDistribution.constant(config.max_new_tokens),
        num_minibatches=config.num_minibatches,
        num_epochs=config.num_epochs,
        memory_quantile=1.0,
    )
    specs = {
        name: ModelSpec(shape=setup.model.shape(), param_dtype="bfloat16", fused_attention=False)
        for name, setup in backend.roles.items()
    }
    program = backend.program
    cluster = Cluster.of(program.plan.cluster)
    return memory_report(MemoryModel(program.graph, specs, cluster, workload), program).by_rank()


def run_rank(tree: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import invariance
    from megatron_real.config import RunOptions
    from megatron_real.hooks.launch import build_executor, prepare
    from megatron_real.process_groups import ProcessGroups
    from megatron_real.runtime.execution.observers import Observers

    job, spans = prepare(RunOptions.from_tree(tree)), Spans()
    executor, backend = build_executor(job, ProcessGroups(), Observers(tracer=spans))
    tokens = invariance.record_tokens(backend)
    resting = {owner: size for owner, size in backend.ledger.held().items() if size}
    calls = []
    for iteration in range(ITERATIONS):
        save = Path(tree["output"]) / "saved" if iteration == ITERATIONS - 1 else None
        calls.append(executor.run_iteration(iteration, job.data.batch(iteration), save=save).calls)
    executor.transfers.fence()
    return {
        "tokens": tokens,
        "calls": calls,
        "after": invariance.owned_weights(backend),
        "resting": resting,
        "peak": max(facts.get("peak_bytes", 0) for _, facts in spans.found),
        "planned": planned_bytes(job, backend)[str(backend.rank)],
        "spans": spans.found,
        "stores": {model: store.host_bytes for model, store in backend.stores.items()},
    }


def tree_in(folder: Path, options: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Options of a run on two nodes; writes its plan into `folder`."""
    from tests.e2e.cases import tree_of

    case = Case(
        name="mechanisms",
        num_ranks=4,
        calls=calls_of(options),
        reward_model=True,
        megatron={"num_layers": 2, "vocab_size": 257, "bf16": True},
    )
    tree = tree_of(case, folder, **{**SHORT, "iterations": ITERATIONS, **changes})
    plan = {**case.plan(), "cluster": {"num_nodes": 2, "devices_per_node": 2}}
    Path(tree["plan"]).write_text(json.dumps(plan))
    return tree


@pytest.fixture(scope="module")
def plain(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    # Proof of delivery changes nothing either, and lets the weights of every reallocation pass.
    tree = tree_in(tmp_path_factory.mktemp("plain"), {}, verify="checksum")
    return run_ranks(4, run_rank, tree, timeout_s=240)


def test_a_run_with_every_mechanism_is_the_run_without(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    from benchmarks import invariance

    moved = run_ranks(4, run_rank, tree_in(tmp_path, OPTIONS), timeout_s=240)
    line = invariance.compare_bits(plain, moved)
    assert line["ok"], line
    for rank, result in enumerate(moved):
        assert result["peak"] <= result["planned"], f"rank {rank}"
        owners = " ".join(result["resting"])
        for model in ("ref", "reward", "gradients", "optimizer state"):
            assert model not in owners, f"rank {rank}: between iterations no device holds that"
    assert any("optimizer state" in owner for result in plain for owner in result["resting"])
    # One copy of each frozen model in each node that has a call of it; rank 0 has none.
    assert set(moved[0]["stores"]) == {"ref", "reward"}
    assert moved[1]["stores"]["ref"] == moved[2]["stores"]["ref"] > 0
    assert (moved[1]["stores"]["reward"], moved[2]["stores"]["reward"] > 0) == (0, True)
    for rank, result in enumerate(moved):
        names = [name for name, _ in result["spans"]]
        assert not any("realloc:ref" in name or "realloc:rew" in name for name in names)
        told = [facts for name, facts in result["spans"] if name == "run:actor_gen"]
        assert all(facts["stream_bytes_moved"] > 0 for facts in told), f"rank {rank}"
        assert all(facts["stream_wait_s"] >= 0 for facts in told)


def test_models_leave_the_host_and_go_there_between_two_plans(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The reference's store and the actor's state go, the reward's store and the critic's state come."""
    from benchmarks import invariance
    from tests.e2e import cases

    first = {name: OPTIONS[name] for name in ("actor_gen", "ref_inf", "actor_train")}
    second = {name: OPTIONS[name] for name in OPTIONS if name not in first}
    other = tree_in(tmp_path / "second", second)["plan"]
    tree = tree_in(tmp_path / "first", first, next_plan={"iteration": 1, "plan": other})
    line = invariance.compare_bits(plain, run_ranks(4, cases.run_tree, tree, timeout_s=240))
    assert line["ok"], line
