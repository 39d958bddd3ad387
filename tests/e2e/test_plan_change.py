"""A run that changes its plan between two iterations, against one that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.invariance_cases import Case, demo_calls, place
from tests.e2e.checkpoint_runs import RUN as SHORT
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

SMALL = {"num_layers": 2, "vocab_size": 257, "lr_decay_style": "linear", "min_lr": 1e-4}
ITERATIONS, CHANGE = 3, 1


def case(name: str, calls: dict[str, Any], **megatron: Any) -> Case:
    return Case(name=name, num_ranks=4, calls=calls, megatron={**SMALL, **megatron})


def other_calls() -> dict[str, Any]:
    """Every home elsewhere than in the demo: other windows, layouts, recomputation, offload."""
    return {
        "actor_gen": place(0, 4, tp=2, dp=2, micro=1),
        "rew_inf": place(1, 3, dp=2, micro=1),
        "ref_inf": place(0, 2, pp=2) | {"offload": "host"},
        "critic_inf": place(0, 4, tp=4),
        "actor_train": place(1, 3, dp=2, micro=2) | {"recompute": "full"},
        "critic_train": place(0, 4, pp=2, dp=2),
    }


@pytest.fixture(scope="module")
def still(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same iterations under the demo's plan."""
    from tests.e2e.cases import run

    folder = tmp_path_factory.mktemp("still")
    return run(case("still", demo_calls()), folder, iterations=ITERATIONS, **SHORT)


def run_changing(
    folder: Path, first: dict[str, Any], second: dict[str, Any], **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    from tests.e2e.cases import run

    folder.mkdir(exist_ok=True)
    other = folder / "other.json"
    other.write_text(json.dumps(case("other", second).plan()))
    changing = case("changing", first)
    options = {"iterations": ITERATIONS, **SHORT, **options}
    return changing, run(changing, folder, next_plan={"iteration": CHANGE, "plan": str(other)}, **options)


@pytest.fixture(scope="module")
def changed(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("changed")
    return folder, *run_changing(folder, demo_calls(), other_calls(), save_interval=CHANGE)


def kl_coefficients(results: list[dict[str, Any]]) -> list[float]:
    found: list[dict[str, float]] = [{} for _ in range(ITERATIONS)]
    for result in results:
        for iteration, values in enumerate(result["batch"]):
            found[iteration].update(values)
    return [values["kl_coefficient"] for values in found]


def test_numbers_are_those_of_a_run_under_one_plan(still: list[dict[str, Any]], changed: Any) -> None:
    from benchmarks import invariance

    _, changing, results = changed
    line = invariance.compare(changing, still, results)
    assert line["optimizer_steps"] == 2 * ITERATIONS
    assert line["ok"], line
    assert line["max_rel_err_update"] > 0, "compared with itself"
    assert kl_coefficients(results) == pytest.approx(kl_coefficients(still), rel=1e-4)


def test_a_resume_after_the_change_starts_under_the_new_plan(changed: Any, tmp_path: Path) -> None:
    from benchmarks import invariance

    folder, _, expected = changed
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    shutil.copy(tmp_path / f"checkpoints/run_state-{CHANGE}.json", tmp_path / "checkpoints/run_state.json")
    _, results = run_changing(tmp_path, demo_calls(), other_calls(), resume=True)
    for call in ("actor_train", "critic_train"):
        for name in ("loss", "grad_norm"):
            whole = invariance.steps(expected, call, name)
            assert invariance.steps(results, call, name) == whole[len(whole) // ITERATIONS * CHANGE :]


def resting_calls() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two plans under which models rest in different places between their calls."""
    first, second = other_calls(), demo_calls(drop=True)
    first["ref_inf"]["offload"] = "node"
    first["critic_train"]["offload"] = "host"
    second["ref_inf"]["offload"] = "host"
    second["actor_train"]["offload"] = "host"
    return first, second


def run_and_weigh(tree: dict[str, Any]) -> dict[str, Any]:
    """On a rank: a run, and what is there at its end."""
    from benchmarks import invariance
    from megatron_real.config import RunOptions
    from megatron_real.hooks import launch
    from megatron_real.process_groups import ProcessGroups
    from tests.e2e.cases import Recorder

    job, groups = launch.prepare(RunOptions.from_tree(tree)), ProcessGroups()
    executor, backend = launch.build_executor(job, groups)
    tokens = invariance.record_tokens(backend)
    launch._train(job, executor, Recorder(job.first_iteration))  # type: ignore[arg-type]
    there = {
        "memory": backend.ledger.held(),
        "host memory": backend.host_ledger.held(),
        "layouts": len(backend.layouts),
        "tables": sorted(map(str, backend._tables)),
    }
    return {"tokens": tokens, "there": there, "after": invariance.owned_weights(backend)}


def test_bf16_moves_bit_for_bit_and_leaves_nothing(cpu_device: None, tmp_path: Path) -> None:
    """What follows under the second plan does not depend on how models came to it: moved, or saved and loaded."""
    from benchmarks import invariance
    from tests.e2e.cases import tree_of

    first, second = resting_calls()
    moved, loaded = tmp_path / "moved", tmp_path / "loaded"
    results = []
    for folder in (moved, loaded):
        tree = tree_of(case("bf16", first, bf16=True), folder, iterations=2, save_interval=1, **SHORT)
        (folder / "other.json").write_text(json.dumps(case("other", second).plan()))
        tree["next_plan"] = {"iteration": 1, "plan": str(folder / "other.json")}
        if folder == loaded:
            shutil.copytree(moved / "checkpoints", loaded / "checkpoints")
            shutil.rmtree(loaded / "checkpoints/actor/iter_0000002")
            state = json.loads((loaded / "checkpoints/run_state.json").read_text())
            (loaded / "checkpoints/run_state.json").write_text(json.dumps({**state, "iteration": 1}))
            tree["resume"] = True
        results.append(run_ranks(4, run_and_weigh, tree, timeout_s=300))
    assert invariance.sampled_tokens(results[1]) == invariance.sampled_tokens(results[0])[1:]
    weights = [invariance.assemble(result, "after") for result in results]
    for name, value in weights[1].items():
        assert value.equal(weights[0][name]), name
    for one, other in zip(*results, strict=True):
        assert one["there"] == other["there"]


def test_a_watched_run_changes_its_plan(cpu_device: None, tmp_path: Path) -> None:
    from tests.e2e import tiny_run

    place = tiny_run.place
    (tmp_path / "other.json").write_text(
        json.dumps(
            {
                "algorithm": "ppo",
                "cluster": {"devices_per_node": 4},
                "calls": {
                    **tiny_run.CALLS,
                    "actor_gen": place(2, 4, tp=2),
                    "actor_train": place(0, 4, dp=2, tp=2),
                },
            }
        )
    )
    tree = tiny_run.write_run(tmp_path, next_plan={"iteration": 1, "plan": str(tmp_path / "other.json")})
    job = tiny_run.start(tree)
    tiny_run.wait([job], 200)
    assert job.codes == dict.fromkeys(range(4), 0), job.logs()
    assert "iteration 2: the next plan begins" in job.log(0)
    assert json.loads((tmp_path / "plan-1.json").read_text())["calls"]["actor_gen"]["ranks"] == [2, 4]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(row["response/max"] <= 4 and row["seconds/actor_gen"] > 0 for row in rows)
    names = [span["name"] for span in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count("change of plan") >= 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cluster": {"devices_per_node": 8}}, r"other.json: cluster: found 8 devices.*4 devices"),
        ({"algorithm": "grpo"}, r"other.json: algorithm: found grpo"),
    ],
)
def test_a_plan_of_something_else_is_refused_before_the_run(
    cpu_device: None, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    from megatron_real.config import RunOptions
    from megatron_real.errors import PlanError
    from megatron_real.hooks.job import prepare
    from tests.e2e.cases import tree_of

    other = tmp_path / "other.json"
    other.write_text(json.dumps(case("other", other_calls()).plan() | change))
    tree = tree_of(
        case("x", demo_calls()),
        tmp_path,
        iterations=4,
        next_plan={"iteration": 2, "plan": str(other)},
        **SHORT,
    )
    with pytest.raises(PlanError, match=text):
        prepare(RunOptions.from_tree(tree))
