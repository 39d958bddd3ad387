"""Options of what a run tells besides its metrics: evaluations, sequences to read, Weights & Biases. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["EvaluationOptions", "SampleOptions", "WandbOptions"]

Count = Annotated[int, Field(ge=1)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluationOptions(_Options):
    """Evaluations on ``data.eval_prompts``; without these there are none."""

    every: Count | None = None
    """Iterations from one to the next. None makes two, before the first iteration and after the last one, which the
    others have too."""
    greedy: bool = False
    """Take the likeliest token at each position; False samples as in training, with draws of its own."""
    keep_best: bool = True
    """Write a checkpoint to ``best/`` of the run's folder whenever the algorithm's goal is the best so far."""


class SampleOptions(_Options):
    """Sequences in ``samples.jsonl``, with prompt, response and reward; of every evaluation as well."""

    every: Count | None = 10
    """Iterations from one to the next of which some are written; None writes none of training."""
    count: int = Field(default=4, ge=0)
    """How many at a time."""


class WandbOptions(_Options):
    """Where the rows of metrics go in Weights & Biases, if it is installed."""

    project: str
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    """None is as W&B's environment says."""
