"""Copies of a model: residence, offload and reload bit by bit, the ledger, training after weights came and went."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.optimizer import OptimizerConfig

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, ConfigError, PlanError, RealError
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.training_options import require_droppable
from tests.harness import run_ranks
from tests.hooks.tiny import descent, layouts, make_copy, placement, tiny_role, train_step

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

TOKENS = torch.randint(120, (4, 17), generator=torch.Generator().manual_seed(1))


def _adam() -> Training:
    return Training(optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0))


def _weights(copy: ModelCopy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in copy.chunks for parameter in chunk.parameters()]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _storage_bytes(copy: ModelCopy) -> int:
    return sum(
        parameter.untyped_storage().nbytes() for chunk in copy.chunks for parameter in chunk.parameters()
    )


def _check_frozen() -> None:
    with layouts() as made:
        ledger = MemoryLedger()
        copy = make_copy(placement(made, "d1t2p1@0-1"), tiny_role("ref", dtype=torch.bfloat16), ledger=ledger)
        assert copy is not None
        assert not copy.trainable
        assert copy.stamp.version == 0
        for parameter in copy.chunks[0].parameters():
            assert parameter.dtype == torch.bfloat16
            assert not parameter.requires_grad
        assert ledger.held() == {copy.parameters_owner: copy.segments.nbytes}
        weights = _weights(copy)
        for _ in range(2):
            copy.offload("host")
            copy.offload("host")  # twice is once
            assert not copy.resident
            assert _storage_bytes(copy) == 0
            assert ledger.current_bytes == 0
            assert copy.stamp.version == 0  # the values are kept
            copy.reload()
            copy.reload()
            assert copy.resident
            assert _same(weights, _weights(copy))
        # Other weights arrive: the next offload must not reuse the host's copy of the old ones.
        for parameter in copy.chunks[0].parameters():
            parameter.data.add_(1)
        copy.weights_arrived(1)
        changed = _weights(copy)
        copy.offload("host")
        copy.reload()
        assert _same(changed, _weights(copy))
        assert not _same(changed, weights)

        copy.free()
        assert _storage_bytes(copy) == 0
        assert ledger.current_bytes == 0
        assert copy.stamp.version is None
        with pytest.raises(RealError, match="must be reallocated"):
            copy.reload()
        with pytest.raises(RealError, match="no weights to offload"):
            copy.offload("host")
        copy.allocate()
        assert copy.resident
        assert copy.stamp.version is None
        with pytest.raises(PlanError, match="not trained"):
            copy.offload("main_params")
        with pytest.raises(PlanError, match="'host' or 'main_params'"):
            copy.offload("disk")
        copy.close()
        assert ledger.held() == {}


def test_frozen_copy() -> None:
    run_ranks(2, _check_frozen)


def _check_dropping() -> None:
    with layouts() as made:
        for text in ("d2t2p1@0-3", "d2t1p2v2@0-3", "d4t1p1@0-3"):
            parallel, ledger = placement(made, text), MemoryLedger()
            role = tiny_role(dtype=torch.bfloat16, tied_embeddings=True)
            kept = make_copy(parallel, role, training=_adam())
            dropped = make_copy(parallel, role, training=_adam(), ledger=ledger)
            assert kept is not None
            assert dropped is not None
            for step in range(2):
                dropped.offload("main_params")
                assert _storage_bytes(dropped) == 0
                assert dropped.parameters_owner not in ledger.held()
                dropped.segments.allocate()
                for segment in dropped.segments.segments:  # what comes back must not be what was lying around
                    segment.flat.fill_(float("nan"))
                dropped.segments.free()
                dropped.reload()
                assert ledger.held()[dropped.parameters_owner] == dropped.segments.nbytes
                assert _same(_weights(kept), _weights(dropped)), (text, step)
                microbatches = 1 if text.startswith("d4") else 2
                losses = [train_step(copy, TOKENS, microbatches) for copy in (kept, dropped)]
                assert losses[0] is None or torch.equal(losses[0], losses[1]), (text, step)
            assert _same(_weights(kept), _weights(dropped)), text
            assert not _same(_weights(kept), _weights(make_copy(parallel, role)))


def test_dropped_weights_come_back_bit_equal_and_training_goes_on() -> None:
    run_ranks(4, _check_dropping)


def _check_arrival() -> None:
    """Weights that arrive in a trained copy reach the main parameters, in bf16 and fp32."""
    with layouts() as made:
        for dtype in (torch.bfloat16, torch.float32):
            copy = make_copy(placement(made, "d2t1p1@0-1"), tiny_role(dtype=dtype), training=descent(lr=0.0))
            assert copy is not None
            for parameter in copy.chunks[0].parameters():
                parameter.data.mul_(-0.5)
            copy.weights_arrived(5)
            arrived = _weights(copy)
            train_step(copy, TOKENS)  # with learning rate 0: writes the main parameters into the weights
            assert _same(arrived, _weights(copy)), dtype
            assert copy.stamp.version == 5
            with pytest.raises(PlanError, match="a release of a trained copy"):
                copy.free()
            copy.offload("host")
            assert _storage_bytes(copy) == 0
            copy.reload()
            assert _same(arrived, _weights(copy))


def test_weights_that_arrive_are_what_training_starts_from() -> None:
    run_ranks(2, _check_arrival)


def _check_refusals() -> None:
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        with pytest.raises(ConfigError, match="'adam'"):
            make_copy(
                parallel, tiny_role(), training=Training(optimizer=OptimizerConfig(optimizer="sgd", lr=1.0))
            )
        copy = make_copy(parallel, tiny_role(), training=_adam())
        assert copy is not None
        with pytest.raises(PlanError, match=r"fp32 parameters.*drop_trained_weights"):
            copy.offload("main_params")
        assert copy.resident
        copy = make_copy(parallel, tiny_role(dtype=torch.bfloat16), training=_adam())
        assert copy is not None
        copy.chunks[0].decoder.final_layernorm.weight.requires_grad_(False)
        with pytest.raises(PlanError, match="some parameters are frozen"):
            copy.offload("main_params")


@pytest.mark.parametrize(
    ("dtype", "optimizer", "ddp", "reason"),
    [
        (torch.float32, {}, {}, "fp32 parameters"),
        (torch.bfloat16, {"use_precision_aware_optimizer": True}, {}, "store_param_remainders"),
        (torch.bfloat16, {}, {"fp8_param_gather": True}, "fp8_param_gather is on"),
    ],
)
def test_dropping_is_refused_before_anything_is_built(
    dtype: torch.dtype, optimizer: dict[str, bool], ddp: dict[str, bool], reason: str
) -> None:
    training = _adam()
    vars(training.optimizer).update(optimizer)  # Megatron checks some of these against installed packages
    vars(training.ddp).update(ddp)
    with pytest.raises(PlanError, match=reason):
        require_droppable(tiny_role(dtype=dtype), training)
    require_droppable(tiny_role(dtype=torch.bfloat16), _adam())


def test_dropping_is_refused_where_it_would_be_wrong() -> None:
    run_ranks(1, _check_refusals)


def _check_self_test() -> None:
    with layouts() as made:
        copy = make_copy(placement(made, "d1t1p1@0-0"), tiny_role(dtype=torch.bfloat16), training=_adam())
        assert copy is not None
        copy.offload("main_params")
        copy._optimizers()[0].shard_fp32_from_float16_groups[0][0].data.mul_(2)
        with pytest.raises(RealError, match="differ from those that were dropped"):
            copy.reload()
        assert copy.stamp.version is None


def test_first_rebuild_is_checked_against_the_dropped_weights() -> None:
    run_ranks(1, _check_self_test)


def _check_ledger() -> None:
    with layouts() as made:
        parallel, role = placement(made, "d2t1p1@0-1"), tiny_role(dtype=torch.bfloat16)
        ledger = MemoryLedger()
        copy = make_copy(parallel, role, training=_adam(), ledger=ledger)
        assert copy is not None
        train_step(copy, TOKENS)
        held = ledger.held()
        gradients = sum(b.grad_data.untyped_storage().nbytes() for ddp in copy.wrapped for b in ddp.buffers)
        state = [
            tensor
            for optimizer in copy._optimizers()
            for parameter, states in optimizer.optimizer.state.items()
            for tensor in (parameter, states["exp_avg"], states["exp_avg_sq"])
        ]
        assert held[f"{copy.key} gradients"] == gradients
        # The padding of DDP's buffers is booked too.
        measured = sum(tensor.nbytes for tensor in state)
        assert 0 <= held[f"{copy.key} optimizer state"] - measured <= 0.05 * measured + 12 * 128
        assert sum(held.values()) == ledger.current_bytes

        copy.close()
        assert ledger.held() == {}
        for capacity in (1, sum(held.values()) - 1):
            tight = MemoryLedger(capacity, name=f"rank {dist.get_rank()}")
            with pytest.raises(CapacityError, match=f"rank {dist.get_rank()}"):
                make_copy(parallel, role, training=_adam(), ledger=tight)
            assert tight.held() == {}
        with pytest.raises(CapacityError):
            make_copy(parallel, role, ledger=MemoryLedger(1))
        assert (
            make_copy(parallel, role, training=_adam(), ledger=MemoryLedger(sum(held.values()))) is not None
        )


def test_ledger_has_parameters_gradients_and_optimizer_state() -> None:
    run_ranks(2, _check_ledger)
