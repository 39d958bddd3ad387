"""The algorithms' dataflow graphs, written down a second time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_real.algorithms.graphs import (
    graph_of,
    grpo_graph,
    ppo_graph,
    reinforce_pp_graph,
    remax_graph,
    rloo_graph,
)
from megatron_real.dataflow import CallType, Graph, Per, Scope
from megatron_real.errors import ConfigError, PlanError


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


def test_ppo_by_default_is_without_extras() -> None:
    assert ppo_graph(extra_rewards=0) == ppo_graph()
    with pytest.raises(PlanError, match="extra_rewards=-1"):
        ppo_graph(extra_rewards=-1)


@pytest.mark.parametrize(("extra", "calls"), [(2, 8), (6, 12)])
def test_more_reward_models(extra: int, calls: int) -> None:
    graph = ppo_graph(extra_rewards=extra)
    assert len(graph.calls) == calls
    for number in range(2, 2 + extra):
        call = graph.call(f"rew{number}_inf")
        assert (call.model, call.outputs) == (f"reward{number}", (f"rewards{number}",))
        assert [parent.name for parent in graph.parents(call)] == ["actor_gen"]
        assert call in graph.parents(graph.call("actor_train"))
        assert call in graph.parents(graph.call("critic_train"))
        assert (graph.key(f"rewards{number}").per, graph.key(f"rewards{number}").dtype) == (
            Per.SEQUENCE,
            "float32",
        )
        assert not graph.trained(f"reward{number}")


GROUPS = {
    ("actor_gen", "rew_inf"),
    ("actor_gen", "ref_inf"),
    ("actor_gen", "actor_train"),
    ("rew_inf", "actor_train"),
    ("ref_inf", "actor_train"),
}
EDGES = {
    "grpo": GROUPS,
    "rloo": GROUPS,
    "reinforce_pp": GROUPS,
    "remax": {
        ("actor_gen", "rew_inf"),
        ("greedy_gen", "greedy_rew_inf"),
        ("actor_gen", "actor_train"),
        ("rew_inf", "actor_train"),
        ("greedy_rew_inf", "actor_train"),
    },
    "dpo": {("ref_inf", "actor_train")},
    "sft": set(),
    "reward": set(),
}
CALLS = {
    "grpo": "actor_gen rew_inf ref_inf actor_train",
    "rloo": "actor_gen rew_inf ref_inf actor_train",
    "reinforce_pp": "actor_gen rew_inf ref_inf actor_train",
    "remax": "greedy_gen actor_gen rew_inf greedy_rew_inf actor_train",
    "dpo": "ref_inf actor_train",
    "sft": "actor_train",
    "reward": "reward_train",
}


@pytest.mark.parametrize("name", sorted(EDGES))
def test_calls_and_edges_of_the_others(name: str) -> None:
    graph = graph_of(name)
    assert graph.name == name
    assert " ".join(call.name for call in graph.calls) == CALLS[name]
    assert {(parent.name, call.name) for call in graph.calls for parent in graph.parents(call)} == EDGES[name]
    assert graph.ordered() == graph.calls
    trained = {call.model for call in graph.calls if call.trains}
    assert trained == ({"reward"} if name == "reward" else {"actor"})


def test_group_advantages_need_every_reward() -> None:
    scopes = {entry.key: entry.scope for entry in grpo_graph().call("actor_train").inputs}
    assert scopes == {
        "tokens": Scope.SHARD,
        "logprobs": Scope.SHARD,
        "ref_logprobs": Scope.SHARD,
        "rewards": Scope.FULL,
    }


@pytest.mark.parametrize("make", [rloo_graph, reinforce_pp_graph, remax_graph])
def test_a_penalty_in_the_reward_needs_the_policy_of_every_sequence(make: Callable[..., Graph]) -> None:
    def scopes(*, reference: bool) -> dict[str, Scope]:
        inputs = make("function", reference=reference).call("actor_train").inputs
        return {entry.key: entry.scope for entry in inputs if "rewards" not in entry.key}

    assert scopes(reference=True) == {
        "tokens": Scope.SHARD,
        "logprobs": Scope.FULL,
        "ref_logprobs": Scope.FULL,
    }
    assert scopes(reference=False) == {"tokens": Scope.SHARD, "logprobs": Scope.SHARD}


@pytest.mark.parametrize("make", [grpo_graph, rloo_graph, reinforce_pp_graph, remax_graph])
def test_rewards_and_reference_of_the_others(make: Callable[..., Graph]) -> None:
    function = make("function", reference=False)
    assert function.models == ("actor",)
    assert all(call.model is None for call in function.calls if "rew" in call.name)
    assert make("model", reference=True).models == ("actor", "reward", "ref")
    with pytest.raises(PlanError, match="'rule'"):
        make("rule")


def test_by_name() -> None:
    assert graph_of("ppo", reward="function", reference=False) == ppo_graph("function", reference=False)
    assert graph_of("grpo", clip_ratio=0.1) == grpo_graph(), "an option of the training alone"
    with pytest.raises(ConfigError, match=r"algorithm: found 'dapo'; expected one of ppo, grpo, rloo, "):
        graph_of("dapo")
    with pytest.raises(ConfigError, match=r"algorithm grpo: found the options critic; .* reward, reference"):
        graph_of("grpo", critic=True)
    with pytest.raises(
        ConfigError, match="algorithm sft: found the options reference; expected some of num_"
    ):
        graph_of("sft", reference=True)
