"""What a router with biases counts: the real tokens of a minibatch, and no padding.

Megatron updates the biases from the number of tokens that each expert got since the last optimizer step. Micro-batches
are padded, by more or less as a plan cuts them, so the padding must be named to the router; otherwise the biases would
depend on the plan. Nothing else of a pass depends on padding: no token is dropped and no balancing loss is taken.

Invariants (tests/e2e/test_invariance.py):
    - after a step, biases are the same under every layout and every cut into micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import unwrap_model

from megatron_real.dataflow import Per
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.padding import PaddedMicrobatch
from megatron_real.hooks.patching import Patch

__all__ = ["ROUTER_PATCHES", "padding_mask"]


def _by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_expert_bias(
        self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> Any:
        if padding_mask is not None and padding_mask.dim() < routing_map.dim():
            padding_mask = padding_mask.unsqueeze(-1)
        return original(self, routing_map, padding_mask)

    return apply_expert_bias


ROUTER_PATCHES = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        factory=_by_token,
        reason="combines a mask of [tokens] with a map of [tokens, experts], which does not broadcast",
        parameters=("self", "routing_map", "padding_mask"),
    ),
)
"""For training passes with a padding mask."""


def padding_mask(copy: ModelCopy, model: Any, one: PaddedMicrobatch) -> torch.Tensor | None:
    """Where padding stands, [b, s] bool; None where no router counts.

    Args:
        copy: the model.
        model: one of its chunks, as the schedule runs it.
        one: the micro-batch.

    Returns:
        What the chunk's forward takes: under sequence parallelism [b, s / tp], but on `GPTModel`'s first chunk, which
        cuts it itself.
    """
    config, groups = copy.config, copy.parallel.pg_collection
    if not (config.moe_router_enable_expert_bias and torch.is_grad_enabled()):
        return None
    assert groups is not None
    device = next(copy.chunks[0].parameters()).device
    lengths = torch.tensor(one.batch.lengths(Per.TOKEN), device=device).unsqueeze(-1)
    padding = torch.arange(one.length, device=device) >= lengths
    chunk = unwrap_model(model)
    if config.sequence_parallel and not (isinstance(chunk, GPTModel) and chunk.pre_process):
        part: torch.Tensor = padding.chunk(groups.tp.size(), dim=1)[groups.tp.rank()]
        return part
    return padding
