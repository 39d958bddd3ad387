"""Prices of moves with round numbers: a byte takes a second inside a node, four across, a copied byte a tenth."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from megatron_real.data_plan import Lengths, TransferPlan, assign, build_transfer_plans
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope, Update
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.costs.moves import MovePricer
from megatron_real.plan_search.costs.operations import Collective
from megatron_real.plan_search.memory import copy_memory
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.parameters import num_parameters
from megatron_real.plan_search.workload import LengthDistribution, Workload
from tests.unit.plan_search.fake_costs import FakeCosts

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=16,
    padded_vocab_size=32,
    linear_bias=False,
    norm_bias=False,
)
NUM_BYTES = 2 * num_parameters(SHAPE)
PER_NODE = 4
KEYS = (
    KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
    KeySpec(name="values", per=Per.RESPONSE, dtype="float32"),
    KeySpec(name="score", per=Per.SEQUENCE, dtype="float32"),
)
INPUTS = tuple(Input(key=spec.name) for spec in KEYS)


class Costs(FakeCosts):
    def bandwidth(self, *, within_node: bool) -> float:
        return 1.0 if within_node else 0.25

    def point_to_point(self, num_bytes: float, *, within_node: bool) -> float:
        return 1000.0 if within_node else 4000.0

    def local_copy(self, num_bytes: float) -> float:
        return num_bytes / 10


def _graph(
    consumer: CallType, *, scope: Scope = Scope.SHARD, producer: CallType = CallType.GENERATE
) -> Graph:
    inputs = tuple(dataclasses.replace(entry, scope=scope) for entry in INPUTS)
    return Graph(
        name="g",
        calls=(
            Call(name="make", model="actor", type=producer, outputs=tuple(spec.name for spec in KEYS)),
            Call(name="take", model="other", type=consumer, inputs=inputs),
        ),
        keys=KEYS,
    )


def _pricer(graph: Graph, *, per_byte: dict[Collective, float] | None = None, **changes: Any) -> MovePricer:
    workload = Workload(
        **{
            "batch_size": 16,
            "prompt": LengthDistribution.constant(3),
            "response": LengthDistribution.constant(5),
            **changes,
        }
    )
    cluster = Cluster(
        spec=ClusterSpec(num_nodes=4, devices_per_node=PER_NODE),
        device=Device(name="cpu", memory_bytes=1 << 30, constants={}),
    )
    models = {"actor": ModelSpec(shape=SHAPE), "other": ModelSpec(shape=SHAPE)}
    return MovePricer(models, cluster, workload, Costs(per_byte=per_byte or {}), graph)


PRICER = _pricer(_graph(CallType.TRAIN))


def _at(start: int, **degrees: int) -> tuple[Mesh, Layout]:
    layout = Layout(**degrees)
    return Mesh(start, start + layout.size), layout


def test_the_same_copy_is_free_and_the_same_layout_elsewhere_is_not() -> None:
    here, beside, far = _at(0, dp=2), _at(2, dp=2), _at(4, dp=2)
    assert PRICER.realloc("actor", here, here) == (0.0, 0, 0, 0, 0, 0.0)
    found = PRICER.realloc("actor", here, beside)
    assert found.bytes_moved == 2 * NUM_BYTES
    assert found.max_received_bytes == found.max_sent_bytes == NUM_BYTES
    assert found.messages == 2
    # Received or sent, one message, packed or unpacked.
    assert found.seconds == pytest.approx(NUM_BYTES + 1000 + NUM_BYTES / 10)
    assert found.exposed_s == found.seconds
    # Each byte enters the other node once, half of them at each rank, which then relays its half to the other.
    assert PRICER.realloc("actor", here, far).seconds == pytest.approx(
        4 * NUM_BYTES / 2 + 4000 + NUM_BYTES / 2 + 1000 + 1.5 * NUM_BYTES / 10
    )


def test_one_sender_to_many_is_bound_by_the_sender() -> None:
    found = PRICER.realloc("actor", _at(0, dp=1), _at(0, dp=4))
    assert found.bytes_moved == 3 * NUM_BYTES == found.max_sent_bytes
    assert found.max_received_bytes == NUM_BYTES
    # Rank 0 keeps its own, sends three times, packs all of it and copies once.
    assert found.seconds == pytest.approx(3 * NUM_BYTES + 3 * 1000 + 4 * NUM_BYTES / 10)


def test_prices_depend_on_where_windows_lie_in_their_nodes_only() -> None:
    source, target = {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}
    first = PRICER.realloc("actor", _at(0, **source), _at(2, **target))
    assert PRICER.realloc("actor", _at(8, **source), _at(10, **target)) is first
    assert PRICER.realloc("actor", _at(2, **source), _at(4, **target)).seconds != first.seconds
    assert PRICER.realloc("other", _at(0, **source), _at(2, **target)) is not first


def test_a_layout_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(PlanError, match="4 layers do not divide"):
        PRICER.realloc("actor", _at(0, dp=1), _at(0, pp=3))


@pytest.mark.parametrize("degrees", [{"dp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}])
def test_offload_and_reload(degrees: dict[str, int]) -> None:
    mesh, layout = _at(0, **degrees)
    graph = _graph(CallType.TRAIN)
    pricer = _pricer(graph, per_byte={Collective.ALL_GATHER: 3.0})
    shard = max(copy_memory(ModelSpec(shape=SHAPE), layout, False).weights_bytes)
    # `actor` is frozen here: its weights are on the host since the first time.
    assert pricer.offload("actor", mesh, layout, "host") == 0.0
    assert pricer.reload("actor", mesh, layout, "host") == shard
    # `other` is trained.
    trained = max(copy_memory(ModelSpec(shape=SHAPE), layout, True).weights_bytes)
    assert pricer.offload("other", mesh, layout, "host") == trained
    assert pricer.offload("other", mesh, layout, "main_params") == 0.0
    # Of a layer 16 in norms and 448 split, 256 in embedding and head each, 8 in the last norm.
    elements = {
        4: 4 * (16 + 448) + 2 * 256 + 8,
        2: 4 * (16 + 224) + 2 * 128 + 8,
        1: 2 * (16 + 224) + 128 + 8,  # the last stage
    }[layout.dp]
    owned = elements / layout.dp
    gather = 3.0 * 2 * elements if layout.dp > 1 else 0.0
    cast = (2 * elements + 4 * owned) / 10
    assert pricer.reload("other", mesh, layout, "main_params") == pytest.approx(cast + gather)
    with pytest.raises(PlanError, match="'disk'"):
        pricer.reload("other", mesh, layout, "disk")


def test_data_to_another_window() -> None:
    graph = _graph(CallType.TRAIN)
    pricer = _pricer(graph)
    found = pricer.transfer(
        graph.call("make"), graph.call("take"), _placement(0, dp=2, tp=2), _placement(4, dp=4)
    )
    # Four sequences: 8 tokens of 8 bytes, 5 values of 4 and a score of 4 each, from two shards in another node.
    num_bytes = 4 * (8 * 8 + 5 * 4 + 4)
    assert found.receive_s == pytest.approx(num_bytes / 10)
    assert found.send_s == pytest.approx(num_bytes / 10)  # four senders, four receivers
    assert found.wire_s == pytest.approx(4 * num_bytes + 2 * 4000)


def test_lengths_go_to_all_who_need_them() -> None:
    pricer = _pricer(_graph(CallType.TRAIN))
    # 12 others over 4 senders: three messages each of 16 lengths.
    assert pricer.lengths(Mesh(0, 4), 12) == pytest.approx((3 * 12.8, 3 * 4000, 12.8))
    assert pricer.lengths(Mesh(0, 4), 1) == pytest.approx((12.8, 4000, 12.8))
    assert pricer.lengths(Mesh(0, 16), 0) == (0, 0, 0)


def test_a_model_follows_another_one() -> None:
    """Weights move as in a reallocation; those that are there already are copied, where a reallocation does nothing."""
    pricer = _pricer(_graph(CallType.TRAIN))
    update = Update(target="other", source="actor", mix=0.5)
    here, there = _at(0, dp=4), _at(8, tp=4)
    assert pricer.mix(update, here, there, from_host=False) == pricer.realloc("other", here, there).seconds
    assert pricer.realloc("other", here, here).seconds == 0
    stays = pricer.mix(update, here, here, from_host=False)
    assert stays == pytest.approx(NUM_BYTES / 10)
    whole = copy_memory(pricer.models["other"], here[1], False).weights_bytes[0]
    assert pricer.mix(update, here, here, from_host=True) == pytest.approx(stays + 2 * whole)
    rarely = dataclasses.replace(update, every=4)
    assert pricer.mix(rarely, here, here, from_host=False) == pytest.approx(stays / 4)


def _placement(start: int, **degrees: int) -> Placement:
    layout = LayoutSpec(**degrees)
    return Placement(ranks=(start, start + layout.to_layout().size), layout=layout)


def _planned(graph: Graph, source: Placement, target: Placement) -> tuple[Plan, TransferPlan]:
    """The transfer as the runtime plans it, for the workload's constant lengths."""
    plan = Plan(
        algorithm="g",
        cluster=ClusterSpec(num_nodes=4, devices_per_node=PER_NODE),
        calls={"make": source, "take": target},
    )
    lengths = Lengths(prompt=(3,) * 16, response=(5,) * 16)
    assignments = {call.name: assign(call, plan.calls[call.name], lengths) for call in graph.calls}
    return plan, build_transfer_plans(graph, plan, assignments)["make", "take"]


_BYTES = {"tokens": 8 * 8, "values": 5 * 4, "score": 4}


@pytest.mark.parametrize("scope", list(Scope), ids=str)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (_placement(0, dp=2, tp=2), _placement(4, dp=4)),  # another node
        (_placement(0, dp=2), _placement(2, tp=2)),  # the same node
        (_placement(0, dp=4), _placement(4, dp=2, pp=2)),  # tokens go to two stages
        (_placement(0, dp=2, tp=2), _placement(0, dp=2, tp=2)),  # nothing, or the other shards
        (_placement(0, dp=4), _placement(0, tp=4)),
        (_placement(0, dp=2, pp=2), _placement(0, dp=4)),  # half of the receivers hold something
        (_placement(2, dp=4), _placement(6, dp=4)),  # windows across the nodes' borders
    ],
    ids=str,
)
def test_bytes_are_those_of_the_runtimes_plan(scope: Scope, source: Placement, target: Placement) -> None:
    graph = _graph(CallType.INFERENCE, scope=scope, producer=CallType.INFERENCE)
    _, plan = _planned(graph, source, target)
    found = _pricer(graph).transfer(graph.call("make"), graph.call("take"), source, target)
    received: dict[int, int] = {}
    for message in plan.messages:
        size = sum(_BYTES[key] * len(ids) for key, ids in message.items)
        received[message.dst] = received.get(message.dst, 0) + size
    assert found.receive_s == pytest.approx(max(received.values(), default=0) / 10)
    far = [m for m in plan.messages if m.src // PER_NODE != m.dst // PER_NODE]
    slowest = 0.0
    for rank in received:
        mine = [m for m in plan.messages if m.dst == rank]
        seconds = 0.0
        for message in mine:
            size = sum(_BYTES[key] * len(ids) for key, ids in message.items)
            seconds += (4 * size + 4000) if message in far else size + 1000
        slowest = max(slowest, seconds)
    # The price is of the mean over receivers, and counts the busiest sender too.
    assert found.wire_s >= 0.6 * slowest
    if not received:
        assert found == (0, 0, 0)


def test_sequences_that_are_already_there_are_not_sent() -> None:
    place = _placement(0, dp=4)
    alike = _graph(CallType.INFERENCE, producer=CallType.INFERENCE)
    assert _pricer(alike).transfer(alike.call("make"), alike.call("take"), place, place) == (0, 0, 0)
    # A generation is cut by its prompts, a training by minibatch: a quarter is there by chance.
    for graph, minibatches in ((_graph(CallType.INFERENCE), 1), (_graph(CallType.TRAIN), 2)):
        found = _pricer(graph, num_minibatches=minibatches).transfer(
            graph.call("make"), graph.call("take"), place, place
        )
        assert found.receive_s == pytest.approx(0.75 * 4 * (64 + 20 + 4) / 10)


def test_a_thousand_ranks_are_priced_from_memory() -> None:
    shape = dataclasses.replace(
        SHAPE,
        num_layers=16,
        hidden_size=64,
        num_attention_heads=16,
        num_query_groups=8,
        padded_vocab_size=512,
    )
    graph = _graph(CallType.TRAIN)
    cluster = Cluster(
        spec=ClusterSpec(num_nodes=128, devices_per_node=8),
        device=Device(name="cpu", memory_bytes=1 << 30, constants={}),
    )
    models = {"actor": ModelSpec(shape=shape), "other": ModelSpec(shape=shape)}
    pricer = MovePricer(models, cluster, PRICER.workload, Costs(), graph)
    pair = _at(0, dp=16, tp=8, pp=8), _at(0, dp=128, tp=8)
    first = pricer.realloc("actor", *pair)
    assert first.bytes_moved > 0
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        assert pricer.realloc("actor", *pair) is first
        taken.append(time.perf_counter() - start)
    assert min(taken) < 1e-3


def test_bytes_go_to_the_host_and_back_over_each_ranks_own_link() -> None:
    graph = dataclasses.replace(
        _graph(CallType.INFERENCE),
        calls=(
            *_graph(CallType.INFERENCE).calls,
            Call(name="train", model="actor", type=CallType.TRAIN, inputs=INPUTS),
        ),
    )
    pricer = _pricer(graph)
    mesh, layout = _at(0, tp=2, dp=2)
    shard = copy_memory(pricer.models["other"], layout, False).weights_bytes[0]
    assert (
        pricer.reload("other", mesh, layout, "node") == shard == pricer.reload("other", mesh, layout, "host")
    )
    state = copy_memory(pricer.models["actor"], layout, True)
    assert pricer.move_state("actor", mesh, layout) == state.optimizer_bytes[0] < state.state_bytes[0]
    with pytest.raises(PlanError, match="found 'disk'; expected one of host, main_params, node"):
        pricer.reload("other", mesh, layout, "disk")
    # Four ranks on two cores take twice as long.
    shared = Device(name="cpu", memory_bytes=1 << 30, constants={"cores_per_node": 2})
    slower = MovePricer(
        pricer.models,
        dataclasses.replace(pricer.cluster, device=shared),
        pricer.workload,
        pricer.operations,
        graph,
    )
    assert slower.reload("other", mesh, layout, "node") == 2 * shard
    assert slower.reload("other", Mesh(0, 2), Layout(tp=2), "node") == shard
