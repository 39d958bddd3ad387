"""`megatron-real search`: options, what is printed and written, sweeps, and one clear error for each bad input."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from megatron_real.algorithms.graphs import graph_of
from megatron_real.cli.main import main
from megatron_real.cli.planning import choices, compose_options, hydra_overrides, split_arguments
from megatron_real.cli.search import ProgressLine
from megatron_real.errors import ConfigError
from megatron_real.plan import Plan
from megatron_real.plan_search.inputs import PlanInputs
from megatron_real.plan_search.problem import Progress

SMALL = ["workload.batch_size=8", "workload.prompt.mean=16", "workload.response.length=16"]
TINY = ["search", "model=tiny", "cluster=cpu2", *SMALL]


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def _error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_a_plan_is_found_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "output=new/plan.json", "pictures=new"]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load("new/plan.json")
    assert plan.algorithm == "ppo"
    assert plan.cluster.num_devices == 2
    predicted = plan.predicted
    assert predicted is not None
    assert predicted.iteration_s is not None
    assert predicted.lower_bound_s is not None
    for text in (
        "actor_train",
        "exact: optimal among the choices",
        "head-room",
        "executable: yes",
        "prices: costs",
    ):
        assert text in printed
    assert {path.name for path in Path("new").iterdir()} == {"plan.json", "timeline.svg", "memory.svg"}
    assert {path.name for path in Path().iterdir()} == {"new"}  # Hydra leaves nothing


def test_models_of_roles_and_options_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "model/actor=tiny",
        "model/critic=tiny",
        "model.critic.megatron.num_layers=2",
        "cluster=cpu2",
        *SMALL,
    ]
    more = [
        "search.max_tp=1",
        "search.recompute=[none]",
        "algorithm.reference=false",
        "pins.actor_gen.ranks=[0,1]",
    ]
    assert main(["search", *given, *more]) == 0
    plan = Plan.load("plan.json")
    assert "ref_inf" not in plan.calls
    assert plan.calls["actor_gen"].ranks == (0, 1)
    assert all(placement.layout.tp == 1 for placement in plan.calls.values())
    models = (plan.predicted.model_extra or {})["inputs"]["models"]  # type: ignore[union-attr]
    assert {role: model["shape"]["num_layers"] for role, model in models.items()} == {
        "actor": 4,
        "critic": 2,
        "reward": 2,
    }
    assert "pin of actor_gen (ranks 0-0): costs" in capsys.readouterr().out


def test_a_sweep_ends_with_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["cluster=cpu2,cpu4", "workload.batch_size=8,1", "pictures=out", "output=out.json", "-m"]
    # One sequence makes no two minibatches.
    assert main(["search", "model=tiny", *SMALL[1:], *sweep, "workload.num_minibatches=2"]) == 2
    captured = capsys.readouterr()
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in captured.out[captured.out.index("searches") :].splitlines()
        if "│" in line
    ]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2].split(":")[0] for row in rows] == ["done", "failed", "done", "failed"]
    assert [row[3] for row in rows] == ["2", "", "4", ""]
    assert [row[1] for row in rows][:2] == [
        "cluster=cpu2 workload.batch_size=8",
        "cluster=cpu2 workload.batch_size=1",
    ]
    assert Path("out-0.json").is_file()
    assert not Path("out-1.json").exists()
    assert Path("out-2.json").is_file()
    assert Path("out-tradeoff.svg").is_file()
    assert captured.err.count("PlanError") == 2


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (["model=tiny", "cluster=h101"], "ConfigError", "cluster: found 'h101'; expected one of a100, cpu2"),
        (["model/actor=llama_8b", "cluster=cpu2"], "ConfigError", "model/actor: found 'llama_8b'; expected one of"),
        (["model=tiny"], "ConfigError", "cluster: found nothing; expected one. Add cluster=NAME (a100, cpu2"),
        (["cluster=cpu2"], "ConfigError", "model: found nothing; expected the actor's. Add model/actor=NAME ("),
        (["model=tiny", "cluster=cpu2", "cluster.device=tpu"], "ConfigError", "cluster.device: found 'tpu'"),
        (["model=tiny", "cluster=cpu2", "algorithm=pppo"], "ConfigError", "algorithm: found 'pppo'"),
        (["model=tiny", "cluster=cpu2", "algorithm.critic=true"], "ConfigError", "found the options critic"),
        (["model=tiny", "cluster=cpu2", "search.strategy=magic"], "ConfigError", "found 'magic'; expected one of"),
        (["model=tiny", "cluster=cpu2", "workload.batchsize=3"], "ConfigError", "workload.batchsize: found an unknown"),
        (["model=tiny", "cluster=cpu2", "worklod.batch_size=3"], "ConfigError", "worklod: found an unknown option"),
        (["model=tiny", "cluster=cpu2", "profile=none.json"], "ConfigError", "none.json: cannot be read"),
        (["model=tiny", "cluster=cpu2", "pins.actor.layout.tp=2"], "PlanError", "pins.actor: found no such call"),
        (
            ["model=tiny", "cluster=cpu2", "pins.actor_gen.layout.tp=3"],
            "PlanError",
            "calls.actor_gen: found no placement under the pin tp=3",
        ),
        (
            ["model=tiny", "cluster=cpu2", "cluster.device_memory=1500000"],
            "PlanError",
            "calls.actor_train: found no placement that fits",
        ),
        (["model=tiny", "cluster=cpu2", "output=plan.json/x"], "ConfigError", "output: plan.json/x: cannot be written"),
        (["a==b="], "ConfigError", "Error parsing override"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error(
    changes: list[str], kind: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.json").write_text("a file")
    error = _error(["search", *SMALL, *changes], capsys)
    assert error.startswith(f"{kind}: ")
    assert says in error
    assert error.count("Error:") == 1


def test_a_profile_of_another_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    provenance = {
        "device": "cpu", "device_model": "x", "cpu_model": "x", "host": "x", "num_cores": 1, "threads": 1,
        "pinned": False, "backend": "gloo", "num_ranks": 1, "ranks_per_node": 1, "versions": {},
        "implementation": "local", "date": "x",
    }  # fmt: skip
    Path("profile.json").write_text(json.dumps({"version": 1, "provenance": provenance}))
    error = _error(["search", "model/actor=llama_7b", "cluster=h100", "profile=profile.json"], capsys)
    assert "found measurements of cpu (x); expected h100" in error


def test_what_the_runtime_cannot_execute_is_planned_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["workload.batch_size=2", "workload.prompt.mean=4096", "workload.response.length=16"]
    argv = ["search", "model=tiny", "cluster=h200", "algorithm=grpo", "pins.actor_train.layout.cp=2", *long]
    assert "calls.actor_train: found no placement" in _error(argv, capsys)
    assert main([*argv, "search.plan_only=true"]) == 0
    assert "executable: no: calls.actor_train.layout.cp: found cp=2" in capsys.readouterr().out
    assert Plan.load("plan.json").algorithm == "grpo"


@pytest.mark.parametrize("devices", [1, 3, 6])
def test_a_cluster_of_any_number_of_devices(devices: int) -> None:
    assert main([*TINY, f"cluster.devices_per_node={devices}"]) == 0
    assert Plan.load("plan.json").cluster.num_devices == devices


@pytest.mark.parametrize("model", choices("model"))
def test_every_model_can_be_chosen_for_every_role(model: str) -> None:
    given = [f"model/{role}={model}" for role in ("actor", "critic", "ref", "reward")]
    tree = compose_options("search", ["cluster=h100", *given])
    for name in ("output", "pictures"):
        tree.pop(name)
    inputs = PlanInputs.from_tree(tree)
    assert {role: one.name for role, one in inputs.model.items()} == dict.fromkeys(inputs.model, model)


@pytest.mark.parametrize("algorithm", choices("algorithm"))
def test_every_algorithm_has_a_workload(algorithm: str) -> None:
    tree = compose_options("search", ["model/actor=llama_7b", "cluster=h100", f"algorithm={algorithm}"])
    for name in ("output", "pictures"):
        tree.pop(name)
    inputs = PlanInputs.from_tree(tree)
    assert graph_of(inputs.algorithm.name, **inputs.algorithm.options).calls
    assert inputs.workload.response.distribution("x").mean > 0


def test_overrides_may_set_what_no_file_names() -> None:
    given = [
        "model/actor=a",
        "model=b",
        "search.gap=0.1",
        "search.max_tp=1",
        "+x=1",
        "-m",
        "hydra.verbose=true",
    ]
    assert hydra_overrides(given) == [
        *(
            "model/actor=a",
            "model=b",
            "++search.gap=0.1",
            "++search.max_tp=1",
            "+x=1",
            "-m",
            "hydra.verbose=true",
        )
    ]


def test_files_and_overrides_are_told_apart() -> None:
    assert split_arguments(["a.json", "x=1", "b.json"], 2, "megatron-real diff A B") == (
        ["a.json", "b.json"],
        ["x=1"],
    )
    with pytest.raises(ConfigError, match=r"diff: found a\.json; expected: megatron-real diff A B"):
        split_arguments(["a.json"], 2, "megatron-real diff A B")
    with pytest.raises(ConfigError, match="-m"):
        split_arguments(["a.json", "-m"], 1, "megatron-real show A")


def test_progress_is_shown_on_a_terminal_only() -> None:
    line = ProgressLine(Console(file=io.StringIO(), force_terminal=True, width=120))
    assert "best -  lower bound -  gap -" in line.text(Progress(1.0, 0, math.inf, 0.0))
    text = line.text(Progress(1.0, 1234, 2.0, 1.5))
    assert "best 2.00 s  lower bound 1.50 s  gap 25.0 %  1,234 plans" in text
    quiet = io.StringIO()
    with ProgressLine(Console(file=quiet, force_terminal=False)) as silent:
        silent(Progress(1.0, 1, 2.0, 1.5))
    assert quiet.getvalue() == ""


def test_plan_only_has_a_flag() -> None:
    assert hydra_overrides(["--plan-only", "cluster=h100"]) == ["++search.plan_only=true", "cluster=h100"]
