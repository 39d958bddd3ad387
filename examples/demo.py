"""The whole way without a GPU: pretrain with Megatron's own trainer, then PPO under a plan on four ranks.

    python examples/demo.py                                  # what `make demo` runs
    python examples/demo.py --lr 0 --output runs/demo-lr0    # the control: nothing is learned

Each step is a command that you could type; it is printed before it runs. Pretraining is skipped when its
checkpoint is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent
PRETRAIN_STEPS = 400

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 128 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 64 --max-position-embeddings 128 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 64 "
    "--attention-dropout 0 --hidden-dropout 0"
)
"""A byte-level GPT in Megatron's own arguments."""
NO_CUDA = shlex.split(
    "--transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --distributed-backend gloo"
)
"""The parts of Megatron that need no CUDA."""
TRAINING = shlex.split("--use-distributed-optimizer --weight-decay 0 --clip-grad 1.0 --micro-batch-size 8")

console = Console(highlight=False)


def launch(name: str, script: str, arguments: list[str], log: Path, keep: tuple[str, ...]) -> None:
    """Run a script on four ranks, showing the lines of its output that contain a word of `keep`."""
    # Each process has torch's file store for rendezvous on a free port: --standalone.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "megatron_real", script, *arguments]
    console.print(f"[bold]{name}[/bold]: {shlex.join(['torchrun', *command[3:]])}", soft_wrap=True)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if any(word in line for word in keep):
                console.print("  " + line.strip()[:170], markup=False, soft_wrap=True)
        if process.wait():
            console.print(Path(log).read_text()[-3000:], markup=False)
            sys.exit(f"{name} failed with exit code {process.returncode}; its output is in {log}")


def pretrain(data: Path, checkpoint: Path, log: Path) -> None:
    """Some hundred steps on docstrings; the layout comes from a plan."""
    launch(
        "pretrain",
        "examples/pretrain_docstrings.py",
        [
            *("--real-plan", "examples/plans/pretrain.json", "--train-tokens", str(data / "train.npy")),
            *MODEL,
            *NO_CUDA,
            *TRAINING,
            *shlex.split(f"--train-iters {PRETRAIN_STEPS} --global-batch-size 32 --lr 3e-3 --min-lr 3e-4"),
            *shlex.split(
                "--lr-decay-style cosine --lr-warmup-iters 20 --calculate-per-token-loss --num-workers 0"
            ),
            *shlex.split("--eval-iters 0 --eval-interval 1000000 --log-interval 50 --rerun-mode disabled"),
            *("--save", str(checkpoint), "--save-interval", str(PRETRAIN_STEPS)),
        ],
        log,
        keep=(" iteration ", "Error"),
    )


def ppo(data: Path, checkpoint: Path, output: Path, options: argparse.Namespace) -> None:
    """PPO from the pretrained checkpoint, every call in its own layout on its own mesh."""
    for name in (
        "checkpoints",
        "trace",
        "tensorboard",
    ):  # of an earlier demo: a run does not write over another
        shutil.rmtree(output / name, ignore_errors=True)
    settings = {
        "algorithm.max_new_tokens": 24,
        "algorithm.num_minibatches": 4,
        "algorithm.num_epochs": 2,
        "algorithm.kl_coefficient": 0.01,
        "algorithm.lam": 0.95,
        "data.max_prompt_tokens": 32,
        "model.critic.load": checkpoint,
        "model.critic.megatron.lr": 3 * options.lr,
        "save_interval": 20,
    }
    launch(
        "PPO",
        "examples/train.py",
        [
            *("--real-plan", "examples/plans/ppo.json", "--real-prompts", str(data / "prompts.jsonl")),
            *("--real-reward", "rewards:vowel_share", "--real-batch-size", "64"),
            *(
                "--real-iterations",
                str(options.iterations),
                "--real-output",
                str(output),
                "--load",
                str(checkpoint),
            ),
            *[part for name, value in settings.items() for part in ("--real-set", f"{name}={value}")],
            *MODEL,
            *NO_CUDA,
            *TRAINING,
            *shlex.split(
                f"--train-iters 1 --lr {options.lr} --min-lr 0 --lr-decay-style constant --seed 1234"
            ),
        ],
        output / "ppo.log",
        keep=("iteration ", "Error", "fresh values"),
    )


def rank_text(ranks: list[int]) -> str:
    """A contiguous window of ranks."""
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def report(output: Path, seconds: float) -> None:
    """What came out, and where to look."""
    summary = json.loads((output / "summary.json").read_text())
    table = Table(title="Where an iteration's time goes (mean over the ranks that take part)")
    for column in ("what", "ranks", "seconds", "share of the iteration"):
        table.add_column(column, justify="left" if column in ("what", "ranks") else "right")
    iteration_s = summary["iteration_s"]
    rows = {
        name: (call["s_per_iteration"], rank_text(call["ranks"])) for name, call in summary["calls"].items()
    }
    rows |= {name: (summary[f"{name}_s_per_iteration"], "") for name in ("realloc", "transfer")}
    for name, (seconds_each, ranks) in rows.items():
        table.add_row(name, ranks, f"{seconds_each:.3f}", f"{seconds_each / iteration_s:.1%}")
    table.add_row("waiting", "", "", f"{summary['wait_share']:.1%} of all rank time")
    table.add_row("the runtime itself", "", "", f"{summary['runtime_share']:.2%} of all rank time")
    console.print(table)
    rise, error = summary["goal_last"] - summary["goal_first"], summary["goal_standard_error"]
    sure = f", {rise / error:.1f} standard errors" if error else ""
    console.print(
        f"{summary['goal']} {summary['goal_first']:.4f} -> {summary['goal_last']:.4f} ({rise:+.4f}{sure}); "
        f"explained variance {summary['explained_variance']:.2f}; iteration {iteration_s:.2f} s, actor and critic "
        f"trained at the same time for {summary['concurrent_s_per_iteration']:.2f} s of it",
        soft_wrap=True,
    )
    for what, path in (
        ("trace", "trace.json"),
        ("timeline", "timeline.svg"),
        ("checkpoints", "checkpoints"),
        ("metrics", "metrics.jsonl"),
        ("summary", "summary.json"),
    ):
        console.print(f"{what:>12}: {output / path}", soft_wrap=True)
    console.print(f"{'total':>12}: {seconds:.0f} s")


def main() -> None:
    """Data, pretraining, PPO, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--pretrained", type=Path, default=Path("runs/demo/pretrained"), help="checkpoint to start from"
    )
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--lr", type=float, default=5e-4, help="of the actor; the critic's is three times that"
    )
    options = parser.parse_args()
    started_s = time.monotonic()
    output, data = options.output.resolve(), options.pretrained.resolve().parent / "data"
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = options.pretrained.resolve()
    if not (data / "prompts.jsonl").exists():
        subprocess.run([sys.executable, str(HERE / "docstring_data.py"), str(data)], check=True)
    if not (checkpoint / "latest_checkpointed_iteration.txt").exists():
        pretrain(data, checkpoint, output / "pretrain.log")
    ppo(data, checkpoint, output, options)
    report(output, time.monotonic() - started_s)


if __name__ == "__main__":
    main()
