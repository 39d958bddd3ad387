"""Plans without a search: where the calls go, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.dataflow import CallType
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.presets import split, symmetric
from megatron_real.program import Realloc, compile_program

FOUR = ClusterSpec(devices_per_node=4)
SHAPE = ModelShape(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    padded_vocab_size=64,
)
SHAPES = dict.fromkeys(("actor", "ref", "critic", "reward"), SHAPE)


@pytest.mark.parametrize("reward", ["model", "function"])
@pytest.mark.parametrize("reference", [True, False])
def test_symmetric_is_data_parallel_over_everything(reward: str, reference: bool) -> None:
    graph = ppo_graph(reward, reference=reference)
    plan = symmetric(graph, FOUR, SHAPES)
    assert set(plan.calls) == {call.name for call in graph.calls}
    assert {placement.ranks for placement in plan.calls.values()} == {(0, 4)}
    assert {str(placement.parallel) for placement in plan.calls.values()} == {"d4t1p1"}
    program = compile_program(graph, plan)
    assert not [entry for entry in program.instructions if isinstance(entry, Realloc)]


def test_symmetric_layout_and_its_exceptions() -> None:
    graph = ppo_graph("function")
    plan = symmetric(graph, FOUR, SHAPES, layout="d1t2p2v2l1.0.1.2s")
    for call in graph.calls:
        placement = plan.calls[call.name]
        layout = placement.parallel
        if call.model is None:
            assert layout == Layout(dp=4)
            assert placement.num_microbatches == 1
            continue
        assert (layout.tp, layout.pp, placement.num_microbatches) == (2, 2, 2)
        assert layout.sp is (call.type is not CallType.GENERATE)
        if call.trains:
            assert (layout.vpp, layout.layers) == (2, (1, 0, 1, 2))
        else:
            assert (layout.vpp, layout.layers) == (
                1,
                (2, 2),
            )  # stage 0 has chunks 0 and 2, stage 1 has 1 and 3


def test_num_microbatches_of_models_only() -> None:
    plan = symmetric(ppo_graph("function"), FOUR, num_microbatches=3)
    assert plan.calls["rew_inf"].num_microbatches == 1
    assert plan.calls["actor_gen"].num_microbatches == plan.calls["critic_train"].num_microbatches == 3


@pytest.mark.parametrize("reward", ["model", "function"])
def test_split_halves(reward: str) -> None:
    graph = ppo_graph(reward)
    plan = split(graph, FOUR, SHAPES, layouts={"actor": "d1t2p1", "critic_train": "d1t1p2"})
    first, second = Mesh(0, 2), Mesh(2, 4)
    where = {name: placement.mesh for name, placement in plan.calls.items()}
    assert where == {
        **dict.fromkeys(("actor_gen", "ref_inf", "actor_train"), first),
        **dict.fromkeys(("rew_inf", "critic_inf", "critic_train"), second),
    }
    layouts = {name: str(placement.parallel) for name, placement in plan.calls.items()}
    assert layouts["actor_gen"] == layouts["actor_train"] == "d1t2p1"
    assert layouts["critic_train"] == "d1t1p2"
    assert layouts["ref_inf"] == layouts["critic_inf"] == layouts["rew_inf"] == "d2t1p1"


def test_split_uneven_cluster() -> None:
    plan = split(ppo_graph(), ClusterSpec(devices_per_node=3))
    assert plan.calls["actor_train"].ranks == (0, 1)
    assert plan.calls["critic_train"].ranks == (1, 3)


def test_refusals() -> None:
    graph = ppo_graph()
    with pytest.raises(PlanError, match="at least 2"):
        split(graph, ClusterSpec(devices_per_node=1))
    with pytest.raises(PlanError, match=r"'d2t1p1' needs 2 ranks; the window 0-3 has 4"):
        symmetric(graph, FOUR, layout="d2t1p1")
    with pytest.raises(PlanError, match=r"\['actr'\].*actor_gen"):
        split(graph, FOUR, layouts={"actr": "d2t1p1"})
    with pytest.raises(PlanError, match="4 layers do not divide"):
        symmetric(graph, ClusterSpec(devices_per_node=3), SHAPES, layout="d1t1p3")
    with pytest.raises(PlanError, match="num_attention_heads=4"):
        symmetric(graph, ClusterSpec(devices_per_node=8), SHAPES, layout="d1t8p1")


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, megatron_real.plan_search.presets, megatron_real.algorithms.graphs\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
