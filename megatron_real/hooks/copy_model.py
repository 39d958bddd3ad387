"""What a copy of a role's model is made of, as its plan says, and whether it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.dataflow import Graph, Update
from megatron_real.errors import ConfigError, PlanError, Problem, raise_problems
from megatron_real.hooks.model_builder import RoleModel, layout_config, require_trainable
from megatron_real.plan import CopyKey
from megatron_real.program import Program

__all__ = ["check_copies", "copy_model", "rounding_warning"]


def check_copies(program: Program, models: Mapping[str, RoleModel]) -> None:
    """Refuse copies that could not be built, before anything is. No collective.

    Raises:
        RealError: see `layout_config`.
        ConfigError: a model is to move toward one of another shape.
    """
    for key in program.copies():
        layout_config(copy_model(program, key, models[key.model]), key.layout)
        if program.graph.trained(key.model) and key == program.home(key.model):
            require_trainable(models[key.model], key.layout)
    for update in program.graph.updates:
        raise_problems(
            _differences(update, models),
            subject=f"{update.target}: it cannot move toward {update.source}",
            error=ConfigError,
        )


def _differences(update: Update, models: Mapping[str, RoleModel]) -> Iterator[Problem]:
    source = dataclasses.asdict(models[update.source].shape())
    for name, found in dataclasses.asdict(models[update.target].shape()).items():
        if found != source[name]:
            yield Problem(path=name, found=str(found), expected=f"{source[name]}, as {update.source} has")


def rounding_warning(graph: Graph, model: RoleModel) -> str | None:
    """What to tell a user whose model moves in steps that its dtype rounds away; None if there are none such.

    A step of ``mix * difference`` is lost where it is less than half the distance to the next number, which is at
    least a quarter of the dtype's epsilon.
    """
    update, dtype = graph.update_of(model.role), model.config.params_dtype
    if update is None or update.mix == 1.0 or dtype == torch.float32:
        return None
    lost = torch.finfo(dtype).eps / 4 / update.mix
    return (
        f"{model.role}: found weights in {dtype} that take {update.mix:g} of the difference to {update.source}: one "
        f"that differs by less than {lost:.2%} of its value stays what it is. Keep this model in fp32, or mix more and "
        "less often."
    )


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
