"""The choices of a plan: what is offered, what is left out, and pins."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from megatron_real.algorithms.graphs import graph_of, ppo_graph
from megatron_real.capabilities import capability_problems
from megatron_real.data_plan import Lengths, assign
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.problem import Choice, Option
from megatron_real.plan_search.space import Pin, Space, SpaceOptions
from megatron_real.plan_search.workload import LengthDistribution, Workload

DENSE = ModelShape(
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=16,
    num_query_groups=8,
    ffn_hidden_size=8192,
    padded_vocab_size=32000,
)
EXPERTS = replace(DENSE, num_experts=8, experts_per_token=2, expert_ffn_hidden_size=1024)


def planner(
    graph: Graph | None = None, *, shape: ModelShape = DENSE, memory: int | None = None, gpus: int = 8
) -> Planner:
    graph = graph or ppo_graph()
    head = replace(shape, scalar_head=True)
    models = {name: ModelSpec(shape=head if name in ("critic", "reward") else shape) for name in graph.models}
    workload = Workload(
        batch_size=64,
        prompt=LengthDistribution.constant(256),
        response=LengthDistribution.lognormal(200, 0.5, 512),
        num_minibatches=4,
    )
    cluster = ClusterSpec(
        num_nodes=max(1, gpus // 8), devices_per_node=min(8, gpus), device="h100", device_memory=memory
    )
    return Planner(graph, models, cluster, workload)


@lru_cache(maxsize=8)
def space(*, plan_only: bool = False, keep_layouts: bool = False) -> Space:
    return planner().space(SpaceOptions(plan_only=plan_only, keep_layouts=keep_layouts))


def on_first_window(found: Space, call: str, option: Option) -> dict[str, Choice]:
    """A choice for all calls in which `call` has `option`."""
    choices = {}
    for other in found.problem.graph.calls:
        mesh = found.problem.meshes_of(other.name)[0]
        choices[other.name] = Choice(mesh, found.problem.options_on(other.name, mesh)[0])
    choices[call] = Choice(next(m for m in found.problem.meshes if m.size == option.size), option)
    return choices


def test_every_option_makes_a_plan_that_the_model_and_the_runtime_accept() -> None:
    found = space()
    graph = found.problem.graph
    shapes = {name: spec.shape for name, spec in planner().prices.models.items()}
    for (call, size), options in found.problem.options.items():
        assert options
        for option in options:
            assert option.size == size
            plan = found.problem.to_plan(on_first_window(found, call, option))
            plan.check(graph, shapes)
            assert not list(capability_problems(graph, plan))


def test_what_the_runtime_cannot_execute_is_offered_for_pricing_only() -> None:
    long = Workload(
        batch_size=64,
        prompt=LengthDistribution.constant(4096),
        response=LengthDistribution.constant(4096),
        num_minibatches=4,
    )
    one = planner()
    one = Planner(one.graph, one.prices.models, one.cluster.spec, long)

    def degrees(options: SpaceOptions) -> set[int]:
        found = one.space(options).problem.options
        return {
            option.layout.cp
            for (call, _), items in found.items()
            if call == "actor_train"
            for option in items
        }

    assert degrees(SpaceOptions()) == {1}
    assert degrees(SpaceOptions(plan_only=True)) > {1}


def test_a_graph_that_the_runtime_cannot_execute_needs_plan_only() -> None:
    """Responses to what a model made of the prompts: there is a price, but no runtime for it."""
    base = graph_of("grpo")
    again = Call(
        name="second_gen",
        model="actor",
        type=CallType.GENERATE,
        inputs=(Input(key="rewards", scope=Scope.FULL),),
        outputs=("second",),
        sequences="second",
    )
    key = KeySpec(name="second", per=Per.TOKEN, dtype="int64", sequences="second")
    one = planner(replace(base, calls=(*base.calls, again), keys=(*base.keys, key)))
    with pytest.raises(PlanError, match=r"cannot execute grpo: calls.second_gen.inputs: .* add --plan-only"):
        one.space()
    assert one.space(SpaceOptions(plan_only=True)).num_priced > 0


@pytest.mark.parametrize("name", ["dpo", "reward", "sft", "grpo", "rloo", "reinforce_pp", "remax"])
def test_options_cut_the_batch_as_the_runtime_does(name: str) -> None:
    """The batch is small, so that few cuts are possible; of preference data pairs stay together."""
    one = planner(graph_of(name))
    unit = 2 if name in ("dpo", "reward") else 1
    work = replace(one.workload, batch_size=12, unit=unit, num_minibatches=2)
    changed = Planner(one.graph, one.prices.models, one.cluster.spec, work)
    found = changed.space(SpaceOptions(keep_layouts=True, offload=False, stream=False)).problem
    lengths = Lengths(prompt=(3,) * 12 * unit, response=(5,) * 12 * unit)
    cuts: dict[str, set[tuple[int, int]]] = {}
    for (call_name, size), options in found.options.items():
        call = one.graph.call(call_name)
        for option in options:
            placement = option.placement(Mesh(0, size))
            assign(call, placement, lengths, 2 if call.trains else 1, unit=unit if call.trains else 1)
            if call.model is not None:
                cuts.setdefault(call_name, set()).add((option.layout.dp, option.num_microbatches))
    for call_name, pairs in cuts.items():
        # 6 units of a step: never more data-parallel ranks and micro-batches than these.
        most = 6 if one.graph.call(call_name).trains else 12 * unit
        assert max(dp * number for dp, number in pairs) <= most
        assert max(dp for dp, _ in pairs) > 1


def test_no_option_of_a_layout_is_beaten_by_another_one() -> None:
    for options in space(keep_layouts=True).problem.options.values():
        by_layout: dict[Layout, list[Option]] = {}
        for option in options:
            by_layout.setdefault(option.layout, []).append(option)
        for found in by_layout.values():
            plain = [o for o in found if o.offload == "none" and not o.drop_trained_weights and not o.stream]
            for one in plain:
                assert not any(
                    other is not one
                    and other.seconds <= one.seconds
                    and other.state_bytes <= one.state_bytes
                    and other.active_bytes <= one.active_bytes
                    for other in plain
                )


def test_what_is_pruned_is_beaten_by_what_stays() -> None:
    pruned, everything = space().problem, space(keep_layouts=True).problem
    step = pruned.capacity_bytes / 256
    for (call, size), options in everything.options.items():
        for option in options:
            assert any(
                kept.seconds + kept.leave_s + kept.return_s
                <= (option.seconds + option.leave_s + option.return_s) * 1.001
                and kept.active_bytes + kept.weights_bytes
                <= option.active_bytes + option.weights_bytes + 2 * step
                for kept in pruned.options[call, size]
            )


def test_streaming_and_offload_are_offered_where_there_is_something_to_move() -> None:
    found: dict[str, set[tuple[str, bool, bool]]] = {}
    for (call, _), options in space(keep_layouts=True).problem.options.items():
        found.setdefault(call, set()).update(
            (option.offload, option.drop_trained_weights, option.stream) for option in options
        )
    plain, streamed = ("none", False, False), ("none", False, True)
    assert found["actor_gen"] == found["critic_inf"] == {plain, streamed}
    # A copy from the store takes as long as one from the rank's own host memory; of equal options the first stays.
    assert found["ref_inf"] == found["rew_inf"] == {plain, ("host", False, False)}
    assert found["actor_train"] == {
        plain,
        ("none", True, False),
        ("host", False, False),
        ("host", True, False),
    }
    without = planner().space(SpaceOptions(offload=False, stream=False)).problem.options
    assert {(o.offload, o.stream) for options in without.values() for o in options} == {("none", False)}
    streams = [o for o in space(keep_layouts=True).problem.options["actor_gen", 4] if o.stream]
    assert all(0 < option.first_share <= 1 and option.first_pass_s > 0 for option in streams)


def test_what_no_host_has_room_for_is_not_offered() -> None:
    def offloads(name: str, call: str, host_memory: int | None) -> set[str]:
        one = planner(graph_of(name))
        spec = ClusterSpec(devices_per_node=8, device="h100", host_memory=host_memory)
        changed = Planner(one.graph, one.prices.models, spec, one.workload)
        found = changed.space(SpaceOptions(plan_only=True), {call: Pin(layout={"dp": 8})})
        return {o.offload for o in found.problem.options[call, 8]}

    assert offloads("remax", "rew_inf", None) == {"none", "host", "node"}, (
        "two calls: a store needs no realloc"
    )
    assert offloads("remax", "rew_inf", 2**20) == {"none"}
    assert offloads("ppo", "ref_inf", None) == {"none", "host"}
    # Eight copies are too much for a host that has room for one.
    store = planner().prices.memory.store_bytes("ref")
    assert offloads("ppo", "ref_inf", store) == {"none", "node"}


def test_a_model_with_experts_is_offered_expert_parallelism() -> None:
    found = planner(shape=EXPERTS).space(SpaceOptions(plan_only=True)).problem.options
    degrees = {option.layout.ep for options in found.values() for option in options}
    assert degrees >= {1, 2, 4, 8}


def test_pins_hold_and_the_rest_stays_free() -> None:
    pins = {
        "actor_train": Pin(ranks=(0, 4), layout={"tp": 2}, recompute="full"),
        "ref_inf": Pin(offload="host"),
    }
    found = planner().space(pins=pins).problem
    assert found.meshes_of("actor_train") == (Mesh(0, 4),)
    options = found.options_on("actor_train", Mesh(0, 4))
    assert options
    assert {(option.layout.tp, option.recompute) for option in options} == {(2, "full")}
    assert all(
        option.offload == "host"
        for (call, _), items in found.options.items()
        if call == "ref_inf"
        for option in items
    )
    assert len({size for call, size in found.options if call == "critic_train"}) > 1


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"actor_trian": Pin()}, r"pins.actor_trian: found no such call"),
        ({"actor_gen": Pin(ranks=(4, 12))}, r"pins.actor_gen.ranks: found \[4, 12\]"),
        ({"actor_gen": Pin(layout={"zp": 2})}, r"pins.actor_gen.layout: found zp"),
        ({"actor_train": Pin(layout={"tp": 3})}, r"calls.actor_train: found no placement under the pin tp=3"),
        ({"actor_gen": Pin(num_microbatches=999)}, r"no placement under the pin num_microbatches=999"),
    ],
)
def test_a_pin_that_cannot_hold_is_one_clear_error(pins: dict[str, Pin], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planner().space(pins=pins)


def test_what_fits_nowhere_says_by_how_much() -> None:
    with pytest.raises(
        PlanError, match=r"calls.actor_train: found no placement that fits: the smallest is .* GiB"
    ):
        planner(memory=2**30).space()


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 6), (3, 4), (2, 6), (1, 1), (3, 1)])
def test_clusters_of_any_size_have_an_answer(nodes: int, per_node: int) -> None:
    one = planner()
    spec = ClusterSpec(num_nodes=nodes, devices_per_node=per_node, device="h100")
    found = Planner(one.graph, one.prices.models, spec, one.workload).search("greedy")
    assert found.plan.cluster.num_devices == nodes * per_node
    assert found.estimate.period_s > 0
