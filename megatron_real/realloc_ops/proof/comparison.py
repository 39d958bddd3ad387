"""Compares every bit of a destination with the source, over a route that has nothing to do with the plan.

Invariant (tests/unit/realloc_ops/test_verify.py): the first wrong element of a rank is named by its global coordinates,
with its value and the one that was expected.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_real.errors import VerificationError
from megatron_real.realloc_ops.execution.transports import Pending
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, Shard, TensorSpec
from megatron_real.realloc_ops.proof.checksums import as_delivered, blocks_of
from megatron_real.realloc_ops.proof.tree import Tree
from megatron_real.realloc_ops.storage.local_shards import LocalShards

__all__ = ["Ends", "compare_all", "views_of"]

_PIECE_BYTES = 4 * 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type of an element's bits by its size."""
_NOTHING = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two copies of a reallocation, as one rank sees them."""

    rank: int
    src_table: ParamTable
    dst_table: ParamTable
    src: LocalShards | None
    """The source on this rank; None outside its window."""
    dst: LocalShards | None
    """The destination on this rank; None outside its window."""

    def specs(self, key: str) -> tuple[TensorSpec, TensorSpec]:
        """What is known of a tensor in the source and in the destination."""
        return self.src_table.specs[key], self.dst_table.specs[key]


def views_of(shards: LocalShards | None) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Every tensor of this rank that holds a shard; a shard comes as often as there are tensors with it.

    Raises:
        RealError: a storage is freed.
    """
    if shards is not None:
        yield from shards.resolve().items()
        for shard, _, other in shards.duplicates:
            yield shard, other


class _Wrong(NamedTuple):
    """The first element of a rank that is wrong; all numbers fit an int64."""

    key: int
    """Place of the key among the sorted ones."""
    element: int
    """Row-major place in the global tensor."""
    expected: int
    found: int
    """Bits."""


def compare_all(ends: Ends, tree: Tree, *, name: str) -> Generator[Pending]:
    """Send every source box from its lowest owner to all ranks of the tree, and compare. Collective over the tree.

    Every rank reads as many bytes as the whole model has, in pieces of at most 4 MiB.

    Args:
        ends: this rank's view of both copies; both have their storage.
        tree: over the ranks that the reallocation concerns.
        name: for messages.

    Raises:
        VerificationError: a destination differs; names the first wrong element. The same on all ranks.
        PeerError: another rank failed or did not come.
    """
    source = ends.src.resolve() if ends.src is not None else {}
    targets: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for (key, box), view in views_of(ends.dst):
        targets.setdefault(key, []).append((box, view))
    keys = sorted(ends.src_table.specs)
    numbers = {key: number for number, key in enumerate(keys)}
    wrong: _Wrong | None = None
    for (key, box), owners in sorted(ends.src_table.owners.items()):
        spec = ends.src_table.specs[key]
        for block in blocks_of(box, _PIECE_BYTES // spec.itemsize_bytes):
            payload = tree.buffer(block.num_elements * spec.itemsize_bytes)
            piece = payload.view(getattr(torch, spec.dtype)).view(block.shape)
            if ends.rank == owners[0]:
                piece.copy_(source[Shard(key, box)].detach()[block.slices_in(box)])
            yield from tree.spread(payload, owners[0])
            for target_box, view in targets.get(key, ()):
                found = _difference(numbers[key], ends.specs(key), (block, piece), (target_box, view))
                wrong = min(filter(None, (wrong, found)), default=None)
    yield from _agree(tree, wrong, ends, keys, name)


def _difference(
    key: int,
    specs: tuple[TensorSpec, TensorSpec],
    expected: tuple[Box, torch.Tensor],
    found: tuple[Box, torch.Tensor],
) -> _Wrong | None:
    """The first element in which a piece of the source and a destination shard differ."""
    common = expected[0].intersect(found[0])
    if common is None:
        return None
    dtype = getattr(torch, specs[1].dtype)
    ours, theirs = (
        as_delivered(view.detach()[common.slices_in(box)], dtype, converted=specs[0].dtype != specs[1].dtype)
        .cpu()
        .contiguous()
        .view(_BITS[dtype.itemsize])
        for box, view in (found, expected)
    )
    places = (ours != theirs).reshape(-1).nonzero()
    if not len(places):
        return None
    first = int(places[0])
    element, rest = 0, first
    coordinates: list[int] = []
    for extent in reversed(common.shape):
        rest, along = divmod(rest, extent)
        coordinates.append(along)
    for along, start, size in zip(reversed(coordinates), common.offset, specs[1].global_shape, strict=True):
        element = element * size + start + along
    return _Wrong(key, element, int(theirs.reshape(-1)[first]), int(ours.reshape(-1)[first]))


def _agree(
    tree: Tree, wrong: _Wrong | None, ends: Ends, keys: list[str], name: str
) -> Generator[Pending, None, None]:
    """Tell all ranks what each found, and raise the same on all if any found something."""
    width = len(_Wrong._fields)
    table = torch.full((len(tree.ranks), width), _NOTHING, dtype=torch.int64)
    if wrong is not None:
        table[tree.ranks.index(ends.rank)] = torch.tensor(wrong)
    combined = yield from tree.combine(table.flatten())
    rows = {
        rank: _Wrong(*row)
        for rank, row in zip(tree.ranks, combined.view(-1, width).tolist(), strict=True)
        if row[0] != _NOTHING
    }
    if not rows:
        return
    rank, first = min(rows.items(), key=lambda item: (item[1], item[0]))
    key = keys[first.key]
    spec = ends.dst_table.specs[key]
    coordinates: list[int] = []
    rest = first.element
    for size in reversed(spec.global_shape):
        rest, along = divmod(rest, size)
        coordinates.append(along)
    owners = [
        list(holders)
        for (other, box), holders in ends.src_table.owners.items()
        if other == key and box.contains(Box(tuple(reversed(coordinates)), (1,) * len(coordinates)))
    ]
    raise VerificationError(
        f"{name}: {key}{coordinates[::-1]}: found {_value(first.found, spec)} on rank {rank}; expected "
        f"{_value(first.expected, spec)} as on ranks {owners[0]} of the source. Ranks {sorted(rows)} have wrong "
        "elements. The destination has no version now."
    )


def _value(bits: int, spec: TensorSpec) -> str:
    dtype = getattr(torch, spec.dtype)
    value = torch.tensor([bits], dtype=_BITS[dtype.itemsize]).view(dtype).item()
    return f"{value!r} (0x{bits % 256**dtype.itemsize:0{2 * dtype.itemsize}x})"
