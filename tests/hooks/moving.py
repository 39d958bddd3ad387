"""What the reallocation tests share: models filled with a function of their global coordinates, moved and checked.

Every element is a function of its key and its *global* coordinates, computed here with numpy; the bytes that a rank may
receive are counted here element by element. Neither uses the code under test. Imports Megatron.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_real.device_memory import MemoryLedger
from megatron_real.hooks.model_builder import RoleModel, sharded_tensors
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.parallel_state import ParallelLayout, ParallelLayouts
from megatron_real.plan import CopyKey
from megatron_real.realloc_ops.execution.executor import ReallocExecutor, ReallocReport
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.storage.local_shards import LocalShards, gather_tables, local_table
from tests.hooks.tiny import descent, layouts, placement, train_step

__all__ = [
    "Build",
    "Filled",
    "Holding",
    "check_arrived",
    "check_move",
    "check_pairs",
    "executor",
    "hold",
    "losses_after_moves",
    "mean_losses",
    "owned_tensors",
    "poison",
    "transport",
]

SMALL_BUCKET_BYTES = 1 << 12
LARGE_BUCKET_BYTES = 1 << 25
Build = Callable[[ParallelLayout], Sequence[torch.nn.Module]]
"""Makes the chunks of a rank that is in the layout's mesh, under that layout."""


class Filled(NamedTuple):
    """A tensor of a model and what its coordinates say, in fp32."""

    key: str
    tensor: torch.Tensor
    values: torch.Tensor


@dataclass(kw_only=True)
class Holding:
    """One copy as one rank sees it."""

    copy: ModelCopy | None
    """None outside the window, and where the test built the chunks itself."""
    chunks: Sequence[torch.nn.Module]
    shards: LocalShards | None
    table: ParamTable
    ledger: MemoryLedger
    filled: list[Filled]
    padding: list[torch.Tensor]
    held: dict[str, np.ndarray]
    """By key: which elements of the global tensor this rank holds, flat."""


def _positions(offset: tuple[int, ...], box: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    grid = np.meshgrid(*(np.arange(o, o + n) for o, n in zip(offset, box, strict=True)), indexing="ij")
    return np.ravel_multi_index(tuple(grid), shape)


def _value(key: str, position: np.ndarray, salt: int) -> np.ndarray:
    """Exact in fp32, and distinct for neighbouring elements, keys and salts."""
    mixed = (position * 2654435761 + zlib.crc32(f"{salt}/{key}".encode())) % 2**24
    return (mixed / 2**24 - 0.5).astype(np.float32)


def owned_tensors(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of all parameters and buffers."""
    return [pair for chunk in chunks for pair in (*chunk.named_parameters(), *chunk.named_buffers())]


def hold(
    made: ParallelLayouts,
    text: str,
    role: RoleModel,
    *,
    build: Build | None = None,
    real_rows: Mapping[str, int] | None = None,
    salt: int = 0,
    training: Training | None = None,
) -> Holding:
    """A copy in the placement `text`, filled. Collective over WORLD.

    Args:
        made: where layouts are built.
        text: for example ``d2t2p1@0-3``.
        role: the model.
        build: makes the chunks in place of `ModelCopy`.
        real_rows: by key, rows that are not padding.
        salt: another one fills with other values.
        training: makes the copy trainable.
    """
    parallel = placement(made, text)
    result = Holding(
        copy=None,
        chunks=(),
        shards=None,
        table=ParamTable.of({}),
        ledger=MemoryLedger(),
        filled=[],
        padding=[],
        held={},
    )
    if parallel.member:
        _make(result, parallel, role, build, real_rows or {}, training)
        for shard in sharded_tensors(result.chunks, parallel):
            _fill(result, shard, (real_rows or {}).get(shard.key), salt)
    entries = result.shards.entries if result.shards is not None else ()
    result.table = gather_tables(entries, dist.group.WORLD)
    return result


def _make(
    result: Holding,
    parallel: ParallelLayout,
    role: RoleModel,
    build: Build | None,
    real_rows: Mapping[str, int],
    training: Training | None,
) -> None:
    if build is not None:
        with parallel.active():
            result.chunks = list(build(parallel))
    else:
        key = CopyKey(model=role.role, mesh=parallel.mesh, layout=parallel.layout)
        result.copy = ModelCopy(key, role, parallel, training=training, ledger=result.ledger)
        result.chunks = result.copy.chunks
    if build is None and not real_rows:
        result.shards = result.copy.shards
    else:
        shards = sharded_tensors(result.chunks, parallel)
        result.shards = local_table(shards, owned_tensors(result.chunks), real_rows)


def _fill(result: Holding, shard: Any, rows: int | None, salt: int) -> None:
    data, shape = shard.data.detach(), tuple(shard.global_shape)
    if rows is not None:  # the vocabulary: rows are the first axis, and nothing is prepended
        assert shard.prepend_axis_num == 0
        real = min(max(rows - shard.global_offset[0], 0), data.shape[0])
        result.padding.append(data[real:])
        data[real:].fill_(7.0)
        data, shape = data[:real], (rows, *shape[1:])
        if real == 0:
            return
    position = _positions(shard.global_offset, (1,) * shard.prepend_axis_num + tuple(data.shape), shape)
    mask = result.held.setdefault(shard.key, np.zeros(math.prod(shape), dtype=bool))
    mask[position.reshape(-1)] = True
    values = torch.from_numpy(_value(shard.key, position, salt)).reshape(data.shape)
    data.copy_(values)
    result.filled.append(Filled(shard.key, data, values))


def transport(made: ParallelLayouts) -> TorchTransport:
    """Over all ranks. Collective over WORLD."""
    group = made.groups.acquire(range(dist.get_world_size()), purpose="realloc")
    return TorchTransport.connect(group, timeout_s=60)


def executor(
    src: Holding, dst: Holding, over: TorchTransport, bucket_bytes: int = LARGE_BUCKET_BYTES
) -> ReallocExecutor:
    """This rank's part of moving `src` to `dst`.

    Raises:
        PlanError: the copies do not describe the same tensors; on all ranks.
    """
    rank = dist.get_rank()
    plan = build_realloc_plan(src.table, dst.table, bucket_bytes=bucket_bytes, rank=rank).of(rank)
    return ReallocExecutor(plan, src=src.shards, dst=dst.shards, transport=over)


def poison(holding: Holding) -> None:
    """Fill a copy, and what lies between its tensors, with what it must not hold."""
    if holding.copy is not None:
        for segment in holding.copy.segments.segments:
            segment.flat.fill_(float("nan"))
    for _, tensor, _ in holding.filled:
        tensor.fill_(float("nan"))
    for rows in holding.padding:
        rows.fill_(7.0)


def check_arrived(holding: Holding, where: str, src: Holding | None = None) -> None:
    """Every element is what its coordinates say, after the dtype of `src` (its own if None)."""
    for key, tensor, values in holding.filled:
        wire = getattr(torch, src.table.specs[key].dtype) if src is not None else tensor.dtype
        expected = values.to(wire).to(tensor.dtype)
        assert torch.equal(tensor, expected), f"{where}: {key}: {_difference(tensor, expected)}"
    if src is not None:
        for rows in holding.padding:
            assert rows.eq(0).all(), f"{where}: padding rows are not zero"


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    places = (found != expected).nonzero()
    first = tuple(places[0].tolist())
    return f"{len(places)} of {found.numel()} elements, first {first}: {found[first]} for {expected[first]}"


def check_report(report: ReallocReport, src: Holding, dst: Holding, bucket_bytes: int, where: str) -> None:
    """Bytes against those that are counted element by element; messages and staging against their bounds."""
    missing = sum(
        int((mask & ~src.held.get(key, np.zeros_like(mask))).sum()) * src.table.specs[key].itemsize_bytes
        for key, mask in dst.held.items()
    )
    assert report.bytes_moved == report.bytes_bound == missing, where
    size = dist.get_world_size()
    assert report.messages <= (report.bytes_moved + report.bytes_sent) / bucket_bytes + 2 * size, where
    assert report.staging_peak_bytes <= 4 * bucket_bytes, where


def check_move(
    src: Holding, dst: Holding, over: TorchTransport, where: str, bucket_bytes: int = LARGE_BUCKET_BYTES
) -> None:
    """Move, and check every element of both copies. Collective over WORLD."""
    poison(dst)
    report = executor(src, dst, over, bucket_bytes).run()
    check_arrived(dst, where, src)
    check_arrived(src, f"source of {where}")
    check_report(report, src, dst, bucket_bytes, where)


def check_pairs(role: RoleModel, placements: Sequence[str], build: Build | None = None) -> int:
    """Between all pairs of placements; the number of pairs. Collective over WORLD: call it on every rank."""
    with layouts() as made:
        held = {text: hold(made, text, role, build=build) for text in placements}
        over = transport(made)
        pairs = list(itertools.permutations(placements, 2))
        for number, (source, target) in enumerate(pairs):
            bucket_bytes = SMALL_BUCKET_BYTES if number % 2 else LARGE_BUCKET_BYTES
            check_move(held[source], held[target], over, f"{source} -> {target}", bucket_bytes)
        made.groups.release(range(dist.get_world_size()), purpose="realloc")
        for holding in held.values():
            if holding.copy is not None:
                holding.copy.close()
        return len(pairs)


def losses_after_moves(role: RoleModel, source: str, placements: Sequence[str]) -> dict[str, list[float]]:
    """This rank's parts of the loss of a batch, by placement: in the source, and in copies that it was moved to.

    Collective over WORLD.
    """
    tokens = torch.arange(104).reshape(8, 13) * 7 % 120
    with layouts() as made:
        over = transport(made)
        held = {text: hold(made, text, role, training=descent()) for text in (source, *placements)}
        losses: dict[str, list[float]] = {}
        for text, holding in held.items():
            if text != source:
                check_move(held[source], holding, over, f"{source} -> {text}")
        for text, holding in held.items():
            if holding.copy is not None:
                holding.copy.weights_arrived(0)
                loss = train_step(holding.copy, tokens, num_microbatches=holding.copy.parallel.layout.pp)
                losses |= {} if loss is None else {text: [float(loss)]}
        made.groups.release(range(dist.get_world_size()), purpose="realloc")
    return losses


def mean_losses(found: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """By placement, over the ranks that report: each has an equal part of the batch."""
    merged: dict[str, list[float]] = {}
    for losses in found:
        for text, parts in losses.items():
            merged.setdefault(text, []).extend(parts)
    return {text: sum(parts) / len(parts) for text, parts in merged.items()}
