"""Models that move toward trained ones: shapes that must be equal, steps that a dtype rounds away, what is staged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from megatron_real.algorithms.graphs import dpo_graph
from megatron_real.errors import ConfigError
from megatron_real.plan import Plan
from megatron_real.program import Program, compile_program
from megatron_real.realloc_ops.execution.packing import mix_tensors
from tests.harness import run_ranks

pytestmark = pytest.mark.megatron

TP, PP = {"ranks": [0, 2], "layout": {"tp": 2}}, {"ranks": [0, 2], "layout": {"pp": 2}}


def program(share: float, places: Mapping[str, Any], num_nodes: int = 1) -> Program:
    cluster = {"num_nodes": num_nodes, "devices_per_node": 2 // num_nodes}
    text = json.dumps({"algorithm": "dpo", "cluster": cluster, "calls": dict(places)})
    return compile_program(dpo_graph(reference_ema=share), Plan.loads(text))


def test_a_model_moves_toward_one_of_its_shape_only(cpu_device: None) -> None:
    from megatron_real.hooks.copy_model import check_copies
    from tests.hooks.tiny import tiny_role

    moving = program(0.1, {"ref_inf": TP, "actor_train": PP})
    actor = tiny_role()
    check_copies(moving, {"actor": actor, "ref": tiny_role("ref")})
    with pytest.raises(ConfigError) as caught:
        check_copies(moving, {"actor": actor, "ref": tiny_role("ref", num_layers=2, padded_vocab_size=256)})
    assert "ref: it cannot move toward actor" in str(caught.value)
    assert "num_layers: found 2; expected 4, as actor has" in str(caught.value)
    assert "padded_vocab_size: found 256; expected 128" in str(caught.value)
    check_copies(
        program(0.0, {"ref_inf": TP, "actor_train": PP}),
        {"actor": actor, "ref": tiny_role("ref", num_layers=2)},
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_that_are_rounded_away_are_warned_of(cpu_device: None, dtype: torch.dtype) -> None:
    from megatron_real.hooks.copy_model import rounding_warning
    from tests.hooks.tiny import tiny_role

    share = 0.01
    warning = rounding_warning(dpo_graph(reference_ema=share), tiny_role("ref", dtype=dtype))
    lost = {torch.bfloat16: 0.1953, torch.float16: 0.0244}[dtype]
    assert warning is not None
    assert f"differs by less than {lost:.2%} of its value stays" in warning
    old = torch.linspace(1, 4, 999).to(dtype)
    for factor, moves in ((0.99, False), (4.04, True)):
        found = old.clone()
        mix_tensors([old.double() * (1 + factor * lost)], [found], share)
        assert (found != old).all() if moves else torch.equal(found, old)
    for silent in (
        rounding_warning(dpo_graph(reference_ema=share), tiny_role("ref")),
        rounding_warning(dpo_graph(reference_ema=share), tiny_role("actor", dtype=dtype)),
        rounding_warning(dpo_graph(reference_ema=1.0), tiny_role("ref", dtype=dtype)),
        rounding_warning(dpo_graph(), tiny_role("ref", dtype=dtype)),
    ):
        assert silent is None


def mixing() -> dict[str, Any]:
    """On a rank: a bf16 actor over pipeline stages, an fp32 reference over tensor parts, in two nodes."""
    from megatron.core.optimizer import OptimizerConfig

    from megatron_real.errors import RealError
    from megatron_real.hooks.megatron_backend import MegatronBackend, RoleSetup
    from megatron_real.process_groups import ProcessGroups
    from tests.hooks.tiny import tiny_role

    moving = program(0.25, {"ref_inf": TP, "actor_train": PP}, num_nodes=2)
    actor, reference = moving.home("actor"), moving.home("ref")
    backend = MegatronBackend(moving, groups=ProcessGroups(), bucket_bytes=4096, verify="checksum")
    roles = {"actor": tiny_role(dtype=torch.bfloat16, init_seed=8), "ref": tiny_role("ref")}
    for name, role in roles.items():
        optimizer = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True) if name == "actor" else None
        backend.add_model(name, RoleSetup(model=role, args=None, optimizer=optimizer))  # type: ignore[arg-type]
    weights = {"actor": shards(backend, actor), "before": shards(backend, reference)}
    backend.copy(reference).offload("host")
    backend.copy(reference).reload()
    refused = []
    for old, new in ((1, 0), (0, 1)):
        with pytest.raises(RealError) as caught:
            backend.mix(actor, reference, 0.25, old=old, new=new)
        refused.append(str(caught.value))
    report = backend.mix(actor, reference, 0.25, old=0, new=0)
    backend.copy(reference).offload("host")  # what is there of the same version is old
    backend.copy(reference).reload()
    weights["after"] = shards(backend, reference)
    held = {owner: size for owner, size in backend.ledger.held().items() if "staging" in owner and size}
    return {"weights": weights, "report": report, "refused": refused, "held": held}


def shards(backend: Any, key: Any) -> list[tuple[str, Any, torch.Tensor]]:
    return [
        (shard.key, shard.box, view.detach().clone())
        for shard, view in backend.copy(key).shards.resolve().items()
    ]


def whole(pieces: Sequence[tuple[str, Any, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors by key."""
    tensors: dict[str, torch.Tensor] = {}
    for key, box, value in pieces:
        ends = [offset + size for offset, size in zip(box.offset, box.shape, strict=True)]
        former = tensors.get(key, torch.empty(0, *ends[1:]))
        shape = [max(pair) for pair in zip(former.shape, ends, strict=True)]
        tensors[key] = torch.full(shape, torch.nan)
        tensors[key][tuple(slice(n) for n in former.shape)] = former
        tensors[key][_inside(box)] = value.float().view(box.shape)
    return tensors


def _inside(box: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def test_a_pair_is_mixed_bucket_by_bucket(cpu_device: None) -> None:
    """Every element is the formula's in fp32; at most two buckets are staged, and versions are held."""
    results = run_ranks(2, mixing)
    actor = whole([piece for result in results for piece in result["weights"]["actor"]])
    compared = 0
    for result in results:
        before, after = result["weights"]["before"], result["weights"]["after"]
        for (key, box, old), (_, _, found) in zip(before, after, strict=True):
            expected = old.view(box.shape) * 0.75 + actor[key][_inside(box)] * 0.25
            assert torch.equal(found.view(box.shape), expected), key
            compared += found.numel()
        assert result["report"]["staging_peak_bytes"] <= 2 * 2 * 4096
        assert result["held"] == {}
        assert [("version 0" in text, "version 1" in text) for text in result["refused"]] == [
            (True, True)
        ] * 2
    assert compared > 10_000
