"""PPO's dataflow graph, written down a second time."""

from __future__ import annotations

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.dataflow import CallType, Per, Scope
from megatron_real.errors import PlanError


def test_calls_in_declared_order() -> None:
    graph = ppo_graph()
    assert [(call.name, call.model, str(call.type)) for call in graph.calls] == [
        ("actor_gen", "actor", "generate"),
        ("rew_inf", "reward", "inference"),
        ("ref_inf", "ref", "inference"),
        ("critic_inf", "critic", "inference"),
        ("actor_train", "actor", "train"),
        ("critic_train", "critic", "train"),
    ]
    assert graph.ordered() == graph.calls
    assert {spec.name: (spec.per, spec.dtype) for spec in graph.keys} == {
        "tokens": (Per.TOKEN, "int64"),
        "logprobs": (Per.RESPONSE, "float32"),
        "ref_logprobs": (Per.RESPONSE, "float32"),
        "values": (Per.RESPONSE, "float32"),
        "rewards": (Per.SEQUENCE, "float32"),
    }


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("reward", ["model", "function"])
def test_edges(reward: str, reference: bool) -> None:
    graph = ppo_graph(reward, reference=reference)
    assert (graph.call("rew_inf").model is None) is (reward == "function")
    assert ("ref" in graph.models) is reference
    scalars = {"logprobs", "values", "rewards"} | ({"ref_logprobs"} if reference else set())
    for call in graph.calls:
        scopes = {entry.key: entry.scope for entry in call.inputs}
        if call.type is CallType.GENERATE:
            assert not scopes
        elif call.trains:
            assert scopes == {"tokens": Scope.SHARD, **dict.fromkeys(scalars, Scope.FULL)}
            others = {other.name for other in graph.calls if not other.trains}
            assert {parent.name for parent in graph.parents(call)} == others
        else:
            assert scopes == {"tokens": Scope.SHARD}
    assert graph.trained("actor")
    assert graph.trained("critic")
    assert not any(graph.trained(model) for model in set(graph.models) - {"actor", "critic"})


def test_refuses_other_rewards() -> None:
    with pytest.raises(PlanError, match="'rule'"):
        ppo_graph("rule")
