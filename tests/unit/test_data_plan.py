"""Hand-computed assignments and messages."""

from __future__ import annotations

import json

import pytest

from megatron_real.data_plan import (
    CallAssignment,
    Lengths,
    Message,
    assign,
    balanced_partition,
    build_transfer_plans,
    holders,
    is_first_stage,
    is_last_stage,
)
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import LayoutSpec, Placement, Plan

GEN = Call(name="gen", model="m", type=CallType.GENERATE, outputs=("tokens", "logprobs"))
TRAIN = Call(
    name="train",
    model="m",
    type=CallType.TRAIN,
    inputs=(Input(key="tokens"), Input(key="logprobs", scope=Scope.FULL)),
)
GRAPH = Graph(
    name="g",
    calls=(GEN, TRAIN),
    keys=(
        KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
        KeySpec(name="logprobs", per=Per.RESPONSE, dtype="float32"),
    ),
)


def test_longest_first_to_the_lightest_part_that_is_not_full() -> None:
    assert balanced_partition([9, 1, 8, 2, 7, 3], 2) == [[0, 3, 5], [1, 2, 4]]
    assert balanced_partition([5, 5, 5], 2) == [[0, 2], [1]]
    # Equal counts come first: the light items may not all go to one part.
    assert balanced_partition([10, 1, 1, 1], 2) == [[0, 3], [1, 2]]


def test_minibatches_are_ranges_of_ids() -> None:
    placement = Placement(ranks=(0, 2), layout=LayoutSpec(dp=2), num_microbatches=1)
    lengths = Lengths(prompt=(1, 1, 1, 1), response=(4, 1, 2, 3))
    assert assign(TRAIN, placement, lengths, 2) == CallAssignment(
        steps=((((0,),), ((1,),)), (((3,),), ((2,),)))
    )
    assert assign(TRAIN, placement, lengths, 2).shard(0) == (0, 3)


def test_generation_is_split_by_prompts() -> None:
    placement = Placement(ranks=(0, 2), layout=LayoutSpec(dp=2))
    lengths = Lengths(prompt=(1, 2, 3, 4), response=(90, 0, 0, 0))
    assert assign(GEN, placement, lengths).steps == ((((0, 3),), ((1, 2),)),)
    assert assign(TRAIN, placement, lengths).steps == ((((0, 1),), ((2, 3),)),)


def test_too_few_sequences_name_what_to_change() -> None:
    placement = Placement(ranks=(0, 2), layout=LayoutSpec(dp=2), num_microbatches=2)
    lengths = Lengths(prompt=(1,) * 7, response=(1,) * 7)
    with pytest.raises(PlanError, match=r"calls.train: 7 sequences .* 2 minibatches x dp=2 x 2 .*at least 8"):
        assign(TRAIN, placement, lengths, 2)
    assert assign(TRAIN, placement, lengths, 1)


def test_stages_and_holders() -> None:
    """d2t2p2 on ranks 0..7: stage 0 is 0..3, stage 1 is 4..7."""
    mesh, layout = Mesh(0, 8), Layout(dp=2, tp=2, pp=2)
    placement = Placement(ranks=(0, 8), layout=LayoutSpec(dp=2, tp=2, pp=2))
    assert [is_first_stage(rank, placement) for rank in range(8)] == [True] * 4 + [False] * 4
    assert [is_last_stage(rank, placement) for rank in range(8)] == [False] * 4 + [True] * 4
    assert holders(0, mesh, layout) == (4, 5)
    assert holders(1, mesh, layout) == (6, 7)


def plan(gen: dict[str, object], train: dict[str, object], nodes: int = 1, devices: int = 4) -> Plan:
    cluster = {"num_nodes": nodes, "devices_per_node": devices}
    return Plan.loads(
        json.dumps({"algorithm": "g", "cluster": cluster, "calls": {"gen": gen, "train": train}})
    )


def messages(of: Plan, lengths: Lengths) -> tuple[Message, ...]:
    assignments = {call.name: assign(call, of.calls[call.name], lengths) for call in GRAPH.calls}
    return build_transfer_plans(GRAPH, of, assignments)["gen", "train"].messages


def test_two_disjoint_ranks() -> None:
    found = messages(plan({"ranks": [0, 1]}, {"ranks": [1, 2]}), Lengths(prompt=(1, 1), response=(1, 2)))
    assert found == (Message(src=0, dst=1, items=(("tokens", (0, 1)), ("logprobs", (0, 1)))),)


def test_what_is_there_is_not_sent() -> None:
    """Both on ranks 0, 1 with dp=2 and equal lengths: only the other half's scalars move."""
    both = {"ranks": [0, 2], "layout": {"dp": 2}}
    found = messages(plan(both, both), Lengths(prompt=(1, 1), response=(1, 1)))
    assert found == (
        Message(src=0, dst=1, items=(("logprobs", (0,)),)),
        Message(src=1, dst=0, items=(("logprobs", (1,)),)),
    )


def test_first_stages_get_tokens_only() -> None:
    train = {"ranks": [0, 3], "layout": {"pp": 3}}
    found = messages(plan({"ranks": [3, 4]}, train), Lengths(prompt=(1,), response=(1,)))
    assert found == (
        Message(src=3, dst=0, items=(("tokens", (0,)),)),
        Message(src=3, dst=2, items=(("tokens", (0,)), ("logprobs", (0,)))),
    )


def test_the_sender_is_on_the_receivers_node() -> None:
    """Nodes are ranks 0, 1 and 2, 3; the producer's last stage t2 has one rank on each."""
    gen = {"ranks": [1, 3], "layout": {"tp": 2}}
    train = {"ranks": [0, 4], "layout": {"tp": 4}}
    found = messages(plan(gen, train, nodes=2, devices=2), Lengths(prompt=(1,), response=(1,)))
    assert [(message.src, message.dst) for message in found] == [(1, 0), (2, 3)]


def test_sends_and_receives_of_a_rank() -> None:
    both = {"ranks": [0, 2], "layout": {"dp": 2}}
    lengths = Lengths(prompt=(1, 1), response=(1, 1))
    of = plan(both, both)
    transfer = build_transfer_plans(
        GRAPH, of, {call.name: assign(call, of.calls[call.name], lengths) for call in GRAPH.calls}
    )["gen", "train"]
    assert [message.dst for message in transfer.sends(0)] == [1]
    assert [message.src for message in transfer.receives(0)] == [1]
