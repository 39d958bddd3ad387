"""What the runtime can execute: all built-in algorithms, and where a graph of one's own goes too far."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_real.algorithms.graphs import dpo_graph, graph_of, remax_graph
from megatron_real.algorithms.registry import ALGORITHMS
from megatron_real.capabilities import capability_problems, graph_problems
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.presets import symmetric


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_executable(name: str) -> None:
    assert not list(graph_problems(graph_of(name)))
    if "reward" in ALGORITHMS[name].graph_parameters:
        assert not list(graph_problems(graph_of(name, reward="function")))


def changed(graph: Graph, name: str, **changes: object) -> Graph:
    """The graph with another call of this name."""
    calls = tuple(replace(call, **changes) if call.name == name else call for call in graph.calls)  # type: ignore[arg-type]
    return replace(graph, calls=calls)


def with_keys(graph: Graph, *keys: KeySpec) -> Graph:
    return replace(graph, keys=(*graph.keys, *keys))


SECOND = KeySpec(name="second", per=Per.SEQUENCE, dtype="float32")
TEXT = KeySpec(name="text", per=Per.TOKEN, dtype="int64", sequences="greedy")
REMAX = remax_graph()


@pytest.mark.parametrize(
    ("graph", "path", "expected"),
    [
        (changed(REMAX, "greedy_gen", model=None), "calls.greedy_gen.model", "a model"),
        (
            changed(REMAX, "greedy_gen", inputs=(Input(key="rewards", scope=Scope.FULL),)),
            "calls.greedy_gen.inputs",
            "none: responses are generated to the prompts of the data set",
        ),
        (
            changed(with_keys(REMAX, TEXT), "greedy_gen", outputs=("greedy_tokens", "text")),
            "calls.greedy_gen.outputs",
            "its tokens, and at most one key beside them",
        ),
        (
            changed(with_keys(REMAX, SECOND), "rew_inf", outputs=("rewards", "second")),
            "calls.rew_inf.outputs",
            "exactly one key, a number per response token or sequence",
        ),
        (
            changed(with_keys(REMAX, TEXT), "greedy_rew_inf", outputs=("greedy_rewards", "text")),
            "calls.greedy_rew_inf.outputs",
            "exactly one key",
        ),
        (
            changed(with_keys(dpo_graph(), SECOND), "actor_train", outputs=("second",)),
            "calls.actor_train.outputs",
            "none of a training",
        ),
        (
            changed(REMAX, "greedy_rew_inf", inputs=()),
            "calls.greedy_rew_inf.inputs",
            "those that greedy_gen generates, with scope shard",
        ),
    ],
)
def test_what_cannot_be_executed_is_named(graph: Graph, path: str, expected: str) -> None:
    (problem,) = graph_problems(graph)
    assert problem.path == path
    assert expected in problem.expected
    plan = symmetric(graph, ClusterSpec(devices_per_node=2))
    assert problem in list(capability_problems(graph, plan)), "a run is refused for it too"


def test_a_function_makes_one_number_per_sequence() -> None:
    graph = changed(graph_of("grpo", reward="function"), "ref_inf", model=None)
    (problem,) = graph_problems(graph)
    assert (problem.path, problem.found) == ("calls.ref_inf.outputs", "ref_logprobs")
    assert "a number per sequence" in problem.expected


def test_data_sets_bring_their_own_tokens() -> None:
    """Without a generation no call need take tokens from another one."""
    look = Call(name="look", model="actor", type=CallType.INFERENCE, outputs=("second",))
    graph = Graph(name="look", calls=(look,), keys=(SECOND,))
    assert not list(graph_problems(graph))
