"""A reallocation in the background, and waiting for the part of it that is needed next.

Slices have waves. A wave has arrived on a rank when all messages that begin with it or an earlier one are received and
unpacked there, and all local copies and duplicates of these waves are made. Under the order ``layers`` the waves are
the layers in the order of their use, so a forward pass can start when the first has arrived.

On CUDA the thread works on a stream of its own, behind what the caller's stream held when the stream was started;
`wait` lets the caller's current stream wait for the event of the wave, and does not block the host for the device.

Invariants (tests/unit/realloc_ops/test_streaming.py, tests/hooks/test_streaming.py):
    - `wait` returns only when the wave has arrived, and raises what the run raised if it never will;
    - what it waits for is bounded by the transport's timeout, which names the peer;
    - the thread touches the transport's group only, so collectives of other groups may run beside it.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_real.realloc_ops.execution.report import ReallocReport

__all__ = ["Arrivals", "Stream", "WaveCounter"]

_END = 1 << 62
"""Behind every wave."""


class WaveCounter:
    """Counts down what has to happen before each wave has arrived."""

    def __init__(self, waves: Iterable[int]) -> None:
        """Take the wave of every message and every group of copies that is to come."""
        self._remaining = Counter(waves)
        self._ascending = sorted(self._remaining)
        self._front = 0

    @property
    def next_wave(self) -> int:
        """The lowest wave that has not arrived; all below have."""
        return self._ascending[self._front] if self._front < len(self._ascending) else _END

    def count(self, wave: int) -> None:
        """One message or group of copies of this wave is done."""
        self._remaining[wave] -= 1
        while self._front < len(self._ascending) and not self._remaining[self._ascending[self._front]]:
            self._front += 1


class Arrivals:
    """How far a run has come, for other threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next_wave = -1
        self._events: list[tuple[int, torch.cuda.Event]] = []
        """What the waves below a bound wait for on the device; ascending."""
        self._ended = False
        self._error: BaseException | None = None

    def advance(self, next_wave: int, devices: Collection[torch.device]) -> None:
        """All waves below `next_wave` have arrived, once the current streams of `devices` have done what they hold."""
        events = [_event(device) for device in devices if device.type == "cuda"]
        with self._condition:
            self._next_wave = next_wave
            self._events += [(next_wave, event) for event in events]
            self._condition.notify_all()

    def end(self, error: BaseException | None) -> None:
        """The run has finished or failed."""
        with self._condition:
            self._ended, self._error = True, error
            self._condition.notify_all()

    def wait(self, wave: int) -> None:
        """Block until `wave` has arrived.

        Raises:
            RealError: the run failed before that; the run's own error.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._next_wave > wave or self._ended)
            if self._next_wave <= wave and self._error is not None:
                raise self._error
            first = bisect.bisect_right(self._events, wave, key=lambda item: item[0])
            bound = self._events[first][0] if first < len(self._events) else None
            events = [event for reached, event in self._events[first:] if reached == bound]
        for event in events:
            event.wait()


class Stream:
    """A reallocation under way in a thread of its own. Made by `ReallocExecutor.start`."""

    def __init__(
        self,
        name: str,
        run: Callable[[Arrivals], ReallocReport],
        *,
        wave_of: Callable[[torch.Tensor], int | None],
        devices: Collection[torch.device],
    ) -> None:
        """Start the thread. It is a daemon: an interpreter that ends does not wait for it.

        Args:
            name: of the thread.
            run: does everything, telling the arrivals how far it has come.
            wave_of: see `wave_of`.
            devices: where the weights are.
        """
        self._arrivals = Arrivals()
        self._report: ReallocReport | None = None
        self._wave_of = wave_of
        self._run = run
        self._devices = [device for device in devices if device.type == "cuda"]
        self._side = _side_stream(self._devices)
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        self._thread.start()

    def wait(self, wave: int) -> None:
        """Return when all bytes of this wave and those before it are here; on this rank only, no collective.

        Returns at once for waves that this rank has nothing of, once all before them are here.

        Raises:
            PeerError: another rank failed or did not come in time; names the peer and the message.
            RealError: whatever else the run raised before the wave was complete.
        """
        self._arrivals.wait(wave)

    def wave_of(self, tensor: torch.Tensor) -> int | None:
        """The last wave that writes to a parameter or buffer of the destination; None if none does."""
        return self._wave_of(tensor)

    @property
    def ended(self) -> bool:
        """Whether the run has finished or failed."""
        return not self._thread.is_alive()

    def finish(self) -> ReallocReport:
        """Return when everything is here and everything that others need is sent.

        Raises:
            RealError: what the run raised.
        """
        self._thread.join()
        self._arrivals.wait(_END)
        assert self._report is not None, "a run that ended without an error has a report"
        return self._report

    def _drive(self) -> None:
        error: BaseException | None = None
        try:
            with self._on_side_stream():
                self._report = self._run(self._arrivals)
        except BaseException as caught:  # noqa: BLE001 - shown by `wait` and `finish`, in the thread of the caller
            error = caught
        self._arrivals.end(error)

    def _on_side_stream(self) -> AbstractContextManager[object]:
        if self._side is None:
            return nullcontext()
        torch.cuda.set_device(self._side.device)
        on_side: AbstractContextManager[object] = torch.cuda.stream(self._side)
        return on_side


def _side_stream(devices: Collection[torch.device]) -> torch.cuda.Stream | None:
    """A stream that begins behind what the caller's stream holds now; None without CUDA."""
    if not devices:
        return None
    (device,) = devices
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    return side


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
