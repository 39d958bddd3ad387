"""Every algorithm learns: one small task, three seeds each, on one CPU rank per run.

    python benchmarks/learn.py                      # make learn
    python benchmarks/learn.py grpo dapo            # make learn ALGORITHM="grpo dapo"

The task is to write a word in capitals (examples/capitals.py), from a model that Megatron pretrained on text with few
of them. One JSON line per algorithm, and one table: its own metric on held-out data before the first update and after
the last one, each with its standard error over the seeds.

Exit code 1 if the mean change over the seeds is not an improvement by more than three of its standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import capitals  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from small_model import Failed, pretrain, train  # noqa: E402

SEEDS = (1, 2, 3)
SEQUENCES = 128
"""Of an iteration; in pairs, pairs."""
TRAINED = 8_000
"""Prompts, answers or pairs to train on; no run uses one twice."""
HELD_OUT = 512
"""Prompts, answers or pairs to evaluate on."""
STANDARD_ERRORS = 3.0
"""By how many of them a metric must improve."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One algorithm, as `conf/algorithm` names it."""

    name: str
    data: str
    """The file of its data: prompts, answers or pairs."""
    metric: str
    """Of its evaluations."""
    lower_is_better: bool = False
    roles: tuple[str, ...] = ("actor",)
    """Those that start from the pretrained model."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def policy(name: str, *, roles: tuple[str, ...] = ("actor",), **options: Any) -> Line:
    """An algorithm that generates and is rewarded; `options` are its own."""
    samples = int(options.get("samples_per_prompt", 1))
    settings = {
        "iterations": 30,
        "reward": "capitals:score",
        "megatron.lr": 1e-3,
        "data.batch_size": SEQUENCES // samples,
        "algorithm.max_new_tokens": capitals.LETTERS + 2,
        **{f"algorithm.{option}": value for option, value in options.items()},
    }
    return Line(name=name, data="prompts", metric="reward", roles=roles, settings=settings)


LINES = (
    Line(
        name="sft",
        data="answers",
        metric="loss",
        lower_is_better=True,
        settings={"iterations": 40, "data.batch_size": SEQUENCES, "megatron.lr": 1e-3},
    ),
    Line(
        name="reward",
        data="pairs",
        metric="accuracy",
        roles=("reward",),
        settings={"iterations": 60, "data.batch_size": SEQUENCES, "megatron.lr": 1e-3},
    ),
    Line(
        name="dpo",
        data="pairs",
        metric="accuracy",
        settings={"iterations": 40, "data.batch_size": SEQUENCES, "megatron.lr": 3e-4},
    ),
    policy("ppo", roles=("actor", "critic"), kl_coefficient=0.01),
    policy("grpo", samples_per_prompt=8, kl_coefficient=0.01),
    policy("dr_grpo", samples_per_prompt=8),
    policy("dapo", samples_per_prompt=8, overlong_buffer=1, overlong_penalty=0.1),
    policy("remax"),
    policy("rloo", samples_per_prompt=4, kl_coefficient=0.01),
    policy("reinforce_pp", kl_coefficient=0.01),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of one seed."""

    start: float
    end: float
    began_s: float
    """On the monotonic clock."""
    ended_s: float


def write_data(folder: Path) -> None:
    """Prompts, answers and pairs of words that are not in the text to pretrain on."""
    chosen = capitals.words(1, held_out=True)
    for prefix, count in (("held-out-", HELD_OUT), ("", TRAINED)):
        for name, records in (
            ("prompts", capitals.prompts(islice(chosen, count), seed=1)),
            ("answers", capitals.answers(islice(chosen, count), capitals.CAREFUL, seed=2)),
            ("pairs", capitals.pairs(islice(chosen, count), capitals.FAIR, seed=3)),
        ):
            capitals.write_lines(folder / f"{prefix}{name}.jsonl", records)


def run_settings(line: Line, seed: int, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """The options of one run, by dotted name."""
    return {
        "algorithm": line.name,
        "data.prompts": folder / f"{line.data}.jsonl",
        "data.eval_prompts": folder / f"held-out-{line.data}.jsonl",
        "data.eval_batch_size": HELD_OUT,
        "evaluation.keep_best": False,
        "seed": seed,
        **{f"model.{role}.load": checkpoint for role in line.roles},
        **line.settings,
    }


def learn(line: Line, seed: int, folder: Path, checkpoint: Path) -> Run:
    """One run: its metric on held-out data before the first update and after the last."""
    output = folder / line.name / str(seed)
    shutil.rmtree(output, ignore_errors=True)
    began_s = time.monotonic()
    rows = train(output, run_settings(line, seed, folder, checkpoint))
    found = [float(row[f"eval/{line.metric}"]) for row in rows if f"eval/{line.metric}" in row]
    run = Run(start=found[0], end=found[-1], began_s=began_s, ended_s=time.monotonic())
    console.print(
        f"{line.name}, seed {seed}: {run.start:.3f} -> {run.end:.3f}, {run.ended_s - began_s:.0f} s"
    )
    return run


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def judge(line: Line, runs: Sequence[Run]) -> dict[str, Any]:
    """The line of output. Changes are compared within each seed; seconds go from the first start to the last end."""
    start, start_error = mean_and_error([run.start for run in runs])
    end, end_error = mean_and_error([run.end for run in runs])
    sign = -1.0 if line.lower_is_better else 1.0
    gain, gain_error = mean_and_error([sign * (run.end - run.start) for run in runs])
    return {
        "algorithm": line.name,
        "metric": line.metric,
        "start": round(start, 4),
        "start_error": round(start_error, 4),
        "end": round(end, 4),
        "end_error": round(end_error, 4),
        "gain": round(gain, 4),
        "gain_error": round(gain_error, 4),
        "seeds": len(runs),
        "iterations": line.settings["iterations"],
        "seconds": round(max(run.ended_s for run in runs) - min(run.began_s for run in runs), 1),
        "ok": gain > STANDARD_ERRORS * gain_error,
    }


def run_lines(lines: Sequence[Line], folder: Path, checkpoint: Path, jobs: int) -> list[dict[str, Any]]:
    """All seeds of all lines, `jobs` runs at a time; what is printed of each line.

    Raises:
        Failed: a run ended with an error. Runs that have not started are left out, also when interrupted.
    """
    found = []
    with ThreadPoolExecutor(jobs) as pool:
        started = [[pool.submit(learn, line, seed, folder, checkpoint) for seed in SEEDS] for line in lines]
        try:
            for line, runs in zip(lines, started, strict=True):
                found.append(judge(line, [run.result() for run in runs]))
                print(json.dumps(found[-1]), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """All lines for reading."""
    shown = Table(title="Every algorithm, from the same pretrained model; standard errors over the seeds")
    for column in ("algorithm", "metric", "start", "end", "gain", "iterations", "seconds", ""):
        shown.add_column(column, justify="left" if column in ("algorithm", "metric", "") else "right")
    for line in lines:
        numbers = [f"{line[name]:.3f} ± {line[f'{name}_error']:.3f}" for name in ("start", "end", "gain")]
        counts = [str(line["iterations"]), f"{line['seconds']:.0f}"]
        verdict = "learns" if line["ok"] else "[bold red]does not learn[/bold red]"
        shown.add_row(line["algorithm"], line["metric"], *numbers, *counts, verdict)
    return shown


def main() -> None:
    """Pretraining, then every algorithm; two runs at a time where there are two cores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(line.name for line in LINES)}"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/learn"))
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time")
    options = parser.parse_args()
    unknown = set(options.names) - {line.name for line in LINES}
    if unknown:
        parser.error(
            f"found {', '.join(sorted(unknown))}; expected some of {', '.join(line.name for line in LINES)}"
        )
    folder = options.output.resolve()
    write_data(folder)
    try:
        console.print(f"pretraining, unless it is done: {folder / 'pretrained'}", soft_wrap=True)
        checkpoint = pretrain(folder / "pretrained", seed=1, show=console.print)
        lines = run_lines(
            [line for line in LINES if not options.names or line.name in options.names],
            folder,
            checkpoint,
            options.jobs,
        )
    except Failed as error:
        sys.exit(str(error))
    console.print(table(lines))
    sys.exit(0 if all(line["ok"] for line in lines) else 1)


if __name__ == "__main__":
    main()
