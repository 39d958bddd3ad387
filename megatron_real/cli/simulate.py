"""``megatron-real simulate PLAN``: what a plan is predicted to do, for what it was made or else. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from megatron_real.cli.planning import change_lines, compose_options, console, load_plan, split_arguments
from megatron_real.plan_search.pictures import write_pictures
from megatron_real.plan_search.report import (
    calls_table,
    costs_table,
    estimate_lines,
    memory_table,
)

__all__ = ["main"]

_USAGE = """usage: megatron-real simulate PLAN.json [KEY=VALUE ...]

Prices a plan for the models, the cluster and the workload that it records, changed by the keys of search:
model/actor=NAME, model=NAME, cluster.device=NAME, workload=NAME, workload.response.mean=N, profile=profile.json, ...
pictures=FOLDER also writes timeline.svg and memory.svg."""


def main(argv: list[str]) -> int:
    """Print the estimate."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
        return 0
    (path,), overrides = split_arguments(argv, 1, "megatron-real simulate PLAN.json [KEY=VALUE ...]")
    tree = compose_options("simulate", overrides)
    pictures = tree.pop("pictures", None)
    loaded = load_plan(path, tree, "simulate")
    estimate = loaded.planner.estimate(loaded.plan)
    shown = console()
    for line in change_lines(loaded):
        shown.print(line, markup=False)
    shown.print(calls_table(estimate, title=path))
    shown.print(costs_table(loaded.planner, estimate))
    shown.print(memory_table(loaded.planner, estimate))
    for line in estimate_lines(loaded.planner, estimate):
        shown.print(line, markup=False)
    if pictures is not None:
        for picture in write_pictures(estimate, loaded.planner.cluster.capacity_bytes, Path(str(pictures))):
            shown.print(f"picture: {picture}", markup=False)
    return 0
