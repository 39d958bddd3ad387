"""Declared activations in the ledger around real passes, and training that stops at a gradient that is not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from megatron_real.backend import Head, Minibatch, Sampling
from megatron_real.dataflow import Call, CallType, Per
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, RealError
from megatron_real.hooks import forward, generation
from megatron_real.hooks.activations import decode_bytes, pass_bytes, passes_in_flight
from megatron_real.layout import Layout
from tests.harness import run_ranks
from tests.hooks.sequences import make_batch
from tests.hooks.tiny import descent, layouts, make_copy, placement, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

PARTS = ((0, 1, 2, 3), (4, 5, 6, 7))
STEP = Minibatch(microbatches=PARTS, num_tokens=40, num_sequences=8)


class _Sum:
    """The sum of the log-probs, times a factor."""

    head = Head.LOGPROBS
    per = Per.RESPONSE
    stop_above: ClassVar[dict[str, float]] = {}

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def loss(self, outputs, batch):
        return self.factor * outputs["logprobs"].sum(), {}


def _train(copy, objective=None, steps=1):
    return forward.train(copy, make_batch(8), [STEP] * steps, objective or _Sum(), 1.0)


def _booked() -> None:
    batch = make_batch(8)
    with layouts() as made:
        for text in ("d1t1p1@0-0", "d1t2p1s@0-1", "d1t1p2@0-1", "d1t1p2v2@0-1"):
            parallel, peaks = placement(made, text), {}
            for recompute in (None, "full"):
                options = {"recompute_granularity": recompute, "num_layers": 8}
                if recompute == "full":
                    options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
                ledger = MemoryLedger(name="the rank")
                copy = make_copy(parallel, tiny_role(**options), training=descent(lr=1e-3), ledger=ledger)
                if copy is None:
                    continue
                held, needed = ledger.held(), pass_bytes(copy, batch, [PARTS], training=True)
                ledger.reset_peak()
                _train(copy)
                assert needed > 0
                assert ledger.peak_bytes == sum(held.values()) + needed
                assert ledger.held() == held
                peaks[recompute] = needed
                _refused(copy, needed, lambda copy=copy: _train(copy))
                needed = pass_bytes(copy, batch, [PARTS], training=False)
                ledger.reset_peak()
                forward.infer(copy, batch, PARTS, Head.LOGPROBS, 1.0)
                assert ledger.peak_bytes == sum(held.values()) + needed
                assert ledger.held() == held
                _refused(
                    copy, needed, lambda copy=copy: forward.infer(copy, batch, PARTS, Head.LOGPROBS, 1.0)
                )
            if peaks:
                assert peaks["full"] < peaks[None]


def _refused(copy, needed, call) -> None:
    """One byte too few: refused beforehand, with the holders, and nothing has changed."""
    ledger = copy.ledger
    held = ledger.held()
    weights = [parameter.detach().clone() for chunk in copy.chunks for parameter in chunk.parameters()]
    ledger.capacity_bytes = ledger.current_bytes + needed - 1
    with pytest.raises(CapacityError, match=r"activations asks for .* Held by: .*parameters"):
        call()
    ledger.capacity_bytes = None
    assert ledger.held() == held
    after = [parameter for chunk in copy.chunks for parameter in chunk.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))


def test_passes_book_their_activations_and_are_refused_beforehand() -> None:
    run_ranks(2, _booked)


def _booked_by_generation() -> None:
    prompts = make_batch(8, responses=False)
    call = Call(name="gen", model="actor", type=CallType.GENERATE)
    sampling = Sampling(max_new_tokens=5, end_token=-1)
    with layouts() as made:
        copy = make_copy(placement(made, "d1t1p1@0-0"), tiny_role(), ledger=MemoryLedger())
        held = copy.ledger.held()
        cache = generation.kv_cache_bytes(copy.chunks[0], 8, max(prompts.prompt_lengths) + 4)
        needed = decode_bytes(copy, [(8, min(prompts.prompt_lengths), max(prompts.prompt_lengths) + 5)])

        def generate() -> None:
            generation.generate(copy, call, 0, prompts, [prompts.ids], sampling)

        copy.ledger.reset_peak()
        generate()
        assert copy.ledger.peak_bytes == sum(held.values()) + cache + needed
        assert copy.ledger.held() == held
        copy.ledger.capacity_bytes = copy.ledger.peak_bytes - 1
        with pytest.raises(CapacityError, match=r"activations asks for .*key-value cache"):
            generate()
        assert copy.ledger.held() == held


def test_generation_books_its_activations() -> None:
    run_ranks(1, _booked_by_generation)


def _kept_for_backward() -> None:
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        for dtype in (torch.float32, torch.bfloat16):
            for options in ({}, {"gated_linear_unit": False, "ffn_hidden_size": 128, "num_query_groups": 8}):
                copy = make_copy(parallel, tiny_role(dtype=dtype, **options), training=descent(lr=1e-3))
                parameters = {p.untyped_storage().data_ptr() for p in copy.chunks[0].parameters()}
                storages: dict[int, int] = {}

                def pack(tensor, storages=storages):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    return tensor

                whole = Minibatch(microbatches=(tuple(range(8)),), num_tokens=40, num_sequences=8)
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    forward.train(copy, make_batch(8), [whole], _Sum(), 1.0)
                found = sum(size for where, size in storages.items() if where not in parameters)
                declared = pass_bytes(copy, make_batch(8), [whole.microbatches], training=True)
                assert 0.5 * declared < found < 1.5 * declared, (dtype, options, found, declared)


def test_the_estimate_is_near_what_autograd_keeps() -> None:
    run_ranks(1, _kept_for_backward)


def test_passes_in_flight_are_those_of_the_schedule() -> None:
    for pp, vpp in ((2, 1), (4, 1), (2, 2), (4, 3)):
        for stage in range(pp):
            for count in (pp, 2 * pp, 5 * pp):
                communicator = SimpleNamespace(
                    pp_group=SimpleNamespace(size=lambda pp=pp: pp, rank=lambda stage=stage: stage),
                    virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                )
                _, _, warmup, remaining = get_pp_rank_microbatches(
                    count, vpp, pp, p2p_communicator=communicator
                )
                wanted = warmup + (1 if remaining else 0)
                assert passes_in_flight(Layout(pp=pp, vpp=vpp), stage, count) == wanted


def _not_finite() -> None:
    with layouts() as made:
        for dtype, clip in ((torch.float32, 0.0), (torch.bfloat16, 1.0)):
            copy = make_copy(
                placement(made, "d1t1p2@0-1"),
                tiny_role(dtype=dtype),
                training=descent(lr=1e-3, clip_grad=clip),
            )
            with copy.stamp.updating(1):
                _train(copy, steps=2)
            assert copy.stamp.version == 1
            for factor, norm in ((float("nan"), "nan"), (float("inf"), "(inf|nan)")):
                match = rf"{copy.key}: found a gradient norm of {norm} in optimizer step 1 of 2"
                with pytest.raises(RealError, match=match), copy.stamp.updating(2):
                    _train(copy, _Sum(factor), steps=2)
                assert copy.stamp.version is None


def test_a_gradient_that_is_not_finite_stops_training_on_all_ranks() -> None:
    run_ranks(2, _not_finite)


def _skipped_by_the_loss_scaler() -> None:
    with layouts() as made:
        copy = make_copy(placement(made, "d1t1p1@0-0"), tiny_role(), training=descent(lr=1e-3))
        copy.optimizer.step = lambda: (
            False,
            None,
            None,
        )  # what Megatron returns then; fp16 does not run on CPU
        with copy.stamp.updating(1):
            _train(copy)
        assert copy.stamp.version == 1


def test_a_step_that_the_loss_scaler_skips_is_legal() -> None:
    run_ranks(1, _skipped_by_the_loss_scaler)
