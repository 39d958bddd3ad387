"""``megatron-real compare RUN``: what a run's plan was predicted to do beside what the run did. Needs no torch.

Reads the run's ``trace/`` and ``predicted.json``, writes ``compare.svg``: both timelines on one scale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_real.errors import ConfigError
from megatron_real.plan_search.comparison import Comparison, MemoryRow, PredictedRun, Row, compare
from megatron_real.timeline import pick_iterations, timeline_svg
from megatron_real.trace import Span, attribute_waits, read_spans

__all__ = ["main"]

_DRAWN = 3
"""Iterations of the picture."""


def main(argv: list[str]) -> int:
    """Print the comparison and draw it."""
    parser = argparse.ArgumentParser(
        prog="megatron-real compare",
        description="Lay a run beside its prediction: each call, each move of weights and data, memory, the iteration.",
    )
    parser.add_argument("run", type=Path, help="the folder of a run (megatron-real train output=...)")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="iterations that do not count (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    run: Path = arguments.run
    spans = read_spans(run / "trace")
    if not spans:
        raise ConfigError(
            f"{run}: found no trace in {run / 'trace'}; expected the folder of a run. Give what was its output=..."
        )
    if arguments.warmup < 0:
        raise ConfigError(f"--warmup: found {arguments.warmup}; expected at least 0.")
    predicted = PredictedRun.load(run / "predicted.json")
    comparison = compare(spans, predicted, warmup=arguments.warmup)
    picture = run / "compare.svg"
    picture.write_text(_draw(spans, predicted, run), encoding="utf-8")
    if arguments.json:
        print(json.dumps(_tree(comparison), indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(_times(comparison, run))
    if comparison.memory:
        console.print(_memory(comparison.memory))
    waits = ", ".join(f"rank {rank} {_seconds(seconds)}" for rank, seconds in comparison.waits.items())
    console.print(f"waiting for others, per iteration: {waits}", soft_wrap=True)
    console.print(f"between instructions, per iteration: {_seconds(comparison.between_s)}")
    if predicted is None or not predicted.spans:
        console.print(
            "no simulated timeline: the plan has no prices. A plan from megatron-real search or simulate has them."
        )
    console.print(f"timelines: {picture}", soft_wrap=True)
    return 0


def _draw(spans: tuple[Span, ...], predicted: PredictedRun | None, run: Path) -> str:
    measured = attribute_waits(spans)
    chosen = pick_iterations(measured, _DRAWN)
    panels: dict[str, Iterable[Span]] = {}
    if predicted is not None and predicted.spans:
        # The last simulated iterations are steady; they take the numbers of the measured ones.
        numbers = sorted({span.iteration for span in predicted.spans})[-len(chosen) :]
        renamed = dict(zip(numbers, chosen[-len(numbers) :], strict=True))
        panels["simulated"] = [
            replace(span, iteration=renamed[span.iteration])
            for span in predicted.spans
            if span.iteration in renamed
        ]
    panels["measured"] = measured
    return timeline_svg(panels, iterations=chosen, title=f"{run}: simulated and measured")


def _times(comparison: Comparison, run: Path) -> Table:
    table = Table(
        title=f"{run}: seconds per iteration, median of {comparison.iterations}", title_justify="left"
    )
    table.add_column("what")
    table.add_column("name")
    for column in ("predicted", "measured", "measured / predicted"):
        table.add_column(column, justify="right")
    for row in (comparison.iteration, *comparison.rows):
        bold = "bold" if row is comparison.iteration else None
        kind = "call" if row.kind == "run" else str(row.kind) if row is not comparison.iteration else ""
        cells = (_seconds(row.predicted_s), _seconds(row.measured_s), _number(row.ratio))
        table.add_row(kind, row.name, *cells, style=bold)
    return table


def _memory(rows: Iterable[MemoryRow]) -> Table:
    table = Table(title="peak device memory", title_justify="left")
    for column in ("rank", "predicted", "measured", "measured / predicted"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.rank), _bytes(row.predicted_bytes), _bytes(row.measured_bytes), _number(row.ratio)
        )
    return table


def _tree(comparison: Comparison) -> dict[str, Any]:
    def tree(row: Row | MemoryRow) -> dict[str, Any]:
        return {**asdict(row), "ratio": row.ratio}

    return {
        "iterations": comparison.iterations,
        "iteration": tree(comparison.iteration),
        "rows": [tree(row) for row in comparison.rows],
        "memory": [tree(row) for row in comparison.memory],
        "waits_s": {str(rank): seconds for rank, seconds in comparison.waits.items()},
        "between_s": comparison.between_s,
    }


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def _bytes(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
