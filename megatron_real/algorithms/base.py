"""What algorithms share, as three classes that mirror those of their options (`configs`).

============================================  ======================================================================
`TrainingAlgorithm` of a `TrainingConfig`     trains on what the data set has
`PolicyAlgorithm` of a `PolicyConfig`         generates responses, has them scored, trains on advantages
`PenalisedAlgorithm` of a `PenalisedConfig`   takes the KL penalty into the reward of each token
============================================  ======================================================================

Shape legend: S sequences, R response tokens, over all sequences of an iteration.

Invariants (tests/unit/algorithms/test_policies.py, for every algorithm):
    - `prepare` gives the same bits for every train call of an iteration, on every rank, however often it is called;
    - it changes neither its input nor, when called again, the state of the algorithm;
    - a sequence whose reward did not come changes no other one's advantage, as if it were not there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from megatron_real.algorithms.advantages import exact_moments, per_token, sequence_sums, whiten
from megatron_real.algorithms.configs import PenalisedConfig, PolicyConfig, TrainingConfig
from megatron_real.algorithms.groups import overlong_penalties
from megatron_real.algorithms.kl import AdaptiveKL, FixedKL, KLController, KLEstimator, estimate_kl
from megatron_real.algorithms.losses import Average, PolicyObjective
from megatron_real.backend import KEPT, Goal, Head, Minibatching, Objective, Sampling, Scorer
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, CallType, Graph, KeySpec, Per
from megatron_real.errors import RealError

__all__ = [
    "ADVANTAGES",
    "Advantages",
    "PenalisedAlgorithm",
    "PolicyAlgorithm",
    "Responses",
    "TrainingAlgorithm",
    "moments",
    "require_training",
]

ADVANTAGES = KeySpec(name="advantages", per=Per.RESPONSE, dtype="float32")
"""The key that a `PolicyObjective` weighs its tokens by."""


class TrainingAlgorithm[Config: TrainingConfig](ABC):
    """Implements `backend.Algorithm` for one train call on the data set's sequences; generates and scores nothing."""

    goal: ClassVar[Goal] = Goal(metric="loss", higher_is_better=False)

    def __init__(
        self, config: Config, graph: Graph, end_token: int = -1, scorer: Scorer | None = None
    ) -> None:
        """As `AlgorithmDefinition.build` calls it."""
        self.config = config
        self.graph = graph
        self.end_token = end_token
        self.scorer = scorer

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt."""
        return 1

    @property
    def temperature(self) -> float:
        """Of log-probs and entropy in every call."""
        return 1.0

    def sampling(self, call: Call) -> Sampling:
        """How a generate call samples; there is none."""
        raise _unexpected(call, "no generate call")

    def head(self, call: Call) -> Head:
        """What the model of an inference call returns."""
        if call.model is None or call.type is not CallType.INFERENCE:
            raise _unexpected(call, "an inference call of a model")
        if not self.graph.has_scalar_head(call.model):
            return Head.LOGPROBS
        return Head.SCORES if self.graph.key(call.outputs[0]).per is Per.SEQUENCE else Head.VALUES

    def function(self, call: Call) -> Scorer:
        """What computes the rewards in the place of a model."""
        if call.model is not None or self.scorer is None:
            raise _unexpected(call, "the call of a reward function")
        return self.scorer

    def minibatching(self, call: Call) -> Minibatching:
        """Epochs over minibatches in sequence-id order, the same for every train call."""
        require_training(call)
        return Minibatching(
            num_minibatches=self.config.num_minibatches,
            num_epochs=self.config.num_epochs,
            unit=self.graph.data.unit,
        )

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        """Nothing to derive: the batch as it is, and its mean response length."""
        require_training(call)
        lengths = scalars.response_lengths
        return _copy(scalars), {"response_length": sum(lengths) / max(len(lengths), 1)}

    @abstractmethod
    def objective(self, call: Call) -> Objective:
        """The loss of a train call."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have no state to restore
        """Inverse of `state_dict`; load it on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The responses of an iteration, in float64 on the CPU, where every rank gets the same bits."""

    lengths: Sequence[int]
    """Tokens of each."""
    data: Mapping[str, torch.Tensor]
    """The inputs of scope FULL, as they came. A reward that did not come is NaN."""
    scores: torch.Tensor
    """[S], ``data["rewards"]`` as the options shape them; NaN where one did not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """What an algorithm makes of `Responses`."""

    tokens: torch.Tensor
    """[R] float64, before whitening."""
    kept: torch.Tensor
    """[S] bool: the sequences that count. The advantages of others must be finite, and are set to 0."""
    whiten: bool = False
    """Whether to shift and scale to mean 0 and variance 1 over the tokens that are kept."""
    keys: Mapping[KeySpec, torch.Tensor] = field(default_factory=dict)
    """Further keys for the objectives."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class PolicyAlgorithm[Config: PolicyConfig](TrainingAlgorithm[Config]):
    """Generates, scores and trains the actor on a clipped surrogate; a subclass says what advantages are."""

    goal: ClassVar[Goal] = Goal(metric="reward")

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt, with consecutive sequence ids."""
        return self.config.samples_per_prompt

    @property
    def temperature(self) -> float:
        """Of log-probs and entropy in every call."""
        return self.config.temperature

    def sampling(self, call: Call) -> Sampling:
        """How a generate call samples."""
        if call.type is not CallType.GENERATE:
            raise _unexpected(call, "a generate call")
        config = self.config
        return Sampling(
            max_new_tokens=config.max_new_tokens,
            end_token=self.end_token,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop=config.stop,
            seed=config.seed,
        )

    def objective(self, call: Call) -> Objective:
        """The loss of a train call: the actor's."""
        require_training(call)
        return self.policy_objective()

    def policy_objective(self) -> PolicyObjective:
        """The clipped surrogate that the options describe."""
        config = self.config
        average = Average(config.average)
        limits = {"ratio": config.stop_ratio, "approx_kl_k3": config.stop_kl}
        return PolicyObjective(
            clip_low=config.clip_ratio,
            clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            dual_clip=config.dual_clip,
            entropy_coefficient=config.entropy_coefficient,
            average=average,
            constant=config.max_new_tokens if average is Average.CONSTANT else None,
            stop_above={name: limit for name, limit in limits.items() if limit is not None},
        )

    @abstractmethod
    def advantages(self, iteration: int, responses: Responses) -> Advantages:
        """What each token was worth, from the whole batch. Must be idempotent per iteration."""

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        """Add ``advantages`` and what else the losses need to the whole batch's scalars.

        The keys that are there stay as they are: the losses take ``logprobs`` and ``values`` as those of the old policy
        and critic. Must run for every iteration in turn on each rank that trains, since an adaptive KL coefficient
        learns from it.

        Args:
            call: a train call; all get the same.
            iteration: counted from 0.
            scalars: all sequences in id order with the inputs of scope FULL.

        Returns:
            A new batch, with `KEPT` if some sequences are masked; and metrics of the whole batch.

        Raises:
            RealError: a scalar is infinite, one but a reward is NaN, a response is empty, or iterations were left out.
        """
        require_training(call)
        data = _float64_on_cpu(scalars)
        lengths = scalars.response_lengths
        scores = self.shaped(data["rewards"])
        if self.config.overlong_buffer:
            penalties = overlong_penalties(
                lengths, limit=self.config.max_new_tokens, buffer=self.config.overlong_buffer
            )
            scores = scores + self.config.overlong_penalty * penalties
        found = self.advantages(iteration, Responses(lengths=lengths, data=data, scores=scores))
        kept = per_token(found.kept, lengths)
        tokens = whiten(found.tokens, kept=kept) if found.whiten else found.tokens.masked_fill(~kept, 0.0)
        prepared = _copy(scalars)
        device = scalars.data["rewards"].device
        keys = {ADVANTAGES: tokens, **found.keys}
        if not bool(found.kept.all()):
            keys[KEPT] = found.kept
        for spec, value in keys.items():
            prepared.put(spec, value.float().to(device))
        return prepared, {
            **self._metrics(data["rewards"], lengths),
            **moments("advantage", found.tokens[kept]),
            "kept": _share(found.kept),
            **found.metrics,
        }

    def shaped(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards as the options want them: ``clip((reward - bias) * scale, +-clip)``, of any shape."""
        config = self.config
        scores = (rewards - config.reward_bias) * config.reward_scale
        return scores if config.reward_clip is None else scores.clamp(-config.reward_clip, config.reward_clip)

    def _metrics(self, rewards: torch.Tensor, lengths: Sequence[int]) -> dict[str, float]:
        """Of rewards as they came, and of the responses' lengths."""
        came = ~rewards.isnan()
        at_limit = sum(length >= self.config.max_new_tokens for length in lengths)
        return {
            **moments("reward", rewards[came]),
            "reward_missing": 1.0 - _share(came),
            "response_length": sum(lengths) / max(len(lengths), 1),
            "response_at_limit": at_limit / max(len(lengths), 1),
        }


class PenalisedAlgorithm[Config: PenalisedConfig](PolicyAlgorithm[Config]):
    """A policy algorithm that is held to the reference by the reward; owns the coefficient."""

    def __init__(
        self, config: Config, graph: Graph, end_token: int = -1, scorer: Scorer | None = None
    ) -> None:
        """As `TrainingAlgorithm`."""
        super().__init__(config, graph, end_token, scorer)
        self._kl: KLController = FixedKL(config.kl_coefficient)
        if config.kl_adaptive:
            self._kl = AdaptiveKL(config.kl_coefficient, target=config.kl_target, horizon=config.kl_horizon)

    def penalties(self, iteration: int, responses: Responses) -> tuple[torch.Tensor, dict[str, float]]:
        """What each response token costs: coefficient * KL estimate, [R]; and metrics, none without a reference."""
        lengths, data = responses.lengths, responses.data
        if not self.config.reference:
            return torch.zeros(sum(lengths), dtype=torch.float64), {}
        kl = estimate_kl(data["logprobs"], data["ref_logprobs"], KLEstimator(self.config.kl_estimator))
        coefficient = self._kl.coefficient(iteration)
        mean_kl, _ = exact_moments(torch.tensor(sequence_sums(kl, lengths), dtype=torch.float64))
        self._kl.observe(iteration, mean_kl, len(lengths))
        metrics = {"kl": exact_moments(kl)[0], "kl_per_sequence": mean_kl, "kl_coefficient": coefficient}
        return coefficient * kl, metrics

    def state_dict(self) -> dict[str, Any]:
        """The KL controller; take it from a rank that prepares a train call."""
        return {"kl": self._kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; load it on every rank."""
        self._kl.load_state_dict(state.get("kl", {}))


def require_training(call: Call) -> None:
    """Refuse a call of another type.

    Raises:
        RealError: it does not train.
    """
    if not call.trains:
        raise _unexpected(call, "a train call")


def moments(name: str, values: torch.Tensor) -> dict[str, float]:
    """Metrics of some numbers: their mean under the plain name, and their deviation. None of no numbers."""
    if not values.numel():
        return {}
    mean, variance = exact_moments(values)
    return {name: mean, f"{name}_std": math.sqrt(variance)}


def _share(flags: torch.Tensor) -> float:
    return int(flags.sum()) / max(len(flags), 1)


def _copy(batch: Batch) -> Batch:
    """The same tensors in a batch of their own."""
    return Batch(
        ids=batch.ids,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        keys=dict(batch.keys),
        data=dict(batch.data),
    )


def _float64_on_cpu(scalars: Batch) -> dict[str, torch.Tensor]:
    """The scalars in float64 on the CPU.

    Raises:
        RealError: one of them is infinite, or NaN without being a reward.
    """
    data = {name: value.detach().cpu().double() for name, value in scalars.data.items()}
    for name, value in data.items():
        bad = value.isinf() if "rewards" in name else ~value.isfinite()
        if bool(bad.any()):
            lengths = list(scalars.lengths(scalars.keys[name].per))
            where = [i for i, part in zip(scalars.ids, bad.split(lengths), strict=True) if part.any()]
            raise RealError(
                f"algorithm: {name} of sequences {where[:8]} are not finite; expected numbers. Look at the call that "
                f"produces {name!r}."
            )
    return data


def _unexpected(call: Call, expected: str) -> RealError:
    return RealError(f"algorithm: found call {call.name!r} of type {call.type}; expected {expected}.")
