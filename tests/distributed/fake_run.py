"""Plans of a fake RLHF iteration, and the executor of one rank of it over gloo."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_real.dataflow import Graph
from megatron_real.layout import parse_placement
from megatron_real.plan import LayoutSpec, Plan
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import compile_program
from megatron_real.runtime.data.dataset import ByteTokenizer
from megatron_real.runtime.execution.executor import RankExecutor, RunParts
from megatron_real.runtime.execution.observers import Observers
from megatron_real.runtime.execution.transfer import DataTransfers, acquire_groups
from megatron_real.runtime.rewards.functions import RewardFunctions, RewardLimits
from tests.distributed.fake_backend import (
    FakeAlgorithm,
    FakeBackend,
    ppo_like_graph,
)

__all__ = ["CALLS", "PLANS", "SEQUENCES", "make_executor", "make_plan"]

SEQUENCES = 16
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")


def make_plan(
    devices: int,
    placements: Mapping[str, str],
    default: str,
    names: Sequence[str] = CALLS,
    algorithm: str = "fake",
    **changes: Any,
) -> Plan:
    """A plan from text such as ``d2t2p1@0-3``; `changes` are further fields by call."""
    calls: dict[str, Any] = {}
    for call in names:
        mesh, layout = parse_placement(placements.get(call, default))
        degrees = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
        calls[call] = {"ranks": [mesh.start, mesh.stop], "layout": degrees, **changes.get(call, {})}
    text = json.dumps({"algorithm": algorithm, "cluster": {"devices_per_node": devices}, "calls": calls})
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


def mechanisms_plan() -> Plan:
    """As the mixed one; weights are streamed, the reference is in the node's store, the actor's state on the host."""
    mixed = mixed_plan()
    changes: dict[str, dict[str, Any]] = {
        "actor_gen": {"stream": True},
        "critic_inf": {"ranks": (1, 4), "layout": LayoutSpec(dp=3), "stream": True},
        "ref_inf": {"offload": "node"},
        "actor_train": {"offload": "host"},
    }
    calls = {name: call.model_copy(update=changes.get(name, {})) for name, call in mixed.calls.items()}
    return mixed.model_copy(update={"calls": calls})


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
    "mechanisms": mechanisms_plan(),
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
    plan: Plan,
    groups: ProcessGroups,
    timeout_s: float = 20.0,
    function: str | None = None,
    graph: Graph | None = None,
    unit: int = 1,
    **options: Any,
) -> tuple[RankExecutor, FakeBackend, Recorder]:
    graph = graph or ppo_like_graph(reward_model=function is None)
    scorer = function and RewardFunctions({function: 1.0}, RewardLimits(stop=True))
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
            algorithm=FakeAlgorithm(graph=graph, reward=scorer, unit=unit),
            transfers=transfers,
            tokenizer=ByteTokenizer(),
            observers=Observers(tracer=recorder, faults=recorder),
        )
    )
    return executor, backend, recorder
