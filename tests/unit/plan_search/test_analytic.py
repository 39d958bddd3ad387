"""Analytic prices against closed forms by hand, on a device of round numbers, and against measured latencies."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.dataflow import CallType
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.cluster import Device, load_device
from megatron_real.plan_search.costs.analytic import AnalyticCost
from megatron_real.plan_search.costs.operations import (
    Collective,
    Grid,
    Group,
    MicroBatch,
    OperationCosts,
    Pass,
)
from megatron_real.plan_search.models import ModelSpec

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ROUND: dict[str, Any] = {
    "peak_bf16_flops_per_s": 1e12,
    "peak_fp32_flops_per_s": 1e11,
    "gemm_efficiency_by_tokens": [[1, 0.5]],
    "gemm_efficiency_by_width": [[1, 1.0]],
    "attention_efficiency_by_length": [[1, 0.25]],
    "attention_backward_efficiency": 0.5,
    "hbm_bytes_per_s": 1e15,  # so fast that only arithmetic counts, unless a test says otherwise
    "hbm_efficiency": 1.0,
    "weight_read_efficiency": 1.0,
    "kv_read_efficiency": 1.0,
    "kernel_s": 0.0,
    **{f"link_{kind}_bytes_per_s": [[2, 1e9]] for kind in KINDS},
    **{f"link_{kind}_latency_s": [[2, 1e-3]] for kind in KINDS},
    "link_ramp": [[1, 1.0]],
    "link_p2p_bytes_per_s": 2e9,
    "link_p2p_latency_s": 1e-4,
    "inter_node_bytes_per_s": 1e8,
    "inter_node_latency_s": 1e-2,
    "host_link_bytes_per_s": 1e9,
    "host_link_latency_s": 1e-5,
    "launch_forward_s": 1e-3,
    "launch_backward_s": 2e-3,
    "launch_moe_factor": 4.0,
    "decode_eager_s": 1e-3,
    "decode_eager_moe_s": 5e-3,
    "decode_graph_s": 1e-4,
    "decode_graph_moe_s": 2e-4,
    "optimizer_floor_s": 0.5,
    "call_overhead_s": 0.25,
    "overlap_slowdown": 1.0,
}
DENSE = ModelShape(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    ffn_hidden_size=256,
    padded_vocab_size=1000,
    gated_mlp=True,
)
EXPERTS = replace(
    DENSE, num_experts=8, experts_per_token=2, expert_ffn_hidden_size=32, num_dense_layers=1, num_layers=4
)
BATCH = MicroBatch(sequences=2, length=100, context=100, logit_positions=200)
ATTENTION = 2 * 64 * 2 * 100**2
"""FLOPs of scores and values, causal."""
PROJECTIONS = 2 * 200 * (64 * (64 + 2 * 16) + 64 * 64)
GATED = 2 * 200 * 3 * 64 * 256


def costs(**changes: Any) -> AnalyticCost:
    return AnalyticCost(Device(name="round", memory_bytes=1, constants={**ROUND, **changes}))


def test_it_is_an_implementation_of_the_protocol() -> None:
    prices: OperationCosts = costs()
    assert prices.provenance["device"] == "round"


def test_a_dense_layer_is_its_arithmetic() -> None:
    model = ModelSpec(shape=DENSE)
    forward = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid())
    matrices = (PROJECTIONS + GATED) / 0.5e12
    assert forward.compute_s == pytest.approx(matrices + ATTENTION / 0.25e12, rel=1e-3)
    assert forward.communication_s == 0
    assert costs().layer(model, 0, Pass.TRAIN_FORWARD, BATCH, Grid()) == forward
    assert costs().layer(model, 0, Pass.PREFILL, BATCH, Grid()) == forward
    backward = costs().layer(model, 0, Pass.BACKWARD, BATCH, Grid())
    assert backward.compute_s == pytest.approx(2 * matrices + 2.5 * ATTENTION / 0.125e12, rel=1e-3)


def test_ragged_sequences_and_cached_prefixes_count_their_pairs() -> None:
    model = ModelSpec(shape=DENSE)
    fast = costs(peak_bf16_flops_per_s=1e12, gemm_efficiency_by_tokens=[[1, 1e6]])  # attention alone
    plain = fast.layer(model, 0, Pass.FORWARD, BATCH, Grid()).compute_s
    ragged = fast.layer(model, 0, Pass.FORWARD, replace(BATCH, square_length=15000.0), Grid()).compute_s
    assert ragged / plain == pytest.approx(1.5, rel=1e-2)
    # 100 new positions after 50 cached ones: 100 * 50 pairs beside the triangle of 5000.
    cached = fast.layer(model, 0, Pass.PREFILL, replace(BATCH, context=150.0), Grid()).compute_s
    assert cached / plain == pytest.approx(2.0, rel=1e-2)


def test_non_products_move_their_bytes() -> None:
    """10 hidden vectors, rotary q and k twice, and the three vectors of the gate, two bytes each."""
    slow = costs(hbm_bytes_per_s=1.0, weight_read_efficiency=1e12, kv_read_efficiency=1e12)
    grid, model = Grid(tp=2, sp=True), ModelSpec(shape=DENSE)
    per_token = 10 * 64 / 2 + 2 * (64 / 2 + 8) + 3 * 256 / 2
    forward = slow.layer(model, 0, Pass.FORWARD, BATCH, grid).compute_s
    assert forward == pytest.approx(200 * per_token * 2, rel=1e-6)
    assert slow.layer(model, 0, Pass.BACKWARD, BATCH, grid).compute_s == pytest.approx(2 * forward, rel=1e-6)
    # Without sequence parallelism the norms and residuals are whole on each rank.
    whole = slow.layer(model, 0, Pass.FORWARD, BATCH, Grid(tp=2)).compute_s
    assert whole - forward == pytest.approx(200 * 10 * 32 * 2, rel=1e-6)


def test_unfused_attention_moves_its_scores() -> None:
    slow = costs(hbm_bytes_per_s=1.0, weight_read_efficiency=1e12)
    fused, plain = ModelSpec(shape=DENSE), ModelSpec(shape=DENSE, fused_attention=False)
    extra = slow.layer(plain, 0, Pass.FORWARD, BATCH, Grid()).compute_s
    extra -= slow.layer(fused, 0, Pass.FORWARD, BATCH, Grid()).compute_s
    assert extra == pytest.approx(2 * 8 * 100**2 * 2 * 6, rel=1e-6)


def test_a_decode_step_reads_weights_and_cache() -> None:
    """Per layer 64 x (64 + 32 + 64) + 3 x 64 x 256 weights; 2 x 16 columns of cache per position; two bytes each."""
    slow = costs(hbm_bytes_per_s=1.0, hbm_efficiency=1e12, peak_bf16_flops_per_s=1e30)
    step = MicroBatch(sequences=3, length=1, context=500, logit_positions=3)
    found = slow.layer(ModelSpec(shape=DENSE), 0, Pass.DECODE, step, Grid()).compute_s
    weights = 64 * (64 + 32 + 64) + 3 * 64 * 256
    activations = 3 * ((64 + 96) + (64 + 64) + (64 + 512) + (256 + 64))
    assert found == pytest.approx(2 * (weights + activations) + 3 * 500 * 32 * 2, rel=1e-9)
    # Four ranks share two key heads: each still holds a whole one, so the cache does not shrink beyond that.
    four = slow.layer(ModelSpec(shape=DENSE), 0, Pass.DECODE, replace(step, context=1e9), Grid(tp=4))
    two = slow.layer(ModelSpec(shape=DENSE), 0, Pass.DECODE, replace(step, context=1e9), Grid(tp=2))
    assert four.compute_s == pytest.approx(two.compute_s, rel=1e-3)


def test_a_decode_step_reads_only_the_experts_that_it_touches() -> None:
    """E (1 - (1 - k/E)^B) experts: 2 of 8 for one sequence, 7.2 for seven, all for a thousand."""
    slow = costs(hbm_bytes_per_s=1.0, hbm_efficiency=1e12, peak_bf16_flops_per_s=1e30)
    model = ModelSpec(shape=EXPERTS)
    expert = 3 * 64 * 32 * 2

    def read(sequences: int) -> float:
        step = MicroBatch(sequences=sequences, length=1, context=1, logit_positions=sequences)
        seconds = slow.layer(model, 3, Pass.DECODE, step, Grid()).compute_s
        other = sequences * 32 * 2 + 2 * (64 * 160 + 64 * 8)  # cache, attention's weights, router
        rows = sequences * ((64 + 96) + (64 + 64) + (64 + 8)) + 2 * sequences * ((64 + 64) + (32 + 64))
        return (seconds - other - 2 * rows) / expert

    assert read(1) == pytest.approx(2)
    assert read(7) == pytest.approx(8 * (1 - 0.75**7))
    assert read(1000) == pytest.approx(8)


def test_experts_compute_what_arrives() -> None:
    """Balanced: 2 x 200 copies over all ranks' experts, whichever way they are spread."""
    model = ModelSpec(shape=EXPERTS)
    expected = (PROJECTIONS + 2 * 200 * 2 * 3 * 64 * 32 + 2 * 200 * 64 * 8) / 0.5e12 + ATTENTION / 0.25e12
    for grid in (Grid(), Grid(ep=4), Grid(ep=8)):
        found = costs().layer(model, 1, Pass.FORWARD, BATCH, grid).compute_s
        assert found == pytest.approx(expected, rel=1e-2)
    dense = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid()).compute_s  # the leading layer has no experts
    assert dense == pytest.approx((PROJECTIONS + GATED) / 0.5e12 + ATTENTION / 0.25e12, rel=1e-2)
    half = costs().layer(model, 1, Pass.FORWARD, BATCH, Grid(tp=2, sp=True, etp=2)).compute_s
    other = costs().layer(model, 1, Pass.FORWARD, BATCH, Grid(tp=2, sp=True, etp=1, ep=2)).compute_s
    assert half == pytest.approx(expected / 2, rel=1e-2)
    assert other == pytest.approx(expected / 2, rel=1e-2)


def test_tensor_parallel_collectives() -> None:
    """200 tokens x 64 channels x 2 B. All-reduce over 2: 1 S/bw; gather and scatter: half of that each; 1 ms each."""
    model, whole = ModelSpec(shape=DENSE), 200 * 64 * 2
    forward = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid(tp=2)).communication_s
    assert forward == pytest.approx(2 * (whole / 1e9 + 1e-3))
    forward = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid(tp=2, sp=True)).communication_s
    assert forward == pytest.approx(2 * 2 * (whole / 2 / 1e9 + 1e-3))


def test_backward_collectives_hide_behind_gradients() -> None:
    """Of a backward all-reduce only what exceeds the weights' gradient of the product before it is seen."""
    slow = costs(peak_bf16_flops_per_s=1e9)
    model, whole = ModelSpec(shape=DENSE), 200 * 64 * 2
    reduced = whole / 1e9 + 1e-3
    first = 2 * 200 * 64 * (32 + 2 * 8) / 0.5e9  # of query, key, value: longer than the all-reduce
    assert first > reduced
    assert slow.layer(model, 0, Pass.BACKWARD, BATCH, Grid(tp=2)).communication_s == pytest.approx(
        0, abs=1e-12
    )
    seen = costs().layer(model, 0, Pass.BACKWARD, BATCH, Grid(tp=2)).communication_s
    gradients = 2 * 200 * 64 * (48 + 256) / 0.5e12
    assert seen == pytest.approx(2 * reduced - gradients, rel=1e-3)
    # Sequence parallelism: gathering the output's gradient is never hidden.
    seen = slow.layer(model, 0, Pass.BACKWARD, BATCH, Grid(tp=2, sp=True)).communication_s
    assert seen == pytest.approx(2 * (whole / 2 / 1e9 + 1e-3))


def test_context_parallel_ring() -> None:
    """Of each of 4 ranks: a quarter of the work, and 3 messages of its keys and values beside attention."""
    model = ModelSpec(shape=DENSE)
    whole = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid())
    quarter = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid(cp=4))
    assert quarter.compute_s == pytest.approx(whole.compute_s / 4, rel=1e-6)
    block = 50 * 2 * 16 * 2
    attention = ATTENTION / 4 / 0.25e12
    assert quarter.communication_s == pytest.approx(3 * (block / 2e9 + 1e-4) - attention, rel=1e-6)
    across = costs().layer(model, 0, Pass.FORWARD, BATCH, Grid(cp=4, cp_nodes=4)).communication_s
    assert across == pytest.approx(3 * (block / 1e8 + 1e-2) - attention, rel=1e-6)


def test_expert_parallel_collectives() -> None:
    """Dispatch and return: 400 copies x 64 x 2 B leave each rank, three quarters of them for other ranks."""
    found = costs().layer(ModelSpec(shape=EXPERTS), 1, Pass.FORWARD, BATCH, Grid(ep=4)).communication_s
    assert found == pytest.approx(2 * (0.75 * 400 * 128 / 1e9 + 1e-3))


@pytest.mark.parametrize(
    ("kind", "size", "nodes", "seconds"),
    [
        (Collective.ALL_REDUCE, 1, 1, 0.0),
        (Collective.ALL_REDUCE, 4, 1, 1.5 * 8 + 1e-3),
        (Collective.ALL_GATHER, 4, 1, 0.75 * 8 + 1e-3),
        (Collective.REDUCE_SCATTER, 8, 1, 0.875 * 8 + 1e-3),
        (Collective.BROADCAST, 8, 1, 8 + 1e-3),
        (Collective.ALL_TO_ALL, 4, 1, 0.75 * 2 + 1e-3),
        # Two nodes of 4: each rank carries a quarter over its own adapter, 10 times as slow.
        (Collective.ALL_REDUCE, 8, 2, 2 * 0.5 * 8 / 4 * 10 + 1e-3 + 2e-2),
        (Collective.ALL_GATHER, 8, 2, 0.5 * 8 / 4 * 10 + 1e-3 + 1e-2),
        # Four nodes of one: no link inside.
        (Collective.ALL_REDUCE, 4, 4, 1.5 * 8 * 10 + 4e-2),
        (Collective.REDUCE_SCATTER, 4, 4, 0.75 * 8 * 10 + 3e-2),
        # Of a rank's eighth, half stays in the node.
        (Collective.ALL_TO_ALL, 8, 2, 0.5 * 10 + 1e-3 + 1e-2),
    ],
)
def test_collectives(kind: Collective, size: int, nodes: int, seconds: float) -> None:
    assert costs().collective(kind, 8e9, Group(size, nodes)) == pytest.approx(seconds)


def test_the_head() -> None:
    model = ModelSpec(shape=DENSE)
    batch = replace(BATCH, logit_positions=50)
    forward = costs().head(model, Pass.FORWARD, batch, Grid())
    assert forward.compute_s == pytest.approx(2 * 50 * 64 * 1000 / 0.5e12, rel=1e-2)
    shard = costs().head(model, Pass.TRAIN_FORWARD, batch, Grid(tp=2))
    assert shard.compute_s == pytest.approx(forward.compute_s / 2, rel=1e-2)
    assert shard.communication_s == pytest.approx(3 * (4 * 50 / 1e9 + 1e-3))
    backward = costs().head(model, Pass.BACKWARD, batch, Grid())
    assert backward.compute_s == pytest.approx(2 * forward.compute_s, rel=1e-2)
    scalar = costs().head(ModelSpec(shape=replace(DENSE, scalar_head=True)), Pass.FORWARD, batch, Grid(tp=2))
    assert scalar.compute_s < forward.compute_s / 100
    assert scalar.communication_s == 0


def test_adam_moves_34_bytes_per_owned_parameter_and_zeroes_the_gradients() -> None:
    slow = costs(hbm_bytes_per_s=1.0)
    mixed, single = ModelSpec(shape=DENSE), ModelSpec(shape=DENSE, param_dtype="float32")
    assert slow.optimizer_step(mixed, 100, 25, Grid()) == pytest.approx(25 * 34 + 100 * 4 + 0.5)
    assert slow.optimizer_step(single, 100, 100, Grid()) == pytest.approx(100 * 32 + 100 * 4 + 0.5)
    shared = costs(hbm_bytes_per_s=1.0, cores_per_node=2)
    assert shared.optimizer_step(mixed, 100, 25, Grid(busy_ranks=4)) == pytest.approx(
        2 * (25 * 34 + 100 * 4) + 0.5
    )


def test_copies_and_messages() -> None:
    prices = costs()
    assert prices.point_to_point(2e9, within_node=True) == pytest.approx(1 + 1e-4)
    assert prices.point_to_point(2e9, within_node=False) == pytest.approx(20 + 1e-2)
    assert (prices.bandwidth(within_node=True), prices.bandwidth(within_node=False)) == (2e9, 1e8)
    assert prices.local_copy(5e14) == pytest.approx(1.0)
    assert prices.host_copy(1e9) == pytest.approx(1 + 1e-5)


def test_floors() -> None:
    """Three of the four layers have experts: a stage of two has 0.5 dense ones and 1.5 with experts."""
    dense, experts = ModelSpec(shape=DENSE), ModelSpec(shape=EXPERTS)
    prices = costs()
    assert prices.pass_floor(dense, 4, Pass.TRAIN_FORWARD) == pytest.approx(4e-3)
    assert prices.pass_floor(dense, 4, Pass.BACKWARD) == pytest.approx(8e-3)
    assert prices.pass_floor(experts, 2, Pass.FORWARD) == pytest.approx((0.5 + 1.5 * 4) * 1e-3)
    assert prices.decode_step_floor(dense, 4) == pytest.approx(4e-3)
    assert prices.decode_step_floor(experts, 2) == pytest.approx((0.5 + 1.5 * 5) * 1e-3)
    assert prices.decode_step_floor(replace(experts, cuda_graph=True), 2) == pytest.approx(0.35e-3)
    assert prices.call_overhead(CallType.TRAIN, Grid()) == 0.25


def test_the_two_scales() -> None:
    model = ModelSpec(shape=DENSE)
    device = costs().device
    scaled = AnalyticCost(device, compute_scale=2.0, decode_floor_scale=0.5)
    one, two = (prices.layer(model, 0, Pass.FORWARD, BATCH, Grid(tp=2)) for prices in (costs(), scaled))
    assert two.compute_s == pytest.approx(2 * one.compute_s)
    assert two.communication_s == one.communication_s
    assert scaled.decode_step_floor(model, 4) == pytest.approx(2e-3)
    assert scaled.provenance["compute_scale"] == "2"


def test_ranks_share_cores_where_they_have_none_of_their_own() -> None:
    model = ModelSpec(shape=DENSE)
    shared = costs(cores_per_node=2)
    alone = shared.layer(model, 0, Pass.FORWARD, BATCH, Grid(busy_ranks=2)).compute_s
    crowd = shared.layer(model, 0, Pass.FORWARD, BATCH, Grid(busy_ranks=8)).compute_s
    assert crowd == pytest.approx(4 * alone)
    assert costs().layer(model, 0, Pass.FORWARD, BATCH, Grid(busy_ranks=8)).compute_s == pytest.approx(alone)


@given(
    tokens=st.integers(1, 100_000),
    more=st.integers(0, 100_000),
    pass_=st.sampled_from(list(Pass)),
    tp=st.sampled_from([1, 2, 4, 8]),
    name=st.sampled_from(["a100", "h100", "gb200", "cpu"]),
)
def test_more_sequences_never_take_less(tokens: int, more: int, pass_: Pass, tp: int, name: str) -> None:
    prices, model = AnalyticCost(load_device(name)), ModelSpec(shape=DENSE)
    length = 1.0 if pass_ is Pass.DECODE else 64.0
    few = MicroBatch(tokens, length, 64.0, tokens)
    many = MicroBatch(tokens + more, length, 64.0, tokens + more)
    for price in (prices.head, lambda *rest: prices.layer(rest[0], 0, *rest[1:])):
        one, other = (price(model, pass_, batch, Grid(tp=tp)).total_s for batch in (few, many))
        # Efficiency falls a little beyond its best size on some devices, never by more than it saves.
        assert 0 < one <= other * (1 + 1e-9)


@given(
    kind=st.sampled_from(list(Collective)),
    num_bytes=st.floats(1, 1e12),
    factor=st.floats(1, 100),
    size=st.sampled_from([2, 4, 8, 16, 64]),
)
def test_collectives_never_fall_with_bytes_or_nodes(
    kind: Collective, num_bytes: float, factor: float, size: int
) -> None:
    prices = AnalyticCost(load_device("h100"))
    nodes = [count for count in (1, 2, 8) if size // count in (1, 2, 4, 8)]
    for count in nodes:
        small, large = (
            prices.collective(kind, amount, Group(size, count)) for amount in (num_bytes, num_bytes * factor)
        )
        assert 0 < small <= large * (1 + 1e-9)


def test_the_same_question_is_answered_from_the_cache() -> None:
    prices, model = AnalyticCost(load_device("h100")), ModelSpec(shape=DENSE)
    first = prices.layer(model, 0, Pass.FORWARD, BATCH, Grid(tp=2))
    begin = time.process_time()
    for _ in range(2000):
        assert prices.layer(model, 0, Pass.FORWARD, BATCH, Grid(tp=2)) is first
    assert time.process_time() - begin < 2.0  # 5 us each


def test_measured_latencies_of_hopper() -> None:
    """AIConfigurator 0.12.0 nccl_perf and gemm_perf (Apache-2.0): not the rows that the constants were taken from."""
    prices = AnalyticCost(load_device("h200"))
    for kind, size, elements, milliseconds in (
        (Collective.ALL_REDUCE, 8, 16777216, 0.19679),
        (Collective.ALL_GATHER, 8, 16777216, 0.12142),
        (Collective.REDUCE_SCATTER, 2, 16777216, 0.09176),
        (Collective.ALL_GATHER, 8, 1048576, 0.02334),
    ):
        assert prices.collective(kind, 2 * elements, Group(size)) == pytest.approx(
            milliseconds / 1e3, rel=0.25
        )
