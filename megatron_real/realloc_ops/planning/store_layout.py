"""Which rank of a node writes which part of the node's host store: pure arithmetic, no torch.

A node's store holds each global tensor once. Filling it is a reallocation to a layout of its own, in which every
element belongs to one rank of each node: to a rank that has it already if there is one in the node, so that it costs
no message. Ranks that hold the same boxes share them in equal parts, and so do all ranks of a node what none of them
holds.

Invariants (tests/unit/realloc_ops/test_store_layout.py):
    - in every node each element of every tensor belongs to exactly one rank;
    - a rank gets nothing from outside that is inside its node, so a node receives each byte that it lacks once;
    - ranks that share boxes get equal bytes, to one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.shards import ParamTable, Shard, ShardEntry, TensorSpec

__all__ = ["nodes_of", "store_bytes", "store_offsets", "store_table"]

_ALIGN_BYTES = 128
"""Each tensor starts at a multiple of this, as copies with vector instructions like it."""


def nodes_of(ranks: Iterable[int], devices_per_node: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, ascending; nodes without any of `ranks` are left out."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(set(ranks)):
        nodes.setdefault(rank // devices_per_node, []).append(rank)
    return tuple(tuple(members) for _, members in sorted(nodes.items()))


def store_offsets(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, int], int]:
    """Where each whole tensor starts in the store, in bytes, and the bytes of the whole store."""
    offsets: dict[str, int] = {}
    position = 0
    for key in sorted(specs):
        offsets[key] = position
        position += -(-specs[key].num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, position


def store_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Host memory that a node's store of these tensors takes; the same on every node, whatever the layouts."""
    return store_offsets(specs)[1]


def store_table(
    src: ParamTable, nodes: Sequence[Sequence[int]], specs: Mapping[str, TensorSpec] | None = None
) -> ParamTable:
    """The layout into which a copy in the layout of `src` is reallocated to fill the store of every node.

    Args:
        src: the table of the copy.
        nodes: the ranks of each node that has a store.
        specs: the tensors in the dtypes of the store; None keeps those of `src`.

    Raises:
        PlanError: a rank is in two nodes, or there is no node.
    """
    members = [rank for node in nodes for rank in node]
    if not members or len(members) != len(set(members)):
        raise PlanError(
            f"host store: found nodes {[list(node) for node in nodes]}; expected at least one, and each rank in one "
            "node."
        )
    specs = src.specs if specs is None else specs
    entries: dict[int, list[ShardEntry]] = {rank: [] for rank in members}
    for node in nodes:
        everyone, inside = tuple(node), frozenset(node)
        queues: dict[tuple[int, ...], list[Shard]] = {}
        for shard, owners in src.owners.items():
            writers = tuple(rank for rank in owners if rank in inside) or everyone
            queues.setdefault(writers, []).append(shard)
        for writers, shards in queues.items():
            for rank, shard in _deal(writers, shards, specs):
                entries[rank].append(ShardEntry(shard.key, shard.box, *specs[shard.key]))
    return ParamTable.of(entries)


def _deal(
    writers: tuple[int, ...], shards: Sequence[Shard], specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[int, Shard]]:
    """Lay the shards end to end and cut them into equal parts, one per writer."""
    total_bytes = sum(shard.box.num_elements * specs[shard.key].itemsize_bytes for shard in shards)
    number = position = 0
    for shard in shards:
        itemsize_bytes = specs[shard.key].itemsize_bytes
        pending = [shard.box]
        while pending:
            box = pending.pop(0)
            count = box.num_elements
            while number < len(writers) - 1:
                room = (total_bytes * (number + 1) // len(writers) - position) // itemsize_bytes
                if room > 0:
                    count = min(count, room)
                    break
                number += 1
            head, tail = box.split(count)
            for part in head:
                yield writers[number], Shard(shard.key, part)
            position += count * itemsize_bytes
            pending[:0] = tail
