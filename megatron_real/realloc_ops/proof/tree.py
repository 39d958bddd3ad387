"""Small tensors to and from all ranks of a reallocation, over its own transport.

A binomial tree of point-to-point messages, because the ranks that a reallocation concerns rarely are a process group,
and because the transport names the rank that did not come. Every rank exchanges with at most log2(ranks) others.

Invariant (tests/unit/realloc_ops/test_verify.py): every rank gets the maximum over all ranks, or the root's bytes, for
any number of ranks and any root.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from megatron_real.realloc_ops.execution.regions import Regions
from megatron_real.realloc_ops.execution.transports import Parcel, Pending, Transport

__all__ = ["Tree"]


class Tree:
    """The tree over the ranks that a reallocation concerns, as one of them sees it."""

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int, name: str) -> None:
        """Send nothing.

        Args:
            transport: over a group that covers `ranks`.
            ranks: global ranks, in an order that is the same on all of them.
            rank: this one.
            name: for error messages.
        """
        self.ranks = tuple(ranks)
        self.rank = rank
        self._transport = transport
        self._name = name

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 tensor where `spread` wants its payload."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._transport.staging_device())

    def combine(self, values: torch.Tensor) -> Generator[Pending, None, torch.Tensor]:
        """The maximum over all ranks. Collective over the tree's ranks.

        Args:
            values: int64, of one axis and the same length on all ranks.

        Returns:
            A tensor like `values` in host memory, equal on all ranks.

        Raises:
            PeerError: another rank failed or did not come.
        """
        mine = values.to(self._transport.staging_device(), copy=True)
        payload = mine.view(torch.uint8)
        parent, children = self._neighbours(0)
        for child in children:
            theirs = torch.empty_like(mine)
            yield self._receive(theirs.view(torch.uint8), child)
            torch.maximum(mine, theirs, out=mine)
        if parent is not None:
            yield self._send(payload, parent)
            yield self._receive(payload, parent)
        for child in reversed(children):
            yield self._send(payload, child)
        return mine.cpu()

    def spread(self, payload: torch.Tensor, root: int) -> Generator[Pending]:
        """Fill `payload` with what it holds on `root`. Collective over the tree's ranks.

        Args:
            payload: flat uint8 tensor on the transport's device, of the same size on all ranks.
            root: a rank of the tree.

        Raises:
            PeerError: another rank failed or did not come.
        """
        parent, children = self._neighbours(self.ranks.index(root))
        if parent is not None:
            yield self._receive(payload, parent)
        for child in reversed(children):
            yield self._send(payload, child)

    def _neighbours(self, root: int) -> tuple[int | None, list[int]]:
        """Parent and children in the tree whose root is at place `root`; the child with the fewest below it first."""
        size = len(self.ranks)
        place = (self.ranks.index(self.rank) - root) % size
        children: list[int] = []
        bit = 1
        while bit < size and not place & bit:
            if place + bit < size:
                children.append(self.ranks[(place + bit + root) % size])
            bit *= 2
        return (self.ranks[(place - bit + root) % size] if place else None), children

    def _send(self, payload: torch.Tensor, peer: int) -> Pending:
        label = f"{self._name}: checks from rank {self.rank} to rank {peer}"
        sent, _ = self._transport.exchange(Parcel(peer=peer, memory=Regions(payload), label=label), None)
        assert sent is not None, "a parcel was given"
        return sent

    def _receive(self, payload: torch.Tensor, peer: int) -> Pending:
        label = f"{self._name}: checks from rank {peer} to rank {self.rank}"
        _, received = self._transport.exchange(None, Parcel(peer=peer, memory=Regions(payload), label=label))
        assert received is not None, "a parcel was given"
        return received
