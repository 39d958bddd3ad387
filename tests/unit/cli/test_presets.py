from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import graph_of
from megatron_real.algorithms.registry import ALGORITHMS
from megatron_real.cli.main import main
from megatron_real.plan import Plan


def test_a_symmetric_plan_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code = main(["plan", "symmetric", "--devices-per-node", "4", "--layout", "d1t2p2", "--output", str(path)])
    assert code == 0
    plan = Plan.load(path)
    assert {str(placement.parallel) for placement in plan.calls.values()} == {"d1t2p2"}
    assert len(plan.calls) == 6


def test_a_split_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "split",
        "--devices-per-node",
        "4",
        "--layout",
        "actor=d1t2p1",
        "--reward",
        "function",
    ]
    assert main([*arguments, "--no-reference"]) == 0
    plan = Plan.loads(capsys.readouterr().out)
    assert str(plan.calls["actor_gen"].parallel) == "d1t2p1"
    assert plan.calls["critic_train"].ranks == (2, 4)
    assert "ref_inf" not in plan.calls


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_preset_plans(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "symmetric", "--devices-per-node", "2", "--algorithm", name]) == 0
    plan = Plan.loads(capsys.readouterr().out)
    assert plan.algorithm == name
    plan.check(graph_of(name))


def test_a_reference_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "symmetric", "--devices-per-node", "1", "--algorithm"]
    assert main([*arguments, "remax", "--reference"]) == 0
    assert "ref_inf" in Plan.loads(capsys.readouterr().out).calls
    assert main([*arguments, "sft", "--reference"]) == 2
    assert "algorithm sft: found the options reference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["symmetric", "--layout", "actor=d1t2p1"], "expected one layout without a name"),
        (["split", "--layout", "d1t2p1"], "expected NAME=LAYOUT"),
        (["symmetric", "--layout", "d3t1p1"], "needs 3 ranks"),
        (["symmetric", "--nodes", "0"], "plan: --nodes: found 0; expected"),
        (
            ["symmetric", "--output", "no/such/folder.json"],
            "--output: no/such/folder.json: cannot be written",
        ),
    ],
)
def test_layouts_of_the_wrong_form(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--devices-per-node", "4"]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_that_cannot_be_is_named_by_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "symmetric", "--devices-per-node", "0", "--device-memory", "-1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: plan: 2 problems")
    assert "--devices-per-node: found 0; expected" in error
    assert "--device-memory: found -1; expected" in error
