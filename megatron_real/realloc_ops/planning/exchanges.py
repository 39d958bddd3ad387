"""What two tables have in common: every region that a source box shares with a destination box, as columns of numbers.

Boxes are met with numpy, all tensors at once, so the work grows with the boxes and regions of the model and neither
with the number of their replicas nor with the product of source and destination boxes. `Slice` objects are made only
for the regions that somebody asks for.

All regions of one set of source owners and one set of destination owners lie end to end on a *line* of bytes, by wave
and then in canonical order. Who serves whom is a matter of ranges of such lines (`queues`).

Invariants (tests/unit/realloc_ops/test_plan.py, tests/property/test_realloc_plan.py):
    - the regions of a destination box partition it;
    - regions, lines and waves depend on the contents of the tables, not on the order in which those list them;
    - adjacent ranges of a line give slices that neither overlap nor leave a gap.

Shape legend: N regions, B boxes of a table, D axes of the tensor that has most (others are padded with extent 1),
K keys, R ranks or sets of equal ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.planning.buckets import Slice, cut_range
from megatron_real.realloc_ops.planning.layer_order import layer_of, level_order
from megatron_real.realloc_ops.planning.shards import DTYPE_BYTES, Box, ParamTable, Shard

__all__ = ["Exchanges", "Line", "ReallocOrder"]

ReallocOrder = Literal["fused", "layers", "in_place"]
"""What the waves of a plan follow.

- ``fused``: one wave, fewest messages;
- ``layers``: the order in which a forward pass uses the model (`layer_order.layer_of`);
- ``in_place``: each rank gives up its source about as fast as it receives its destination.
"""

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Line(NamedTuple):
    """What the ranks of one source set can give to those of one destination set."""

    source: int
    """Number of the set of owners in `Exchanges.sources`."""
    target: int
    """Number in `Exchanges.targets`."""
    num_bytes: int
    """In the source's dtypes."""
    target_bytes: int
    """In the destination's dtypes."""


class Exchanges:
    """All regions of a pair of tables."""

    def __init__(self, src: ParamTable, dst: ParamTable, order: ReallocOrder) -> None:
        """Meet all boxes.

        Args:
            src: what ranks hold.
            dst: what they shall hold, of the same tensors.
            order: of the waves.

        Raises:
            PlanError: an element of the destination has no source, or source boxes overlap without being equal.
        """
        self._keys = sorted(src.specs)
        boxes = _Boxes.of(src, self._keys), _Boxes.of(dst, self._keys)
        self._src_shards, self._dst_shards = boxes[0].shards, boxes[1].shards
        self.sources, self.targets = boxes[0].owner_sets, boxes[1].owner_sets
        """Ascending ranks of every distinct set of owners."""
        self._dst_itemsizes = {key: spec.itemsize_bytes for key, spec in dst.specs.items()}
        regions = _Regions.of(*_sorted_by_place(*boxes), src)
        self._src, self._dst, self._low, self._extent = regions.src, regions.dst, regions.low, regions.extent
        self._key = boxes[1].key[regions.dst]
        elements = regions.extent.prod(axis=1)
        self._num_bytes = elements * _itemsizes(src, self._keys)[self._key]
        self._wave = _waves(order, (src, dst), boxes, self._keys, (self._key, regions.low))
        self._lay_lines(boxes[0].owner[regions.src], boxes[1].owner[regions.dst], elements)
        self._made: dict[int, Slice] = {}

    def _lay_lines(self, source: Ints, target: Ints, elements: Ints) -> None:
        pair = source * max(len(self.targets), 1) + target
        self._by_line = np.lexsort((np.arange(len(pair)), self._wave, pair))
        self._ends = np.cumsum(self._num_bytes[self._by_line])
        self._starts = self._ends - self._num_bytes[self._by_line]
        dst_itemsizes = np.array([self._dst_itemsizes[key] for key in self._keys], np.int64)
        target_ends = np.cumsum((elements * dst_itemsizes[self._key])[self._by_line])
        ordered = pair[self._by_line]
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}
        self.lines_from: list[list[Line]] = [[] for _ in self.sources]
        """By source set, ascending in destination set."""
        self.lines_to: list[list[Line]] = [[] for _ in self.targets]
        """By destination set, ascending in source set."""
        for first, last in zip(firsts, [*firsts[1:], len(ordered)], strict=True):
            at = int(source[self._by_line[first]]), int(target[self._by_line[first]])
            before = int(target_ends[first - 1]) if first else 0
            line = Line(
                *at, int(self._ends[last - 1] - self._starts[first]), int(target_ends[last - 1]) - before
            )
            self._spans[at] = first, last
            self.lines_from[at[0]].append(line)
            self.lines_to[at[1]].append(line)

    def slices(self, source: int, target: int, start_bytes: int, stop_bytes: int) -> list[Slice]:
        """The part of a line between two byte positions."""
        first, last = self._spans[source, target]
        origin = int(self._starts[first])
        begin = first + int(np.searchsorted(self._ends[first:last], origin + start_bytes, side="right"))
        end = first + int(np.searchsorted(self._starts[first:last], origin + stop_bytes, side="left"))
        if begin >= end:
            return []
        found = self._make(self._by_line[begin:end])
        before = int(self._starts[begin]) - origin
        return cut_range(found, start_bytes - before, stop_bytes - before)

    def relayed(self, piece: Slice) -> Slice:
        """The same elements, read from the destination shard of a rank that has received them."""
        num_bytes = piece.box.num_elements * self._dst_itemsizes[piece.key]
        return piece._replace(src_box=piece.dst_box, num_bytes=num_bytes)

    def _make(self, numbers: Ints) -> list[Slice]:
        made = self._made
        missing = np.array([number for number in numbers.tolist() if number not in made], np.int64)
        columns = zip(
            missing.tolist(),
            self._src[missing].tolist(),
            self._dst[missing].tolist(),
            self._low[missing].tolist(),
            self._extent[missing].tolist(),
            self._num_bytes[missing].tolist(),
            self._wave[missing].tolist(),
            strict=True,
        )
        for number, src, dst, low, extent, num_bytes, wave in columns:
            key, dst_box = self._dst_shards[dst]
            ndim = len(dst_box.shape)
            box = Box(tuple(low[:ndim]), tuple(extent[:ndim]))
            made[number] = Slice(number, key, self._src_shards[src].box, dst_box, box, num_bytes, wave)
        return [made[number] for number in numbers.tolist()]


# Boxes as columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Boxes:
    """The shards of a table."""

    shards: Sequence[Shard]
    key: Ints  # [B]
    offset: Ints  # [B, D]
    shape: Ints  # [B, D]
    owner: Ints  # [B]
    owner_sets: tuple[Ints, ...]

    @classmethod
    def of(cls, table: ParamTable, keys: Sequence[str]) -> _Boxes:
        numbers = {key: number for number, key in enumerate(keys)}
        ndim = max((len(spec.global_shape) for spec in table.specs.values()), default=0)
        pads = [((0,) * (ndim - axes), (1,) * (ndim - axes)) for axes in range(ndim + 1)]
        shards = tuple(table.owners)
        offsets = [box.offset + pads[len(box.offset)][0] for _, box in shards]
        shapes = [box.shape + pads[len(box.shape)][1] for _, box in shards]
        owner, owner_sets = _owner_sets(table.owners)
        return cls(
            shards=shards,
            key=np.array([numbers[key] for key, _ in shards], np.int64),
            offset=np.array(offsets, np.int64).reshape(len(shards), ndim),
            shape=np.array(shapes, np.int64).reshape(len(shards), ndim),
            owner=owner,
            owner_sets=owner_sets,
        )

    def bytes_of_boxes(self, itemsizes: Ints) -> Ints:
        return np.asarray(self.shape.prod(axis=1) * itemsizes[self.key])


def _owner_sets(owners: Mapping[Shard, tuple[int, ...]]) -> tuple[Ints, tuple[Ints, ...]]:
    """By shard the number of its set, and the sets, ascending. Most shards share the very tuple of their set."""
    tuples = {id(ranks): ranks for ranks in owners.values()}
    numbers = {ranks: number for number, ranks in enumerate(sorted(set(tuples.values())))}
    of_tuple = {identity: numbers[ranks] for identity, ranks in tuples.items()}
    column = np.array([of_tuple[id(ranks)] for ranks in owners.values()], np.int64)
    return column, tuple(np.array(ranks, np.int64) for ranks in numbers)


def _itemsizes(table: ParamTable, keys: Sequence[str]) -> Ints:
    return np.array([DTYPE_BYTES[table.specs[key].dtype] for key in keys], np.int64)


class _Placed(NamedTuple):
    """Boxes with the place that they can only be met in, sorted by place and box."""

    boxes: _Boxes
    chosen: Ints
    """Numbers of the boxes, in this order."""
    place: Ints
    """Ascends by leading offsets, then key: layer by layer, then tensor by tensor."""
    start: Ints
    """Along the axis by which they are searched."""
    stop: Ints

    @property
    def offset(self) -> Ints:
        return np.asarray(self.boxes.offset[self.chosen])

    @property
    def shape(self) -> Ints:
        return np.asarray(self.boxes.shape[self.chosen])


def _sorted_by_place(src: _Boxes, dst: _Boxes) -> tuple[_Placed, _Placed]:
    """Leading axes along which every box of a tensor has extent 1 (layers, experts) are looked up, not searched."""
    key = np.concatenate((src.key, dst.key))
    offset, shape = np.concatenate((src.offset, dst.offset)), np.concatenate((src.shape, dst.shape))
    num_keys, ndim = int(key.max(initial=-1)) + 1, offset.shape[1]
    longest, furthest = np.zeros((2, num_keys, ndim), np.int64)
    np.maximum.at(longest, key, shape)
    np.maximum.at(furthest, src.key, src.offset)
    looked_up = np.logical_and.accumulate(longest == 1, axis=1)
    place = np.zeros(len(key), np.int64)
    for axis in range(ndim):
        column = np.where(looked_up[key, axis], offset[:, axis], -1) + 1
        place = _dense(place * (int(column.max(initial=0)) + 1) + column)
    place = _dense(place * num_keys + key)
    axes = ~looked_up & (furthest > 0)
    by_key = np.argmax(axes, axis=1) if ndim else np.zeros(num_keys, np.int64)
    sides = []
    for boxes, of_side in ((src, place[: len(src.key)]), (dst, place[len(src.key) :])):
        columns = [*boxes.shape.T[::-1], *boxes.offset.T[::-1], of_side]
        index = np.lexsort(columns)
        if ndim:
            searched = by_key[boxes.key[index]]
            start, extent = boxes.offset[index, searched], boxes.shape[index, searched]
        else:
            start, extent = np.zeros_like(index), np.ones_like(index)
        sides.append(_Placed(boxes, index, of_side[index], start, start + extent))
    return sides[0], sides[1]


def _dense(values: Ints) -> Ints:
    """The same order in numbers from 0 without gaps."""
    return np.unique(values, return_inverse=True)[1].reshape(-1)


# Meeting


class _Meetings(NamedTuple):
    """Pairs of boxes that have elements in common."""

    one: Ints
    """Position in the one side's order."""
    other: Ints
    low: Ints
    extent: Ints


def _meet(one: _Placed, other: _Placed) -> _Meetings:
    """All pairs, ascending by the other side, then the one."""
    span = max(int(one.stop.max(initial=0)), int(other.stop.max(initial=0))) + 1
    by_start = np.argsort(one.place * span + one.start, kind="stable")
    starts = (one.place * span + one.start)[by_start]
    longest = np.zeros(max(int(one.place.max(initial=0)), int(other.place.max(initial=0))) + 1, np.int64)
    np.maximum.at(longest, one.place, one.stop - one.start)
    earliest = np.maximum(other.start - longest[other.place] + 1, 0)
    first = np.searchsorted(starts, other.place * span + earliest, side="left")
    last = np.searchsorted(starts, other.place * span + other.stop, side="left")
    counts = np.maximum(last - first, 0)
    theirs = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(theirs)) - np.repeat(np.cumsum(counts) - counts, counts)
    mine = by_start[np.repeat(first, counts) + within]
    one_offset, other_offset = one.offset[mine], other.offset[theirs]
    low = np.maximum(one_offset, other_offset)
    high = np.minimum(one_offset + one.shape[mine], other_offset + other.shape[theirs])
    met = np.flatnonzero((high > low).all(axis=1))
    met = met[np.lexsort((mine[met], theirs[met]))]
    return _Meetings(mine[met], theirs[met], low[met], (high - low)[met])


class _Regions(NamedTuple):
    """In canonical order: by place, destination box, source box."""

    src: Ints
    """[N] of the source's boxes."""
    dst: Ints
    """[N] of the destination's boxes."""
    low: Ints
    """[N, D]"""
    extent: Ints
    """[N, D]"""

    @classmethod
    def of(cls, src: _Placed, dst: _Placed, table: ParamTable) -> _Regions:
        """Check the boxes on the way.

        Raises:
            PlanError: source boxes overlap, or an element of the destination has no source.
        """
        _check_disjoint(src)
        met = _meet(src, dst)
        found = np.zeros(len(dst.chosen), np.int64)
        np.add.at(found, met.other, met.extent.prod(axis=1))
        needed = dst.shape.prod(axis=1)
        missing = np.flatnonzero(found < needed)
        if len(missing):
            at = int(missing[0])
            key, box = dst.boxes.shards[int(dst.chosen[at])]
            raise PlanError(
                f"reallocation: {key}: {needed[at] - found[at]} of {needed[at]} elements of the destination box "
                f"{box} have no source; ranks {list(table.ranks)} together must hold all of it. Gather the "
                "source table over all ranks of its layout."
            )
        return cls(src.chosen[met.one], dst.chosen[met.other], met.low, met.extent)


def _check_disjoint(src: _Placed) -> None:
    """Boxes of one place are different, so those that are cells of one regular grid need no look at pairs."""
    if len(src.chosen) < 2:
        return
    first = np.flatnonzero(np.diff(src.place, prepend=-1))
    shape, offset = src.shape, src.offset
    alike = (np.minimum.reduceat(shape, first) == np.maximum.reduceat(shape, first)).all(axis=1)
    aligned = (np.maximum.reduceat(offset % shape, first) == 0).all(axis=1)
    counts = np.diff(first, append=len(src.place))
    irregular = np.flatnonzero(np.repeat(~(alike & aligned) & (counts > 1), counts))
    if not len(irregular):
        return
    those = _Placed(src.boxes, *(column[irregular] for column in src[1:]))
    met = _meet(those, those)
    overlapping = np.flatnonzero(met.one < met.other)
    if len(overlapping):
        at = overlapping[0]
        key, one = src.boxes.shards[int(those.chosen[met.one[at]])]
        other = src.boxes.shards[int(those.chosen[met.other[at]])].box
        raise PlanError(
            f"reallocation: {key}: source boxes {one} and {other} overlap; expected boxes that are equal "
            "(replicas) or disjoint. The model's sharding metadata is inconsistent."
        )


# Waves


def _waves(
    order: ReallocOrder,
    tables: tuple[ParamTable, ParamTable],
    boxes: tuple[_Boxes, _Boxes],
    keys: Sequence[str],
    at: tuple[Ints, Ints],
) -> Ints:
    """By region; `at` has their keys and offsets."""
    if order == "fused":
        return np.zeros(len(at[0]), np.int64)
    layers = _layers(keys, *at)
    if order == "layers" or not len(layers):
        return layers
    # A layer may be large beside what a rank has, so inside it the tensors are ordered one by one.
    parts = layers * len(keys) + at[0]
    of_boxes = [_layers(keys, side.key, side.offset) * len(keys) + side.key for side in boxes]
    distinct = np.unique(np.concatenate((parts, *of_boxes)))
    amounts = []
    for table, side, of_side in zip(tables, boxes, of_boxes, strict=True):
        by_set = np.zeros((len(distinct), len(side.owner_sets)))
        number = np.searchsorted(distinct, of_side)
        np.add.at(by_set, (number, side.owner), side.bytes_of_boxes(_itemsizes(table, keys)))
        amounts.append(by_set)
    members = _members(boxes)
    held = amounts[0] @ members[: len(boxes[0].owner_sets)]
    wanted = amounts[1] @ members[len(boxes[0].owner_sets) :]
    position = np.empty(len(distinct), np.int64)
    position[level_order(held, wanted, (distinct // len(keys)).tolist())] = np.arange(len(distinct))
    return np.asarray(position[np.searchsorted(distinct, parts)])


def _layers(keys: Sequence[str], key: Ints, offset: Ints) -> Ints:
    """`layer_of` by box; computed once per key and place along the first axis."""
    lead = offset[:, 0] if offset.shape[1] else np.zeros(len(key), np.int64)
    span = int(lead.max(initial=0)) + 1
    distinct, inverse = np.unique(key * span + lead, return_inverse=True)
    found = [layer_of(keys[one // span], Box((one % span,), (1,))) for one in distinct.tolist()]
    return np.asarray(np.array(found, np.int64)[inverse.reshape(-1)])


def _members(boxes: tuple[_Boxes, _Boxes]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[all owner sets, R]: 1 where the ranks are in the set; ranks that are in the same sets are one column."""
    sets = [*boxes[0].owner_sets, *boxes[1].owner_sets]
    ranks = np.unique(np.concatenate(sets))
    members = np.zeros((len(sets), len(ranks)), bool)
    for row, owners in zip(members, sets, strict=True):
        row[np.searchsorted(ranks, owners)] = True
    packed = np.ascontiguousarray(np.packbits(members, axis=0).T)
    _, first = np.unique(packed.view(f"V{packed.shape[1]}").reshape(-1), return_index=True)
    return members[:, np.sort(first)].astype(np.float64)
