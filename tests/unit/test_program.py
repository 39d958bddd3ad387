"""Programs of small plans, written out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per
from megatron_real.errors import PlanError
from megatron_real.plan import Plan
from megatron_real.program import Offload, Program, Realloc, Reload, Run, Side, compile_program

TOKENS = (Input(key="tokens"),)
GRAPH = Graph(
    name="g",
    calls=(
        Call(name="gen", model="actor", type=CallType.GENERATE, outputs=("tokens",)),
        Call(name="ref", model="ref", type=CallType.INFERENCE, inputs=TOKENS, outputs=("ref_logprobs",)),
        Call(name="train", model="actor", type=CallType.TRAIN, inputs=(*TOKENS, Input(key="ref_logprobs"))),
    ),
    keys=(
        KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
        KeySpec(name="ref_logprobs", per=Per.RESPONSE, dtype="float32"),
    ),
)


def compiled(graph: Graph = GRAPH, devices: int = 4, order: list[str] | None = None, **calls: Any) -> Program:
    raw = {"algorithm": graph.name, "cluster": {"devices_per_node": devices}, "calls": calls}
    if order is not None:
        raw["order"] = order
    return compile_program(graph, Plan.loads(json.dumps(raw)))


def names(program: Program) -> list[str]:
    return [instruction.name for instruction in program.instructions]


def test_one_rank() -> None:
    program = compiled(devices=1, **{call: {"ranks": [0, 1]} for call in ("gen", "ref", "train")})
    assert names(program) == [
        "run:gen",
        "transfer:gen>ref",
        "transfer:gen>train",
        "run:ref",
        "transfer:ref>train",
        "run:train",
        "save",
    ]
    assert program.world_size == 1
    runs = [instruction for instruction in program.instructions if isinstance(instruction, Run)]
    assert [run.release for run in runs] == [False, False, False]
    assert [run.version_offset for run in runs] == [0, 0, 0]


def test_disjoint_meshes() -> None:
    """Generation on all, reference on 2-3, training on 0-1."""
    program = compiled(
        gen={"ranks": [0, 4], "layout": {"dp": 4}},
        ref={"ranks": [2, 4], "layout": {"pp": 2}},
        train={"ranks": [0, 2], "layout": {"tp": 2}},
    )
    assert names(program) == [
        "realloc:gen",
        "run:gen",
        "transfer:gen>ref",
        "transfer:gen>train",
        "run:ref",
        "transfer:ref>train",
        "run:train",
        "save",
    ]
    realloc, run = program.instructions[:2]
    assert isinstance(realloc, Realloc)
    assert (str(realloc.source), str(realloc.target)) == ("actor:d1t2p1@0-1", "actor:d4t1p1@0-3")
    assert realloc.ranks == (0, 1, 2, 3)
    assert isinstance(run, Run)
    assert run.release
    assert str(program.home("actor")) == "actor:d1t2p1@0-1"
    assert [str(copy) for copy in program.copies()] == [
        "actor:d1t2p1@0-1",
        "actor:d4t1p1@0-3",
        "ref:d1t1p2@2-3",
    ]
    walked = [(step.index, step.name, str(step.side)) for step in program.steps(0)]
    assert walked == [
        (0, "realloc:gen", "whole"),
        (1, "run:gen", "whole"),
        (2, "transfer:gen>ref", "send"),
        (3, "transfer:gen>train", "send"),
        (3, "transfer:gen>train", "receive"),
        (5, "transfer:ref>train", "receive"),
        (6, "run:train", "whole"),
        (7, "save", "whole"),
    ]
    assert [step.name for step in program.steps(3) if step.side is Side.RECEIVE] == ["transfer:gen>ref"]


def test_an_evaluation_runs_some_calls_on_the_same_copies() -> None:
    plan = {
        "gen": {"ranks": [0, 4], "layout": {"dp": 4}},
        "ref": {"ranks": [2, 4], "layout": {"pp": 2}, "offload": "host"},
        "train": {"ranks": [0, 2], "layout": {"tp": 2}, "drop_trained_weights": True, "offload": "host"},
    }
    whole = compiled(**plan)
    program = compile_program(GRAPH, whole.plan, evaluation=("ref", "gen"))
    assert names(program) == [
        "realloc:gen",
        "run:gen",
        "transfer:gen>ref",
        "reload:ref",
        "run:ref",
        "offload:ref",
    ]
    assert (program.home("actor"), program.home("ref")) == (whole.home("actor"), whole.home("ref"))
    assert [call.name for call in program.graph.ordered(program.plan.order)] == ["gen", "ref"]
    # Of a training the loss alone: its weights stay, and nothing of its optimizer is needed.
    program = compile_program(GRAPH, whole.plan, evaluation=("gen", "ref", "train"))
    assert names(program)[-2:] == ["transfer:ref>train", "run:train"]
    run = program.instructions[-1]
    assert isinstance(run, Run)
    assert (run.version_offset, run.release) == (0, False)
    with pytest.raises(PlanError, match="'tokens'; expected a key that some call produces"):
        compile_program(GRAPH, whole.plan, evaluation=("ref",))


def test_ranks_outside_the_generation_get_its_lengths() -> None:
    program = compiled(gen={"ranks": [0, 1]}, ref={"ranks": [1, 2]}, train={"ranks": [0, 1]}, devices=2)
    assert names(program)[:2] == ["run:gen", "transfer:gen>lengths"]
    assert program.instructions[1].ranks == (0, 1)
    assert [step.name for step in program.steps(1)][:3] == [
        "transfer:gen>lengths",
        "transfer:gen>ref",
        "run:ref",
    ]


def test_a_copy_that_serves_two_calls_is_filled_once() -> None:
    graph = Graph(
        name="two",
        calls=(
            *GRAPH.calls[:2],
            Call(name="again", model="actor", type=CallType.INFERENCE, inputs=TOKENS, outputs=("x",)),
            GRAPH.calls[2],
            Call(name="after", model="actor", type=CallType.INFERENCE, inputs=TOKENS, outputs=("y",)),
        ),
        keys=(*GRAPH.keys, *(KeySpec(name=key, per=Per.RESPONSE, dtype="float32") for key in "xy")),
    )
    wide = {"ranks": [0, 4], "layout": {"dp": 4}}
    program = compiled(
        graph,
        gen=wide,
        again=wide,
        after=wide,
        ref={"ranks": [0, 1]},
        train={"ranks": [0, 2], "layout": {"tp": 2}},
    )
    reallocs = [i.name for i in program.instructions if isinstance(i, Realloc)]
    assert reallocs == ["realloc:gen", "realloc:after"]
    runs = {i.call: i for i in program.instructions if isinstance(i, Run)}
    assert {name: run.release for name, run in runs.items()} == {
        "gen": False,
        "ref": False,
        "again": True,
        "train": False,
        "after": True,
    }
    assert {name: run.version_offset for name, run in runs.items()} == {
        "gen": 0,
        "ref": 0,
        "again": 0,
        "train": 0,
        "after": 1,
    }


def test_dropped_weights_and_host_offload() -> None:
    program = compiled(
        gen={"ranks": [0, 4], "layout": {"dp": 4}},
        ref={"ranks": [2, 4], "layout": {"pp": 2}, "offload": "host"},
        train={"ranks": [0, 2], "layout": {"tp": 2}, "drop_trained_weights": True},
    )
    assert [name for name in names(program) if not name.startswith("transfer")] == [
        "realloc:gen",
        "offload:actor",
        "run:gen",
        "reload:ref",
        "run:ref",
        "offload:ref",
        "reload:actor",
        "run:train",
        "save",
    ]
    offloads = [i for i in program.instructions if isinstance(i, Offload)]
    assert [offload.to for offload in offloads] == ["main_params", "host"]
    reload = next(i for i in program.instructions if isinstance(i, Reload))
    assert reload.ranks == (2, 3)


def _moves(program: Program) -> list[str]:
    return [name for name in names(program) if not name.startswith("transfer")]


def test_a_streamed_realloc_holds_its_source_until_the_call_has_ended() -> None:
    program = compiled(
        gen={"ranks": [0, 2], "layout": {"dp": 2}, "stream": True},
        ref={"ranks": [2, 4], "layout": {"pp": 2}},
        train={"ranks": [1, 3], "layout": {"tp": 2}, "drop_trained_weights": True},
    )
    assert _moves(program) == [
        "realloc:gen",
        "run:gen",
        "offload:actor",
        "run:ref",
        "reload:actor",
        "run:train",
        "save",
    ]
    realloc = program.instructions[0]
    assert isinstance(realloc, Realloc)
    assert realloc.stream
    # Rank 2 only sends: it goes on to the first instruction that needs the weights as they are, or frees them.
    finishes = {step.name: step.finish for step in program.steps(2) if step.finish}
    assert finishes == {"offload:actor": (realloc,)}
    assert not any(step.finish for rank in (0, 1) for step in program.steps(rank)), "the call waits itself"


def test_a_model_in_the_nodes_stores_has_no_realloc() -> None:
    graph = Graph(
        name="twice",
        calls=(
            *GRAPH.calls[:2],
            Call(name="again", model="ref", type=CallType.INFERENCE, inputs=TOKENS, outputs=("x",)),
            GRAPH.calls[2],
        ),
        keys=(*GRAPH.keys, KeySpec(name="x", per=Per.RESPONSE, dtype="float32")),
    )
    one = {"ranks": [0, 4], "layout": {"dp": 4}}
    stored, narrow = {**one, "offload": "node"}, {"ranks": [2, 4], "layout": {"tp": 2}}
    apart = compiled(graph, gen=one, train=one, ref=stored, again=narrow)
    assert _moves(apart) == [
        "run:gen",
        "reload:ref",
        "run:ref",
        "reload:ref",
        "run:again",
        "run:train",
        "save",
    ]
    reloads = [i for i in apart.instructions if isinstance(i, Reload)]
    assert [(str(i.copy), i.source) for i in reloads] == [
        ("ref:d4t1p1@0-3", "node"),
        ("ref:d1t2p1@2-3", "node"),
    ]
    assert [i.release for i in apart.instructions if isinstance(i, Run)] == [False, True, True, False]
    together = compiled(graph, gen=one, train=one, ref=stored, again=one)
    assert _moves(together).count("reload:ref") == 1, "the copy of the first call serves the second"
    assert [i.release for i in together.instructions if isinstance(i, Run)] == [False, False, True, False]


def test_optimizer_state_comes_back_before_the_weights_that_are_made_of_it() -> None:
    program = compiled(
        gen={"ranks": [0, 4], "layout": {"dp": 4}},
        ref={"ranks": [2, 4], "layout": {"pp": 2}},
        train={
            "ranks": [0, 2],
            "layout": {"tp": 2},
            "drop_trained_weights": True,
            "offload": "host",
        },
    )
    assert _moves(program) == [
        "realloc:gen",
        "offload:actor",
        "run:gen",
        "run:ref",
        "reload:actor.state",
        "reload:actor",
        "run:train",
        "offload:actor.state",
        "save",
    ]


def test_the_order_of_a_plan_is_kept() -> None:
    graph = Graph(
        name="pair",
        calls=(
            GRAPH.calls[0],
            *(
                Call(name=name, model=name, type=CallType.INFERENCE, inputs=TOKENS, outputs=(f"{name}_out",))
                for name in ("one", "two")
            ),
        ),
        keys=(
            GRAPH.keys[0],
            *(KeySpec(name=f"{name}_out", per=Per.RESPONSE, dtype="float32") for name in ("one", "two")),
        ),
    )
    calls = {call: {"ranks": [0, 1]} for call in ("gen", "one", "two")}
    runs = [
        name for name in names(compiled(graph, 1, ["gen", "two", "one"], **calls)) if name.startswith("run")
    ]
    assert runs == ["run:gen", "run:two", "run:one"]


def test_a_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(PlanError, match=r"calls.train: found no placement"):
        compiled(gen={"ranks": [0, 1]}, ref={"ranks": [0, 1]})
