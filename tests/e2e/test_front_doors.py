"""`megatron-real train` and `torchrun -m megatron_real examples/train.py` are two doors to the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_real.config import RunOptions

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def _rewards(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["reward"] for row in rows if "reward" in row]


def _as_flags(options: RunOptions, output: str) -> list[str]:
    """The Megatron-style command line of a run."""
    settings = {f"algorithm.{name}": value for name, value in options.algorithm.options.items()}
    settings |= {
        "data.max_prompt_tokens": options.data.max_prompt_tokens,
        "data.truncate": options.data.truncate,
    }
    return [
        *options.megatron,
        *("--seed", str(options.seed), "--real-plan", str(options.plan), "--real-output", output),
        *("--real-prompts", str(options.data.prompts), "--real-batch-size", str(options.data.batch_size)),
        *("--real-iterations", str(options.iterations)),
        *(text for name, value in settings.items() for text in ("--real-set", f"{name}={json.dumps(value)}")),
    ]


@pytest.mark.timeout(900)
def test_two_doors_one_run_and_jobs_go_on_after_a_failed_one(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "line {number}"}}\n' for number in range(12)))
    jobs = _run(
        [
            *(
                "-m",
                "megatron_real.cli",
                "train",
                "--multirun",
                "plan=split",
                "cluster=cpu2",
                "experiment=smoke",
            ),
            *("data.prompts=prompts.jsonl", "algorithm.gamma=7,1.0", "output=runs/jobs"),
        ],
        tmp_path,
    )
    assert jobs.returncode == 2, jobs.stderr[-3000:]
    assert "Traceback" not in jobs.stderr
    assert "failed: algorithm: gamma: found 7.0; expected 0 to 1." in jobs.stdout
    assert "done" in jobs.stdout
    first, second = (tmp_path / "runs" / "jobs" / name for name in "01")
    assert not (first / "metrics.jsonl").exists()
    rewards = _rewards(second)
    assert len(rewards) == 2

    options = RunOptions.model_validate_json((second / "options.json").read_text())
    script = str(ROOT / "examples" / "train.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = _run([*torchrun, "-m", "megatron_real", script, *_as_flags(options, "runs/flags")], tmp_path)
    assert flags.returncode == 0, flags.stderr[-3000:]
    assert _rewards(tmp_path / "runs" / "flags") == rewards
    written = RunOptions.model_validate_json((tmp_path / "runs" / "flags" / "options.json").read_text())
    assert written.model_copy(update={"output": options.output}) == options
