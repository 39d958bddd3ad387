"""HybridModel roles: they compute what GPTModel computes, under every layout, and generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_real.backend import Head, Sampling
from megatron_real.dataflow import Call, CallType
from megatron_real.errors import ConfigError, PlanError
from megatron_real.hooks import forward, generation
from megatron_real.hooks.model_builder import layout_config, require_trainable
from megatron_real.layout import Layout
from tests.harness import run_ranks
from tests.hooks.sequences import make_batch, microbatches_of, seen_by
from tests.hooks.tiny import (
    descent,
    experts,
    layouts,
    make_copy,
    placement,
    tiny_role,
    train_step,
    whole_model,
)

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

PLACEMENTS = ("d1t1p1@2-2", "d1t2p1s@0-1", "d1t1p4l3.1.0.4@0-3", "d1t2p2v2s@0-3", "d2t1p2@0-3")
CALL = Call(name="actor_gen", model="actor", type=CallType.GENERATE)


def _pattern(text: str, **changes: Any) -> dict[str, Any]:
    return {"hybrid_layer_pattern": text, "num_layers": len(text), "is_hybrid_model": True, **changes}


def _check_against_gpt() -> None:
    """An attention and an MLP layer for each of GPTModel's, with its values: the same logits, bit for bit."""
    tokens = torch.arange(24).reshape(2, 12) * 5 % 120
    positions = torch.arange(12).unsqueeze(0)
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        (gpt,) = make_copy(parallel, tiny_role()).chunks
        (hybrid,) = make_copy(parallel, tiny_role(**_pattern("*-" * 4, init_seed=99))).chunks
        values = dict(gpt.named_parameters())
        with torch.no_grad(), parallel.active():
            for name, parameter in hybrid.named_parameters():
                parts = name.replace("final_norm", "final_layernorm").split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(int(parts[2]) // 2)
                parameter.copy_(values[".".join(parts)])
            assert torch.equal(hybrid(tokens, positions, None), gpt(tokens, positions, None))


def test_attention_and_mlp_layers_are_those_of_gpt() -> None:
    run_ranks(1, _check_against_gpt)


def _losses(changes: dict[str, Any]) -> dict[str, list[float]]:
    """By placement, this rank's part of the losses of two steps of gradient descent."""
    role, found = tiny_role(**changes), {}
    tokens = torch.arange(104).reshape(8, 13) * 7 % 120
    with layouts() as made:
        alone = whole_model(make_copy(placement(made, "d1t1p1@0-0"), role))
        for text in PLACEMENTS:
            copy = make_copy(placement(made, text), role, training=descent(lr=1e7))
            assert all(torch.equal(alone[key], value) for key, value in whole_model(copy).items()), text
            if copy is not None:
                losses = [
                    train_step(copy, tokens, num_microbatches=4 if "v2" in text else 2) for _ in range(2)
                ]
                if losses[0] is not None:
                    found[text] = [float(loss) for loss in losses]
    return found


@pytest.mark.parametrize(
    "changes",
    [_pattern("*-*-**--"), _pattern("*-*E*-*E", **experts(tied_embeddings=True))],
    ids=["dense", "experts, tied"],
)
def test_losses_are_the_same_under_every_layout(changes: dict[str, Any]) -> None:
    by_placement: dict[str, list[list[float]]] = {}
    for found in run_ranks(4, _losses, changes):
        for text, losses in found.items():
            by_placement.setdefault(text, []).append(losses)
    assert by_placement.keys() == set(PLACEMENTS)
    means = {text: torch.tensor(losses).mean(dim=0) for text, losses in by_placement.items()}
    wanted = means[PLACEMENTS[0]]
    assert wanted[0] != wanted[1]
    for text, losses in means.items():
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5, msg=text)


def _check_generation(wanted: Any = None) -> Any:
    """Tokens and log-probs of one rank, or those of other layouts against them; a pass gives the same log-probs."""
    role = tiny_role(**_pattern("*-*E", **experts(vocab_size=13, padded_vocab_size=16)))
    sampling = Sampling(max_new_tokens=6, end_token=3, seed=4)
    prompts = make_batch(6, vocab_size=13, responses=False)
    with layouts() as made:
        for text in ("d1t1p1@0-0",) if wanted is None else ("d1t2p2@0-3", "d2t1p2e2@0-3"):
            parallel = placement(made, text)
            copy = make_copy(parallel, role)
            parts = microbatches_of(prompts.ids, parallel, 1)
            ids = tuple(i for part in parts for i in part)
            found = generation.generate(copy, CALL, 0, seen_by(parallel, prompts, ids), parts, sampling)
            if "tokens" not in found.data:
                continue
            if wanted is None:
                again = forward.infer(copy, found, parts, Head.LOGPROBS, sampling.temperature)
                torch.testing.assert_close(found.data["logprobs"], again, rtol=1e-5, atol=1e-5)
                return {
                    i: (t, p)
                    for i, t, p in zip(ids, found.split("tokens"), found.split("logprobs"), strict=True)
                }
            for i, tokens, logprobs in zip(ids, found.split("tokens"), found.split("logprobs"), strict=True):
                assert torch.equal(tokens, wanted[i][0]), text
                torch.testing.assert_close(logprobs, wanted[i][1], rtol=1e-5, atol=1e-5)
    return None


def test_generation() -> None:
    run_ranks(4, _check_generation, run_ranks(1, _check_generation)[0])


def test_patterns_that_cannot_be_built_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="do not divide"):
        layout_config(tiny_role(**_pattern("*-*-*-")), Layout(pp=4))
    with pytest.raises(ConfigError, match="num_layers=3; expected a symbol for each layer"):
        layout_config(tiny_role(hybrid_layer_pattern="*-*-", num_layers=3), Layout())
    with pytest.raises(
        ConfigError, match=r"found the layers G in the pattern '\*G'; .* need TransformerEngine"
    ):
        layout_config(tiny_role(**_pattern("*G")), Layout())


def test_experts_are_not_trained_over_tp_without_sp() -> None:
    with pytest.raises(PlanError, match="found tp=2 without sp; expected sp in a train call"):
        require_trainable(tiny_role(**experts()), Layout(tp=2))
    require_trainable(tiny_role(**experts()), Layout(tp=2, sp=True))
