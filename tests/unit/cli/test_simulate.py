"""`megatron-real simulate`, `explain`, `diff` and `show` on plans that a search wrote, and on plans by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import graph_of, ppo_graph
from megatron_real.algorithms.registry import ALGORITHMS, graph_of_plan
from megatron_real.cli.main import main
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.plan_search.presets import split, symmetric

SMALL = ["workload.batch_size=8", "workload.prompt.mean=16", "workload.response.length=16"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("searched") / "plan.json"
    assert main(["search", "model=tiny", "cluster=cpu2", *SMALL, f"output={path}"]) == 0
    return path


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    path = tmp_path / "hand.json"
    split(ppo_graph(), ClusterSpec(devices_per_node=2)).dump(path)
    return path


def _printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def _error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def _period(text: str) -> str:
    return re.findall(r"^period: (.*) per iteration", text, re.MULTILINE)[0]


def test_a_searched_plan_has_the_estimate_that_it_records(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _printed(["simulate", str(searched)], capsys)
    assert "estimated anew" not in text
    recorded = Plan.load(searched).predicted
    assert recorded is not None
    assert recorded.iteration_s is not None
    value, unit = _period(text).split()
    assert float(value) == pytest.approx(recorded.iteration_s * {"s": 1, "ms": 1e3}[unit], rel=0.01)
    for word in (
        "compute",
        "communication",
        "bubble",
        "optimizer",
        "overhead",
        "transfer",
        "head-room",
        "peak in",
    ):
        assert word in text


def test_other_inputs_are_said_and_priced(
    searched: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pictures = tmp_path / "pictures"
    text = _printed(
        ["simulate", str(searched), "workload.response.length=32", f"pictures={pictures}"], capsys
    )
    assert "estimated anew, for other inputs than the plan was made for" in text
    assert "  workload.response: 16 tokens -> 32 tokens" in text
    assert _period(text) != _period(_printed(["simulate", str(searched)], capsys))
    assert {path.name for path in pictures.iterdir()} == {"timeline.svg", "memory.svg"}
    models = _printed(["simulate", str(searched), "model=tiny", "megatron.num_layers=8"], capsys)
    assert "models.critic.shape.num_layers: 4 -> 8" in models


def test_a_plan_by_hand_needs_a_model(by_hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "model: found nothing; expected the actor's" in _error(["simulate", str(by_hand)], capsys)
    text = _printed(["simulate", str(by_hand), "model=tiny", *SMALL], capsys)
    assert "estimated anew" not in text  # there was no estimate
    assert "executable: yes" in text


def test_a_reward_that_is_a_function_has_the_price_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    symmetric(ppo_graph("function"), ClusterSpec(devices_per_node=2)).dump(path)
    argv = ["simulate", str(path), "model=tiny", *SMALL, "algorithm.reward=function"]
    assert "found no time of its Python function" in _error(argv, capsys)
    assert re.search(r"rew_inf .* 2.00 s", _printed([*argv, "workload.function_s.rew_inf=0.5"], capsys))


def test_explain_lists_neighbours_of_every_call(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(["explain", str(searched), "most=1"], capsys)
    assert "critical path" in text
    for call in ppo_graph().calls:
        assert f"{call.name}: " in text
    assert re.search(r"window .* ranks 0-1 -> 0", text)
    assert re.search(r"\d+ neighbouring plans evaluated", text)
    assert "most: found 0" in _error(["explain", str(searched), "most=0"], capsys)


def test_diff_prices_both_under_the_same_inputs(
    searched: Path, by_hand: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = _printed(["diff", str(searched), str(searched)], capsys)
    assert "decisions: no difference" in same
    assert "change of plan in a run (--real-next-plan): no model moves" in same
    text = _printed(["diff", str(by_hand), str(searched)], capsys)  # the second one records inputs
    assert "decisions" in text
    assert f"both are priced for what {searched} records" in text.replace("\n", "")
    row = next(line for line in text.splitlines() if "period" in line)
    assert _period(_printed(["simulate", str(searched)], capsys)) in row
    other = by_hand.with_name("other.json")
    symmetric(ppo_graph(), ClusterSpec(devices_per_node=4)).dump(other)
    assert "found plans of different devices: 2 and 4" in _error(["diff", str(searched), str(other)], capsys)
    assert "diff: found" in _error(["diff", str(searched)], capsys)


def test_show_says_what_the_plan_records(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(_printed(["show", str(searched)], capsys).split())
    assert "predicted iteration: " in text
    assert "lower bound" in text
    assert "found by exact" in text
    assert "device cpu" in text


def test_the_graph_of_a_plan_is_that_which_its_calls_show() -> None:
    cluster = ClusterSpec(devices_per_node=1)
    by_name = [graph_of(name) for name in ALGORITHMS]
    for graph in (
        *by_name,
        ppo_graph(reference=False),
        ppo_graph(extra_rewards=2),
        graph_of("remax", reference=True),
    ):
        assert graph_of_plan(symmetric(graph, cluster)) == graph
    function = ppo_graph("function")
    assert graph_of_plan(symmetric(function, cluster), {"reward": "function"}) == function
    plan = symmetric(function, cluster)
    recorded = json.loads(plan.dumps()) | {"predicted": {"inputs": {"models": {"actor": {}}}}}
    assert graph_of_plan(Plan.loads(json.dumps(recorded))) == function
    assert graph_of_plan(plan.model_copy(update={"algorithm": "pretrain"})) is None


@pytest.mark.parametrize("command", ["simulate", "explain", "diff"])
def test_bad_input_is_one_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["none.json"] * (2 if command == "diff" else 1)
    assert "none.json: cannot be read" in _error([command, *files], capsys)
    assert f"{command}: found nothing; expected: megatron-real {command}" in _error([command], capsys)
    plan = tmp_path / "pretrain.json"
    plan.write_text(
        '{"algorithm": "pretrain", "cluster": {"devices_per_node": 1}, "calls": {"train": {"ranks": [0, 1]}}}'
    )
    paths = [str(plan)] * len(files)
    assert "found algorithm 'pretrain'; expected one of ppo" in _error(
        [command, *paths, "model=tiny"], capsys
    )
    assert main([command, "--help"]) == 0
    assert "usage: megatron-real" in capsys.readouterr().out
