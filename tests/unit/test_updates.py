"""Models that move toward trained ones: what a graph refuses, where an update stands, which versions there are."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megatron_real.algorithms.graphs import graph_of
from megatron_real.algorithms.registry import ALGORITHMS
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Update
from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan import Plan
from megatron_real.program import Mix, Program, Realloc, compile_program

TOKENS = (Input(key="tokens"),)
GRAPH = Graph(
    name="g",
    calls=(
        Call(name="gen", model="actor", type=CallType.GENERATE, outputs=("tokens",)),
        Call(name="ref", model="ref", type=CallType.INFERENCE, inputs=TOKENS, outputs=("ref_logprobs",)),
        Call(name="train", model="actor", type=CallType.TRAIN, inputs=(*TOKENS, Input(key="ref_logprobs"))),
        Call(name="other", model="critic", type=CallType.TRAIN, inputs=TOKENS),
    ),
    keys=(
        KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
        KeySpec(name="ref_logprobs", per=Per.RESPONSE, dtype="float32"),
    ),
    updates=(Update(target="ref", source="actor", mix=0.25, every=3),),
)


def compiled(**placements: dict[str, Any]) -> Program:
    calls = {call.name: {"ranks": [0, 1]} | placements.get(call.name, {}) for call in GRAPH.calls}
    plan = {"algorithm": "g", "cluster": {"devices_per_node": 4}, "calls": calls}
    return compile_program(GRAPH, Plan.loads(json.dumps(plan)))


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (
            {"target": "critic"},
            r"updates.critic: found the target 'critic'; expected a model with calls, none of them a",
        ),
        ({"target": "reward"}, r"updates.reward: found the target 'reward'"),
        ({"source": "ref"}, r"updates.ref: found the source 'ref'; expected a trained model"),
        ({"mix": 0.0}, r"updates.ref.mix: found 0.0; expected more than 0 and at most 1"),
        ({"mix": 1.1}, r"updates.ref.mix: found 1.1"),
        ({"every": 0}, r"updates.ref.every: found 0; expected at least 1"),
    ],
)
def test_updates_that_cannot_be_are_refused(update: dict[str, Any], text: str) -> None:
    (former,) = GRAPH.updates
    with pytest.raises(PlanError, match=text):
        dataclasses.replace(GRAPH, updates=(dataclasses.replace(former, **update),))


def test_a_model_has_one_update() -> None:
    with pytest.raises(
        PlanError, match=r"updates.ref: found a second update; expected one update of each model"
    ):
        dataclasses.replace(GRAPH, updates=GRAPH.updates * 2)


def test_versions() -> None:
    """The reference of updates after iterations 2, 5, ... has the version of the last of them."""
    assert [GRAPH.version("ref", iteration) for iteration in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert [GRAPH.version("actor", iteration) for iteration in range(4)] == [0, 1, 2, 3]
    still = dataclasses.replace(GRAPH, updates=())
    assert [still.version("ref", iteration) for iteration in range(4)] == [0, 0, 0, 0]
    assert [graph.changes("ref") for graph in (GRAPH, still)] == [True, False]


def test_an_update_is_the_last_of_an_iteration() -> None:
    program = compiled(
        train={"ranks": [0, 2], "layout": {"tp": 2}},
        ref={"ranks": [2, 4], "layout": {"pp": 2}},
        other={"ranks": [3, 4]},
    )
    assert [instruction.name for instruction in program.instructions[-4:]] == [
        "run:train",
        "run:other",
        "mix:ref",
        "save",
    ]
    mix = program.instructions[-2]
    assert isinstance(mix, Mix)
    assert (str(mix.source), str(mix.target)) == ("actor:d1t2p1@0-1", "ref:d1t1p2@2-3")
    assert mix.ranks == (0, 1, 2, 3)
    assert not mix.from_host
    assert [step.name for step in program.steps(3)][-3:] == ["run:other", "mix:ref", "save"]


def test_what_rests_on_the_host_comes_for_the_update() -> None:
    program = compiled(ref={"offload": "host"})
    names = [instruction.name for instruction in program.instructions]
    assert names[names.index("reload:ref") :] == [
        "reload:ref",
        "run:ref",
        "offload:ref",
        "transfer:ref>train",
        "run:train",
        "run:other",
        "mix:ref",
        "save",
    ]
    mix = program.instructions[-2]
    assert isinstance(mix, Mix)
    assert mix.from_host


def test_a_stream_from_the_target_has_been_sent_before_it_changes() -> None:
    calls = (
        *GRAPH.calls[:2],
        dataclasses.replace(GRAPH.calls[1], name="again", outputs=()),
        *GRAPH.calls[2:],
    )
    graph = dataclasses.replace(GRAPH, calls=calls)
    ranks = {"ref": [0, 1], "again": [1, 2], "gen": [2, 3], "train": [2, 3], "other": [3, 4]}
    placements: dict[str, Any] = {name: {"ranks": window} for name, window in ranks.items()}
    placements["again"]["stream"] = True
    plan = {"algorithm": "g", "cluster": {"devices_per_node": 4}, "calls": placements}
    program = compile_program(graph, Plan.loads(json.dumps(plan)))
    last = next(step for step in program.steps(0) if step.name == "mix:ref")
    (realloc,) = (one for one in program.instructions if isinstance(one, Realloc))
    assert last.finish == (realloc,)


def test_a_host_store_does_not_move() -> None:
    with pytest.raises(
        PlanError,
        match=r"calls.ref.offload: found node for ref, which is moved toward a trained model; expected none or",
    ):
        compiled(ref={"offload": "node"})


def with_reference() -> list[str]:
    return [name for name, one in ALGORITHMS.items() if hasattr(one.config(), "reference_ema")]


def test_algorithms_with_a_reference_can_move_it() -> None:
    assert with_reference() == ["ppo", "grpo", "rloo", "reinforce_pp", "remax", "dpo"]


@pytest.mark.parametrize("name", with_reference())
def test_the_option_is_an_update_of_the_graph(name: str) -> None:
    definition = ALGORITHMS[name]
    reference = {"reference": True} if hasattr(definition.config(), "reference") else {}
    config = definition.config(**reference, reference_ema=0.1, reference_ema_every=4)
    graph = definition.graph_for(config)
    assert graph.updates == (Update(target="ref", source="actor", mix=0.1, every=4),)
    assert definition.graph_for(definition.config(**reference)).updates == ()
    for share in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=r"reference_ema: found -?\d.1"):
            definition.config(**reference, reference_ema=share)


def test_there_must_be_a_reference_to_move() -> None:
    with pytest.raises(
        ConfigError, match=r"reference_ema: found 0.5; expected 0, since there is no reference model"
    ):
        ALGORITHMS["grpo"].config(reference=False, kl_coefficient=0.0, reference_ema=0.5)
    with pytest.raises(PlanError, match=r"found reference_ema=0.5 without a reference"):
        graph_of("grpo", reference=False, reference_ema=0.5)
