"""Messages between ranks of one node whose payload the receiver copies out of the sender's memory.

Gloo moves every byte through two sockets' buffers and a thread of its own; between processes of one machine a copy by
the kernel (`process_vm_readv`, which MPI libraries use for the same reason) takes half of the time and no buffer. What
goes over a socket is only that a payload is ready, and where, and that it was taken.

A payload may lie in many regions on either side: the kernel gathers and scatters while it copies. Regions should not
be short (`packing` knows how short): each one of the receiver costs some 0.1 us, and each one of the sender more, since
its pages are looked up by themselves. Those of a message stand in one record (`MOST_SENT_REGIONS`).

What is as small as a record travels in it, so that what ranks tell each other at the end of a reallocation waits for
nothing. That a payload was taken is told when nothing else is left to take, or, of those in a staging buffer, which the
sender wants to fill again, after some megabytes: each time wakes the sender up.

A pair of ranks has one Unix socket. Records on it are in order, so messages of a pair match by their order alone, as
those of a process group do. Whoever waits for one message serves all that it has posted, over all links: a receiver
copies what peers offer whatever it waits for itself. A socket closes with its process, so a dead peer is known at once.

Invariants (tests/distributed/test_node_links.py):
    - a payload is read only after its receive was posted, and may be overwritten once its send is complete;
    - it arrives whatever the regions on both sides are, if they have as many bytes;
    - two ranks have a link or have none: both can read the other's memory, which was tried;
    - nothing is posted to a link that is closed.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from megatron_real.errors import PeerError
from megatron_real.process_groups import exchange
from megatron_real.realloc_ops.execution.regions import Regions, bytes_from

__all__ = ["MOST_SENT_REGIONS", "LinkWork", "NodeLinks"]

MOST_SENT_REGIONS = 32
"""Of a message. Records of all messages that are offered and not taken must find room in a socket's buffer."""
_HEADER = struct.Struct("=q")
"""Of a record: one of the three below, or how many of the oldest payloads that were offered are taken."""
_OFFER, _STAGED_OFFER, _CONTENT = 0, -1, -2
"""What follows: address and size of the regions of a payload; the same of one that is staged; a payload itself."""
_RECORD_BYTES = _HEADER.size + 16 * MOST_SENT_REGIONS
_MOST_CONTENT_BYTES = 256
"""A payload of at most so many bytes, in one region, is put into its record."""
_MOST_COPIED_REGIONS = 1024
"""Of one call (`UIO_MAXIOV` of <linux/uio.h>)."""
_TOLD_BYTES = 16 << 20
"""After so many bytes that were staged the peer is told what was taken."""
_TOKEN_BYTES = 16
_CONNECT_S = 60.0
"""How long a rank that has just said that it connected may take for its first record."""


class _Hello(NamedTuple):
    """What a rank says to all others."""

    machine: str
    """The kernel that it runs on; empty where memory of other processes cannot be read."""
    address: bytes
    """Of the socket that it listens on."""
    token: bytes
    """What is to be found in its memory; also how those that connect prove who they are."""
    token_at: int


class LinkWork:
    """A message under way, like `torch.distributed.Work`."""

    __slots__ = ("_link", "_links", "done", "payload")

    def __init__(self, links: NodeLinks, link: _Link, payload: Regions) -> None:
        """Made by `NodeLinks`."""
        self._links = links
        self._link = link
        self.payload = payload
        self.done = False

    def wait(self, timeout: datetime.timedelta) -> None:
        """Serve all links until this message is complete.

        Raises:
            RuntimeError: the peer is gone, or it took too long.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self.done:
            if self._link.why_closed:
                raise RuntimeError(self._link.why_closed)
            self._links.serve(max(deadline_s - time.monotonic(), 0.0))
            if not self.done and time.monotonic() >= deadline_s:
                raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")


class NodeLinks:
    """The links of one rank, for one user at a time."""

    def __init__(self, links: dict[int, _Link], *, complete: bool) -> None:
        """Use `connect`."""
        self._links = links
        self.complete = complete
        """Whether all pairs of ranks of the group have a link; the same on all of them."""
        self.peers = frozenset(links)
        """The ranks that have a link with this one."""
        self._by_descriptor = {link.socket.fileno(): link for link in links.values()}
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> NodeLinks:
        """Link this rank with those of its node whose memory it can read. Collective over `group`.

        Raises:
            PeerError: a rank did not come, or fell silent on the way; names it.
        """
        rank, machine = dist.get_rank(), _machine()
        token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
        with _listener(dist.get_world_size(group)) if machine else nullcontext() as listener:
            address = listener.getsockname() if listener is not None else b""
            mine = _Hello(machine, address, token.raw, ctypes.addressof(token))
            told = exchange(mine, None, group=group, what="memory links")
            near = {other: hello for other, hello in told.items() if machine and hello.machine == machine}
            sockets = {
                other: found
                for other, hello in near.items()
                if other < rank and (found := _call(hello.address, token.raw)) is not None
            }
            calls = exchange(sorted(sockets), None, group=group, what="memory links")
            callers = {told[other].token: other for other, called in calls.items() if rank in called}
            waiting = set(callers.values())
            while listener is not None and waiting:
                with _naming(rank, waiting):
                    caller, connected = _answer(listener, callers)
                if caller in waiting:
                    waiting.remove(caller)
                    sockets[caller] = connected
                else:
                    connected.close()
        links = {}
        for other, connected in sorted(sockets.items()):
            link = _Link(other, connected)
            with _naming(rank, {other}):
                both = link.can_read(near[other])
            if both:
                links[other] = link
            else:
                connected.close()
        counts = exchange(len(links), None, group=group, what="memory links")
        return cls(links, complete=all(count == len(counts) - 1 for count in counts.values()))

    def send(self, peer: int, payload: Regions, *, staged: bool = False) -> LinkWork:
        """Offer a payload of at most `MOST_SENT_REGIONS`.

        Args:
            peer: global rank.
            payload: of any size.
            staged: its memory is wanted again soon.

        Raises:
            RuntimeError: the peer is gone.
        """
        link, table = self._open(peer), payload.table()
        assert len(table) <= MOST_SENT_REGIONS, f"{len(table)} regions in one message"
        work = LinkWork(self, link, payload)
        if len(table) == 1 and payload.num_bytes <= _MOST_CONTENT_BYTES:
            link.tell(_HEADER.pack(_CONTENT) + payload.content())
            work.done = not link.why_closed
        else:
            link.sent.append(work)
            link.tell(_HEADER.pack(_STAGED_OFFER if staged else _OFFER) + table.tobytes())
        return work

    def receive(self, peer: int, payload: Regions) -> LinkWork:
        """Say where the next payload of a peer goes; it comes while this rank waits for some message.

        Raises:
            RuntimeError: the peer is gone.
        """
        link = self._open(peer)
        work = LinkWork(self, link, payload)
        link.wanted.append(work)
        return work

    def serve(self, timeout_s: float) -> None:
        """Take what is offered on all links; if nothing is, wait for a record of any peer."""
        taken = [link.take() for link in self._links.values() if link.offers and link.wanted]
        if any(taken):
            return
        for descriptor, _ in self._poll.poll(timeout_s * 1000.0):
            link = self._by_descriptor[descriptor]
            link.read()
            link.take()
            if link.why_closed:
                self._poll.unregister(descriptor)
                del self._by_descriptor[descriptor]
                link.socket.close()

    def close(self) -> None:
        """End all links: peers that wait for this rank fail now."""
        for link in self._links.values():
            link.why_closed = link.why_closed or "closed by this rank"
            link.socket.close()

    def _open(self, peer: int) -> _Link:
        link = self._links[peer]
        if link.why_closed:
            raise RuntimeError(link.why_closed)
        return link


class _Link:
    """One end of a link."""

    def __init__(self, peer: int, connected: socket.socket) -> None:
        self.socket = connected
        self.sent: deque[LinkWork] = deque()
        """Offered and not yet taken."""
        self.wanted: deque[LinkWork] = deque()
        """Posted receives whose payload was not offered."""
        self.offers: deque[tuple[int, bytes]] = deque()
        """Header and rest of the records of payloads that nobody wanted yet."""
        self.why_closed = ""
        self._peer = peer
        self._process_id = struct.unpack(
            "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )[0]

    def can_read(self, hello: _Hello) -> bool:
        """Try to read the peer's memory, and ask it whether it could read this rank's."""
        found = ctypes.create_string_buffer(_TOKEN_BYTES)
        with suppress(RuntimeError):
            self._read_memory(*(_table(at, _TOKEN_BYTES) for at in (hello.token_at, ctypes.addressof(found))))
        mine = found.raw == hello.token
        self.socket.settimeout(_CONNECT_S)
        self.socket.send(b"1" if mine else b"0")
        theirs = self.socket.recv(1) == b"1"
        self.socket.settimeout(None)
        return mine and theirs

    def tell(self, record: bytes) -> None:
        """Send a record. It does not block: records that are not read are few (`executor.MOST_IN_FLIGHT`)."""
        try:
            self.socket.send(record)
        except OSError as error:
            self.why_closed = f"rank {self._peer} closed its connection: {error}"

    def read(self) -> None:
        """Read the records that are there."""
        while True:
            try:
                record = self.socket.recv(_RECORD_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                record, reason = b"", f": {error}"
            else:
                reason = ""
            if not record:
                self.why_closed = self.why_closed or f"rank {self._peer} closed its connection{reason}"
                return
            (header,) = _HEADER.unpack_from(record)
            if header > 0:
                for _ in range(header):
                    self.sent.popleft().done = True
            else:
                self.offers.append((header, record[_HEADER.size :]))

    def take(self) -> bool:
        """Copy what is offered and wanted, and tell the peer; whether there was something."""
        count, staged_bytes, took = 0, 0, False
        while self.offers and self.wanted:
            (header, rest), work = self.offers.popleft(), self.wanted.popleft()
            took = True
            try:
                if header == _CONTENT:
                    self._require(len(rest), work.payload)
                    work.payload.fill(rest)
                else:
                    self._copy(np.frombuffer(rest, np.int64).reshape(-1, 2), work.payload)
                    count += 1
            except RuntimeError as error:
                self.why_closed = str(error)
                break
            work.done = True
            staged_bytes += work.payload.num_bytes if header == _STAGED_OFFER else 0
            if staged_bytes >= _TOLD_BYTES:
                self.tell(_HEADER.pack(count))
                count = staged_bytes = 0
        if count:
            self.tell(_HEADER.pack(count))
        return took

    def _require(self, num_bytes: int, payload: Regions) -> None:
        if num_bytes != payload.num_bytes:
            raise RuntimeError(
                f"rank {self._peer} sent {num_bytes} bytes where {payload.num_bytes} were expected"
            )

    def _copy(self, there: np.ndarray, payload: Regions) -> None:
        """Copy from the peer's memory. One call moves at most 2 GiB."""
        here, num_bytes, done = payload.table(), payload.num_bytes, 0
        self._require(int(there[:, 1].sum()), payload)
        if max(len(here), len(there)) <= _MOST_COPIED_REGIONS:
            done = self._read_memory(there, here)
        while done < num_bytes:
            to = bytes_from(here, done, _MOST_COPIED_REGIONS)
            # No more of the peer's pages than are copied: the kernel would look them up all the same.
            stop = done + int(to[:, 1].sum())
            of = bytes_from(there, done, _MOST_COPIED_REGIONS, stop)
            done += self._read_memory(of, to)

    def _read_memory(self, there: np.ndarray, here: np.ndarray) -> int:
        copied: int = _LIBC.process_vm_readv(
            self._process_id, here.ctypes.data, len(here), there.ctypes.data, len(there), 0
        )
        if copied <= 0:
            raise RuntimeError(
                f"memory of rank {self._peer} could not be read: {os.strerror(ctypes.get_errno())}"
            )
        return copied


def _table(address: int, num_bytes: int) -> np.ndarray:
    return np.array([(address, num_bytes)], np.int64)


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        library.process_vm_readv.restype = ctypes.c_ssize_t
        regions = (ctypes.c_void_p, ctypes.c_ulong)
        library.process_vm_readv.argtypes = (ctypes.c_int, *regions, *regions, ctypes.c_ulong)
    return library


_LIBC = _load()


def _machine() -> str:
    """The running kernel; empty where there is no such call."""
    if sys.platform != "linux":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _call(address: bytes, token: bytes) -> socket.socket | None:
    """Connect to a rank of this machine; None if it cannot be reached (another network namespace)."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(address)
        connected.send(token)
    except OSError:
        connected.close()
        return None
    return connected


def _listener(most: int) -> socket.socket:
    """A socket on which `most` ranks of this machine can call; the kernel finds a name, which is in no file system."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen(most)
    return listener


def _answer(listener: socket.socket, callers: dict[bytes, int]) -> tuple[int | None, socket.socket]:
    """Accept one connection and find out whose it is; None is a stranger."""
    listener.settimeout(_CONNECT_S)
    connected, _ = listener.accept()
    connected.settimeout(_CONNECT_S)
    return callers.get(connected.recv(_TOKEN_BYTES)), connected


@contextmanager
def _naming(rank: int, peers: Collection[int]) -> Iterator[None]:
    """Say whom this rank waited for."""
    try:
        yield
    except OSError as error:
        names = ", ".join(map(str, sorted(peers)))
        raise PeerError(
            f"memory links on rank {rank}: rank {names} connected, then fell silent or died ({error}). "
            f"Look at rank {names} first.",
            peers=sorted(peers),
        ) from error
