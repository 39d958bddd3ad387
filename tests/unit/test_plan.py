"""plan.json: reading, writing, and every way in which it can be wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import CopyKey, Plan
from tests.property.strategies import graphs, plans

GRAPH = Graph(
    name="small",
    calls=(
        Call(name="gen", model="actor", type=CallType.GENERATE, outputs=("tokens",)),
        Call(
            name="score",
            model=None,
            type=CallType.INFERENCE,
            inputs=(Input(key="tokens"),),
            outputs=("rewards",),
        ),
        Call(
            name="train",
            model="actor",
            type=CallType.TRAIN,
            inputs=(Input(key="tokens"), Input(key="rewards")),
        ),
    ),
    keys=(
        KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
        KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"),
    ),
)
GOOD: dict[str, Any] = {
    "version": 1,
    "algorithm": "small",
    "cluster": {"devices_per_node": 4},
    "calls": {
        "gen": {"ranks": [0, 4], "layout": {"dp": 2, "tp": 2}},
        "score": {"ranks": [2, 4], "layout": {"dp": 2}},
        "train": {"ranks": [0, 4], "layout": {"tp": 2, "pp": 2}, "num_microbatches": 4},
    },
}
SHAPE = ModelShape(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    padded_vocab_size=128,
)


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    raw = copy.deepcopy(GOOD)
    change(raw)
    return json.dumps(raw)


@settings(deadline=None)
@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph, data.draw(st.sampled_from([1, 2, 4, 8]))))
    again = Plan.loads(plan.dumps())
    assert again == plan
    again.check(graph)
    assert again.dumps() == plan.dumps()


def test_a_written_plan_is_short(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = Plan.loads(json.dumps(GOOD))
    plan.dump(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text()) == GOOD, "defaults are left out"


def test_placements_that_are_equal_share_a_copy() -> None:
    plan = Plan.loads(changed(lambda raw: raw["calls"]["gen"].update(layout={"tp": 2, "pp": 2})))
    gen, score, train = GRAPH.calls
    assert plan.copy_of(gen) == plan.copy_of(train)
    assert plan.copy_of(gen) == CopyKey(model="actor", mesh=Mesh(0, 4), layout=Layout(tp=2, pp=2))
    assert str(plan.copy_of(gen)) == "actor:d1t2p2@0-3"
    assert plan.copy_of(score) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(colour="red"), "colour: found an unknown key"),
        (lambda raw: raw["calls"]["gen"].update(tp=2), "calls.gen.tp: found an unknown key"),
        (
            lambda raw: raw["calls"]["gen"]["layout"].update(tpp=2),
            "calls.gen.layout.tpp: found an unknown key",
        ),
        (lambda raw: raw.pop("algorithm"), "algorithm: found nothing; expected a value: the key is required"),
        (lambda raw: raw["calls"]["gen"].pop("ranks"), "calls.gen.ranks: found nothing"),
        (lambda raw: raw["calls"]["gen"].update(ranks=[0]), "calls.gen.ranks.1: found nothing"),
        (
            lambda raw: raw["calls"]["gen"]["layout"].update(tp="2"),
            "calls.gen.layout.tp: found '2'; expected a number",
        ),
        (lambda raw: raw["calls"]["gen"]["layout"].update(tp=0), "calls.gen.layout.tp: found 0"),
        (lambda raw: raw.update(version=2), "version: found 2"),
        (
            lambda raw: raw["calls"]["gen"].update(ranks=[2, 2]),
            r"calls.gen.ranks: found \[2, 2\]; expected start < stop",
        ),
        (
            lambda raw: raw["calls"]["gen"].update(ranks=[2, 6]),
            r"calls.gen.ranks: found \[2, 6\]; expected a window inside the cluster's 4 ranks",
        ),
        (
            lambda raw: raw["calls"]["gen"]["layout"].update(dp=1),
            r"calls.gen.layout: found dp\*tp\*pp\*cp = 1\*2\*1\*1 = 2 ranks; expected 4, the size of the window",
        ),
        (
            lambda raw: raw["calls"]["gen"]["layout"].update(vpp=2),
            "calls.gen.layout: found .*; expected layout: found vpp=2 with pp=1",
        ),
    ],
)
def test_a_wrong_plan_is_refused_when_it_is_read(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Plan.loads(changed(change), source="my.json")
    assert str(caught.value).startswith("my.json: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(algorithm="ppo"), "algorithm: found 'ppo'; expected 'small'"),
        (
            lambda raw: raw["calls"].pop("train"),
            "calls.train: found no placement; expected one for each call of small",
        ),
        (
            lambda raw: raw["calls"].update(other={"ranks": [0, 1]}),
            "calls.other: found a call that the algorithm does not have; expected one of .'gen', 'score', 'train'.",
        ),
        (
            lambda raw: raw["calls"]["gen"].update(layout={"pp": 4, "vpp": 2}),
            "calls.gen.layout.vpp: found vpp=2 in a call of type generate",
        ),
        (
            lambda raw: raw["calls"]["gen"].update(drop_trained_weights=True),
            "calls.gen.drop_trained_weights: found true in a call of type generate",
        ),
        (
            lambda raw: raw["calls"]["score"].update(layout={"tp": 2}),
            "calls.score.layout: found d1t2p1; expected d2t1p1: a function has no weights to split",
        ),
        (
            lambda raw: raw["calls"]["train"].update(offload="node"),
            "calls.train.offload: found node for a trained model",
        ),
        (
            lambda raw: raw["calls"]["gen"].update(offload="host"),
            "calls.gen.offload: found host in a call of type generate of a trained model; expected none.*in train",
        ),
        (
            lambda raw: raw["calls"]["train"].update(stream=True),
            "calls.train.stream: found true in the call in which actor lives; expected false",
        ),
        (
            lambda raw: raw["calls"]["score"].update(stream=True),
            "calls.score.stream: found true in a function; expected false",
        ),
        (lambda raw: raw.update(order=["gen", "train"]), "order: found .* expected each of"),
        (
            lambda raw: raw.update(order=["score", "gen", "train"]),
            "order: found .*; expected producers before consumers: .'gen', 'score', 'train'.",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_graph_is_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    plan = Plan.loads(changed(change))
    with pytest.raises(PlanError, match=message):
        plan.check(GRAPH)


def test_all_problems_come_in_one_error() -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["algorithm"] = "ppo"
        del raw["calls"]["train"]
        raw["calls"]["score"]["layout"] = {"tp": 2}

    with pytest.raises(PlanError) as caught:
        Plan.loads(changed(change)).check(GRAPH, {"actor": SHAPE})
    text = str(caught.value)
    assert "plan.json: 3 problems" in text
    for path in ("algorithm:", "calls.train:", "calls.score.layout:"):
        assert f"  - {path}" in text


def test_a_broken_window_does_not_hide_other_problems() -> None:
    plan = Plan.loads(json.dumps(GOOD))
    calls = {**plan.calls, "score": plan.calls["score"].model_copy(update={"ranks": (3, 3)})}
    broken = plan.model_copy(update={"calls": calls, "algorithm": "ppo"})
    with pytest.raises(PlanError, match="2 problems"):
        broken.check(GRAPH)


def test_layouts_are_checked_against_the_model() -> None:
    plan = Plan.loads(changed(lambda raw: raw["calls"].update(gen={"ranks": [0, 3], "layout": {"pp": 3}})))
    with pytest.raises(PlanError, match="4 layers do not divide over"):
        plan.check(GRAPH, {"actor": SHAPE})
    plan = Plan.loads(changed(lambda raw: raw["calls"].update(gen={"ranks": [0, 3], "layout": {"tp": 3}})))
    with pytest.raises(PlanError, match="a divisor of num_attention_heads=4: 1, 2, 4"):
        plan.check(GRAPH, {"actor": SHAPE})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.json: cannot be read .No such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{\n "version": 1,,')
    with pytest.raises(PlanError, match=r"bad.json: line 2, column 15: not JSON"):
        Plan.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(PlanError, match=r"list.json: .top level.: found"):
        Plan.load(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"binary.json: byte 0 is not UTF-8"):
        Plan.load(tmp_path / "binary.json")


def test_unknown_predictions_are_kept() -> None:
    text = changed(lambda raw: raw.update(predicted={"iteration_s": 1.5, "profile_hash": "abc"}))
    plan = Plan.loads(text)
    assert plan.predicted is not None
    assert plan.predicted.iteration_s == 1.5
    assert json.loads(plan.dumps())["predicted"] == {"iteration_s": 1.5, "profile_hash": "abc"}


def test_a_plan_that_is_written_again_is_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.loads(json.dumps(GOOD))
    path = tmp_path / "plan.json"
    plan.dump(path)
    write = Path.write_text

    def half(self: Path, text: str) -> int:
        write(self, text[: len(text) // 2])
        assert Plan.load(path) == plan, "as another rank reads it meanwhile"
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", half)
    plan.dump(path)
    assert Plan.load(path) == plan
    assert list(tmp_path.iterdir()) == [path]
