"""Predicted bytes by hand, reports against a walk of every single rank, and the advice of reports that do not fit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_real.algorithms.graphs import dpo_graph, ppo_graph, sft_graph
from megatron_real.dataflow import Update
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, coordinates_of
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.memory import MemoryModel, copy_memory
from megatron_real.plan_search.memory_report import MemoryReport, memory_report
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.workload import LengthDistribution, Workload
from megatron_real.program import (
    Mix,
    Offload,
    Program,
    Realloc,
    Reload,
    Run,
    Save,
    Step,
    Transfer,
    compile_program,
)

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=512,
    padded_vocab_size=1024,
    linear_bias=False,
    norm_bias=False,
)
VALUE = replace(SHAPE, scalar_head=True, num_layers=2)
GRAPH = ppo_graph()
LAYER = 2 * 128 + 256 * 128 + 128 * 128 + 2 * 128 * 512  # norms, qkv, projection, MLP
WHOLE = 4 * LAYER + 2 * 1024 * 128 + 128


def _memory(num_devices: int = 8, **changes: Any) -> MemoryModel:
    actor, value = ModelSpec(shape=SHAPE), ModelSpec(shape=VALUE, param_dtype="float32")
    workload = Workload(
        **{
            "batch_size": 64,
            "prompt": LengthDistribution.constant(16),
            "response": LengthDistribution((10, 20, 40), (0.5, 0.49, 0.01)),
            "num_minibatches": 2,
            **changes,
        }
    )
    cluster = Cluster(
        spec=ClusterSpec(devices_per_node=4, num_nodes=max(1, num_devices // 4)),
        device=Device(name="h100", memory_bytes=1 << 34, constants={}),
    )
    models = {"actor": actor, "ref": actor, "critic": value, "reward": value}
    return MemoryModel(GRAPH, models, cluster, workload)


def _place(start: int, *, options: dict[str, Any] | None = None, **degrees: Any) -> Placement:
    layout = LayoutSpec(**degrees)
    size = layout.to_layout().size
    return Placement(ranks=(start, start + size), layout=layout, **(options or {}))


def _program(memory: MemoryModel, *updates: Update, **calls: Placement) -> Program:
    plan = Plan(
        algorithm="ppo", cluster=memory.cluster.spec, calls={c.name: calls[c.name] for c in GRAPH.calls}
    )
    return compile_program(replace(GRAPH, updates=updates), plan)


CALLS = {
    "actor_gen": _place(0, dp=8),
    "rew_inf": _place(4, dp=2, tp=2),
    "ref_inf": _place(0, dp=2, pp=2),
    "critic_inf": _place(4, dp=4),
    "actor_train": _place(0, dp=1, tp=2, pp=2, options={"num_microbatches": 4}),
    "critic_train": _place(4, dp=2, pp=2, options={"num_microbatches": 2}),
}
PLANS = {
    "split": CALLS,
    "offloaded": CALLS
    | {
        "ref_inf": _place(0, dp=2, pp=2, options={"offload": "host"}),
        "rew_inf": _place(2, dp=2, tp=2, options={"offload": "host"}),
    },
    "dropped": CALLS
    | {"actor_train": _place(0, tp=2, pp=2, options={"num_microbatches": 4, "drop_trained_weights": True})},
    "streamed": CALLS
    | {
        "actor_gen": _place(0, dp=8, options={"stream": True}),
        "critic_inf": _place(2, dp=4, options={"stream": True}),
        "actor_train": _place(0, tp=2, pp=2, options={"num_microbatches": 4, "drop_trained_weights": True}),
    },
    "stored": CALLS
    | {
        "ref_inf": _place(0, dp=2, pp=2, options={"offload": "node"}),
        "rew_inf": _place(2, dp=2, tp=2, options={"offload": "node"}),
    },
    "parked": CALLS
    | {
        "actor_train": _place(0, tp=2, pp=2, options={"drop_trained_weights": True, "offload": "host"}),
        "critic_train": _place(4, dp=2, pp=2, options={"offload": "host"}),
    },
    "one window": {name: _place(0, dp=8) for name in CALLS},
    "overlapping": CALLS | {"critic_train": _place(2, pp=2, tp=2), "critic_inf": _place(3, dp=3)},
}


def test_a_copy_by_hand() -> None:
    spec = ModelSpec(shape=SHAPE)
    assert copy_memory(spec, Layout(), False) == ((2 * WHOLE,), (0,), (0,))
    # All parameters are multiples of 64 here, and what is left of the last bucket is 0.
    padded = -(-WHOLE // 128) * 128
    assert copy_memory(spec, Layout(), True) == ((2 * padded,), ((4 + 12) * padded,), (12 * padded,))
    assert copy_memory(spec, Layout(dp=4), True) == (
        (2 * padded,),
        (4 * padded + 3 * padded,),
        (3 * padded,),
    )
    assert copy_memory(replace(spec, param_dtype="float32"), Layout(dp=2, cp=2), True).state_bytes == (
        6 * padded,
    )
    assert copy_memory(replace(spec, grad_dtype="bfloat16"), Layout(), True).state_bytes == (14 * padded,)
    whole = replace(spec, distributed_optimizer=False)
    assert copy_memory(whole, Layout(dp=4), True).state_bytes == (16 * padded,)
    stages = copy_memory(spec, Layout(pp=2, layers=(1, 3)), False).weights_bytes
    assert stages == (2 * (LAYER + 1024 * 128), 2 * (3 * LAYER + 1024 * 128 + 128))


def test_calls_by_hand() -> None:
    memory = _memory(memory_quantile=0.99)
    # Inference: 64 / 4 sequences in 2 micro-batches of 8, of 16 + 20 tokens; one layer, fused attention.
    call = GRAPH.call("ref_inf")
    found = memory.call_memory(call, _place(0, dp=4, options={"num_microbatches": 2}))
    tokens, answers = 8 * 36, 8 * 20
    layer = tokens * (10 * 128 + 8 * 128 + 4 * 512)
    assert found.active_bytes == (layer + answers * 1024 * 10,)
    # Generation: the cache is as long as the longest response, of one of two micro-batches at a time.
    call = GRAPH.call("actor_gen")
    found = memory.call_memory(call, _place(0, dp=4, tp=2, options={"num_microbatches": 2}))
    cache = 4 * (4 // 2) * 2 * 16 * 8 * (16 + 40 - 1) * 2
    first = 8 * 16 * (10 * 128 + (8 * 128 + 4 * 512) // 2) + 8 * 1024 * 10
    assert found.active_bytes == (cache + first,)
    # Training: 32 / 2 sequences of a step in 4 micro-batches of 4; stage 0 has 2 in flight, stage 1 one, 2 layers each.
    call = GRAPH.call("actor_train")
    found = memory.call_memory(call, _place(0, dp=2, pp=2, options={"num_microbatches": 4}))
    layer = 4 * 36 * (10 * 128 + 8 * 128 + 4 * 512)
    assert found.active_bytes == (2 * 2 * layer, 2 * layer + 4 * 20 * 1024 * 10)
    assert found.worst == (
        max(found.weights_bytes),
        max(found.state_bytes),
        max(found.active_bytes),
    )
    full = memory.call_memory(
        call, _place(0, dp=2, pp=2, options={"num_microbatches": 4, "recompute": "full"})
    )
    assert full.active_bytes[0] == layer + 3 * 4 * 36 * 2 * 128


def test_pairs_stay_together_in_training_alone() -> None:
    graph = dpo_graph()
    base = _memory(batch_size=20, unit=2, num_minibatches=1)
    memory = MemoryModel(graph, base.models, base.cluster, base.workload)
    placement = _place(0, dp=4, options={"num_microbatches": 3})

    def load(name: str) -> int:
        return memory.call_memory(graph.call(name), placement).active_bytes[0]

    # 10 of 40 sequences in 3 micro-batches of at most 4; but of 5 pairs in 3 micro-batches at most 2, so 4 sequences.
    per_sequence = 36 * (10 * 128 + 8 * 128 + 4 * 512), 20 * 1024 * 10
    assert load("ref_inf") == 4 * sum(per_sequence)
    assert load("actor_train") == 4 * (4 * per_sequence[0] + per_sequence[1])
    # One of 4 micro-batches of 5 pairs has two of them.
    for number, rows in ((4, 4), (5, 2)):
        placement = _place(0, dp=4, options={"num_microbatches": number})
        assert load("actor_train") == rows * (4 * per_sequence[0] + per_sequence[1])


def test_context_parallelism_divides_positions() -> None:
    memory = _memory(prompt=LengthDistribution.constant(24), response=LengthDistribution.constant(40))
    call = GRAPH.call("actor_train")
    one = memory.call_memory(call, _place(0, dp=2))
    two = memory.call_memory(call, _place(0, dp=2, cp=2))
    assert two.active_bytes[0] * 2 == one.active_bytes[0]


def test_more_microbatches_and_recomputation_never_need_more() -> None:
    memory = _memory()
    call = GRAPH.call("actor_train")
    previous = None
    for number in (1, 2, 4, 8):
        modes = [
            memory.call_memory(
                call, _place(0, dp=2, pp=2, options={"num_microbatches": number, "recompute": mode})
            ).worst.active_bytes
            for mode in ("none", "selective", "full")
        ]
        assert modes[0] >= modes[1] >= modes[2]
        assert previous is None or modes[0] <= previous
        previous = modes[0]


def test_only_a_frozen_home_goes_to_the_host() -> None:
    memory = _memory()
    kept = memory.call_memory(GRAPH.call("ref_inf"), _place(0, dp=2))
    away = memory.call_memory(GRAPH.call("ref_inf"), _place(0, dp=2, options={"offload": "host"}))
    assert kept.host_bytes == (0,)
    assert away.host_bytes == away.weights_bytes == kept.weights_bytes


def test_a_function_needs_nothing() -> None:
    graph = ppo_graph(reward="function")
    memory = _memory()
    memory = MemoryModel(graph, memory.models, memory.cluster, memory.workload)
    assert memory.call_memory(graph.call("rew_inf"), _place(0, dp=4)).worst == (0, 0, 0)


def test_a_model_without_a_shape_is_an_error() -> None:
    memory = _memory()
    with pytest.raises(PlanError, match=r"no shape of \['ref'\]"):
        MemoryModel(
            GRAPH,
            {name: spec for name, spec in memory.models.items() if name != "ref"},
            memory.cluster,
            memory.workload,
        )


class _OneRank:
    """What one rank holds, by its own steps: allocations as `runtime` and `hooks.megatron_backend` make them."""

    def __init__(self, memory: MemoryModel, program: Program, rank: int) -> None:
        self.memory, self.program, self.rank = memory, program, rank
        self.held: dict[Any, int] = {}
        self.peak = 0
        for model in program.graph.models:
            copy = program.home(model)
            if rank in copy.mesh:
                self.add(copy)
                if program.plan.calls[program.graph.home_call(model).name].offload != "none":
                    # `MegatronBackend.rest`
                    self.held.pop((copy, "state") if program.graph.trained(model) else copy)

    def sizes(self, copy: Any) -> tuple[int, int]:
        trained = copy == self.program.home(copy.model) and GRAPH.trained(copy.model)
        found = copy_memory(self.memory.models[copy.model], copy.layout, trained)
        stage = coordinates_of(self.rank, copy.mesh, copy.layout).pp
        return found.weights_bytes[stage], found.state_bytes[stage]

    def add(self, copy: Any) -> None:
        self.held[copy], self.held[copy, "state"] = self.sizes(copy)
        self.see()

    def bring(self, copy: Any, what: str) -> None:
        weights, state = self.sizes(copy)
        self.held[copy if what == "weights" else (copy, what)] = weights if what == "weights" else state
        self.see()

    def see(self, more: int = 0) -> None:
        self.peak = max(self.peak, sum(self.held.values()) + more)

    def take(self, step: Step) -> None:
        for realloc in step.finish:
            self.held.pop(realloc.name)
        match step.instruction:
            case Run() as run:
                placement = self.program.plan.calls[run.call]
                found = self.memory.call_memory(GRAPH.call(run.call), placement)
                self.see(found.active_bytes[coordinates_of(self.rank, placement.mesh, placement.parallel).pp])
                self.held.pop(f"realloc:{run.call}", None)
                if run.release:
                    self.held.pop(run.copy)
            case Realloc(source=source, target=target) as realloc:
                if self.rank in target.mesh:
                    self.add(target)
                sides = [copy for copy in (source, target) if self.rank in copy.mesh]
                staging = sum(2 * min(32 << 20, self.held[copy]) for copy in sides)
                self.see(staging)
                if realloc.stream:
                    self.held[realloc.name] = staging
            case Mix(source=source, target=target, from_host=from_host):
                if from_host and self.rank in target.mesh:
                    self.add(target)
                sides = [copy for copy in (source, target) if self.rank in copy.mesh]
                self.see(sum(2 * min(32 << 20, self.held[copy]) for copy in sides))
                if from_host and self.rank in target.mesh:
                    self.held.pop(target)
            case Reload(copy=copy, what=what):
                self.bring(copy, what)
            case Offload(copy=copy, what=what):
                self.held.pop(copy if what == "weights" else (copy, what))
            case Save():
                for model in GRAPH.models:
                    home = self.program.home(model)
                    if self.rank in home.mesh and (home, "state") not in self.held and GRAPH.trained(model):
                        self.see(self.sizes(home)[1])
            case Transfer():
                pass


FOLLOWING = (Update(target="ref", source="actor", mix=0.1),)


@pytest.mark.parametrize(
    ("name", "updates"),
    [
        *((name, ()) for name in PLANS),
        *((name, FOLLOWING) for name in ("split", "offloaded", "dropped", "one window")),
    ],
)
def test_reports_are_a_walk_of_every_rank(name: str, updates: tuple[Update, ...]) -> None:
    memory = _memory()
    program = _program(memory, *updates, **PLANS[name])
    report = memory_report(memory, program)
    assert [rank for group in report.groups for rank in group.mesh.ranks] == list(range(8))
    for rank in range(8):
        walker = _OneRank(memory, program, rank)
        for _ in range(2):
            for step in program.steps(rank):
                walker.take(step)
        found = report.of(rank)
        assert found.static_bytes == sum(walker.held.values())
        assert found.peak_bytes == walker.peak == max(size for _, size in found.timeline)
        assert found.peak_bytes == sum(size for _, size in found.holders)
        assert report.by_rank()[str(rank)] == found.peak_bytes
    assert report.peak_bytes == max(report.by_rank().values())


def test_hosts_hold_what_was_offloaded() -> None:
    memory = _memory()
    assert memory_report(memory, _program(memory, **CALLS)).host_bytes == (0, 0)
    found = memory_report(memory, _program(memory, **PLANS["offloaded"])).host_bytes
    ref = copy_memory(memory.models["ref"], Layout(dp=2, pp=2), False).weights_bytes
    reward = copy_memory(memory.models["reward"], Layout(dp=2, tp=2), False).weights_bytes
    assert found == (2 * sum(ref) + 2 * reward[0], 2 * reward[0])
    whole = [copy_memory(memory.models[name], Layout(), False).weights_bytes[0] for name in ("ref", "reward")]
    assert memory_report(memory, _program(memory, **PLANS["stored"])).host_bytes == (sum(whole), whole[1])
    actor = copy_memory(memory.models["actor"], Layout(tp=2, pp=2), True).optimizer_bytes
    critic = copy_memory(memory.models["critic"], Layout(dp=2, pp=2), True).optimizer_bytes
    report = memory_report(memory, _program(memory, **PLANS["parked"]))
    assert report.host_bytes == (2 * sum(actor), 2 * sum(critic))
    (problem,) = report.host_problems(max(report.host_bytes) - 1)
    assert problem.path == f"host memory of node {report.host_bytes.index(max(report.host_bytes))}"
    assert not [*report.host_problems(None), *report.host_problems(max(report.host_bytes))]


def test_a_plan_that_fits_has_no_problems() -> None:
    memory = _memory()
    report = memory_report(memory, _program(memory, **CALLS))
    assert report.problems(report.peak_bytes) == ()
    assert len(report.problems(report.peak_bytes - 1)) == 1


def _long(length: int) -> dict[str, Any]:
    return {"prompt": LengthDistribution.constant(length)}


@pytest.mark.parametrize(
    ("workload", "placement", "spare", "advice", "change"),
    [
        ({"batch_size": 4096}, {}, 0.9, "num_microbatches=2", {"num_microbatches": 2}),
        (_long(2000), {"num_microbatches": 8}, 0.6, "recompute=full", {"recompute": "full"}),
        (
            _long(2000),
            {},
            0.1,
            "num_microbatches=8 and recompute=full",
            {"num_microbatches": 8, "recompute": "full"},
        ),
        (
            {"batch_size": 8, **_long(1)},
            {},
            0.7,
            "dp=2 tp=2",
            {"layout": LayoutSpec(dp=2, tp=2)},
        ),
    ],
)
def test_the_smallest_change_that_fits_is_named(
    workload: dict[str, Any],
    placement: dict[str, Any],
    spare: float,
    advice: str,
    change: dict[str, Any],
) -> None:
    graph, models = sft_graph(), _memory().models
    memory = MemoryModel(graph, models, _memory(4).cluster, _memory(**workload).workload)

    def report(**options: Any) -> MemoryReport:
        placed = _place(0, dp=4, options=placement).model_copy(update=options)
        plan = Plan(algorithm="sft", cluster=memory.cluster.spec, calls={"actor_train": placed})
        return memory_report(memory, compile_program(graph, plan))

    found = report()
    capacity = int(found.peak_bytes * spare)
    (problem,) = found.problems(capacity)
    assert problem.path == "run:actor_train on rank 0"
    assert f"{found.peak_bytes - capacity:,} too many" in problem.found
    assert problem.fix == f"Fits with {advice} in actor_train."
    assert report(**change).peak_bytes <= capacity


def test_a_reference_in_the_way_goes_to_the_host() -> None:
    memory = _memory(batch_size=16)
    report = memory_report(memory, _program(memory, **CALLS))
    (problem,) = report.problems(int(report.peak_bytes * 0.95))
    assert problem.path == "realloc:critic_inf on rank 4"
    assert problem.fix == "Fits with offload=host in rew_inf."
    changed = CALLS | {"rew_inf": _place(4, dp=2, tp=2, options={"offload": "host"})}
    assert memory_report(memory, _program(memory, **changed)).peak_bytes <= report.peak_bytes * 0.95


def test_nothing_helps_a_device_that_is_far_too_small() -> None:
    memory = _memory()
    report = memory_report(memory, _program(memory, **CALLS))
    assert all(
        "Use more devices" in problem.fix or "use more devices" in problem.fix
        for problem in report.problems(1)
    )


def test_a_thousand_ranks_take_milliseconds() -> None:
    memory = _memory(1024, batch_size=1024)
    calls = {
        "actor_gen": _place(0, dp=512, tp=2),
        "rew_inf": _place(512, dp=512),
        "ref_inf": _place(0, dp=128, pp=4),
        "critic_inf": _place(512, dp=512),
        "actor_train": _place(0, dp=64, tp=2, pp=4, options={"num_microbatches": 8}),
        "critic_train": _place(512, dp=256, pp=2),
    }
    program = _program(memory, **calls)
    memory_report(memory, program)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        memory_report(memory, program)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.05
