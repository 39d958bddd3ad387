"""How metrics come from all ranks to rank 0: through the store, off the critical path.

A rank's reports are numbered keys; rank 0 reads and deletes them in order. Every rank ends each of its
iterations with a mark, so rank 0 knows when it has all of an iteration, whatever iteration the ranks are in by
then. The reader in turn marks the last iteration that was taken, for who must not go on before.
"""

from __future__ import annotations

import datetime
import json
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from megatron_real.runtime.liveness.store_client import open_client

__all__ = ["IterationMetrics", "MetricsPublisher", "ReportReader"]

logger = logging.getLogger(__name__)

IterationMetrics = dict[str | None, dict[str, Any]]
"""Metrics of an iteration by call; None holds those of the whole batch."""


_WRITTEN_TIMEOUT_S = 5.0
"""Ten times the master's pause between two looks."""


def _written(iteration: int) -> str:
    """The key that says that the metrics of this iteration, the last one so far, were taken."""
    return f"written/{iteration}"


class MetricsPublisher:
    """Sends one rank's metrics: `publish` puts them into a queue, a thread with its own store client sends them."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._waiting: dist.Store | None = None
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        client = open_client(store, purpose="reports", who=f"rank {rank}", timeout_s=60.0)
        self._thread = threading.Thread(target=self._send, args=(client,), name="real-metrics", daemon=True)
        self._thread.start()

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        """Report metrics of a call, or (None) of the whole batch; values go through JSON. Never blocks."""
        self._queue.put({"iteration": iteration, "call": call, "values": dict(values)})

    def end_iteration(self, iteration: int) -> None:
        """This rank has reported all of this iteration; every rank says so, also one that has nothing to report."""
        self._queue.put({"iteration": iteration, "end": True})

    def wait_written(self, iteration: int, timeout_s: float = _WRITTEN_TIMEOUT_S) -> bool:
        """Wait until the master has taken this iteration, or until the time is up; whether it has."""
        try:
            if self._waiting is None:  # a client of its own: a wait would hold up the sending thread
                self._waiting = open_client(
                    self._store, purpose="reports", who=f"rank {self._rank}, written", timeout_s=60.0
                )
            self._waiting.wait([_written(iteration)], datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            logger.warning(
                "iteration %d: its metrics are not written yet; going on (%s)",
                iteration + 1,
                str(error).splitlines()[0],
            )
            return False
        return True

    def close(self) -> None:
        """Send what is left, and say that nothing more comes. Calling it again does nothing."""
        self._queue.put(None)
        self._thread.join()

    def _send(self, client: dist.Store) -> None:
        count = 0
        try:
            while (report := self._queue.get()) is not None:
                client.set(f"{self._rank}/{count}", json.dumps(report))
                count += 1
            client.set(f"{self._rank}/{count}", json.dumps({"closed": True}))
            client.check([f"{self._rank}/{count}"])  # an answer means that it has arrived
        except RuntimeError as error:  # the store is gone: the liveness threads end the process
            logger.debug("metrics of rank %d: %s", self._rank, error)


class ReportReader:
    """Reads the reports of all ranks, on rank 0. For one thread."""

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self._client = open_client(store, purpose="reports", who="master", timeout_s=60.0)
        self._world_size = world_size
        self._next = dict.fromkeys(range(world_size), 0)
        self._metrics: dict[int, IterationMetrics] = defaultdict(dict)
        self._ends: dict[int, int] = defaultdict(int)

    @property
    def open(self) -> bool:
        """Whether some rank may still report."""
        return bool(self._next)

    def read(self) -> Iterator[tuple[int, IterationMetrics]]:
        """Read what has come; iterations that are complete, each once, in order.

        Where several ranks report the same name of a call, the first to be read stays.

        Raises:
            RuntimeError: the store is gone.
        """
        for rank in list(self._next):
            while rank in self._next and self._client.check([key := f"{rank}/{self._next[rank]}"]):
                report = json.loads(self._client.get(key))
                self._client.delete_key(key)
                self._next[rank] += 1
                if report.get("closed"):
                    del self._next[rank]
                elif report.get("end"):
                    self._ends[report["iteration"]] += 1
                else:
                    known = self._metrics[report["iteration"]].setdefault(report["call"], {})
                    self._metrics[report["iteration"]][report["call"]] = {**report["values"], **known}
        for iteration in sorted(self._ends):
            if self._ends[iteration] == self._world_size:
                del self._ends[iteration]
                yield iteration, self._metrics.pop(iteration, {})
                # Whoever took it is back for more, so it is written.
                self._client.set(_written(iteration), "")
                self._client.delete_key(_written(iteration - 1))
