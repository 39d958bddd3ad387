"""How a step's bytes get from one rank to another: over `torch.distributed`, or inside one process for tests.

A transport exchanges at most one parcel in each direction at a time and is told when the executor needs the result.
Messages of a pair match by their order alone, so there are no tags and NCCL and gloo run the same code. That order is
also why runs over one transport never overlap (`Turns`), and why a transport is given up after a run that failed:
messages that nobody took would be taken for those of the next run.

Invariants (tests/unit/realloc_ops/test_transports.py, tests/distributed/test_realloc.py):
    - runs over one transport happen in the order in which they were asked for, whichever threads they are in;
    - after a failed run a `TorchTransport` refuses every other one;
    - nothing waits longer than the timeout, and whoever did not come is named.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_real.errors import PeerError, RealError

__all__ = ["LocalNetwork", "Parcel", "Pending", "TorchTransport", "Transport", "Turns"]

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
    delivered: set[int] = field(default_factory=set)
    """Of `LocalNetwork`: ids of parcels that are complete."""

    @property
    def remaining(self) -> int:
        """Of `LocalNetwork`: directions that are not complete."""
        return sum(
            parcel is not None and id(parcel) not in self.delivered for parcel in (self.send, self.receive)
        )

    def receiving(self) -> Pending:
        """What is received, to wait for it alone; gloo lets each direction be waited for once."""
        return Pending(
            send=None, receive=self.receive, works=self._works_of(self.receive), delivered=self.delivered
        )

    def sending(self) -> Pending:
        """What is sent, to wait for it alone."""
        return Pending(
            send=self.send, receive=None, works=self._works_of(self.send), delivered=self.delivered
        )

    def _works_of(self, parcel: Parcel | None) -> list[tuple[Parcel, dist.Work]]:
        """NCCL may know an exchange as a whole only: then either direction waits for both."""
        return [item for item in self.works if item[0] is parcel] or self.works


class Transport(Protocol):
    """What the executor needs."""

    def staging_device(self) -> torch.device:
        """Where payloads must lie."""
        ...

    def turn(self) -> AbstractContextManager[object]:
        """A place in the order of runs over this transport: taken by this call, entered when those before have left.

        Whoever takes it must enter it. A turn inside a turn of the same thread is entered at once.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Say that a run ended half-way, so that messages may be under way that nobody takes."""
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


class Turns:
    """Lets those who take a turn follow each other in the order in which they took it, in whichever threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[_Turn] = deque()
        self._holder: int | None = None
        """Thread of the turn that is entered."""

    def take(self) -> AbstractContextManager[object]:
        """See `Transport.turn`."""
        with self._condition:
            if self._holder == threading.get_ident():
                return nullcontext()
            turn = _Turn(self)
            self._waiting.append(turn)
            return turn

    def enter(self, turn: _Turn) -> None:
        """Wait until all turns that were taken before are left."""
        with self._condition:
            try:
                self._condition.wait_for(lambda: self._waiting[0] is turn)
            except BaseException:  # interrupted: those behind must not wait for it
                self._waiting.remove(turn)
                self._condition.notify_all()
                raise
            self._holder = threading.get_ident()

    def leave(self) -> None:
        """Let the next one enter."""
        with self._condition:
            self._waiting.popleft()
            self._holder = None
            self._condition.notify_all()


class _Turn:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.enter(self)

    def __exit__(self, *_: object) -> None:
        self._turns.leave()


class TorchTransport:
    """Point-to-point over a process group."""

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, timeout_s: float) -> None:
        """Use `connect`."""
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        self._places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        self._turns = Turns()
        self._given_up: str | None = None

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

    def turn(self) -> AbstractContextManager[object]:
        return self._turns.take()

    def give_up(self, reason: str) -> None:
        self._given_up = self._given_up or reason

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Pending:
        """See `Transport.exchange`.

        Raises:
            RealError: an earlier run over this transport failed.
            PeerError: the other end is gone.
        """
        if self._given_up is not None:
            raise RealError(
                f"reallocation on rank {self._rank}: {self._given_up} earlier, so messages of it may be under way "
                "in this process group. Connect a transport over a new group."
            )
        parcels = [parcel for parcel in (receive, send) if parcel is not None]
        try:
            works = self._post(send, receive)
        except RuntimeError as error:
            raise self._peer_error(parcels, "could not be started", error) from error
        # NCCL may return one work for the whole batch; then any of the parcels names it.
        return Pending(send=send, receive=receive, works=list(zip(parcels, works, strict=False)))

    def _post(self, send: Parcel | None, receive: Parcel | None) -> list[dist.Work]:
        """What is received first, then what is sent."""
        works: list[dist.Work] = []
        if (
            self._device.type == "cpu"
        ):  # gloo's own calls: a batch would do the same, with several times the work
            if receive is not None:
                works.append(self._group.recv([receive.payload], self._places[receive.peer], 0))
            if send is not None:
                works.append(self._group.send([send.payload], self._places[send.peer], 0))
            return works
        # Batched: unbatched NCCL operations between two ranks share one stream, so two ranks that both send first
        # would wait for each other.
        works += dist.batch_isend_irecv(
            [
                dist.P2POp(operation, parcel.payload, parcel.peer, self._group)
                for parcel, operation in ((receive, dist.irecv), (send, dist.isend))
                if parcel is not None
            ]
        )
        return works

    def wait(self, pending: Pending) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        if self._device.type == "cuda":
            self._wait_cuda(pending, deadline_s)
            return
        for parcel, work in pending.works:
            try:
                work.wait(datetime.timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
            except RuntimeError as error:
                late = time.monotonic() >= deadline_s
                what = f"did not complete within {self._timeout_s:g} s" if late else "failed"
                raise self._peer_error([parcel], what, error, late=late) from error

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
                raise self._peer_error(
                    parcels, f"did not complete within {self._timeout_s:g} s", None, late=True
                )
            time.sleep(_POLL_S)

    def _peer_error(
        self, parcels: list[Parcel], what: str, error: Exception | None, *, late: bool = False
    ) -> PeerError:
        names = "; ".join(parcel.label for parcel in parcels)
        peers = sorted({parcel.peer for parcel in parcels})
        cause = f" ({error})" if error is not None else ""
        return PeerError(
            f"reallocation on rank {self._rank}: {names} {what}{cause}. "
            f"Look at rank {', '.join(map(str, peers))} first.",
            peers=peers,
            late=late,
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
            sender.delivered.add(id(outgoing))
            receiver.delivered.add(id(incoming))
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

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def give_up(self, reason: str) -> None:
        """Nothing: whoever makes a run fail in one process makes another network."""

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Pending:
        pending = Pending(send=send, receive=receive)
        self._network.deliver(self._rank, pending)
        return pending

    def wait(self, pending: Pending) -> None:
        if pending.remaining:
            parcels = [parcel.label for parcel in (pending.send, pending.receive) if parcel is not None]
            raise PeerError(
                f"reallocation on rank {self._rank}: {parcels} can only complete under LocalNetwork.run"
            )
