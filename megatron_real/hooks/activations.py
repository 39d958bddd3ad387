"""What a call declares to the ledger before it runs: `megatron_real.activations` over Megatron's own configuration.

Invariants (tests/unit/hooks/test_activations.py, tests/hooks/test_activations.py):
    - a pass declares what its largest micro-batch needs, as if all in flight were as large;
    - the ledger holds it for as long as the pass runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_real import activations
from megatron_real.activations import ActivationSpec, LayerWidths, PassLoad, StageLoad, passes_in_flight
from megatron_real.dataflow import Per
from megatron_real.layout import Layout

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_real.batch import Batch
    from megatron_real.hooks.model_copy import ModelCopy

__all__ = [
    "StageLoad",
    "activation_bytes",
    "activation_spec",
    "decode_bytes",
    "declared_activations",
    "pass_bytes",
    "passes_in_flight",
]


def activation_bytes(config: TransformerConfig, layout: Layout, load: StageLoad) -> int:
    """`megatron_real.activations.activation_bytes` of a Megatron configuration."""
    return activations.activation_bytes(
        _widths(config),
        layout,
        load,
        itemsize=config.params_dtype.itemsize,
        recompute=_recompute(config),
    )


def activation_spec(copy: ModelCopy) -> ActivationSpec:
    """What the activations of a copy depend on beside the batch."""
    config = copy.config
    return ActivationSpec(
        widths=_widths(config),
        num_layers=config.num_layers,
        num_query_groups=config.num_query_groups or config.num_attention_heads,
        head_width=config.kv_channels or config.hidden_size // config.num_attention_heads,
        padded_vocab_size=copy.role.padded_vocab_size,
        scalar_head=copy.role.scalar_head,
        itemsize=config.params_dtype.itemsize,
        recompute=_recompute(config),
        fused_attention=_fused(copy),
        group_size=config.microbatch_group_size_per_vp_stage,
    )


def _widths(config: TransformerConfig) -> LayerWidths:
    if config.num_moe_experts is None:
        mlp = config.ffn_hidden_size
    else:
        mlp = config.moe_router_topk * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
        mlp += config.moe_shared_expert_intermediate_size or 0
    return LayerWidths(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        attention_width=config.kv_channels * config.num_attention_heads,
        mlp_width=mlp,
        gated_mlp=config.gated_linear_unit,
    )


def _recompute(config: TransformerConfig) -> str:
    if config.recompute_granularity == "full":
        return "full"
    selective = config.recompute_granularity == "selective"
    return "selective" if selective and "core_attn" in (config.recompute_modules or ()) else "none"


def pass_bytes(
    copy: ModelCopy, batch: Batch, steps: Sequence[Sequence[Sequence[int]]], *, training: bool
) -> int:
    """Bytes for the largest micro-batch of a call of `forward`, as if all in flight were as large.

    Args:
        copy: the model.
        batch: this data-parallel rank's sequences; only their lengths are read.
        steps: the sequence ids of each micro-batch of each pass.
        training: see `StageLoad`.

    Raises:
        RealError: one of the sequences is not here.
    """
    spec, layout, stage, found = activation_spec(copy), copy.parallel.layout, _stage(copy), 0
    for microbatches in steps:
        for ids in microbatches:
            chosen = batch.select(ids, [])
            load = PassLoad(
                num_sequences=len(ids),
                length=max(chosen.lengths(Per.TOKEN), default=0),
                response_tokens=sum(chosen.response_lengths),
            )
            needed = activations.pass_bytes(
                spec, layout, stage, load, num_microbatches=len(microbatches), training=training
            )
            found = max(found, needed)
    return found


def decode_bytes(copy: ModelCopy, decodes: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of one pass of generation, which has one micro-batch and one layer under way.

    Args:
        copy: the model.
        decodes: of each micro-batch the sequences, the positions of the first pass, and those of the last in all.
    """
    spec, layout, stage = activation_spec(copy), copy.parallel.layout, _stage(copy)
    return max(
        (
            activations.decode_bytes(
                spec, layout, stage, num_sequences=num_sequences, first=first, capacity=capacity
            )
            for num_sequences, first, capacity in decodes
        ),
        default=0,
    )


@contextlib.contextmanager
def declared_activations(copy: ModelCopy, num_bytes: int) -> Iterator[None]:
    """Book `num_bytes` in the copy's ledger, if it has one, for a block.

    Raises:
        CapacityError: they do not fit; the block does not run then.
    """
    if copy.ledger is None:
        yield
        return
    owner = f"{copy.key} activations"
    copy.ledger.reserve(owner, num_bytes)
    try:
        yield
    finally:
        copy.ledger.free(owner)


def _stage(copy: ModelCopy) -> int:
    groups = copy.parallel.pg_collection
    assert groups is not None
    stage: int = groups.pp.rank()
    return stage


def _fused(copy: ModelCopy) -> bool:
    """Whether attention is TransformerEngine's and was not told to keep its scores."""
    return copy.role.use_te and copy.config.attention_backend.name in ("auto", "flash", "fused")
