"""Trained copies that move: state bit for bit against Megatron's own model-space state, and training that goes on."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import PeerError, PlanError
from megatron_real.hooks import checkpoint
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.parallel_state import ParallelLayouts
from megatron_real.hooks.training_options import require_movable
from megatron_real.hooks.training_state import move_training
from megatron_real.hooks.training_tensors import flat_boxes
from megatron_real.layout import parse_placement
from megatron_real.plan_search.costs.training_moves import TrainingMoveCost, training_move
from megatron_real.plan_search.models import ModelSpec
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.shards import Box
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.harness import RankFailed, run_ranks
from tests.hooks.tiny import layouts, make_copy, placement, tiny_role, train_step, whole_model
from tests.unit.plan_search.fake_costs import FakeCosts

megatron = pytest.mark.megatron
ranks = pytest.mark.dist
pytestmark = [megatron, ranks]

BATCHES = torch.randint(120, (6, 8, 17), generator=torch.Generator().manual_seed(1))
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
BF16 = {"dtype": torch.bfloat16}


class Move(NamedTuple):
    source: str
    target: str
    model: Mapping[str, Any] = MappingProxyType({})
    lr: float = 1e-2


MOVES = {
    "d2t2 -> t2p2": Move("d2t2p1@0-3", "d1t2p2@0-3", BF16),
    "d4 -> t4, fp32": Move("d4t1p1@0-3", "d1t4p1@0-3"),
    "t2p2 -> d2 on some of its ranks": Move("d1t2p2@0-3", "d2t1p1@1-2", BF16),
    "disjoint windows": Move("d1t2p1@0-1", "d2t1p1@2-3", BF16),
    "interleaved, uneven stages": Move("d2t1p2v2@0-3", "d2t1p2l1.3@0-3", BF16),
    "tied embeddings": Move("d2t1p2@0-3", "d1t2p1@0-1", {**BF16, "tied_embeddings": True}),
    "to tied embeddings": Move("d4t1p1@0-3", "d2t1p2@0-3", {"tied_embeddings": True}),
    "value head": Move("d2t1p1@2-3", "d2t2p1@0-3", {"scalar_head": True}),
    "experts 1 -> 2": Move("d2t1p1@0-1", "d4t1p1e2@0-3", {**BF16, **EXPERTS}),
    "experts 4 -> 2": Move("d4t1p1e4@0-3", "d2t1p2e2@0-3", EXPERTS),
    "learning rate 0": Move("d2t2p1@0-3", "d1t2p2@0-3", BF16, lr=0.0),
}


def _adam(lr: float = 1e-2, **options: Any) -> Training:
    return Training(
        optimizer=OptimizerConfig(
            optimizer="adam", lr=lr, min_lr=lr / 10, clip_grad=1.0, weight_decay=0.1, **options
        )
    )


def _build(made: ParallelLayouts, text: str, role: RoleModel, lr: float, **options: Any) -> ModelCopy | None:
    copy = make_copy(placement(made, text), role, training=_adam(lr), **options)
    if copy is not None and lr:
        copy.scheduler = OptimizerParamScheduler(
            copy.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=lr / 10,
            lr_warmup_steps=2,
            lr_decay_steps=8,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
    return copy


def _train(copy: ModelCopy | None, steps: range) -> list[float]:
    """The losses, means over the mesh; the same on every rank of the world. Collective over WORLD."""
    found = []
    for step in steps:
        loss = None
        if copy is not None:
            loss = train_step(copy, BATCHES[step])
            if copy.scheduler is not None:
                copy.scheduler.step(1)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if loss is None else float(loss))
        told = [value for value in everyone if value is not None]
        found.append(sum(told) / len(told))
    return found


def _state(copy: ModelCopy | None) -> dict[str, torch.Tensor]:
    """Whole tensors of the optimizer's state as Megatron's checkpoints describe it. Collective over WORLD."""
    boxes = []
    if copy is not None:
        metadata = {
            "dp_cp_group": copy.parallel.pg_collection.dp_cp,
            "singleton_local_shards": False,
            "distrib_optim_sharding_type": "fully_reshardable",
        }
        with copy.parallel.active():
            for part in copy.optimizer.chained_optimizers:
                model = {
                    str(index): chunk.sharded_state_dict(metadata=metadata)
                    for index, chunk in enumerate(copy.chunks)
                }
                state = part.sharded_param_state_fully_reshardable(model, metadata=metadata)
                apply_factories(state)
                boxes += [
                    (tensor.key, tensor.global_offset, tensor.global_shape, _with_axes(tensor))
                    for tensor in nested_values(state)
                    if isinstance(tensor, ShardedTensor)
                ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, boxes)
    whole: dict[str, torch.Tensor] = {}
    for key, offset, shape, values in (box for boxes in everyone for box in boxes):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        assert target[place].isnan().all() or torch.equal(target[place], values), f"replicas of {key} differ"
        target[place] = values
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def _with_axes(tensor: ShardedTensor) -> torch.Tensor:
    return tensor.data.detach().clone().reshape((1,) * tensor.prepend_axis_num + tuple(tensor.data.shape))


def _price(move: Move, role: RoleModel) -> TrainingMoveCost:
    dtype = "float32" if role.config.params_dtype == torch.float32 else "bfloat16"
    model = ModelSpec(shape=role.shape(), param_dtype=dtype)
    return training_move(model, parse_placement(move.source), parse_placement(move.target), FakeCosts(), 4)


def _everyone(value: int) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _check_moves(moves: list[Move]) -> None:
    with layouts() as made:
        transport = TorchTransport.connect(made.groups.acquire(range(4), purpose="realloc"), timeout_s=60)
        for move in moves:
            _check_move(made, move, transport)


def _check_move(made: ParallelLayouts, move: Move, transport: TorchTransport) -> None:
    role, ledger = tiny_role(**move.model), MemoryLedger()
    stays = _build(made, move.source, role, move.lr)
    source = _build(made, move.source, role, move.lr, ledger=ledger)
    held = ledger.current_bytes
    assert _train(stays, range(3)) == _train(source, range(3))
    if source is not None:
        source.stamp.set(3)
    weights, state = whole_model(source), _state(source)
    assert sum("exp_avg_sq" in key for key in state) == len(weights)
    assert all(tensor.any() for key, tensor in state.items() if "exp_avg" in key)
    target = _build(made, move.target, role, move.lr, ledger=ledger)
    before = ledger.current_bytes
    report = move_training(source, target, transport, group=dist.group.WORLD, ledger=ledger)
    assert report.bytes_moved == report.bytes_bound
    price = _price(move, role)
    assert report.bytes_moved <= price.max_received_bytes
    assert max(_everyone(before)) == price.peak_bytes
    assert ledger.current_bytes == before - held
    assert not any(owner.startswith(str(source.key)) for owner in ledger.held()) if source else True
    assert _equal(whole_model(target), weights)
    assert _equal(_state(target), state)
    if target is not None:
        assert target.stamp.version == 3
    losses, expected = _train(target, range(3, 6)), _train(stays, range(3, 6))
    if not move.lr:
        assert _equal(whole_model(target), weights)
    tolerance = 1e-4 if role.config.params_dtype == torch.float32 else 3e-2
    assert losses == pytest.approx(expected, rel=tolerance), move
    for copy in (stays, target):
        if copy is not None:
            copy.close()


@pytest.mark.parametrize(
    "names", [list(MOVES)[:4], list(MOVES)[4:8], list(MOVES)[8:]], ids=lambda names: names[0]
)
def test_state_arrives_bit_for_bit_and_training_goes_on(names: list[str]) -> None:
    run_ranks(4, _check_moves, [MOVES[name] for name in names])


def _check_before_the_first_step() -> None:
    """There are no moments yet, and main parameters have more bits than the weights."""
    with layouts() as made:
        transport = TorchTransport.connect(made.groups.acquire(range(2), purpose="realloc"), timeout_s=60)
        role = tiny_role(dtype=torch.bfloat16)
        source, target = (_build(made, text, role, 1e-2) for text in ("d2t1p1@0-1", "d1t2p1@0-1"))
        assert source is not None
        assert target is not None
        for part in source.optimizer.chained_optimizers:
            for group in part.shard_fp32_from_float16_groups:
                for main in group:
                    main.data.mul_(1 + 2**-12)
        mains = _main_sums(source)
        move_training(source, target, transport, group=dist.group.WORLD)
        assert _main_sums(target) == pytest.approx(mains, rel=1e-12)
        assert not any(part.optimizer.state for part in target.optimizer.chained_optimizers)
        train_step(target, BATCHES[0])


def _main_sums(copy: ModelCopy) -> float:
    """Over tensor-parallel ranks norms are counted twice, on either side by another factor: without them."""
    total = torch.zeros(1, dtype=torch.float64)
    for part in copy.optimizer.chained_optimizers:
        for models, mains in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            total += sum(
                (
                    main.double().abs().sum()
                    for model, main in zip(models, mains, strict=True)
                    if model.dim() > 1
                ),
                torch.zeros(()),
            )
    dist.all_reduce(total)
    return float(total)


def test_a_copy_that_has_not_stepped_moves() -> None:
    run_ranks(2, _check_before_the_first_step)


def _check_against_checkpoint(folder: str) -> None:
    """The same state through Megatron's files, tensor by tensor of the optimizer."""
    with layouts() as made:
        transport = TorchTransport.connect(made.groups.acquire(range(4), purpose="realloc"), timeout_s=60)
        role = tiny_role(dtype=torch.bfloat16)
        source = _build(made, "d2t2p1@0-3", role, 1e-2)
        moved, loaded = (_build(made, "d1t2p2@0-3", role, 1e-2) for _ in range(2))
        assert source is not None
        assert moved is not None
        assert loaded is not None
        _train(source, range(3))
        checkpoint.save_copy(source, Path(folder), 3, Namespace(), owner=0)
        specs = gather_tables(loaded.shards.entries, dist.group.WORLD).specs
        found = checkpoint.find_checkpoint(folder, 3)
        checkpoint.load_copy(loaded, "actor", found, specs=specs, version=3, optimizer=True)
        move_training(source, moved, transport, group=dist.group.WORLD)
        for one, other in zip(
            moved.optimizer.chained_optimizers, loaded.optimizer.chained_optimizers, strict=True
        ):
            groups = (one.optimizer.param_groups, other.optimizer.param_groups)
            for mine, theirs in zip(*groups, strict=True):
                assert {**mine, "params": 0} == {**theirs, "params": 0}
                for main, expected in zip(mine["params"], theirs["params"], strict=True):
                    assert torch.equal(main, expected)
                    states = one.optimizer.state[main], other.optimizer.state[expected]
                    assert states[0].keys() == states[1].keys()
                    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert moved.scheduler.state_dict() == loaded.scheduler.state_dict()
        assert moved.scheduler.num_steps == 3
        assert _train(moved, range(3, 5)) == _train(loaded, range(3, 5))
        assert _equal(whole_model(moved), whole_model(loaded))


def test_state_is_that_of_a_checkpoint_loaded_in_the_target_layout(tmp_path: Path) -> None:
    run_ranks(4, _check_against_checkpoint, str(tmp_path))


def _check_refusals() -> None:
    with layouts() as made:
        transport = TorchTransport.connect(made.groups.acquire(range(2), purpose="realloc"), timeout_s=60)
        role = tiny_role(dtype=torch.bfloat16)
        copies = [_build(made, "d2t1p1@0-1", role, 1e-2) for _ in range(2)]
        source, target = copies
        assert source is not None
        assert target is not None
        weights = whole_model(target)
        if dist.get_rank() == 0:
            source.optimizer.chained_optimizers[0].config.use_precision_aware_optimizer = True
        with pytest.raises((PlanError, PeerError), match=r"use_precision_aware_optimizer.*--real-resume"):
            move_training(source, target, transport, group=dist.group.WORLD)
        source.optimizer.chained_optimizers[0].config.use_precision_aware_optimizer = False
        frozen = make_copy(placement(made, "d2t1p1@0-1"), role)
        with pytest.raises(PlanError, match="found a frozen copy"):
            move_training(frozen, target, transport, group=dist.group.WORLD)
        source.optimizer.chained_optimizers[0].optimizer.param_groups[0]["wd_mult"] = 0.5
        with pytest.raises(PlanError, match="the same optimizer options"):
            move_training(source, target, transport, group=dist.group.WORLD)
        assert _equal(whole_model(target), weights)


def test_what_cannot_move_is_refused_on_every_rank() -> None:
    run_ranks(2, _check_refusals)


@pytest.mark.parametrize(
    ("optimizer", "ddp", "text"),
    [
        ({"optimizer": "muon"}, {}, "'muon'"),
        ({"use_precision_aware_optimizer": True}, {}, "use_precision_aware_optimizer"),
        ({"optimizer_cpu_offload": True}, {}, "optimizer_cpu_offload"),
        ({}, {"fp8_param_gather": True}, "fp8_param_gather"),
    ],
)
def test_refused_before_anything_is_built(optimizer: dict[str, Any], ddp: dict[str, Any], text: str) -> None:
    training = _adam()
    vars(training.optimizer).update(optimizer)  # Megatron checks some of these against installed packages
    vars(training.ddp).update(ddp)
    with pytest.raises(PlanError, match=text):
        require_movable(tiny_role(), training)
    require_movable(tiny_role(), _adam())


def _check_other_model() -> None:
    with layouts() as made:
        transport = TorchTransport.connect(made.groups.acquire(range(2), purpose="realloc"), timeout_s=60)
        source = _build(made, "d2t1p1@0-1", tiny_role(), 1e-2)
        target = _build(made, "d1t2p1@0-1", tiny_role(num_layers=2), 1e-2)
        move_training(source, target, transport, group=dist.group.WORLD)


def test_another_model_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"PlanError: reallocation: 6 problems"):
        run_ranks(2, _check_other_model)


@given(st.data())
def test_a_range_is_cut_into_contiguous_boxes_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offset = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    box = Box(offset, shape)
    start = data.draw(st.integers(0, box.num_elements))
    stop = data.draw(st.integers(start, box.num_elements))
    numbers = torch.arange(box.num_elements).view(shape)
    found = [numbers[part.slices_in(box)].reshape(-1) for part in flat_boxes(box, start, stop)]
    assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape)
