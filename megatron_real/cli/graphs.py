"""The graph that a plan is of, from what the plan says. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_real.algorithms.graphs import GRAPHS, graph_of
from megatron_real.dataflow import Graph
from megatron_real.plan import Plan

__all__ = ["graph_of_plan"]

_REWARD_CALL = re.compile(r"^rew(\d+)_inf$")


def graph_of_plan(plan: Plan, given: Mapping[str, Any] | None = None) -> Graph | None:
    """The graph of a plan's algorithm, with the options that its calls show; None where it is none of ours.

    Args:
        plan: the plan.
        given: options of the algorithm that the user gives, such as ``{"reward": "function"}``: a plan that records no
            inputs does not show whether a call has a model.

    Raises:
        PlanError: an option that the algorithm does not have.
    """
    if plan.algorithm not in GRAPHS:
        return None
    options: dict[str, Any] = {}
    recorded = (plan.predicted.model_extra or {}).get("inputs") if plan.predicted is not None else None
    if plan.algorithm in ("ppo", "grpo", "remax"):
        options["reference"] = "ref_inf" in plan.calls
        scored = not isinstance(recorded, Mapping) or "reward" in recorded.get("models", {"reward": None})
        options["reward"] = "model" if scored else "function"
    if plan.algorithm == "ppo":
        options["extra_rewards"] = sum(bool(_REWARD_CALL.match(name)) for name in plan.calls)
    return graph_of(plan.algorithm, **{**options, **(given or {})})
