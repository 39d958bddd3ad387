"""The patches of Megatron that running on CPU needs beyond torch's. See `cpu_device`.

Nothing here imports Megatron: each patch is applied when its module is imported.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_real.hooks.patching import Patch

__all__ = ["MEGATRON_PATCHES"]


def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


def _torch_norm_new(original: Callable[..., Any]) -> Callable[..., Any]:
    """`WrappedTorchNorm.__new__` with sequence parallelism: the same norm, its gradients marked."""
    build = getattr(original, "__func__", original)

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> Any:
        seen = SimpleNamespace(
            layernorm_zero_centered_gamma=config.layernorm_zero_centered_gamma,
            memory_efficient_layer_norm=config.memory_efficient_layer_norm,
            normalization=config.normalization,
            persist_layer_norm=False,
            sequence_parallel=False,
        )
        norm = build(cls, seen, hidden_size, eps, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


def _maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _ensure_adam_state(optimizer: Any) -> None:
    """Give Adam the state that it makes at its first step, so that a state dict has it."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or len(optimizer.state) > 0:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _optimizer_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        _ensure_adam_state(self.optimizer)
        return original(self)

    return state_dict


def _optimizer_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _set_main_param(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})

    return set_main_param_and_optimizer_states


_RESULTS: queue.Queue[Any] = queue.Queue()


def _write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
    return _RESULTS


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _is_cuda_contiguous(tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous()


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


def _torch_norm(original: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm


_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_NO_TE = "without TransformerEngine or apex, "

MEGATRON_PATCHES: tuple[Patch, ...] = (
    Patch(
        target="torch._dynamo.config:disable",
        replacement=True,
        reason="functions that torch.compile took before we replaced it run as they are",
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        replacement=_get_cuda_rng_state,
        reason="reads a CUDA generator; the CPU's is the device generator",
        parameters=("device", "clone", "graph_safe"),
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        replacement=_set_cuda_rng_state,
        reason="defers to CUDA's initialisation, which never comes",
        parameters=("new_state", "device", "graph_safe"),
    ),
    Patch(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        factory=_torch_norm_new,
        reason="refuses sequence parallelism and persistent kernels; only the gradient mark was missing",
        parameters=(
            "cls",
            "config",
            "hidden_size",
            "eps",
            "persist_layer_norm",
            "zero_centered_gamma",
            "normalization",
        ),
    ),
    Patch(
        target="megatron.core.models.hybrid.hybrid_block:TENorm",
        factory=_torch_norm,
        reason="the final norm of a hybrid model is TransformerEngine's, whatever the spec says",
    ),
    *(
        Patch(
            target=f"megatron.core.transformer.moe.{module}:maybe_move_tensor_to_cpu",
            replacement=_maybe_move_tensor_to_cpu,
            reason="leaves a CPU tensor a tensor where all_to_all_single needs plain split sizes",
            parameters=("tensor", "as_numpy", "record_stream"),
        )
        for module in ("moe_utils", "token_dispatcher")
    ),
    Patch(
        target=f"{_DISTRIBUTED_OPTIMIZER}.state_dict",
        factory=_optimizer_state_dict,
        reason=_NO_TE + "asserts that Adam has taken a step",
        parameters=("self",),
    ),
    Patch(
        target=f"{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states",
        factory=_set_main_param,
        reason=_NO_TE + "looks for Adam's step among the sharded tensors, where it is not",
        parameters=("self", "model_param", "tensors"),
    ),
    Patch(
        target=f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict",
        factory=_optimizer_load_state_dict,
        reason=_NO_TE
        + "gives every parameter the same step tensor, which Adam then counts up once per parameter",
        parameters=("self", "state_dict"),
    ),
    Patch(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        replacement=_write_results_queue,
        reason="spawns a manager process per rank that imports __main__ again and survives a killed rank",
        parameters=("mp_mode",),
    ),
    Patch(
        target="megatron.core.inference.communication_utils:_is_cuda",
        replacement=_nothing,
        reason="asserts that the tensor is on CUDA",
        parameters=("tensor",),
    ),
    Patch(
        target="megatron.core.inference.communication_utils:_is_cuda_contiguous",
        replacement=_is_cuda_contiguous,
        reason="asserts that the tensor is on CUDA",
        parameters=("tensor",),
    ),
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        replacement=_nothing,
        reason="runs make, but the wheel ships the compiled helpers and no Makefile",
        parameters=(),
    ),
    *(
        Patch(
            target=f"{module}:initialize_megatron",
            factory=_allow_no_cuda,
            reason="asserts CUDA unless it is told not to",
        )
        for module in ("megatron.training.initialize", "megatron.training", "megatron.training.training")
    ),
)
