"""Megatron's own `swap_model_weights` as a second oracle, and what it cannot do in 0.19.

Where it is right, both fill a copy with the same bits. Where it is wrong or refuses, ours is right; a test of those
that fails says that a new Megatron does it too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.resharding import refit

from megatron_real.hooks.parallel_state import ParallelLayouts
from megatron_real.realloc_ops.execution.transports import TorchTransport
from tests.harness import run_ranks
from tests.hooks.moving import Holding, check_arrived, check_move, hold, poison, transport
from tests.hooks.tiny import experts, latent_role, layouts, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

RIGHT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense": ({}, ("d1t2p2@0-3", "d1t4p1@0-3", "d4t1p1@0-3", "d2t1p2l1.3@0-3", "d2t2p1@0-3")),
    "tied": ({"tied_embeddings": True}, ("d1t2p2@0-3", "d4t1p1@0-3", "d1t1p4@0-3")),
    "windows": ({"add_qkv_bias": True}, ("d1t2p1@0-1", "d1t1p2@2-3", "d2t1p1@2-3")),
    "latent attention": ({"multi_latent_attention": True}, ("d1t2p2@0-3", "d2t2p1@0-3", "d1t4p1@0-3")),
    "experts, ep as it was": (experts(), ("d2t1p2e2@0-3", "d4t1p1e2@0-3")),
}


def _megatron(src: Holding, dst: Holding, backend: str) -> None:
    """Megatron's transfer. Collective over WORLD."""
    refit.swap_model_weights(list(src.chunks) or None, list(dst.chunks) or None, refit_method=backend)


def _check_right(changes: dict[str, Any], placements: tuple[str, ...]) -> None:
    with layouts() as made:
        over = transport(made)
        role = (latent_role if changes.get("multi_latent_attention") else tiny_role)(**changes)
        held = {text: hold(made, text, role) for text in placements}
        for number, (source, src) in enumerate(held.items()):
            for target, dst in held.items():
                if source != target:
                    where = f"{source} -> {target}"
                    check_move(src, dst, over, f"ours, {where}")
                    poison(dst)
                    # A rank that holds one side cannot tell by its key that the other is new: the rest waits.
                    refit.clear_plan_cache()
                    _megatron(src, dst, ("gloo", "nccl")[number % 2])
                    check_arrived(dst, f"Megatron's, {where}", src)
        refit.clear_all_caches()
        made.groups.release(range(4), purpose="realloc")


@pytest.mark.parametrize("name", RIGHT)
def test_megatron_moves_the_same_bits(name: str) -> None:
    run_ranks(4, _check_right, *RIGHT[name])


def _ours_is_right(made: ParallelLayouts, src: Holding, dst: Holding) -> TorchTransport:
    over = transport(made)
    check_move(src, dst, over, "ours")
    made.groups.release(range(dist.get_world_size()), purpose="realloc")
    return over


def _outcome(src: Holding, dst: Holding) -> str:
    """Of Megatron's transfer, which comes last: a rank that it leaves waiting fails when another has gone."""
    poison(dst)
    try:
        _megatron(src, dst, "nccl")
    except Exception as error:
        return f"raises {type(error).__name__}"
    try:
        check_arrived(dst, "Megatron's", src)
    except AssertionError:
        return "wrong"
    return "right"


WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # source, destination, model, what Megatron does on one rank at least
    "interleaved source": ("d1t1p2v2@0-1", "d1t2p1@0-1", {}, "raises"),
    "interleaved destination": ("d2t1p1@0-1", "d1t1p2v2@0-1", {}, "wrong"),
    "experts spread": ("d2t1p1@0-1", "d2t1p1e2@0-1", experts(), "wrong"),
    "experts gathered": ("d2t1p1e2@0-1", "d2t1p1@0-1", experts(), "raises"),
}


def _check_wrong(source: str, target: str, changes: dict[str, Any]) -> str:
    role = tiny_role(**changes)
    made = layouts().__enter__()  # not closed: the ranks are no longer in step after Megatron failed
    src, dst = hold(made, source, role), hold(made, target, role)
    _ours_is_right(made, src, dst)
    return _outcome(src, dst)


@pytest.mark.parametrize("name", WRONG)
def test_where_megatron_is_wrong_ours_is_right(name: str) -> None:
    source, target, changes, expected = WRONG[name]
    outcomes = run_ranks(2, _check_wrong, source, target, changes, group_timeout_s=20)
    assert any(found.startswith(expected) for found in outcomes), f"Megatron's outcomes changed: {outcomes}"


def _check_two_models() -> str:
    """Megatron keys its plans by sizes only: the second model gets the first one's."""
    made = layouts().__enter__()
    shallow, deep = tiny_role("critic", num_layers=2), tiny_role("actor")
    pairs = [
        tuple(hold(made, text, role) for text in ("d1t2p1@0-1", "d2t1p1@0-1")) for role in (shallow, deep)
    ]
    for src, dst in pairs:
        _ours_is_right(made, src, dst)
    first = _outcome(*pairs[0])
    assert first == "right"
    return _outcome(*pairs[1])


def test_two_models_of_equal_layout() -> None:
    outcomes = run_ranks(2, _check_two_models, group_timeout_s=20)
    assert any(found != "right" for found in outcomes), f"Megatron's outcomes changed: {outcomes}"


def _check_padding() -> str:
    made = layouts().__enter__()
    real_rows = {"embedding.word_embeddings.weight": 120, "output_layer.weight": 120}
    src = hold(made, "d1t2p1@0-1", tiny_role(padded_vocab_size=128), real_rows=real_rows)
    dst = hold(made, "d2t1p1@0-1", tiny_role(padded_vocab_size=256), real_rows=real_rows)
    _ours_is_right(made, src, dst)
    return _outcome(src, dst)


def test_another_padded_vocabulary() -> None:
    outcomes = run_ranks(2, _check_padding, group_timeout_s=20)
    assert any(found.startswith("raises") for found in outcomes), f"Megatron's outcomes changed: {outcomes}"
