"""Where local copies stand among the steps, and what binding needs of storages."""

from __future__ import annotations

import pytest

from megatron_real.realloc_ops.execution.bound_plan import Binder, BoundPlan, shard_waves
from megatron_real.realloc_ops.execution.packing import Staging
from megatron_real.realloc_ops.execution.transports import LocalNetwork
from megatron_real.realloc_ops.planning.plan import RankPlan, ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable, Shard
from tests.synthetic_copies import Copy, SyntheticLayout, SyntheticModel, build_copy

_MODEL = SyntheticModel(layers=6, hidden=16, ffn=32, tied=True)
_HERE = SyntheticLayout(tp=2, stages=((0, 1, 2), (3, 4, 5)))
_THERE = SyntheticLayout(dp=4)


def _plan(**options) -> tuple[ReallocPlan, list[Copy], list[Copy]]:
    sides = [[build_copy(_MODEL, layout, rank) for rank in range(4)] for layout in (_HERE, _THERE)]
    tables = [
        ParamTable.of({rank: copy.shards.entries for rank, copy in enumerate(copies)}) for copies in sides
    ]
    return build_realloc_plan(*tables, bucket_bytes=512, **options), *sides


def _allocate(both: tuple[Staging, Staging]) -> None:
    for staging in both:
        staging.allocate()


def _bind(plan: RankPlan, src: Copy, dst: Copy) -> BoundPlan:
    views = [copy.shards.resolve(check=False) for copy in (src, dst)]
    binder = Binder("realloc", plan, transport=LocalNetwork().transport(plan.rank), direct_receives=True)
    return binder.bind(src.shards, dst.shards, *views, allocate=_allocate)


@pytest.mark.parametrize("devices_per_node", [None, 2])
@pytest.mark.parametrize("order", ["fused", "layers", "in_place"])
def test_copies_travel_with_their_wave_and_before_anything_is_forwarded(
    order: str, devices_per_node: int | None
) -> None:
    plan, here, there = _plan(order=order, devices_per_node=devices_per_node)
    for rank, part in plan.ranks.items():
        bound = _bind(part, here[rank], there[rank])
        assert [step.hop for step in bound.steps] == sorted(step.hop for step in bound.steps)
        placed = [(step, copies) for step in bound.steps for copies in step.copies]
        assert not any(step.hop for step, _ in placed)
        num_copied = sum(len(copies.targets) for _, copies in placed) + sum(
            len(copies.targets) for copies in bound.rest
        )
        assert num_copied == len(part.copies) > 0
        waves = [copies.wave for _, copies in placed] + [copies.wave for copies in bound.rest]
        assert waves == sorted(waves)
        for (step, copies), planned in zip(
            placed, [s for s, b in zip(part.steps, bound.steps, strict=True) for _ in b.copies], strict=True
        ):
            earlier = [s.order[1] for s in part.steps if s.order < planned.order and s.order[0] == 0]
            assert all(wave <= copies.wave for wave in earlier), f"late for its wave: {step.hop}"
        assert len(bound.waves) == sum(1 for _ in part.receives) + len(placed) + len(bound.rest)


def test_copies_of_one_wave_are_spread_over_its_steps() -> None:
    plan, here, there = _plan()
    bound = _bind(plan.of(1), here[1], there[1])
    with_copies = [index for index, step in enumerate(bound.steps) if step.copies]
    assert not bound.rest
    assert with_copies[0] == 0
    assert with_copies[-1] > len(bound.steps) // 2
    num_bytes = [sum(t.nbytes for c in step.copies for t in c.targets) for step in bound.steps]
    total, largest = sum(num_bytes), max(t.nbytes for s in bound.steps for c in s.copies for t in c.targets)
    for index in range(len(num_bytes)):
        even = total * (index + 1) / len(num_bytes)
        assert abs(sum(num_bytes[: index + 1]) - even) <= largest + total / len(num_bytes)


def test_freed_storages_can_be_bound_and_stay_freed() -> None:
    plan, here, there = _plan()
    there[2].segments.free()
    bound = _bind(plan.of(2), here[2], there[2])
    assert there[2].segments.allocated_bytes == 0
    there[2].segments.allocate()
    there[2].poison()
    for step in bound.steps:
        for copies in step.copies:
            for source, target in zip(copies.sources, copies.targets, strict=True):
                target.copy_(source)
    copied = sum(piece.box.num_elements for piece in plan.of(2).copies)
    found = sum(int((~view.isnan()).sum()) for view in there[2].shards.resolve().values())
    assert found == copied


def test_a_shard_has_the_wave_of_its_last_slice() -> None:
    plan, _, there = _plan(order="layers")
    waves = shard_waves(plan.of(3))
    assert waves.keys() == {entry.shard for entry in there[3].shards.entries}
    by_layer = {
        shard.box.offset[0]: wave
        for shard, wave in waves.items()
        if shard.key == "decoder.layers.linear_qkv.weight"
    }
    assert [by_layer[layer] for layer in range(6)] == sorted(set(by_layer.values()))
    embedding = next(wave for shard, wave in waves.items() if shard.key.startswith("embedding"))
    assert embedding < min(by_layer.values())
    assert waves[Shard("decoder.final_layernorm.weight", there[3].shards.entries[-1].box)] > max(
        by_layer.values()
    )
