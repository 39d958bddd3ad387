"""Which ranks hold the same parts of a model, and how much such sets of ranks have in common in two layouts.

`realloc_ops.exchanges` meets boxes with boxes. Here the boxes are known beforehand: every tensor is whole on the ranks
of a stage, or cut in equal parts over tensor-parallel or expert ranks. So what two sets of owners have in common is a
product of (layers in common) and (overlap of two equal divisions), summed over four kinds of tensors.

Invariants (tests/property/test_moves.py):
    - sets and elements are those of the tables of `plan_search.parameters`.

Shape legend: Q sets of owners, P places (sets of stages that hold the same).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from megatron_real.layout import Layout, stage_layers
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.parameters import Tensor, end_tensors, expert_tensor_parallel, layer_tensors

__all__ = ["Floats", "Ints", "OwnerList", "common_elements", "owner_list", "set_classes"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


class _Kinds(NamedTuple):
    """Elements of whole tensors, by how they are divided."""

    copied: int = 0
    """On every rank of a stage."""
    split: int = 0
    """Over tensor-parallel ranks."""
    expert_copied: int = 0
    """On every rank that has the expert."""
    expert_split: int = 0

    @classmethod
    def of(cls, tensors: Iterable[Tensor], experts: int) -> _Kinds:
        found = [0, 0, 0, 0]
        for tensor in tensors:
            kind = 2 * tensor.expert + (tensor.axis is not None)
            found[kind] += tensor.num_elements * (experts if tensor.expert else 1)
        return cls(*found)


class OwnerList(NamedTuple):
    """Who owns which set of boxes, ordered by set and rank."""

    queue: Ints
    """The set; of a source it is a queue that its owners serve."""
    rank: Ints
    """Of the window."""
    share: Ints
    """Position among the owners of the set."""
    owners: Ints
    """Owners of the set."""
    place: Ints
    """By set: its position when sets are sorted by their ranks, as in the plan."""


class _Families(NamedTuple):
    """Which owner sets serve which kind of tensor. Sets that are equal are one, as in the plan."""

    sizes: tuple[int, ...]
    """Owner sets per place of each family."""
    of_kind: tuple[int, ...]
    """Family of each field of `_Kinds`."""


def _families(layout: Layout, experts: bool) -> _Families:
    tp, etp = layout.tp, expert_tensor_parallel(layout)
    sizes, of_kind = [1], [0, 0, 0, 0]

    def family(count: int, known: int | None = None) -> int:
        if count == 1:
            return 0
        if known is not None:
            return known
        sizes.append(count)
        return len(sizes) - 1

    of_kind[1] = family(tp)
    if experts:
        cells = layout.ep * etp  # rank modulo cells, as tensor-parallel sets are rank modulo tp
        of_kind[3] = family(cells, of_kind[1] if cells == tp else None)
        of_kind[2] = family(layout.ep, of_kind[3] if etp == 1 else None)
    return _Families(tuple(sizes), tuple(of_kind))


def _places(shape: ModelShape, layout: Layout) -> int:
    """Stages, and the first with the last where both hold the embedding."""
    return layout.pp + (1 if end_tensors(shape).tied and layout.pp > 1 else 0)


@lru_cache(maxsize=1024)
def owner_list(shape: ModelShape, layout: Layout) -> OwnerList:
    """Who owns what in a layout; ranks count from the start of its window."""
    families = _families(layout, shape.num_experts > 0)
    etp, stage_size = expert_tensor_parallel(layout), layout.size // layout.pp
    rank = np.arange(layout.size)
    stage, index = rank // stage_size, rank % stage_size
    queues, ranks, base = [], [], 0
    for family, count in enumerate(families.sizes):
        blocks = family == families.of_kind[2] != families.of_kind[3]
        cell = index // etp % layout.ep if blocks else index % count
        queues.append(base + stage * count + cell)
        ranks.append(rank)
        if _places(shape, layout) > layout.pp:
            ends = (stage == 0) | (stage == layout.pp - 1)
            queues.append(base + layout.pp * count + cell[ends])
            ranks.append(rank[ends])
        base += _places(shape, layout) * count
    queue, owner = np.concatenate(queues), np.concatenate(ranks)
    order = np.lexsort((owner, queue))
    queue, owner = queue[order], owner[order]
    counts = np.bincount(queue, minlength=base)
    first = np.cumsum(counts) - counts
    share = np.arange(len(queue)) - first[queue]
    members = [tuple(ranks.tolist()) for ranks in np.split(owner, first[1:])]
    place = np.argsort(sorted(range(base), key=members.__getitem__))
    return OwnerList(queue, owner, share, counts[queue], place)


@lru_cache(maxsize=1024)
def set_classes(shape: ModelShape, layout: Layout) -> tuple[Floats, Ints]:
    """Ranks that are in the same sets: [sets, classes], 1 where the ranks of a class are in the set; class by rank."""
    owners = owner_list(shape, layout)
    members = np.zeros((len(owners.place), layout.size), bool)
    members[owners.queue, owners.rank] = True
    packed = np.ascontiguousarray(np.packbits(members, axis=0).T)
    _, first, classes = np.unique(
        packed.view(f"V{packed.shape[1]}").reshape(-1), return_index=True, return_inverse=True
    )
    return members[:, first].astype(np.float64), classes.reshape(-1)


def common_elements(shape: ModelShape, source: Layout, target: Layout) -> Ints:
    """Elements that each set of owners of the source has in common with each of the target: [Q, sets of the target]."""
    experts = shape.num_experts > 0
    mine, theirs = _families(source, experts), _families(target, experts)
    etp, target_etp = expert_tensor_parallel(source), expert_tensor_parallel(target)
    common = _common(shape, source, target)  # four of [P, P of the target]
    places = common[0].shape
    blocks = [
        [np.zeros((places[0], count, places[1], other), np.int64) for other in theirs.sizes]
        for count in mine.sizes
    ]
    tensor, expert, inside = (
        _overlap(*parts) for parts in ((source.tp, target.tp), (source.ep, target.ep), (etp, target_etp))
    )
    both = expert.shared[:, None, :, None] * inside.shared[None, :, None, :]
    kinds = [(np.ones((1, 1), np.int64), 1), tensor, expert, (both, expert.whole * inside.whole)]
    for kind, (shared, whole) in enumerate(kinds[: 4 if experts else 2]):
        block = blocks[mine.of_kind[kind]][theirs.of_kind[kind]]
        cells = shared.reshape(block.shape[1], block.shape[3])
        block += common[kind][:, None, :, None] * cells[None, :, None, :] // whole
    return np.block(
        [
            [block.reshape(places[0] * block.shape[1], places[1] * block.shape[3]) for block in row]
            for row in blocks
        ]
    )


class _Overlap(NamedTuple):
    """What two equal divisions of one thing have in common, in units of 1 / whole."""

    shared: Ints
    """[parts of the one, parts of the other]"""
    whole: int


@lru_cache(maxsize=1024)
def _overlap(one: int, other: int) -> _Overlap:
    whole = lcm(one, other)
    left = np.arange(one)[:, None] * (whole // one)
    right = np.arange(other)[None, :] * (whole // other)
    low = np.maximum(left, right)
    high = np.minimum(left + whole // one, right + whole // other)
    return _Overlap(np.maximum(high - low, 0), whole)


def _common(shape: ModelShape, source: Layout, target: Layout) -> tuple[Ints, ...]:
    """For each field of `_Kinds`: elements that a source place and a target place have in common: [P, P']."""
    mine, theirs = _contents(shape, source), _contents(shape, target)
    kinds = _kinds(shape)
    return tuple((mine * kinds[:, number]) @ theirs.T for number in range(4))


@lru_cache(maxsize=1024)
def _kinds(shape: ModelShape) -> Ints:
    """Elements of each layer, the embedding, and the other ends: [layers + 3, 4]."""
    plain = _Kinds.of(layer_tensors(shape, experts=False), 1)
    routed = _Kinds.of(layer_tensors(shape, experts=True), shape.num_experts) if shape.num_experts else plain
    layers = [routed if shape.has_experts(layer) else plain for layer in range(shape.num_layers)]
    ends = end_tensors(shape)
    return np.array([*layers, *(_Kinds.of(tensors, 1) for tensors in ((ends.words,), ends.first, ends.last))])


@lru_cache(maxsize=1024)
def _contents(shape: ModelShape, layout: Layout) -> Ints:
    """Which layer or end lies in which place; each in one: [P, layers + 3]."""
    found = np.zeros((_places(shape, layout), shape.num_layers + 3), np.int64)
    for stage, layers in _stage_layers(shape.num_layers, layout):
        found[stage, list(layers)] = 1
    words, first, last = range(shape.num_layers, shape.num_layers + 3)
    found[-1 if len(found) > layout.pp else 0, words] = 1
    found[0, first] = 1
    found[layout.pp - 1, last] = 1
    return found


def _stage_layers(num_layers: int, layout: Layout) -> Iterator[tuple[int, tuple[int, ...]]]:
    for stage, chunks in enumerate(stage_layers(num_layers, layout)):
        yield stage, tuple(layer for chunk in chunks for layer in chunk)
