"""``megatron-real show plan.json``: which device runs which call, in which layout. Needs no torch."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from megatron_real.algorithms.registry import graph_of_plan
from megatron_real.dataflow import Graph
from megatron_real.layout import coordinates_of, format_placement
from megatron_real.plan import Placement, Plan
from megatron_real.plan_search.report import notes_of
from megatron_real.program import Realloc, compile_program

__all__ = ["main", "tables"]

_MAX_ROWS = 32
"""Devices that are shown one by one; more are shown in runs of devices that do the same."""


def main(argv: list[str]) -> int:
    """Print the tables of a plan."""
    parser = argparse.ArgumentParser(
        prog="megatron-real show", description="Show a plan: device x call, layouts, times."
    )
    parser.add_argument("plan", help="plan.json")
    path = parser.parse_args(argv).plan
    plan = Plan.load(path)
    graph = graph_of_plan(plan)
    if graph is not None:
        plan.check(graph, source=path)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(plan, graph, title=path):
        console.print(table)
    return 0


def tables(plan: Plan, graph: Graph | None, *, title: str) -> Iterator[Table]:
    """The table of calls, then the table of devices, whose cells say where in its layout a rank stands."""
    yield _calls(plan, graph, title)
    yield _devices(plan)


def _calls(plan: Plan, graph: Graph | None, title: str) -> Table:
    cluster = plan.cluster
    predicted = plan.predicted
    table = Table(
        title=f"{title}: {plan.algorithm} on {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device}",
        caption=_prediction(plan),
        title_justify="left",
        caption_justify="left",
    )
    order = [call.name for call in graph.ordered(plan.order)] if graph is not None else list(plan.calls)
    arrivals = _arrivals(plan, graph)
    times = predicted.calls if predicted is not None else {}
    columns = {
        "call": order,
        "placement": [format_placement(plan.calls[name].mesh, plan.calls[name].parallel) for name in order],
        "micro-batches": [str(plan.calls[name].num_microbatches) for name in order],
        "weights from": [arrivals.get(name, "") for name in order],
        "notes": [notes_of(plan.calls[name]) for name in order],
        "predicted": [f"{times[name]:.3g} s" if name in times else "" for name in order],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        table.add_column(name, overflow="fold", justify="right" if name == "predicted" else "left")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def _prediction(plan: Plan) -> str | None:
    """What the plan records of its estimate: period, proof, and what it was made with."""
    predicted = plan.predicted
    if predicted is None or predicted.iteration_s is None:
        return None
    extra = predicted.model_extra or {}
    parts = [f"predicted iteration: {predicted.iteration_s:.3g} s"]
    if predicted.lower_bound_s is not None:
        parts.append(f"lower bound {predicted.lower_bound_s:.3g} s")
    if isinstance(extra.get("strategy"), str):
        parts.append(f"found by {extra['strategy']}")
    costs = extra.get("costs")
    if isinstance(costs, Mapping):
        parts.append("prices: " + ", ".join(f"{name} {value}" for name, value in costs.items()))
    return "; ".join(parts)


def _arrivals(plan: Plan, graph: Graph | None) -> dict[str, str]:
    """Call -> where its weights come from, for calls before which a realloc stands."""
    if graph is None:
        return {}
    return {
        instruction.call: format_placement(instruction.source.mesh, instruction.source.layout)
        for instruction in compile_program(graph, plan).instructions
        if isinstance(instruction, Realloc)
    }


def _devices(plan: Plan) -> Table:
    table = Table(title="rank x call", title_justify="left")
    table.add_column("rank", justify="right")
    for name in plan.calls:
        table.add_column(name, overflow="fold")
    peaks = plan.predicted.peak_memory_bytes if plan.predicted is not None else {}
    if peaks:
        table.add_column("peak memory", justify="right")
    each = plan.cluster.num_devices <= _MAX_ROWS
    for first, last in _rows(plan, each):
        cells = [_cell(placement, first, each) for placement in plan.calls.values()]
        if peaks:
            known = [peaks[str(rank)] for rank in range(first, last + 1) if str(rank) in peaks]
            cells.append(f"{max(known) / 2**30:.3g} GiB" if known else "")
        table.add_row(str(first) if first == last else f"{first}-{last}", *cells)
    return table


def _rows(plan: Plan, each: bool) -> Iterator[tuple[int, int]]:
    """(first, last) rank of every row."""
    size = plan.cluster.num_devices
    if each:
        yield from ((rank, rank) for rank in range(size))
        return
    borders = sorted({0, size, *(edge for placement in plan.calls.values() for edge in placement.ranks)})
    yield from ((start, stop - 1) for start, stop in itertools.pairwise(borders))


def _cell(placement: Placement, rank: int, each: bool) -> str:
    if rank not in placement.mesh:
        return ""
    layout = placement.parallel
    if not each:
        return str(layout)
    at = coordinates_of(rank, placement.mesh, layout)
    parts = [
        f"{axis[0]}{getattr(at, axis)}" for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1
    ]
    return " ".join(parts) or "whole"
