"""Prices of calls for random workloads and layouts: more work is never cheaper, and parts add up."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import PlanError
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.costs.calls import BackendTraits, CallCost, CallPricer
from megatron_real.plan_search.costs.lengths import Histogram, mean_of_largest, total_histogram
from megatron_real.plan_search.costs.operations import Collective, Pass
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.workload import LengthDistribution, Workload
from tests.property.strategies import layouts
from tests.unit.plan_search.fake_costs import FakeCosts

GRAPH = ppo_graph("model")
CALLS = st.sampled_from([call.name for call in GRAPH.calls])
SHAPE = ModelShape(
    num_layers=8,
    hidden_size=16,
    num_attention_heads=8,
    num_query_groups=8,
    ffn_hidden_size=32,
    padded_vocab_size=64,
)


def costs() -> FakeCosts:
    return FakeCosts(
        per_token={pass_: 1e-3 * (index + 1) for index, pass_ in enumerate(Pass)},
        per_context=1e-5,
        tensor_parallel=1e-4,
        embedding_per_token=1e-4,
        head_per_position=1e-3,
        optimizer_per_parameter=1e-6,
        per_byte=dict.fromkeys(Collective, 1e-8),
        hop_per_byte=1e-7,
        across_factor=4.0,
        step_floor=1e-3,
        floor=1e-3,
        overhead=0.01,
    )


@st.composite
def histograms(draw: st.DrawFn, longest: int = 60) -> LengthDistribution:
    values = sorted(draw(st.sets(st.integers(1, longest), min_size=1, max_size=8)))
    weights = [draw(st.integers(1, 9)) for _ in values]
    return LengthDistribution(tuple(values), tuple(weight / sum(weights) for weight in weights))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        batch_size=draw(st.integers(1, 64)),
        prompt=draw(histograms(20)),
        response=draw(histograms()),
        num_minibatches=draw(st.integers(1, 3)),
        num_epochs=draw(st.integers(1, 2)),
    )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    layout = draw(layouts(size, context=False))
    assume(SHAPE.num_layers % layout.pp == 0)
    start = draw(st.integers(0, 8))
    fields: dict[str, Any] = {name: getattr(layout, name) for name in LayoutSpec.model_fields}
    return Placement(
        ranks=(start, start + size),
        layout=LayoutSpec(**fields),
        num_microbatches=draw(st.integers(1, 4)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )


def price(
    call: str,
    workload: Workload,
    placement: Placement,
    *,
    layers: int = 8,
    traits: BackendTraits | None = None,
) -> CallCost | None:
    cluster = Cluster(
        spec=ClusterSpec(num_nodes=4, devices_per_node=4),
        device=Device(name="made-up", memory_bytes=1, constants={}),
    )
    model = ModelSpec(shape=dataclasses.replace(SHAPE, num_layers=layers), fused_attention=False)
    pricer = CallPricer(GRAPH, dict.fromkeys(GRAPH.models, model), cluster, workload, costs(), traits=traits)
    try:
        return pricer.price(GRAPH.call(call), placement)
    except PlanError:
        return None


@given(CALLS, workloads(), placements(), st.integers(0, 32), st.integers(0, 20), st.integers(0, 20))
def test_more_tokens_are_never_cheaper(
    call: str, workload: Workload, placement: Placement, sequences: int, prompt: int, response: int
) -> None:
    less = price(call, workload, placement)
    assume(less is not None)
    more_work = dataclasses.replace(
        workload,
        batch_size=workload.batch_size + sequences,
        prompt=_longer(workload.prompt, prompt),
        response=_longer(workload.response, response),
    )
    more = price(call, more_work, placement)
    assert less is not None
    assert more is not None
    assert more.seconds >= less.seconds * (1 - 1e-9)


def _longer(lengths: LengthDistribution, by: int) -> LengthDistribution:
    return LengthDistribution(tuple(length + by for length in lengths.lengths), lengths.weights)


@given(CALLS, workloads(), placements(), st.sampled_from([16, 24, 32]))
def test_more_layers_are_never_cheaper(
    call: str, workload: Workload, placement: Placement, layers: int
) -> None:
    less, more = price(call, workload, placement), price(call, workload, placement, layers=layers)
    assume(less is not None)
    assert less is not None
    assert more is not None
    assert more.seconds > less.seconds


@given(CALLS, workloads(), placements(), st.booleans(), st.booleans())
def test_parts_are_sound(
    call: str, workload: Workload, placement: Placement, padded: bool, continuous: bool
) -> None:
    traits = BackendTraits(padded=padded, continuous_batching=continuous, kv_capacity_bytes=1 << 16)
    found = price(call, workload, placement, traits=traits)
    assume(found is not None)
    assert found is not None
    parts = [getattr(found, field.name) for field in dataclasses.fields(found)]
    assert min(parts) >= 0
    assert found.compute_s > 0
    assert abs(found.seconds - sum(parts)) <= 1e-12 * found.seconds
    assert (found.optimizer_s > 0) is GRAPH.call(call).trains
    if placement.parallel.pp == 1:
        assert found.bubble_s <= 1e-9 * found.seconds


@given(CALLS, workloads(), placements())
def test_recomputation_is_never_cheaper(call: str, workload: Workload, placement: Placement) -> None:
    seconds = []
    for recompute in ("none", "selective", "full"):
        found = price(call, workload, placement.model_copy(update={"recompute": recompute}))
        assume(found is not None)
        assert found is not None
        seconds.append(found.seconds)
    assert seconds == sorted(seconds)
    assert (seconds[0] < seconds[1]) is GRAPH.call(call).trains


@given(CALLS, workloads(), placements())
def test_a_window_is_as_good_as_another_at_the_same_place_in_its_node(
    call: str, workload: Workload, placement: Placement
) -> None:
    start, stop = placement.ranks
    other = placement.model_copy(update={"ranks": (start + 4, stop + 4)})
    assert price(call, workload, placement) == price(call, workload, other)


def _expected_longest(lengths: LengthDistribution, count: int) -> float:
    """Mean of the longest of `count` sequences: none is longer than a length with its probability to that power."""
    below = [weight**count for weight in accumulate(lengths.weights)]
    return sum(
        length * (here - shorter)
        for length, here, shorter in zip(lengths.lengths, below, [0.0, *below], strict=False)
    )


@given(histograms(), st.integers(1, 80), st.data())
def test_mean_of_the_largest(lengths: LengthDistribution, count: int, data: st.DataObject) -> None:
    histogram = Histogram.of_lengths(lengths)
    parts = data.draw(st.integers(1, count))
    mean, square = mean_of_largest(histogram, count, parts)
    assert lengths.mean - 1e-9 <= mean <= lengths.cap + 1e-9
    assert square >= mean**2 - 1e-6
    if parts == 1:
        assert abs(mean - _expected_longest(lengths, count)) < 1e-6 * mean
    if parts == count:
        assert abs(mean - lengths.mean) < 1e-9 * mean


@given(workloads())
def test_total_histogram_keeps_moments(workload: Workload) -> None:
    total = total_histogram(workload)
    weights = [b - a for a, b in zip([0.0, *total.below[:-1]], total.below, strict=True)]
    mean = sum(w * v for w, v in zip(weights, total.values, strict=True))
    assert abs(mean - workload.mean_length) < 1e-9 * mean
    assert total.values[-1] == workload.prompt.cap + workload.response.cap
