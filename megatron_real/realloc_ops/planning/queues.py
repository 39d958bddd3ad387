"""Who serves whom: the receivers of each set of owners stand in queues, which the owners share in equal parts.

A receiver with an owner in its node is served by the owners in its node, which have one queue per node. All others are
*far*: they form one queue that is shared by all owners. Of a line (`exchanges`) that several ranks of one far node
want, each takes an equal part out of this queue, so that every byte enters the node once; then they relay their parts
to each other. Without a topology all ranks are one node.

A queue is laid end to end, receiver after receiver in ascending rank and line after line, and cut into equal parts, one
per owner. Owners of one queue therefore send equally many bytes, whatever the sizes of the tensors, while a receiver
has few senders, mostly of nearby rank. Between nodes this is so for all owners of a shard; inside nodes, where the
nearest comes first, for those whose nodes need the same of them.

Invariants (tests/property/test_realloc_plan.py):
    - every byte of a line reaches each receiver once: from one owner, or from the one rank of its node that took it;
    - owners of one queue send the same bytes, to one element per receiver;
    - both ends of a pair derive the same stretches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_real.realloc_ops.planning.exchanges import Exchanges, Line

__all__ = ["Queues", "RelayGroup", "Stretch"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
_FAR = -1
"""In place of a node."""


class Stretch(NamedTuple):
    """A range of a line that one rank sends to another."""

    peer: int
    """The other end."""
    source: int
    """Of the line, as in `Line`."""
    target: int
    start_bytes: int
    stop_bytes: int


class RelayGroup(NamedTuple):
    """The ranks of a far node that want the same line, seen from one of them."""

    line: Line
    members: tuple[int, ...]
    """Ascending."""
    slot: int
    """Whose part the rank itself takes."""

    def part_of(self, slot: int) -> Stretch:
        """What the member in `slot` takes from the owners and relays to the other members."""
        start, stop = (self.line.num_bytes * edge // len(self.members) for edge in (slot, slot + 1))
        return Stretch(self.members[slot], self.line.source, self.line.target, start, stop)


class Queues:
    """All queues of a pair of tables; each is made when a rank asks that has to do with it."""

    def __init__(self, exchanges: Exchanges, devices_per_node: int | None) -> None:
        """Nodes begin at multiples of `devices_per_node`; without it all ranks are one node."""
        self._exchanges = exchanges
        self._per_node = devices_per_node
        self._targets: dict[int, _Members] = {}
        self._source_nodes: dict[int, frozenset[int]] = {}
        self._queues: dict[tuple[int, int], _Queue] = {}

    def sent_by(self, rank: int) -> Iterator[Stretch]:
        """What `rank` sends of its source shards, receivers as peers."""
        nodes = (self._node(rank),) if self._per_node is None else (self._node(rank), _FAR)
        for source in _containing(self._exchanges.sources, rank):
            if self._exchanges.lines_from[source]:
                for node in nodes:
                    yield from self._queue(source, node).sent_by(rank)

    def received_by(self, rank: int) -> Iterator[Stretch]:
        """What `rank` receives from owners, which are the peers."""
        for source in self._sources_of(rank):
            if not _contains(self._exchanges.sources[source], rank):
                near = self._node(rank) in self._nodes_of(source)
                yield from self._queue(source, self._node(rank) if near else _FAR).received_by(rank)

    def local(self, rank: int) -> Iterator[Line]:
        """The lines that `rank` both has and needs."""
        for target in _containing(self._exchanges.targets, rank):
            for line in self._exchanges.lines_to[target]:
                if _contains(self._exchanges.sources[line.source], rank):
                    yield line

    def near(self, rank: int) -> Iterator[Line]:
        """The lines that `rank` needs and an owner in its node has, but not itself."""
        for line in self._needed_by(rank):
            if self._node(rank) in self._nodes_of(line.source):
                yield line

    def far(self, rank: int) -> Iterator[RelayGroup]:
        """The lines that `rank` needs and nobody in its node has; a group of one has nothing to relay."""
        node = self._node(rank)
        for line in self._needed_by(rank):
            if node not in self._nodes_of(line.source):
                members = tuple(self._target(line.target).in_node(node).tolist())
                yield RelayGroup(line, members, members.index(rank))

    def _needed_by(self, rank: int) -> Iterator[Line]:
        for target in _containing(self._exchanges.targets, rank):
            for line in self._exchanges.lines_to[target]:
                if not _contains(self._exchanges.sources[line.source], rank):
                    yield line

    def _sources_of(self, rank: int) -> list[int]:
        return sorted({line.source for line in self._needed_by(rank)})

    def _node(self, rank: int) -> int:
        return rank // self._per_node if self._per_node is not None else 0

    def _nodes_of(self, source: int) -> frozenset[int]:
        if source not in self._source_nodes:
            nodes = _nodes(self._exchanges.sources[source], self._per_node)
            self._source_nodes[source] = frozenset(nodes.tolist())
        return self._source_nodes[source]

    def _target(self, target: int) -> _Members:
        if target not in self._targets:
            ranks = self._exchanges.targets[target]
            self._targets[target] = _Members.of(ranks, _nodes(ranks, self._per_node))
        return self._targets[target]

    def _queue(self, source: int, node: int) -> _Queue:
        if (source, node) not in self._queues:
            self._queues[source, node] = self._make_queue(source, node)
        return self._queues[source, node]

    def _make_queue(self, source: int, node: int) -> _Queue:
        owners = self._exchanges.sources[source]
        nodes = _nodes(owners, self._per_node)
        columns = []
        for line in self._exchanges.lines_from[source]:
            members = self._target(line.target)
            chosen = ~np.isin(members.nodes, nodes) if node == _FAR else members.nodes == node
            chosen &= ~np.isin(members.ranks, owners)
            ranks = members.ranks[chosen]
            starts = np.zeros(len(ranks), np.int64)
            stops = np.full(len(ranks), line.num_bytes, np.int64)
            if node == _FAR:
                slot, size = members.slot[chosen], members.size[chosen]
                starts, stops = line.num_bytes * slot // size, line.num_bytes * (slot + 1) // size
            columns.append((ranks, np.full(len(ranks), line.target, np.int64), starts, stops))
        ranks, target, starts, stops = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((target, ranks))
        order = order[(stops > starts)[order]]
        return _Queue(
            source=source,
            owners=owners if node == _FAR else owners[nodes == node],
            receiver=ranks[order],
            target=target[order],
            line_start=starts[order],
            ends=np.cumsum((stops - starts)[order]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Members:
    """The ranks of a destination set and their nodes, both ascending."""

    ranks: Ints
    nodes: Ints
    slot: Ints
    """Position among those of the same node."""
    size: Ints
    """How many of the same node there are."""

    @classmethod
    def of(cls, ranks: Ints, nodes: Ints) -> _Members:
        first = np.searchsorted(nodes, nodes, side="left")
        last = np.searchsorted(nodes, nodes, side="right")
        return cls(ranks=ranks, nodes=nodes, slot=np.arange(len(ranks)) - first, size=last - first)

    def in_node(self, node: int) -> Ints:
        first, last = np.searchsorted(self.nodes, (node, node + 1))
        return self.ranks[first:last]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Queue:
    """Receivers in a row; entry by entry a stretch of a line."""

    source: int
    owners: Ints
    """Who share it, ascending."""
    receiver: Ints
    """Ascending."""
    target: Ints
    line_start: Ints
    """Where the entry begins in its line."""
    ends: Ints
    """Where it ends in the queue."""

    def sent_by(self, owner: int) -> Iterator[Stretch]:
        """What this owner sends."""
        slot = int(np.searchsorted(self.owners, owner))
        if not len(self.ends) or slot == len(self.owners) or self.owners[slot] != owner:
            return
        begin, end = self._share(slot)
        if begin == end:
            return
        first = int(np.searchsorted(self.ends, begin, side="right"))
        start = int(self.ends[first - 1]) if first else 0
        for at in range(first, len(self.ends)):
            if start >= end:
                return
            stop = int(self.ends[at])
            yield self._stretch(at, int(self.receiver[at]), start, max(start, begin), min(stop, end))
            start = stop

    def received_by(self, receiver: int) -> Iterator[Stretch]:
        """What this receiver gets, by owner."""
        first, last = np.searchsorted(self.receiver, (receiver, receiver + 1)).tolist()
        num_owners = len(self.owners)
        total_bytes = int(self.ends[-1]) if len(self.ends) else 0
        for at in range(first, last):
            start, stop = int(self.ends[at - 1]) if at else 0, int(self.ends[at])
            position = start
            while position < stop:
                slot = (
                    (position + 1) * num_owners - 1
                ) // total_bytes  # the last share that begins here or before
                end = min(self._share(slot)[1], stop)
                yield self._stretch(at, int(self.owners[slot]), start, position, end)
                position = end

    def _share(self, slot: int) -> tuple[int, int]:
        total_bytes = int(self.ends[-1])
        return total_bytes * slot // len(self.owners), total_bytes * (slot + 1) // len(self.owners)

    def _stretch(self, at: int, peer: int, start: int, begin: int, end: int) -> Stretch:
        offset = int(self.line_start[at]) - start
        return Stretch(peer, self.source, int(self.target[at]), begin + offset, end + offset)


def _nodes(ranks: Ints, per_node: int | None) -> Ints:
    return ranks // per_node if per_node is not None else np.zeros_like(ranks)


def _contains(ranks: Ints, rank: int) -> bool:
    at = int(np.searchsorted(ranks, rank))
    return at < len(ranks) and int(ranks[at]) == rank


def _containing(sets: Sequence[Ints], rank: int) -> list[int]:
    return [number for number, ranks in enumerate(sets) if _contains(ranks, rank)]
