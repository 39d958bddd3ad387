"""What a copy of a role's model is made of, as its plan says."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.errors import PlanError
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.plan import CopyKey
from megatron_real.program import Program

__all__ = ["copy_model"]


def copy_model(program: Program, key: CopyKey, model: RoleModel) -> RoleModel:
    """The role's model, in its train call with what the plan says of recomputation.

    Raises:
        PlanError: Megatron refuses the recomputation.
    """
    if key != program.home(key.model) or not program.graph.trained(key.model):
        return model
    recompute = program.plan.calls[program.graph.home_call(key.model).name].recompute
    try:
        config = _with_recomputation(model.config, recompute)
    except (AssertionError, ValueError) as error:
        raise PlanError(f"copy {key}: Megatron refuses recompute={recompute!r}: {error}.") from error
    return dataclasses.replace(model, config=config)


def _with_recomputation(config: TransformerConfig, recompute: str) -> TransformerConfig:
    """The configuration of a training copy; ``full`` keeps each layer's input only."""
    if recompute == "none":
        return config
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    return dataclasses.replace(config, recompute_granularity=recompute, **full)
