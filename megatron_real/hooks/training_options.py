"""What makes a copy trainable, and what its options allow to be done with its memory.

Invariants (tests/hooks/test_model_copy.py, tests/hooks/test_offload.py):
    - what cannot be dropped, rebuilt or offloaded is refused from options alone, before anything is built.
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
    "reason_to_keep_state",
    "reason_to_keep_weights",
    "require_droppable",
    "require_state_movable",
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

    Needs no processes: for plans with `drop_trained_weights`, before anything is built.

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
    for option in ("fp8_param_gather", "fp4_param_gather", "nccl_ub", "reuse_grad_buf_for_mxfp8_param_ag"):
        if getattr(training.ddp, option, False):
            return f"{option} is on"
    return None


def weights_stay(subject: str, reason: str) -> PlanError:
    """The refusal to drop weights."""
    return PlanError(
        f"{subject}: its weights cannot be rebuilt from the optimizer's main parameters: {reason}. Set "
        "drop_trained_weights to false for this call."
    )


def require_state_movable(role: RoleModel, training: Training) -> None:
    """Check that a trained model's optimizer state can rest on the host (`ModelCopy.offload_state`).

    Needs no processes: for plans with ``offload: host`` in a train call, before anything is built.

    Raises:
        PlanError: it cannot.
    """
    reason = reason_to_keep_state(role.config, training)
    if reason is not None:
        raise PlanError(
            f"{role.role}: its optimizer state cannot rest on the host: {reason}. Set offload to 'none' for its train "
            "call."
        )


def reason_to_keep_state(config: TransformerConfig, training: Training) -> str | None:
    """Why optimizer state and gradients cannot leave the device under these options; None when they can."""
    if config.cuda_graph_impl != "none":
        return "CUDA graphs hold the addresses of the gradients"
    if getattr(training.optimizer, "optimizer_cpu_offload", False):
        return "optimizer_cpu_offload keeps its own part of the state on the host"
    for option in ("nccl_ub", "reuse_grad_buf_for_mxfp8_param_ag", "use_megatron_fsdp"):
        if getattr(training.ddp, option, False):
            return f"{option} is on"
    return None
