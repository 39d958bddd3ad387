"""Copies of a small dense transformer, sharded as Megatron-Core shards it, without Megatron.

Each rank gets real parameters and stand-ins for `ShardedTensor`. Every element has a value that depends on its key and
its *global* coordinates only, computed here without any code of the package, so a wrong mapping cannot hide.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from megatron_real.realloc_ops.storage.segments import SegmentSet

__all__ = ["Copy", "FakeShardedTensor", "SyntheticLayout", "SyntheticModel", "build_copy", "expected_values"]


@dataclass(frozen=True, kw_only=True)
class FakeShardedTensor:
    """The attributes of Megatron-Core's `ShardedTensor` that are read."""

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    replica_id: tuple[int, ...] = (0, 0, 0)
    flattened_range: slice | None = None


@dataclass(frozen=True, kw_only=True)
class SyntheticModel:
    layers: int = 4
    hidden: int = 8
    ffn: int = 16
    heads: int = 8
    kv_groups: int = 2
    vocab: int = 32
    tied: bool = False
    fp32_bias: bool = False
    """An fp32 buffer per layer in a model of another dtype (as a router's expert bias)."""


@dataclass(frozen=True, kw_only=True)
class SyntheticLayout:
    start: int = 0
    dp: int = 1
    tp: int = 1
    stages: tuple[tuple[int, ...], ...] = ()
    """Layers of each pipeline stage; empty is one stage with all. A stage's layers need not be contiguous (VPP)."""
    dtype: torch.dtype = torch.float32

    def stages_of(self, model: SyntheticModel) -> tuple[tuple[int, ...], ...]:
        return self.stages or (tuple(range(model.layers)),)

    def ranks(self, model: SyntheticModel) -> range:
        return range(self.start, self.start + self.dp * self.tp * len(self.stages_of(model)))


def expected_values(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """fp32 integers below 2**24 that depend on key and global coordinates."""
    total = torch.full(shape, zlib.crc32(key.encode()), dtype=torch.int64)
    for axis, (first, extent) in enumerate(zip(offset, shape, strict=True)):
        along = torch.arange(first, first + extent, dtype=torch.int64).view(
            [-1 if a == axis else 1 for a in range(len(shape))]
        )
        total = (total * 1000003 + (along + 1) * 7919) % 2**31
    return (total % 2**24).to(torch.float32)


@dataclass(kw_only=True)
class Copy:
    """One rank's part of a copy."""

    module: torch.nn.Module
    shard: Callable[[], list[FakeShardedTensor]]
    """Makes the stand-ins of what the module holds now."""
    segments: SegmentSet
    sharded: list[FakeShardedTensor] = field(init=False)
    shards: LocalShards = field(init=False)

    def __post_init__(self) -> None:
        self.sharded = self.shard()
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        self.shards = local_table(self.sharded, named)

    def fill(self) -> None:
        for tensor, values in self._with_values(None):
            tensor.copy_(values)

    def poison(self) -> None:
        for segment in self.segments.segments:
            segment.flat.fill_(float("nan"))

    def rebind(self) -> None:
        """Bind every parameter to a new storage, as inference modules do that repack their weights."""
        for parameter in self.module.parameters():
            parameter.data = torch.full_like(parameter, float("nan"))
        self.sharded = self.shard()

    def mismatches(self, wire: torch.dtype | None = None) -> list[str]:
        """Keys whose bits differ from what they should be after a trip in dtype `wire`."""
        wrong = []
        for item, (tensor, values) in zip(self.sharded, self._with_values(wire), strict=True):
            if not torch.equal(tensor.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)):
                wrong.append(f"{item.key}@{item.global_offset}")
        return wrong

    def _with_values(self, wire: torch.dtype | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for item in self.sharded:
            shape = (1,) * item.prepend_axis_num + item.local_shape
            values = expected_values(item.key, item.global_offset, shape).view(item.local_shape)
            assert item.data is not None
            if wire is not None and "bias32" not in item.key:
                values = values.to(wire)
            yield item.data.detach(), values.to(item.data.dtype)


def build_copy(model: SyntheticModel, layout: SyntheticLayout, rank: int) -> Copy | None:
    """The part of `rank` (tp fastest, then dp, then stages); None outside the window."""
    if rank not in layout.ranks(model):
        return None
    rest, tp_rank = divmod(rank - layout.start, layout.tp)
    stage = rest // layout.dp
    stages = layout.stages_of(model)
    builder = _Builder(layout, tp_rank)
    if stage == 0:
        builder.add("embedding.word_embeddings.weight", (model.vocab, model.hidden), axis=0)
    for layer in stages[stage]:
        _add_layer(builder, model, layer)
    if stage == len(stages) - 1:
        builder.add("decoder.final_layernorm.weight", (model.hidden,), axis=None)
        key = "embedding.word_embeddings.weight" if model.tied else "output_layer.weight"
        if not model.tied or len(stages) > 1:
            builder.add(key, (model.vocab, model.hidden), axis=0)
    segments = SegmentSet.adopt([builder.module], owner="copy", group_of=lambda name: name.split("_")[0])
    return Copy(module=builder.module, shard=builder.sharded, segments=segments)


class _Builder:
    def __init__(self, layout: SyntheticLayout, tp_rank: int) -> None:
        self.module = torch.nn.Module()
        self._layout = layout
        self._tp_rank = tp_rank
        self._made: list[tuple[str, str, int | None, tuple[int, ...], tuple[tuple[int, ...], int]]] = []

    def add(
        self,
        key: str,
        shape: tuple[int, ...],
        *,
        axis: int | None,
        layer: tuple[int, int] | None = None,
        parts: int = 1,
    ) -> None:
        """A tensor split along `axis` by tp; in `parts` blocks that are split one by one (gated fc1)."""
        tp = self._layout.tp
        prepended = ((layer[1],), (layer[0],)) if layer is not None else ((), ())
        local = list(shape)
        if axis is not None:
            assert local[axis] % (tp * parts) == 0, f"{key} {shape} does not divide by {tp}"
            local[axis] //= tp
        name = f"layer{layer[0]}_{len(self._made)}" if layer is not None else f"other_{len(self._made)}"
        if "bias32" in key:
            self.module.register_buffer(name, torch.zeros(local, dtype=torch.float32))
        else:
            parameter = torch.nn.Parameter(torch.zeros(local, dtype=self._layout.dtype), requires_grad=False)
            self.module.register_parameter(name, parameter)
        for part in range(parts):
            offset = [0] * len(shape)
            if axis is not None:
                offset[axis] = part * (shape[axis] // parts) + self._tp_rank * (local[axis] // parts)
            self._made.append(
                (
                    key,
                    name,
                    axis if parts > 1 else None,
                    (*prepended[0], *shape),
                    ((*prepended[1], *offset), part),
                )
            )

    def sharded(self) -> list[FakeShardedTensor]:
        """Stand-ins that are views of what the module holds now."""
        sharded = []
        for key, name, split_axis, global_shape, (offset, part) in self._made:
            data = getattr(self.module, name)
            if split_axis is not None:
                data = torch.chunk(data, 2, dim=split_axis)[part]
            prepended = len(global_shape) - data.dim()
            sharded.append(
                FakeShardedTensor(
                    key=key, data=data, local_shape=tuple(data.shape), global_shape=global_shape,
                    global_offset=offset, prepend_axis_num=prepended,
                )
            )  # fmt: skip
        return sharded


def _add_layer(builder: _Builder, model: SyntheticModel, layer: int) -> None:
    place = (layer, model.layers)
    head_dim = model.hidden // model.heads
    qkv_rows = (model.heads + 2 * model.kv_groups) * head_dim
    builder.add("decoder.layers.input_layernorm.weight", (model.hidden,), axis=None, layer=place)
    builder.add("decoder.layers.linear_qkv.weight", (qkv_rows, model.hidden), axis=0, layer=place)
    builder.add("decoder.layers.linear_qkv.bias", (qkv_rows,), axis=0, layer=place)
    builder.add("decoder.layers.linear_proj.weight", (model.hidden, model.hidden), axis=1, layer=place)
    builder.add(
        "decoder.layers.linear_fc1.weight", (2 * model.ffn, model.hidden), axis=0, layer=place, parts=2
    )
    builder.add("decoder.layers.linear_fc2.weight", (model.hidden, model.ffn), axis=1, layer=place)
    if model.fp32_bias:
        builder.add("decoder.layers.router.bias32", (5,), axis=None, layer=place)
