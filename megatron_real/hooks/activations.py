"""How many bytes of activations a call needs at most on this rank: what it declares to the ledger before it runs.

An estimate from shapes, not a measurement. It counts what dominates, the tensors that the layers keep for the backward
pass and the logits, and leaves out what does not grow with the model: tokens, positions, messages between stages.

Invariants (tests/unit/hooks/test_activations.py):
    - more sequences, longer ones, more layers or more micro-batches in flight never need less;
    - recomputation never needs more, and with several layers less;
    - micro-batches in flight are those of Megatron's own schedule.

Shape legend: s positions, b sequences, h hidden size, a attention heads, t tensor-parallel ranks, f MLP width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_real.dataflow import Per
from megatron_real.layout import Layout, stage_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_real.batch import Batch
    from megatron_real.hooks.model_copy import ModelCopy

__all__ = [
    "StageLoad",
    "activation_bytes",
    "decode_bytes",
    "declared_activations",
    "pass_bytes",
    "passes_in_flight",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """What one micro-batch asks of a model chunk, and how many of them are under way at once."""

    num_sequences: int
    length: int
    """Positions of each sequence."""
    context_length: int | None = None
    """Positions that each position attends to; None is `length`."""
    num_layers_on_stage: int
    """Of one model chunk."""
    microbatches_in_flight: int = 1
    """Forward passes of a chunk whose backward pass is still to come; does not matter without training."""
    training: bool = False
    fused_attention: bool = False
    """The attention kernel keeps no scores (flash attention)."""
    vocab_shard: int = 0
    """Columns of the logits on this rank; 0 where the head is not."""
    logit_positions: int | None = None
    """Positions whose logits are computed; None is all."""


def activation_bytes(config: TransformerConfig, layout: Layout, load: StageLoad) -> int:
    """Bytes of activations at the peak of a pass over one pipeline stage.

    The layers are counted as in Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", sections 4 and 5. There a layer of a GPT with f = 4h, 2-byte activations and 1-byte dropout masks keeps::

        s b h (10 + 24 / t + 5 a s / (h t))     bytes with tensor parallelism         (equation 2)
        s b h (34 / t + 5 a s / (h t))          bytes with sequence parallelism too   (equation 4)

    Of the 24, 8 are queries, keys, values and the projection's input, and 16 the MLP; these follow the model's own
    widths here, with a third tensor of width f for a gated MLP and, with experts, f per expert that a token goes to, if
    the tokens are spread evenly. Other dtypes scale all of it. Grouped keys and values count as whole heads.

    - Training: every layer of every micro-batch in flight keeps this.
    - Full recomputation: every layer keeps its input, 2 s b h, and one layer at a time all of the above.
    - Selective recomputation: only one layer at a time keeps the attention scores, the terms in s squared.
    - Fused attention: no layer does.
    - Without training one layer at a time is alive: its part of the above is the bound.
    - Head: of one micro-batch, the logits and two fp32 tensors of their size (the log-softmax, and its exponentials or
      its gradient): positions * columns * (8 + itemsize).

    Context parallelism is not counted: no pass takes it.
    """
    itemsize: int = config.params_dtype.itemsize
    tokens = load.num_sequences * load.length
    split = layout.tp if layout.sp else 1
    layer_input = tokens * 2 * config.hidden_size // split
    rest = tokens * (10 * config.hidden_size // split + _sharded_width(config) // layout.tp)
    context = load.length if load.context_length is None else load.context_length
    scores = 0 if load.fused_attention else 5 * config.num_attention_heads * tokens * context // layout.tp
    count = load.num_layers_on_stage * load.microbatches_in_flight
    if count == 0:
        in_layers = 0
    elif not load.training:
        in_layers = rest + scores
    elif config.recompute_granularity == "full":
        in_layers = (count - 1) * layer_input + rest + scores  # the last layer's input is in `rest`
    elif config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ()):
        in_layers = count * rest + scores
    else:
        in_layers = count * (rest + scores)
    positions = tokens if load.logit_positions is None else load.logit_positions
    return in_layers * itemsize // 2 + positions * load.vocab_shard * (8 + itemsize)


def _sharded_width(config: TransformerConfig) -> int:
    """Bytes per token and layer, in 2-byte activations, that tensor parallelism divides; 24 h for the paper's GPT."""
    attention = config.kv_channels * config.num_attention_heads
    if config.num_moe_experts is None:
        mlp = config.ffn_hidden_size
    else:
        mlp = config.moe_router_topk * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
        mlp += config.moe_shared_expert_intermediate_size or 0
    width: int = 8 * attention + 2 * mlp * (3 if config.gated_linear_unit else 2)
    return width


def passes_in_flight(layout: Layout, stage: int, num_microbatches: int, group_size: int | None = None) -> int:
    """Forward passes of a model chunk that wait for their backward pass at once, on a pipeline stage.

    1F1B: stage s runs pp - s - 1 passes ahead and one more before its first backward pass. Interleaved, it runs
    2 (pp - s - 1) + (vpp - 1) * group ahead, where a pass is one micro-batch through one of its vpp chunks (Narayanan
    et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.2).

    Args:
        layout: degrees.
        stage: pipeline rank.
        num_microbatches: of an optimizer step.
        group_size: micro-batches in a row through a chunk, with interleaving; None is pp.
    """
    ahead = layout.pp - stage - 1
    if layout.vpp > 1:
        ahead = 2 * ahead + (layout.vpp - 1) * (group_size or layout.pp)
    return min(ahead + 1, num_microbatches * layout.vpp)


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
    layout, stage = copy.parallel.layout, _stage(copy)
    multiple = layout.tp if layout.sp else 1
    num_layers = max(map(len, stage_layers(copy.config.num_layers, layout)[stage]))
    columns = 1 if copy.role.scalar_head else copy.role.padded_vocab_size // layout.tp
    group_size = copy.config.microbatch_group_size_per_vp_stage
    found = 0
    for microbatches in steps:
        in_flight = passes_in_flight(layout, stage, len(microbatches), group_size)
        for ids in microbatches:
            chosen = batch.select(ids, [])
            load = StageLoad(
                num_sequences=len(ids),
                length=-(-max(chosen.lengths(Per.TOKEN), default=0) // multiple) * multiple,
                num_layers_on_stage=num_layers,
                microbatches_in_flight=in_flight,
                training=training,
                fused_attention=_fused(copy),
                vocab_shard=columns if stage == layout.pp - 1 else 0,
                # Under sequence parallelism all positions pass through the head, else one per response token.
                logit_positions=None if layout.sp else max(sum(chosen.response_lengths), len(ids)),
            )
            found = max(found, activation_bytes(copy.config, layout, load))
    return found


def decode_bytes(copy: ModelCopy, decodes: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of one pass of generation, which has one micro-batch and one layer under way.

    Args:
        copy: the model.
        decodes: of each micro-batch the sequences, the positions of the first pass, and those of the last in all.
    """
    layout, stage = copy.parallel.layout, _stage(copy)
    found = 0
    for num_sequences, first, capacity in decodes:
        # The first pass attends to itself, and every later one, of a single position, to the cache.
        for length, context_length in ((first, first), (1, capacity)):
            load = StageLoad(
                num_sequences=num_sequences,
                length=length,
                context_length=context_length,
                num_layers_on_stage=1,
                fused_attention=_fused(copy),
                # Logits are gathered to the whole vocabulary, of the last position only.
                vocab_shard=copy.role.padded_vocab_size if stage == layout.pp - 1 else 0,
                logit_positions=num_sequences,
            )
            found = max(found, activation_bytes(copy.config, layout, load))
    return found


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
