"""Graphs of calls: edges, order, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_real.dataflow import Call, CallType, DataKind, Graph, Input, KeySpec, Per
from megatron_real.errors import PlanError


def call(name: str, model: str | None, kind: str, inputs: str = "", outputs: str = "") -> Call:
    return Call(
        name=name,
        model=model,
        type=CallType(kind),
        inputs=tuple(Input(key=key) for key in inputs.split()),
        outputs=tuple(outputs.split()),
    )


def graph(*calls: Call, keys: str = "a b c") -> Graph:
    specs = tuple(KeySpec(name=key, per=Per.TOKEN, dtype="int64") for key in keys.split())
    return Graph(name="g", calls=calls, keys=specs)


def test_edges_follow_from_keys() -> None:
    g = graph(
        call("gen", "actor", "generate", "", "a"),
        call("ref", "ref", "inference", "a", "b"),
        call("train", "actor", "train", "b a"),
    )
    assert [c.name for c in g.parents(g.call("train"))] == ["gen", "ref"]
    assert g.producer("b").name == "ref"
    assert g.models == ("actor", "ref")
    assert g.trained("actor")
    assert not g.trained("ref")
    assert g.home_call("actor").name == "train"
    assert g.home_call("ref").name == "ref"
    assert [c.name for c in g.calls_of("actor")] == ["gen", "train"]
    with pytest.raises(PlanError, match=r"no call 'x'; it has .'gen', 'ref', 'train'."):
        g.call("x")


def test_the_data_are_what_is_not_generated() -> None:
    generated = graph(call("gen", "actor", "generate", "", "a"), call("train", "actor", "train", "a"))
    given = graph(call("train", "actor", "train"))
    mixed = replace(
        generated, calls=(*generated.calls, replace(call("look", "ref", "inference"), sequences="given"))
    )
    assert generated.data is DataKind.PROMPTS
    assert given.data is mixed.data is DataKind.ANSWERS
    pairs = replace(given, pairs=True)
    assert pairs.data is DataKind.PAIRS
    assert [kind.unit for kind in (generated.data, given.data, pairs.data)] == [1, 1, 2]
    with pytest.raises(
        PlanError, match="graph g: pairs: found true; expected false: all answers are generated"
    ):
        replace(generated, pairs=True)


def test_models_with_a_scalar_head() -> None:
    specs = (
        KeySpec(name="scores", per=Per.SEQUENCE, dtype="float32"),
        KeySpec(name="values", per=Per.RESPONSE, dtype="float32"),
    )
    calls = (
        call("judge", "judge", "inference", "", "scores"),
        call("value", "critic", "inference", "", "values"),
        call("train", "actor", "train", "scores values"),
    )
    told = Graph(name="g", calls=calls, keys=specs, scalar_heads=("critic",))
    assert [model for model in told.models if told.has_scalar_head(model)] == ["judge", "critic"]
    assert not replace(told, scalar_heads=()).has_scalar_head("critic")
    assert told.only(("judge",)).scalar_heads == ()
    with pytest.raises(
        PlanError, match=r"scalar_heads: found 'critc'; expected some of the models \['judge', "
    ):
        replace(told, scalar_heads=("critc",))


def test_the_order_keeps_producers_first_and_else_the_wish() -> None:
    g = graph(
        call("gen", "actor", "generate", "", "a"),
        call("one", "m", "inference", "a", "b"),
        call("two", "n", "inference", "a", "c"),
        call("train", "actor", "train", "b"),
    )
    assert [c.name for c in g.ordered()] == ["gen", "one", "two", "train"]
    assert [c.name for c in g.ordered(("two", "train", "one", "gen"))] == ["gen", "two", "one", "train"]
    with pytest.raises(PlanError, match="expected each of"):
        g.ordered(("gen", "one", "two"))


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([call("x", "m", "generate"), call("x", "m", "generate")], "calls.x: found two calls of this name"),
        ([call("x", "m", "inference", "z")], "calls.x: found key 'z'"),
        (
            [call("x", "m", "inference", "a")],
            "calls.x.inputs: found 'a'; expected a key that some call produces",
        ),
        (
            [call("x", "m", "generate", "", "a"), call("y", "n", "generate", "", "a")],
            "calls.y.outputs: found 'a', which x produces too",
        ),
        ([call("x", "m", "train"), call("y", "m", "train")], "calls.y: found a second train call of m"),
        (
            [call("x", "m", "inference", "b", "a"), call("y", "n", "inference", "a", "b")],
            "calls: found the cycle x -> y; expected a graph without cycles|found the cycle y -> x",
        ),
    ],
)
def test_wrong_graphs_are_refused(calls: list[Call], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        graph(*calls)


def test_all_problems_of_a_graph_come_together() -> None:
    with pytest.raises(PlanError, match="graph g: 3 problems"):
        graph(call("x", "m", "train", "b"), call("y", "m", "train", "c"))
