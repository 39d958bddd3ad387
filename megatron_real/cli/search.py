"""``megatron-real search``: find a plan for models, a cluster and a workload, and say how good it is. Needs no torch.

With ``-m`` jobs run in turn, as in `train`; a job that fails does not keep the next from running, and one table ends it
all.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omegaconf import DictConfig
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_real.algorithms.graphs import graph_of
from megatron_real.cli.planning import console, inputs_of_tree, run_jobs, tree_of
from megatron_real.errors import ConfigError, RealError
from megatron_real.hooks.install import report_error
from megatron_real.plan_search.pictures import TradeOff, tradeoff_svg, write_picture, write_pictures
from megatron_real.plan_search.planner import SearchReport
from megatron_real.plan_search.planner_inputs import planner_of
from megatron_real.plan_search.problem import Progress
from megatron_real.plan_search.report import calls_table, fullest, search_lines, seconds_text

__all__ = ["Job", "ProgressLine", "job_table", "main"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One search and how it went."""

    number: int | None
    overrides: tuple[str, ...]
    output: Path | None = None
    report: SearchReport | None = None
    headroom_bytes: int = 0
    error: str | None = None


class ProgressLine:
    """A line of what a search knows so far; nothing where the output is no terminal."""

    def __init__(self, output: Console) -> None:
        self._live = Live(Text("pricing placements"), console=output, transient=True, refresh_per_second=4)
        self._shown = output.is_terminal
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the state of a search."""
        if self._shown:
            self._live.update(Text(self.text(progress)))

    def text(self, progress: Progress) -> str:
        """Elapsed time, best period, lower bound, gap and evaluations."""
        best, bound = progress.period_s, progress.lower_bound_s
        gap = f"{100 * max(0.0, best - bound) / best:.1f} %" if 0 < best < math.inf else "-"
        return (
            f"{time.monotonic() - self._started:5.1f} s  best {seconds_text(best)}  lower bound "
            f"{seconds_text(bound) if bound > 0 else '-'}  gap {gap}  {progress.evaluations:,} plans"
        )


def main(argv: list[str]) -> int:
    """Search once, or once per job of a sweep; returns 0, or 2 when it or one of the jobs failed."""
    jobs: list[Job] = []

    def task(config: DictConfig, number: int | None, overrides: tuple[str, ...]) -> None:
        tree: dict[str, Any] = {}
        try:
            tree = tree_of(config)
            jobs.append(_search(tree, number, overrides))
        except RealError as error:
            if number is None:
                raise
            report_error(error)  # the next job runs all the same
            jobs.append(Job(number=number, overrides=overrides, error=str(error)))

    run_jobs("search", argv, task)
    if jobs and jobs[0].number is not None:
        console().print(job_table(jobs))
        _draw_sweep(jobs, argv)
    return 2 if any(job.error is not None for job in jobs) else 0


def job_table(jobs: Sequence[Job]) -> Table:
    """One row per job, with the overrides that not all of them share."""
    table = Table(title="searches", title_justify="left")
    table.add_column("job", justify="right")
    table.add_column("overrides", overflow="fold")
    table.add_column("status", overflow="fold")
    for name in ("devices", "period", "lower bound", "gap", "head-room"):
        table.add_column(name, justify="right")
    table.add_column("plan", overflow="fold")
    for job in jobs:
        cells = [""] * 5
        if job.report is not None:
            proof = job.report.proof
            cells = [
                str(job.report.plan.cluster.num_devices),
                seconds_text(job.report.estimate.period_s),
                seconds_text(proof.lower_bound_s) if proof.lower_bound_s > 0 else "-",
                f"{100 * proof.gap:.2g} %" if proof.lower_bound_s > 0 else "-",
                f"{job.headroom_bytes / _GIB:.2f} GiB",
            ]
        status = "done" if job.error is None else f"failed: {job.error.splitlines()[0][:120]}"
        table.add_row(
            str(job.number), _own_overrides(job, jobs), status, *cells, str(job.output) if job.output else ""
        )
    return table


def _search(tree: dict[str, Any], number: int | None, overrides: tuple[str, ...]) -> Job:
    output, pictures = (_path(tree.pop(name, None), number) for name in ("output", "pictures"))
    inputs = inputs_of_tree(tree, "search")
    planner = planner_of(inputs, graph_of(inputs.algorithm.name, **inputs.algorithm.options))
    with ProgressLine(Console(stderr=True)) as progress:
        report = planner.search(
            inputs.search.strategy,
            limits=inputs.search.limits,
            options=inputs.search.space,
            pins=inputs.all_pins,
            progress=progress,
        )
    shown = console()
    shown.print(calls_table(report.estimate, title="plan" if output is None else str(output)))
    for line in search_lines(planner, report):
        shown.print(line, markup=False)
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            report.plan.dump(output)
        except OSError as error:
            raise ConfigError(
                f"output: {output}: cannot be written ({error.strerror}). Give a file in a folder that can be made."
            ) from error
    if pictures is not None:
        for path in write_pictures(report.estimate, planner.cluster.capacity_bytes, pictures):
            shown.print(f"picture: {path}", markup=False)
    peak = fullest(report.estimate).peak_bytes
    return Job(
        number=number,
        overrides=overrides,
        output=output,
        report=report,
        headroom_bytes=planner.cluster.capacity_bytes - peak,
    )


def _path(value: object, number: int | None) -> Path | None:
    """A file or folder of a job: in a sweep with the job's number."""
    if value is None:
        return None
    path = Path(str(value))
    return path if number is None else path.with_name(f"{path.stem}-{number}{path.suffix}")


def _own_overrides(job: Job, jobs: Sequence[Job]) -> str:
    shared = set.intersection(*(set(other.overrides) for other in jobs)) if len(jobs) > 1 else set()
    return " ".join(text for text in job.overrides if text not in shared)


def _draw_sweep(jobs: Sequence[Job], argv: Sequence[str]) -> None:
    """Period against devices, where pictures are wanted and jobs differ in the number of devices."""
    folder = next((text.partition("=")[2] for text in argv if text.startswith("pictures=")), "")
    done = [job.report for job in jobs if job.report is not None]
    kinds = {report.plan.cluster.device for report in done}
    points = []
    for job in jobs:
        if job.report is None:
            continue
        cluster = job.report.plan.cluster
        own = [
            text
            for text in _own_overrides(job, jobs).split()
            if not text.startswith(("cluster=", "cluster.num"))
        ]
        series = " ".join([*own, *([cluster.device] if len(kinds) > 1 else [])])
        points.append(TradeOff(series, cluster.num_devices, job.report.estimate.period_s))
    if folder and len({point.num_devices for point in points}) > 1:
        path = Path(folder).with_suffix(".svg") if Path(folder).suffix else Path(f"{folder}-tradeoff.svg")
        write_picture(path, tradeoff_svg(points))
        print(f"picture: {path}", file=sys.stdout)
