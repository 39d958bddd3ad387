"""Boxes of global tensors, and tables of which rank holds which box: the arithmetic under every realloc plan.

A shard is named by its key and its box in the global tensor. Axes that Megatron prepends (the layer of a stack, the
expert) are ordinary axes of the box. Equal shards on several ranks are replicas of each other. No torch here.

Invariants (tests/unit/realloc_ops/test_shards.py):
    - `Box.split` cuts in row-major order: the two halves partition the box;
    - a table holds each shard once, with its owners in ascending order;
    - within a table a key has one global shape and one dtype, and every box lies inside that shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

from megatron_real.errors import PlanError, Problem, raise_problems

__all__ = ["Box", "DTYPE_BYTES", "ParamTable", "Shard", "ShardEntry", "TensorSpec", "require_same_tensors"]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Dtypes that may be moved, by their torch name. Quantised ones are missing on purpose: their scales are elsewhere."""


class Box(NamedTuple):
    """A rectangular region of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common region; None when there is none."""
        if self == other:
            return self
        offset, shape = [], []
        for start, extent, other_start, other_extent in zip(self.offset, self.shape, *other, strict=True):
            low = start if start > other_start else other_start
            high = min(start + extent, other_start + other_extent)
            if high <= low:
                return None
            offset.append(low)
            shape.append(high - low)
        return Box(tuple(offset), tuple(shape))

    def contains(self, other: Box) -> bool:
        return all(
            start <= other_start and other_start + other_extent <= start + extent
            for start, extent, other_start, other_extent in zip(self.offset, self.shape, *other, strict=True)
        )

    def is_dense_in(self, outer: Box) -> bool:
        """Whether this box, which `outer` must contain, lies without gaps in a tensor in row-major order of `outer`."""
        axis = next((index for index, extent in enumerate(self.shape) if extent > 1), len(self.shape))
        return self.shape[axis + 1 :] == outer.shape[axis + 1 :]

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`, which must contain it."""
        return tuple(
            slice(start - outer_start, start - outer_start + extent)
            for start, extent, outer_start in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def split(self, num_elements: int) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
        """The first `num_elements` in row-major order and the rest, each as boxes in row-major order.

        A cut inside a row needs up to one box per axis on either side.
        """
        if num_elements <= 0:
            return (), (self,)
        if num_elements >= self.num_elements:
            return (self,), ()
        axis = next(index for index, extent in enumerate(self.shape) if extent > 1)
        row_elements = self.num_elements // self.shape[axis]
        rows, rest = divmod(num_elements, row_elements)
        head = [self._rows(axis, 0, rows)] if rows else []
        tail: list[Box] = []
        if rest:
            row_head, row_tail = self._rows(axis, rows, 1).split(rest)
            head.extend(row_head)
            tail.extend(row_tail)
            rows += 1
        if rows < self.shape[axis]:
            tail.append(self._rows(axis, rows, self.shape[axis] - rows))
        return tuple(head), tuple(tail)

    def _rows(self, axis: int, first: int, count: int) -> Box:
        offset = (*self.offset[:axis], self.offset[axis] + first, *self.offset[axis + 1 :])
        return Box(offset, (*self.shape[:axis], count, *self.shape[axis + 1 :]))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True)) + "]"


class Shard(NamedTuple):
    """A box of a named global tensor."""

    key: str
    box: Box


class TensorSpec(NamedTuple):
    """What is known of a whole global tensor."""

    global_shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.global_shape) * self.itemsize_bytes


class ShardEntry(NamedTuple):
    """One tensor that one rank holds: a shard with the shape and dtype of the whole."""

    key: str
    box: Box
    global_shape: tuple[int, ...]
    dtype: str

    @property
    def shard(self) -> Shard:
        return Shard(self.key, self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamTable:
    """All shards of one copy of a model over all its ranks."""

    ranks: tuple[int, ...]
    """Global ranks that the table was made from, ascending; some may hold nothing."""
    specs: Mapping[str, TensorSpec]
    """Global shape and dtype by key."""
    owners: Mapping[Shard, tuple[int, ...]]
    """Ranks that hold each shard, ascending: more than one are replicas. Shards of equal owners share one tuple."""

    @classmethod
    def of(cls, entries_by_rank: Mapping[int, Iterable[ShardEntry]]) -> ParamTable:
        """Collect the entries of all ranks; equal entries of one rank count once.

        Raises:
            PlanError: ranks disagree on a key's global shape or dtype, a dtype cannot be moved, or a box lies
                outside its tensor.
        """
        specs: dict[str, TensorSpec] = {}
        owners: dict[Shard, list[int]] = {}
        problems: dict[str, Problem] = {}
        groups = _equal_ranks(entries_by_rank)
        for number, (entries, ranks) in enumerate(groups):
            for entry in entries:
                spec = TensorSpec(entry.global_shape, entry.dtype)
                known = specs.setdefault(entry.key, spec)
                if known != spec:
                    problems.setdefault(entry.key, _disagreement(entry, known, ranks[0]))
                holders = owners.setdefault(Shard(entry.key, entry.box), [])
                if not holders or holders[-1] != number:
                    holders.append(number)
        for shard in owners:
            _check_inside(shard, specs[shard.key], problems)
        raise_problems(problems.values(), subject="parameter table")
        unions: dict[tuple[int, ...], tuple[int, ...]] = {}
        for holders in owners.values():
            numbers = tuple(holders)
            if numbers not in unions:
                unions[numbers] = tuple(sorted(chain.from_iterable(groups[number][1] for number in numbers)))
        return cls(
            ranks=tuple(sorted(entries_by_rank)),
            specs=specs,
            owners={
                shard: unions[tuple(holders)]
                for shard, holders in owners.items()
                if shard.box.num_elements > 0
            },
        )

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards that `rank` holds, in table order."""
        holds = {id(holders): rank in holders for holders in self._owner_sets()}
        return tuple(shard for shard, holders in self.owners.items() if holds[id(holders)])

    def _owner_sets(self) -> Iterable[tuple[int, ...]]:
        return {id(holders): holders for holders in self.owners.values()}.values()


def _equal_ranks(
    entries_by_rank: Mapping[int, Iterable[ShardEntry]],
) -> list[tuple[tuple[ShardEntry, ...], list[int]]]:
    """Ranks that have the same entries, each with these; ascending in their first ranks."""
    groups: dict[tuple[ShardEntry, ...], list[int]] = {}
    seen: dict[int, tuple[Iterable[ShardEntry], list[int]]] = {}
    for rank in sorted(entries_by_rank):
        entries = entries_by_rank[rank]
        if id(entries) not in seen:  # comparing thousands of entries takes a while
            seen[id(entries)] = entries, groups.setdefault(tuple(entries), [])
        seen[id(entries)][1].append(rank)
    return list(groups.items())


def _disagreement(entry: ShardEntry, known: TensorSpec, rank: int) -> Problem:
    return Problem(
        path=entry.key,
        found=f"{entry.dtype} {list(entry.global_shape)} on rank {rank}",
        expected=f"{known.dtype} {list(known.global_shape)} as on the ranks before it",
        fix="Build the model from one configuration on all ranks.",
    )


def _check_inside(shard: Shard, spec: TensorSpec, problems: dict[str, Problem]) -> None:
    if spec.dtype not in DTYPE_BYTES:
        problems.setdefault(
            shard.key,
            Problem(path=shard.key, found=f"dtype {spec.dtype}", expected=f"one of {', '.join(DTYPE_BYTES)}"),
        )
    same_rank = len(shard.box.offset) == len(shard.box.shape) == len(spec.global_shape)
    if same_rank and Box((0,) * len(spec.global_shape), spec.global_shape).contains(shard.box):
        return
    problems.setdefault(
        shard.key,
        Problem(
            path=shard.key,
            found=f"a shard at {list(shard.box.offset)} of shape {list(shard.box.shape)}",
            expected=f"a box inside {list(spec.global_shape)}",
        ),
    )


def require_same_tensors(src: ParamTable, dst: ParamTable) -> None:
    """Check that two tables describe the same global tensors.

    Raises:
        PlanError: lists every key that is on one side only and every key whose global shape differs.
    """
    problems: list[Problem] = []
    for key in sorted(src.specs.keys() | dst.specs.keys()):
        if key not in dst.specs:
            problems.append(
                Problem(path=key, found="it on the source side only", expected="it on both sides")
            )
        elif key not in src.specs:
            problems.append(
                Problem(path=key, found="it on the destination side only", expected="it on both sides")
            )
        elif src.specs[key].global_shape != dst.specs[key].global_shape:
            problems.append(
                Problem(
                    path=key,
                    found=f"global shape {list(src.specs[key].global_shape)} on the source side",
                    expected=f"{list(dst.specs[key].global_shape)} as on the destination side",
                    fix="Use one model configuration and one padded vocabulary size for all layouts.",
                )
            )
    raise_problems(problems, subject="reallocation", error=PlanError)
