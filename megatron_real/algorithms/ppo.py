"""Proximal policy optimisation: what the runtime asks of `megatron_real.backend.Algorithm`.

Invariants (tests/unit/algorithms/test_ppo.py):
    - `PPO.prepare` gives the same bits for both train calls of an iteration, on every rank, however often it
      is called;
    - it changes neither its input nor, when called again, the state of the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_real.algorithms.advantages import (
    exact_moments,
    explained_variance,
    gae,
    reward_tokens,
    sequence_sums,
    whiten,
)
from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.algorithms.kl import AdaptiveKL, FixedKL, KLController, KLEstimator, estimate_kl
from megatron_real.algorithms.losses import PolicyObjective, ValueObjective
from megatron_real.backend import Head, Minibatching, Objective, RewardFunction, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, CallType, KeySpec, Per
from megatron_real.errors import ConfigError, Problem, RealError, raise_problems

__all__ = ["PPO", "PPOConfig", "ppo_graph"]

_HEADS = {"ref_inf": Head.LOGPROBS, "critic_inf": Head.VALUES, "rew_inf": Head.SCORES}
_ADVANTAGES = KeySpec(name="advantages", per=Per.RESPONSE, dtype="float32")
_RETURNS = KeySpec(name="returns", per=Per.RESPONSE, dtype="float32")
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("gamma", "lam"), lambda value: 0 <= value <= 1, "0 to 1"),
    (("clip_ratio",), lambda value: 0 < value < 1, "above 0 and below 1"),
    (("top_p",), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    (("clip_ratio_high", "value_clip", "reward_clip"), lambda value: value > 0, "a number above 0, or none"),
    (("value_coefficient", "temperature"), lambda value: value > 0, "a number above 0"),
    (("kl_target", "kl_horizon"), lambda value: value > 0, "a number above 0"),
    (("entropy_coefficient", "kl_coefficient", "top_k"), lambda value: value >= 0, "a number, at least 0"),
    (("num_minibatches", "num_epochs", "max_new_tokens"), lambda value: value >= 1, "at least 1"),
    (("reward_scale",), lambda value: value != 0, "a number other than 0, which would make every reward 0"),
    (("reward_bias",), lambda value: True, "a finite number"),
)
"""Options with what is allowed; NaN and infinity never are, None always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Options of PPO.

    Raises:
        ConfigError: listing every option that is out of range.
    """

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Decay of generalised advantage estimation: 1 is Monte Carlo, 0 one-step."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over all response tokens of the batch."""
    clip_ratio: float = 0.2
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio_high]."""
    clip_ratio_high: float | None = None
    """None is the same as `clip_ratio`."""
    value_clip: float | None = 0.2
    """How far the critic may move from its inference before its loss stops falling; None does not clip."""
    value_coefficient: float = 1.0
    """Weight of the critic's loss: the critic is a model of its own, so this only scales its gradient."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    reference: bool = True
    """Whether there is a reference model; without one `kl_coefficient` must be 0."""
    kl_coefficient: float = 0.1
    """Weight of the per-token KL penalty in the reward; where it starts from when it is adaptive."""
    kl_estimator: str = "k1"
    """``k1``, ``k2`` or ``k3``; see `megatron_real.algorithms.kl.KLEstimator`."""
    kl_adaptive: bool = False
    """Whether the coefficient is steered to hold `kl_target`."""
    kl_target: float = 6.0
    """Nats per sequence (summed over its response)."""
    kl_horizon: float = 10_000.0
    """Sequences over which the coefficient adapts."""
    reward_bias: float = 0.0
    """A reward becomes ``clip((reward - reward_bias) * reward_scale, +-reward_clip)``."""
    reward_scale: float = 1.0
    reward_clip: float | None = None
    """None does not clip."""
    num_minibatches: int = 4
    """Optimizer steps per epoch."""
    num_epochs: int = 1
    """Passes over the batch per iteration."""
    max_new_tokens: int = 128
    """Longest response, the end token included."""
    temperature: float = 1.0
    """Of sampling, and of log-probs and entropy everywhere."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    seed: int = 0
    """Of sampling."""

    def __post_init__(self) -> None:
        raise_problems(self._problems(), subject="algorithm ppo", error=ConfigError)

    def _problems(self) -> Iterator[Problem]:
        for names, is_allowed, expected in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not (math.isfinite(value) and is_allowed(value)):
                    yield Problem(path=name, found=str(value), expected=expected)
        yield from self._kl_problems()

    def _kl_problems(self) -> Iterator[Problem]:
        if self.kl_estimator not in [str(estimator) for estimator in KLEstimator]:
            expected = ", ".join(KLEstimator)
            yield Problem(path="kl_estimator", found=repr(self.kl_estimator), expected=f"one of {expected}")
        if not self.reference and self.kl_coefficient != 0:
            yield Problem(
                path="kl_coefficient",
                found=str(self.kl_coefficient),
                expected="0, since there is no reference model (reference=false)",
            )
        if self.kl_adaptive and self.kl_coefficient == 0:
            yield Problem(
                path="kl_coefficient",
                found="0 with kl_adaptive",
                expected="above 0: it is adapted by a factor",
            )


class PPO:
    """PPO with a critic, a per-token KL penalty and whitened advantages; implements `backend.Algorithm`."""

    num_samples_per_prompt = 1

    def __init__(
        self, config: PPOConfig, end_token: int, reward_function: RewardFunction | None = None
    ) -> None:
        """A token `end_token` closes a response; a `reward_function` takes the place of the reward model."""
        self.config = config
        self.graph = ppo_graph(
            "function" if reward_function is not None else "model", reference=config.reference
        )
        self._end_token = end_token
        self._reward_function = reward_function
        self._kl: KLController = FixedKL(config.kl_coefficient)
        if config.kl_adaptive:
            self._kl = AdaptiveKL(config.kl_coefficient, target=config.kl_target, horizon=config.kl_horizon)

    @property
    def temperature(self) -> float:
        """Of log-probs and entropy in every call."""
        return self.config.temperature

    def sampling(self, call: Call) -> Sampling:
        """How ``actor_gen`` samples."""
        _expect(call, call.type is CallType.GENERATE, "a generate call")
        config = self.config
        return Sampling(
            max_new_tokens=config.max_new_tokens,
            end_token=self._end_token,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
        )

    def head(self, call: Call) -> Head:
        """What the model of an inference call returns."""
        _expect(call, call.model is not None and call.name in _HEADS, "an inference call of a model")
        return _HEADS[call.name]

    def function(self, call: Call) -> RewardFunction:
        """The reward function."""
        _expect(call, call.model is None, "the call of a reward function")
        assert self._reward_function is not None, "a graph with a function call has the function"
        return self._reward_function

    def minibatching(self, call: Call) -> Minibatching:
        """The same cut for actor and critic: epochs over minibatches in sequence-id order."""
        _expect(call, call.trains, "a train call")
        return Minibatching(num_minibatches=self.config.num_minibatches, num_epochs=self.config.num_epochs)

    def objective(self, call: Call) -> Objective:
        """The loss of ``actor_train`` or ``critic_train``."""
        _expect(call, call.trains, "a train call")
        config = self.config
        if call.model == "critic":
            return ValueObjective(clip=config.value_clip, coefficient=config.value_coefficient)
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        return PolicyObjective(
            clip_low=config.clip_ratio, clip_high=high, entropy_coefficient=config.entropy_coefficient
        )

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        """Add ``advantages`` and ``returns`` to the whole batch's scalars.

        ``logprobs`` and ``values`` stay as they are: the losses take them as those of the old policy and
        critic. Must run for every iteration in turn on each rank that trains, since an adaptive KL
        coefficient learns from it.

        Args:
            call: ``actor_train`` or ``critic_train``; both get the same.
            iteration: counted from 0.
            scalars: all sequences in id order with the inputs of scope FULL.

        Returns:
            A new batch, and metrics of the whole batch: those of the KL are left out without a reference.

        Raises:
            RealError: a scalar is not finite, a response is empty, or iterations were left out.
        """
        _expect(call, call.trains, "a train call")
        data = _float64_on_cpu(scalars)
        lengths = scalars.response_lengths
        config = self.config
        kl = torch.zeros_like(data["logprobs"])
        if config.reference:
            kl = estimate_kl(data["logprobs"], data["ref_logprobs"], KLEstimator(config.kl_estimator))
        coefficient = self._kl.coefficient(iteration)
        scores = (data["rewards"] - config.reward_bias) * config.reward_scale
        if config.reward_clip is not None:
            scores = scores.clamp(-config.reward_clip, config.reward_clip)
        rewards = reward_tokens(scores, coefficient * kl, lengths)
        advantages = gae(rewards, data["values"], lengths, gamma=config.gamma, lam=config.lam)
        returns = advantages + data["values"]
        prepared = Batch(
            ids=scalars.ids,
            prompt_lengths=scalars.prompt_lengths,
            response_lengths=scalars.response_lengths,
            keys=dict(scalars.keys),
            data=dict(scalars.data),
        )
        device = scalars.data["logprobs"].device
        prepared.put(_ADVANTAGES, (whiten(advantages) if config.whiten else advantages).float().to(device))
        prepared.put(_RETURNS, returns.float().to(device))

        metrics = _metrics(data, advantages, returns)
        # Against the rewards that followed alone: returns at lam < 1 contain the values that are judged.
        followed = gae(rewards, data["values"], lengths, gamma=config.gamma, lam=1.0) + data["values"]
        metrics["explained_variance"] = explained_variance(data["values"], followed)
        metrics["response_length"] = sum(lengths) / max(len(lengths), 1)
        metrics["response_at_limit"] = sum(n >= config.max_new_tokens for n in lengths) / max(len(lengths), 1)
        if config.reference:
            mean_kl, _ = exact_moments(torch.tensor(sequence_sums(kl, lengths), dtype=torch.float64))
            metrics |= {
                "kl": exact_moments(kl)[0],
                "kl_per_sequence": mean_kl,
                "kl_coefficient": coefficient,
            }
            self._kl.observe(iteration, mean_kl, len(lengths))
        return prepared, metrics

    def state_dict(self) -> dict[str, Any]:
        """The KL controller; take it from a rank that prepares a train call."""
        return {"kl": self._kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; load it on every rank."""
        self._kl.load_state_dict(state.get("kl", {}))


def _metrics(
    data: Mapping[str, torch.Tensor], advantages: torch.Tensor, returns: torch.Tensor
) -> dict[str, float]:
    """Means (under the plain name) and deviations: rewards as they came, advantages before whitening."""
    metrics: dict[str, float] = {}
    for name, values in (("reward", data["rewards"]), ("advantage", advantages), ("return", returns)):
        mean, variance = exact_moments(values)
        metrics[name] = mean
        metrics[f"{name}_std"] = math.sqrt(variance)
    return metrics


def _float64_on_cpu(scalars: Batch) -> dict[str, torch.Tensor]:
    """The scalars in float64 on the CPU, where every rank gets the same bits.

    Raises:
        RealError: one of them is NaN or infinite.
    """
    data = {name: value.detach().cpu().double() for name, value in scalars.data.items()}
    for name, value in data.items():
        if not bool(value.isfinite().all()):
            lengths = list(scalars.lengths(scalars.keys[name].per))
            bad = [
                i
                for i, part in zip(scalars.ids, value.split(lengths), strict=True)
                if not part.isfinite().all()
            ]
            raise RealError(
                f"ppo: {name} of sequences {bad[:8]} are not finite; expected numbers. "
                f"Look at the call that produces {name!r}."
            )
    return data


def _expect(call: Call, condition: bool, expected: str) -> None:
    if not condition:
        raise RealError(f"ppo: found call {call.name!r} of type {call.type}; expected {expected}.")
