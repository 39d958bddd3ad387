"""What every reallocation plan must keep, counted element by element with numpy from the tables alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_real.realloc_ops.planning.buckets import Large, Message, Slice
from megatron_real.realloc_ops.planning.plan import RankPlan, ReallocPlan
from megatron_real.realloc_ops.planning.shards import DTYPE_BYTES, Box, ParamTable, Shard

Array = np.ndarray[Any, Any]


def region(box: Box, outer: Box | None = None) -> tuple[slice, ...]:
    """Of the whole tensor, or of what `outer` covers."""
    starts = outer.offset if outer is not None else (0,) * len(box.offset)
    return tuple(
        slice(low - start, low - start + extent)
        for low, start, extent in zip(box.offset, starts, box.shape, strict=True)
    )


def node_of(rank: int, per_node: int | None) -> int:
    return 0 if per_node is None else rank // per_node


def held_masks(table: ParamTable, ranks: list[int]) -> dict[int, dict[str, Array]]:
    masks = {
        rank: {key: np.zeros(spec.global_shape, bool) for key, spec in table.specs.items()} for rank in ranks
    }
    for (key, box), owners in table.owners.items():
        for rank in owners:
            masks[rank][key][region(box)] = True
    return masks


def assert_invariants(
    src: ParamTable,
    dst: ParamTable,
    plan: ReallocPlan,
    *,
    per_node: int | None = None,
    large: Large = "alone",
) -> None:
    """The list in the docstring of `plan.py`."""
    ranks = sorted({*src.ranks, *dst.ranks})
    assert sorted(plan.ranks) == ranks
    _Elements(src, dst, per_node, ranks).check(plan)
    assert_messages(plan, large)


class _Elements:
    def __init__(self, src: ParamTable, dst: ParamTable, per_node: int | None, ranks: list[int]) -> None:
        self.src, self.dst, self.per_node = src, dst, per_node
        self.held = held_masks(src, ranks)
        self.in_node: dict[int, dict[str, Array]] = {}
        for rank in ranks:
            node = self.in_node.setdefault(node_of(rank, per_node), {})
            for key, mask in self.held[rank].items():
                node[key] = node.get(key, False) | mask
        self.written: dict[tuple[int, Shard], Array] = {
            (rank, shard): np.zeros(shard.box.shape, np.int64)
            for shard, owners in dst.owners.items()
            for rank in owners
        }
        self.first_hand = {where: np.zeros_like(found) for where, found in self.written.items()}
        self.entered: dict[tuple[int, Shard], Array] = {
            (node_of(rank, per_node), shard): np.zeros(shard.box.shape, np.int64)
            for rank, shard in self.written
        }

    def check(self, plan: ReallocPlan) -> None:
        for rank, part in plan.ranks.items():
            for piece in part.copies:
                assert rank in self.src.owners[Shard(piece.key, piece.src_box)]
                self._write(rank, piece, relayed=False)
            for message in part.receives:
                assert message.dst == rank != message.src
                if not message.relayed:
                    self._receive(message)
        for part in plan.ranks.values():
            for message in part.receives:
                if message.relayed:
                    self._receive_relayed(message)
        for found in self.written.values():
            assert (found == 1).all()
        for (node, shard), found in self.entered.items():
            missing = ~self.in_node[node][shard.key][region(shard.box)]
            assert (found == missing).all(), "one copy enters each node that has none"
        for part in plan.ranks.values():
            self._check_bytes(part)

    def _receive(self, message: Message) -> None:
        crosses = node_of(message.src, self.per_node) != node_of(message.dst, self.per_node)
        for piece in message.slices:
            assert message.src in self.src.owners[Shard(piece.key, piece.src_box)]
            assert not self.held[message.dst][piece.key][region(piece.box)].any(), "it has this"
            at = region(piece.box, piece.dst_box)
            shard = Shard(piece.key, piece.dst_box)
            self.first_hand[message.dst, shard][at] += 1
            if crosses:
                self.entered[node_of(message.dst, self.per_node), shard][at] += 1
            self._write(message.dst, piece, relayed=False)

    def _receive_relayed(self, message: Message) -> None:
        assert self.per_node is not None
        assert message.src // self.per_node == message.dst // self.per_node
        for piece in message.slices:
            assert not self.held[message.dst][piece.key][region(piece.box)].any(), "it has this"
            origin = self.first_hand[message.src, Shard(piece.key, piece.src_box)]
            assert (origin[region(piece.box, piece.src_box)] == 1).all(), "the forwarder received it in hop 0"
            self._write(message.dst, piece, relayed=True)

    def _write(self, rank: int, piece: Slice, *, relayed: bool) -> None:
        assert piece.src_box.contains(piece.box)
        assert piece.dst_box.contains(piece.box)
        side = self.dst if relayed else self.src
        assert piece.num_bytes == piece.box.num_elements * DTYPE_BYTES[side.specs[piece.key].dtype]
        self.written[rank, Shard(piece.key, piece.dst_box)][region(piece.box, piece.dst_box)] += 1

    def _check_bytes(self, part: RankPlan) -> None:
        bound = 0
        for (rank, shard), first_hand in self.first_hand.items():
            if rank == part.rank:
                missing = int((~self.held[rank][shard.key][region(shard.box)]).sum())
                direct = int(first_hand.sum())
                bound += direct * DTYPE_BYTES[self.src.specs[shard.key].dtype]
                bound += (missing - direct) * DTYPE_BYTES[self.dst.specs[shard.key].dtype]
        assert part.bytes_received == part.bytes_bound == bound


def assert_messages(plan: ReallocPlan, large: Large) -> None:
    """Sizes, alignment, numbers, waves, and the order of steps."""
    ends: Counter[object] = Counter()
    for part in plan.ranks.values():
        orders = [step.order for step in part.steps]
        assert orders == sorted(set(orders))
        for step in part.steps:
            for message in (step.send, step.receive):
                if message is not None:
                    assert step.order[:3] == (int(message.relayed), message.wave, message.index)
                    ends[step.order, message] += 1
        for messages in _by_pair(part):
            _check_pair(messages, plan.bucket_bytes, large)
        waves = [(piece.wave, piece.order) for piece in part.copies]
        assert waves == sorted(waves)
    assert set(ends.values()) <= {2}, "a message must be in a step of equal order on both ends"


def _by_pair(part: RankPlan) -> Iterator[list[Message]]:
    pairs: dict[tuple[int, bool], list[Message]] = {}
    for message in part.receives:
        pairs.setdefault((message.src, message.relayed), []).append(message)
    yield from pairs.values()


def _check_pair(messages: list[Message], bucket_bytes: int, large: Large) -> None:
    assert [message.index for message in messages] == list(range(len(messages)))
    total_bytes = sum(message.num_bytes for message in messages)
    waves: Counter[int] = Counter()
    for piece in (piece for message in messages for piece in message.slices):
        waves[piece.wave] += piece.num_bytes
    apart = [wave for wave, num_bytes in waves.items() if large == "apart" and num_bytes >= bucket_bytes]
    assert len(messages) <= total_bytes / bucket_bytes + 1 + 2 * len(apart)
    for message in messages:
        assert len({piece.wave for piece in message.slices}) == 1 or message.wave not in apart
    sizes = {piece.itemsize_bytes for message in messages for piece in message.slices}
    for at, message in enumerate(messages):
        assert message.num_bytes == sum(piece.num_bytes for piece in message.slices) <= bucket_bytes
        assert message.wave == min(piece.wave for piece in message.slices)
        start = 0
        for piece in message.slices:
            assert start % piece.itemsize_bytes == 0
            start += piece.num_bytes
        if len(sizes) == 1:
            inside = [piece.wave for piece in message.slices]
            assert inside == sorted(inside)
            assert at == 0 or messages[at - 1].slices[-1].wave <= inside[0]
        assert at == 0 or messages[at - 1].wave <= message.wave
