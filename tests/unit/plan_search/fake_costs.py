"""Operation costs with round numbers, from which prices can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_real.dataflow import CallType
from megatron_real.plan_search.costs.operations import Collective, Grid, Group, MicroBatch, OpTime, Pass
from megatron_real.plan_search.models import ModelSpec


@dataclass
class FakeCosts:
    """Seconds are of the order of 1; a layer of a micro-batch of T tokens takes T times a number of its pass."""

    per_token: dict[Pass, float] = field(
        default_factory=lambda: {
            Pass.FORWARD: 1.0,
            Pass.TRAIN_FORWARD: 1.0,
            Pass.BACKWARD: 2.0,
            Pass.PREFILL: 1.0,
            Pass.DECODE: 1.0,
        }
    )
    per_context: float = 0.0
    """Of a decode step, per row and position of the cache."""
    tensor_parallel: float = 0.0
    """Communication of a layer, per token."""
    expert_factor: float = 1.0
    embedding_per_token: float = 0.0
    head_per_position: float = 0.0
    optimizer_per_parameter: float = 0.0
    per_byte: dict[Collective, float] = field(default_factory=dict)
    hop_per_byte: float = 0.0
    across_factor: float = 1.0
    step_floor: float = 0.0
    """Per layer."""
    floor: float = 0.0
    """Per layer."""
    overhead: float = 0.0
    batches: list[tuple[Pass, MicroBatch, Grid]] = field(default_factory=list)
    groups: list[tuple[Collective, float, Group]] = field(default_factory=list)

    @property
    def provenance(self) -> dict[str, str]:
        return {"source": "made up"}

    def layer(self, model: ModelSpec, layer: int, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        self.batches.append((pass_, batch, grid))
        seconds = batch.tokens * self.per_token[pass_] / grid.tp
        if pass_ is Pass.DECODE:
            seconds += self.per_context * batch.sequences * batch.context / grid.tp
        factor = self.expert_factor if model.shape.has_experts(layer) else 1.0
        return OpTime(factor * seconds, self.tensor_parallel * batch.tokens if grid.tp > 1 else 0.0)

    def embedding(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        return OpTime(self.embedding_per_token * batch.tokens)

    def head(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        return OpTime(self.head_per_position * batch.logit_positions)

    def optimizer_step(self, model: ModelSpec, num_parameters: float, num_owned: float, grid: Grid) -> float:
        return self.optimizer_per_parameter * num_owned

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        self.groups.append((kind, num_bytes, group))
        return self.per_byte[kind] * num_bytes if group.size > 1 else 0.0

    def point_to_point(self, num_bytes: float, *, within_node: bool) -> float:
        return self.hop_per_byte * num_bytes * (1.0 if within_node else self.across_factor)

    def bandwidth(self, *, within_node: bool) -> float:
        return 1.0

    def local_copy(self, num_bytes: float) -> float:
        return num_bytes

    def host_copy(self, num_bytes: float) -> float:
        return num_bytes

    def decode_step_floor(self, model: ModelSpec, num_layers: int) -> float:
        return self.step_floor * num_layers

    def pass_floor(self, model: ModelSpec, num_layers: int, pass_: Pass) -> float:
        return self.floor * num_layers

    def call_overhead(self, type_: CallType, grid: Grid) -> float:
        return self.overhead
