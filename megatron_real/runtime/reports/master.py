"""The master: a thread on rank 0 that gathers metrics, hands them on, and shows the progress of all ranks.

Workers never wait for it. The program that it owns is agreed on before the run (`publication`), and who is alive
is the liveness threads' concern; the master only reads what they know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megatron_real.runtime.liveness.progress import Position
from megatron_real.runtime.reports.display import Display
from megatron_real.runtime.reports.reports import IterationMetrics, ReportReader

__all__ = ["Master"]

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_LAST_TICK_S = 0.05
"""Once rank 0 is done it only waits for the last reports."""

Sink = Callable[[int, IterationMetrics], object]


class Master:
    """Gathers and shows; on rank 0 only.

    Args:
        store: the default store of ``torch.distributed``.
        world_size: number of ranks.
        sink: gets every complete iteration once, in order, in the master's thread; called with the iteration and
            its metrics by call.
        positions: where the ranks are, such as `Liveness.positions`.
        display: where progress is shown.
    """

    def __init__(
        self,
        store: dist.Store,
        world_size: int,
        *,
        sink: Sink | None = None,
        positions: Callable[[], Mapping[int, Position]] | None = None,
        display: Display | None = None,
    ) -> None:
        self._reader = ReportReader(store, world_size)
        self._sink = sink
        self._positions = positions
        self._display = display or Display(None)
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="real-master", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Wait until every rank's publisher is closed and everything has gone to the sink.

        Call it while the liveness threads still watch: they end the process if a rank never comes.

        Raises:
            Exception: what the sink raised.
        """
        self._closing.set()
        self._thread.join()
        self._display.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._reader.open:
                for iteration, metrics in self._reader.read():
                    self._take(iteration, metrics)
                if self._positions is not None:
                    self._display.positions(self._positions())
                if self._closing.wait(_TICK_S):
                    time.sleep(_LAST_TICK_S)
        except RuntimeError as error:  # the store is gone: the liveness threads end the process
            logger.debug("master: %s", error)

    def _take(self, iteration: int, metrics: IterationMetrics) -> None:
        if self._sink is not None and self._error is None:
            try:
                self._sink(iteration, metrics)
            except Exception as error:  # boundary: a full disk must not go unnoticed, nor end the gathering
                logger.exception("iteration %d: its metrics cannot be written", iteration)
                self._error = error
        self._display.iteration(iteration, metrics)
