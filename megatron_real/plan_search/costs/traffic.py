"""How many bytes every rank sends, receives and copies in a reallocation, without building its plan.

`realloc_ops.plan` meets boxes with boxes. Here the boxes are known beforehand: every tensor is whole on the ranks of a
stage, or cut in equal parts over tensor-parallel or expert ranks. So what a rank needs of a set of owners is a product
of (layers in common) and (overlap of two equal divisions), summed over four kinds of tensors. Owners serve a queue of
receivers in equal parts, as the plan does; the parts are laid over the receivers once for all queues. Numbers of bytes
are exact.

Invariants (tests/property/test_moves.py):
    - bytes received, sent and copied by each rank, and its messages, are those of `build_realloc_plan` over the tables
      of `plan_search.parameters`.

Shape legend: Q sets of owners, P places (sets of stages that hold the same), W ranks of the target window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from megatron_real.layout import Layout, stage_layers
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.parameters import Tensor, end_tensors, expert_tensor_parallel, layer_tensors

__all__ = ["Traffic", "Window", "realloc_traffic"]

_MESSAGE_STEP_BYTES = 16
"""Buckets are a multiple of this (`realloc_ops.buckets`)."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Window(NamedTuple):
    """A layout on a window, and where the window starts."""

    start: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Bytes and messages by rank, from the first rank of either window to the last."""

    received_within: Floats
    """From ranks of the same node."""
    received_across: Floats
    sent_within: Floats
    sent_across: Floats
    local: Floats
    """Moved inside the rank."""
    messages_received: Floats
    messages_sent: Floats

    @property
    def received(self) -> Floats:
        return self.received_within + self.received_across

    @property
    def sent(self) -> Floats:
        return self.sent_within + self.sent_across


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


def realloc_traffic(
    shape: ModelShape, itemsize: int, source: Window, target: Window, *, per_node: int, bucket_bytes: int
) -> Traffic:
    """Count what `build_realloc_plan` would move.

    Args:
        shape: the model.
        itemsize: bytes of a parameter on the wire.
        source: where the weights are; starts are global ranks, and nodes begin at multiples of `per_node`.
        target: where they go.
        per_node: ranks of a node.
        bucket_bytes: the most bytes in a message.

    Raises:
        PlanError: the layers do not divide over the stages.
    """
    origin = min(source.start, target.start)
    end = max(source.start + source.layout.size, target.start + target.layout.size)
    size = end - origin
    needs = _needs(shape, source.layout, target.layout) * itemsize
    needs = needs[:, _cells_of(target.layout)]  # [Q, W]
    owners = _owners(shape, source.layout)
    shift = source.start - target.start
    local = np.zeros(size)
    inside = owners.rank + shift
    met = (inside >= 0) & (inside < target.layout.size)
    at = (owners.queue[met], inside[met])
    np.add.at(local, at[1] + (target.start - origin), needs[at])
    needs[at] = 0
    src, dst, moved = _serve(needs, owners, itemsize)
    src, dst = src + (source.start - origin), dst + (target.start - origin)
    within = (src + origin) // per_node == (dst + origin) // per_node

    def total(ranks: Ints, weights: Any) -> Floats:
        return np.bincount(ranks, weights=weights, minlength=size)

    first, last, messages = _messages(src, dst, moved, size, bucket_bytes)
    return Traffic(
        received_within=total(dst, moved * within),
        received_across=total(dst, moved * ~within),
        sent_within=total(src, moved * within),
        sent_across=total(src, moved * ~within),
        local=local,
        messages_received=total(last, messages),
        messages_sent=total(first, messages),
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


class _OwnerList(NamedTuple):
    """Who owns what each queue serves, ordered by queue and rank."""

    queue: Ints
    rank: Ints
    """Of the source window."""
    share: Ints
    """Position among the owners of the queue."""
    owners: Ints
    """Owners of the queue."""


def _serve(needs: Ints, owners: _OwnerList, itemsize: int) -> tuple[Ints, Ints, Ints]:
    """(sender, receiver, bytes), ranks of either window, of every stretch that one owner serves one receiver.

    The bytes of all queues are laid end to end; both the receivers' and the owners' parts cut this line.
    """
    queues, receivers = np.nonzero(needs)
    values = needs[queues, receivers]
    ends = np.cumsum(values)
    totals = needs.sum(axis=1)
    bases = np.cumsum(totals) - totals
    starts = bases[owners.queue] + totals[owners.queue] * owners.share // owners.owners // itemsize * itemsize
    cuts = np.concatenate((ends - values, starts))
    order = np.argsort(cuts, kind="stable")
    is_owner = order >= len(values)
    cuts = cuts[order]
    lengths = np.diff(cuts, append=ends[-1] if len(ends) else 0)
    keep = lengths > 0
    receiver = np.cumsum(~is_owner)[keep] - 1
    owner = np.cumsum(is_owner)[keep] - 1
    return owners.rank[owner], receivers[receiver], lengths[keep]


# Divisions


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
def _owners(shape: ModelShape, layout: Layout) -> _OwnerList:
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
    share = np.arange(len(queue)) - (np.cumsum(counts) - counts)[queue]
    return _OwnerList(queue, owner, share, counts[queue])


@lru_cache(maxsize=1024)
def _cells_of(layout: Layout) -> Ints:
    """By rank, which column of `_needs` it is: (stage, dense cell, expert cell)."""
    stage_size = layout.size // layout.pp
    rank = np.arange(layout.size)
    stage, index = rank // stage_size, rank % stage_size
    cells = layout.ep * expert_tensor_parallel(layout)
    return (stage * layout.tp + index % layout.tp) * cells + index % cells


def _needs(shape: ModelShape, source: Layout, target: Layout) -> Ints:
    """Elements that a rank of each target cell needs of each set of owners: [Q, target cells]."""
    experts = shape.num_experts > 0
    families = _families(source, experts)
    etp, target_etp = expert_tensor_parallel(source), expert_tensor_parallel(target)
    common = _common(shape, source, target)  # four of [P, stages]
    tensor = _overlap(source.tp, target.tp)
    expert = _overlap(source.ep, target.ep)
    inside = _overlap(etp, target_etp)
    parts = [np.zeros((len(common[0]), count, target.pp, target.tp, target.ep, target_etp), np.int64)
             for count in families.sizes]  # fmt: skip
    copied, split, expert_copied, expert_split = (kind[:, None, :, None, None, None] for kind in common)
    parts[0] += copied
    of_tensor = tensor.shared[None, :, None, :, None, None]
    parts[families.of_kind[1]] += split * of_tensor // tensor.whole
    if experts:
        of_expert = expert.shared[None, :, None, None, :, None]
        parts[families.of_kind[2]] += expert_copied * of_expert // expert.whole
        both = (expert.shared[:, None, :, None] * inside.shared[None, :, None, :]).reshape(
            source.ep * etp, target.ep, target_etp
        )
        of_both = both[None, :, None, None, :, :]
        parts[families.of_kind[3]] += expert_split * of_both // (expert.whole * inside.whole)
    return np.concatenate(
        [part.reshape(-1, target.pp * target.tp * target.ep * target_etp) for part in parts]
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
    """For each field of `_Kinds`: elements that a source place and a target stage have in common: [P, stages]."""
    mine, theirs = _contents(shape, source), _contents(shape, target)
    wanted = theirs[: target.pp].copy()
    if len(theirs) > target.pp:  # the first and the last stage each hold what they share
        wanted[0] |= theirs[-1]
        wanted[-1] |= theirs[-1]
    kinds = _kinds(shape)
    return tuple((mine * kinds[:, number]) @ wanted.T for number in range(4))


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
