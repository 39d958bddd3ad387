"""Messages that a receiver copies out of its peer's memory."""

from __future__ import annotations

import ctypes
import datetime
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from megatron_real.errors import PeerError
from megatron_real.realloc_ops.execution import node_links
from megatron_real.realloc_ops.execution.node_links import NodeLinks
from megatron_real.realloc_ops.execution.regions import Regions
from megatron_real.realloc_ops.execution.transports import Parcel, TorchTransport
from tests.harness import run_ranks

pytestmark = pytest.mark.dist

_SHORT = datetime.timedelta(seconds=0.3)
_LONG = datetime.timedelta(seconds=30)


def _memory_can_be_read() -> bool:
    """Whether a child may read its parent's memory here, found out without the code under test."""
    there, pid, ends = ctypes.create_string_buffer(b"parent"), os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        here = ctypes.create_string_buffer(6)
        regions = [(ctypes.c_void_p * 2)(ctypes.addressof(one), 6) for one in (here, there)]
        call = ctypes.CDLL(None).process_vm_readv
        call(pid, regions[0], ctypes.c_ulong(1), regions[1], ctypes.c_ulong(1), ctypes.c_ulong(0))
        os.write(ends[1], here.raw)
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(ends[0], 6) == b"parent"


needs_memory = pytest.mark.skipif(
    not _memory_can_be_read(), reason="this machine lets no process read another's memory"
)


def _payload(seed: int, num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def _talk() -> int:
    """Every rank sends many messages to every other one, in an order of its own; returns how many were right."""
    node_links._TOLD_BYTES = 1 << 20
    links = NodeLinks.connect(dist.new_group(backend="gloo"))
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(world) if other != rank]
    assert links.peers == set(others)
    sizes = [1, 17, 4096, 3 << 20, 5, *range(100, 130)]
    posted, sent = [], []
    for number, size in enumerate(sizes):
        for other in others if number % 2 else reversed(others):
            target = torch.zeros(size, dtype=torch.uint8)
            if (number + rank) % 3 == 0:
                time.sleep(0.0005)
            posted.append(
                (links.receive(other, Regions(target)), target, _payload(1000 * other + number, size))
            )
            payload = Regions(_payload(1000 * rank + number, size))
            sent.append(links.send(other, payload, staged=bool(number % 2)))
    for work in (*reversed(sent[: len(sent) // 2]), *sent, *(work for work, *_ in posted)):
        work.wait(_LONG)
    return sum(torch.equal(target, expected) for _, target, expected in posted)


@needs_memory
def test_messages_of_a_pair_arrive_in_order_whoever_waits_for_what() -> None:
    assert run_ranks(3, _talk) == [70, 70, 70]


def _scattered() -> list[bool]:
    """What lies in many regions here and in others there: rows of a table, columns of it, whole tensors."""
    links = NodeLinks.connect(dist.new_group(backend="gloo"))
    rank = dist.get_rank()
    shapes = [(3, 4096), (2500, 12), (1, 7), (5, 2, 3000)]
    kinds = [
        lambda shape: torch.zeros(shape, dtype=torch.uint8),
        lambda shape: torch.zeros((*shape[:-1], shape[-1] + 5), dtype=torch.uint8)[..., 2:-3],
        lambda shape: torch.zeros(tuple(reversed(shape)), dtype=torch.uint8).permute(
            *reversed(range(len(shape)))
        ),
    ]
    right = []
    for number, here in enumerate(kinds):
        targets = [here(shape) for shape in shapes]
        sizes = [target.numel() for target in targets]
        expected = _payload(number, sum(sizes)).split(sizes)
        if rank == 0:
            whole = _payload(number, sum(sizes))
            gapped = torch.zeros(24, 3 * len(whole) // 24 + 50, dtype=torch.uint8)
            rows = list(whole.split([len(whole) // 20] * 20 + [len(whole) % 20]))
            pieces = [gapped[index, : len(row)].copy_(row) for index, row in enumerate(rows) if len(row)]
            links.send(1, Regions(*pieces)).wait(_LONG)
            right.append(True)
        else:
            links.receive(0, Regions(*targets)).wait(_LONG)
            right.append(all(torch.equal(a.reshape(-1), b) for a, b in zip(targets, expected, strict=True)))
    return right


@needs_memory
def test_the_kernel_gathers_and_scatters() -> None:
    assert run_ranks(2, _scattered) == [[True] * 3] * 2


def _meet_trouble() -> list[str]:
    """Rank 1 is late, then offers another size, then dies; rank 0 says what it met."""
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    rank, texts = dist.get_rank(), []
    for trouble, group in enumerate(groups):
        links = NodeLinks.connect(group)
        payload = torch.ones(1000, dtype=torch.uint8)
        if rank == 1:
            if trouble == 0:
                time.sleep(2 * _SHORT.total_seconds())
                links.close()
            elif trouble == 1:
                with pytest.raises(RuntimeError, match="rank 0 closed"):
                    links.send(0, Regions(payload)).wait(_LONG)
            else:
                os._exit(0)
            continue
        work = links.receive(1, Regions(torch.zeros(1001, dtype=torch.uint8)))
        for timeout in (_SHORT, _LONG) if trouble == 0 else (_LONG,):
            with pytest.raises(RuntimeError) as caught:
                work.wait(timeout)
            texts.append(str(caught.value))
        with pytest.raises(RuntimeError):
            links.send(1, Regions(payload))
        links.close()
    return texts


@needs_memory
def test_a_peer_that_is_late_wrong_or_dead_is_found_out() -> None:
    texts, _ = run_ranks(2, _meet_trouble, may_die={1})
    assert [text.partition(":")[0] for text in texts] == [
        "timed out after 0.3 s",
        "rank 1 closed its connection",
        "rank 1 sent 1000 bytes where 1001 were expected",
        "rank 1 closed its connection",
    ]


def _over_transport(blind_rank: int | None, node_links_wanted: bool) -> tuple[frozenset[int], bool, bool]:
    """Ranks in a ring; one of them may not read memory."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == blind_rank:
        node_links._machine = lambda: "another kernel"
    transport = TorchTransport.connect(
        dist.new_group(backend="gloo"), timeout_s=20.0, node_links=node_links_wanted
    )
    target = torch.zeros(1000, dtype=torch.uint8)
    behind, ahead = (rank - 1) % world, (rank + 1) % world
    both = transport.exchange(
        Parcel(peer=ahead, memory=Regions(_payload(rank, 1000)), label="ahead"),
        Parcel(peer=behind, memory=Regions(target), label="behind"),
    )
    for pending in both:
        assert pending is not None
        transport.wait(pending)
    return transport.linked_peers, transport.gathers_with_all, torch.equal(target, _payload(behind, 1000))


@needs_memory
@pytest.mark.parametrize(
    ("blind_rank", "wanted", "peers"),
    [
        (None, True, [{1, 2}, {0, 2}, {0, 1}]),
        (1, True, [{2}, set(), {0}]),
        (None, False, [set(), set(), set()]),
    ],
    ids=["all", "one on another machine", "none"],
)
def test_pairs_without_a_link_go_over_the_group(
    blind_rank: int | None, wanted: bool, peers: list[set[int]]
) -> None:
    complete = all(len(one) == 2 for one in peers)
    assert run_ranks(3, _over_transport, blind_rank, wanted) == [(set(one), complete, True) for one in peers]


def _with_unreadable_memory() -> frozenset[int]:
    if dist.get_rank() == 1:
        node_links._LIBC.process_vm_readv = lambda *_: -1
    return NodeLinks.connect(dist.new_group(backend="gloo")).peers


@needs_memory
def test_both_ends_must_be_able_to_read() -> None:
    assert run_ranks(3, _with_unreadable_memory) == [{2}, set(), {0}]


def _fall_silent(where: str) -> tuple[tuple[int, ...], str]:
    """Rank 1 connects to rank 0 and then says no more; returns what rank 0 met."""
    group = dist.new_group(backend="gloo")
    node_links._CONNECT_S = 0.3
    if dist.get_rank() == 1:
        if where == "its token":
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            node_links._call = lambda address, _: connected.connect(address) or connected
        node_links._Link.can_read = lambda *_: time.sleep(1.0)
    try:
        NodeLinks.connect(group)
    except PeerError as error:
        return tuple(error.peers), str(error)
    return (), ""


@needs_memory
@pytest.mark.parametrize("where", ["its token", "what it could read"])
def test_a_peer_that_falls_silent_is_named(where: str) -> None:
    (peers, text), _ = run_ranks(2, _fall_silent, where)
    assert peers == (1,)
    assert text.startswith("memory links on rank 0: rank 1 connected, then fell silent or died (timed out)")
