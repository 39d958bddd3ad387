"""A real run with evaluations, killed inside one and resumed, against a run without them that is left alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_real.runtime.reports.metrics import read_metrics
from tests.e2e.tiny_run import place, start, wait, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ITERATIONS = 3
CALLS = {
    "actor_gen": place(0, 2, dp=2),
    "rew_inf": place(0, 2, dp=2),
    "ref_inf": place(1, 2),
    "critic_inf": place(0, 2, pp=2),
    "actor_train": place(0, 2, tp=2),
    "critic_train": place(0, 2, dp=2),
}


def _tree(folder: Path, **changes: Any) -> dict[str, Any]:
    algorithm = {"max_new_tokens": 4, "num_minibatches": 2, "kl_adaptive": True, "kl_horizon": 20.0}
    tree = write_run(folder, calls=CALLS, ranks=2, iterations=ITERATIONS, algorithm=algorithm)
    (folder / "held-out.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Tell {n} tales of {n * n}"}) + "\n" for n in range(17))
    )
    return tree | changes


def _trained(row: dict[str, Any]) -> dict[str, Any]:
    """What training told; without the clock."""
    apart = ("eval/", "seconds/", "iteration/")
    return {name: value for name, value in row.items() if not name.startswith(apart)}


def _evaluated(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in row.items() if name.startswith("eval/") and not name.endswith("_s")
    }


@pytest.mark.timeout(300)
def test_training_is_the_same_with_evaluations_and_after_a_kill_inside_one(tmp_path: Path) -> None:
    alone = start(_tree(tmp_path / "alone"), size=2, tag="alone")
    wait([alone], 120)
    folder = tmp_path / "evaluated"
    tree = _tree(folder, evaluation={"every": 1}, samples={"every": 2, "count": 3})
    held_out = {"eval_prompts": str(folder / "held-out.jsonl"), "eval_batch_size": 8}
    tree["data"] = tree["data"] | held_out
    killed = start(tree | {"fault": ["kill@1:2:eval:run:actor_gen"]}, size=2, tag="killed")
    wait([killed], 120)
    assert killed.codes[1] == -signal.SIGKILL, killed.logs()
    assert "iteration 2, eval:" in killed.log(0), killed.logs()
    resumed = start(tree | {"resume": True}, size=2, tag="resumed")
    wait([resumed], 120)
    for job in (alone, resumed):
        assert job.codes == dict.fromkeys(range(2), 0), job.logs()

    rows, expected = (read_metrics(path / "metrics.jsonl") for path in (folder, tmp_path / "alone"))
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS + 1))
    assert [_trained(row) for row in rows[:ITERATIONS]] == [_trained(row) for row in expected], "bit for bit"
    assert _trained(rows[-1]) == {"iteration": ITERATIONS}, "only the evaluation after the last iteration"
    assert "evaluation after 3 iterations: reward " in resumed.log(0)

    found = [_evaluated(row) for row in rows]
    assert all(one["eval/reward_missing"] == 0.0 and one["eval/response_length"] > 0 for one in found)
    assert len({one["eval/reward"] for one in found}) > 1, "the models change, the draws do not"
    best = json.loads((folder / "best" / "best.json").read_text())
    values = [one["eval/reward"] for one in found]
    assert best["value"] == max(values)
    assert best["iteration"] == values.index(max(values)), "the first one that is so good"
    for model in ("actor", "critic"):
        (saved,) = (folder / "best" / model).glob("iter_*")
        assert int(saved.name.removeprefix("iter_")) == best["iteration"]
    assert not (folder / "best.new").exists()

    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().split("\n") if line]
    order = [(one["iteration"], one["of"], one["sequence"]) for one in samples]
    evaluations = [(i, "evaluation", n) for i in range(ITERATIONS + 1) for n in (0, 2, 4)]
    assert sorted(order) == sorted([*evaluations, *((i, "training", n) for i in (0, 2) for n in (0, 2, 4))])
    assert all(one["prompt"].startswith("Tell ") == (one["of"] == "evaluation") for one in samples)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["eval_first"], summary["eval_best"]) == (values[0], max(values))
