"""How many bytes a plan needs on every rank: what the runtime's ledger will hold, predicted from shapes.

Weights and optimizer state are counted as the copies of `hooks.model_copy` book them, padding included; activations
with the arithmetic that the runtime declares them with (`megatron_real.activations`). `memory_report` walks a whole
program with these numbers.

Generation books its key-value cache for the longest response that may come (the cache is static), training and
inference plan for responses of the workload's memory quantile.

Invariants (tests/unit/plan_search/test_memory.py, tests/hooks/test_planned_memory.py):
    - weights, gradients and optimizer state equal what the ledger holds after a copy was built;
    - activations and cache equal what a call declares for the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_real.activations import ActivationSpec, PassLoad, decode_bytes, kv_cache_bytes, pass_bytes
from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import PlanError
from megatron_real.layout import Layout
from megatron_real.plan import Placement
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.parameters import chunk_elements, expert_data_parallel
from megatron_real.plan_search.workload import Workload

__all__ = [
    "CallMemory",
    "CopyMemory",
    "MemoryModel",
    "WorstMemory",
    "copy_memory",
]

_FROZEN_ALIGN_BYTES = 128
"""Of a parameter in a segment of a frozen copy (`realloc_ops.segments`)."""
_TRAINED_ALIGN = 64
"""Elements, of a parameter in a buffer of DDP (`megatron.core.optimizer.param_layout.pad_param_start`)."""
_BUCKET_ALIGN = 128
"""Elements, of the end of a bucket (`megatron.core.optimizer.param_layout.bucket_end_divisor`)."""


class WorstMemory(NamedTuple):
    """Each the largest over the pipeline stages, on one rank."""

    weights_bytes: int
    state_bytes: int
    active_bytes: int


class CopyMemory(NamedTuple):
    """Bytes on one rank of each pipeline stage."""

    weights_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    """Gradients and optimizer state; 0 where the copy is not trained."""
    optimizer_bytes: tuple[int, ...]
    """The optimizer state alone: what goes to the host and back, where the gradients' storage is only freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """What a call needs on one rank of each pipeline stage."""

    weights_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    active_bytes: tuple[int, ...]
    """While it runs: activations, logits, key-value cache."""
    host_bytes: tuple[int, ...]
    """Of host memory: weights or optimizer state of the rank that are there between calls."""
    worst: WorstMemory

    @classmethod
    def of(
        cls, copy: CopyMemory, active_bytes: tuple[int, ...], host_bytes: tuple[int, ...] | None = None
    ) -> CallMemory:
        """Put together; `worst` follows."""
        return cls(
            weights_bytes=copy.weights_bytes,
            state_bytes=copy.state_bytes,
            active_bytes=active_bytes,
            host_bytes=host_bytes or (0,) * len(copy.weights_bytes),
            worst=WorstMemory(max(copy.weights_bytes), max(copy.state_bytes), max(active_bytes)),
        )


@lru_cache(maxsize=1 << 16)
def copy_memory(model: ModelSpec, layout: Layout, trained: bool) -> CopyMemory:
    """Weights, and if `trained` gradients and optimizer state, as `hooks.model_copy.ModelCopy` books them.

    One bucket per buffer is counted. Where gradients are reduced beside the backward pass there is one per 40 million
    parameters, each with a padding of less than ``lcm(128, data-parallel ranks)`` elements.
    """
    if not trained:
        step = _FROZEN_ALIGN_BYTES // model.param_itemsize
        stages = chunk_elements(model.shape, layout, step)
        weights = tuple(sum(chunk.total for chunk in chunks) * model.param_itemsize for chunks in stages)
        return CopyMemory(weights, (0,) * layout.pp, (0,) * layout.pp)
    dense_ranks, expert_ranks = layout.dp * layout.cp, expert_data_parallel(layout)
    optimizer_itemsize = 12 if model.has_main_params else 8
    weights_bytes, state_bytes, optimizer_bytes = [], [], []
    for chunks in chunk_elements(model.shape, layout, _TRAINED_ALIGN):
        elements = owned = 0
        for chunk in chunks:
            dense = _padded(chunk.dense, dense_ranks) + _padded(chunk.tied, dense_ranks)
            expert = _padded(chunk.expert, expert_ranks)
            elements += dense + expert
            owned += dense // dense_ranks + expert // expert_ranks
        if not model.distributed_optimizer:
            owned = elements
        weights_bytes.append(elements * model.param_itemsize)
        optimizer_bytes.append(owned * optimizer_itemsize)
        state_bytes.append(elements * model.grad_itemsize + optimizer_bytes[-1])
    return CopyMemory(tuple(weights_bytes), tuple(state_bytes), tuple(optimizer_bytes))


def _padded(elements: int, ranks: int) -> int:
    step = math.lcm(ranks, _BUCKET_ALIGN)
    return -(-elements // step) * step


class MemoryModel:
    """Predicts bytes. Answers are cached, so that a search may ask often."""

    def __init__(
        self, graph: Graph, models: Mapping[str, ModelSpec], cluster: Cluster, workload: Workload
    ) -> None:
        """Make a model.

        Raises:
            PlanError: a model of the graph has no specification.
        """
        missing = sorted(set(graph.models) - set(models))
        if missing:
            raise PlanError(
                f"memory: found no shape of {missing}; expected one for each of {list(graph.models)}."
            )
        self.graph = graph
        self.models = models
        self.cluster = cluster
        self.workload = workload
        self._homes = {model: graph.home_call(model).name for model in graph.models}
        self._long_length = workload.long_length
        self._answer = workload.response.quantile(workload.memory_quantile)
        self._calls: dict[tuple[str, Layout, int, str, str], CallMemory] = {}
        self._active: dict[tuple[str, Layout, int, str], tuple[int, ...]] = {}

    @property
    def reserve_bytes(self) -> int:
        """What to take off the cluster's capacity: nothing.

        A device's ``memory_bytes`` is what its ``framework_reserve_bytes`` leaves, and the ``device_memory`` of a plan
        is what the runtime's ledger may hold.
        """
        return 0

    def call_memory(self, call: Call, placement: Placement) -> CallMemory:
        """What `call` needs in a placement; the window's position does not matter.

        Raises:
            PlanError: the model cannot be cut into this layout.
        """
        layout = placement.parallel
        key = (call.name, layout, placement.num_microbatches, placement.recompute, placement.offload)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = self._call_memory(call, placement, layout)
        return found

    def _call_memory(self, call: Call, placement: Placement, layout: Layout) -> CallMemory:
        if call.model is None:
            return CallMemory.of(CopyMemory((0,), (0,), (0,)), (0,))
        copy = copy_memory(self.models[call.model], layout, call.trains)
        on_host = None
        if placement.offload == "host" and self._homes[call.model] == call.name:
            on_host = copy.optimizer_bytes if call.trains else copy.weights_bytes
        return CallMemory.of(copy, self._active_bytes(call, placement, layout), on_host)

    def store_bytes(self, model: str) -> int:
        """Of the host store of a node: the full weights of a frozen model."""
        return copy_memory(self.models[model], Layout(), False).weights_bytes[0]

    def _active_bytes(self, call: Call, placement: Placement, layout: Layout) -> tuple[int, ...]:
        key = (call.name, layout, placement.num_microbatches, placement.recompute)
        if key not in self._active:
            assert call.model is not None
            spec = _activation_spec(self.models[call.model], placement.recompute if call.trains else "none")
            per_replica = -(-self.workload.step_units(call) // layout.dp)
            number = placement.num_microbatches
            if call.type is CallType.GENERATE:
                self._active[key] = self._generation(spec, layout, per_replica, number)
            else:
                rows = -(-per_replica // number) * self.workload.unit_of(call)
                self._active[key] = self._passes(spec, layout, rows, number, call.trains)
        return self._active[key]

    def _passes(
        self, spec: ActivationSpec, layout: Layout, num_sequences: int, number: int, training: bool
    ) -> tuple[int, ...]:
        load = PassLoad(
            num_sequences=num_sequences,
            length=self._long_length,
            response_tokens=num_sequences * self._answer,
        )
        return tuple(
            pass_bytes(spec, layout, stage, load, num_microbatches=number, training=training)
            for stage in range(layout.pp)
        )

    def _generation(
        self, spec: ActivationSpec, layout: Layout, per_replica: int, number: int
    ) -> tuple[int, ...]:
        """The micro-batches of a wave, one per stage, have their cache at once, and one of them a pass."""
        first = self.workload.prompt.cap
        capacity = first + self.workload.response.cap
        rows = -(-per_replica // number)
        return tuple(
            kv_cache_bytes(spec, layout, stage, min(per_replica, rows * layout.pp) * (capacity - 1))
            + decode_bytes(spec, layout, stage, num_sequences=rows, first=first, capacity=capacity)
            for stage in range(layout.pp)
        )


def _activation_spec(model: ModelSpec, recompute: str) -> ActivationSpec:
    return ActivationSpec.of(
        model.shape,
        itemsize=model.param_itemsize,
        recompute=recompute,
        fused_attention=model.fused_attention,
    )
