"""From a model's sharded state dict to table entries, and to tensors that always point at the model's storage.

The sharding metadata is read by attribute from anything that looks like Megatron-Core's `ShardedTensor`; this package
does not import Megatron. A tensor that does not lie in the storage of a parameter or buffer is a copy: writing to it
would change nothing, so it is refused by name.

Invariants (tests/unit/realloc_ops/test_local_shards.py):
    - every view shares memory with the parameter or buffer that it was found in;
    - after a storage was freed and allocated again, and after a parameter was bound to another storage, `resolve`
      gives views of the storage that the parameter has now;
    - two tensors of one rank with the same key and box: the first is sent and received, the others are copied from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_real.errors import PeerError, Problem, RealError, raise_problems
from megatron_real.realloc_ops.shards import DTYPE_BYTES, Box, ParamTable, Shard, ShardEntry

__all__ = ["LocalShards", "ShardedTensorLike", "gather_tables", "local_table"]


@runtime_checkable
class ShardedTensorLike(Protocol):
    """What is read of Megatron-Core's `ShardedTensor` (megatron.core.dist_checkpointing.mapping)."""

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Where a shard lies, relative to the parameter or buffer that holds it."""

    shard: Shard
    owner: torch.Tensor
    shape: tuple[int, ...]
    """With prepended axes, so that it equals the box's."""
    stride: tuple[int, ...]
    relative_offset: int
    """Elements from the start of the owner."""

    def view(self) -> torch.Tensor:
        owner = self.owner.detach()
        return owner.as_strided(self.shape, self.stride, owner.storage_offset() + self.relative_offset)


class LocalShards:
    """The shards of one copy on this rank: entries for the table, and views for the executor."""

    def __init__(
        self,
        entries: Sequence[ShardEntry],
        placed: Sequence[_Placed],
        duplicates: Sequence[tuple[_Placed, _Placed]],
    ) -> None:
        """Made by `local_table`."""
        self.entries = tuple(entries)
        """One entry per shard, for `gather_tables`."""
        self._placed = tuple(placed)
        self._duplicates = tuple(duplicates)
        unique = {id(item.owner): item.owner for item in (*placed, *(dup for _, dup in duplicates))}
        self._owners = tuple(unique.values())
        self._storages: tuple[tuple[int, int], ...] = ()
        self._views: dict[Shard, torch.Tensor] = {}
        self._duplicate_views: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self.generation = 0
        """Counts how often views were made: it grows only when a parameter was bound to another storage."""

    @property
    def devices(self) -> frozenset[torch.device]:
        return frozenset(owner.device for owner in self._owners)

    def resolve(self) -> Mapping[Shard, torch.Tensor]:
        """Views of all shards, of box shape; cheap unless a parameter moved to another storage.

        Raises:
            RealError: a storage is freed.
        """
        storages = tuple((owner.untyped_storage()._cdata, owner.storage_offset()) for owner in self._owners)
        for owner in self._owners:
            if owner.untyped_storage().nbytes() == 0 and owner.numel() > 0:
                raise RealError(
                    f"{self._name_of(owner)}: found its storage freed; allocate the copy's segments first."
                )
        if storages != self._storages:
            self._views = {item.shard: item.view() for item in self._placed}
            self._duplicate_views = tuple((first.view(), other.view()) for first, other in self._duplicates)
            self._storages = storages
            self.generation += 1
        return self._views

    def fill_duplicates(self) -> None:
        """Copy the first tensor of each shard to the other tensors of this rank that hold the same shard."""
        for first, other in self._duplicate_views:
            other.copy_(first)

    def _name_of(self, owner: torch.Tensor) -> str:
        return next(
            item.shard.key
            for item in (*self._placed, *(d for _, d in self._duplicates))
            if item.owner is owner
        )


def local_table(
    sharded_tensors: Iterable[ShardedTensorLike], allowed: Iterable[tuple[str, torch.Tensor]]
) -> LocalShards:
    """Read the sharded tensors of one copy on this rank.

    Args:
        sharded_tensors: a sharded state dict, factories applied, flattened, of all model chunks of this rank. Make
            it while the copy is allocated (torch refuses to split freed tensors); after that only metadata is read.
        allowed: the (name, tensor) pairs of the parameters and persistent buffers that may be read and written.

    Raises:
        PlanError: lists each tensor that cannot be moved correctly: a copy, a flattened range, a quantised or
            sharded tensor type, a dtype that may not be moved, or metadata that contradict each other.
    """
    finder = _OwnerFinder(allowed)
    problems: list[Problem] = []
    entries: dict[Shard, ShardEntry] = {}
    first_placed: dict[Shard, _Placed] = {}
    duplicates: list[tuple[_Placed, _Placed]] = []
    for tensor in sharded_tensors:
        problem = _reason_to_refuse(tensor)
        owner = finder.owner_of(tensor.data) if problem is None and tensor.data is not None else None
        if problem is None and owner is None:
            problem = (
                "a tensor that is no view of a parameter or buffer",
                "a view, so that writing reaches the model",
            )
        if problem is not None or owner is None or tensor.data is None:
            found, expected = problem or ("no data", "a tensor")
            problems.append(Problem(path=tensor.key, found=found, expected=expected))
            continue
        entry = _entry_of(tensor, tensor.data)
        placed = _place(entry.shard, tensor.data, owner, tensor.prepend_axis_num)
        if entry.shard not in entries:
            entries[entry.shard] = entry
            first_placed[entry.shard] = placed
        elif not _same_place(first_placed[entry.shard], placed):
            duplicates.append((first_placed[entry.shard], placed))
    raise_problems(problems, subject="tensors that cannot be reallocated")
    return LocalShards(tuple(entries.values()), tuple(first_placed.values()), duplicates)


def gather_tables(entries: Sequence[ShardEntry] | RealError, group: dist.ProcessGroup) -> ParamTable:
    """Exchange the entries of all ranks of `group`. Collective over `group`; once per copy, at set-up.

    Args:
        entries: this rank's entries, none if it is outside the copy's window; or the error that it met on the way
            here, so that no rank waits for it in vain.
        group: any backend that can gather objects.

    Raises:
        PeerError: another rank met an error; a rank that met one raises its own.
        PlanError: the ranks' entries contradict each other; the same on all ranks.
    """
    mine: tuple[ShardEntry, ...] | str = str(entries) if isinstance(entries, RealError) else tuple(entries)
    ranks = dist.get_process_group_ranks(group)
    gathered: list[tuple[ShardEntry, ...] | str | None] = [None] * len(ranks)
    dist.all_gather_object(gathered, mine, group=group)
    if isinstance(entries, RealError):
        raise entries
    by_rank: dict[int, tuple[ShardEntry, ...]] = {}
    failed: dict[int, str] = {}
    for rank, found in zip(ranks, gathered, strict=True):
        if isinstance(found, str):
            failed[rank] = found
        else:
            by_rank[rank] = found or ()
    if failed:
        rank, text = min(failed.items())
        raise PeerError(
            f"parameter table: ranks {sorted(failed)} could not describe their shards. Rank {rank}: {text}"
        )
    return ParamTable.of(by_rank)


class _OwnerFinder:
    """Finds the parameter or buffer whose memory a tensor lies in; works on freed storages too."""

    def __init__(self, allowed: Iterable[tuple[str, torch.Tensor]]) -> None:
        by_storage: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        for _, tensor in allowed:
            first = tensor.storage_offset() * tensor.element_size()
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(
                (first, first + _extent(tensor) * tensor.element_size(), tensor)
            )
        self._by_storage = {
            storage: sorted(tensors, key=lambda item: item[:2]) for storage, tensors in by_storage.items()
        }

    def owner_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        candidates = self._by_storage.get(tensor.untyped_storage()._cdata, [])
        first = tensor.storage_offset() * tensor.element_size()
        last = first + _extent(tensor) * tensor.element_size()
        index = bisect_right(candidates, first, key=lambda item: item[0]) - 1
        if index < 0:
            return None
        _, stop, owner = candidates[index]
        return owner if last <= stop and owner.dtype == tensor.dtype else None


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last one in storage."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _reason_to_refuse(tensor: ShardedTensorLike) -> tuple[str, str] | None:
    """What was found and what is expected; None when the tensor can be moved."""
    data = tensor.data
    if getattr(tensor, "flattened_range", None) is not None:
        return f"a flattened range {getattr(tensor, 'flattened_range', None)}", "a whole box"
    if not isinstance(data, torch.Tensor):
        return f"{type(data).__name__} as data", "a tensor on this rank"
    if type(data) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"the tensor type {type(data).__name__}",
            "a plain tensor (quantised and distributed ones are refused)",
        )
    dtype = _dtype_name(data.dtype)
    if data.is_quantized or dtype not in DTYPE_BYTES:
        return f"dtype {dtype}", f"one of {', '.join(DTYPE_BYTES)} (quantised parameters are refused)"
    if data.layout != torch.strided:
        return f"layout {data.layout}", "a strided tensor"
    ndim = len(tensor.local_shape) + tensor.prepend_axis_num
    if tuple(data.shape) != tuple(tensor.local_shape) or not ndim == len(tensor.global_shape) == len(
        tensor.global_offset
    ):
        return (
            f"data {list(data.shape)}, local shape {list(tensor.local_shape)}, {tensor.prepend_axis_num} prepended "
            f"axes, global shape {list(tensor.global_shape)}, offset {list(tensor.global_offset)}",
            "shapes that agree",
        )
    return None


def _entry_of(tensor: ShardedTensorLike, data: torch.Tensor) -> ShardEntry:
    box = Box(
        tuple(map(int, tensor.global_offset)), (1,) * tensor.prepend_axis_num + tuple(map(int, data.shape))
    )
    return ShardEntry(tensor.key, box, tuple(map(int, tensor.global_shape)), _dtype_name(data.dtype))


def _place(shard: Shard, data: torch.Tensor, owner: torch.Tensor, prepended: int) -> _Placed:
    return _Placed(
        shard=shard,
        owner=owner,
        shape=(1,) * prepended + tuple(data.shape),
        stride=(_extent(data),) * prepended + data.stride(),
        relative_offset=data.storage_offset() - owner.storage_offset(),
    )


def _same_place(one: _Placed, other: _Placed) -> bool:
    def start(placed: _Placed) -> tuple[int, int]:
        owner = placed.owner
        return owner.untyped_storage()._cdata, owner.storage_offset() + placed.relative_offset

    return start(one) == start(other)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
