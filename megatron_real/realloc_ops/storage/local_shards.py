"""From a model's sharded state dict to table entries, and to tensors that always point at the model's storage.

The sharding metadata is read by attribute from anything that looks like Megatron-Core's `ShardedTensor`; this package
does not import Megatron. A tensor that does not lie in the storage of a parameter or buffer is a copy: writing to it
would change nothing, so it is refused by name.

Invariants (tests/unit/realloc_ops/test_local_shards.py):
    - every view shares memory with the parameter or buffer that it was found in;
    - after a storage was freed and allocated again, and after a parameter was bound to another storage, `resolve`
      gives views of the storage that the parameter has now;
    - two tensors of one rank with the same key and box: the first is sent and received, the others are copied from it;
    - rows behind the real ones of a padded tensor are neither sent nor received, and are zero after a reallocation.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megatron_real.errors import Problem, RealError, raise_problems
from megatron_real.process_groups import exchange
from megatron_real.realloc_ops.planning.shards import DTYPE_BYTES, Box, ParamTable, Shard, ShardEntry

__all__ = ["LocalShards", "ShardPart", "ShardedTensorLike", "gather_tables", "local_table", "with_memory"]


@dataclass(slots=True, kw_only=True)
class ShardPart:
    """A box of a global tensor with its data on this rank: a `ShardedTensorLike` of what Megatron does not shard."""

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0


@contextmanager
def with_memory(tensor: torch.Tensor) -> Iterator[None]:
    """Give a freed storage memory for a moment, so that views can be made in it: torch checks their bounds."""
    storage = tensor.untyped_storage()
    freed = storage.nbytes() == 0
    if freed:
        storage.resize_((tensor.storage_offset() + _extent(tensor)) * tensor.element_size())
    try:
        yield
    finally:
        if freed:
            storage.resize_(0)


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
        with with_memory(owner):
            return owner.as_strided(self.shape, self.stride, owner.storage_offset() + self.relative_offset)


class LocalShards:
    """The shards of one copy on this rank: entries for the table, and views for the executor."""

    def __init__(
        self,
        entries: Sequence[ShardEntry],
        placed: Sequence[_Placed],
        duplicates: Sequence[tuple[_Placed, _Placed]],
        padding: Sequence[_Placed] = (),
    ) -> None:
        """Made by `local_table`."""
        self.entries = tuple(entries)
        """One entry per shard, for `gather_tables`."""
        self._placed = tuple(placed)
        self._duplicates = tuple(duplicates)
        self._padding = tuple(padding)
        self._all = (*placed, *(other for _, other in duplicates), *padding)
        unique = {id(item.owner): item.owner for item in self._all}
        self._owners = tuple(unique.values())
        self.devices = frozenset(owner.device for owner in self._owners)
        """As of the last `resolve`."""
        self._storages: tuple[tuple[int, int], ...] = ()
        self._views: dict[Shard, torch.Tensor] = {}
        self._duplicate_views: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._padding_views: tuple[torch.Tensor, ...] = ()
        self.generation = 0
        """Counts how often views were made: it grows only when a parameter was bound to another storage."""

    def resolve(self, *, check: bool = True) -> Mapping[Shard, torch.Tensor]:
        """Views of all shards, of box shape; cheap unless a parameter moved to another storage.

        Args:
            check: refuse freed storages; without it, views of them are made too, for the time when they have memory.

        Raises:
            RealError: a storage is freed.
        """
        held = [owner.untyped_storage() for owner in self._owners]
        storages = tuple(
            (storage._cdata, owner.storage_offset())
            for storage, owner in zip(held, self._owners, strict=True)
        )
        for storage, owner in zip(held, self._owners, strict=True) if check else ():
            if storage.nbytes() == 0 and owner.numel() > 0:
                raise RealError(
                    f"{self._name_of(owner)}: found its storage freed; allocate the copy's segments first."
                )
        if storages != self._storages:
            self._views = {item.shard: item.view() for item in self._placed}
            self._duplicate_views = tuple((first.view(), other.view()) for first, other in self._duplicates)
            self._padding_views = tuple(item.view() for item in self._padding)
            self.devices = frozenset(owner.device for owner in self._owners)
            self._storages = storages
            self.generation += 1
        return self._views

    def fill_duplicates(self) -> None:
        """Fill what no message carries: other tensors of this rank with the same shard, and padding, with zeros."""
        for first, other in self._duplicate_views:
            other.copy_(first)
        self.zero_padding()

    def zero_padding(self) -> None:
        """Zero the rows behind the real ones; no message writes there."""
        for padding in self._padding_views:
            padding.zero_()

    @property
    def duplicates(self) -> tuple[tuple[Shard, torch.Tensor, torch.Tensor], ...]:
        """Shard, first tensor, other tensor; as of the last `resolve`."""
        pairs = zip(self._duplicates, self._duplicate_views, strict=True)
        return tuple((placed.shard, *views) for (placed, _), views in pairs)

    def shards_in(self, tensor: torch.Tensor) -> tuple[Shard, ...]:
        """The shards in the memory of a parameter or buffer, which may be tied to others; freed or not."""
        first, last = _reach(tensor)
        storage = tensor.untyped_storage()._cdata
        found: list[Shard] = []
        for item in (*self._placed, *(replace(other, shard=one.shard) for one, other in self._duplicates)):
            owner = item.owner
            if owner is tensor:
                found.append(item.shard)
            elif owner.untyped_storage()._cdata == storage:
                start, stop = _reach(owner)
                if start < last and first < stop:
                    found.append(item.shard)
        return tuple(found)

    def _name_of(self, owner: torch.Tensor) -> str:
        return next(item.shard.key for item in self._all if item.owner is owner)


def local_table(
    sharded_tensors: Iterable[ShardedTensorLike],
    allowed: Iterable[tuple[str, torch.Tensor]],
    real_rows: Mapping[str, int] = MappingProxyType({}),
) -> LocalShards:
    """Read the sharded tensors of one copy on this rank.

    Args:
        sharded_tensors: a sharded state dict, factories applied, flattened, of all model chunks of this rank. Make
            it while the copy is allocated (torch refuses to split freed tensors); after that only metadata is read.
        allowed: the (name, tensor) pairs of the parameters and persistent buffers that may be read and written.
        real_rows: by key, how many rows of a padded tensor are real (the vocabulary's embedding and LM head). Two
            copies that pad to different sizes then describe the same tensor. Give it for both copies or for neither.

    Raises:
        PlanError: lists each tensor that cannot be moved correctly: a copy, a flattened range, a quantised or
            sharded tensor type, a dtype that may not be moved, or metadata that contradict each other.
    """
    finder = _OwnerFinder(allowed)
    problems: list[Problem] = []
    entries: dict[Shard, ShardEntry] = {}
    first_placed: dict[Shard, _Placed] = {}
    duplicates: list[tuple[_Placed, _Placed]] = []
    padding: list[_Placed] = []
    for tensor in sharded_tensors:
        problem = _reason_to_refuse(tensor, real_rows.get(tensor.key))
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
        if tensor.key in real_rows:
            entry, placed, behind = _cut_padding(
                entry, placed, tensor.prepend_axis_num, real_rows[tensor.key]
            )
            padding += behind
        if entry.shard.box.num_elements == 0:
            continue
        if entry.shard not in entries:
            entries[entry.shard] = entry
            first_placed[entry.shard] = placed
        elif not _same_place(first_placed[entry.shard], placed):
            duplicates.append((first_placed[entry.shard], placed))
    raise_problems(problems, subject="tensors that cannot be reallocated")
    return LocalShards(tuple(entries.values()), tuple(first_placed.values()), duplicates, padding)


def gather_tables(entries: Sequence[ShardEntry] | RealError, group: dist.ProcessGroup) -> ParamTable:
    """Exchange the entries of all ranks of `group`. Collective over `group`; once per copy, at set-up.

    Replicas say the same, so every rank sends a digest, and one of each kind its entries.

    Args:
        entries: this rank's entries, none if it is outside the copy's window; or the error that it met on the way
            here, so that no rank waits for it in vain.
        group: any backend that can gather objects.

    Raises:
        PeerError: another rank met an error; a rank that met one raises its own.
        PlanError: the ranks' entries contradict each other; the same on all ranks.
    """
    failure = entries if isinstance(entries, RealError) else None
    mine = () if isinstance(entries, RealError) else tuple(entries)
    digest = hashlib.sha256(repr(mine).encode()).digest()
    told = exchange(digest, failure, group=group, what="parameter table")
    speakers: dict[bytes, int] = {}
    for rank, found in told.items():
        speakers.setdefault(found, rank)
    known: dict[bytes, tuple[ShardEntry, ...]] = {}
    for found, speaker in speakers.items():
        said: list[Any] = [mine]
        dist.broadcast_object_list(said, src=speaker, group=group)
        known[found] = mine if found == digest else said[0]
    return ParamTable.of({rank: known[found] for rank, found in told.items()})


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


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [first, last) of its storage that a tensor spans."""
    first = tensor.storage_offset() * tensor.element_size()
    return first, first + _extent(tensor) * tensor.element_size()


def _reason_to_refuse(tensor: ShardedTensorLike, rows: int | None) -> tuple[str, str] | None:
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
    if rows is not None and not 0 < rows <= tensor.global_shape[tensor.prepend_axis_num]:
        return f"{tensor.global_shape[tensor.prepend_axis_num]} rows", f"at least the {rows} real ones"
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


def _cut_padding(
    entry: ShardEntry, placed: _Placed, axis: int, rows: int
) -> tuple[ShardEntry, _Placed, list[_Placed]]:
    """The shard without the rows behind the real ones, and those: the rest of this shard, if any."""
    box = entry.box
    real = min(max(rows - box.offset[axis], 0), box.shape[axis])

    def with_rows(count: int) -> tuple[int, ...]:
        return (*box.shape[:axis], count, *box.shape[axis + 1 :])

    cut = entry._replace(
        box=Box(box.offset, with_rows(real)),
        global_shape=(*entry.global_shape[:axis], rows, *entry.global_shape[axis + 1 :]),
    )
    behind = replace(
        placed,
        shape=with_rows(box.shape[axis] - real),
        relative_offset=placed.relative_offset + real * placed.stride[axis],
    )
    return (
        cut,
        replace(placed, shard=cut.shard, shape=cut.box.shape),
        [behind] if real < box.shape[axis] else [],
    )


def _same_place(one: _Placed, other: _Placed) -> bool:
    def start(placed: _Placed) -> tuple[int, int]:
        owner = placed.owner
        return owner.untyped_storage()._cdata, owner.storage_offset() + placed.relative_offset

    return start(one) == start(other)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
