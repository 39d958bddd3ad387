"""Draws spans as an SVG: one lane per rank, colours by model and call, waits hatched, times in seconds.

Measured and simulated spans are drawn alike, and may be stacked on one time scale (`timeline_svg` with several
panels). The picture needs nothing else: no scripts, no fonts, no files; it may be embedded in an HTML page as it
is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from megatron_real.trace import Span, SpanKind

__all__ = ["pick_iterations", "timeline_svg", "write_timeline"]

_WIDTH = 1280
_LEFT = 78
_RIGHT = 24
_LANE = 30
_LANE_GAP = 5
_TITLE = 30
_LEGEND_ROW = 22
_PANEL_TITLE = 24
_ITERATION_ROW = 18
_AXIS = 26
_PANEL_GAP = 22
_INK = "#1c1c1c"
_LABEL_WIDTH = 6.6
"""Width of a letter at the size of the labels, in pixels."""
_FONT = "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\""

_SHADES = {
    # generate, inference, train
    "actor": ("#9cc3e6", "#5b95cd", "#2a5f9e"),
    "critic": ("#f6cf9d", "#f0a24f", "#c96a14"),
    "ref": ("#b7ddb0", "#78b872", "#4a8a45"),
    "reward": ("#d3c0e8", "#a98bd0", "#7c58ad"),
}
_OTHER_SHADES = (
    ("#f2bccb", "#dd829d", "#b24d6d"),
    ("#b9dede", "#73b5b8", "#3d8589"),
    ("#ddd3a8", "#bfae66", "#8c7b33"),
)
_KIND_FILLS = {
    SpanKind.REALLOC: "#c8324f",
    SpanKind.TRANSFER: "#1d9a8a",
    SpanKind.OFFLOAD: "#7a869a",
    SpanKind.SAVE: "#6d5040",
    SpanKind.OTHER: "#cfcfcf",
    SpanKind.WAIT: "url(#real-wait)",
}
_KIND_ORDER = (
    SpanKind.REALLOC,
    SpanKind.TRANSFER,
    SpanKind.OFFLOAD,
    SpanKind.SAVE,
    SpanKind.OTHER,
    SpanKind.WAIT,
)
_TYPES = ("generate", "inference", "train")
_SUFFIXES = {"gen": "generate", "inf": "inference", "train": "train"}
_DARK = {
    "#2a5f9e",
    "#c96a14",
    "#4a8a45",
    "#7c58ad",
    "#b24d6d",
    "#3d8589",
    "#8c7b33",
    "#5b95cd",
    "#a98bd0",
} | {fill for kind, fill in _KIND_FILLS.items() if kind not in (SpanKind.OTHER, SpanKind.WAIT)}
"""Fills that need white letters."""
_PATTERN = (
    '<defs><pattern id="real-wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4f4f4"/><rect width="1.6" height="6" fill="#b9b9b9"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    spans: tuple[Span, ...]
    ranks: tuple[int, ...]
    origin_s: float
    length_s: float

    @property
    def lanes_height(self) -> int:
        return len(self.ranks) * (_LANE + _LANE_GAP)


def pick_iterations(spans: Iterable[Span], count: int = 3) -> tuple[int, ...]:
    """`count` neighbouring iterations from the middle of a run: neither its first, slow ones nor its last."""
    iterations = sorted({span.iteration for span in spans})
    first = max(0, (len(iterations) - count + 1) // 2)
    return tuple(iterations[first : first + count])


def write_timeline(
    spans: Iterable[Span], path: Path, *, iterations: Collection[int] | None = None, title: str = "Timeline"
) -> None:
    """Write a picture of `spans`; by default of a few iterations from the middle of the run."""
    spans = tuple(spans)
    chosen = pick_iterations(spans) if iterations is None else iterations
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(timeline_svg({"": spans}, iterations=chosen, title=title), encoding="utf-8")


def timeline_svg(
    panels: Mapping[str, Iterable[Span]],
    *,
    iterations: Collection[int] | None = None,
    title: str = "Timeline",
) -> str:
    """Draw spans.

    Args:
        panels: title -> spans, stacked on one time scale, each from its own time 0, such as measured and simulated.
        iterations: which to draw; None draws all.
        title: of the picture.

    Returns:
        An SVG document.
    """
    drawn = [_panel(name, spans, iterations) for name, spans in panels.items()]
    scale = (_WIDTH - _LEFT - _RIGHT) / (max((panel.length_s for panel in drawn), default=0.0) or 1.0)
    legend, top = _legend([span for panel in drawn for span in panel.spans], _fills(drawn))
    body: list[str] = []
    for panel in drawn:
        if panel.title:
            body.append(_heading(_LEFT, top + 15, panel.title, size=13))
            top += _PANEL_TITLE
        body += _draw(panel, top, scale, _fills(drawn))
        top += _ITERATION_ROW + panel.lanes_height + _AXIS + _PANEL_GAP
    height = top - _PANEL_GAP + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'{_FONT} role="img" aria-label={quoteattr(title)}>'
    )
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    heading = _heading(_LEFT, 21, title, size=16)
    return "\n".join([head, _PATTERN, background, heading, *legend, *body, "</svg>"]) + "\n"


def _panel(title: str, spans: Iterable[Span], iterations: Collection[int] | None) -> _Panel:
    chosen = tuple(span for span in spans if iterations is None or span.iteration in iterations)
    origin = min((span.start_s for span in chosen), default=0.0)
    return _Panel(
        title=title,
        spans=chosen,
        ranks=tuple(sorted({span.rank for span in chosen})),
        origin_s=origin,
        length_s=max((span.end_s for span in chosen), default=origin) - origin,
    )


def _model_and_type(span: Span) -> tuple[str, str]:
    """From the span's facts, else from a call name such as ``actor_gen``."""
    stem, _, suffix = span.subject.rpartition("_")
    model = span.facts.get("model") or stem or span.subject
    return str(model), str(span.facts.get("type") or _SUFFIXES.get(suffix, "inference"))


def _fills(panels: Sequence[_Panel]) -> dict[str, str]:
    """Fill of each call's runs, by name; calls in order of their first start."""
    runs = [span for panel in panels for span in panel.spans if span.kind is SpanKind.RUN]
    models: dict[str, tuple[str, str, str]] = {}
    fills: dict[str, str] = {}
    for span in sorted(runs, key=lambda span: (span.iteration, span.start_s)):
        if span.name in fills:
            continue
        model, kind = _model_and_type(span)
        if model == "rew":
            model = "reward"
        if model not in models:
            others = sum(known not in _SHADES for known in models)
            models[model] = _SHADES.get(model) or _OTHER_SHADES[others % len(_OTHER_SHADES)]
        fills[span.name] = models[model][_TYPES.index(kind) if kind in _TYPES else 1]
    return fills


def _legend(spans: Sequence[Span], fills: Mapping[str, str]) -> tuple[list[str], int]:
    """The legend's elements, and where the space below it begins."""
    kinds = {span.kind for span in spans}
    entries = [(name.partition(":")[2] or name, fill) for name, fill in fills.items()]
    entries += [(kind.value, _KIND_FILLS[kind]) for kind in _KIND_ORDER if kind in kinds]
    parts: list[str] = []
    x, y = float(_LEFT), _TITLE + 6
    for label, fill in entries:
        width = 18 + len(label) * 7.0 + 18
        if x + width > _WIDTH - _RIGHT:
            x, y = float(_LEFT), y + _LEGEND_ROW
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="13" height="13" rx="2" fill="{fill}" stroke="#00000022"/>'
        )
        parts.append(_text(x + 18, y + 11, label, size=12))
        x += width
    return parts, y + _LEGEND_ROW + 8


def _draw(panel: _Panel, top: int, scale: float, fills: Mapping[str, str]) -> Iterator[str]:
    lanes_top = top + _ITERATION_ROW
    bottom = lanes_top + panel.lanes_height
    right = _LEFT + panel.length_s * scale
    yield from _axis(panel, lanes_top, bottom, scale)
    for lane, rank in enumerate(panel.ranks):
        y = lanes_top + lane * (_LANE + _LANE_GAP)
        yield f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT:.1f}" height="{_LANE}" fill="#fafafa"/>'
        yield _text(_LEFT - 10, y + _LANE / 2 + 4, f"rank {rank}", size=12, anchor="end")
        for span in panel.spans:
            if span.rank == rank:
                yield _bar(span, _LEFT + (span.start_s - panel.origin_s) * scale, y, scale, fills)
    yield from _boundaries(panel, top, bottom, scale)


def _bar(span: Span, x: float, y: int, scale: float, fills: Mapping[str, str]) -> str:
    width = max(span.duration_s * scale, 0.6)
    fill = fills[span.name] if span.kind is SpanKind.RUN else _KIND_FILLS[span.kind]
    facts = "".join(f"\n{name}: {value}" for name, value in span.facts.items())
    waits = "waiting in " if span.kind is SpanKind.WAIT else ""
    tip = f"{waits}{span.name}\nrank {span.rank}, iteration {span.iteration}\n{_seconds(span.duration_s)}{facts}"
    corner = min(2.0, width / 3)
    parts = [
        "<g>",
        f"<title>{escape(tip)}</title>",
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" rx="{corner:.1f}" fill="{fill}"/>',
    ]
    label = _label(span, width)
    if label and span.kind is not SpanKind.WAIT:
        color = "#ffffff" if fill in _DARK else _INK
        parts.append(_text(x + width / 2, y + _LANE / 2 + 4, label, size=11, anchor="middle", color=color))
    return "".join([*parts, "</g>"])


def _label(span: Span, width: float) -> str:
    """The longest text that fits into a bar, or none."""
    full = span.subject if span.kind is SpanKind.RUN else span.kind.value
    for text in (full, full.partition("_")[0]):
        if len(text) * _LABEL_WIDTH + 6 <= width:
            return text
    return ""


def _boundaries(panel: _Panel, top: int, bottom: int, scale: float) -> Iterator[str]:
    """Where the first rank enters each iteration."""
    starts: dict[int, float] = {}
    for span in panel.spans:
        starts[span.iteration] = min(starts.get(span.iteration, math.inf), span.start_s)
    for iteration, start_s in sorted(starts.items()):
        x = _LEFT + (start_s - panel.origin_s) * scale
        yield (
            f'<line x1="{x:.1f}" y1="{top + 2}" x2="{x:.1f}" y2="{bottom}" stroke="#303030" stroke-width="1" '
            'stroke-dasharray="4 3"/>'
        )
        yield _text(x + 5, top + 12, f"iteration {iteration}", size=11, color="#303030")


def _axis(panel: _Panel, top: int, bottom: int, scale: float) -> Iterator[str]:
    step = _tick_step(panel.length_s)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for index in range(int(panel.length_s / step + 1e-9) + 1):
        x = _LEFT + index * step * scale
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#e3e3e3" stroke-width="1"/>'
        yield _text(x, bottom + 17, f"{index * step:.{digits}f} s", size=11, anchor="middle", color="#555555")


def _tick_step(length_s: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are 5 to 12 ticks."""
    if length_s <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(length_s / 5))
    return next(power * factor for factor in (5, 2, 1) if length_s / (power * factor) >= 5 or factor == 1)


def _seconds(duration_s: float) -> str:
    return f"{duration_s * 1e3:.2f} ms" if duration_s < 0.1 else f"{duration_s:.3f} s"


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "start", color: str = _INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">'
        f"{escape(text)}</text>"
    )


def _heading(x: float, y: float, text: str, *, size: int) -> str:
    return f'<g font-weight="600">{_text(x, y, text, size=size)}</g>'
