"""How a step's bytes get from one rank to another: over `torch.distributed`, or inside one process for tests.

A transport exchanges at most one parcel in each direction at a time and is told when the executor needs the result.
Messages of a pair match by their order alone, so there are no tags and NCCL and gloo run the same code.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_real.errors import PeerError, RealError

__all__ = ["LocalNetwork", "Parcel", "Pending", "TorchTransport", "Transport"]

_POLL_S = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bytes to send to, or to be filled by, a peer."""

    peer: int
    """Global rank."""
    payload: torch.Tensor
    """Flat uint8 tensor on the transport's staging device."""
    label: str
    """For error messages."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """An exchange under way."""

    send: Parcel | None
    receive: Parcel | None
    works: list[tuple[Parcel, dist.Work]] = field(default_factory=list)
    """Of `TorchTransport`."""
    remaining: int = 0
    """Of `LocalNetwork`: directions that are not complete."""


class Transport(Protocol):
    """What the executor needs."""

    def staging_device(self) -> torch.device:
        """Where payloads must lie."""
        ...

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Pending:
        """Start both directions; returns at once."""
        ...

    def wait(self, pending: Pending) -> None:
        """Return when the sent payload may be overwritten and the received one read.

        Raises:
            PeerError: the other end failed or did not come in time; names the peer and the message.
        """
        ...


class TorchTransport:
    """Point-to-point over a process group."""

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, timeout_s: float) -> None:
        """Use `connect`."""
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()

    @classmethod
    def connect(cls, group: dist.ProcessGroup, *, timeout_s: float = 600.0) -> TorchTransport:
        """Make a transport over `group`, which must be used for nothing else. Collective over `group`.

        NCCL makes its communicator at the first operation, and needs all ranks of the group for that, while in a
        reallocation some ranks may have nothing to do: so it is made here.

        Args:
            group: a gloo or NCCL group of all ranks of both layouts.
            timeout_s: how long one wait may last. A source may still be computing when a destination waits for it.
        """
        on_cuda = "nccl" in dist.get_backend(group)  # also of a group for both devices, "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if on_cuda:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return cls(group, device=device, timeout_s=timeout_s)

    def staging_device(self) -> torch.device:
        return self._device

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Pending:
        operations: list[dist.P2POp] = []
        parcels: list[Parcel] = []
        # Batched: unbatched NCCL operations between two ranks share one stream, so two ranks that both send first
        # would wait for each other. On gloo a batch is the plain isend and irecv.
        for parcel, operation in ((send, dist.isend), (receive, dist.irecv)):
            if parcel is not None:
                operations.append(dist.P2POp(operation, parcel.payload, parcel.peer, self._group))
                parcels.append(parcel)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._peer_error(parcels, "could not be started", error) from error
        # NCCL may return one work for the whole batch; then any of the parcels names it.
        return Pending(send=send, receive=receive, works=list(zip(parcels, works, strict=False)))

    def wait(self, pending: Pending) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        if self._device.type == "cuda":
            self._wait_cuda(pending, deadline_s)
            return
        for parcel, work in reversed(pending.works):  # what was received first: it can be unpacked
            try:
                work.wait(datetime.timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
            except RuntimeError as error:
                late = time.monotonic() >= deadline_s
                what = f"did not complete within {self._timeout_s:g} s" if late else "failed"
                raise self._peer_error([parcel], what, error) from error

    def _wait_cuda(self, pending: Pending, deadline_s: float) -> None:
        """Order the current stream behind the exchange, then watch it from the host so that a dead peer is named."""
        for parcel, work in pending.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._peer_error([parcel], "failed", error) from error
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() > deadline_s:
                parcels = [parcel for parcel in (pending.send, pending.receive) if parcel is not None]
                raise self._peer_error(parcels, f"did not complete within {self._timeout_s:g} s", None)
            time.sleep(_POLL_S)

    def _peer_error(self, parcels: list[Parcel], what: str, error: Exception | None) -> PeerError:
        names = "; ".join(parcel.label for parcel in parcels)
        peers = sorted({parcel.peer for parcel in parcels})
        cause = f" ({error})" if error is not None else ""
        return PeerError(
            f"reallocation on rank {self._rank}: {names} {what}{cause}. "
            f"Look at rank {', '.join(map(str, peers))} first."
        )


class LocalNetwork:
    """All ranks of a reallocation in one process and one thread, with the blocking rules of gloo.

    A send completes only when its receive was posted. `run` advances each rank's executor until it waits for something
    that is not complete; if nobody can advance, the ranks have deadlocked, which is found at once and without a clock.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._sent: dict[tuple[int, int], deque[tuple[Parcel, Pending]]] = {}
        self._wanted: dict[tuple[int, int], deque[tuple[Parcel, Pending]]] = {}
        self.bytes_by_pair: dict[tuple[int, int], int] = {}
        self.messages_by_pair: dict[tuple[int, int], int] = {}

    def transport(self, rank: int) -> Transport:
        """The end of `rank`."""
        return _LocalTransport(self, rank)

    def run(
        self, programs: Mapping[int, Generator[Pending]], *, pick: Callable[[list[int]], int] | None = None
    ) -> None:
        """Drive the executors' `steps()` of all ranks to their end.

        Args:
            programs: by rank.
            pick: chooses which of the ranks that can advance does so; the lowest by default.

        Raises:
            RealError: no rank can advance.
        """
        waiting: dict[int, Pending | None] = dict.fromkeys(programs)
        while waiting:
            ready = [rank for rank, pending in waiting.items() if pending is None or pending.remaining == 0]
            if not ready:
                raise RealError(
                    f"reallocation: ranks {sorted(waiting)} wait for each other: {self._open_labels()}"
                )
            rank = pick(ready) if pick is not None else min(ready)
            try:
                waiting[rank] = next(programs[rank])
            except StopIteration:
                del waiting[rank]

    def deliver(self, rank: int, pending: Pending) -> None:
        """Post the parcels of `rank` and complete every pair of a send and its receive."""
        if pending.send is not None:
            self._sent.setdefault((rank, pending.send.peer), deque()).append((pending.send, pending))
            self._match(rank, pending.send.peer)
        if pending.receive is not None:
            self._wanted.setdefault((pending.receive.peer, rank), deque()).append((pending.receive, pending))
            self._match(pending.receive.peer, rank)

    def _match(self, src: int, dst: int) -> None:
        sent, wanted = self._sent.get((src, dst)), self._wanted.get((src, dst))
        while sent and wanted:
            (outgoing, sender), (incoming, receiver) = sent.popleft(), wanted.popleft()
            if outgoing.payload.numel() != incoming.payload.numel():
                raise RealError(
                    f"reallocation: {incoming.label}: found {outgoing.payload.numel()} bytes sent; expected "
                    f"{incoming.payload.numel()}."
                )
            incoming.payload.copy_(outgoing.payload)
            sender.remaining -= 1
            receiver.remaining -= 1
            self.bytes_by_pair[src, dst] = self.bytes_by_pair.get((src, dst), 0) + outgoing.payload.numel()
            self.messages_by_pair[src, dst] = self.messages_by_pair.get((src, dst), 0) + 1

    def _open_labels(self) -> list[str]:
        queues = [*self._sent.values(), *self._wanted.values()]
        return [parcel.label for queue in queues for parcel, _ in queue]

    def staging_device(self) -> torch.device:
        return self._device


class _LocalTransport:
    """One rank's end of a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    def staging_device(self) -> torch.device:
        return self._network.staging_device()

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Pending:
        pending = Pending(send=send, receive=receive, remaining=(send is not None) + (receive is not None))
        self._network.deliver(self._rank, pending)
        return pending

    def wait(self, pending: Pending) -> None:
        if pending.remaining:
            parcels = [parcel.label for parcel in (pending.send, pending.receive) if parcel is not None]
            raise PeerError(
                f"reallocation on rank {self._rank}: {parcels} can only complete under LocalNetwork.run"
            )
