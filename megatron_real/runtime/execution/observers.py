"""What the runtime tells while it runs: spans, progress, and where faults are injected.

The executor knows these protocols only; each has an implementation here that does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self

__all__ = [
    "Fact",
    "FaultInjector",
    "NoFaults",
    "NoProgress",
    "NoTrace",
    "Observers",
    "Progress",
    "Span",
    "Tracer",
]

Fact = str | int | float | bool | None


class Span(Protocol):
    """An interval that is being measured."""

    facts: dict[str, Fact]
    """What to show with it; may be added to until it ends."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Tracer(Protocol):
    """Records timed intervals of this rank (`megatron_real.trace.Tracer`)."""

    def span(self, name: str, kind: str, iteration: int, **facts: Fact) -> Span:
        """A context manager around one instruction; `kind` is a `megatron_real.trace.SpanKind`."""
        ...


class Progress(Protocol):
    """Tells the master what this rank does (`megatron_real.runtime.liveness.progress.Progress`)."""

    def enter(self, iteration: int, step_index: int, name: str) -> None:
        """The instruction with this index in the global order begins. Must not block."""
        ...

    def leave(self) -> None:
        """It ended. Not called when it failed, so that the last word is the culprit."""
        ...


class FaultInjector(Protocol):
    """Kills, stops or raises on purpose, in tests (`megatron_real.runtime.liveness.faults.FaultInjector`)."""

    def before(self, iteration: int, name: str, index: int) -> None:
        """Called right before every instruction."""
        ...


class _NoSpan:
    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class NoTrace:
    """A `Tracer` that records nothing."""

    def span(self, name: str, kind: str, iteration: int, **facts: Fact) -> Span:
        return _NoSpan()


class NoProgress:
    """A `Progress` that tells nobody."""

    def enter(self, iteration: int, step_index: int, name: str) -> None:
        pass

    def leave(self) -> None:
        pass


class NoFaults:
    """A `FaultInjector` without faults."""

    def before(self, iteration: int, name: str, index: int) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Who watches a rank."""

    tracer: Tracer = field(default_factory=NoTrace)
    progress: Progress = field(default_factory=NoProgress)
    faults: FaultInjector = field(default_factory=NoFaults)
