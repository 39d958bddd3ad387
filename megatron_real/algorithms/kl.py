"""Distance from the reference model: estimators of the KL divergence, and its coefficient.

Invariants (tests/unit/algorithms/test_kl.py):
    - `coefficient(i)` is the same before and after `observe(i, ...)`, however often either is called, so that
      two train calls of an iteration agree, on one rank or on several;
    - an iteration that was skipped, or two calls that disagree about what was seen, is an error and not a
      drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from megatron_real.errors import ConfigError, RealError

__all__ = ["AdaptiveKL", "FixedKL", "KLController", "KLEstimator", "estimate_kl"]

_MAX_RELATIVE_ERROR = 0.2
"""Ziegler et al. clip the relative error to this, so that one strange batch cannot swing the coefficient."""

_MAX_LOG_RATIO = 20.0
"""exp(89) does not fit into fp32."""


class KLEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one token that the policy sampled.

    Schulman, "Approximating KL divergence", 2020. With ``d = logprob - ref_logprob``. As a penalty in the reward only
    the value counts; as a term of the loss only the gradient does, and the two are not equally good: the gradient of an
    estimate is no estimate of the gradient (Tang and Munos 2025, arXiv:2506.09477).
    """

    K1 = "k1"
    """``d``: unbiased; may be negative. In a loss it does nothing: the expectation of its gradient is 0."""
    K2 = "k2"
    """``d**2 / 2``: biased, low variance. In a loss its gradient is unbiased: that of KL(policy || reference)."""
    K3 = "k3"
    """``exp(-d) - 1 + d``: unbiased, never negative. In a loss, as in GRPO (arXiv:2402.03300, eq. 4), its gradient is
    that of KL(reference || policy): close to the other while the two policies are."""


def estimate_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """KL estimate of each token; any shape, the inputs' dtype, with gradient.

    K3 takes a ratio of more than exp(20), which a stray token may have, for exp(20) and gives it no gradient.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case KLEstimator.K1:
            return difference
        case KLEstimator.K2:
            return 0.5 * difference.square()
        case KLEstimator.K3:
            difference = difference.clamp(min=-_MAX_LOG_RATIO)
            return torch.expm1(-difference) + difference


@dataclass(frozen=True, slots=True)
class FixedKL:
    """The same coefficient in every iteration."""

    value: float

    def coefficient(self, iteration: int) -> float:
        """The weight of the KL penalty in `iteration`."""
        return self.value

    def observe(self, iteration: int, mean_kl: float, num_sequences: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """No state: the coefficient is an option and may be changed when a run is resumed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


class AdaptiveKL:
    """Proportional control of the coefficient (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    After an iteration with `n` sequences and a mean KL per *sequence* of `kl`::

        error = clip(kl / target - 1, -0.2, 0.2)
        coefficient *= 1 + error * n / horizon

    Every rank that prepares a train call keeps its own controller; fed with the same numbers they stay equal.
    """

    def __init__(self, initial: float, *, target: float, horizon: float) -> None:
        if initial <= 0 or target <= 0 or horizon <= 0:
            raise ConfigError(
                f"adaptive KL: found coefficient={initial}, target={target}, horizon={horizon}; "
                "expected all above 0."
            )
        self._target = target
        self._horizon = horizon
        self._next = 0
        """The first iteration that was not observed yet."""
        self._coefficient = initial
        """Of iteration `_next`."""
        self._previous = initial
        """Of iteration `_next - 1`."""
        self._observed: tuple[float, int] = (0.0, 0)
        """What was observed in iteration `_next - 1`."""

    def coefficient(self, iteration: int) -> float:
        """The weight of the KL penalty in `iteration`: the next one, or the last that was observed.

        Raises:
            RealError: another iteration is asked for.
        """
        if iteration == self._next:
            return self._coefficient
        if iteration == self._next - 1:
            return self._previous
        raise RealError(
            f"adaptive KL: found iteration {iteration}; expected {self._next}, the first that was "
            "not observed, or the one before it. The coefficient depends on every iteration: load the state "
            "when a run is resumed or a train call moves to other ranks."
        )

    def observe(self, iteration: int, mean_kl: float, num_sequences: int) -> None:
        """Learn the mean KL per sequence of `iteration`. A second call with the same numbers changes nothing.

        Raises:
            RealError: iterations were left out, or this one was observed with other numbers.
        """
        current = self.coefficient(iteration)
        if iteration == self._next - 1:
            if self._observed != (mean_kl, num_sequences):
                raise RealError(
                    f"adaptive KL: iteration {iteration} was observed with (mean KL, sequences) = "
                    f"{self._observed}, now with {(mean_kl, num_sequences)}; expected the same from every "
                    "train call. Its calls got different data."
                )
            return
        error = min(max(mean_kl / self._target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self._previous = current
        self._coefficient = current * (1.0 + error * num_sequences / self._horizon)
        self._observed = (mean_kl, num_sequences)
        self._next = iteration + 1

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; meaningful on the ranks that prepare train calls."""
        return {
            "next_iteration": self._next,
            "coefficient": self._coefficient,
            "previous_coefficient": self._previous,
            "observed_kl": self._observed[0],
            "observed_sequences": self._observed[1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ConfigError: a number is missing: the run was saved with a fixed coefficient.
        """
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ConfigError(
                f"adaptive KL: found a saved state without {missing}; expected the state of an adaptive "
                "coefficient. Resume with the options that the run was started with."
            )
        self._next = int(state["next_iteration"])
        self._coefficient = float(state["coefficient"])
        self._previous = float(state["previous_coefficient"])
        self._observed = (float(state["observed_kl"]), int(state["observed_sequences"]))


KLController = FixedKL | AdaptiveKL
