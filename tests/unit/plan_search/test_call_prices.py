"""Prices of calls against closed forms by hand, loops over tokens, and the batches that the runtime cuts."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest

from megatron_real.algorithms.graphs import dpo_graph, grpo_graph, ppo_graph, reward_graph, sft_graph
from megatron_real.data_plan import assign
from megatron_real.dataflow import Graph
from megatron_real.errors import PlanError
from megatron_real.layout import Layout
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.costs.calls import BackendTraits, CallCost, CallPricer
from megatron_real.plan_search.costs.operations import Collective, Pass
from megatron_real.plan_search.costs.training import exposed_seconds
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.workload import LengthDistribution, Workload
from tests.unit.plan_search.fake_costs import FakeCosts
from tests.unit.plan_search.test_stage_prices import RAGGED, sampled

GRAPH = ppo_graph("function")
SHAPE = ModelShape(
    num_layers=8,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=32,
    padded_vocab_size=64,
)
CONSTANT = Workload(
    batch_size=32,
    prompt=LengthDistribution.constant(4),
    response=LengthDistribution.constant(6),
    function_s={"rew_inf": 0.5},
)
LAYER = (16 * 32 + 32) + (16 * 16 + 16) + 2 * 2 * 16 + (16 * 32 + 32) + (32 * 16 + 16)
PARAMETERS = 8 * LAYER + 2 * 64 * 16 + 2 * 16
FORWARD_BYTES = 16 * 2  # of a token's hidden state


def price(
    call: str,
    layout: str,
    costs: FakeCosts,
    *,
    microbatches: int = 1,
    recompute: str = "none",
    workload: Workload = CONSTANT,
    spec: ModelSpec | None = None,
    per_node: int = 8,
    constants: dict[str, Any] | None = None,
    start: int = 0,
    traits: BackendTraits | None = None,
) -> CallCost:
    degrees = Layout.parse(layout)
    fields = {name: getattr(degrees, name) for name in LayoutSpec.model_fields}
    device = Device(name="made-up", memory_bytes=1 << 30, constants=constants or {})
    cluster = Cluster(spec=ClusterSpec(num_nodes=8, devices_per_node=per_node), device=device)
    model = spec or ModelSpec(shape=SHAPE)
    pricer = CallPricer(GRAPH, dict.fromkeys(GRAPH.models, model), cluster, workload, costs, traits=traits)
    placement = Placement(
        ranks=(start, start + degrees.size),
        layout=LayoutSpec(**fields),
        num_microbatches=microbatches,
        recompute=recompute,  # type: ignore[arg-type]
    )
    return pricer.price(GRAPH.call(call), placement)


def test_inference_on_one_rank() -> None:
    costs = FakeCosts(embedding_per_token=0.25, head_per_position=0.5, overhead=3.0)
    cost = price("ref_inf", "d1t1p1", costs, microbatches=4)
    # 32 sequences of 10 tokens through 8 layers; logits at 6 positions of each.
    assert cost.compute_s == pytest.approx(320 * 8 + 320 * 0.25 + 32 * 6 * 0.5)
    assert (cost.communication_s, cost.bubble_s, cost.optimizer_s, cost.overhead_s) == (0, 0, 0, 3.0)
    assert cost.seconds == pytest.approx(cost.compute_s + 3.0)


def test_all_logits_under_sequence_parallelism() -> None:
    costs = FakeCosts(head_per_position=0.5, tensor_parallel=0.125)
    assert price("ref_inf", "d1t2p1", costs).compute_s == pytest.approx(320 * 8 / 2 + 32 * 6 * 0.5)
    cost = price("ref_inf", "d1t2p1s", costs)
    assert cost.compute_s == pytest.approx(320 * 8 / 2 + 320 * 0.5)
    assert cost.communication_s == pytest.approx(8 * 320 * 0.125)


def test_one_logit_per_sequence_of_a_reward_model() -> None:
    graph = ppo_graph("model")
    costs = FakeCosts(per_token=dict.fromkeys(Pass, 0.0), head_per_position=1.0)
    cluster = Cluster(
        spec=ClusterSpec(devices_per_node=1), device=Device(name="x", memory_bytes=1, constants={})
    )
    models = dict.fromkeys(graph.models, ModelSpec(shape=dataclasses.replace(SHAPE, scalar_head=True)))
    pricer = CallPricer(graph, models, cluster, CONSTANT, costs)
    placement = Placement(ranks=(0, 1))
    assert pricer.price(graph.call("rew_inf"), placement).seconds == pytest.approx(32)
    assert pricer.price(graph.call("critic_inf"), placement).seconds == pytest.approx(32 * 6)


def test_pipeline_of_equal_stages() -> None:
    costs = FakeCosts(hop_per_byte=0.001)
    cost = price("ref_inf", "d1t1p4", costs, microbatches=8)
    stage = 4 * 10 * 2  # 4 sequences, 2 layers
    hop = 40 * FORWARD_BYTES * 0.001
    assert cost.compute_s == pytest.approx(8 * stage)
    assert cost.bubble_s == pytest.approx(3 * stage)
    assert cost.communication_s == pytest.approx((7 + 3) * hop)


def test_unequal_stages_are_as_slow_as_the_slowest() -> None:
    costs = FakeCosts(embedding_per_token=0.5, head_per_position=1.0)
    cost = price("ref_inf", "d1t1p4l1.4.2.1", costs, microbatches=2)
    times = [16 * 10 * 1.5, 16 * 10 * 4, 16 * 10 * 2, 16 * 10 + 16 * 6]
    assert cost.seconds == pytest.approx(sum(times) + 1 * max(times))
    assert cost.compute_s == pytest.approx(2 * max(times))


def test_training_with_interleaved_stages() -> None:
    costs = FakeCosts(hop_per_byte=0.001, head_per_position=0.0)
    plain = price("actor_train", "d1t1p4", costs, microbatches=8)
    both_ways = 3 * 40 * 2  # forward and backward of 4 sequences through 2 layers
    hop = 2 * 40 * FORWARD_BYTES * 0.001
    assert plain.compute_s == pytest.approx(8 * both_ways)
    assert plain.bubble_s == pytest.approx(3 * both_ways)
    assert plain.communication_s == pytest.approx((7 + 3) * hop)
    interleaved = price("actor_train", "d1t1p4v2", costs, microbatches=8)
    assert interleaved.compute_s == pytest.approx(8 * both_ways)
    assert interleaved.bubble_s == pytest.approx(3 * both_ways / 2)
    assert interleaved.communication_s == pytest.approx((15 + 3) * hop)


def test_optimizer_steps() -> None:
    workload = dataclasses.replace(CONSTANT, num_minibatches=4, num_epochs=3)
    costs = FakeCosts(optimizer_per_parameter=0.01, overhead=2.0)
    cost = price("actor_train", "d1t1p1", costs, microbatches=2, workload=workload)
    assert cost.compute_s == pytest.approx(3 * 320 * 3 * 8)
    assert cost.optimizer_s == pytest.approx(12 * 0.01 * PARAMETERS)
    assert cost.overhead_s == 2.0


def test_recomputation() -> None:
    costs = FakeCosts(embedding_per_token=1.0)
    seconds = {
        recompute: price("actor_train", "d1t1p1", costs, recompute=recompute).seconds
        for recompute in ("none", "full", "selective")
    }
    assert seconds["full"] - seconds["none"] == pytest.approx(320 * 8)
    assert seconds["selective"] == seconds["none"]  # the kernel keeps no scores anyway
    spec = ModelSpec(shape=SHAPE, fused_attention=False)
    with_scores = price("actor_train", "d1t1p1", costs, recompute="selective", spec=spec).seconds
    # Per sequence and layer: scores 2 * 16 * 100; queries, keys, values, projection and MLP 2 * 10 * 16 * (48 + 64).
    scores, rest = 2 * 16 * 100, 2 * 10 * 16 * (2 * 16 + 2 * 8 + 2 * 32)
    assert with_scores - seconds["none"] == pytest.approx(320 * 8 * scores / (scores + rest))


def test_gradients_are_reduced_and_parameters_gathered() -> None:
    per_byte = {
        Collective.REDUCE_SCATTER: 1e-4,
        Collective.ALL_GATHER: 1e-3,
        Collective.ALL_REDUCE: 1e-2,
    }
    base = dataclasses.asdict(FakeCosts()) | {"per_byte": per_byte, "optimizer_per_parameter": 1.0}

    def cost(spec: ModelSpec) -> CallCost:
        return price("actor_train", "d4t1p1", FakeCosts(**base), spec=spec)

    sharded = cost(ModelSpec(shape=SHAPE))
    assert sharded.communication_s == pytest.approx(PARAMETERS * (4e-4 + 2e-3))
    assert sharded.optimizer_s == pytest.approx(PARAMETERS / 4)
    whole = cost(ModelSpec(shape=SHAPE, distributed_optimizer=False, grad_dtype="bfloat16"))
    assert whole.communication_s == pytest.approx(PARAMETERS * 2e-2)
    assert whole.optimizer_s == pytest.approx(PARAMETERS)
    # The backward pass of 8 sequences takes far longer than the reduction.
    beside = cost(ModelSpec(shape=SHAPE, overlap_grad_reduce=True))
    assert beside.communication_s == pytest.approx(PARAMETERS * 2e-3)


def test_experts_are_reduced_over_fewer_ranks() -> None:
    shape = dataclasses.replace(
        SHAPE, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=8, num_dense_layers=2
    )
    costs = FakeCosts(per_byte=dict.fromkeys(Collective, 0.0), expert_factor=5.0, optimizer_per_parameter=1.0)
    cost = price("actor_train", "d8t1p1e4", costs, spec=ModelSpec(shape=shape))
    assert cost.compute_s == pytest.approx(3 * 40 * (2 + 6 * 5))
    reduced = {
        group.size: num_bytes for kind, num_bytes, group in costs.groups if kind is Collective.REDUCE_SCATTER
    }
    one_expert = 16 * 8 + 8 + 8 * 16 + 16
    assert reduced[2] == pytest.approx(4 * 6 * one_expert)
    assert set(reduced) == {8, 2}
    assert cost.optimizer_s == pytest.approx(reduced[8] / 4 / 8 + reduced[2] / 4 / 2)


def test_tied_embeddings_are_reduced_between_the_ends() -> None:
    shape = dataclasses.replace(SHAPE, tied_embeddings=True)
    costs = FakeCosts(per_byte={Collective.ALL_REDUCE: 1.0})
    cost = price("actor_train", "d1t1p2", costs, spec=ModelSpec(shape=shape))
    assert cost.communication_s == pytest.approx(64 * 16 * 4)


def test_what_overlaps_slows_down() -> None:
    assert exposed_seconds(3.0, 5.0, 1.0) == 0
    assert exposed_seconds(7.0, 5.0, 1.0) == 2
    assert exposed_seconds(3.0, 5.0, 1.2) == pytest.approx(0.6)
    assert exposed_seconds(7.0, 5.0, 1.2) == pytest.approx(3)


def test_floors_of_launches() -> None:
    costs = FakeCosts(per_token=dict.fromkeys(Pass, 0.0), floor=2.0, step_floor=3.0)
    assert price("ref_inf", "d1t1p1", costs, microbatches=4).overhead_s == pytest.approx(4 * 16)
    full = price("actor_train", "d1t1p1", costs, microbatches=4, recompute="full")
    assert full.overhead_s == pytest.approx(4 * 3 * 16)
    assert price("actor_gen", "d1t1p1", costs).overhead_s == pytest.approx(16 + 5 * 24)


@pytest.mark.parametrize("layout", ["d1t1p1", "d2t2p1", "d1t2p1"])
def test_generation_is_a_sum_over_tokens(layout: str) -> None:
    degrees = Layout.parse(layout)
    costs = FakeCosts(per_context=0.03, tensor_parallel=0.01, head_per_position=0.7)
    cost = price("actor_gen", layout, costs, microbatches=2)
    rows = 32 / degrees.dp / 2
    tensor = 0.01 if degrees.tp > 1 else 0.0
    total = 0.0
    for _batch in range(2):
        total += 8 * rows * 4 * (1 / degrees.tp + tensor) + 0.7 * rows
        for new in range(1, 6):  # the prompt's pass gives the first of 6 tokens
            context = 4 + new
            total += 8 * rows * ((1 + 0.03 * context) / degrees.tp + tensor) + 0.7 * rows
    assert cost.seconds == pytest.approx(total)
    assert cost.bubble_s == 0


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_stages_go_round_their_batches(microbatches: int) -> None:
    costs = FakeCosts(hop_per_byte=1e-4, per_byte={Collective.BROADCAST: 1e-3})
    cost = price("actor_gen", "d1t1p4", costs, microbatches=microbatches)
    rows = 32 / microbatches
    stage, hop, told = rows * 2, rows * FORWARD_BYTES * 1e-4, 8 * (rows + 1) * 1e-3
    together = min(microbatches, 4)  # one batch per stage; more go in waves
    a_round = max(4 * stage + 3 * hop + told, together * (stage + hop + told))
    prefill = (together + 3) * (4 * stage + 4 * hop) - 4 * hop
    assert cost.seconds == pytest.approx(microbatches / together * (prefill + 5 * a_round))


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 1), (1, 4), (8, 1), (4, 4)])
def test_ragged_generation_runs_until_the_longest_ends(replicas: int, microbatches: int) -> None:
    costs = FakeCosts(per_context=0.01)
    layout = f"d{replicas}t1p1"
    found = price("actor_gen", layout, costs, microbatches=microbatches, workload=RAGGED).seconds
    placement = Placement(ranks=(0, replicas), layout=LayoutSpec(dp=replicas), num_microbatches=microbatches)
    slowest = []
    for seed in range(60):
        lengths = sampled(RAGGED, 96, seed)
        (step,) = assign(GRAPH.call("actor_gen"), placement, lengths).steps
        seconds = []
        for shard in step:
            total = 0.0
            for ids in shard:
                start = min(lengths.prompt[i] for i in ids)
                end = max(lengths.prompt[i] + lengths.response[i] for i in ids)
                total += 8 * len(ids) * start
                total += 8 * len(ids) * sum(1 + 0.01 * context for context in range(start + 1, end))
            seconds.append(total)
        slowest.append(max(seconds))
    assert found == pytest.approx(statistics.mean(slowest), rel=0.05)


def test_finished_sequences_leave_a_continuous_engine() -> None:
    response = LengthDistribution((2, 5, 9), (0.25, 0.5, 0.25))
    workload = dataclasses.replace(CONSTANT, response=response)
    costs = FakeCosts(per_context=0.02)
    traits = BackendTraits(continuous_batching=True)
    cost = price("actor_gen", "d1t1p1", costs, workload=workload, traits=traits)
    total = 8.0 * 32 * 4
    for new in range(1, 9):
        left = sum(w for n, w in zip(response.lengths, response.weights, strict=True) if n > new)
        total += 8 * 32 * left * (1 + 0.02 * (4 + new))
    assert cost.seconds == pytest.approx(total, rel=1e-3)
    # One token's keys and values: 8 layers of 2 groups of 4 channels in 2 bytes; a sequence has 9.25 tokens.
    whole = round(32 * (4 + response.mean) * 2 * 8 * 2 * 4 * 2)
    floors = FakeCosts(per_token=dict.fromkeys(Pass, 0.0), step_floor=1.0, floor=1.0)
    for share, waves in ((1, 1), (2, 2), (3, 3)):
        limited = BackendTraits(continuous_batching=True, kv_capacity_bytes=whole // share + share)
        one = price("actor_gen", "d1t1p1", floors, workload=workload, traits=limited)
        assert one.seconds == pytest.approx(waves * (8 + 8 * 8), rel=0.06)


def test_packed_sequences_have_their_own_lengths() -> None:
    costs = FakeCosts()
    traits = BackendTraits(padded=False)
    price("ref_inf", "d1t1p1", costs, workload=RAGGED, traits=traits)
    ((_, batch, _),) = costs.batches
    assert batch.tokens == pytest.approx(96 * RAGGED.mean_length)
    assert batch.square_length == pytest.approx(RAGGED.mean_square_length)


def test_messages_between_nodes_cost_more() -> None:
    costs = FakeCosts(per_token=dict.fromkeys(Pass, 0.0), hop_per_byte=1.0, across_factor=10.0)
    hop = 320 * FORWARD_BYTES
    assert price("ref_inf", "d1t1p4", costs, per_node=2).seconds == pytest.approx((1 + 10 + 1) * hop)
    assert price("ref_inf", "d1t1p4", costs, per_node=2, start=1).seconds == pytest.approx(21 * hop)


def test_the_head_sees_what_the_loss_is_over() -> None:
    """Response tokens under a language model or a critic; of a reward model the last token of each sequence."""

    def positions(graph: Graph, call: str, *, scalar: bool) -> float:
        costs = FakeCosts(per_token=dict.fromkeys(Pass, 0.0), head_per_position=1.0)
        model = ModelSpec(shape=dataclasses.replace(SHAPE, scalar_head=scalar))
        work = dataclasses.replace(CONSTANT, unit=graph.data.unit)
        cluster = Cluster(
            spec=ClusterSpec(devices_per_node=1), device=Device(name="x", memory_bytes=1, constants={})
        )
        pricer = CallPricer(graph, dict.fromkeys(graph.models, model), cluster, work, costs)
        placement = Placement(ranks=(0, 1), num_microbatches=2)
        return pricer.price(graph.call(call), placement).seconds / 2  # forward and backward

    count, answers = CONSTANT.num_sequences, CONSTANT.num_sequences * CONSTANT.response.mean
    assert positions(sft_graph(), "actor_train", scalar=False) == answers
    assert positions(dpo_graph(), "actor_train", scalar=False) == 2 * answers
    assert positions(reward_graph(), "reward_train", scalar=True) == 2 * count
    assert positions(ppo_graph(), "critic_train", scalar=True) == answers
    assert positions(grpo_graph(), "actor_train", scalar=False) == answers


def test_ranks_share_the_cores_of_a_small_node() -> None:
    for constants, busy in (({}, 1), ({"cores_per_node": 2}, 4), ({"cores_per_node": 4}, 1)):
        costs = FakeCosts()
        price("ref_inf", "d1t1p1", costs, per_node=4, constants=constants)
        assert {grid.busy_ranks for _, _, grid in costs.batches} == {busy}


def test_a_call_that_all_others_wait_for_has_the_cores_for_itself() -> None:
    costs = FakeCosts()
    price("actor_gen", "d2t1p1", costs, per_node=4, constants={"cores_per_node": 2})
    assert {grid.busy_ranks for _, _, grid in costs.batches} == {2}


def test_a_function_has_a_time_per_sequence() -> None:
    assert price("rew_inf", "d8t1p1", FakeCosts()).seconds == pytest.approx(4 * 0.5)
    assert price("rew_inf", "d5t1p1", FakeCosts()).seconds == pytest.approx(7 * 0.5)


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rew_inf.*workload\.function_s"):
        price("rew_inf", "d1t1p1", FakeCosts(), workload=dataclasses.replace(CONSTANT, function_s={}))
    cluster = Cluster(
        spec=ClusterSpec(devices_per_node=1), device=Device(name="x", memory_bytes=1, constants={})
    )
    pricer = CallPricer(GRAPH, {}, cluster, CONSTANT, FakeCosts())
    with pytest.raises(PlanError, match=r"ref_inf.*'ref'"):
        pricer.price(GRAPH.call("ref_inf"), Placement(ranks=(0, 1)))
    with pytest.raises(PlanError, match="32 sequences cannot be cut"):
        price("actor_train", "d8t1p1", FakeCosts(), microbatches=5)
    pairs = dataclasses.replace(CONSTANT, batch_size=16, unit=2)
    with pytest.raises(PlanError, match=r"32 sequences \(of which 2 each stay together\) cannot be cut"):
        price("actor_train", "d4t1p1", FakeCosts(), microbatches=5, workload=pairs)
    with pytest.raises(PlanError, match="do not divide"):
        price("ref_inf", "d1t1p3", FakeCosts())
