"""Whom a failed proof names, trees of ranks, and what is refused. Random cases: tests/property."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator

import pytest
import torch

from megatron_real.errors import PlanError, VerificationError
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import LocalNetwork, Pending
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.proof.delivery import verified_steps
from megatron_real.realloc_ops.proof.tree import Tree
from megatron_real.realloc_ops.proof.verify import Ends, Verifier, VerifyMode, participants_of
from megatron_real.realloc_ops.storage.local_shards import local_table
from tests.synthetic_copies import Copy, FakeShardedTensor, SyntheticLayout, SyntheticModel, build_copy

_MODEL = SyntheticModel(layers=2, hidden=8, ffn=16, tied=True)
_HERE = SyntheticLayout(tp=2, dp=2)
_THERE = SyntheticLayout(tp=1, dp=2, stages=((0,), (1,)), start=1)


class _Job:
    """Five ranks in one process that move a model from t2d2 on 0 to 3 to d2p2 on 1 to 4."""

    def __init__(self, mode: VerifyMode, *, there: SyntheticLayout = _THERE) -> None:
        self.src = {rank: build_copy(_MODEL, _HERE, rank) for rank in range(5)}
        self.dst = {rank: build_copy(_MODEL, there, rank) for rank in range(5)}
        for copy in self.src.values():
            if copy is not None:
                copy.fill()
        tables = [_table(side) for side in (self.src, self.dst)]
        plan = build_realloc_plan(*tables, bucket_bytes=256)
        self.network = LocalNetwork()
        self.executors: dict[int, ReallocExecutor] = {}
        self.verifiers: dict[int, Verifier] = {}
        for rank in range(5):
            shards = [side[rank].shards if side[rank] is not None else None for side in (self.src, self.dst)]
            transport = self.network.transport(rank)
            ends = Ends(rank=rank, src_table=tables[0], dst_table=tables[1], src=shards[0], dst=shards[1])
            self.executors[rank] = ReallocExecutor(
                plan.of(rank), src=shards[0], dst=shards[1], transport=transport
            )
            self.verifiers[rank] = Verifier(ends, mode, transport, name="actor train -> gen")

    def run(self, damage: Callable[[], object] = lambda: None) -> dict[int, str]:
        """Everything but `damage`, which happens after the move; what each rank was told."""
        told: dict[int, str] = {}

        def caught(rank: int, steps: Generator[Pending]) -> Iterator[Pending]:
            try:
                yield from steps
            except VerificationError as error:
                told[rank] = str(error)

        for part in ("before_steps", "steps", "after_steps"):
            owner = self.executors if part == "steps" else self.verifiers
            self.network.run({rank: caught(rank, getattr(owner[rank], part)()) for rank in range(5)})
            if told:
                break
            if part == "steps":
                damage()
        return told


def _table(copies: dict[int, Copy | None]) -> ParamTable:
    return ParamTable.of({rank: copy.shards.entries if copy else () for rank, copy in copies.items()})


def _tensor(copy: Copy | None, key: str) -> torch.Tensor:
    assert copy is not None
    data = next(item.data for item in copy.sharded if item.key == key)
    assert data is not None
    return data.detach()


@pytest.mark.parametrize("mode", ["off", "checksum", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reallocation_is_accepted(mode: VerifyMode, dtype: torch.dtype) -> None:
    there = SyntheticLayout(tp=1, dp=2, stages=((0,), (1,)), start=1, dtype=dtype)
    job = _Job(mode, there=there)
    steps = {rank: verified_steps(job.executors[rank], job.verifiers[rank]) for rank in range(5)}
    job.network.run(steps)
    for copy in job.dst.values():
        assert copy is None or not copy.mismatches(dtype)
    assert all((verifier.sum_s > 0) == (mode != "off") for verifier in job.verifiers.values())


def test_a_checksum_names_tensor_box_and_ranks() -> None:
    job = _Job("checksum")

    def damage() -> None:
        weight = _tensor(job.dst[2], "decoder.layers.linear_fc2.weight")
        weight[5, 9] = -weight[5, 9]

    told = job.run(damage)
    assert set(told) == {0, 1, 2, 3, 4}
    assert len(set(told.values())) == 1
    # tp=2 cut the 16 columns of fc2 in two.
    assert re.match(
        r"actor train -> gen: decoder\.layers\.linear_fc2\.weight \[0:1, 0:8, 8:16\]: found checksum [0-9a-f]{16} on "
        r"ranks \[2\]; expected [0-9a-f]{16} as on ranks \[1, 3\] of the source\. ",
        told[0],
    ), told[0]


def test_full_names_the_first_wrong_element() -> None:
    job = _Job("full")
    fc2 = "decoder.layers.linear_fc2.weight"
    right = _tensor(job.dst[3], fc2)

    def damage() -> None:
        for rank in (3, 4):  # stage 1: layer 1
            _tensor(job.dst[rank], fc2)[5, 9] = 2.5
        _tensor(job.dst[4], fc2)[7, 2] = 2.5

    told = job.run(damage)
    assert len(set(told.values())) == 1
    assert re.match(
        r"actor train -> gen: decoder\.layers\.linear_fc2\.weight\[1, 5, 9\]: found 2\.5 \(0x40200000\) on rank 3; "
        r"expected \d+\.0 \(0x[0-9a-f]{8}\) as on ranks \[1, 3\] of the source\. Ranks \[3, 4\] have wrong elements",
        told[0],
    ), told[0]
    assert right.shape == (8, 16)


def test_replicas_that_drifted_apart_are_found_before_anything_moves() -> None:
    """A tied embedding that only one replica updated (as on the first and the last stage)."""
    job = _Job("checksum")
    for copy in job.dst.values():
        if copy is not None:
            copy.poison()
    _tensor(job.src[3], "embedding.word_embeddings.weight")[0, 0] += 1
    told = job.run()
    assert set(told) == {0, 1, 2, 3, 4}
    assert "embedding.word_embeddings.weight [16:32, 0:8]" in told[0]
    assert "replicas on ranks [1] and ranks [3]" in told[0]
    assert "Nothing was moved" in told[0]
    assert all(
        copy is None or _tensor(copy, "decoder.layers.linear_qkv.weight").isnan().all()
        for copy in job.dst.values()
    )


def test_every_tensor_of_a_rank_counts() -> None:
    """Two tensors of one rank with one key and box: the second one is proven too."""
    whole = torch.arange(12.0).view(3, 4)
    copies = [whole.clone(), whole.clone()]
    sharded = [
        FakeShardedTensor(key="w", data=data, local_shape=(3, 4), global_shape=(3, 4), global_offset=(0, 0))
        for data in copies
    ]
    src, dst = local_table(sharded[:1], [("w", copies[0])]), local_table(
        [*sharded], [("a", copies[0]), ("b", copies[1])]
    )  # fmt: skip
    tables = [ParamTable.of({0: side.entries}) for side in (src, dst)]
    ends = Ends(rank=0, src_table=tables[0], dst_table=tables[1], src=src, dst=dst)
    for mode in ("checksum", "full"):
        copies[1].copy_(whole)
        verifier = Verifier(ends, mode, LocalNetwork().transport(0))
        verifier.before()
        verifier.after()
        copies[1][2, 3] = 0
        with pytest.raises(VerificationError, match="w"):
            verifier.after()


def test_what_cannot_be_proven_is_refused() -> None:
    job = _Job("off")
    ends = job.verifiers[0]._ends
    transport = job.network.transport(0)
    for mode in ("checksum", "full"):
        with pytest.raises(PlanError, match=f"verify='{mode}' with mix=0.5"):
            Verifier(ends, mode, transport, mix=0.5)
    with pytest.raises(PlanError, match="its source is freed"):
        Verifier(ends, "full", transport, in_place=True)
    Verifier(ends, "off", transport, mix=0.5, in_place=True)
    with pytest.raises(PlanError, match="expected `before` to run before `after`"):
        Verifier(ends, "checksum", transport).after()


def test_only_the_ranks_concerned_take_part() -> None:
    job = _Job("checksum")
    tables = (
        job.verifiers[0]._ends.src_table,
        _table({rank: job.src[0] if rank == 6 else None for rank in range(8)}),
    )
    assert participants_of(*tables) == (0, 1, 2, 3, 6)
    outside = Verifier(
        Ends(rank=7, src_table=tables[0], dst_table=tables[1], src=None, dst=None),
        "checksum",
        job.network.transport(7),
    )
    outside.before()
    outside.after()


@pytest.mark.parametrize("size", range(1, 10))
def test_trees(size: int) -> None:
    ranks = [3 * place + 1 for place in range(size)]
    values = {rank: torch.tensor([rank, -rank, torch.iinfo(torch.int64).min]) for rank in ranks}
    found: dict[int, torch.Tensor] = {}

    def combine(rank: int, tree: Tree) -> Iterator[Pending]:
        found[rank] = yield from tree.combine(values[rank])

    network = LocalNetwork()
    trees = {rank: Tree(network.transport(rank), ranks, rank, "test") for rank in ranks}
    network.run({rank: combine(rank, tree) for rank, tree in trees.items()})
    highest = [ranks[-1], -ranks[0], torch.iinfo(torch.int64).min]
    assert all(found[rank].tolist() == highest for rank in ranks)
    assert values[ranks[0]].tolist()[0] == ranks[0], "its argument is left alone"
    assert max(network.messages_by_pair.values(), default=0) <= 1

    for root in ranks:
        payloads = {rank: torch.full((5,), rank, dtype=torch.uint8) for rank in ranks}
        network.run({rank: tree.spread(payloads[rank], root) for rank, tree in trees.items()})
        assert all(payload.tolist() == [root] * 5 for payload in payloads.values())
