"""Spans: what a rank did, from when to when; written as JSONL per rank, read back, and exported as a Chrome trace.

Measured spans (`Tracer`) and simulated ones have the same names, so both go through the same functions.

Facts that readers of spans know:
    - ``type`` and ``model`` of a run (``type="train"``, ``model="actor"``);
    - ``side`` of a transfer (``"send"`` or ``"receive"``; ``"gather"``, where ranks tell each other);
    - ``from`` of a receiving transfer: the ranks that send something to this one, such as ``"0,2"``;
    - ``joint`` of a run or a gathering transfer: the ranks that go through it together, such as ``"0-3"``;
    - ``bytes`` and ``tokens`` of anything;
    - ``peak_bytes``: the most device memory that the rank had booked while it was in the span.

Invariants (tests/unit/test_trace.py):
    - spans of one rank do not overlap; `attribute_waits` keeps that and keeps each rank's total time;
    - `read_spans` of what a `Tracer` wrote gives the spans back, whatever the moment at which the rank was killed.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_real.errors import ConfigError

__all__ = [
    "EVALUATION_SPAN",
    "OpenSpan",
    "Span",
    "SpanKind",
    "Tracer",
    "attribute_waits",
    "read_spans",
    "write_chrome_trace",
]

EVALUATION_SPAN = "evaluation"
"""The name of a span, of the kind ``other``, that is an evaluation before its iteration and no part of it."""

Fact = str | int | float | bool | None


class SpanKind(StrEnum):
    """What a rank's time went into."""

    RUN = "run"
    REALLOC = "realloc"
    TRANSFER = "transfer"
    WAIT = "wait"
    SAVE = "save"
    OFFLOAD = "offload"
    """Offload and reload of a copy."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A timed interval of a rank, measured or simulated."""

    rank: int
    iteration: int
    name: str
    """The instruction's name, such as ``run:actor_gen``."""
    kind: SpanKind
    start_s: float
    """Seconds since the epoch (measured) or since the start of the run (simulated)."""
    end_s: float
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def subject(self) -> str:
        """The name without its kind: the call of ``run:actor_gen``."""
        return self.name.partition(":")[2] or self.name


_JOINT = (SpanKind.REALLOC, SpanKind.SAVE)
"""Kinds of instructions that start when their last rank has entered; of others the fact ``joint`` says so."""

_Key = tuple[int, str, Fact]


class OpenSpan:
    """A span that is being measured; `facts` may be added until it ends."""

    __slots__ = ("_start", "_tracer", "facts", "iteration", "kind", "name")

    def __init__(
        self, tracer: Tracer, name: str, kind: SpanKind, iteration: int, facts: dict[str, Fact]
    ) -> None:
        self._tracer = tracer
        self._start = 0.0
        self.name = name
        self.kind = kind
        self.iteration = iteration
        self.facts = facts

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end = time.monotonic()
        if kind is not None:
            self.facts["error"] = kind.__name__
        self._tracer.write(self, self._start, end)


class Tracer:
    """Writes the spans of one rank to ``<folder>/rank-<r>.jsonl``, a line each, as they end.

    A file that is there is written over: a resumed run has a trace of its own. Times come from the monotonic
    clock, shifted once to seconds since the epoch: ranks of one host share the clock, ranks of several hosts are as
    well aligned as their wall clocks.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.jsonl"
        self._rank = rank
        self._epoch = time.time() - time.monotonic()
        # Line buffered: what is written survives os._exit and SIGKILL.
        self._file = self.path.open("w", buffering=1, encoding="utf-8")

    def span(self, name: str, kind: SpanKind | str, iteration: int, **facts: Fact) -> OpenSpan:
        """A context manager that measures one instruction; the span is written even when the body raises."""
        return OpenSpan(self, name, SpanKind(kind), iteration, facts)

    def write(self, span: OpenSpan, start: float, end: float) -> None:
        """Write an ended span; `start` and `end` are monotonic times in seconds."""
        facts = json.dumps(span.facts) if span.facts else "{}"
        self._file.write(
            f'{{"rank": {self._rank}, "iteration": {span.iteration}, "name": "{span.name}", "kind": "{span.kind}", '
            f'"start_s": {start + self._epoch:.6f}, "end_s": {end + self._epoch:.6f}, "facts": {facts}}}\n'
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_spans(folder: Path) -> tuple[Span, ...]:
    """All spans under `folder` (``rank-*.jsonl``), by rank and start. A last line that is cut off is ignored.

    Raises:
        ConfigError: a file has a malformed line before its last.
    """
    spans: list[Span] = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        spans.extend(_read_file(path))
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s)))


def _read_file(path: Path) -> Iterator[Span]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            span = Span(**{**values, "kind": SpanKind(values["kind"])})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                return  # the rank was killed while it wrote
            raise ConfigError(
                f"{path}:{number}: found {line[:60]!r}; expected a span as the tracer writes it."
            ) from error
        yield span


def attribute_waits(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Split the time in which a rank only waited for others off its spans. Pure.

    Of a realloc, a save, and whatever has the fact ``joint``, the time before its last participant entered is
    ``wait``; of a participant that was done before the last one entered (it did not need it), the time before the
    last one that entered while it was inside. (In a call the early rank may compute first and stand still
    later, at its first collective with the late one; it is early by the same time.) A receiving transfer's time
    before the last of its senders started to send is ``wait``; where the fact ``from`` is missing, any rank that
    sends may be one. Each rank's total time stays the same. A wait keeps the instruction's name and facts.
    """
    spans = tuple(spans)
    entered: dict[_Key, list[float]] = defaultdict(list)
    posted: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        if (key := _meeting(span)) is not None:
            entered[key].append(span.start_s)
        elif span.kind is SpanKind.TRANSFER and span.facts.get("side") == "send":
            posted[span.iteration, span.name].append(span)
    result: list[Span] = []
    for span in spans:
        if (key := _meeting(span)) is not None:
            result += _split(span, entered[key])
        elif span.kind is SpanKind.TRANSFER and span.facts.get("side") == "receive":
            sends = posted.get((span.iteration, span.name), [])
            result += _split(span, [send.start_s for send in sends if _sends_to(send.rank, span)])
        else:
            result.append(span)
    return tuple(sorted(result, key=lambda span: (span.rank, span.start_s, span.end_s)))


def _meeting(span: Span) -> _Key | None:
    """What the spans of ranks that wait for each other have in common; None if nobody is waited for."""
    ranks = span.facts.get("joint")
    if span.kind in _JOINT or (ranks is not None and span.kind is not SpanKind.WAIT):
        return span.iteration, span.name, ranks
    return None


def _sends_to(rank: int, receive: Span) -> bool:
    senders = receive.facts.get("from")
    return senders is None or str(rank) in str(senders).split(",")


def _split(span: Span, others: Sequence[float]) -> list[Span]:
    ready = max((time_s for time_s in others if time_s <= span.end_s), default=span.start_s)
    if ready <= span.start_s:
        return [span]
    return [replace(span, kind=SpanKind.WAIT, end_s=ready), replace(span, start_s=ready)]


def write_chrome_trace(spans: Iterable[Span], path: Path) -> None:
    """Write `spans` as a Chrome trace: one process per rank, times in µs from the first span's start.

    Perfetto (https://ui.perfetto.dev) and chrome://tracing open it.
    """
    spans = tuple(spans)
    origin = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        )
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        )
    events += [_chrome_event(span, origin) for span in spans]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


def _chrome_event(span: Span, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"wait {span.name}" if span.kind is SpanKind.WAIT else span.name,
        "cat": span.kind.value,
        "pid": span.rank,
        "tid": 0,
        "ts": round((span.start_s - origin_s) * 1e6, 1),
        "dur": round(span.duration_s * 1e6, 1),
        "args": {"iteration": span.iteration, **span.facts},
    }
