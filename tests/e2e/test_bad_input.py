"""Wrong input is one clear error on every rank, before any collective, and what an earlier run left stays as it is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from megatron_real.cli.rank import main
from megatron_real.cli.ranks import free_port
from megatron_real.config import megatron_arguments
from megatron_real.hooks import launch
from megatron_real.hooks.cpu_device import install_cpu_device
from tests.e2e.bad_inputs import CASES, RANKS, prompts, write_case
from tests.e2e.tiny_run import EXAMPLES, MEGATRON, write_run
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]


def leave_earlier_run(folder: Path) -> None:
    """What an earlier run left in the output folder."""
    for name in (
        "metrics.jsonl",
        "summary.json",
        "options.json",
        "plan.json",
        "trace/rank0.jsonl",
        "failure-rank0.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"earlier {name}\n")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def run_rank(options: Path, rank: int, size: int) -> tuple[int, str]:
    """Exit code and error output of a rank that runs in this process, without a group to join."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stderr):
        try:
            code = main([str(options)])
        except SystemExit as error:
            code = int(error.code or 0)
    return code, stderr.getvalue()


def try_cases(folder: Path) -> list[str]:
    """Everything that is wrong with how the cases end."""

    def collective() -> NoReturn:
        raise AssertionError("a collective: the input was taken for good")

    install_cpu_device()
    launch._initialize_distributed = collective
    sys.path.insert(0, str(EXAMPLES))
    wrong = []
    trees = {name: write_case(case, folder / name.replace(" ", "-")) for name, case in CASES.items()}
    dist.destroy_process_group()  # it served to write checkpoints
    for name, case in CASES.items():
        output = folder / name.replace(" ", "-")
        leave_earlier_run(output)
        (output / "input-options.json").write_text(json.dumps(trees[name]))
        before = contents(output)
        texts = set()
        for rank in (0, case.world_size - 1):
            try:
                code, text = run_rank(output / "input-options.json", rank, case.world_size)
            except Exception as error:  # a test reports it, whatever it is
                wrong.append(f"{name}: rank {rank} raised {type(error).__name__}: {error}")
                continue
            lines = [
                line for line in text.splitlines() if "Warning" not in line and "warnings.warn" not in line
            ]
            start = f"[rank {rank}] {case.kind}: "
            if code != 2 or not lines or not lines[0].startswith(start) or "Traceback" in text:
                wrong.append(f"{name}: rank {rank} ended with {code}, {text[-2000:]}")
            missing = [part for part in case.says if part not in text]
            if missing:
                wrong.append(f"{name}: rank {rank} does not say {missing}: {text[-2000:]}")
            texts.add("\n".join(lines).removeprefix(start))
        if len(texts) > 1:
            wrong.append(f"{name}: ranks disagree: {texts}")
        if contents(output) != before:
            wrong.append(f"{name}: changed what an earlier run left")
    return wrong


@pytest.mark.timeout(400)
def test_each_is_one_error_on_every_rank_before_any_collective(tmp_path: Path) -> None:
    (wrong,) = run_ranks(1, try_cases, tmp_path, timeout_s=300)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.timeout(300)
def test_processes_end_by_themselves(tmp_path: Path) -> None:
    """Two ranks of a Megatron-style command line, and one rank of four whose others never start."""
    tree = write_run(tmp_path / "ranks")
    prompts('{"prompt": "a"}', "oops")(tmp_path / "ranks")
    script = [
        *("-m", "megatron_real", str(EXAMPLES / "train.py"), *megatron_arguments(MEGATRON)),
        *(
            "--real-plan",
            tree["plan"],
            "--real-prompts",
            tree["data"]["prompts"],
            "--real-output",
            tree["output"],
        ),
        *("--real-batch-size", "8", "--real-iterations", "1", "--real-reward", "rewards:vowel_share"),
    ]
    alone = write_run(tmp_path / "alone", reward="no_such_rewards:f")
    (tmp_path / "alone.json").write_text(json.dumps(alone))
    before = contents(tmp_path)
    port = free_port()
    commands = [
        (script, 0, port),
        (script, 3, port),
        (["-m", "megatron_real.cli.rank", str(tmp_path / "alone.json")], 1, free_port()),
    ]
    processes = []
    for arguments, rank, rendezvous in commands:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(rendezvous),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    started_s = time.monotonic()
    says = ["line 2: found 'oops'", "line 2: found 'oops'", "'no_such_rewards' cannot be imported"]
    try:
        for process, (_, rank, _), part in zip(processes, commands, says, strict=True):
            output, error = process.communicate(timeout=200)
            assert process.returncode == 2, error
            last = [line for line in error.splitlines() if line.startswith("[rank ")]
            assert len(last) == 1, error
            assert last[0].startswith(f"[rank {rank}] ConfigError: ")
            assert part in last[0]
            assert "Traceback" not in error + output
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - started_s < 200
    assert contents(tmp_path) == before
