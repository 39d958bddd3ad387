"""How many bytes every rank sends, receives and copies in a reallocation, without building its plan.

What two sets of owners have in common is known in closed form (`divisions`). Owners serve queues of receivers in equal
parts, and ranks of a node relay to each other, as `realloc_ops.queues` says; the parts are laid over the receivers once
for all queues. Numbers of bytes are exact. Messages are those of full buckets: large slices that travel alone make
more, which start while others are under way.

Invariants (tests/property/test_moves.py):
    - bytes received, sent, relayed and copied by each rank, inside and between nodes, are those of `build_realloc_plan`
      over the tables of `plan_search.parameters`; so are its messages in each hop, where no slice travels alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_real.layout import Layout
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.divisions import Floats, Ints, common_elements, owner_list, set_classes

__all__ = ["Traffic", "Window", "realloc_traffic"]

_MESSAGE_STEP_BYTES = 16
"""Buckets are a multiple of this (`realloc_ops.buckets`)."""


class Window(NamedTuple):
    """A layout on a window, and where the window starts."""

    start: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Bytes and messages by rank, from the first rank of either window to the last."""

    received_within: Floats
    """From owners in the same node."""
    received_across: Floats
    """From owners in other nodes."""
    received_relayed: Floats
    """In the second hop, inside nodes."""
    sent_within: Floats
    sent_across: Floats
    sent_relayed: Floats
    local: Floats
    """Moved inside the rank."""
    messages_received: Floats
    """Of the first hop."""
    messages_sent: Floats
    relays_received: Floats
    """Messages of the second hop."""
    relays_sent: Floats

    @property
    def received(self) -> Floats:
        return self.received_within + self.received_across + self.received_relayed

    @property
    def sent(self) -> Floats:
        return self.sent_within + self.sent_across + self.sent_relayed


def realloc_traffic(
    shape: ModelShape, itemsize: int, source: Window, target: Window, *, per_node: int, bucket_bytes: int
) -> Traffic:
    """Count what `build_realloc_plan` would move with `per_node` devices per node.

    Args:
        shape: the model.
        itemsize: bytes of a parameter, on both sides.
        source: where the weights are; starts are global ranks, and nodes begin at multiples of `per_node`.
        target: where they go.
        per_node: ranks of a node.
        bucket_bytes: the most bytes in a message.

    Raises:
        PlanError: the layers do not divide over the stages.
    """
    counter = _Counter(shape, itemsize, source, target, per_node)
    near, far = counter.near(), counter.far()
    src, dst, moved = counter.serve(_Entries(*map(np.concatenate, zip(near, far, strict=True))))
    relay_src, relay_dst, relayed = counter.relay(far)
    size, node = counter.size, counter.node
    within = node[src] == node[dst]

    def total(ranks: Ints, weights: Any) -> Floats:
        return np.bincount(ranks, weights=weights, minlength=size)

    first, last, messages = _messages(src, dst, moved, size, bucket_bytes)
    relay_first, relay_last, relay_messages = _messages(relay_src, relay_dst, relayed, size, bucket_bytes)
    return Traffic(
        received_within=total(dst, moved * within),
        received_across=total(dst, moved * ~within),
        received_relayed=total(relay_dst, relayed),
        sent_within=total(src, moved * within),
        sent_across=total(src, moved * ~within),
        sent_relayed=total(relay_src, relayed),
        local=counter.local,
        messages_received=total(last, messages),
        messages_sent=total(first, messages),
        relays_received=total(relay_last, relay_messages),
        relays_sent=total(relay_first, relay_messages),
    )


def _messages(src: Ints, dst: Ints, moved: Ints, size: int, bucket_bytes: int) -> tuple[Ints, Ints, Ints]:
    """(from, to, messages) of each pair of ranks."""
    pairs = src * size + dst
    if size * size <= 32 * len(pairs):
        dense = np.bincount(pairs, weights=moved, minlength=0)
        unique = np.flatnonzero(dense)
        sizes = dense[unique]
    else:
        unique, inverse = np.unique(pairs, return_inverse=True)
        sizes = np.bincount(inverse, weights=moved)
    capacity = bucket_bytes // _MESSAGE_STEP_BYTES * _MESSAGE_STEP_BYTES
    return unique // size, unique % size, np.ceil(sizes / capacity).astype(np.int64)


class _Entries(NamedTuple):
    """Who stands in a queue for what."""

    queue: Ints
    """(set of owners) x (nodes + 1); + 1 + node if only the owners in that node serve it."""
    receiver: Ints
    target: Ints
    """Place of the set that it is wanted for; 0 where this does not matter."""
    begin: Ints
    """Where the bytes begin in all that the owners have for that set."""
    num_bytes: Ints
    member: Ints
    """Position in the target's list of owners."""


class _Counter:
    """Owners and receivers of one reallocation; ranks count from the first one of either window."""

    def __init__(
        self, shape: ModelShape, itemsize: int, source: Window, target: Window, per_node: int
    ) -> None:
        origin = min(source.start, target.start)
        self.size = max(source.start + source.layout.size, target.start + target.layout.size) - origin
        self.node = (np.arange(self.size) + origin) // per_node - origin // per_node
        self._itemsize = itemsize
        self._num_nodes = int(self.node[-1]) + 1
        self._lines = common_elements(shape, source.layout, target.layout) * itemsize
        self._owners, self._members = owner_list(shape, source.layout), owner_list(shape, target.layout)
        self._owner = self._owners.rank + (source.start - origin)
        self._member = self._members.rank + (target.start - origin)
        self._in_node = np.zeros((len(self._lines), self._num_nodes), bool)
        self._in_node[self._owners.queue, self.node[self._owner]] = True
        self._first = target.start - origin
        members, classes = set_classes(shape, target.layout)
        self._missing = (self._lines @ members).astype(np.int64)[
            :, classes
        ]  # bytes by (set, rank of the target)
        self.local = self._take_held()

    def _take_held(self) -> Floats:
        """Bytes that each rank needs and has; they are not missing any more."""
        ranks = self._owner - self._first
        inside = (ranks >= 0) & (ranks < self._missing.shape[1])
        at = self._owners.queue[inside], ranks[inside]
        local = np.bincount(self._owner[inside], weights=self._missing[at], minlength=self.size)
        self._missing[at] = 0
        return local

    def near(self) -> _Entries:
        """Receivers with an owner in their node."""
        node = self.node[self._first : self._first + self._missing.shape[1]]
        missing = self._missing
        if self._num_nodes > 1:
            missing = np.where(self._in_node[:, node], missing, 0)
        queue, receiver = np.nonzero(missing)
        none = np.zeros_like(queue)
        at = queue * (self._num_nodes + 1) + 1 + node[receiver]
        return _Entries(at, receiver + self._first, none, none, missing[queue, receiver], none)

    def far(self) -> _Entries:
        """Receivers without: each takes a part of what its node needs."""
        if self._in_node[:, self.node].all():
            none = np.zeros(0, np.int64)
            return _Entries(none, none, none, none, none, none)
        members, node = self._members, self.node[self._member]
        wanted = np.where(self._in_node[:, node], 0, self._lines[:, members.queue])
        queue, member = np.nonzero(wanted)
        line = wanted[queue, member]
        slot, count = (column[member] for column in self._slots())
        begin = line * slot // count
        num_bytes = line * (slot + 1) // count - begin
        entries = _Entries(
            queue * (self._num_nodes + 1),
            self._member[member],
            members.place[members.queue[member]],
            begin,
            num_bytes,
            member,
        )
        return _Entries(*(column[num_bytes > 0] for column in entries))

    def _slots(self) -> tuple[Ints, Ints]:
        """By member of a target set: position among, and number of, those in its node."""
        group = self._members.queue * self._num_nodes + self.node[self._member]
        first = np.searchsorted(group, group, side="left")
        return np.arange(len(group)) - first, np.searchsorted(group, group, side="right") - first

    def serve(self, entries: _Entries) -> tuple[Ints, Ints, Ints]:
        """(sender, receiver, bytes) of every stretch that one owner serves one receiver.

        The bytes of all queues are laid end to end; both the receivers' and the owners' parts cut this line.
        """
        if self._num_nodes > 1:
            order = np.lexsort((entries.target, entries.receiver, entries.queue))
            entries = _Entries(*(column[order] for column in entries))
        ends = np.cumsum(entries.num_bytes)
        starts = ends - entries.num_bytes
        totals = np.bincount(
            entries.queue, weights=entries.num_bytes, minlength=len(self._lines) * (self._num_nodes + 1)
        ).astype(np.int64)
        bases = np.cumsum(totals) - totals
        queue, owner, share, owners = self._servers(totals)
        cuts = np.concatenate((starts, bases[queue] + totals[queue] * share // owners))
        order = np.argsort(cuts, kind="stable")
        is_owner = order >= len(starts)
        cuts = cuts[order]
        lengths = np.diff(cuts, append=ends[-1] if len(ends) else 0)
        keep = lengths > 0
        at = np.cumsum(~is_owner)[keep] - 1
        # A position inside an element counts as its start, from the start of all that the owners have for a set.
        low = entries.begin[at] + cuts[keep] - starts[at]
        moved = self._whole(low + lengths[keep]) - self._whole(low)
        sent = moved > 0
        return owner[np.cumsum(is_owner)[keep] - 1][sent], entries.receiver[at][sent], moved[sent]

    def _servers(self, totals: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Of each queue, at least if it serves anybody: (queue, owner, position among its owners, how many)."""
        owners, nodes = self._owners, self._num_nodes + 1
        group = owners.queue * nodes + 1 + self.node[self._owner]
        if self._num_nodes == 1:
            return group, self._owner, owners.share, owners.owners
        first = np.searchsorted(group, group, side="left")
        count = np.searchsorted(group, group, side="right") - first
        parts = (group, self._owner, np.arange(len(group)) - first, count)
        whole = (owners.queue * nodes, self._owner, owners.share, owners.owners)
        columns = [np.concatenate(pair) for pair in zip(whole, parts, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        queue, owner, share, number = (column[order[totals[columns[0][order]] > 0]] for column in columns)
        return queue, owner, share, number

    def relay(self, far: _Entries) -> tuple[Ints, Ints, Ints]:
        """(sender, receiver, bytes): every member of a target set sends its part to the others of its node."""
        parts = self._whole(far.begin + far.num_bytes) - self._whole(far.begin)
        num_bytes = np.bincount(far.member, weights=parts, minlength=len(self._member)).astype(np.int64)
        slot, count = self._slots()
        member = np.flatnonzero(num_bytes)
        sender = np.repeat(member, count[member])
        first = np.repeat(np.cumsum(count[member]) - count[member], count[member])
        receiver = sender - slot[sender] + np.arange(len(sender)) - first
        other = receiver != sender
        sender, receiver = sender[other], receiver[other]
        return self._member[sender], self._member[receiver], num_bytes[sender]

    def _whole(self, num_bytes: Ints) -> Ints:
        return num_bytes // self._itemsize * self._itemsize
