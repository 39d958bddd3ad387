"""Runs killed at random moments and resumed, against the same runs left alone: the losses must be equal.

    python benchmarks/kills.py                  # make kills; ten kills over the algorithms
    python benchmarks/kills.py --kills 3 --seed 7 --algorithms grpo

Each run has four ranks, with its calls on disjoint halves of them, and a checkpoint after every iteration. At a
random moment between its start and its end a random rank gets SIGKILL; the others end by themselves, and the run is
resumed from what is on disk. One JSON line per kill: where it hit, and the largest difference of any loss, gradient
norm or metric of the batch over all iterations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.invariance_cases import OPTIONS, SPLIT, Case, case_tree  # noqa: E402
from megatron_real.runtime.reports.metrics import read_metrics  # noqa: E402
from megatron_real.runtime.run_state import read_run_state  # noqa: E402
from tests.e2e.tiny_run import Job, start, wait  # noqa: E402

ITERATIONS = 5
RANKS = 4
LIMIT_S = 400.0
_CLOCK = ("_s", "per_s")


def options(algorithm: str, folder: Path) -> dict[str, Any]:
    """Of a run in `folder`; writes its plan and data."""
    case = Case(name="split", num_ranks=RANKS, algorithm=algorithm, calls=SPLIT)
    return case_tree(case, folder, ITERATIONS) | {"save_interval": 1}


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    """By iteration, the metrics that do not depend on the clock."""
    return {
        row["iteration"]: {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float)
            and not name.endswith(_CLOCK)
            and not name.startswith(("seconds/", "iteration/"))
        }
        for row in read_metrics(folder / "metrics.jsonl")
    }


def finish(tree: dict[str, Any], tag: str) -> None:
    """Run to the end, going on from the last checkpoint if there is one."""
    resume = read_run_state(Path(tree["output"]) / "checkpoints") is not None
    job = start(tree | {"resume": resume}, size=RANKS, tag=tag)
    wait([job], LIMIT_S)
    if job.codes != dict.fromkeys(range(RANKS), 0):
        raise SystemExit(f"{tree['output']}: the run did not end\n{job.logs()}")


def kill_once(tree: dict[str, Any], run_s: float, chance: random.Random) -> dict[str, Any]:
    """Start the run, kill a rank somewhere on the way, and wait until all have ended; where it hit."""
    folder, rank, after_s = Path(tree["output"]), chance.randrange(RANKS), chance.uniform(0.0, run_s)
    job = start(tree, size=RANKS, tag="killed")
    deadline = time.monotonic() + LIMIT_S
    while not list(folder.glob("trace/*")) and time.monotonic() < deadline and not job.poll():
        time.sleep(0.02)
    time.sleep(after_s)
    job.poll()
    hit = rank not in job.codes
    if hit:
        os.kill(job.pids[rank], signal.SIGKILL)
    wait([job], LIMIT_S)
    return {"rank": rank, "after_s": round(after_s, 2), "hit": hit, "in": _where(job, folder)}


def _where(job: Job, folder: Path) -> str:
    """The instruction that the survivors say the dead rank was in."""
    for path in sorted(folder.glob("failure-rank*")):
        failure = json.loads(path.read_text())
        if failure["iteration"] < 0:
            return "during set-up"
        return f"iteration {failure['iteration']}, {failure['instruction'] or 'between two instructions'}"
    return "before the first call" if any(job.codes.values()) else "after the end"


def difference(left: dict[int, dict[str, float]], right: dict[int, dict[str, float]]) -> float:
    """The largest difference of a number, relative to its size; infinite where one has what the other has not."""
    if left.keys() != right.keys() or any(left[i].keys() != right[i].keys() for i in left):
        return math.inf
    pairs = [(left[i][name], right[i][name]) for i in left for name in left[i]]
    return max(
        (abs(a - b) / max(abs(a), 1.0) for a, b in pairs if not (math.isnan(a) and math.isnan(b))),
        default=0.0,
    )


def main() -> None:
    """Exit code 1 if a number differs by more than 1e-6 after a resume."""
    parser = argparse.ArgumentParser(description="Random kills and resumes.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithms", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    given = parser.parse_args()
    chance, good = random.Random(given.seed), True
    with tempfile.TemporaryDirectory() as name:
        alone: dict[str, tuple[dict[int, dict[str, float]], float]] = {}
        for number, algorithm in enumerate(islice(cycle(given.algorithms), given.kills)):
            if algorithm not in alone:
                folder = Path(name) / f"{algorithm}-alone"
                began_s = time.monotonic()
                finish(options(algorithm, folder), "alone")
                rows = read_metrics(folder / "metrics.jsonl")
                run_s = sum(row.get("iteration/duration_s", 0.0) for row in rows)
                alone[algorithm] = (numbers(folder), min(1.5 * run_s, time.monotonic() - began_s))
            expected, run_s = alone[algorithm]
            folder = Path(name) / f"{algorithm}-{number}"
            tree = options(algorithm, folder)
            line = {"algorithm": algorithm, **kill_once(tree, run_s, chance)}
            if line["hit"]:
                finish(tree, "resumed")
            error = difference(expected, numbers(folder))
            good &= error <= 1e-6
            print(json.dumps({**line, "max_difference": error, "ok": error <= 1e-6}), flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
