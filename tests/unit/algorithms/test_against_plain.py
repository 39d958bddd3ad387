"""An iteration with our advantages and objectives equals one of the plain-PyTorch reference, which shares no code.

The model is the reference's in both, so that only the algorithm is compared.
"""

from __future__ import annotations

import pytest
import torch

from megatron_real.algorithms.configs import PPOConfig
from megatron_real.algorithms.registry import find_algorithm
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from tests.e2e.plain_ppo import (
    PlainConfig,
    minibatches,
    reference_iteration,
    response_logprobs,
    response_values,
)
from tests.e2e.test_plain_ppo import SAMPLES, SHAPE, random_weights

REWARDS = [1.0, -1.0, 0.5, 9.0]
OPTIONS = {
    "gamma": 0.98,
    "lam": 0.9,
    "clip_ratio": 0.02,
    "value_clip": 0.02,
    "value_coefficient": 0.5,
    "entropy_coefficient": 0.01,
    "kl_coefficient": 0.2,
    "reward_scale": 0.5,
    "reward_bias": 0.1,
    "reward_clip": 2.0,
    "num_minibatches": 2,
    "num_epochs": 2,
    "temperature": 0.8,
}
LEARNING_RATE = 1e-2


def _scalars(found: dict) -> Batch:
    batch = Batch(
        ids=tuple(range(len(SAMPLES))),
        prompt_lengths=tuple(len(prompt) for prompt, _ in SAMPLES),
        response_lengths=tuple(len(response) for _, response in SAMPLES),
    )
    for name in ("logprobs", "ref_logprobs", "values"):
        batch.put_list(KeySpec(name=name, per=Per.RESPONSE, dtype="float32"), map(torch.tensor, found[name]))
    batch.put(KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"), torch.tensor(REWARDS))
    return batch


@pytest.mark.parametrize("whiten", [True, False])
def test_iteration_equals_the_reference(whiten: bool) -> None:
    start = {"actor": random_weights(0), "critic": random_weights(1, critic=True)}
    plain_options = {
        "actor_learning_rate": LEARNING_RATE,
        "critic_learning_rate": LEARNING_RATE,
        "clip_grad": 0.5,
    }
    config = {**OPTIONS, "whiten": whiten}
    wanted = reference_iteration(
        start["actor"],
        start["critic"],
        random_weights(2),
        SHAPE,
        SAMPLES,
        REWARDS,
        {**config, **plain_options},
    )
    ppo = find_algorithm("ppo").build(PPOConfig(**config), end_token=0)
    for role in ("actor", "critic"):
        call = ppo.graph.call(f"{role}_train")
        prepared, _ = ppo.prepare(call, 0, _scalars(wanted))
        for name in ("advantages", "returns"):
            for ours, theirs in zip(prepared.split(name), wanted[name], strict=True):
                assert ours.tolist() == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        objective = ppo.objective(call)
        weights = {name: w.clone().requires_grad_() for name, w in start[role].items()}
        decayed = [w for w in weights.values() if w.dim() > 1]
        others = [w for w in weights.values() if w.dim() == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
        )
        sums: dict[str, float] = {}
        for step, ids in enumerate(minibatches(len(SAMPLES), PlainConfig(num_minibatches=2, num_epochs=2))):
            optimizer.zero_grad(set_to_none=False)
            part = prepared.select(list(ids))
            num_tokens = sum(part.response_lengths)
            if role == "actor":
                pairs = [response_logprobs(SAMPLES[i], weights, SHAPE, ppo.temperature) for i in ids]
                outputs = {
                    "logprobs": torch.cat([p for p, _ in pairs]),
                    "entropy": torch.cat([e for _, e in pairs]),
                }
            else:
                outputs = {"values": torch.cat([response_values(SAMPLES[i], weights, SHAPE) for i in ids])}
            loss, statistics = objective.loss(outputs, part)
            (loss / num_tokens).backward()
            assert loss.item() / num_tokens == pytest.approx(wanted[role]["losses"][step], rel=1e-4, abs=1e-5)
            for name, w in weights.items():
                w.grad = torch.zeros_like(w) if w.grad is None else w.grad
                if step == 0:
                    torch.testing.assert_close(w.grad, wanted[role]["gradients"][name], rtol=1e-4, atol=1e-6)
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
            assert norm.item() == pytest.approx(wanted[role]["grad_norms"][step], rel=1e-4)
            optimizer.step()
            for name, value in statistics.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        assert sums["clip_fraction" if role == "actor" else "value_clip_fraction"] > 0, (
            "the clips must be at work"
        )
        for name, w in weights.items():
            torch.testing.assert_close(w.detach(), wanted[role]["weights"][name], rtol=1e-4, atol=1e-5)
