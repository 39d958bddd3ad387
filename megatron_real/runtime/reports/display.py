"""What a run shows while it runs: a live table on a terminal, one line per iteration elsewhere."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megatron_real.runtime.liveness.progress import Position
from megatron_real.runtime.reports.metrics import EVALUATION, flatten, goal_value
from megatron_real.runtime.reports.reports import IterationMetrics

__all__ = ["Display", "evaluation_line", "iteration_line", "position_table", "rank_ranges"]

logger = logging.getLogger(__name__)

_SHOWN = ("kl", "explained_variance")
"""Metrics of the whole batch that the line of an iteration shows beside the goal."""


def iteration_line(
    iteration: int, num_iterations: int | None, metrics: IterationMetrics, goal: str = "reward"
) -> str:
    """One line about an iteration; iterations are counted from 1 for the reader."""
    timing = metrics.get("iteration", {})
    batch = metrics.get(None, {})
    parts = []
    if duration_s := timing.get("duration_s"):
        parts.append(f"{duration_s:.2f} s")
        if tokens := timing.get("tokens"):
            parts.append(f"{tokens / duration_s:.0f} tokens/s")
    reached = goal_value(flatten(metrics), goal)
    if reached is not None:
        parts.append(f"{goal} {reached:.4g}")
    parts += [f"{name.replace('_', ' ')} {batch[name]:.4g}" for name in _SHOWN if name in batch]
    total = f"/{num_iterations}" if num_iterations else ""
    return f"iteration {iteration + 1}{total}: {', '.join(parts) or 'done'}"


def evaluation_line(iteration: int, metrics: IterationMetrics, goal: str) -> str | None:
    """One line about the evaluation before an iteration; None where there was none."""
    found = metrics.get(EVALUATION)
    if found is None:
        return None
    parts = []
    if goal in found:
        error = found.get(f"{goal}_error")
        parts.append(f"{goal} {found[goal]:.4g}" + (f" ± {error:.2g}" if error is not None else ""))
    parts += [f"{name} {found[name]:.4g}" for name in ("loss",) if name in found and name != goal]
    return f"evaluation after {iteration} iterations: {', '.join(parts) or f'no {goal}'}"


def rank_ranges(ranks: list[int]) -> str:
    """Ranks as ranges: ``0-3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def position_table(positions: Mapping[int, Position]) -> Table:
    """What every rank does now; ranks that do the same share a row."""
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for rank, position in positions.items():
        groups[position.iteration, position.index, position.name].append(rank)
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks", style="bold")
    table.add_column("iteration", justify="right")
    table.add_column("instruction")
    for (iteration, _, name), ranks in sorted(groups.items(), key=lambda item: min(item[1])):
        started = str(iteration + 1) if iteration >= 0 else "-"
        table.add_row(rank_ranges(ranks), started, name or "between instructions")
    return table


class Display:
    """Shows progress. For one thread.

    Args:
        num_iterations: of the whole run, if known.
        goal: the metric that tells how the run does.
        live: a live table; None means on a terminal.
        console: where to; stdout by default.
    """

    def __init__(
        self,
        num_iterations: int | None,
        *,
        goal: str = "reward",
        live: bool | None = None,
        console: Console | None = None,
    ) -> None:
        self._num_iterations = num_iterations
        self._goal = goal
        self._live: Live | None = None
        if live if live is not None else sys.stdout.isatty():
            console = console or Console()
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
            console.show_cursor(True)  # a failing run ends with os._exit, which restores nothing

    def iteration(self, iteration: int, metrics: IterationMetrics) -> None:
        """An iteration is complete, and the evaluation before it; or that after the last one is."""
        lines = [evaluation_line(iteration, metrics, self._goal)]
        if iteration != self._num_iterations:
            lines.append(iteration_line(iteration, self._num_iterations, metrics, self._goal))
        for line in filter(None, lines):
            if self._live is None:
                logger.info("%s", line)
            else:
                self._live.console.print(line, highlight=False)

    def positions(self, positions: Mapping[int, Position]) -> None:
        """Where the ranks are."""
        if self._live is not None:
            self._live.update(position_table(positions), refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
