"""The ways to move one model's weights to another layout that `realloc` compares, each as a function of one rank.

All move between the same two copies: parameters in segments, filled with a function of their global coordinates.
"""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.resharding.refit import swap_model_weights

from megatron_real.device_memory import MemoryLedger
from megatron_real.hooks.model_builder import RoleModel, sharded_tensors
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.parallel_state import ParallelLayout
from megatron_real.plan import CopyKey
from megatron_real.realloc_ops import InPlace, Reallocator, ReallocOptions
from megatron_real.realloc_ops.execution.node_links import NodeLinks
from megatron_real.realloc_ops.execution.regions import Regions
from megatron_real.realloc_ops.planning.buckets import Slice
from megatron_real.realloc_ops.planning.plan import RankPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Shard
from megatron_real.realloc_ops.storage.local_shards import LocalShards, gather_tables

__all__ = ["BUCKET_BYTES", "Checkpoint", "Limit", "Pair", "in_place_excess_bytes"]

BUCKET_BYTES = 8 * 2**20
"""Less than the default: on a CPU staging memory that is touched for the first time costs more than messages do."""
_WHOLE_BYTES = 1 << 40
"""A bucket that nothing fills."""
_LARGE_BYTES = 1 << 20
_MODULUS = 65521
_LONG = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Source and destination copy on this rank, None where there is none."""

    src: ModelCopy | None
    dst: ModelCopy | None
    group: dist.ProcessGroup
    """All ranks; for reallocations only."""
    ledger: MemoryLedger
    """Of both copies."""

    @classmethod
    def build(
        cls, role: RoleModel, layouts: tuple[ParallelLayout, ParallelLayout], group: dist.ProcessGroup
    ) -> Pair:
        """Frozen copies, the source with its values. Collective over the layouts' meshes."""
        ledger = MemoryLedger()
        copies: list[ModelCopy | None] = []
        for parallel in layouts:
            key = CopyKey(model=role.role, mesh=parallel.mesh, layout=parallel.layout)
            copies.append(ModelCopy(key, role, parallel, ledger=ledger) if parallel.member else None)
        for tensor, values in _patterns(copies[0]):
            tensor.copy_(values)
        return cls(src=copies[0], dst=copies[1], group=group, ledger=ledger)

    def poison(self) -> None:
        """Make every value of the destination wrong."""
        if self.dst is not None:
            for segment in self.dst.segments.segments:
                segment.flat.fill_(-1)

    def arrived(self) -> bool:
        """Whether the destination has the source's values on all ranks. Collective over WORLD."""
        right = all(torch.equal(tensor, values) for tensor, values in _patterns(self.dst))
        flag = torch.tensor([right], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def reallocator(self, **options: Any) -> Reallocator:
        """Ours. Collective over the group."""
        return Reallocator(
            *(copy.shards if copy is not None else None for copy in (self.src, self.dst)),
            group=self.group,
            options=ReallocOptions(**{"bucket_bytes": BUCKET_BYTES, **options}),
        )

    def megatron(self, service: str) -> Callable[[], None]:
        """`megatron.core.resharding` with one of its transports."""
        src, dst = (copy.chunks if copy is not None else None for copy in (self.src, self.dst))
        return lambda: swap_model_weights(src, dst, service)

    def plan(self) -> RankPlan:
        """This rank's part, of which only what goes where matters. Collective over WORLD."""
        tables = [
            gather_tables(copy.shards.entries if copy is not None else (), dist.group.WORLD)
            for copy in (self.src, self.dst)
        ]
        rank = dist.get_rank()
        return build_realloc_plan(*tables, bucket_bytes=_WHOLE_BYTES, rank=rank).of(rank)


def _patterns(copy: ModelCopy | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor of the model, what it must hold): other values for neighbours along each axis, and for other keys."""
    if copy is None:
        return
    for shard in sharded_tensors(copy.chunks, copy.parallel):
        assert shard.data is not None
        box = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
        total = torch.full((1,) * len(box), zlib.crc32(shard.key.encode()) % _MODULUS, dtype=torch.int32)
        for axis, (start, extent) in enumerate(zip(shard.global_offset, box, strict=True)):
            numbers = torch.arange(start, start + extent, dtype=torch.int32) * (7919, 104729, 31, 1009)[axis]
            total = total + numbers.view([-1 if other == axis else 1 for other in range(len(box))])
        values = (total % _MODULUS).to(torch.float32).div_(_MODULUS).sub_(0.5)
        yield shard.data.detach(), values.to(shard.data.dtype).view(shard.data.shape)


def in_place_excess_bytes(pair: Pair) -> int:
    """How far the memory of an in-place run exceeds the larger copy on this rank; the source is gone after it.

    Collective over the group.
    """
    for copy in (pair.src, pair.dst):
        if copy is not None:
            _leave_segments(copy)
    src, dst = (copy.chunks if copy is not None else None for copy in (pair.src, pair.dst))
    segments = InPlace.adopt(src, dst, ledger=pair.ledger)
    realloc = pair.reallocator(order="in_place", in_place=segments, ledger=pair.ledger)
    if segments.dst is not None:
        segments.dst.free()
    pair.ledger.reset_peak()
    realloc.run()
    sizes = [one.nbytes for one in (segments.src, segments.dst) if one is not None]
    return pair.ledger.peak_bytes - max(sizes, default=0)


def _leave_segments(copy: ModelCopy) -> None:
    """Give each tensor a storage of its own, so that other segments can adopt it."""
    for chunk in copy.chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            tensor.data = tensor.detach().clone()
    copy.segments.free()


class Limit:
    """The same bytes between the same pairs of ranks, one message each, from memory that needs no packing.

    Over gloo, or over the links of a node. Beside the wire it makes the copies inside a rank that no method can avoid:
    what the rank keeps, and what is not contiguous in the source or in the destination. All of it at once, and in no
    order.
    """

    def __init__(self, pair: Pair, plan: RankPlan, links: NodeLinks | None = None) -> None:
        """Allocate all that `run` touches."""
        src, dst = (_views(copy.shards if copy is not None else None) for copy in (pair.src, pair.dst))
        self._group = pair.group
        self._links = links
        self._messages: list[tuple[Callable[..., Any], torch.Tensor, int]] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.contiguous_bytes = 0
        """Of what this rank receives: contiguous on arrival, in pieces of a mebibyte or more."""
        sent, received = Counter[int](), Counter[int]()
        for message in plan.sends:
            sent[message.dst] += message.num_bytes
            for piece in message.slices:
                part = _part(src, piece, piece.src_box)
                if not part.is_contiguous():
                    self._add_copy(torch.ones_like(part, memory_format=torch.contiguous_format), part)
        for message in plan.receives:
            received[message.src] += message.num_bytes
            for piece in message.slices:
                part = _part(dst, piece, piece.dst_box)
                if not part.is_contiguous():
                    self._add_copy(part, torch.ones_like(part, memory_format=torch.contiguous_format))
                elif piece.num_bytes >= _LARGE_BYTES:
                    self.contiguous_bytes += piece.num_bytes
        send, receive = (dist.isend, dist.irecv) if links is None else (links.send, links.receive)
        for operation, peers in ((send, sent), (receive, received)):
            for peer, num_bytes in sorted(peers.items()):
                self._messages.append((operation, torch.ones(num_bytes, dtype=torch.uint8), peer))
        for piece in plan.copies:
            self._add_copy(_part(dst, piece, piece.dst_box), _part(src, piece, piece.src_box))

    def run(self) -> None:
        """Once; the destination has no meaningful values after it."""
        if self._links is not None:
            works = [operation(peer, Regions(payload)) for operation, payload, peer in self._messages]
        else:
            works = [
                work
                for operation, payload, peer in self._messages
                for work in dist.batch_isend_irecv([dist.P2POp(operation, payload, peer, self._group)])
            ]
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for work in works:
            work.wait(_LONG)

    def _add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)


def _views(shards: LocalShards | None) -> dict[Shard, torch.Tensor]:
    return dict(shards.resolve()) if shards is not None else {}


def _part(views: dict[Shard, torch.Tensor], piece: Slice, box: Any) -> torch.Tensor:
    return views[Shard(piece.key, box)][piece.box.slices_in(box)]


class Checkpoint:
    """Megatron's own checkpoint, saved from the source and loaded into the destination, in a RAM disk."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        """Nothing is written yet."""
        self._pair = pair
        self._folder = folder / "checkpoint"

    def prepare(self) -> None:
        """An empty folder. Collective over WORLD."""
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        dist.barrier()

    def run(self) -> None:
        """Save and load. Collective over WORLD."""
        dist_checkpointing.save(
            self._state(self._pair.src), str(self._folder), validate_access_integrity=False
        )
        wanted = self._state(self._pair.dst)
        loaded = dist_checkpointing.load(wanted, str(self._folder), validate_access_integrity=False)
        if self._pair.dst is not None:
            for index, chunk in enumerate(self._pair.dst.chunks):
                chunk.load_state_dict(loaded[f"model{index}"], strict=False)

    def _state(self, copy: ModelCopy | None) -> dict[str, Any]:
        if copy is None:
            return {}
        assert copy.parallel.pg_collection is not None
        metadata = {"dp_cp_group": copy.parallel.pg_collection.dp_cp, "singleton_local_shards": False}
        with copy.parallel.active():
            return {
                f"model{index}": chunk.sharded_state_dict(metadata=dict(metadata))
                for index, chunk in enumerate(copy.chunks)
            }
