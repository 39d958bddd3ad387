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
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_real.errors import PeerError, RealError
from megatron_real.realloc_ops.execution.node_links import MOST_SENT_REGIONS, LinkWork, NodeLinks
from megatron_real.realloc_ops.execution.regions import Regions

__all__ = ["Exchange", "LocalNetwork", "Parcel", "Pending", "TorchTransport", "Transport", "Turns"]

_POLL_S = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bytes to send to, or to be filled by, a peer."""

    peer: int
    """Global rank."""
    memory: Regions
    """On the transport's staging device. Bytes in one piece, unless the transport `gathers` with the peer."""
    label: str
    """For error messages."""
    staged: bool = False
    """Of what is sent: its memory is a staging buffer, which is wanted again soon."""

    @property
    def payload(self) -> torch.Tensor:
        """The flat uint8 tensor of a parcel in one piece."""
        (payload,) = self.memory.tensors
        assert (payload.dtype, payload.dim()) == (torch.uint8, 1), f"{self.label} is not in one piece"
        return payload


@dataclass(slots=True, kw_only=True)
class Pending:
    """A message under way, in one direction."""

    parcel: Parcel
    receives: bool
    work: LinkWork | dist.Work | None = None
    """Of `TorchTransport`; NCCL may know both directions of an exchange as one."""
    delivered: bool = False
    """Of `LocalNetwork`."""


class Exchange(NamedTuple):
    """Both directions of an exchange; either may be missing."""

    sent: Pending | None
    received: Pending | None


class Transport(Protocol):
    """What the executor needs."""

    def staging_device(self) -> torch.device:
        """Where payloads must lie."""
        ...

    def gathers(self, peer: int) -> bool:
        """Whether a parcel for or from this peer may be any tensors (sent: of at most `MOST_SENT_REGIONS`)."""
        ...

    def turn(self) -> AbstractContextManager[object]:
        """A place in the order of runs over this transport: taken by this call, entered when those before have left.

        Whoever takes it must enter it. A turn inside a turn of the same thread is entered at once.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Say that a run ended half-way, so that messages may be under way that nobody takes."""
        ...

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Exchange:
        """Start both directions; returns at once."""
        ...

    def wait(self, pending: Pending) -> None:
        """Return when a sent payload may be overwritten, or a received one read.

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
    """Point-to-point over a process group; between CPU ranks of one node without it where that is possible."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout_s: float,
        links: NodeLinks | None = None,
    ) -> None:
        """Use `connect`."""
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._links = links
        self.linked_peers = links.peers if links is not None else frozenset[int]()
        """The ranks that are reached by memory and not over the group."""
        self.gathers_with_all = links is not None and links.complete
        """Whether that is true of all pairs of ranks of the group."""
        self._rank = dist.get_rank()
        self._places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        self._turns = Turns()
        self._given_up: str | None = None

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, *, timeout_s: float = 600.0, node_links: bool = True
    ) -> TorchTransport:
        """Make a transport over `group`, which must be used for nothing else. Collective over `group`.

        NCCL makes its communicator at the first operation, and needs all ranks of the group for that, while in a
        reallocation some ranks may have nothing to do: so it is made here.

        Args:
            group: a gloo or NCCL group of all ranks of both layouts.
            timeout_s: how long one wait may last. A source may still be computing when a destination waits for it.
            node_links: with gloo, let ranks of one node copy out of each other's memory (`node_links`).
        """
        on_cuda = "nccl" in dist.get_backend(group)  # also of a group for both devices, "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if on_cuda:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        links = NodeLinks.connect(group) if node_links and not on_cuda else None
        return cls(group, device=device, timeout_s=timeout_s, links=links)

    def staging_device(self) -> torch.device:
        return self._device

    def gathers(self, peer: int) -> bool:
        return peer in self.linked_peers

    def turn(self) -> AbstractContextManager[object]:
        return self._turns.take()

    def give_up(self, reason: str) -> None:
        self._given_up = self._given_up or reason
        if self._links is not None:
            self._links.close()

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Exchange:
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
        if self._device.type == "cuda":
            return self._exchange_cuda(send, receive)
        return Exchange(
            received=self._post(receive, receives=True) if receive is not None else None,
            sent=self._post(send, receives=False) if send is not None else None,
        )

    def _post(self, parcel: Parcel, *, receives: bool) -> Pending:
        """Over the link if there is one, or gloo's own call: a batch would do the same, with several times the work."""
        work: LinkWork | dist.Work
        try:
            if parcel.peer in self.linked_peers:
                assert self._links is not None, "a rank without links has no linked peers"
                work = (
                    self._links.receive(parcel.peer, parcel.memory)
                    if receives
                    else self._links.send(parcel.peer, parcel.memory, staged=parcel.staged)
                )
            else:
                through = self._group.recv if receives else self._group.send
                work = through([parcel.payload], self._places[parcel.peer], 0)
        except RuntimeError as error:
            raise self._peer_error(parcel, "could not be started", error) from error
        return Pending(parcel=parcel, receives=receives, work=work)

    def _exchange_cuda(self, send: Parcel | None, receive: Parcel | None) -> Exchange:
        """Both in one batch: outside it, two ranks that both send first would wait for each other on their stream."""
        parcels = [parcel for parcel in (receive, send) if parcel is not None]
        operations = [
            dist.P2POp(operation, parcel.payload, parcel.peer, self._group)
            for parcel, operation in ((receive, dist.irecv), (send, dist.isend))
            if parcel is not None
        ]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._peer_error(parcels[0], "could not be started", error) from error
        return Exchange(
            received=Pending(parcel=receive, receives=True, work=works[0]) if receive is not None else None,
            sent=Pending(parcel=send, receives=False, work=works[-1]) if send is not None else None,
        )

    def wait(self, pending: Pending) -> None:
        work, on_cuda = pending.work, self._device.type == "cuda"
        assert work is not None, "exchange gives every message its work"
        if isinstance(work, LinkWork) and work.done:
            return
        deadline_s = time.monotonic() + self._timeout_s
        try:
            if on_cuda and isinstance(work, dist.Work):
                work.wait()  # with a timeout NCCL would block this thread
            else:
                work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            late = time.monotonic() >= deadline_s
            what = f"did not complete within {self._timeout_s:g} s" if late else "failed"
            raise self._peer_error(pending.parcel, what, error, late=late) from error
        if on_cuda:
            self._watch_cuda(pending.parcel, deadline_s)

    def _watch_cuda(self, parcel: Parcel, deadline_s: float) -> None:
        """The current stream waits for the message; watch it from the host, so that a dead peer is named."""
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() > deadline_s:
                raise self._peer_error(
                    parcel, f"did not complete within {self._timeout_s:g} s", None, late=True
                )
            time.sleep(_POLL_S)

    def _peer_error(
        self, parcel: Parcel, what: str, error: Exception | None, *, late: bool = False
    ) -> PeerError:
        cause = f" ({error})" if error is not None else ""
        return PeerError(
            f"reallocation on rank {self._rank}: {parcel.label} {what}{cause}. Look at rank {parcel.peer} first.",
            peers=[parcel.peer],
            late=late,
        )


class LocalNetwork:
    """All ranks of a reallocation in one process and one thread, with the blocking rules of gloo.

    A send completes only when its receive was posted. `run` advances each rank's executor until it waits for something
    that is not complete; if nobody can advance, the ranks have deadlocked, which is found at once and without a clock.
    """

    def __init__(self, device: torch.device | None = None, *, gathers: bool = False) -> None:
        self._device = device or torch.device("cpu")
        self.gathers = gathers
        self._sent: dict[tuple[int, int], deque[Pending]] = {}
        self._wanted: dict[tuple[int, int], deque[Pending]] = {}
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
            ready = [rank for rank, pending in waiting.items() if pending is None or pending.delivered]
            if not ready:
                raise RealError(
                    f"reallocation: ranks {sorted(waiting)} wait for each other: {self._open_labels()}"
                )
            rank = pick(ready) if pick is not None else min(ready)
            try:
                waiting[rank] = next(programs[rank])
            except StopIteration:
                del waiting[rank]

    def deliver(self, rank: int, exchange: Exchange) -> None:
        """Post the parcels of `rank` and complete every pair of a send and its receive."""
        if exchange.sent is not None:
            peer = exchange.sent.parcel.peer
            self._sent.setdefault((rank, peer), deque()).append(exchange.sent)
            self._match(rank, peer)
        if exchange.received is not None:
            peer = exchange.received.parcel.peer
            self._wanted.setdefault((peer, rank), deque()).append(exchange.received)
            self._match(peer, rank)

    def _match(self, src: int, dst: int) -> None:
        all_sent, all_wanted = self._sent.get((src, dst)), self._wanted.get((src, dst))
        while all_sent and all_wanted:
            sent, wanted = all_sent.popleft(), all_wanted.popleft()
            num_bytes, expected_bytes = sent.parcel.memory.num_bytes, wanted.parcel.memory.num_bytes
            if num_bytes != expected_bytes:
                raise RealError(
                    f"reallocation: {wanted.parcel.label}: found {num_bytes} bytes sent; expected {expected_bytes}."
                )
            if self.gathers:
                regions = len(sent.parcel.memory.table())
                assert regions <= MOST_SENT_REGIONS, f"{sent.parcel.label} is sent in {regions} regions"
                wanted.parcel.memory.fill(sent.parcel.memory.content())
            else:
                wanted.parcel.payload.copy_(sent.parcel.payload)
            sent.delivered = wanted.delivered = True
            self.bytes_by_pair[src, dst] = self.bytes_by_pair.get((src, dst), 0) + num_bytes
            self.messages_by_pair[src, dst] = self.messages_by_pair.get((src, dst), 0) + 1

    def _open_labels(self) -> list[str]:
        queues = [*self._sent.values(), *self._wanted.values()]
        return [pending.parcel.label for queue in queues for pending in queue]

    def staging_device(self) -> torch.device:
        return self._device


class _LocalTransport:
    """One rank's end of a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    def staging_device(self) -> torch.device:
        return self._network.staging_device()

    def gathers(self, peer: int) -> bool:
        return self._network.gathers

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def give_up(self, reason: str) -> None:
        """Nothing: whoever makes a run fail in one process makes another network."""

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Exchange:
        exchange = Exchange(
            sent=Pending(parcel=send, receives=False) if send is not None else None,
            received=Pending(parcel=receive, receives=True) if receive is not None else None,
        )
        self._network.deliver(self._rank, exchange)
        return exchange

    def wait(self, pending: Pending) -> None:
        if not pending.delivered:
            raise PeerError(
                f"reallocation on rank {self._rank}: {pending.parcel.label} can only complete under LocalNetwork.run"
            )
