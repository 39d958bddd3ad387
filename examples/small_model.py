"""The commands of `make learn` and `make rlhf`: the GPT of `conf/experiment/capitals.yaml`, on a CPU.

Each is a command that you could type. It runs in a process of its own, writes its output to a log and tells now and
then how far it is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import capitals
import numpy
from omegaconf import OmegaConf

from megatron_real.config import conf_dir, megatron_arguments

__all__ = ["Failed", "pretrain", "progress", "run", "train", "train_command"]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PRETRAINING_WORDS = 60_000
PRETRAINING_STEPS = 1_000

_PRETRAINING = shlex.split(
    f"--train-iters {PRETRAINING_STEPS} --micro-batch-size 64 --global-batch-size 64 --lr 5e-3 --min-lr 5e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 20 --calculate-per-token-loss --num-workers 0 --eval-iters 0 "
    "--eval-interval 1000000 --log-interval 100 --rerun-mode disabled --no-rope-fusion --no-bias-swiglu-fusion "
    f"--distributed-backend gloo --use-distributed-optimizer --save-interval {PRETRAINING_STEPS}"
)

_SHOWN_EVERY = 10
"""Iterations of a run; Megatron's own trainer logs every hundredth step."""
_MEGATRON = re.compile(r"iteration +(\d+)/ +(\d+) .*lm loss: (\S+)")
_RUN = re.compile(r"iteration (\d+)/\d+: ")

Show = Callable[[str], None]


class Failed(Exception):
    """A command ended with an error; its text says which, and where its output is."""


def run(command: Sequence[str], log: Path, show: Show | None = None) -> None:
    """Run a command of the project; `show` gets what `progress` makes of its output.

    Raises:
        Failed: its exit code is not 0.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)]),
        "PYTHONWARNINGS": "ignore",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                if show is not None and (told := progress(line)):
                    show(told)
        except BaseException:  # interrupted: the command must not go on alone
            process.terminate()
            raise
    if process.returncode:
        tail = "".join(log.read_text().splitlines(keepends=True)[-20:])
        raise Failed(
            f"{shlex.join(command)}\nended with exit code {process.returncode}; the end of {log}:\n{tail}"
        )


def progress(line: str) -> str | None:
    """What a line of a command's output tells of how far it is, for some of its iterations."""
    if found := _MEGATRON.search(line):
        return f"iteration {found[1]}/{found[2]}: loss {float(found[3]):.3f}"
    found = _RUN.match(line)
    return line.strip() if found and (int(found[1]) == 1 or int(found[1]) % _SHOWN_EVERY == 0) else None


def pretrain(folder: Path, *, seed: int, show: Show | None = None) -> Path:
    """Pretrain on text by `capitals.CARELESS` with Megatron's own trainer, unless it is done.

    Returns:
        The checkpoint, in `folder`.
    """
    checkpoint = folder / "checkpoint"
    if (checkpoint / "latest_checkpointed_iteration.txt").exists():
        return checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    chosen = islice(capitals.words(seed, held_out=False), PRETRAINING_WORDS)
    tokens = numpy.fromiter(capitals.text(chosen, capitals.CARELESS, seed), dtype=numpy.uint16)
    numpy.save(folder / "train.npy", tokens)
    plan = {
        "algorithm": "pretrain",
        "cluster": {"devices_per_node": 1},
        "calls": {"pretrain": {"ranks": [0, 1]}},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *("-m", "megatron_real", str(EXAMPLES / "pretrain_docstrings.py")),
            *("--real-plan", str(folder / "plan.json"), "--train-tokens", str(folder / "train.npy")),
            *megatron_arguments(_model_arguments()),
            *_PRETRAINING,
            *("--seed", str(seed), "--save", str(checkpoint)),
        ],
        folder / "log.txt",
        show,
    )
    return checkpoint


def train_command(folder: Path, settings: Mapping[str, object]) -> list[str]:
    """``megatron-real train`` on one rank, with `settings` by dotted name; the run's files go to `folder`."""
    every = {"experiment": "capitals", "plan": "symmetric", "cluster.devices_per_node": 1, "output": folder}
    settings = {**every, **settings}
    return [
        *(sys.executable, "-m", "megatron_real.cli", "train"),
        *(f"{name}={value}" for name, value in settings.items()),
    ]


def train(folder: Path, settings: Mapping[str, object], show: Show | None = None) -> list[dict[str, float]]:
    """Run `train_command`; the rows of its ``metrics.jsonl``."""
    run(train_command(folder, settings), folder.with_suffix(".log"), show)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _model_arguments() -> dict[str, object]:
    """Megatron's arguments of the model, as ``train`` composes them."""
    found: dict[str, object] = {}
    for name in ("model/tiny", "experiment/capitals"):
        found |= OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{name}.yaml"))["megatron"]
    return found
