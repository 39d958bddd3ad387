"""The invariants of `megatron_real.data_plan`, over random graphs, plans and lengths."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.data_plan import CallAssignment, Lengths, balanced_partition, build_transfer_plans
from megatron_real.dataflow import Call, CallType, Graph, Per, Scope
from megatron_real.plan import Placement, Plan
from megatron_real.runtime.execution.data_store import DataStore, message_bytes, pack, unpack
from tests.property.strategies import assign_all, graphs, lengths, plans

SEQUENCES = 32


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.data())
def test_a_partition_has_every_item_once_in_parts_of_equal_count(
    weights: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    result = balanced_partition(weights, parts)
    assert len(result) == parts
    assert sorted(item for part in result for item in part) == list(range(len(weights)))
    counts = [len(part) for part in result]
    assert max(counts) - min(counts) <= 1
    assert all(part == sorted(part) for part in result)
    assert result == balanced_partition(weights, parts), "deterministic"


@given(st.lists(st.integers(1, 100), min_size=4, max_size=40), st.integers(1, 4))
def test_a_partition_is_balanced(weights: list[int], parts: int) -> None:
    """LPT under a cardinality bound: no part is heavier than the mean by more than its heaviest item and the bound."""
    loads = [sum(weights[i] for i in part) for part in balanced_partition(weights, parts)]
    assert max(loads) <= 2 * (sum(weights) / parts + max(weights))


def _stage(rank: int, placement: Placement) -> int:
    """Pipeline stages are the slowest axis: consecutive blocks of the window."""
    return (rank - placement.ranks[0]) // (placement.layout.dp * placement.layout.tp * placement.layout.cp)


def _dp(rank: int, placement: Placement) -> int:
    return (rank - placement.ranks[0]) // (placement.layout.tp * placement.layout.cp) % placement.layout.dp


def _cp(rank: int, placement: Placement) -> int:
    return (rank - placement.ranks[0]) // placement.layout.tp % placement.layout.cp


def _produced(
    graph: Graph, plan: Plan, assignments: dict[str, CallAssignment]
) -> dict[int, dict[str, set[int]]]:
    """rank -> key -> sequences that it has from running calls itself."""
    have: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for call in graph.calls:
        placement = plan.calls[call.name]
        for rank in range(*placement.ranks):
            if _stage(rank, placement) == placement.layout.pp - 1 and _cp(rank, placement) == 0:
                for key in call.outputs:
                    have[rank][key] |= set(assignments[call.name].shard(_dp(rank, placement)))
    return have


def _needed(
    graph: Graph, call: Call, placement: Placement, rank: int, shard: tuple[int, ...]
) -> dict[str, set[int]]:
    """key -> sequences that `rank` needs to run `call`."""
    stage, wanted = _stage(rank, placement), {}
    for entry in call.inputs:
        token = graph.key(entry.key).per is Per.TOKEN
        if stage == placement.layout.pp - 1 or (stage == 0 and token):
            wanted[entry.key] = set(shard) if entry.scope is Scope.SHARD else set(range(SEQUENCES))
    return wanted


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_sequence_arrives_once_from_a_rank_that_has_it(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph, data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))))
    known = data.draw(lengths(SEQUENCES))
    assignments = assign_all(graph, plan, known, data.draw(st.integers(1, 2)))
    transfers = build_transfer_plans(graph, plan, assignments)
    produced = _produced(graph, plan, assignments)
    have = {rank: {key: set(ids) for key, ids in keys.items()} for rank, keys in produced.items()}
    for consumer in graph.ordered(plan.order):
        placement = plan.calls[consumer.name]
        before = {rank: {key: set(ids) for key, ids in keys.items()} for rank, keys in have.items()}
        for producer in graph.parents(consumer):
            transfer = transfers[producer.name, consumer.name]
            assert len({(m.src, m.dst) for m in transfer.messages}) == len(transfer.messages), (
                "one message per pair"
            )
            for message in transfer.messages:
                assert message.src != message.dst
                for key, ids in message.items:
                    assert list(ids) == sorted(set(ids))
                    assert ids
                    assert set(ids) <= produced[message.src][key], "the sender made it"
                    assert key in producer.outputs
                    mine = have.setdefault(message.dst, {}).setdefault(key, set())
                    assert not mine & set(ids), "what a rank holds is not sent to it"
                    mine |= set(ids)
        for rank in set(have):
            gained = {
                key: ids - before.get(rank, {}).get(key, set())
                for key, ids in have[rank].items()
                if ids - before.get(rank, {}).get(key, set())
            }
            wanted: dict[str, set[int]] = {}
            if rank in placement.mesh:
                shard = assignments[consumer.name].shard(_dp(rank, placement))
                wanted = _needed(graph, consumer, placement, rank, shard)
                for key, ids in wanted.items():
                    assert ids <= have[rank].get(key, set()), f"rank {rank} lacks {key} for {consumer.name}"
            for key, ids in gained.items():
                assert ids <= wanted.get(key, set()), (
                    f"rank {rank} got {key} that {consumer.name} does not need there"
                )


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_assignments_cut_by_id_then_by_shard(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph, 4))
    known = data.draw(lengths(SEQUENCES))
    num_minibatches = data.draw(st.integers(1, 3))
    for name, assignment in assign_all(graph, plan, known, num_minibatches).items():
        placement, call = plan.calls[name], graph.call(name)
        assert len(assignment.steps) == (num_minibatches if call.trains else 1)
        flat = []
        for step in assignment.steps:
            ids = sorted(i for shard in step for microbatch in shard for i in microbatch)
            assert ids == list(range(ids[0], ids[-1] + 1)), (
                "a minibatch is a range of ids, whatever the layout"
            )
            flat += ids
            assert len(step) == placement.layout.dp
            assert all(len(shard) == placement.num_microbatches for shard in step)
            assert all(microbatch for shard in step for microbatch in shard), "no micro-batch is empty"
        assert flat == list(range(SEQUENCES))
        if call.type is CallType.GENERATE:
            blind = Lengths(prompt=known.prompt, response=(0,) * SEQUENCES)
            assert assignment == assign_all(graph, plan, blind, num_minibatches)[name], "prompts alone decide"


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_messages_have_the_size_that_their_receiver_expects(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph, 4))
    known = data.draw(lengths(SEQUENCES))
    transfers = build_transfer_plans(graph, plan, assign_all(graph, plan, known, 1))
    store, cpu = DataStore(), torch.device("cpu")
    for serial, spec in enumerate(graph.keys):
        dtype = getattr(torch, spec.dtype)
        parts = [
            torch.arange(known.of(spec.per, i), dtype=dtype) + 1000 * i + 100_000 * serial
            for i in range(SEQUENCES)
        ]
        store.put(spec.name, range(SEQUENCES), parts)
    for transfer in transfers.values():
        for message in transfer.messages:
            flat = pack(message, graph, known, store, cpu)
            assert flat.numel() == message_bytes(message, graph, known) > 0
            received = DataStore()
            unpack(flat, message, graph, known, received)
            for key, ids in message.items:
                for mine, theirs in zip(received.parts(key, ids), store.parts(key, ids), strict=True):
                    assert torch.equal(mine, theirs)
                    assert mine.dtype == theirs.dtype


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(Exception, match="3 sequences cannot be split over 4 parts"):
        balanced_partition([1, 2, 3], 4)
