"""What makes a copy trainable, and what its options allow to be done with its weights and its state.

A `require_...` needs no processes: it refuses what a plan asks for before anything is built.

Invariants (tests/hooks/test_model_copy.py, tests/hooks/test_offload.py, tests/hooks/test_training_state.py):
    - what cannot be dropped, rebuilt, offloaded or moved is refused from options alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.errors import PlanError
from megatron_real.hooks.model_builder import RoleModel

__all__ = [
    "Training",
    "reason_to_keep_weights",
    "reason_to_stay",
    "require_droppable",
    "require_movable",
    "require_state_offloadable",
    "training_stays",
    "weights_stay",
]


def _default_ddp() -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(grad_reduce_in_fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What makes a copy trainable."""

    optimizer: OptimizerConfig
    """Its precision fields are set from the model."""
    ddp: DistributedDataParallelConfig = field(default_factory=_default_ddp)
    """The distributed optimizer is always on."""


def require_droppable(role: RoleModel, training: Training) -> None:
    """Check that a trained model's weights can be dropped and rebuilt from the optimizer's main parameters.

    For plans with `drop_trained_weights`.

    Raises:
        PlanError: they cannot.
    """
    reason = reason_to_keep_weights(role.config, training)
    if reason is not None:
        raise weights_stay(role.role, reason)


def reason_to_keep_weights(config: TransformerConfig, training: Training) -> str | None:
    """Why weights cannot be rebuilt from main parameters under these options; None when they can."""
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return "fp32 parameters are themselves the main parameters"
    if config.cuda_graph_impl != "none":
        return "CUDA graphs hold the addresses of the weights"
    if training.optimizer.use_precision_aware_optimizer:
        return "the precision-aware optimizer keeps only what bf16 weights lack (store_param_remainders)"
    return _first_on(
        training.ddp, "fp8_param_gather", "fp4_param_gather", "nccl_ub", "reuse_grad_buf_for_mxfp8_param_ag"
    )


def weights_stay(subject: str, reason: str) -> PlanError:
    """The refusal to drop weights."""
    return PlanError(
        f"{subject}: its weights cannot be rebuilt from the optimizer's main parameters: {reason}. Set "
        "drop_trained_weights to false for this call."
    )


def require_state_offloadable(role: RoleModel, training: Training) -> None:
    """Check that a trained model's optimizer state and gradients can rest on the host (`ModelCopy.offload_state`).

    For plans with ``offload: host`` in a train call.

    Raises:
        PlanError: they cannot.
    """
    if role.config.cuda_graph_impl != "none":
        reason: str | None = "CUDA graphs hold the addresses of the gradients"
    elif getattr(training.optimizer, "optimizer_cpu_offload", False):
        reason = "optimizer_cpu_offload keeps its own part of the state on the host"
    else:
        reason = _first_on(training.ddp, "nccl_ub", "reuse_grad_buf_for_mxfp8_param_ag", "use_megatron_fsdp")
    if reason is not None:
        raise PlanError(
            f"{role.role}: its optimizer state cannot rest on the host: {reason}. Set offload to 'none' for its train "
            "call."
        )


def require_movable(role: RoleModel, training: Training) -> None:
    """Check that a trained model and its optimizer's state can move to another layout in memory.

    For plans that take another one's place.

    Raises:
        PlanError: they cannot.
    """
    reason = reason_to_stay(training.optimizer, training.ddp)
    if reason is not None:
        raise training_stays(role.role, reason)


def reason_to_stay(optimizer: OptimizerConfig, ddp: DistributedDataParallelConfig) -> str | None:
    """Why state under these options has no boxes that could move; None when it has."""
    if optimizer.optimizer != "adam":
        return (
            f"the optimizer is {optimizer.optimizer!r}, not 'adam', whose moments have the parameters' shapes"
        )
    if optimizer.use_precision_aware_optimizer:
        return "use_precision_aware_optimizer keeps main parameters as remainders of weights"
    if getattr(optimizer, "optimizer_cpu_offload", False):
        return "optimizer_cpu_offload keeps parts of the state in another optimizer"
    return _first_on(ddp, "fp8_param_gather", "fp4_param_gather", "use_megatron_fsdp", "nccl_ub")


def training_stays(subject: str, reason: str) -> PlanError:
    """The refusal to move a training."""
    return PlanError(
        f"{subject}: its training cannot move in memory: {reason}. Save and resume under the other plan instead "
        "(--real-resume)."
    )


def _first_on(options: object, *names: str) -> str | None:
    """The first of these options that is on, as a reason; some versions of Megatron lack some of them."""
    return next((f"{name} is on" for name in names if getattr(options, name, False)), None)
