"""Proof that a reallocation delivered what its source has, without the plan's mapping.

The edges of all source and destination boxes of a tensor cut it into a grid, and every box is a union of its cells.
Each rank sums the bits of its own shards (`checksums.py`), cell by cell of their global coordinates. Two tables of
sums, one before the move and one after it, are combined over the ranks concerned by maximum and minimum, in a tree of
tensors of a fixed size that goes over the transport of the reallocation. From them every rank sees the same:

- before anything moves, whether replicas of the source differ;
- after it, in which cells a replica of the destination differs from the source.

The combination after the move is also what the ranks agree by: it completes on a rank only when all of them got
there, so no rank takes the new version while another one failed (`agreement.py` has what happens then).

``full`` compares every bit after the move instead: each source box travels from its lowest owner along a tree to all
ranks concerned, which is slow, and names the first wrong element.

Invariants (tests/unit/realloc_ops/test_verify.py, tests/property/test_realloc_verify.py):
    - a destination that differs from the source in any way is refused on every rank concerned, by the same text;
    - a destination that is right is accepted, whatever the layouts, dtypes and strides;
    - source replicas that differ are refused before anything moves;
    - no object collective; messages have a size that is known from the tables.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Generator, Iterator
from contextlib import closing
from math import prod
from typing import Literal, NamedTuple

import torch

from megatron_real.errors import PlanError, VerificationError
from megatron_real.realloc_ops.execution.transports import Pending, Transport
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, Shard
from megatron_real.realloc_ops.proof.checksums import sum_of
from megatron_real.realloc_ops.proof.comparison import Ends, compare_all, views_of
from megatron_real.realloc_ops.proof.tree import Tree
from megatron_real.realloc_ops.storage.local_shards import LocalShards

__all__ = ["Ends", "Verifier", "VerifyMode", "participants_of"]

type VerifyMode = Literal["off", "checksum", "full"]
"""``off`` still makes all ranks fail together; the others prove what arrived."""

_NOTHING = torch.iinfo(torch.int64).min
"""What a rank contributes to the maximum where it holds nothing."""


def participants_of(*tables: ParamTable) -> tuple[int, ...]:
    """The ranks that hold something in any of the tables, ascending: those that a reallocation concerns."""
    return tuple(sorted({rank for table in tables for owners in table.owners.values() for rank in owners}))


class Verifier:
    """Checks the runs of one executor; made once per pair of copies, on every rank that the pair concerns."""

    def __init__(
        self,
        ends: Ends,
        mode: VerifyMode,
        transport: Transport,
        *,
        name: str = "realloc",
        in_place: bool = False,
        mix: float = 1.0,
    ) -> None:
        """Lay out the table of sums; touches no storage and no other rank.

        Args:
            ends: this rank's view of both copies.
            mode: the same on all ranks.
            transport: that of the executor.
            name: for messages, for example ``actor train -> gen``.
            in_place: the source is freed by the move.
            mix: the share of the source in the new values.

        Raises:
            PlanError: `mode` cannot be kept: mixed values are no copy of the source, and ``full`` reads the source
                after the move.
        """
        if mode != "off" and mix != 1.0:
            raise PlanError(
                f"{name}: found verify={mode!r} with mix={mix:g}; expected mix=1, because mixed values are no copy of "
                "the source. Use verify='off' for this reallocation."
            )
        if mode == "full" and in_place:
            raise PlanError(
                f"{name}: found verify='full' for a reallocation in place; expected 'checksum' or 'off', because its "
                "source is freed before it could be compared."
            )
        self._ends = ends
        self._mode = mode
        self.transport = transport
        self.name = name
        self.participants = participants_of(ends.src_table, ends.dst_table)
        """The ranks that must call, ascending."""
        self.sum_s = 0.0
        """Seconds that this rank spent on sums for the last run, without waiting for others."""
        self._grid = _Grid(ends.src_table, ends.dst_table) if mode != "off" else None
        self._source: torch.Tensor | None = None

    def before(self) -> None:
        """Sum the source. Collective over `participants`; other ranks may call and do nothing.

        Raises:
            VerificationError: replicas of the source differ; on all ranks.
            PeerError: another rank failed or did not come.
        """
        self._drive(self.before_steps())

    def after(self) -> None:
        """Wait until all ranks have moved, and check what arrived. Collective over `participants`.

        Raises:
            VerificationError: what arrived differs from the source; on all ranks.
            PeerError: another rank failed or did not come.
        """
        self._drive(self.after_steps())

    def before_steps(self) -> Generator[Pending]:
        """`before`, as a generator that yields each exchange when it must be complete before it can go on."""
        self.sum_s = 0.0
        self._source = None
        if self._grid is None or self._ends.rank not in self.participants:
            return
        table = _Table.of((yield from self._tree().combine(self._sums(self._grid, self._ends.src))))
        wrong = table.present & (table.high != table.low)
        if wrong.any():
            yield from self._refuse(self._grid, wrong, self._ends.src, table.high)
        self._source = table.high

    def after_steps(self) -> Generator[Pending]:
        """`after`, as a generator like `before_steps`."""
        if self._ends.rank not in self.participants:
            return
        if self._grid is None:
            yield from self._tree().combine(torch.zeros(1, dtype=torch.int64))
            return
        if self._source is None:
            raise PlanError(
                f"{self.name}: found no sums of the source; expected `before` to run before `after`."
            )
        if self._mode == "full":
            yield from compare_all(self._ends, self._tree(), name=self.name)
            return
        table = _Table.of((yield from self._tree().combine(self._sums(self._grid, self._ends.dst))))
        wrong = table.present & ((table.high != self._source) | (table.low != self._source))
        if wrong.any():
            yield from self._refuse(self._grid, wrong, self._ends.dst, self._source)

    def _drive(self, steps: Generator[Pending]) -> None:
        with closing(steps):
            for pending in steps:
                self.transport.wait(pending)

    # Sums of this rank

    def _sums(self, grid: _Grid, shards: LocalShards | None) -> torch.Tensor:
        """By cell: the largest sum that this rank found, then the largest complement of one."""
        started_s = time.perf_counter()
        table = torch.full((2 * grid.num_cells,), _NOTHING, dtype=torch.int64)
        cells: list[int] = []
        sums: list[torch.Tensor] = []
        for shard, view in views_of(shards):
            for cell, box in grid.cells_of(shard):
                cells.append(cell)
                sums.append(self._sum(shard, view, box))
        if cells:
            index, found = torch.tensor(cells), torch.stack(sums).cpu()
            table.scatter_reduce_(0, index, found, "amax")
            table.scatter_reduce_(0, index + grid.num_cells, ~found, "amax")
        self.sum_s += time.perf_counter() - started_s
        return table

    def _sum(self, shard: Shard, view: torch.Tensor, cell: Box) -> torch.Tensor:
        src, dst = self._ends.specs(shard.key)
        region = view[cell.slices_in(shard.box)]
        return sum_of(region, getattr(torch, dst.dtype), converted=src.dtype != dst.dtype)

    def _tree(self) -> Tree:
        return Tree(self.transport, self.participants, self._ends.rank, self.name)

    # What to say

    def _refuse(
        self, grid: _Grid, wrong: torch.Tensor, shards: LocalShards | None, expected: torch.Tensor
    ) -> Generator[Pending]:
        """Find out which ranks hold what in the first wrong cell, and raise the same on all of them."""
        cell = int(wrong.nonzero()[0])
        place, right = grid.at(cell), int(expected[cell])
        found = [
            int(self._sum(shard, view, place.box))
            for shard, view in views_of(shards)
            if shard.key == place.key and shard.box.contains(place.box)
        ]
        own = torch.full((2, len(self.participants)), _NOTHING, dtype=torch.int64)
        if found:  # of two tensors of one rank, the one that differs
            own[:, self.participants.index(self._ends.rank)] = torch.tensor(
                [1, next((value for value in found if value != right), right)]
            )
        holds, sums = (yield from self._tree().combine(own.flatten())).view(2, -1).tolist()
        ranks_by_sum: dict[int, list[int]] = {}
        for rank, held, value in zip(self.participants, holds, sums, strict=True):
            if held == 1:
                ranks_by_sum.setdefault(value, []).append(rank)
        before = self._source is None
        text = (
            self._replicas_text(ranks_by_sum) if before else self._delivery_text(place, ranks_by_sum, right)
        )
        more = f" {int(wrong.sum()) - 1} more regions are wrong." if int(wrong.sum()) > 1 else ""
        raise VerificationError(f"{self.name}: {place.key} {place.box}: {text}{more}")

    def _replicas_text(self, ranks_by_sum: dict[int, list[int]]) -> str:
        groups = " and ".join(f"ranks {ranks}" for ranks in ranks_by_sum.values())
        return (
            f"found different bits in the source's replicas on {groups}; expected equal ones. Nothing was moved. "
            "Load or reallocate the source again, and look for an update that not all its replicas made."
        )

    def _delivery_text(self, place: Shard, ranks_by_sum: dict[int, list[int]], right: int) -> str:
        owners = next(
            list(owners)
            for shard, owners in self._ends.src_table.owners.items()
            if shard.key == place.key and shard.box.contains(place.box)
        )
        found = ", ".join(
            f"{_hex(value)} on ranks {ranks}" for value, ranks in ranks_by_sum.items() if value != right
        )
        return (
            f"found checksum {found}; expected {_hex(right)} as on ranks {owners} of the source. The "
            "destination has no version now; verify='full' names the first wrong element."
        )


def _hex(value: int) -> str:
    return f"{value % 2**64:016x}"


class _Table(NamedTuple):
    """The combined sums of one side, by cell."""

    high: torch.Tensor
    low: torch.Tensor
    present: torch.Tensor
    """Whether any rank holds the cell."""

    @classmethod
    def of(cls, combined: torch.Tensor) -> _Table:
        high, complement = combined.cpu().view(2, -1)
        return cls(high, ~complement, ~((high == _NOTHING) & (complement == _NOTHING)))


class _Grid:
    """Numbers the cells into which the edges of all boxes cut each tensor; the same on all ranks."""

    def __init__(self, *tables: ParamTable) -> None:
        edges: dict[str, list[set[int]]] = {}
        for table in tables:
            for key, box in table.owners:
                found = edges.setdefault(key, [set() for _ in box.shape])
                for axis, first, extent in zip(found, *box, strict=True):
                    axis.update((first, first + extent))
        self._edges = {key: tuple(sorted(axis) for axis in axes) for key, axes in sorted(edges.items())}
        self._first: dict[str, int] = {}
        self.num_cells = 0
        for key, axes in self._edges.items():
            self._first[key] = self.num_cells
            self.num_cells += prod(len(axis) - 1 for axis in axes)

    def cells_of(self, shard: Shard) -> Iterator[tuple[int, Box]]:
        """Numbers and boxes of the cells that together are the shard."""
        axes = self._edges[shard.key]
        ranges = [
            range(bisect_left(axis, first), bisect_left(axis, first + extent))
            for axis, first, extent in zip(axes, *shard.box, strict=True)
        ]
        for place in itertools.product(*ranges):
            number = 0
            for axis, index in zip(axes, place, strict=True):
                number = number * (len(axis) - 1) + index
            yield self._first[shard.key] + number, _cell(axes, place)

    def at(self, number: int) -> Shard:
        """Tensor and box of a cell."""
        key = max((key for key in self._edges if self._first[key] <= number), key=self._first.__getitem__)
        axes, rest = self._edges[key], number - self._first[key]
        place: list[int] = []
        for axis in reversed(axes):
            rest, index = divmod(rest, len(axis) - 1)
            place.append(index)
        return Shard(key, _cell(axes, tuple(reversed(place))))


def _cell(axes: tuple[list[int], ...], place: tuple[int, ...]) -> Box:
    low = tuple(axis[index] for axis, index in zip(axes, place, strict=True))
    return Box(low, tuple(axis[index + 1] - axis[index] for axis, index in zip(axes, place, strict=True)))
