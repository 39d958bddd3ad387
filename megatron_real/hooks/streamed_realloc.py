"""A reallocation that goes on beside the call that it brings weights to (`backend.Streaming`).

Invariants (tests/e2e/test_mechanisms.py):
    - a run with streamed reallocations has the losses of one without, bit for bit;
    - the copy has a version only when all of its weights are here.
"""

from __future__ import annotations

import time

import torch

from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.streaming import Gate
from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.execution.streaming import Stream

__all__ = ["StreamedRealloc", "accounting"]


def accounting(report: ReallocReport) -> dict[str, float]:
    """What the runtime shows of a reallocation; see `ModelBackend.realloc`."""
    return {
        "bytes_moved": float(report.bytes_moved),
        "bytes_bound": float(report.bytes_bound),
        "messages": float(report.messages),
        "staging_peak_bytes": float(report.staging_peak_bytes),
    }


class _Timed:
    """A stream that sums up how long was waited for its waves."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.wait_s = 0.0

    def wait(self, wave: int) -> None:
        began_s = time.perf_counter()
        self._stream.wait(wave)
        self.wait_s += time.perf_counter() - began_s

    def wave_of(self, tensor: torch.Tensor) -> int | None:
        return self._stream.wave_of(tensor)

    def finish(self) -> ReallocReport:
        began_s = time.perf_counter()
        report = self._stream.finish()
        self.wait_s += time.perf_counter() - began_s
        return report


class StreamedRealloc:
    """One run of it on one rank."""

    def __init__(self, stream: Stream, target: ModelCopy | None, version: int) -> None:
        """Let the layers of `target` wait for theirs; no collective.

        Args:
            stream: just started.
            target: the copy that is filled; None on ranks that only send.
            version: of the weights.
        """
        self._timed = _Timed(stream)
        self._target = target
        self._version = version
        self._gate: Gate | None = None
        if target is not None:
            target.stamp.invalidate(f"version {version} is being streamed to it")
            self._gate = Gate(target.chunks, self._timed)

    def finish(self) -> dict[str, float]:
        """See `Streaming.finish`.

        Raises:
            RealError: what the run raised; the copy has no version then.
        """
        report = self._gate.finish() if self._gate is not None else self._timed.finish()
        if self._target is not None:
            self._target.stamp.set(self._version)
        return {**accounting(report), "wait_s": self._timed.wait_s}
