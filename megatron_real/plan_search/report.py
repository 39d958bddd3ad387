"""What people read of a search, an estimate, a comparison and an explanation: tables and lines. No torch.

Invariants (tests/unit/plan_search/test_report.py):
    - the parts of a call's row add up to its seconds;
    - every number is one of the estimate; nothing is recomputed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.table import Table

from megatron_real.layout import Mesh, format_placement
from megatron_real.plan import Placement
from megatron_real.plan_search.costs.moves import ReallocCost
from megatron_real.plan_search.explain import SLACK, Explanation, Kind, Neighbour, ranks_text
from megatron_real.plan_search.memory_report import RankMemory
from megatron_real.plan_search.planner import Estimate, Planner, SearchReport
from megatron_real.program import Transfer

__all__ = [
    "bytes_text",
    "calls_table",
    "costs_table",
    "decisions_table",
    "differences_table",
    "estimate_lines",
    "executable_line",
    "fullest",
    "fullest_by_window",
    "memory_table",
    "neighbours_table",
    "notes_of",
    "path_table",
    "search_lines",
    "seconds_text",
    "signed_seconds",
    "transfer_seconds",
]

_GIB = 2**30
_MAX_RANKS = 24
"""Groups of ranks that a table of memory shows."""


def seconds_text(seconds: float) -> str:
    """Three digits, in s, ms or µs."""
    if not math.isfinite(seconds):
        return "-"
    if abs(seconds) < 1e-9:
        return "0"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1 or unit == "µs":
            value = seconds * factor
            digits = max(0, 2 - math.floor(math.log10(abs(value))))
            return f"{value:.{min(digits, 3)}f} {unit}"
    raise AssertionError("the last unit takes the rest")


def bytes_text(size: float) -> str:
    """In GiB, below 0.1 of them in MiB."""
    return f"{size / _GIB:.2f} GiB" if abs(size) >= 0.1 * _GIB or size == 0 else f"{size / 2**20:.2f} MiB"


def notes_of(placement: Placement) -> str:
    """What a placement says beside its window and layout."""
    notes = []
    if placement.recompute != "none":
        notes.append(f"recompute {placement.recompute}")
    if placement.offload != "none":
        notes.append(f"offload to {placement.offload}")
    if placement.drop_trained_weights:
        notes.append("drop trained weights")
    if placement.stream:
        notes.append("stream")
    return ", ".join(notes)


def calls_table(estimate: Estimate, *, title: str) -> Table:
    """The plan: one row per call, in the order in which they run."""
    plan = estimate.plan
    cluster = plan.cluster
    table = _table(
        f"{title}: {plan.algorithm} on {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device}",
        ("call", "ranks", "layout", "micro-batches", "notes"),
        ("seconds", "share", "realloc"),
    )
    for call in estimate.program.graph.ordered(plan.order):
        placement, cost = plan.calls[call.name], estimate.calls[call.name]
        realloc = estimate.reallocs.get(call.name)
        table.add_row(
            call.name,
            ranks_text(placement.mesh),
            str(placement.parallel),
            str(placement.num_microbatches),
            notes_of(placement),
            seconds_text(cost.seconds),
            f"{100 * cost.seconds / estimate.period_s:.0f} %",
            seconds_text(realloc.exposed_s) if realloc is not None else "",
        )
    return table


def transfer_seconds(planner: Planner, estimate: Estimate) -> dict[str, float]:
    """By call, seconds of the data that it waits for: sent, on the wire, unpacked."""
    prices = planner.prices.of_program(estimate.program)
    found: dict[str, float] = {}
    for instruction in estimate.program.instructions:
        if isinstance(instruction, Transfer) and instruction.consumer is not None:
            time = prices.transfer(instruction)
            found[instruction.consumer] = found.get(instruction.consumer, 0.0) + sum(time)
    return found


def costs_table(planner: Planner, estimate: Estimate) -> Table:
    """Where each call's time goes; `realloc` (what is exposed) and `transfer` stand beside its own seconds."""
    parts = ("compute", "communication", "bubble", "optimizer", "overhead")
    table = _table("seconds of each call", ("call", "layout"), (*parts, "call", "realloc", "transfer"))
    transfers = transfer_seconds(planner, estimate)
    for call in estimate.program.graph.ordered(estimate.plan.order):
        placement, cost = estimate.plan.calls[call.name], estimate.calls[call.name]
        realloc = estimate.reallocs.get(call.name)
        table.add_row(
            call.name,
            format_placement(placement.mesh, placement.parallel),
            *(seconds_text(getattr(cost, f"{part}_s")) for part in parts),
            seconds_text(cost.seconds),
            seconds_text(realloc.exposed_s) if realloc is not None else "",
            seconds_text(transfers[call.name]) if call.name in transfers else "",
        )
    return table


def fullest(estimate: Estimate) -> RankMemory:
    """The ranks with the highest peak."""
    return max(estimate.memory.groups, key=lambda group: group.peak_bytes)


def fullest_by_window(estimate: Estimate) -> tuple[tuple[Mesh, RankMemory], ...]:
    """Ranks in pieces that run the same calls, each with the fullest ones of it: stages of a pipeline differ."""
    borders = sorted(
        {0, estimate.program.world_size} | {e for call in estimate.plan.calls.values() for e in call.ranks}
    )
    pieces = [Mesh(start, stop) for start, stop in pairwise(borders)]
    return tuple(
        (
            piece,
            max(
                (group for group in estimate.memory.groups if group.mesh.overlaps(piece)),
                key=lambda group: group.peak_bytes,
            ),
        )
        for piece in pieces
    )


def memory_table(planner: Planner, estimate: Estimate) -> Table:
    """Peak, what runs then, and head-room, by ranks that run the same calls: of the fullest of them."""
    capacity = planner.cluster.capacity_bytes
    groups = fullest_by_window(estimate)
    shown = sorted(groups, key=lambda group: -group[1].peak_bytes)[:_MAX_RANKS]
    left = len(groups) - len(shown)
    table = _table(
        f"memory (capacity {bytes_text(capacity)})" + (f", {left} groups of ranks left out" if left else ""),
        ("ranks", "fullest", "peak in", "held then"),
        ("between iterations", "peak", "head-room"),
    )
    for piece, group in sorted(shown, key=lambda group: group[0].start):
        largest = ", ".join(f"{owner} {bytes_text(size)}" for owner, size in group.holders[:3])
        table.add_row(
            ranks_text(piece),
            ranks_text(group.mesh),
            group.peak_at,
            largest,
            bytes_text(group.static_bytes),
            bytes_text(group.peak_bytes),
            bytes_text(capacity - group.peak_bytes),
        )
    return table


def executable_line(planner: Planner, estimate: Estimate) -> str:
    """``executable: yes``, or why not."""
    reasons = [str(problem) for problem in planner.executable(estimate.plan)]
    reasons += [f"it does not fit: {problem}" for problem in estimate.problems[:2]]
    if not reasons:
        return "executable: yes"
    more = f" (and {len(reasons) - 2} more reasons)" if len(reasons) > 2 else ""
    return f"executable: no: {'; '.join(reasons[:2])}{more}"


def estimate_lines(planner: Planner, estimate: Estimate) -> Iterator[str]:
    """Period, memory, reallocations, and whether the runtime can execute it."""
    yield (
        f"period: {seconds_text(estimate.period_s)} per iteration in the steady state "
        f"(the first one takes {seconds_text(estimate.simulation.first_iteration_s)})"
    )
    if estimate.refinement is not None:
        busy = ", ".join(f"{name} {mean:.1f}" for name, mean in estimate.refinement.mean_busy().items())
        cores, ranks = planner.cluster.device.number("cores_per_node"), planner.cluster.devices_per_node
        yield (
            f"refined: {ranks} ranks share the {cores:g} cores of a node, so calls are priced for the ranks that are "
            f"busy meanwhile ({busy}); for as many as may be busy the period would be "
            f"{seconds_text(estimate.refinement.unrefined_s)}"
        )
    group, capacity = fullest(estimate), planner.cluster.capacity_bytes
    room = capacity - group.peak_bytes
    yield (
        f"memory: peak {bytes_text(group.peak_bytes)} of {bytes_text(capacity)} on rank {group.mesh.start}, in "
        f"{group.peak_at}: head-room {bytes_text(room)} ({100 * room / capacity:.0f} %)"
    )
    if estimate.reallocs:
        moved = ", ".join(
            f"{name} {_realloc_text(cost)} ({bytes_text(cost.bytes_moved)})"
            for name, cost in estimate.reallocs.items()
        )
        yield f"reallocations: {moved}"
    costs = planner.operations.provenance
    yield "prices: " + ", ".join(f"{name} {value}" for name, value in costs.items())
    yield executable_line(planner, estimate)


def _realloc_text(cost: ReallocCost) -> str:
    if cost.exposed_s == cost.seconds:
        return seconds_text(cost.seconds)
    return f"{seconds_text(cost.exposed_s)} of {seconds_text(cost.seconds)} exposed"


def search_lines(planner: Planner, report: SearchReport) -> Iterator[str]:
    """What the search says about its plan: proof, work, prices of pins, what it could not price."""
    solution, refined = report.solution, report.refined
    about = ", at prices before they were refined" if refined is not None else ""
    if solution.lower_bound_s > 0:
        gap = 100 * solution.gap
        proof = "optimal among the choices" if gap < 1e-4 else f"proven within {gap:.2g} %"
        yield (
            f"{solution.strategy}: {proof}: period {seconds_text(solution.period_s)}, lower bound "
            f"{seconds_text(solution.lower_bound_s)}{about}"
        )
    else:
        yield f"{solution.strategy}: period {seconds_text(solution.period_s)}, without a lower bound{about}"
    yield (
        f"searched: {report.space.num_priced:,} priced placements of calls, {solution.evaluations:,} plans evaluated "
        f"in {seconds_text(solution.seconds)}"
    )
    if refined is not None:
        bound = (
            f"no choice is faster than {seconds_text(refined.lower_bound_s)} (every call by itself in its node)"
            if refined.lower_bound_s > 0
            else "without a lower bound"
        )
        yield (
            f"at refined prices: the best of {refined.compared} plans: period {seconds_text(refined.period_s)}, {bound}"
        )
    yield from estimate_lines(planner, report.estimate)
    for price in report.pin_prices:
        yield (
            f"pin of {price.call} ({price.pin}): costs {seconds_text(price.cost_s)} per iteration; without it "
            f"{seconds_text(price.period_without_s)}"
        )
    for call, reason in report.space.unpriced.items():
        yield f"without a price: some placements of {call}: {reason}"


def path_table(estimate: Estimate) -> Table:
    """What the last iteration's end waited for."""
    table = _table("critical path", ("step", "iteration"), ("seconds", "share"))
    path = estimate.simulation.critical_path
    total = sum(step.seconds for step in path) or 1.0
    for step in path:
        share = 100 * step.seconds / total
        if share >= 0.05:
            table.add_row(step.name, str(step.iteration), seconds_text(step.seconds), f"{share:.1f} %")
    return table


def neighbours_table(explanation: Explanation, call: str) -> Table:
    """Why each neighbouring choice of a call was not taken."""
    placement = explanation.estimate.plan.calls[call]
    title = f"{call}: {format_placement(placement.mesh, placement.parallel)}"
    table = _table(title, ("other", "change", "verdict"), ("period",))
    words = {Kind.LAYOUT: "layout", Kind.WINDOW: "window", Kind.WORK: "work"}
    for one in explanation.of(call):
        table.add_row(words[one.kind], one.change, _verdict(one), seconds_text(one.period_s))
    return table


def _verdict(neighbour: Neighbour) -> str:
    """Why it was not taken."""
    delta_s, slack = neighbour.delta_s, SLACK * neighbour.period_s
    seconds = "equal" if abs(delta_s) <= slack else signed_seconds(delta_s)
    if not neighbour.fits:
        return f"does not fit by {bytes_text(neighbour.excess_bytes)} ({seconds})"
    return f"{seconds}: better than the plan" if delta_s < -slack else seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    first: str
    second: str


def decisions_table(first: Estimate, second: Estimate, names: tuple[str, str]) -> Table | None:
    """What two plans decide differently; None if nothing."""
    rows: list[_Row] = []
    for call in first.program.graph.calls:
        one, other = first.plan.calls[call.name], second.plan.calls[call.name]
        if one != other:
            rows.append(_Row(name=call.name, first=_decision(one), second=_decision(other)))
    orders = [
        " ".join(call.name for call in estimate.program.graph.ordered(estimate.plan.order))
        for estimate in (first, second)
    ]
    if orders[0] != orders[1]:
        rows.append(_Row(name="order", first=orders[0], second=orders[1]))
    if not rows:
        return None
    table = _table("decisions", ("call", *names), ())
    for row in rows:
        table.add_row(row.name, row.first, row.second)
    return table


def differences_table(first: Estimate, second: Estimate, names: tuple[str, str]) -> Table:
    """Estimates of two plans under the same inputs."""
    table = _table("estimates", ("",), (*names, "difference"))

    def row(name: str, one: float, other: float) -> None:
        table.add_row(name, seconds_text(one), seconds_text(other), signed_seconds(other - one))

    for call in first.program.graph.calls:
        row(call.name, first.calls[call.name].seconds, second.calls[call.name].seconds)
    for name in dict.fromkeys([*first.reallocs, *second.reallocs]):
        pair = [
            estimate.reallocs[name].exposed_s if name in estimate.reallocs else 0.0
            for estimate in (first, second)
        ]
        row(f"realloc:{name}", pair[0], pair[1])
    row("period", first.period_s, second.period_s)
    peaks = [fullest(estimate).peak_bytes for estimate in (first, second)]
    change = peaks[1] - peaks[0]
    table.add_row("peak memory", *map(bytes_text, peaks), ("+" if change > 0 else "") + bytes_text(change))
    return table


def signed_seconds(seconds: float) -> str:
    """With a sign."""
    text = seconds_text(seconds)
    return text if seconds < 0 else f"+{text}" if seconds > 0 else "0"


def _decision(placement: Placement) -> str:
    notes = notes_of(placement)
    text = (
        f"{format_placement(placement.mesh, placement.parallel)}, {placement.num_microbatches} micro-batches"
    )
    return f"{text}, {notes}" if notes else text


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
