"""How many bytes of activations a pass needs at most on one rank.

One arithmetic for the runtime, which declares them to its ledger, and for the planner, which predicts them. No torch.
An estimate from shapes, not a measurement. It counts what dominates, the tensors that the layers keep for the backward
pass and the logits, and leaves out what does not grow with the model: tokens, positions, messages between stages.

Invariants (tests/unit/hooks/test_activations.py, tests/hooks/test_planned_memory.py):
    - more sequences, longer ones, more layers or more micro-batches in flight never need less;
    - recomputation never needs more, and with several layers less;
    - micro-batches in flight are those of Megatron's own schedule;
    - what the planner predicts of a call is what the runtime declares for the same lengths.

Shape legend: s positions, b sequences, h hidden size, a attention heads, t tensor-parallel ranks, f MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_real.layout import Layout, stage_layers
from megatron_real.model_shape import ModelShape

__all__ = [
    "ActivationSpec",
    "LayerWidths",
    "PassLoad",
    "StageLoad",
    "activation_bytes",
    "decode_bytes",
    "kv_cache_bytes",
    "pass_bytes",
    "passes_in_flight",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWidths:
    """The columns of a layer that its activations follow."""

    hidden_size: int
    num_attention_heads: int
    attention_width: int
    """Columns of all query heads."""
    mlp_width: int
    """Columns of the MLP that a token goes through: with experts, those of all its experts."""
    gated_mlp: bool = False

    @classmethod
    def of(cls, shape: ModelShape) -> LayerWidths:
        """Of the widest layer of `shape`."""
        mlp = shape.ffn_hidden_size if shape.num_experts == 0 or shape.num_dense_layers else 0
        if shape.num_experts:
            routed = shape.experts_per_token * shape.expert_width
            mlp = max(mlp, routed + shape.shared_expert_ffn_hidden_size)
        return cls(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            attention_width=shape.query_width,
            mlp_width=mlp,
            gated_mlp=shape.gated_mlp,
        )

    @property
    def sharded_bytes(self) -> int:
        """Per token, in 2-byte activations, what tensor parallelism divides; 24 h for the paper's GPT."""
        return 8 * self.attention_width + 2 * self.mlp_width * (3 if self.gated_mlp else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """What one micro-batch asks of a model chunk, and how many of them are under way at once."""

    num_sequences: int
    length: int
    """Positions of each sequence on this rank."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """What the activations of a model depend on beside layout and batch."""

    widths: LayerWidths
    num_layers: int
    num_query_groups: int
    head_width: int
    padded_vocab_size: int
    scalar_head: bool = False
    itemsize: int = 2
    """Bytes of an activation: those of a parameter."""
    recompute: str = "none"
    """``none``, ``selective`` (attention scores) or ``full``."""
    fused_attention: bool = False
    group_size: int | None = None
    """Micro-batches in a row through a chunk, with interleaving; None is pp."""

    @classmethod
    def of(cls, shape: ModelShape, *, itemsize: int, recompute: str, fused_attention: bool) -> ActivationSpec:
        """Of a model as the planner knows it."""
        return cls(
            widths=LayerWidths.of(shape),
            num_layers=shape.num_layers,
            num_query_groups=shape.num_query_groups,
            head_width=shape.head_width,
            padded_vocab_size=shape.padded_vocab_size,
            scalar_head=shape.scalar_head,
            itemsize=itemsize,
            recompute=recompute,
            fused_attention=fused_attention,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLoad:
    """One micro-batch."""

    num_sequences: int
    length: int
    """Tokens of its longest sequence, prompt and response."""
    response_tokens: int
    """Of all its sequences together."""


def activation_bytes(
    widths: LayerWidths, layout: Layout, load: StageLoad, *, itemsize: int, recompute: str = "none"
) -> int:
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

    Context parallelism is in the load: a rank has its part of the positions, which attend to all of them.
    """
    tokens = load.num_sequences * load.length
    split = layout.tp if layout.sp else 1
    layer_input = tokens * 2 * widths.hidden_size // split
    rest = tokens * (10 * widths.hidden_size // split + widths.sharded_bytes // layout.tp)
    context = load.length if load.context_length is None else load.context_length
    scores = 0 if load.fused_attention else 5 * widths.num_attention_heads * tokens * context // layout.tp
    count = load.num_layers_on_stage * load.microbatches_in_flight
    if count == 0:
        in_layers = 0
    elif not load.training:
        in_layers = rest + scores
    elif recompute == "full":
        in_layers = (count - 1) * layer_input + rest + scores  # the last layer's input is in `rest`
    elif recompute == "selective":
        in_layers = count * rest + scores
    else:
        in_layers = count * (rest + scores)
    positions = tokens if load.logit_positions is None else load.logit_positions
    return in_layers * itemsize // 2 + positions * load.vocab_shard * (8 + itemsize)


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


@lru_cache(maxsize=4096)
def _chunk_layers(num_layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Layers by stage and chunk."""
    return tuple(tuple(map(len, chunks)) for chunks in stage_layers(num_layers, layout))


def pass_bytes(
    spec: ActivationSpec, layout: Layout, stage: int, load: PassLoad, *, num_microbatches: int, training: bool
) -> int:
    """Bytes on a pipeline stage for passes of which each in flight is as large as `load`."""
    multiple = layout.tp if layout.sp else 1
    length = -(-load.length // (multiple * layout.cp)) * multiple
    columns = 1 if spec.scalar_head else spec.padded_vocab_size // layout.tp
    # Under sequence parallelism all positions pass through the head, else one per response token.
    answers = None if layout.sp else -(-max(load.response_tokens, load.num_sequences) // layout.cp)
    return activation_bytes(
        spec.widths,
        layout,
        StageLoad(
            num_sequences=load.num_sequences,
            length=length,
            context_length=length * layout.cp,
            num_layers_on_stage=max(_chunk_layers(spec.num_layers, layout)[stage]),
            microbatches_in_flight=passes_in_flight(layout, stage, num_microbatches, spec.group_size),
            training=training,
            fused_attention=spec.fused_attention,
            vocab_shard=columns if stage == layout.pp - 1 else 0,
            logit_positions=answers,
        ),
        itemsize=spec.itemsize,
        recompute=spec.recompute,
    )


def decode_bytes(
    spec: ActivationSpec, layout: Layout, stage: int, *, num_sequences: int, first: int, capacity: int
) -> int:
    """Bytes on a pipeline stage of one pass of generation, which has one micro-batch and one layer under way.

    Args:
        spec: the model.
        layout: degrees.
        stage: pipeline rank.
        num_sequences: of the micro-batch.
        first: positions of the first pass.
        capacity: positions of the last pass in all.
    """
    found = 0
    # The first pass attends to itself, and every later one, of a single position, to the cache.
    for length, context_length in ((first, first), (1, capacity)):
        load = StageLoad(
            num_sequences=num_sequences,
            length=length,
            context_length=context_length,
            num_layers_on_stage=1,
            fused_attention=spec.fused_attention,
            # Logits are gathered to the whole vocabulary, of the last position only.
            vocab_shard=spec.padded_vocab_size if stage == layout.pp - 1 else 0,
            logit_positions=num_sequences,
        )
        found = max(found, activation_bytes(spec.widths, layout, load, itemsize=spec.itemsize))
    return found


def kv_cache_bytes(spec: ActivationSpec, layout: Layout, stage: int, num_positions: int) -> int:
    """Bytes of the key-value cache on a rank of a pipeline stage.

    Keys and values of `num_positions` (sequences times positions of each) in every layer of the stage; with more
    tensor-parallel ranks than groups each rank has one group
    (`megatron.core.transformer.attention.Attention.num_query_groups_per_partition`).
    """
    num_layers = sum(_chunk_layers(spec.num_layers, layout)[stage])
    groups = max(1, spec.num_query_groups // layout.tp)
    return num_layers * groups * 2 * spec.head_width * num_positions * spec.itemsize
