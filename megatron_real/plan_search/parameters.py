"""Which parameters a model has in a layout, and which rank holds which part: computed from shapes, without Megatron.

The table names keys, global shapes and boxes as Megatron's ``sharded_state_dict`` does, so that reallocations can be
planned and priced before any model is built. Closed forms give the sizes of every pipeline stage at once. Tensors that
are split lie in equal parts on the tensor-parallel ranks along one axis; a gated MLP's first projection is two tensors
of one key, each split; experts are split over expert ranks first.

Invariants (tests/unit/plan_search/test_parameters.py, tests/hooks/test_planned_memory.py):
    - the entries of every rank are those of the model that Megatron builds in that layout;
    - the closed forms are sums over the table;
    - the boxes of one data-parallel replica cover every tensor.

Shape legend: h hidden size, q columns of all query heads, k of all key heads, f MLP width, e experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megatron_real.errors import PlanError
from megatron_real.layout import Coordinates, Layout, Mesh, coordinates_of, stage_layers
from megatron_real.model_shape import ModelShape
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, ShardEntry

__all__ = [
    "ChunkElements",
    "EndTensors",
    "StageParameters",
    "chunk_elements",
    "end_tensors",
    "expert_data_parallel",
    "expert_tensor_parallel",
    "layer_tensors",
    "num_parameters",
    "param_table",
    "rank_entries",
    "separate_experts",
    "stage_parameters",
    "Tensor",
]


class Tensor(NamedTuple):
    """A parameter of a layer or of an end of the model, without the axes of layer and expert."""

    key: str
    shape: tuple[int, ...]
    axis: int | None = None
    """The axis that is split; None is a copy on every tensor-parallel rank."""
    parts: int = 1
    """Equal tensors along the axis that are split one by one (2: gate and input of a gated MLP)."""
    expert: bool = False
    """One for every expert: `shape` is of one."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class StageParameters(NamedTuple):
    """Parameters of one rank of a pipeline stage."""

    dense: int
    """Held alike by the ``dp * cp`` ranks of a data-parallel group."""
    expert: int
    """Of routed experts, held alike by the ranks of an expert-data-parallel group."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkElements:
    """Elements of one model chunk on one rank, each parameter rounded up by itself."""

    dense: int
    """Without `tied`."""
    expert: int
    """In buffers of their own (see `separate_experts`)."""
    tied: int
    """The word embedding, where it is on two stages: Megatron gives it a bucket of its own."""

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.tied


def expert_tensor_parallel(layout: Layout) -> int:
    """Ranks over which one expert is split."""
    return layout.etp if layout.etp is not None else layout.tp


def expert_data_parallel(layout: Layout) -> int:
    """Ranks of a stage that hold the same experts (`megatron.core.parallel_state`, expert data parallel group)."""
    return max(1, layout.dp * layout.tp * layout.cp // (layout.ep * expert_tensor_parallel(layout)))


def separate_experts(layout: Layout) -> bool:
    """Whether gradients of experts are reduced over the expert-data-parallel group, in buffers of their own.

    `megatron.core.tensor_parallel.layers.ColumnParallelLinear`: with ``ep > 1`` or ``etp != tp``.
    """
    return layout.ep > 1 or expert_tensor_parallel(layout) != layout.tp


@lru_cache(maxsize=1024)
def layer_tensors(shape: ModelShape, *, experts: bool) -> tuple[Tensor, ...]:
    """The parameters of a decoder layer, with or without routed experts; keys follow ``decoder.layers.``."""
    return tuple(_layer_tensors(shape, experts))


def _ties(shape: ModelShape) -> bool:
    """Whether embedding and head share their weight: a scalar head has none to share."""
    return shape.tied_embeddings and not shape.scalar_head


def _layer_tensors(shape: ModelShape, experts: bool) -> Iterator[Tensor]:
    h = shape.hidden_size
    qkv = shape.query_width + 2 * shape.key_width
    yield from _norm(shape, "self_attention.linear_qkv.layer_norm_", h)
    yield Tensor("self_attention.linear_proj.weight", (h, shape.query_width), 1)
    if shape.linear_bias:
        yield Tensor("self_attention.linear_proj.bias", (h,))
    yield Tensor("self_attention.linear_qkv.weight", (qkv, h), 0)
    if shape.linear_bias or shape.qkv_bias:
        yield Tensor("self_attention.linear_qkv.bias", (qkv,), 0)
    if shape.qk_norm:
        yield from _norm(shape, "self_attention.q_layernorm.", shape.head_width)
        yield from _norm(shape, "self_attention.k_layernorm.", shape.head_width)
    yield from _norm(shape, "mlp.linear_fc1.layer_norm_", h)
    if not experts:
        yield from _mlp(shape, "mlp.", shape.ffn_hidden_size)
        return
    yield Tensor("mlp.router.weight", (shape.num_experts, h))
    if shape.linear_bias:
        yield Tensor("mlp.router.bias", (shape.num_experts,))
    yield from _mlp(shape, "mlp.experts.experts.", shape.expert_width, expert=True)
    if shape.shared_expert_ffn_hidden_size:
        yield from _mlp(shape, "mlp.shared_experts.", shape.shared_expert_ffn_hidden_size)


def _norm(shape: ModelShape, prefix: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}weight", (width,))
    if shape.norm_bias:
        yield Tensor(f"{prefix}bias", (width,))


def _mlp(shape: ModelShape, prefix: str, width: int, *, expert: bool = False) -> Iterator[Tensor]:
    h, parts = shape.hidden_size, 2 if shape.gated_mlp else 1
    yield Tensor(f"{prefix}linear_fc1.weight", (parts * width, h), 0, parts, expert)
    if shape.linear_bias:
        yield Tensor(f"{prefix}linear_fc1.bias", (parts * width,), 0, parts, expert)
    yield Tensor(f"{prefix}linear_fc2.weight", (h, width), 1, 1, expert)
    if shape.linear_bias:
        yield Tensor(f"{prefix}linear_fc2.bias", (h,), None, 1, expert)


def _first_tensors(shape: ModelShape) -> tuple[Tensor, ...]:
    h = shape.hidden_size
    words = Tensor("embedding.word_embeddings.weight", (shape.padded_vocab_size, h), 0)
    if not shape.learned_positions:
        return (words,)
    return (words, Tensor("embedding.position_embeddings.weight", (shape.learned_positions, h)))


def _last_tensors(shape: ModelShape, *, first_too: bool) -> tuple[Tensor, ...]:
    norm = tuple(_norm(shape, "decoder.final_layernorm.", shape.hidden_size))
    if shape.scalar_head:
        return (*norm, Tensor("value_head.weight", (1, shape.hidden_size)))
    if not shape.tied_embeddings:
        return (*norm, Tensor("output_layer.weight", (shape.padded_vocab_size, shape.hidden_size), 0))
    return norm if first_too else (*norm, _first_tensors(shape)[0])


class EndTensors(NamedTuple):
    """Parameters outside the layers."""

    words: Tensor
    """On the first stage, and on the last one too if the head shares it."""
    first: tuple[Tensor, ...]
    """Others of the first stage."""
    last: tuple[Tensor, ...]
    """Of the last stage, without a head that the embedding serves as."""
    tied: bool
    """The embedding is the head."""


@lru_cache(maxsize=1024)
def end_tensors(shape: ModelShape) -> EndTensors:
    """The parameters outside the layers."""
    words, *others = _first_tensors(shape)
    return EndTensors(words, tuple(others), _last_tensors(shape, first_too=True), _ties(shape))


def num_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    layout = Layout(etp=1)
    return stage_parameters(shape, layout)[0].total


@lru_cache(maxsize=1 << 16)
def stage_parameters(shape: ModelShape, layout: Layout) -> tuple[StageParameters, ...]:
    """Parameters of one rank of each pipeline stage, over all its chunks.

    Raises:
        PlanError: the model cannot be cut like this.
    """
    found = []
    for chunks in chunk_elements(shape, layout):
        dense = sum(chunk.dense + chunk.tied for chunk in chunks)
        found.append(StageParameters(dense, sum(chunk.expert for chunk in chunks)))
    if separate_experts(layout) or not shape.num_experts:
        return tuple(found)
    # Without a group of their own, experts are among the dense ones: take them out.
    experts = _sizes(shape, layout.tp, layout.ep, expert_tensor_parallel(layout), 1).expert
    layers = [
        sum(map(shape.has_experts, sum(chunks, ()))) for chunks in stage_layers(shape.num_layers, layout)
    ]
    return tuple(
        StageParameters(stage.dense - experts * number, stage.expert + experts * number)
        for stage, number in zip(found, layers, strict=True)
    )


@lru_cache(maxsize=1 << 16)
def chunk_elements(
    shape: ModelShape, layout: Layout, rounding: int = 1
) -> tuple[tuple[ChunkElements, ...], ...]:
    """Elements of one rank by pipeline stage and model chunk, every parameter rounded up to a multiple of `rounding`.

    Raises:
        PlanError: the model cannot be cut like this.
    """
    sizes = _sizes(shape, layout.tp, layout.ep, expert_tensor_parallel(layout), rounding)
    separate = separate_experts(layout)
    result = []
    for stage, chunks in enumerate(stage_layers(shape.num_layers, layout)):
        found = []
        for index, layers in enumerate(chunks):
            first = stage == 0 and index == 0
            last = stage == layout.pp - 1 and index == layout.vpp - 1
            with_experts = sum(map(shape.has_experts, layers)) if shape.num_experts else 0
            dense = (len(layers) - with_experts) * sizes.dense_layer + with_experts * sizes.expert_layer
            expert = with_experts * sizes.expert
            dense += (sizes.positions if first else 0) + (sizes.last if last else 0)
            words = sizes.words if first or (last and _ties(shape)) else 0
            two_stages = _ties(shape) and layout.pp > 1
            found.append(
                ChunkElements(
                    dense=dense + (0 if two_stages else words) + (0 if separate else expert),
                    expert=expert if separate else 0,
                    tied=words if two_stages else 0,
                )
            )
        result.append(tuple(found))
    return tuple(result)


class _Sizes(NamedTuple):
    """Elements on one rank, rounded up parameter by parameter."""

    dense_layer: int
    expert_layer: int
    """A layer with experts, without them."""
    expert: int
    """All experts of a rank in one layer."""
    words: int
    positions: int
    last: int
    """Final norm and head; not of tied embeddings."""


@lru_cache(maxsize=1 << 14)
def _sizes(shape: ModelShape, tp: int, ep: int, etp: int, rounding: int) -> _Sizes:
    def rounded(tensors: tuple[Tensor, ...]) -> int:
        total = 0
        for tensor in tensors:
            split = etp if tensor.expert else tp
            elements = tensor.num_elements // (_divide(tensor, split) if tensor.axis is not None else 1)
            total += -(-elements // rounding) * rounding
        return total

    experts = layer_tensors(shape, experts=True) if shape.num_experts else ()
    if shape.num_experts % ep:
        raise PlanError(f"layout: found ep={ep}; expected a divisor of num_experts={shape.num_experts}.")
    per_rank = shape.num_experts // ep
    first = _first_tensors(shape)
    return _Sizes(
        dense_layer=rounded(layer_tensors(shape, experts=False)),
        expert_layer=rounded(tuple(tensor for tensor in experts if not tensor.expert)),
        expert=per_rank * rounded(tuple(tensor for tensor in experts if tensor.expert)),
        words=rounded(first[:1]),
        positions=rounded(first[1:]),
        last=rounded(_last_tensors(shape, first_too=True)),
    )


def _divide(tensor: Tensor, split: int) -> int:
    """`split`, if the tensor can be split so."""
    assert tensor.axis is not None, "the tensor is split"
    extent = tensor.shape[tensor.axis]
    if extent % (split * tensor.parts):
        raise PlanError(
            f"layout: {tensor.key} has {extent // tensor.parts} rows or columns; expected a multiple of {split}, the "
            "tensor-parallel ranks that it is split over. Lower tp (or etp)."
        )
    return split


# The table


def param_table(shape: ModelShape, layout: Layout, mesh: Mesh, dtype: str = "float32") -> ParamTable:
    """The table of one copy over all ranks of `mesh`, as `realloc_ops.local_shards.gather_tables` would collect it.

    Raises:
        PlanError: the model cannot be cut like this.
    """
    return ParamTable.of({rank: rank_entries(shape, layout, mesh, rank, dtype) for rank in mesh.ranks})


def rank_entries(
    shape: ModelShape, layout: Layout, mesh: Mesh, rank: int, dtype: str = "float32"
) -> tuple[ShardEntry, ...]:
    """What global `rank`, which must lie in `mesh`, holds of a model: each shard once.

    Raises:
        PlanError: the model cannot be cut like this.
    """
    at = coordinates_of(rank, mesh, layout)
    return _entries(shape, layout, at.pp, at.tp, _expert_cell(at, layout), dtype)


def _expert_cell(at: Coordinates, layout: Layout) -> int:
    """Which part of the experts: ``etp rank + etp * ep rank`` (order tp-ep-dp inside a stage)."""
    index = at.tp + layout.tp * (at.cp + layout.cp * at.dp)
    return index % (layout.ep * expert_tensor_parallel(layout))


@lru_cache(maxsize=4096)
def _entries(
    shape: ModelShape, layout: Layout, stage: int, tp: int, expert_cell: int, dtype: str
) -> tuple[ShardEntry, ...]:
    chunks = stage_layers(shape.num_layers, layout)[stage]
    cutter = _Cutter(shape, layout, tp, expert_cell, dtype)
    found: list[ShardEntry] = []
    if stage == 0:
        found += [entry for tensor in _first_tensors(shape) for entry in cutter.entries(tensor)]
    for layers in chunks:
        for layer in layers:
            found += cutter.layer(layer)
    if stage == layout.pp - 1:
        tensors = _last_tensors(shape, first_too=stage == 0)
        found += [entry for tensor in tensors for entry in cutter.entries(tensor)]
    return tuple(found)


class _Cutter:
    """Makes the entries of one rank."""

    def __init__(self, shape: ModelShape, layout: Layout, tp: int, expert_cell: int, dtype: str) -> None:
        self._shape = shape
        self._layout = layout
        self._tp = tp
        self._etp_size = expert_tensor_parallel(layout)
        self._ep, self._etp = divmod(expert_cell, self._etp_size)
        self._dtype = dtype

    def layer(self, layer: int) -> Iterator[ShardEntry]:
        for tensor in layer_tensors(self._shape, experts=self._shape.has_experts(layer)):
            prefix = "decoder.layers."
            lead: tuple[tuple[int, int], ...] = ((layer, self._shape.num_layers),)
            if self._shape.num_dense_layers and self._shape.num_experts:
                # Layers of two kinds are not stacked: `TransformerBlock.sharded_state_dict`, non-homogeneous layers.
                prefix, lead = f"decoder.layers.{layer}.", ()
            named = tensor._replace(key=prefix + tensor.key)
            if not tensor.expert:
                yield from self.entries(named, lead)
                continue
            count = self._shape.num_experts // self._layout.ep
            for expert in range(self._ep * count, (self._ep + 1) * count):
                yield from self.entries(named, (*lead, (expert, self._shape.num_experts)))

    def entries(self, tensor: Tensor, lead: tuple[tuple[int, int], ...] = ()) -> Iterator[ShardEntry]:
        """Args: the tensor; (index, extent) of the axes in front of it."""
        at = tuple(index for index, _ in lead)
        whole = (*(extent for _, extent in lead), *tensor.shape)
        rank, size = (self._etp, self._etp_size) if tensor.expert else (self._tp, self._layout.tp)
        for offset, extents in _cuts(tensor, rank, size):
            yield ShardEntry(tensor.key, Box(at + offset, (1,) * len(lead) + extents), whole, self._dtype)


def _cuts(tensor: Tensor, rank: int, size: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extents) of the boxes of one tensor-parallel rank."""
    if tensor.axis is None:
        yield (0,) * len(tensor.shape), tensor.shape
        return
    part = tensor.shape[tensor.axis] // tensor.parts
    extent = part // _divide(tensor, size)
    for index in range(tensor.parts):
        offset, extents = [0] * len(tensor.shape), list(tensor.shape)
        offset[tensor.axis] = index * part + rank * extent
        extents[tensor.axis] = extent
        yield tuple(offset), tuple(extents)
