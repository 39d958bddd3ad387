"""RLHF from nothing on a CPU: pretrain, SFT, a reward model from preferences, PPO with it, and what came of it.

    python examples/rlhf.py                       # what `make rlhf` runs
    python examples/rlhf.py --output runs/mine    # elsewhere; a stage that is done there is not repeated

The task is to write a word in capitals (capitals.py). Demonstrations are by a writer who uses them for six letters of
ten. Preference pairs are made by the true rule, and PPO sees only the reward *model* that learned from them. At the end
both actors answer prompts that no stage has seen, and the true rule says which answer is better.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import capitals
from rich.console import Console
from rich.table import Table
from rich.text import Text
from small_model import Failed, pretrain, train

SEED = 7
HELD_OUT = 1_000
"""Prompts for the last word."""
STANDARD_ERRORS = 3.0
"""By how many of them the win rate must be above one half."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Pipeline:
    """Stages one after another, each with a folder of its own.

    A stage that is done with the same settings, after the same stages, is not repeated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        """By stage, in the run that did it."""
        self._key = ""

    def stage(self, name: str, settings: Mapping[str, Any], work: Callable[[Path], object]) -> None:
        """Do `work` in the stage's folder, if it is not done."""
        folder = self.folder / name
        self._key = hashlib.sha256(json.dumps([self._key, name, settings], default=str).encode()).hexdigest()
        done = folder / "done.json"
        before = json.loads(done.read_text()) if done.exists() else {}
        if before.get("key") == self._key:
            console.print(f"[bold]{name}[/bold]: done before")
        else:
            console.print(f"[bold]{name}[/bold]: {folder}", soft_wrap=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            started_s = time.monotonic()
            work(folder)
            before = {"key": self._key, "seconds": time.monotonic() - started_s}
            (folder / "partial.json").write_text(json.dumps(before))
            (folder / "partial.json").rename(done)
        self.seconds[name] = before["seconds"]


def write_data(folder: Path) -> None:
    """Files for all stages; no word is in two of them."""
    chosen = capitals.words(SEED, held_out=True)
    for name, records in (
        ("held-out-prompts", capitals.prompts(islice(chosen, HELD_OUT), SEED)),
        ("held-out-answers", capitals.answers(islice(chosen, HELD_OUT), capitals.FAIR, SEED)),
        ("held-out-pairs", capitals.pairs(islice(chosen, HELD_OUT), capitals.FAIR, SEED)),
        ("answers", capitals.answers(islice(chosen, 8_000), capitals.FAIR, SEED + 1)),
        ("pairs", capitals.pairs(islice(chosen, 8_000), capitals.FAIR, SEED + 1)),
        ("prompts", capitals.prompts(islice(chosen, 8_000), SEED + 1)),
    ):
        capitals.write_lines(folder / f"{name}.jsonl", records)


SFT = {"algorithm": "sft", "iterations": 40, "data.batch_size": 128, "megatron.lr": 1e-3}
REWARD = {"algorithm": "reward", "iterations": 60, "data.batch_size": 128, "megatron.lr": 1e-3}
PPO = {
    "algorithm": "ppo",
    "plan": "split",
    "iterations": 40,
    "data.batch_size": 128,
    "megatron.lr": 1e-3,
    "algorithm.max_new_tokens": capitals.LETTERS + 2,
    "algorithm.kl_coefficient": 0.02,
    "samples.every": "null",
    "samples.count": HELD_OUT,
}
"""Actor and critic train at the same time, each on a rank of its own; every prompt of an evaluation is written down."""


def run_settings(folder: Path, kind: str, settings: Mapping[str, Any], **loads: Path) -> dict[str, Any]:
    """The options of a stage that trains, by dotted name; from a checkpoint for each role of `loads`."""
    data = folder / "data"
    return {
        "cluster.devices_per_node": 2,
        "seed": SEED,
        "data.prompts": data / f"{kind}.jsonl",
        "data.eval_prompts": data / f"held-out-{kind}.jsonl",
        "data.eval_batch_size": HELD_OUT,
        "evaluation.keep_best": False,
        **{f"model.{role}.load": checkpoint for role, checkpoint in loads.items()},
        **settings,
    }


def train_stage(pipeline: Pipeline, name: str, kind: str, settings: Mapping[str, Any], **loads: Path) -> Path:
    """A stage that trains; the folder of its run."""
    run = pipeline.folder / name / "run"
    every = run_settings(pipeline.folder, kind, settings, **loads)
    pipeline.stage(name, every, lambda folder: train(run, every, show))
    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers_of_both(run: Path) -> list[tuple[str, str, str]]:
    """Prompt, the SFT actor's answer and the PPO actor's: from the evaluations before and after PPO."""
    by_iteration: dict[int, dict[str, str]] = {}
    for line in read_lines(run / "samples.jsonl"):
        by_iteration.setdefault(line["iteration"], {})[line["prompt"]] = line["response"]
    first, last = (by_iteration[iteration] for iteration in (min(by_iteration), max(by_iteration)))
    return [(prompt, first[prompt], last[prompt]) for prompt in sorted(first)]


def win_rate(answers: Sequence[tuple[str, str, str]]) -> tuple[float, float]:
    """The share of prompts to which PPO's answer is better by the true rule, a tie counted as half; and its error."""
    prompts, before, after = (list(texts) for texts in zip(*answers, strict=True))
    points = zip(capitals.score(prompts, before), capitals.score(prompts, after), strict=True)
    wins = [0.5 + 0.5 * ((b > a) - (b < a)) for a, b in points]
    return statistics.fmean(wins), statistics.stdev(wins) / math.sqrt(len(wins))


def stage_table(pipeline: Pipeline) -> Table:
    """How well each stage did, and how long it took."""
    table = Table(title="Stages; on held-out data before the first step and after the last")
    for column in ("stage", "metric", "before", "after", "seconds"):
        table.add_column(column, justify="left" if column in ("stage", "metric") else "right")
    for name, seconds in pipeline.seconds.items():
        path = pipeline.folder / name / "run" / "summary.json"
        numbers = ["", "", ""]
        if path.exists():
            found = json.loads(path.read_text())
            ends = [(found[f"eval_{end}"], found[f"eval_{end}_error"]) for end in ("first", "last")]
            metric = {"reward": "score by the reward model"}.get(found["goal"], found["goal"])
            numbers = [metric, *(f"{value:.3f} ± {error:.3f}" for value, error in ends)]
        table.add_row(name, *numbers, f"{seconds:.0f}")
    return table


def answer_table(answers: Sequence[tuple[str, str, str]]) -> Table:
    """Some answers side by side."""
    table = Table(title="Both actors, and their points by the true rule")
    for column in ("prompt", "SFT", "points", "PPO", "points"):
        table.add_column(column, justify="right" if column == "points" else "left")
    for prompt, before, after in answers[:: len(answers) // 8]:
        points = [f"{capitals.score([prompt], [text])[0]:.2f}" for text in (before, after)]
        table.add_row(*map(Text, (prompt, before, points[0], after, points[1])))
    return table


def report(pipeline: Pipeline, answers: Sequence[tuple[str, str, str]]) -> bool:
    """Tables, the last word, and a picture of both; whether PPO is better."""
    prompts, before, after = (list(texts) for texts in zip(*answers, strict=True))
    points = [statistics.fmean(capitals.score(prompts, texts)) for texts in (before, after)]
    rate, error = win_rate(answers)
    verdict = (
        f"points by the true rule: SFT {points[0]:.3f}, PPO {points[1]:.3f}. PPO's answer is better on "
        f"[bold]{rate:.1%} ± {error:.1%}[/bold] of {len(answers)} held-out prompts (a tie counts as half): "
        f"{(rate - 0.5) / error:.0f} standard errors above one half."
    )
    picture = pipeline.folder / "rlhf.svg"
    recorder = Console(record=True, file=io.StringIO(), width=100, highlight=False)
    for each in (console, recorder):
        each.print(stage_table(pipeline), answer_table(answers), verdict)
    recorder.save_svg(str(picture), title="make rlhf")
    console.print(f"picture: {picture}", soft_wrap=True)
    return rate - STANDARD_ERRORS * error > 0.5


def show(line: str) -> None:
    """A line that tells how far a command is."""
    console.print("  " + line, markup=False, soft_wrap=True)


def main() -> None:
    """All stages that are not done, then the report; exit code 1 if PPO is not better."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/rlhf"))
    pipeline = Pipeline(parser.parse_args().output.resolve())
    try:
        pipeline.stage("data", {"held_out": HELD_OUT}, write_data)
        pretrained = pipeline.folder / "pretrained"
        pipeline.stage("pretrained", {}, lambda folder: pretrain(folder, seed=SEED, show=show))
        sft = train_stage(pipeline, "sft", "answers", SFT, actor=pretrained / "checkpoint")
        actor = sft / "checkpoints" / "actor"
        reward = train_stage(pipeline, "reward", "pairs", REWARD, reward=actor) / "checkpoints" / "reward"
        ppo = train_stage(pipeline, "ppo", "prompts", PPO, actor=actor, critic=reward, reward=reward)
    except Failed as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with the stage that is not done")
    sys.exit(0 if report(pipeline, answers_of_both(ppo)) else 1)


if __name__ == "__main__":
    main()
