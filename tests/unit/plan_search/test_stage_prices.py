"""Stages of placements and lengths of padded batches, against the layouts' own groups and the runtime's own cuts."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from megatron_real.algorithms.graphs import dpo_graph, ppo_graph
from megatron_real.data_plan import Lengths, assign
from megatron_real.layout import Layout, Mesh, rank_groups
from megatron_real.model_shape import ModelShape
from megatron_real.plan import LayoutSpec, Placement
from megatron_real.plan_search.costs.lengths import Histogram, padded_length, total_histogram
from megatron_real.plan_search.costs.stages import geometry
from megatron_real.plan_search.workload import LengthDistribution, Workload

GRAPH = ppo_graph("function")
SHAPE = ModelShape(
    num_layers=8,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=32,
    padded_vocab_size=64,
)


def sampled(workload: Workload, count: int, seed: int) -> Lengths:
    source = random.Random(seed)

    def draw(lengths: LengthDistribution) -> tuple[int, ...]:
        return tuple(source.choices(lengths.lengths, lengths.weights, k=count))

    return Lengths(prompt=draw(workload.prompt), response=draw(workload.response))


RAGGED = Workload(
    batch_size=96,
    prompt=LengthDistribution.lognormal(40, 0.5, 100),
    response=LengthDistribution.lognormal(120, 0.8, 500),
)


@pytest.mark.parametrize(
    ("replicas", "microbatches"), [(1, 1), (1, 8), (4, 1), (4, 3), (8, 6), (8, 12), (2, 48)]
)
def test_padded_lengths_are_those_of_the_data_plan(replicas: int, microbatches: int) -> None:
    placement = Placement(ranks=(0, replicas), layout=LayoutSpec(dp=replicas), num_microbatches=microbatches)
    slowest = []
    for seed in range(60):
        lengths = sampled(RAGGED, 96, seed)
        (step,) = assign(GRAPH.call("ref_inf"), placement, lengths).steps
        widths = [
            sum(max(lengths.prompt[i] + lengths.response[i] for i in ids) for ids in shard) for shard in step
        ]
        slowest.append(max(widths) / microbatches)
    expected = padded_length(total_histogram(RAGGED), 96, replicas, microbatches).length
    assert expected == pytest.approx(statistics.mean(slowest), rel=0.04)


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 1), (1, 8), (4, 1), (4, 3), (8, 6), (4, 12)])
def test_padded_lengths_of_pairs_are_those_of_the_data_plan(replicas: int, microbatches: int) -> None:
    """Both answers to a prompt are in one micro-batch, which is as wide as the longer one."""
    placement = Placement(ranks=(0, replicas), layout=LayoutSpec(dp=replicas), num_microbatches=microbatches)
    slowest = []
    for seed in range(60):
        drawn = sampled(RAGGED, 96, seed)
        lengths = Lengths(prompt=tuple(drawn.prompt[i - i % 2] for i in range(96)), response=drawn.response)
        (step,) = assign(dpo_graph().call("actor_train"), placement, lengths, unit=2).steps
        widths = [
            sum(max(lengths.prompt[i] + lengths.response[i] for i in ids) for ids in shard) for shard in step
        ]
        slowest.append(max(widths) / microbatches)
    total = total_histogram(RAGGED, longest_of=2)
    expected = padded_length(total, 48, replicas, microbatches).length
    # Of a few pairs to a rank the longer answers may be uneven though the tokens are not.
    assert expected == pytest.approx(statistics.mean(slowest), rel=0.1)


def test_mean_square_of_padded_lengths() -> None:
    total = Histogram.of(np.array([10.0, 20.0]), np.array([0.5, 0.5]))
    # Of two sequences the longer: 10 with probability 1/4.
    padded = padded_length(total, 2, 1, 1)
    assert padded.length == pytest.approx(17.5)
    assert padded.mean_square == pytest.approx(0.25 * 100 + 0.75 * 400)
    alone = padded_length(total, 2, 1, 2)
    assert (alone.length, alone.mean_square) == (pytest.approx(15), pytest.approx(250))


@pytest.mark.parametrize("layout", ["d2t2p2c2", "d4t8p2", "d1t2p8", "d8t1p1e4", "d2t4p4", "d16t1p1e2x2"])
@pytest.mark.parametrize("start", [0, 4, 8])
@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_groups_span_the_nodes_of_their_ranks(layout: str, start: int, per_node: int) -> None:
    degrees = Layout.parse(layout)
    mesh = Mesh(start, start + degrees.size)
    at = geometry(SHAPE, degrees, start % per_node, per_node, 1)

    def spanned(*axes: str) -> int:
        groups = rank_groups(mesh, degrees, *axes)
        return max(len({rank // per_node for rank in group}) for group in groups)

    assert at.grid.tp_nodes == spanned("tp")
    assert at.grid.cp_nodes == spanned("cp")
    assert at.dense_group.size == degrees.dp * degrees.cp
    assert at.dense_group.num_nodes == spanned("dp", "cp")
    assert at.replica_group.num_nodes >= spanned("pp")
    stride = degrees.size // degrees.pp
    across = sum(
        any(rank // per_node != (rank + stride) // per_node for rank in range(first, first + stride))
        for first in range(start, mesh.stop - stride, stride)
    )
    assert (at.hops_within, at.hops_across) == (degrees.pp - 1 - across, across)
