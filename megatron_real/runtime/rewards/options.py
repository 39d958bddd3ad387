"""The options of reward functions: the key ``reward`` of a run. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_real.errors import Problem

__all__ = ["RewardOptions", "WeightedFunction"]

Finite = Annotated[float, Field(allow_inf_nan=False)]


class WeightedFunction(BaseModel):
    """A reward function; its name alone is short for weight 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str
    """``module:function``; its arguments and results are described in `megatron_real.runtime.rewards.functions`."""
    weight: Finite = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value


class RewardOptions(BaseModel):
    """Reward functions; ``module:function`` alone is short for one of them with the defaults below."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    functions: tuple[WeightedFunction, ...] = Field(min_length=1)
    """The reward is the weighted sum of what they return."""
    processes: int = Field(default=0, ge=0)
    """Processes of each rank that call the functions: with one or more, a function that crashes or never returns costs
    the rewards of the call that it was in, and no more. 0 calls them in the rank, where a crash or an endless loop in C
    ends the run."""
    sequences_per_call: int | None = Field(default=None, ge=1)
    """How many sequences a function gets at once. None: one; but a function in the rank that is not async gets all."""
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A call of a function may take so long; None is a tenth of ``liveness.stuck_after_s``. A rank's whole batch may
    take half of ``liveness.stuck_after_s``, or one `timeout_s` if that is longer."""
    on_failure: Literal["mask", "stop"] = "mask"
    """When a reward does not come: keep its sequence out of the loss, or end the run."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"functions": (value,)} if isinstance(value, str) else value

    def problems(self, stuck_after_s: float) -> Iterator[Problem]:
        """What is wrong with the options.

        Args:
            stuck_after_s: a run that does not move for so long is ended.
        """
        names = [each.function for each in self.functions]
        for position, name in enumerate(names):
            path = "reward (--real-reward)" if len(names) == 1 else f"reward.functions.{position}"
            module, _, attribute = name.partition(":")
            if not module or not all(part.isidentifier() for part in attribute.split(".")):
                yield Problem(path=path, found=repr(name), expected="module:function")
            elif name in names[:position]:
                yield Problem(path=path, found=f"{name} for the second time", expected="each function once")
        if self.timeout_s is not None and self.timeout_s >= stuck_after_s:
            yield Problem(
                path="reward.timeout_s",
                found=f"{self.timeout_s:g}",
                expected=f"less than liveness.stuck_after_s={stuck_after_s:g}, after which the run would be ended",
            )
