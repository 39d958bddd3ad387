"""Prices of moving trained models: a byte takes a second inside a node, four across, a copied byte a tenth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.costs.moves import MovePricer
from megatron_real.plan_search.costs.operations import Collective
from megatron_real.plan_search.costs.training_moves import both_copies_bytes, training_move
from megatron_real.plan_search.memory import copy_memory
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.plan_change import ChangeCost, change_cost, change_lines
from megatron_real.plan_search.workload import LengthDistribution, Workload
from megatron_real.program import Program, compile_program
from tests.unit.plan_search.test_moves import SHAPE, Costs

MODEL = ModelSpec(shape=SHAPE)
GRAPH = ppo_graph("model")


def _at(start: int, **degrees: int) -> tuple[Mesh, Layout]:
    layout = Layout(**degrees)
    return Mesh(start, start + layout.size), layout


def _state_bytes(layout: Layout) -> int:
    """What the optimizer holds on a rank of a layout without pipeline: all but the fp32 gradients."""
    memory = copy_memory(MODEL, layout, True)
    return memory.state_bytes[0] - 2 * memory.weights_bytes[0]


def test_a_rank_receives_its_part_of_the_state_over_its_links() -> None:
    near = training_move(MODEL, _at(0, dp=2), _at(2, dp=2), Costs(), 4)
    part = _state_bytes(Layout(dp=2))
    assert near.max_received_bytes == near.max_sent_bytes == part
    assert near.bytes_moved == 2 * part
    assert near.seconds == pytest.approx(part + part / 10)
    far = training_move(MODEL, _at(0, dp=2), _at(4, dp=2), Costs(), 4)
    assert far.seconds == pytest.approx(4 * part + part / 10)
    assert training_move(MODEL, _at(0, dp=2), _at(2, dp=2), Costs(), 2).seconds == far.seconds
    half = training_move(MODEL, _at(0, dp=4), _at(0, dp=4), Costs(), 2)
    assert half.seconds == pytest.approx((0.5 + 0.5 * 4 + 0.2) * _state_bytes(Layout(dp=4)))


def test_one_sender_to_many_is_bound_by_the_sender() -> None:
    found = training_move(MODEL, _at(0, dp=1), _at(0, dp=4), Costs(), 4)
    assert found.max_sent_bytes == found.bytes_moved == 4 * _state_bytes(Layout(dp=4))


def test_fp32_models_move_their_weights_as_main_parameters() -> None:
    half, full = (
        training_move(dataclasses.replace(MODEL, param_dtype=dtype), _at(0, dp=2), _at(2, dp=2), Costs(), 4)
        for dtype in ("bfloat16", "float32")
    )
    assert half.bytes_moved == full.bytes_moved


def test_peak_is_of_both_copies_where_they_meet() -> None:
    one, other = (copy_memory(MODEL, Layout(dp=dp), True) for dp in (2, 4))
    both = one.weights_bytes[0] + one.state_bytes[0] + other.weights_bytes[0] + other.state_bytes[0]
    assert training_move(MODEL, _at(0, dp=2), _at(0, dp=4), Costs(), 4).peak_bytes == both
    alone = both_copies_bytes(MODEL, _at(0, dp=2), _at(2, dp=2), trained=True)
    assert alone == one.weights_bytes[0] + one.state_bytes[0]
    frozen = copy_memory(MODEL, Layout(dp=2), False).weights_bytes[0]
    assert both_copies_bytes(MODEL, _at(0, dp=2), _at(0, dp=2), trained=False) == 2 * frozen


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlanError):
        training_move(MODEL, _at(0, dp=1), _at(0, pp=3), Costs(), 8)


def _pricer() -> MovePricer:
    cluster = Cluster(
        spec=ClusterSpec(devices_per_node=4), device=Device(name="cpu", memory_bytes=1 << 30, constants={})
    )
    workload = Workload(
        batch_size=16, prompt=LengthDistribution.constant(3), response=LengthDistribution.constant(5)
    )
    models = dict.fromkeys(GRAPH.models, MODEL)
    return MovePricer(models, cluster, workload, Costs(per_byte={Collective.ALL_GATHER: 0.5}), GRAPH)


def _program(**changes: dict[str, Any]) -> Program:
    calls = {call.name: {"ranks": [0, 4], "layout": {"dp": 4}} for call in GRAPH.calls} | changes
    plan = {"algorithm": "ppo", "cluster": {"devices_per_node": 4}, "calls": calls}
    return compile_program(GRAPH, Plan.model_validate(plan))


def test_a_change_moves_the_homes_that_differ() -> None:
    split = {"ranks": [0, 4], "layout": {"tp": 4}}
    old = _program()
    pricer = _pricer()
    nothing = change_cost(old, _program(actor_gen=split), pricer, gain_s=1.0)
    assert (nothing.moves, nothing.seconds, nothing.pays_after) == ((), 0, 0)
    assert change_lines(nothing) == ["change of plan in a run (--real-next-plan): no model moves"]

    new = _program(actor_gen=split, actor_train=split, ref_inf=split)
    cost = change_cost(old, new, pricer, gain_s=100.0)
    assert {move.model: move.trained for move in cost.moves} == {"actor": True, "ref": False}
    places = (old.home("actor").mesh, old.home("actor").layout), (new.home("actor").mesh, Layout(tp=4))
    rebuilt = pricer.reload("actor", *places[1], "main_params")
    expected = training_move(MODEL, *places, pricer.operations, 4).seconds + rebuilt
    assert cost.moves[0].seconds == pytest.approx(expected)
    assert cost.moves[1].seconds == pricer.realloc("ref", *places).seconds
    assert cost.seconds == pytest.approx(cost.moves[0].seconds + cost.moves[1].seconds)
    text = "\n".join(change_lines(cost))
    assert "actor: training state from d4t1p1@0-3 to d1t4p1@0-3, at most" in text
    assert f"it pays after {cost.pays_after} iterations" in text

    again = _program(actor_train={"ranks": [0, 4], "layout": {"dp": 4}, "recompute": "full"})
    assert [move.model for move in change_cost(old, again, pricer, gain_s=-1.0).moves] == ["actor"]


def test_when_it_pays() -> None:
    (move,) = change_cost(
        _program(), _program(critic_train={"ranks": [0, 4], "layout": {"tp": 4}}), _pricer(), gain_s=0.0
    ).moves
    moves = (dataclasses.replace(move, seconds=10.0),)
    assert ChangeCost(moves=moves, gain_s=5.0).pays_after == 2
    assert ChangeCost(moves=moves, gain_s=4.9).pays_after == 3
    assert ChangeCost(moves=moves, gain_s=0.0).pays_after is None
    assert "never pays" in change_lines(ChangeCost(moves=moves, gain_s=-1.0))[-1]
