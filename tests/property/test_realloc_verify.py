"""Whatever is wrong with a destination is found, and nothing in one that is right: random cases in one process.

No plan and no executor: the destination is filled from the global tensors, then damaged or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.errors import VerificationError
from megatron_real.realloc_ops.execution.transports import LocalNetwork, Pending
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, Shard
from megatron_real.realloc_ops.proof.verify import Ends, Verifier, VerifyMode
from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from tests.synthetic_copies import FakeShardedTensor

_NUM_RANKS = 5
_DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@dataclass
class Case:
    """Global tensors, and two shardings of them."""

    src_whole: dict[str, torch.Tensor]
    dst_whole: dict[str, torch.Tensor]
    src: dict[int, dict[Shard, torch.Tensor]]
    dst: dict[int, dict[Shard, torch.Tensor]]


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def _everything(whole: torch.Tensor) -> Box:
    return Box((0,) * whole.dim(), tuple(whole.shape))


@st.composite
def _sharding(draw: st.DrawFn, wholes: dict[str, torch.Tensor]) -> dict[int, dict[Shard, torch.Tensor]]:
    """Boxes of a random grid, each on a random set of ranks, some stored transposed."""
    held: dict[int, dict[Shard, torch.Tensor]] = {rank: {} for rank in range(_NUM_RANKS)}
    for key, whole in wholes.items():
        edges = []
        for extent in whole.shape:
            cuts = draw(st.sets(st.integers(1, extent - 1), max_size=2)) if extent > 1 else set()
            edges.append([0, *sorted(cuts), extent])
        for cell in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
            box = Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
            for rank in draw(st.sets(st.integers(0, _NUM_RANKS - 1), min_size=1, max_size=3)):
                part = whole[box.slices_in(_everything(whole))].clone()
                if draw(st.booleans()):
                    part = part.movedim(-1, 0).contiguous().movedim(0, -1)
                held[rank][Shard(key, box)] = part
    return held


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1, max_size=3))
    src_whole, dst_whole = {}, {}
    for index, shape in enumerate(shapes):
        key, dtype = f"t{index}", draw(st.sampled_from(_DTYPES))
        src_whole[key] = _random(tuple(shape), dtype, draw(st.integers(0, 99)))
        dst_whole[key] = src_whole[key].to(draw(st.sampled_from([dtype, dtype, *_DTYPES])))
    return Case(src_whole, dst_whole, draw(_sharding(src_whole)), draw(_sharding(dst_whole)))


def _local(held: dict[Shard, torch.Tensor], wholes: dict[str, torch.Tensor]) -> LocalShards:
    sharded = [
        FakeShardedTensor(
            key=key, data=data, local_shape=tuple(data.shape), global_shape=tuple(wholes[key].shape),
            global_offset=box.offset,
        )
        for (key, box), data in held.items()
    ]  # fmt: skip
    return local_table(sharded, [(str(shard), data) for shard, data in held.items()])


def verify(case: Case, mode: VerifyMode, damage: Callable[[], object] = lambda: None) -> dict[int, str]:
    """What each rank concerned was told; `damage` happens between `before` and `after`."""
    sides = [
        {rank: _local(held, wholes) for rank, held in side.items()}
        for side, wholes in ((case.src, case.src_whole), (case.dst, case.dst_whole))
    ]
    tables = [ParamTable.of({rank: shards.entries for rank, shards in side.items()}) for side in sides]
    network = LocalNetwork()
    told: dict[int, str] = {}
    verifiers = {
        rank: Verifier(
            Ends(rank=rank, src_table=tables[0], dst_table=tables[1], src=sides[0][rank], dst=sides[1][rank]),
            mode,
            network.transport(rank),
        )
        for rank in range(_NUM_RANKS)
    }

    def caught(rank: int, steps: Generator[Pending]) -> Iterator[Pending]:
        try:
            yield from steps
        except VerificationError as error:
            told[rank] = str(error)

    network.run({rank: caught(rank, verifier.before_steps()) for rank, verifier in verifiers.items()})
    if not told:
        damage()
        network.run({rank: caught(rank, verifier.after_steps()) for rank, verifier in verifiers.items()})
    if told:
        assert set(told) == set(verifiers[0].participants), "all or none"
        assert len(set(told.values())) == 1, "all say the same"
    return told


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _flip(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    copy = part.contiguous()
    raw = copy.view(-1).view(torch.uint8)
    raw[draw(raw.numel())] ^= 1 << draw(8)
    part.copy_(copy)


def _swap(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    axis = draw(part.dim())
    one, other = draw(part.shape[axis]), draw(part.shape[axis])
    saved = part.select(axis, one).clone()
    part.select(axis, one).copy_(part.select(axis, other))
    part.select(axis, other).copy_(saved)


def _shift(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    axis = draw(part.dim())
    part.copy_(part.roll(1, axis))


def _transpose(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    if part.dim() >= 2 and part.shape[-1] == part.shape[-2]:
        part.copy_(part.transpose(-1, -2).clone())


def _lose(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    part.zero_()


def _keep_old(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    rows = draw(part.shape[0]) + 1
    part[:rows].copy_(_random(tuple(part[:rows].shape), part.dtype, 12345))


def _negate(part: torch.Tensor, draw: Callable[[int], int]) -> None:
    part.neg_()


_DAMAGES = [_flip, _swap, _shift, _transpose, _lose, _keep_old, _negate]


@given(_cases(), st.sampled_from(["off", "checksum", "full"]))
@settings(max_examples=30, deadline=None)
def test_what_is_right_is_accepted(case: Case, mode: VerifyMode) -> None:
    assert not verify(case, mode)


def _same(part: torch.Tensor, before: torch.Tensor, *, converted: bool) -> bool:
    equal = _bits(part) == _bits(before)
    if converted:  # NaN counts as NaN
        both = torch.isnan(part) & torch.isnan(before)
        equal = equal.view(*part.shape, part.element_size()).all(-1) | both
    return bool(equal.all())


@given(_cases(), st.sampled_from(["checksum", "full"]), st.sampled_from(_DAMAGES), st.data())
@settings(max_examples=80, deadline=None)
def test_every_damage_is_found(
    case: Case,
    mode: VerifyMode,
    damage: Callable[[torch.Tensor, Callable[[int], int]], None],
    data: st.DataObject,
) -> None:
    rank = data.draw(st.sampled_from([rank for rank, held in case.dst.items() if held]))
    shard = data.draw(st.sampled_from(sorted(case.dst[rank])))
    part = case.dst[rank][shard]
    before = part.clone()
    told = verify(case, mode, lambda: damage(part, lambda n: data.draw(st.integers(0, n - 1))))
    converted = case.src_whole[shard.key].dtype != part.dtype
    if _same(part, before, converted=converted):
        assert not told
    else:
        assert told
        text = next(iter(told.values()))
        assert text.startswith(f"realloc: {shard.key}")
        assert f"anks [{rank}]" in text


@given(_cases(), st.data())
@settings(max_examples=40, deadline=None)
def test_replicas_that_differ_are_found_before_anything_moves(case: Case, data: st.DataObject) -> None:
    owners: dict[Shard, list[int]] = {}
    for rank, held in case.src.items():
        for shard in held:
            owners.setdefault(shard, []).append(rank)
    shard = data.draw(st.sampled_from(sorted(owners)))
    rank = data.draw(st.sampled_from(owners[shard]))
    part = case.src[rank][shard]
    converted = case.dst_whole[shard.key].dtype != part.dtype
    before = part.clone().to(case.dst_whole[shard.key].dtype)
    _flip(part, lambda n: data.draw(st.integers(0, n - 1)))
    moved: list[bool] = []
    told = verify(case, "checksum", lambda: moved.append(True))
    changed = not _same(part.to(before.dtype), before, converted=converted)
    assert bool(told) == changed
    if changed and len(owners[shard]) > 1:
        assert not moved
        assert "replicas" in next(iter(told.values()))
        assert f"[{rank}]" in next(iter(told.values()))


@pytest.mark.parametrize("mode", ["checksum", "full"])
def test_experts_and_layers_that_trade_places(mode: VerifyMode) -> None:
    """(layer, expert, row, column), a layer on each of two ranks: weights that look right, but are another expert's."""
    whole = _random((2, 4, 8, 8), torch.bfloat16, 1)

    def layers() -> dict[int, dict[Shard, torch.Tensor]]:
        held = {
            rank: {Shard("experts", Box((rank, 0, 0, 0), (1, 4, 8, 8))): whole[rank : rank + 1].clone()}
            for rank in (0, 1)
        }
        return {**held, 2: {}, 3: {}, 4: {}}

    for axis, one, other in ((1, 0, 3), (2, 1, 6), (3, 2, 7)):
        case = Case({"experts": whole}, {"experts": whole}, layers(), layers())
        (part,) = case.dst[1].values()
        order = list(range(part.shape[axis]))
        order[one], order[other] = order[other], order[one]
        traded = part.index_select(axis, torch.tensor(order))
        told = verify(case, mode, lambda part=part, traded=traded: part.copy_(traded))
        assert "experts" in told[0]
    case = Case({"experts": whole}, {"experts": whole}, layers(), layers())
    (first,), (second,) = case.dst[0].values(), case.dst[1].values()
    told = verify(case, mode, lambda: (first.copy_(whole[1:]), second.copy_(whole[:1])))
    assert "experts" in told[0]
