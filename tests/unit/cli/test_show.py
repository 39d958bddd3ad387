import re
from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.cli.main import main
from megatron_real.plan import ClusterSpec, Plan, Predicted
from megatron_real.plan_search.presets import split, symmetric


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def _shown(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    path = tmp_path / "plan.json"
    plan.dump(path)
    assert main(["show", str(path)]) == 0
    return [_cells(line) for line in capsys.readouterr().out.splitlines() if "│" in line or "┃" in line]


def test_calls_placements_reallocs_and_times_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = split(
        ppo_graph(), ClusterSpec(devices_per_node=4), layouts={"actor": "d1t2p1", "critic_train": "d1t1p2"}
    )
    plan = plan.model_copy(update={"predicted": Predicted(iteration_s=1.9, calls={"actor_gen": 0.5})})
    rows = _shown(plan, tmp_path, capsys)
    assert ["actor_gen", "d1t2p1@0-1", "1", "", "0.5 s"] in rows
    assert ["critic_inf", "d2t1p1@2-3", "1", "d1t1p2@2-3", ""] in rows  # before it stands a realloc
    ranks = {row[0]: dict(zip(rows[-5], row, strict=True)) for row in rows[-4:]}
    assert ranks["1"]["actor_gen"] == "t1"
    assert ranks["3"]["critic_train"] == "p1"
    assert ranks["3"]["actor_gen"] == ""


def test_a_large_cluster_is_shown_in_runs_of_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = split(ppo_graph(), ClusterSpec(num_nodes=8, devices_per_node=8))
    rows = _shown(plan, tmp_path, capsys)
    assert rows[-2][:2] == ["0-31", "d32t1p1"]
    assert rows[-1][:2] == ["32-63", ""]


def test_peak_memory_is_shown_where_it_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = symmetric(ppo_graph(), ClusterSpec(devices_per_node=1))
    plan = plan.model_copy(update={"predicted": Predicted(peak_memory_bytes={"0": 3 * 2**30})})
    assert _shown(plan, tmp_path, capsys)[-1][-1] == "3 GiB"


def test_an_incomplete_plan_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = symmetric(ppo_graph(), ClusterSpec(devices_per_node=1))
    path = tmp_path / "plan.json"
    plan.model_copy(update={"calls": {k: v for k, v in plan.calls.items() if k != "critic_inf"}}).dump(path)
    assert main(["show", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"PlanError: {path}: calls.critic_inf: found no placement")


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sho"]) == 2
    assert "found 'sho'; expected one of train, " in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: megatron-real COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
