"""Random models between random shardings, moved in one process and compared bit by bit with numpy.

Cases are made from a seed, so that thousands take seconds. What every element must be is computed from its global
coordinates with numpy, conversions included; nothing of the package is used for that.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_real.device_memory import MemoryLedger
from megatron_real.realloc_ops.execution import packing
from megatron_real.realloc_ops.execution.executor import InPlace, ReallocExecutor
from megatron_real.realloc_ops.execution.streaming import Arrivals
from megatron_real.realloc_ops.execution.transports import LocalNetwork
from megatron_real.realloc_ops.planning.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from megatron_real.realloc_ops.storage.segments import SegmentSet
from tests.synthetic_copies import FakeShardedTensor

KEYS = (
    "embedding.word_embeddings.weight",
    "decoder.layers.mlp.linear_fc1.weight",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
NUM_RANKS = 4
_SAFE = [Phase.explicit, Phase.reuse, Phase.generate]
"""Without shrinking: a seed does not shrink to anything simpler."""
Cell = tuple[tuple[int, int], ...]


@cache
def _whole(key: str, shape: tuple[int, ...], salt: int) -> np.ndarray:
    position = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    mixed = (position * np.uint64(2654435761) + np.uint64(zlib.crc32(f"{salt}/{key}".encode()))) % 2**24
    return (mixed.astype(np.float64) / 2**24 - 0.5).astype(np.float32)


def values_of(key: str, cell: Cell, shape: tuple[int, ...], salt: int) -> np.ndarray:
    """fp32 in [-0.5, 0.5), a function of the key and of global coordinates."""
    return np.ascontiguousarray(_whole(key, shape, salt)[tuple(slice(*edges) for edges in cell)])


def as_dtype(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round to the nearest value of `dtype`, ties to even; the result is fp32."""
    if dtype != torch.bfloat16:
        return values
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@dataclass(kw_only=True)
class Side:
    """One copy on one rank."""

    module: torch.nn.Module = field(default_factory=torch.nn.Module)
    sharded: list[FakeShardedTensor] = field(default_factory=list)
    cells: list[tuple[str, Cell]] = field(default_factory=list)
    """Of each sharded tensor."""
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    segments: SegmentSet | None = None
    shards: LocalShards | None = None

    def add(
        self, key: str, cell: Cell, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool
    ) -> None:
        box = tuple(high - low for low, high in cell)
        data = (
            torch.zeros(box[::-1], dtype=dtype).permute(*reversed(range(len(box))))
            if transposed
            else torch.zeros(box, dtype=dtype)
        )
        name = f"p{len(self.cells)}"
        self.module.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        self.cells.append((key, cell))
        self.sharded.append(
            FakeShardedTensor(
                key=key, data=getattr(self.module, name), local_shape=box, global_shape=shape,
                global_offset=tuple(low for low, _ in cell),
            )
        )  # fmt: skip

    def close(self, *, adopt: int | None) -> None:
        """Describe the shards; with `adopt`, in segments of that many bytes."""
        if adopt is not None:
            self.segments = SegmentSet.adopt(
                [self.module], owner="copy", ledger=self.ledger, segment_bytes=adopt
            )
        self.shards = local_table(self.sharded, list(self.module.named_parameters()))

    def fill(self, salt: int) -> None:
        for item, (key, cell) in zip(self.sharded, self.cells, strict=True):
            values = as_dtype(values_of(key, cell, item.global_shape, salt), item.data.dtype)
            item.data.copy_(torch.from_numpy(values))

    def check(self, expected) -> None:
        """Bit by bit against `expected(key, cell, shape, dtype)`."""
        for item, (key, cell) in zip(self.sharded, self.cells, strict=True):
            wanted = expected(key, cell, item.global_shape, item.data.dtype)
            found = item.data.detach().float().numpy()
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), f"{key} {cell}"


@dataclass(kw_only=True)
class Case:
    src: dict[int, Side]
    dst: dict[int, Side]
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]]
    """Source and destination, by key."""

    def sides(self, rank: int) -> tuple[LocalShards | None, LocalShards | None]:
        return tuple(side[rank].shards if rank in side else None for side in (self.src, self.dst))

    def plan(self, **options) -> ReallocPlan:
        tables = [
            ParamTable.of({rank: part.shards.entries for rank, part in side.items()})
            for side in (self.src, self.dst)
        ]
        return build_realloc_plan(*tables, **options)


def _partition(rng: random.Random, shape: tuple[int, ...]) -> list[Cell]:
    edges = []
    for extent in shape:
        cuts = (
            rng.sample(range(1, extent), min(rng.choice((0, 0, 1, 1, 2)), extent - 1)) if extent > 1 else []
        )
        edges.append([0, *sorted(cuts), extent])
    return list(itertools.product(*(itertools.pairwise(edge) for edge in edges)))


def make_case(seed: int, *, adopt: int | None = None, change_dtype: bool = True) -> Case:
    """Up to three tensors, each in boxes along random cuts, each box on random ranks of a random window."""
    rng = random.Random(seed)
    keys = rng.sample(KEYS, rng.randint(1, 3))
    shapes = {key: tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3))) for key in keys}
    dtypes = {key: (rng.choice((torch.float32, torch.bfloat16)),) * 2 for key in keys}
    if change_dtype:
        dtypes = {key: (src, rng.choice((torch.float32, torch.bfloat16))) for key, (src, _) in dtypes.items()}
    sides = []
    for number in range(2):
        first = rng.randrange(NUM_RANKS)
        window = range(first, rng.randint(first + 1, NUM_RANKS))
        parts = {rank: Side() for rank in window}
        for key in keys:
            for cell in _partition(rng, shapes[key]):
                for rank in rng.sample(window, rng.choice((1, len(window), rng.randint(1, len(window))))):
                    for _ in range(
                        rng.choice((1, 1, 1, 2)) if number else 1
                    ):  # the destination may hold it twice
                        parts[rank].add(
                            key, cell, shapes[key], dtypes[key][number], transposed=rng.random() < 0.2
                        )
        for part in parts.values():
            part.close(adopt=adopt)
        sides.append(parts)
    for part in sides[0].values():
        part.fill(0)
    for part in sides[1].values():
        part.fill(1)
    return Case(src=sides[0], dst=sides[1], dtypes=dtypes)


@contextmanager
def short_pieces(seed: int) -> Iterator[None]:
    """Let pieces be gathered and scattered that are as short as those here, or some of them, or few of them."""
    rng = random.Random(seed)
    with ExitStack() as patches:
        for name, choices in (
            ("_LEAST_SENT_BYTES", (1, 9)),
            ("_LEAST_RECEIVED_BYTES", (1, 9)),
            ("MOST_SENT_REGIONS", (2, 4, 32)),
        ):
            patches.enter_context(patch.object(packing, name, rng.choice(choices)))
        yield


def run_case(case: Case, plan: ReallocPlan, seed: int, ranks=None, **options) -> dict[int, ReallocExecutor]:
    network = LocalNetwork(gathers=bool(seed % 2))
    executors = {}
    for rank in plan.ranks:
        src, dst = case.sides(rank)
        own = {name: value(rank) if callable(value) else value for name, value in options.items()}
        executors[rank] = ReallocExecutor(
            plan.of(rank), src=src, dst=dst, transport=network.transport(rank), **own
        )
    with short_pieces(seed):
        network.run(
            {rank: executor.steps() for rank, executor in executors.items()}, pick=random.Random(seed).choice
        )
    assert sum(network.bytes_by_pair.values()) == sum(part.bytes_bound for part in plan.ranks.values())
    return executors


def moved(case: Case):
    """What the destination must hold after a move."""

    def expected(key: str, cell: Cell, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
        return as_dtype(as_dtype(values_of(key, cell, shape, 0), case.dtypes[key][0]), dtype)

    return expected


@pytest.mark.parametrize("order", ["fused", "layers", "in_place"])
@pytest.mark.parametrize("devices_per_node", [None, 2])
@given(seed=st.integers(0, 2**32), bucket_bytes=st.sampled_from([16, 48, 1024]))
@settings(max_examples=190, deadline=None, phases=_SAFE)
def test_every_bit_arrives(order: str, devices_per_node: int | None, seed: int, bucket_bytes: int) -> None:
    case = make_case(seed)
    plan = case.plan(order=order, devices_per_node=devices_per_node, bucket_bytes=bucket_bytes)
    executors = run_case(case, plan, seed)
    for part in case.dst.values():
        part.check(moved(case))
    assert max(executor.report.staging_peak_bytes for executor in executors.values()) <= 4 * bucket_bytes


@given(seed=st.integers(0, 2**32), devices_per_node=st.sampled_from([None, 2, 3]))
@settings(max_examples=190, deadline=None, phases=_SAFE)
def test_in_place_leaves_the_destination_only(seed: int, devices_per_node: int | None) -> None:
    case = make_case(seed, adopt=256)
    plan = case.plan(order="in_place", devices_per_node=devices_per_node, bucket_bytes=64)
    for part in case.dst.values():
        part.segments.free()

    def segments(rank: int) -> InPlace:
        return InPlace(
            src=case.src[rank].segments if rank in case.src else None,
            dst=case.dst[rank].segments if rank in case.dst else None,
        )

    run_case(case, plan, seed, in_place=segments)
    for part in case.dst.values():
        part.check(moved(case))
        assert part.segments.allocated_bytes == part.ledger.current_bytes == part.segments.nbytes
    for part in case.src.values():
        assert part.segments.allocated_bytes == part.ledger.current_bytes == 0


@given(
    seed=st.integers(0, 2**32),
    mix=st.sampled_from([0.1, 0.5, 0.999]),
    order=st.sampled_from(["fused", "layers"]),
)
@settings(max_examples=190, deadline=None, phases=_SAFE)
def test_mixing_rounds_as_said(seed: int, mix: float, order: str) -> None:
    case = make_case(seed)
    executors = run_case(case, case.plan(order=order, bucket_bytes=64), seed, mix=mix)
    assert max(executor.report.staging_peak_bytes for executor in executors.values()) <= 4 * 64

    def expected(key: str, cell: Cell, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
        new = as_dtype(values_of(key, cell, shape, 0), case.dtypes[key][0])
        old = as_dtype(values_of(key, cell, shape, 1), dtype)
        return as_dtype(old * np.float32(1.0 - mix) + new * np.float32(mix), dtype)

    for part in case.dst.values():
        part.check(expected)


class _Checked(Arrivals):
    """Looks at the destination whenever waves arrive."""

    def __init__(self, side: Side, waves: dict[tuple[str, Cell], int], expected) -> None:
        super().__init__()
        self._side, self._waves, self._expected = side, waves, expected
        self.announced: list[int] = []

    def advance(self, next_wave: int, devices) -> None:
        super().advance(next_wave, devices)
        self.announced.append(next_wave)
        arrived = Side(
            cells=[place for place in self._side.cells if self._waves[place] < next_wave],
            sharded=[
                item
                for item, place in zip(self._side.sharded, self._side.cells, strict=True)
                if self._waves[place] < next_wave
            ],
        )
        arrived.check(self._expected)


@given(seed=st.integers(0, 2**32), devices_per_node=st.sampled_from([None, 2]))
@settings(max_examples=190, deadline=None, phases=_SAFE)
def test_a_wave_is_announced_when_it_is_there(seed: int, devices_per_node: int | None) -> None:
    """Every announced wave is complete, local copies and duplicates included, while the run goes on."""
    case = make_case(seed)
    plan = case.plan(order="layers", devices_per_node=devices_per_node, bucket_bytes=32)
    network = LocalNetwork(gathers=bool(seed % 2))
    programs, watched = {}, []
    for rank in plan.ranks:
        src, dst = case.sides(rank)
        executor = ReallocExecutor(plan.of(rank), src=src, dst=dst, transport=network.transport(rank))
        arrivals = None
        if rank in case.dst:
            waves: dict[tuple[str, Cell], int] = {}
            pieces = [*plan.of(rank).copies, *(p for m in plan.of(rank).receives for p in m.slices)]
            for piece in pieces:
                place = piece.key, tuple((o, o + n) for o, n in zip(*piece.dst_box, strict=True))
                waves[place] = max(piece.wave, waves.get(place, 0))
            arrivals = _Checked(case.dst[rank], waves, moved(case))
            watched.append((arrivals, max(waves.values(), default=0)))
        programs[rank] = executor.steps(arrivals)
    with short_pieces(seed):
        network.run(programs, pick=random.Random(seed).choice)
    for arrivals, last in watched:
        assert arrivals.announced == sorted(set(arrivals.announced))
        assert arrivals.announced[-1] > last
