"""PPO: options, advantages and returns by hand, what its metrics mean. What all policies share: test_policies.py."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch

from megatron_real.algorithms.configs import PPOConfig
from megatron_real.algorithms.losses import PolicyObjective, ValueObjective
from megatron_real.algorithms.registry import find_algorithm
from megatron_real.backend import Algorithm
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import ConfigError, RealError

LENGTHS = (4, 1, 7, 2, 5, 3)


def _ppo(config: PPOConfig) -> Algorithm:
    return find_algorithm("ppo").build(config, end_token=0)


def _scalars(seed: int = 0, *, reference: bool = True, **replace: list[float]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(
        ids=tuple(range(len(LENGTHS))), prompt_lengths=(3,) * len(LENGTHS), response_lengths=LENGTHS
    )
    names = ["logprobs", *(["ref_logprobs"] if reference else []), "values"]
    for name in names:
        value = torch.randn(sum(LENGTHS), generator=generator)
        batch.put(
            KeySpec(name=name, per=Per.RESPONSE, dtype="float32"),
            -value.abs() if "logprobs" in name else value,
        )
    rewards = torch.randn(len(LENGTHS), generator=generator) * 3
    batch.put(KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"), rewards)
    for name, value in replace.items():
        batch.data[name] = torch.tensor(value)
    return batch


def _prepare(config: PPOConfig, scalars: Batch, call: str = "actor_train") -> tuple[Batch, dict[str, float]]:
    ppo = _ppo(config)
    return ppo.prepare(ppo.graph.call(call), 0, scalars)


def test_bad_options_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig(gamma=1.5, lam=-0.1, clip_ratio=0.0, num_epochs=0, kl_estimator="k4", reward_clip=-1.0)
    text = str(caught.value)
    for part in ("gamma: found 1.5", "lam", "clip_ratio", "num_epochs", "'k4'", "k1, k2, k3", "reward_clip"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": 0.0}, "temperature: found 0.0; expected a number above 0"),
        ({"gamma": math.nan}, "gamma: found nan"),
        ({"reward_bias": math.inf}, "reward_bias: found inf"),
        ({"reward_scale": 0.0}, "reward_scale"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"value_clip": 0.0}, "value_clip"),
        ({"clip_ratio_high": 0.0}, "clip_ratio_high"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"reference": False}, "no reference model"),
        ({"kl_adaptive": True, "kl_coefficient": 0.0}, "adapted by a factor"),
        ({"kl_target": -1.0}, "kl_target"),
    ],
)
def test_bad_option(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PPOConfig(**options)


def test_none_switches_clips_off() -> None:
    PPOConfig(value_clip=None, clip_ratio_high=None, reward_clip=None)


def test_objectives() -> None:
    ppo = _ppo(PPOConfig(clip_ratio=0.1, entropy_coefficient=0.01, value_clip=0.4, value_coefficient=2.0))
    actor, critic = (ppo.objective(ppo.graph.call(name)) for name in ("actor_train", "critic_train"))
    assert actor == PolicyObjective(clip_low=0.1, clip_high=0.1, entropy_coefficient=0.01)
    assert critic == ValueObjective(clip=0.4, coefficient=2.0)
    ppo = _ppo(PPOConfig(clip_ratio_high=0.3))
    assert ppo.objective(ppo.graph.call("actor_train")) == PolicyObjective(clip_low=0.2, clip_high=0.3)


def test_prepare_by_hand() -> None:
    scalars = Batch(ids=(0, 1), prompt_lengths=(1, 1), response_lengths=(2, 1))
    for name, value in (
        ("logprobs", [-1.0, -2.0, -3.0]),
        ("ref_logprobs", [-1.5, -1.0, -3.0]),
        ("values", [1.0, 2.0, 4.0]),
    ):
        scalars.put(KeySpec(name=name, per=Per.RESPONSE, dtype="float32"), torch.tensor(value))
    scalars.put(KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"), torch.tensor([10.0, -3.0]))
    config = PPOConfig(
        gamma=1.0, lam=0.5, kl_coefficient=0.5, whiten=False, reward_clip=2.5, reward_scale=0.5
    )
    prepared, metrics = _prepare(config, scalars)
    # Scores: 10 * 0.5 clipped to 2.5, and -1.5. KL: 0.5, -1, 0. Token rewards: -0.25, 0.5 + 2.5, -1.5.
    # Deltas: -0.25 + 2 - 1, 3 - 2, -1.5 - 4. Advantages: 0.75 + 0.5 * 1, 1, -5.5.
    assert prepared.data["advantages"].tolist() == [1.25, 1.0, -5.5]
    assert prepared.data["returns"].tolist() == [2.25, 3.0, -1.5]
    assert prepared.data["advantages"].dtype == prepared.data["returns"].dtype == torch.float32
    expected = {
        "reward": 3.5,
        "reward_std": 6.5,
        "kl": -0.5 / 3,
        "kl_per_sequence": -0.25,
        "kl_coefficient": 0.5,
    }
    expected |= {"response_length": 1.5, "response_at_limit": 0.0, "advantage": -3.25 / 3, "return": 1.25}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_reward_bias_comes_before_scale_and_clip() -> None:
    config = PPOConfig(
        kl_coefficient=0.0,
        whiten=False,
        gamma=1.0,
        lam=1.0,
        reward_bias=1.0,
        reward_scale=2.0,
        reward_clip=3.0,
    )
    scalars = _scalars(rewards=[0.0, 1.0, 2.0, 3.0, -5.0, 2.25])
    prepared, _ = _prepare(config, scalars)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    assert prepared.data["returns"][last].tolist() == pytest.approx(
        [-2.0, 0.0, 2.0, 3.0, -3.0, 2.5], abs=1e-6
    )


def test_prepare_whitens_over_the_batch() -> None:
    raw, metrics = _prepare(PPOConfig(whiten=False), _scalars())
    white, same = _prepare(PPOConfig(), _scalars())
    advantages = raw.data["advantages"].double()
    expected = (advantages - advantages.mean()) / advantages.std(unbiased=False)
    torch.testing.assert_close(white.data["advantages"].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(white.data["returns"], raw.data["returns"]), (
        "returns come from advantages before whitening"
    )
    assert metrics == same


def test_prepare_keeps_what_it_was_given() -> None:
    scalars = _scalars()
    before = {name: value.clone() for name, value in scalars.data.items()}
    prepared, _ = _prepare(PPOConfig(), scalars)
    assert set(scalars.data) == set(before)
    for name, value in before.items():
        assert torch.equal(scalars.data[name], value)
        assert torch.equal(prepared.data[name], value)
    assert set(prepared.data) == set(before) | {"advantages", "returns"}
    assert prepared.select([3]).data["returns"].shape == (LENGTHS[3],)


@pytest.mark.parametrize("adaptive", [False, True])
def test_prepare_is_idempotent_on_one_rank_and_on_two(adaptive: bool) -> None:
    config = PPOConfig(kl_adaptive=adaptive, kl_target=0.1, kl_horizon=10.0)
    both, actor, critic = (_ppo(config) for _ in range(3))
    coefficients = []
    for iteration in range(4):
        scalars = _scalars(iteration)
        results = [
            ppo.prepare(ppo.graph.call(name), iteration, scalars)
            for ppo, name in (
                (both, "actor_train"),
                (both, "critic_train"),
                (both, "actor_train"),
                (actor, "actor_train"),
                (critic, "critic_train"),
            )
        ]
        for batch, metrics in results[1:]:
            assert metrics == results[0][1]
            for name, value in results[0][0].data.items():
                assert torch.equal(batch.data[name], value), name
        coefficients.append(results[0][1]["kl_coefficient"])
    assert (len(set(coefficients)) > 1) is adaptive
    assert both.state_dict() == actor.state_dict() == critic.state_dict()


def test_the_critic_learns_nothing_from_a_missing_reward() -> None:
    """The values of a masked sequence weigh neither in the metrics nor in the losses."""
    scalars = _scalars()
    scalars.data["rewards"][2] = math.nan
    prepared, metrics = _prepare(PPOConfig(), scalars)
    assert prepared.data["kept"].tolist() == [1, 1, 0, 1, 1, 1]
    assert prepared.data["returns"].isfinite().all()
    kept = [0, 1, 3, 4, 5]
    alone, its = _prepare(PPOConfig(), scalars.select(kept))
    for key in ("advantages", "returns"):
        assert torch.equal(prepared.select(kept).data[key], alone.data[key])
    for name in ("return", "return_std", "advantage", "advantage_std", "explained_variance", "reward"):
        assert metrics[name] == its[name]
    objective = _ppo(PPOConfig()).objective(_ppo(PPOConfig()).graph.call("critic_train"))
    values = torch.zeros(sum(LENGTHS))
    whole, _ = objective.loss({"values": values}, prepared)
    part, _ = objective.loss({"values": values[: sum(alone.response_lengths)]}, alone)
    torch.testing.assert_close(whole, part)


def test_resume_continues_the_coefficient() -> None:
    config = PPOConfig(kl_adaptive=True, kl_target=0.1, kl_horizon=10.0)
    straight = _ppo(config)
    call = straight.graph.call("actor_train")
    straight.prepare(call, 0, _scalars(0))
    resumed = _ppo(config)
    with pytest.raises(RealError, match="expected 0"):
        resumed.prepare(call, 1, _scalars(1))
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.prepare(call, 1, _scalars(1))[1] == straight.prepare(call, 1, _scalars(1))[1]


def test_without_a_reference() -> None:
    config = PPOConfig(reference=False, kl_coefficient=0.0)
    _, metrics = _prepare(config, _scalars(reference=False))
    assert not [name for name in metrics if name.startswith("kl")]
    assert "ref_inf" not in [call.name for call in _ppo(config).graph.calls]


def test_kl_estimators_change_the_penalty() -> None:
    returns = [
        _prepare(PPOConfig(kl_estimator=name), _scalars())[0].data["returns"].tolist()
        for name in ("k1", "k2", "k3")
    ]
    assert returns[0] != returns[1] != returns[2]


def test_metrics_are_finite_numbers() -> None:
    _, metrics = _prepare(PPOConfig(max_new_tokens=5), _scalars())
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert metrics["response_at_limit"] == pytest.approx(2 / 6)  # lengths 7 and 5
    perfect = _scalars(rewards=[0.0] * len(LENGTHS), values=[0.0] * sum(LENGTHS))
    assert _prepare(PPOConfig(kl_coefficient=0.0), perfect)[1]["explained_variance"] == 0.0


def test_explained_variance_of_a_perfect_critic() -> None:
    """Values that are the scores to come explain the Monte Carlo returns wholly."""
    rewards = [1.0, -2.0, 3.0, 0.5, 0.0, 4.0]
    values = [reward for reward, length in zip(rewards, LENGTHS, strict=True) for _ in range(length)]
    config = PPOConfig(kl_coefficient=0.0, lam=1.0)
    assert _prepare(config, _scalars(rewards=rewards, values=values))[1]["explained_variance"] == 1.0


def test_explained_variance_does_not_credit_a_critic_for_itself() -> None:
    """Values that know nothing of the rewards explain nothing, whatever lam is: it is about what really followed."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(len(LENGTHS), generator=generator).tolist()
    walk = torch.randn(sum(LENGTHS), generator=generator).cumsum(0).tolist()
    for lam in (0.0, 0.95, 1.0):
        config = PPOConfig(kl_coefficient=0.0, lam=lam)
        found = _prepare(config, _scalars(rewards=rewards, values=walk))[1]["explained_variance"]
        followed = [reward for reward, length in zip(rewards, LENGTHS, strict=True) for _ in range(length)]
        errors = [reward - value for reward, value in zip(followed, walk, strict=True)]
        assert found == pytest.approx(1 - statistics.pvariance(errors) / statistics.pvariance(followed))
