"""Reallocation of real Megatron models between all pairs of layouts, checked element by element.

Every element is filled with a function of its key and its *global* coordinates, computed here with numpy; the bytes
that a rank may receive are counted here element by element. Neither uses the code under test.
"""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import RealError
from megatron_real.hooks.model_builder import RoleModel, sharded_tensors
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.parallel_state import ParallelLayouts
from megatron_real.plan import CopyKey
from megatron_real.realloc_ops.executor import ReallocExecutor, ReallocReport
from megatron_real.realloc_ops.local_shards import gather_tables
from megatron_real.realloc_ops.plan import build_realloc_plan
from megatron_real.realloc_ops.shards import ParamTable
from megatron_real.realloc_ops.transports import TorchTransport
from tests.harness import run_ranks
from tests.hooks.tiny import descent, layouts, placement, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

WORLD_SIZE = 8
PLACEMENTS = (
    "d1t1p1@0-0",
    "d1t2p1s@0-1",
    "d2t1p1@2-3",
    "d1t1p2l1.3@1-2",  # uneven stages, overlapping the others' windows
    "d1t1p2v2@4-5",
    "d1t4p1@2-5",  # more tp ranks than key-value groups
    "d1t2p2@0-3",
    "d1t2p2v2s@4-7",
    "d1t1p4@0-3",
    "d1t8p1@0-7",
    "d2t2p2l3.1@0-7",
    "d8t1p1@0-7",
)
SMALL_BUCKET_BYTES = 1 << 12


@dataclass(kw_only=True)
class Holding:
    """One copy as one rank sees it; `copy` is None outside its window."""

    copy: ModelCopy | None
    table: ParamTable
    ledger: MemoryLedger
    expected: list[tuple[torch.Tensor, torch.Tensor]]
    """(tensor of the model, what it must hold)."""
    held: dict[str, np.ndarray]
    """By key: which elements of the global tensor this rank holds, flat."""


def _positions(offset: tuple[int, ...], box: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    grid = np.meshgrid(*(np.arange(o, o + n) for o, n in zip(offset, box, strict=True)), indexing="ij")
    return np.ravel_multi_index(tuple(grid), shape)


def _value(key: str, position: np.ndarray, salt: int) -> np.ndarray:
    """Exact in fp32, and distinct for neighbouring elements, keys and salts."""
    mixed = (position * 2654435761 + zlib.crc32(f"{salt}/{key}".encode())) % 2**24
    return (mixed / 2**24 - 0.5).astype(np.float32)


def _hold(
    made: ParallelLayouts, text: str, role: RoleModel, *, salt: int = 0, trained: bool = False
) -> Holding:
    parallel = placement(made, text)
    ledger, copy = MemoryLedger(), None
    expected, held = [], {}
    if parallel.member:
        key = CopyKey(model=role.role, mesh=parallel.mesh, layout=parallel.layout)
        copy = ModelCopy(key, role, parallel, training=descent() if trained else None, ledger=ledger)
        for shard in sharded_tensors(copy.chunks, parallel):
            box = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
            position = _positions(shard.global_offset, box, shard.global_shape)
            mask = held.setdefault(shard.key, np.zeros(math.prod(shard.global_shape), dtype=bool))
            mask[position.reshape(-1)] = True
            values = torch.from_numpy(_value(shard.key, position, salt)).reshape(shard.data.shape)
            shard.data.detach().copy_(values)
            expected.append((shard.data.detach(), values))
        assert sum(mask.sum() for mask in held.values()) <= copy.segments.nbytes // 4
    table = gather_tables(copy.shards.entries if copy is not None else (), dist.group.WORLD)
    return Holding(copy=copy, table=table, ledger=ledger, expected=expected, held=held)


def _executor(
    src: Holding, dst: Holding, transport: TorchTransport, bucket_bytes: int = 1 << 25
) -> ReallocExecutor:
    rank = dist.get_rank()
    return ReallocExecutor(
        build_realloc_plan(src.table, dst.table, bucket_bytes=bucket_bytes, rank=rank).of(rank),
        src=src.copy.shards if src.copy is not None else None,
        dst=dst.copy.shards if dst.copy is not None else None,
        transport=transport,
    )


def _poison(holding: Holding) -> None:
    if holding.copy is not None:
        for segment in holding.copy.segments.segments:
            segment.flat.fill_(float("nan"))


def _check_arrived(holding: Holding, where: str) -> None:
    for tensor, values in holding.expected:
        assert torch.equal(tensor, values), where


def _check_report(report: ReallocReport, src: Holding, dst: Holding, bucket_bytes: int, where: str) -> None:
    missing = sum(
        int((mask & ~src.held.get(key, np.zeros_like(mask))).sum()) for key, mask in dst.held.items()
    )
    assert report.bytes_moved == report.bytes_bound == 4 * missing, where
    assert report.messages <= (report.bytes_moved + report.bytes_sent) / bucket_bytes + 2 * WORLD_SIZE, where
    assert report.staging_peak_bytes <= 4 * bucket_bytes, where


def _check_pairs(changes: dict[str, object], placements: tuple[str, ...]) -> int:
    role = tiny_role(**changes)
    with layouts() as made:
        held = {text: _hold(made, text, role) for text in placements}
        transport = TorchTransport.connect(
            made.groups.acquire(range(WORLD_SIZE), purpose="realloc"), timeout_s=60
        )
        pairs = list(itertools.permutations(placements, 2))
        for number, (source, target) in enumerate(pairs):
            src, dst, where = held[source], held[target], f"{source} -> {target}"
            bucket_bytes = SMALL_BUCKET_BYTES if number % 2 else 1 << 25
            _poison(dst)
            report = _executor(src, dst, transport, bucket_bytes).run()
            _check_arrived(dst, where)
            _check_arrived(src, f"source of {where}")
            _check_report(report, src, dst, bucket_bytes, where)
        for holding in held.values():
            _check_release(holding)
        made.groups.release(range(WORLD_SIZE), purpose="realloc")
        return len(pairs)


def _check_release(holding: Holding) -> None:
    copy = holding.copy
    if copy is None:
        return
    assert holding.ledger.held() == {copy.parameters_owner: copy.segments.nbytes}
    copy.free()
    for chunk in copy.chunks:
        for parameter in chunk.parameters():
            assert parameter.untyped_storage().nbytes() == 0
    assert copy.segments.allocated_bytes == holding.ledger.current_bytes == 0
    with pytest.raises(RealError, match="freed"):
        copy.shards.resolve()


@pytest.mark.parametrize(
    ("changes", "placements"),
    [
        pytest.param({}, PLACEMENTS, id="untied"),
        pytest.param({"tied_embeddings": True}, PLACEMENTS, id="tied"),
        pytest.param({"role": "critic", "scalar_head": True}, PLACEMENTS[3:9], id="scalar head"),
    ],
)
def test_all_pairs_of_layouts(changes: dict[str, object], placements: tuple[str, ...]) -> None:
    counts = run_ranks(WORLD_SIZE, _check_pairs, changes, placements)
    assert set(counts) == {len(placements) * (len(placements) - 1)}


def _check_trained() -> None:
    """Out of DDP's buffers and back, twice over one executor; a second model with the same layouts beside it."""
    with layouts() as made:
        transport = TorchTransport.connect(made.groups.acquire(range(4), purpose="realloc"), timeout_s=60)
        held = {}
        for salt, role in enumerate((tiny_role(), tiny_role("critic"))):
            held[role.role, "train"] = _hold(made, "d1t2p2v2@0-3", role, salt=salt, trained=True)
            held[role.role, "generate"] = _hold(made, "d4t1p1@0-3", role, salt=salt)
        executors = {
            name: _executor(held[name, "train"], held[name, "generate"], transport)
            for name in ("actor", "critic")
        }
        for _ in range(2):
            for name, executor in executors.items():
                generate = held[name, "generate"]
                generate.copy.free()
                generate.copy.allocate()
                _poison(generate)
                executor.run()
                _check_arrived(generate, name)
                assert executor.num_builds == 1
        for name in executors:
            train = held[name, "train"]
            _poison(train)
            _executor(held[name, "generate"], train, transport).run()
            train.copy.weights_arrived(3)
            _check_arrived(train, name)
            assert train.copy.stamp.version == 3
        made.groups.release(range(4), purpose="realloc")


def test_trained_copies_and_two_models_with_equal_layouts() -> None:
    run_ranks(4, _check_trained)
