"""The plain-PyTorch GPT of the end-to-end reference computes what Megatron's GPTModel computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.plain_ppo import PlainShape, logits, response_logprobs
from tests.harness import run_ranks

pytestmark = pytest.mark.megatron

TOKENS = [3, 17, 0, 5, 5, 22, 9, 1, 30]
VOCAB_SIZE, PADDED = 31, 40
CASES: dict[str, dict[str, Any]] = {
    "grouped queries, untied": {"groups": 2, "tied": False, "rotary_percent": 1.0, "rotary_base": 10_000},
    "one group, tied": {"groups": 1, "tied": True, "rotary_percent": 1.0, "rotary_base": 500},
    "no groups, half rotary, biases": {
        "groups": 4,
        "tied": False,
        "rotary_percent": 0.5,
        "rotary_base": 10_000,
        "bias": True,
    },
}


def _megatron_model(case: dict[str, Any]) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=case["groups"],
        ffn_hidden_size=48,
        add_bias_linear=case.get("bias", False),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=64,
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type="rope",
        rotary_percent=case["rotary_percent"],
        rotary_base=case["rotary_base"],
    )


def _compare_with_megatron() -> dict[str, tuple[float, float, float]]:
    """Largest differences by case: logits, log-probs, gradients relative to the largest of their tensor."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    results = {}
    for name, case in CASES.items():
        model = _megatron_model(case)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1.0 + 0.2 * noise if "layernorm" in key else 0.3 * noise)
        shape = PlainShape(
            num_layers=2,
            num_attention_heads=4,
            num_query_groups=case["groups"],
            vocab_size=VOCAB_SIZE,
            rotary_base=case["rotary_base"],
            rotary_percent=case["rotary_percent"],
        )
        weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
        tokens = torch.tensor([TOKENS])
        positions = torch.arange(len(TOKENS))[None]
        mask = torch.ones(1, 1, len(TOKENS), len(TOKENS)).triu(1).bool()
        found = model(tokens, positions, mask)[0, :, :VOCAB_SIZE]
        plain = logits(TOKENS, weights, shape)
        logits_error = (found - plain).abs().max().item()

        scores = torch.log_softmax(found, dim=-1)[3:-1].gather(1, torch.tensor(TOKENS[4:])[:, None])[:, 0]
        logprobs, _ = response_logprobs((TOKENS[:4], TOKENS[4:]), weights, shape, temperature=1.0)
        factors = torch.arange(1.0, len(scores) + 1)
        (scores * factors).sum().backward()
        (logprobs * factors).sum().backward()
        errors = [
            ((p.grad - weights[key].grad).abs().max() / (p.grad.abs().max() + 1e-12)).item()
            for key, p in model.named_parameters()
        ]
        results[name] = (logits_error, (scores - logprobs).abs().max().item(), max(errors))
    parallel_state.destroy_model_parallel()
    return results


def test_equals_megatron(cpu_device: None) -> None:
    import megatron.core.models.gpt.gpt_model  # noqa: F401 (the fork inherits it)

    (results,) = run_ranks(1, _compare_with_megatron)
    assert set(results) == set(CASES)
    for name, (logits_error, logprobs_error, gradient_error) in results.items():
        assert logits_error < 1e-5, name
        assert logprobs_error < 1e-5, name
        assert gradient_error < 1e-5, name
