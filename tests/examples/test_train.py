"""The two front doors of PPO are one: `examples/train.py` under torchrun, and ``megatron-real train``.

Each is a real command with ranks of its own. The second runs two jobs, of which the first loses a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_real.config import RunOptions, conf_dir, megatron_arguments
from megatron_real.runtime.reports.metrics import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
SMALLER = {"num_layers": 2, "hidden_size": 32, "seq_length": 64, "max_position_embeddings": 64}
SETTINGS = {
    "algorithm.max_new_tokens": 4,
    "algorithm.num_minibatches": 2,
    "model.critic.megatron.lr": 0.0003,
    "data.max_prompt_tokens": 16,
}
CALLS = {
    "actor_gen": {"ranks": [0, 2], "layout": {"dp": 2}},
    "rew_inf": {"ranks": [0, 2], "layout": {"dp": 2}},
    "ref_inf": {"ranks": [0, 2], "layout": {"pp": 2}},
    "critic_inf": {"ranks": [0, 2], "layout": {"tp": 2}},
    "actor_train": {"ranks": [0, 1]},
    "critic_train": {"ranks": [1, 2]},
}


def torchrun(folder: Path) -> list[str]:
    megatron = {**yaml.safe_load((conf_dir() / "model" / "tiny.yaml").read_text())["megatron"], **SMALLER}
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_real", str(ROOT / "examples" / "train.py"), *megatron_arguments(megatron)),
        *("--real-plan", str(folder / "plan.json"), "--real-prompts", str(folder / "prompts.jsonl")),
        *("--real-reward", "rewards:vowel_share", "--real-batch-size", "8", "--real-iterations", "1"),
        *("--real-output", str(folder / "script"), "--seed", "7"),
        *(part for name, value in SETTINGS.items() for part in ("--real-set", f"{name}={value}")),
    ]


def hydra_jobs(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "megatron_real.cli", "train", "-m", f"plan={folder / 'plan.json'}"),
        *(f"data.prompts={folder / 'prompts.jsonl'}", "reward=rewards:vowel_share", "data.batch_size=8"),
        *("iterations=1", f"output={folder / 'hydra'}", "seed=7"),
        *(f"megatron.{name}={value}" for name, value in SMALLER.items()),
        *(f"{name}={value}" for name, value in SETTINGS.items()),
        "fault=[kill@1:0:actor_gen],[]",
    ]


def outcome(folder: Path) -> dict[str, float]:
    """The metrics of the only iteration that do not depend on the clock."""
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert {"reward", "actor_train/loss", "critic_train/grad_norm"} <= row.keys()
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not name.endswith("_s") and not name.startswith("seconds/")
    }


def options(folder: Path) -> RunOptions:
    return RunOptions.loads((folder / "options.json").read_text())


@pytest.mark.timeout(400)
def test_script_and_hydra_run_the_same(tmp_path: Path) -> None:
    plan = {"algorithm": "ppo", "cluster": {"devices_per_node": 2}, "calls": CALLS}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    lines = [json.dumps({"prompt": f"Prompt {number}"}) + "\n" for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    outputs, codes = [], []
    for command in (torchrun(tmp_path), hydra_jobs(tmp_path)):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        outputs.append(done.stdout + done.stderr)
        codes.append(done.returncode)
    assert codes == [0, 2], "\n".join(outputs)
    lost, good = tmp_path / "hydra" / "0", tmp_path / "hydra" / "1"

    # The job that lost a rank says so, and the next one ran.
    failure = json.loads((lost / "failure-rank0.json").read_text())
    assert (failure["culprit_rank"], failure["instruction"]) == (1, "run:actor_gen")
    assert not (lost / "summary.json").exists()
    rows = [line for line in outputs[1].splitlines() if line.startswith("│") and "fault=" in line]
    assert len(rows) == 2, outputs[1]
    assert "failed" in rows[0]
    assert "done" in rows[1]

    # The good one is the run of the script: the same options, the same numbers.
    elsewhere = {"output": Path("."), "fault": ()}
    script = options(tmp_path / "script")
    assert script.model_copy(update=elsewhere) == options(good).model_copy(update=elsewhere)
    assert outcome(tmp_path / "script") == pytest.approx(outcome(good), rel=1e-5, abs=1e-7)
    for folder in (tmp_path / "script", good):
        for name in ("summary.json", "trace.json", "timeline.svg", "plan.json", "checkpoints/run_state.json"):
            assert (folder / name).is_file(), name
