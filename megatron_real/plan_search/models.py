"""A role's model as the planner sees it: its shape, and how Megatron keeps and runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_real.model_shape import ModelShape

__all__ = ["ModelSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What prices and memory depend on beside the layout."""

    shape: ModelShape
    param_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradient buffer (``accumulate_allreduce_grads_in_fp32``)."""
    distributed_optimizer: bool = True
    """Optimizer state is spread over the data-parallel ranks."""
    fused_attention: bool = True
    """The attention kernel keeps no scores."""
    cuda_graph: bool = False
    """Decoding replays a captured graph, so that its launches cost little."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced beside the last backward pass; `hooks.model_copy.Training` does not unless its DDP options
    say so."""
    overlap_param_gather: bool = False
    """Updated parameters are gathered beside the first forward pass of the next step; as above."""

    @property
    def param_itemsize(self) -> int:
        return 4 if self.param_dtype == "float32" else 2

    @property
    def grad_itemsize(self) -> int:
        return 4 if self.grad_dtype == "float32" else 2

    @property
    def has_main_params(self) -> bool:
        """The optimizer keeps fp32 copies of parameters that are not fp32 themselves."""
        return self.param_dtype != "float32"
