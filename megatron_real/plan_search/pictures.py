"""Pictures of estimates as SVG: the simulated timeline, memory over the program, and period against devices. No torch.

Invariants (tests/unit/plan_search/test_pictures.py):
    - bars of memory have heights in proportion to the bytes of the report, and the tallest is its peak;
    - a picture is well-formed XML, whatever the names in it are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from megatron_real.errors import ConfigError
from megatron_real.layout import Mesh
from megatron_real.plan_search.explain import ranks_text
from megatron_real.plan_search.memory_report import RankMemory
from megatron_real.plan_search.planner import Estimate
from megatron_real.plan_search.report import bytes_text, fullest_by_window
from megatron_real.timeline import pick_iterations, timeline_svg

__all__ = ["TradeOff", "memory_svg", "timeline_picture", "tradeoff_svg", "write_picture", "write_pictures"]

_GIB = 2**30
_WIDTH = 1280
_LEFT = 78
_RIGHT = 24
_TOP = 70
_PANEL = 150
_LABELS = 78
"""Height of the slanted names of instructions below a panel."""
_PANEL_TITLE = 26
_MAX_PANELS = 8
_MAX_LANES = 16
_INK = "#1c1c1c"
_FONT = "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\""
_PARTS: Mapping[str, tuple[str, str]] = {
    # by how an owner's name ends: (legend, fill)
    "parameters": ("weights", "#5b95cd"),
    "gradients and optimizer": ("gradients and optimizer", "#f0a24f"),
    "activations": ("activations and key-value cache", "#78b872"),
    "staging": ("staging of reallocations", "#c8324f"),
}
_REST = ("other", "#b9b9b9")
_SERIES = ("#2a5f9e", "#c96a14", "#4a8a45", "#7c58ad", "#b24d6d", "#3d8589", "#8c7b33")


class TradeOff(NamedTuple):
    """A point of a sweep."""

    series: str
    """Points of one series are joined."""
    num_devices: int
    period_s: float


def timeline_picture(estimate: Estimate, *, title: str = "Simulated timeline") -> str:
    """A few iterations; on large clusters of one rank from each group that does the same."""
    spans = estimate.simulation.spans
    if estimate.program.world_size > _MAX_LANES:
        borders = {0, *(edge for call in estimate.plan.calls.values() for edge in call.ranks)}
        spans = tuple(span for span in spans if span.rank in borders)
        title += ", one rank of each group that does the same"
    return timeline_svg({"": spans}, iterations=pick_iterations(spans), title=title)


def memory_svg(estimate: Estimate, capacity_bytes: int, *, title: str = "Predicted device memory") -> str:
    """One panel per group of ranks that run the same calls, for the fullest of them; one bar per instruction.

    Args:
        estimate: of a plan.
        capacity_bytes: of a device: a line.
        title: of the picture.

    Returns:
        An SVG document; of many groups those with the highest peaks, in the order of their ranks.
    """
    pieces = fullest_by_window(estimate)
    shown = sorted(pieces, key=lambda piece: -piece[1].peak_bytes)[:_MAX_PANELS]
    if len(pieces) > len(shown):
        title += f" (the fullest ranks; {len(pieces) - len(shown)} groups left out)"
    top_bytes = 1.12 * max(capacity_bytes, *(group.peak_bytes for _, group in shown))
    body: list[str] = []
    y = _TOP
    for mesh, group in sorted(shown, key=lambda piece: piece[0].start):
        body += _memory_panel(mesh, group, y, (top_bytes, capacity_bytes))
        y += _PANEL_TITLE + _PANEL + _LABELS
    return _document(title, y, [*_legend(), *body])


def tradeoff_svg(points: Sequence[TradeOff], *, title: str = "Period by number of devices") -> str:
    """Period against devices, both on logarithmic axes; dotted: what perfect scaling of a series' first point gives."""
    height, bottom = 560, 490
    if not points:
        return _document(title, height, [])
    xs = [math.log2(point.num_devices) for point in points]
    ys = [math.log10(point.period_s) for point in points]
    low_x, high_x = min(xs) - 0.3, max(xs) + 0.3
    low_y, high_y = min(ys) - 0.15, max(ys) + 0.15

    def at(num_devices: float, period_s: float) -> tuple[float, float]:
        x = _LEFT + (math.log2(num_devices) - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - 260)
        y = bottom - (math.log10(period_s) - low_y) / (high_y - low_y) * (bottom - _TOP)
        return x, y

    body = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - 260}" height="{bottom - _TOP}" fill="#fafafa"/>'
    ]
    for num_devices in sorted({point.num_devices for point in points}):
        x, _ = at(num_devices, points[0].period_s)
        body.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e3e3"/>')
        body.append(_text(x, bottom + 18, str(num_devices), anchor="middle"))
    for period_s in _log_ticks(10**low_y, 10**high_y):
        _, y = at(points[0].num_devices, period_s)
        body.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 260}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        body.append(_text(_LEFT - 8, y + 4, f"{period_s:g} s", anchor="end"))
    body.append(_text((_LEFT + _WIDTH - 260) / 2, bottom + 42, "devices", anchor="middle"))
    for index, series in enumerate(dict.fromkeys(point.series for point in points)):
        fill = _SERIES[index % len(_SERIES)]
        mine = sorted(
            (point for point in points if point.series == series), key=lambda point: point.num_devices
        )
        first, last = mine[0], mine[-1]
        ideal = max(first.period_s * first.num_devices / last.num_devices, 10**low_y)
        body.append(
            _segment(at(*first[1:]), at(first.num_devices * first.period_s / ideal, ideal), fill, dashed=True)
        )
        for one, other in pairwise(mine):
            body.append(_segment(at(*one[1:]), at(*other[1:]), fill))
        for point in mine:
            x, y = at(*point[1:])
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}"/>')
            body.append(_text(x + 8, y - 7, f"{point.period_s:.3g} s", size=11))
        body.append(
            f'<rect x="{_WIDTH - 245}" y="{_TOP + 22 * index}" width="13" height="13" fill="{fill}"/>'
        )
        body.append(_text(_WIDTH - 226, _TOP + 11 + 22 * index, series or "period"))
    body.append(_text(_WIDTH - 245, bottom, "dotted: perfect scaling", size=11))
    return _document(title, height, body)


def write_picture(path: Path, text: str) -> None:
    """Write an SVG document, and its folder.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"pictures: {path}: cannot be written ({error.strerror}). Give a folder that can be made."
        ) from error


def write_pictures(
    estimate: Estimate, capacity_bytes: int, folder: Path, *, stem: str = ""
) -> tuple[Path, ...]:
    """``timeline.svg`` and ``memory.svg`` of an estimate, in `folder`; `stem` comes before the names.

    Raises:
        ConfigError: they cannot be written.
    """
    texts = {
        folder / f"{stem}timeline.svg": timeline_picture(estimate),
        folder / f"{stem}memory.svg": memory_svg(estimate, capacity_bytes),
    }
    for path, text in texts.items():
        write_picture(path, text)
    return tuple(texts)


def _memory_panel(mesh: Mesh, group: RankMemory, y: int, limits: tuple[float, int]) -> Iterator[str]:
    top_bytes, capacity_bytes = limits
    ranks = f"rank {mesh.start}" if mesh.size == 1 else f"ranks {mesh}"
    if group.mesh != mesh:
        ranks += f", fullest on {ranks_text(group.mesh)}"
    when, steps = _fullest_iteration(group)
    heading = f"{ranks}: peak {bytes_text(group.peak_bytes)} in {group.peak_at}" + (
        f", {when}" if when else ""
    )
    yield f'<g font-weight="600">{_text(_LEFT, y + 15, heading, size=13)}</g>'
    top, bottom = y + _PANEL_TITLE, y + _PANEL_TITLE + _PANEL
    scale = _PANEL / top_bytes
    yield f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_PANEL}" fill="#fafafa"/>'
    for tick in _ticks(top_bytes / _GIB):
        level = bottom - tick * _GIB * scale
        yield (
            f'<line x1="{_LEFT}" y1="{level:.1f}" x2="{_WIDTH - _RIGHT}" y2="{level:.1f}" stroke="#e3e3e3"/>'
            + _text(_LEFT - 8, level + 4, f"{tick:g} GiB", anchor="end", size=11)
        )
    slot = (_WIDTH - _LEFT - _RIGHT) / max(1, len(steps))
    for index, (name, held) in enumerate(steps):
        x = _LEFT + index * slot
        yield from _memory_bar(name, held, (x + slot * 0.08, bottom, min(slot * 0.84, 90.0)), scale)
        middle = x + slot * 0.08 + min(slot * 0.84, 90.0) / 2
        yield (
            f'<g transform="rotate(-24 {middle:.1f} {bottom + 14})">'
            f"{_text(middle, bottom + 14, name, anchor='end', size=11)}</g>"
        )
    level = bottom - capacity_bytes * scale
    yield (
        f'<line x1="{_LEFT}" y1="{level:.1f}" x2="{_WIDTH - _RIGHT}" y2="{level:.1f}" stroke="#c8324f" '
        'stroke-width="1.5" stroke-dasharray="6 4"/>'
        + _text(_WIDTH - _RIGHT, level - 4, f"capacity {bytes_text(capacity_bytes)}", anchor="end", size=11)
    )


def _memory_bar(
    name: str, held: Mapping[str, int], where: tuple[float, float, float], scale: float
) -> Iterator[str]:
    """Parts on top of each other. `where`: left edge, bottom, width."""
    x, y, width = where
    for legend, fill in (*_PARTS.values(), _REST):
        owners = {owner: size for owner, size in held.items() if _part(owner)[0] == legend and size > 0}
        size = sum(owners.values())
        if not size:
            continue
        y -= size * scale
        detail = "\n".join(f"{owner}: {bytes_text(part)}" for owner, part in owners.items())
        tip = f"{name}\n{legend}: {bytes_text(size)}\n{detail}"
        yield (
            f"<g><title>{escape(tip)}</title>"
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{size * scale:.2f}" fill="{fill}"/></g>'
        )


def _fullest_iteration(group: RankMemory) -> tuple[str, list[tuple[str, Mapping[str, int]]]]:
    """Which iteration holds most, and what is held in each of its instructions.

    The first one differs from later ones where weights leave for the host; set-up, where copies are built, stands
    before it as one bar if nothing later holds more.
    """
    steps: list[tuple[str, Mapping[str, int]]] = [(name, dict(held)) for name, held in group.history]
    later = [step for step in steps if step[0] != "set-up"]
    first, second = later[: len(later) // 2], later[len(later) // 2 :]
    set_up = max((step for step in steps if step[0] == "set-up"), key=_total, default=None)
    most = [max(map(_total, half), default=0) for half in (first, second)]
    if set_up is not None and _total(set_up) > max(most):
        return "set-up and first iteration", [set_up, *first]
    return ("first iteration", first) if most[0] > most[1] else ("", second)


def _total(step: tuple[str, Mapping[str, int]]) -> int:
    return sum(step[1].values())


def _part(owner: str) -> tuple[str, str]:
    return next((part for end, part in _PARTS.items() if owner.endswith(end)), _REST)


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for label, fill in _PARTS.values():
        yield f'<rect x="{x:.1f}" y="36" width="13" height="13" rx="2" fill="{fill}"/>'
        yield _text(x + 18, 47, label)
        x += 18 + len(label) * 7.0 + 22


def _ticks(top: float) -> Iterator[float]:
    """Three to six round values up to `top`."""
    power = 10.0 ** math.floor(math.log10(top / 3))
    step = next(power * factor for factor in (5, 2, 1) if top / (power * factor) >= 3 or factor == 1)
    for index in range(1, int(top / step) + 1):
        yield index * step


def _log_ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`, at least three of them if they differ by a fifth."""
    ticks: list[float] = []
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 2.0, 5.0), tuple(range(1, 10)), tuple(i / 10 for i in range(10, 100))):
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


def _segment(
    start: tuple[float, float], end: tuple[float, float], stroke: str, *, dashed: bool = False
) -> str:
    dash = ' stroke-dasharray="3 5" opacity="0.6"' if dashed else ' stroke-width="2"'
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dash}/>'


def _document(title: str, height: int, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'{_FONT} role="img" aria-label={quoteattr(title)}>'
    )
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    heading = f'<g font-weight="600">{_text(_LEFT, 21, title, size=16)}</g>'
    return "\n".join([head, background, heading, *body, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{_INK}">{escape(text)}</text>'
