"""The protocol between devices and prices: how long the operations take that calls are made of.

Two implementations: `analytic.AnalyticCost` (a roofline over a device's constants) and `profiled.ProfiledCost` (a
database measured on the device). `calls.CallPricer` composes them into calls, `moves.MovePricer` into reallocs,
transfers and offloads. A price that an implementation does not know is a `PlanError`, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from megatron_real.dataflow import CallType
from megatron_real.plan_search.models import ModelSpec

__all__ = ["Collective", "Grid", "Group", "MicroBatch", "OperationCosts", "OpTime", "Pass"]


class Pass(StrEnum):
    """Which way through a layer."""

    FORWARD = "forward"
    """Without a backward pass to come: inference."""
    TRAIN_FORWARD = "train_forward"
    """Keeps activations (recomputation runs this again)."""
    BACKWARD = "backward"
    PREFILL = "prefill"
    """Fills the key-value cache with prompts."""
    DECODE = "decode"
    """One new position per sequence, attending to the cache."""


class Collective(StrEnum):
    """Collectives over a group of ranks. Bytes are of the whole, unsharded tensor."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: how many, and over how many nodes they are spread (evenly)."""

    size: int
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Grid:
    """What the time of a layer depends on of a layout: its degrees, and where the groups lie."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    tp_nodes: int = 1
    """Nodes that a tensor-parallel group spans."""
    cp_nodes: int = 1
    ep_nodes: int = 1
    busy_ranks: int = 1
    """Ranks of a node that compute at the same time: they share its cores, where they have none of their own."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through a layer together. Fractions are means."""

    sequences: float
    length: float
    """New positions of each sequence, padding included; 1 in a decode step."""
    context: float
    """Positions that the last new position attends to: `length` without a cache, else cached ones too."""
    logit_positions: float
    """Positions of the whole micro-batch whose logits are computed, on the last stage."""
    square_length: float = 0.0
    """Mean of the squared length, where it is not `length` squared (ragged sequences); 0 is `length` squared."""

    @property
    def tokens(self) -> float:
        return self.sequences * self.length


class OpTime(NamedTuple):
    """Seconds of an operation on one rank."""

    compute_s: float
    communication_s: float = 0.0
    """In tensor-, context- and expert-parallel collectives that nothing hides."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s

    def __add__(self, other: object) -> OpTime:
        assert isinstance(other, OpTime)
        return OpTime(self.compute_s + other.compute_s, self.communication_s + other.communication_s)

    def times(self, factor: float) -> OpTime:
        """This many in a row."""
        return OpTime(self.compute_s * factor, self.communication_s * factor)


class OperationCosts(Protocol):
    """Seconds of single operations on one kind of device."""

    @property
    def provenance(self) -> dict[str, str]:
        """Where the numbers come from: written into ``predicted`` of a plan."""
        ...

    def layer(self, model: ModelSpec, layer: int, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """One decoder layer on one rank, with the collectives inside it.

        `layer` is 0-based: with experts, the first ones may be dense.
        """
        ...

    def embedding(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """The word embedding on the first stage."""
        ...

    def head(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """Final norm, logits (or the scalar head) and what follows from them (log-probs, loss, sampling)."""
        ...

    def optimizer_step(self, model: ModelSpec, num_parameters: float, num_owned: float, grid: Grid) -> float:
        """Adam over `num_owned` parameters of a rank whose shard has `num_parameters`, and clipping."""
        ...

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        """One collective over `group`; 0 for a group of one."""
        ...

    def point_to_point(self, num_bytes: float, *, within_node: bool) -> float:
        """One message."""
        ...

    def bandwidth(self, *, within_node: bool) -> float:
        """Bytes per second that one rank sends (and, at the same time, receives) in large messages."""
        ...

    def local_copy(self, num_bytes: float) -> float:
        """Inside a device's memory."""
        ...

    def host_copy(self, num_bytes: float) -> float:
        """Between device and host memory, one direction."""
        ...

    def decode_step_floor(self, model: ModelSpec, num_layers: int) -> float:
        """The least time of a decode step over `num_layers` layers: launches and the engine's own work."""
        ...

    def pass_floor(self, model: ModelSpec, num_layers: int, pass_: Pass) -> float:
        """The least time of a pass of one micro-batch over `num_layers` layers: launches."""
        ...

    def call_overhead(self, type_: CallType, grid: Grid) -> float:
        """Fixed time of one call on top of its passes: planning, cutting and padding of batches."""
        ...
