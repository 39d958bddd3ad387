"""Optimizer state on the host between optimizer steps, and frozen copies that are filled from a host store."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, PlanError, RealError
from megatron_real.hooks.checkpoint import save_copy
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.training_options import require_state_offloadable
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.store_layout import nodes_of
from megatron_real.realloc_ops.storage import host_memory
from megatron_real.realloc_ops.storage.host_store import NodeStore, StoreGroup
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.harness import run_ranks
from tests.hooks.tiny import experts, layouts, make_copy, placement, tiny_role, train_step, whole_model

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

TOKENS = torch.randint(120, (4, 17), generator=torch.Generator().manual_seed(1))
_BF16 = torch.bfloat16


def _adam(**options: Any) -> Training:
    return Training(optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, **options))


def _state(copy: ModelCopy) -> list[torch.Tensor]:
    """Main parameters and moments, as Megatron's optimizers have them; scalars too."""
    found = []
    for optimizer in copy._optimizers():
        if getattr(optimizer, "is_stub_optimizer", False):
            continue
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                states = optimizer.optimizer.state.get(parameter, {})
                found += [parameter, *(states[name] for name in sorted(states))]
    return found


def _device_bytes(copy: ModelCopy) -> int:
    """Bytes of gradients, moments and main parameters; fp32 weights are their own main parameters."""
    gradients = [b.grad_data for ddp in copy.wrapped for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    weights = {p.untyped_storage()._cdata for chunk in copy.chunks for p in chunk.parameters()}
    state = [t for t in _state(copy) if t.dim() and t.untyped_storage()._cdata not in weights]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*gradients, *state))


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _weights(copy: ModelCopy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in copy.chunks for parameter in chunk.parameters()]


def _check_training() -> None:
    cases = [
        ("d2t2p1@0-3", {"dtype": _BF16}),
        ("d2t2p1@0-3", {"dtype": torch.float32}),
        ("d2t1p2v2@0-3", {"dtype": _BF16, "tied_embeddings": True}),
        ("d4t1p1e2@0-3", {"dtype": _BF16, **experts()}),
    ]
    with layouts() as made:
        for text, options in cases:
            parallel, ledger, host = placement(made, text), MemoryLedger(), MemoryLedger(kind="host")
            role = tiny_role(**options)
            kept = make_copy(parallel, role, training=_adam())
            moved = make_copy(parallel, role, training=_adam(), ledger=ledger, host_ledger=host)
            assert kept is not None
            assert moved is not None
            if "num_moe_experts" in options:
                assert len(moved._optimizers()) > 1
            held = ledger.held()
            for step in range(3):  # before the first there are no moments
                before = [tensor.detach().clone() for tensor in _state(moved)]
                on_device = _device_bytes(moved)
                for _ in range(2):  # twice is once
                    moved.offload_state()
                    assert _device_bytes(moved) == 0
                assert on_device > 0
                assert ledger.held() == {moved.parameters_owner: moved.segments.nbytes}
                saved = sum(t.nbytes for t in before if t.dim())
                if options["dtype"] == torch.float32:
                    groups = [g for part in moved._optimizers() for g in part.shard_fp32_groups]
                    saved -= sum(weights.numel() * 4 for group in groups for weights in group)
                assert saved <= host.current_bytes <= saved + 128 * len(before)
                for _ in range(2):
                    moved.reload_state()
                    assert _device_bytes(moved) == on_device
                assert _same(before, _state(moved)), (text, step)
                assert ledger.held() == held
                microbatches = 1 if text.startswith("d4") else 2
                losses = [train_step(copy, TOKENS, microbatches) for copy in (kept, moved)]
                assert losses[0] is None or torch.equal(losses[0], losses[1]), (text, step)
                assert _same(_weights(kept), _weights(moved)), (text, step)
                assert _same(_state(kept), _state(moved)), (text, step)
            moved.offload_state()
            moved.close()
            assert ledger.held() == host.held() == {}


def test_training_goes_on_bit_equal_after_the_state_was_on_the_host() -> None:
    run_ranks(4, _check_training)


def _check_with_dropped_weights() -> None:
    """Both orders of going, the one order of coming back, and the other one refused."""
    with layouts() as made:
        parallel, ledger = placement(made, "d2t1p1@0-1"), MemoryLedger()
        role = tiny_role(dtype=_BF16)
        kept = make_copy(parallel, role, training=_adam())
        moved = make_copy(parallel, role, training=_adam(), ledger=ledger)
        assert kept is not None
        assert moved is not None
        for weights_first in (True, False):
            if weights_first:
                moved.offload("main_params")
            moved.offload_state()
            moved.offload("main_params")
            assert ledger.current_bytes == 0
            with pytest.raises(
                RealError, match=r"state on the host.*rebuilding its weights.*reload_state first"
            ):
                moved.reload()
            assert not moved.resident
            moved.reload_state()
            for segment in moved.segments.segments:
                assert segment.allocated_bytes == 0
            moved.reload()
            assert _same(_weights(kept), _weights(moved))
            losses = [train_step(copy, TOKENS) for copy in (kept, moved)]
            assert torch.equal(losses[0], losses[1])
        # Weights on the host are independent of the state.
        moved.offload("host")
        moved.offload_state()
        moved.reload()
        moved.reload_state()
        losses = [train_step(copy, TOKENS) for copy in (kept, moved)]
        assert torch.equal(losses[0], losses[1])


def test_weights_and_state_leave_and_return() -> None:
    run_ranks(2, _check_with_dropped_weights)


def _check_refusals() -> None:
    with layouts() as made:
        parallel, ledger = placement(made, "d1t1p1@0-0"), MemoryLedger()
        copy = make_copy(parallel, tiny_role(dtype=_BF16), training=_adam(), ledger=ledger)
        assert copy is not None
        train_step(copy, TOKENS)
        everything = ledger.current_bytes
        copy.offload_state()
        at_home = _weights(copy)
        for touch, what in (
            (lambda: train_step(copy, TOKENS), "zero_grad_buffer, which trains it"),
            (lambda: copy.optimizer.step(), "step, which trains it"),
            (lambda: copy.optimizer.prepare_grads(), "prepare_grads, which trains it"),
            (lambda: copy.weights_arrived(7), "taking new weights"),
            (lambda: copy.require_state("moving its training"), "moving its training"),
        ):
            with pytest.raises(
                RealError, match=rf"copy actor:d1t1p1@0-0: found its optimizer state on the host.*{what}"
            ):
                touch()
        assert copy.stamp.version == 0
        assert _same(at_home, _weights(copy))

        # No room on the device: it stays on the host, and comes when there is room.
        ledger.capacity_bytes = everything - 1
        with pytest.raises(CapacityError):
            copy.reload_state()
        assert _device_bytes(copy) == 0
        assert ledger.held() == {copy.parameters_owner: copy.segments.nbytes}
        ledger.capacity_bytes = everything
        copy.reload_state()
        assert ledger.current_bytes == everything
        train_step(copy, TOKENS)

        # No room on the host: it stays on the device.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_memory, "free_host_bytes", lambda: 10)
            copy.offload_state()  # the host memory of the first time is still there
            copy.reload_state()
            copy._state.close()
            with pytest.raises(
                CapacityError, match=r"optimizer state asks for [\d,]+ bytes; found 10 bytes free"
            ):
                copy.offload_state()
        assert _device_bytes(copy) > 0
        train_step(copy, TOKENS)

        frozen = make_copy(parallel, tiny_role("ref"))
        assert frozen is not None
        for call in (frozen.offload_state, frozen.reload_state):
            with pytest.raises(PlanError, match="found no optimizer; expected the trained copy of ref"):
                call()
        inner = copy._optimizers()[0]
        inner.optimizer = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
        with pytest.raises(PlanError, match="HybridDeviceOptimizer; its state cannot rest on the host"):
            copy.offload_state()


def _check_waiting() -> None:
    """What CUDA does: `reload_state` returns while the copies are under way. Here only the order is checked."""
    with layouts() as made:
        parallel, role = placement(made, "d1t1p1@0-0"), tiny_role(dtype=_BF16)
        kept, moved = (make_copy(parallel, role, training=_adam()) for _ in range(2))
        assert kept is not None
        assert moved is not None
        waited: list[object] = []

        class Stream:
            wait_event = staticmethod(waited.append)

            def __getattr__(self, name: str) -> Any:
                return lambda *_: None

        for use in (
            lambda: train_step(moved, TOKENS),
            lambda: moved.require_state("a look"),
            moved.offload_state,
        ):
            moved.offload_state()
            moved.reload_state()
            moved._state._arrival = arrival = object()
            moved._state._step_when_arrived()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
                use()
            assert waited.pop() is arrival
            assert not waited
            assert moved._state.away or "step" not in vars(moved.optimizer)
        moved.reload_state()
        train_step(kept, TOKENS)
        assert _same(_weights(kept), _weights(moved))
        assert torch.equal(train_step(kept, TOKENS), train_step(moved, TOKENS))


def test_whoever_needs_the_state_waits_for_a_reload_under_way() -> None:
    run_ranks(1, _check_waiting)


def test_what_needs_the_state_is_refused_by_name() -> None:
    run_ranks(1, _check_refusals)


@pytest.mark.parametrize(
    ("optimizer", "ddp", "reason"),
    [
        ({"optimizer_cpu_offload": True}, {}, "optimizer_cpu_offload keeps"),
        ({}, {"nccl_ub": True}, "nccl_ub is on"),
        ({}, {"reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf_for_mxfp8_param_ag is on"),
    ],
)
def test_state_that_must_stay_is_refused_before_anything_is_built(
    optimizer: dict[str, bool], ddp: dict[str, bool], reason: str
) -> None:
    training = _adam()
    vars(training.optimizer).update(optimizer)
    vars(training.ddp).update(ddp)
    with pytest.raises(PlanError, match=f"actor: its optimizer state cannot rest on the host: {reason}"):
        require_state_offloadable(tiny_role(), training)
    require_state_offloadable(tiny_role(), _adam())


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.distcp"))}


def _check_saving(folder: str) -> None:
    with layouts() as made:
        copy = make_copy(placement(made, "d2t1p1@0-1"), tiny_role(dtype=_BF16), training=_adam())
        assert copy is not None
        train_step(copy, TOKENS)
        save_copy(copy, Path(folder, "resident"), 1, Namespace(), owner=0)
        copy.offload_state()
        save_copy(copy, Path(folder, "away"), 1, Namespace(), owner=0)
        assert _device_bytes(copy) == 0
        if dist.get_rank() == 0:
            found = [_files(Path(folder, name)) for name in ("resident", "away")]
            assert found[0]
            assert found[0] == found[1]
        copy.reload_state()
        train_step(copy, TOKENS)


def test_a_checkpoint_has_the_state_wherever_it_rests(tmp_path: Path) -> None:
    run_ranks(2, _check_saving, str(tmp_path))


def _check_store() -> None:
    """Four frozen models in stores: any layout is filled, and the host has each once."""
    with layouts() as made:
        groups = [dist.new_group(backend="gloo") for _ in range(2)]
        members = StoreGroup(
            group=groups[0], transport=TorchTransport.connect(groups[1]), nodes=nodes_of(range(4), 4)
        )
        host, copies, store_bytes = MemoryLedger(kind="host"), [], 0
        for name in ("ref", "reward", "judge", "teacher"):
            role = tiny_role(
                name, dtype=_BF16, scalar_head=name != "ref", **(experts() if name == "judge" else {})
            )
            source = make_copy(placement(made, "d2t2p1@0-3"), role, host_ledger=host)
            assert source is not None
            whole = whole_model(source)
            table = gather_tables(source.shards.entries, members.group)
            store = NodeStore.create(table, members, name=f"store of {name}", ledger=host)
            store.fill(source.shards, table=table, version=0)
            source.close()
            ledger = MemoryLedger()
            text = "d4t1p1e2@0-3" if name == "judge" else "d1t2p2@0-3"
            copy = make_copy(placement(made, text), role, ledger=ledger, host_ledger=host)
            assert copy is not None
            copy.offload("host")
            copy.reload()
            private_bytes = host.held()[copy.parameters_owner]
            assert private_bytes == copy.segments.nbytes
            copy.free()
            report = copy.load_from_store(store, 0)
            assert report.bytes_copied > 0
            assert copy.stamp.version == 0
            found = whole_model(copy)
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[key], whole[key]) for key in whole)
            assert copy.parameters_owner not in host.held()  # not twice
            weights = _weights(copy)
            for to in ("host", "node"):
                copy.offload(to)
                assert ledger.current_bytes == 0
                assert copy.parameters_owner not in host.held()
                copy.reload()
                assert _same(weights, _weights(copy))
            copy.offload("host")
            copies.append((copy, store))
            store_bytes += store.host_bytes
        held = host.current_bytes
        assert held == (store_bytes if dist.get_rank() == 0 else 0)
        copy, store = copies[-1]
        copy.reload()
        copy.weights_arrived(1)  # others than the store's: these are kept
        with pytest.raises(RealError, match="found version 0; expected version 1"):
            copy.offload("node")
        copy.offload("host")
        assert host.current_bytes == held + copy.segments.nbytes
        with pytest.raises(RealError, match="found version 0; expected version 1"):
            copy.load_from_store(store, 1)
        assert copy.stamp.version == 1
        copy.reload()
        trained = make_copy(placement(made, "d4t1p1@0-3"), tiny_role(), training=_adam())
        assert trained is not None
        with pytest.raises(PlanError, match="found a trained copy"):
            trained.load_from_store(store, 0)


def test_frozen_models_of_a_node_store_are_on_the_host_once() -> None:
    run_ranks(4, _check_store)
