"""Times of collectives, messages and copies, over groups of this world.

All groups of a size work at the same time, as the groups of a layout do. Bytes are of the whole, unsharded tensor.

Invariants (tests/e2e/test_profile.py):
    - a collective is the one that Megatron calls: into tensors, on the device that models live on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_real.hooks import cpu_device
from megatron_real.plan_search.costs.operations import Collective
from megatron_real.process_groups import ProcessGroups

__all__ = ["GroupOfRank", "collective", "copies", "exchange", "group_sizes", "join", "ping_pong"]

_ITEMSIZE = 4
_PURPOSE = "profile"


class GroupOfRank:
    """The group of a size that this rank is in, of blocks of consecutive ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks: range) -> None:
        self.group = group
        self.ranks = ranks


def group_sizes(num_ranks: int, per_node: int) -> tuple[int, ...]:
    """Sizes to measure: powers of two up to a node, the node, then whole numbers of nodes."""
    sizes = {size for size in (2**power for power in range(1, 20)) if size <= min(per_node, num_ranks)}
    sizes |= {
        per_node * nodes
        for nodes in (1, *(2**power for power in range(1, 20)))
        if per_node * nodes <= num_ranks
    }
    sizes.add(num_ranks)
    return tuple(sorted(size for size in sizes if size > 1 and num_ranks % size == 0))


def join(groups: ProcessGroups, size: int) -> GroupOfRank:
    """The group of `size` consecutive ranks that this rank is in. Collective over WORLD."""
    found = None
    for start in range(0, groups.world_size, size):
        ranks = range(start, start + size)
        group = groups.acquire(tuple(ranks), purpose=_PURPOSE)
        if groups.rank in ranks:
            found = GroupOfRank(group, ranks)
    assert found is not None, "sizes divide the world"
    return found


def collective(kind: Collective, num_bytes: int, member: GroupOfRank) -> Callable[[], Any]:
    """What one collective is, ready to be run again and again."""
    size, group = len(member.ranks), member.group
    count = max(1, num_bytes // _ITEMSIZE // size) * size
    device = cpu_device.device()
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // size, device=device)
    other = torch.zeros(count, device=device) if kind is Collective.ALL_TO_ALL else whole
    works: Mapping[Collective, Callable[[], Any]] = {
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
        Collective.ALL_GATHER: lambda: dist.all_gather_into_tensor(whole, part, group=group),
        Collective.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole, group=group),
        Collective.BROADCAST: lambda: dist.broadcast(whole, src=member.ranks[0], group=group),
    }
    return works[kind]


def ping_pong(num_bytes: int, member: GroupOfRank, rank: int) -> Callable[[], Any]:
    """A message from the group's first rank to its last and back; None for the ranks between."""
    data = torch.zeros(max(1, num_bytes // _ITEMSIZE), device=cpu_device.device())
    first, last = member.ranks[0], member.ranks[-1]

    def work() -> None:
        if rank == first:
            dist.send(data, dst=last, group=member.group)
            dist.recv(data, src=last, group=member.group)
        elif rank == last:
            dist.recv(data, src=first, group=member.group)
            dist.send(data, dst=first, group=member.group)

    return work


def exchange(num_bytes: int, member: GroupOfRank, rank: int) -> Callable[[], Any]:
    """The group's first and last rank send to each other at the same time."""
    count = max(1, num_bytes // _ITEMSIZE)
    mine, theirs = (torch.zeros(count, device=cpu_device.device()) for _ in range(2))
    first, last = member.ranks[0], member.ranks[-1]

    def work() -> None:
        if rank not in (first, last):
            return
        peer = last if rank == first else first
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, peer, group=member.group),
                dist.P2POp(dist.irecv, theirs, peer, group=member.group),
            ]
        )
        for request in requests:
            request.wait()

    return work


def copies(num_bytes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A copy inside the device's memory, and one to the host's."""
    count = max(1, num_bytes // _ITEMSIZE)
    source = torch.ones(count, device=cpu_device.device())
    local = torch.zeros_like(source)
    host = torch.zeros(count, device="cpu", pin_memory=torch.cuda.is_available())
    return lambda: local.copy_(source), lambda: host.copy_(source)
