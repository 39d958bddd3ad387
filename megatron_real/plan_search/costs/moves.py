"""Prices of what happens between calls: reallocations, transfers of data, offload and reload of weights.

A reallocation is priced from the bytes that its plan really moves between each pair of ranks (`costs.traffic`): a
rank's links inside and between nodes are used one message after the other, both directions at once, then it relays what
its node still needs, and the slowest rank counts. A transfer is priced in the mean: sequences are spread evenly, and
what a rank received for an earlier consumer is counted again.

Prices are of the steady state. They depend on where windows lie in their nodes and to each other, not on the windows
themselves, and are cached so.

Invariants (tests/unit/plan_search/test_moves.py, tests/property/test_moves.py):
    - equal copies cost nothing, the same layout on other ranks does;
    - bytes are those of `realloc_ops.plan.build_realloc_plan` and `data_plan.build_transfer_plans`;
    - no move takes less time than its busiest rank's bytes over its fastest link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_real.dataflow import Call, CallType, Graph, Per, Scope, Update
from megatron_real.errors import PlanError
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import Placement
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.costs.operations import Collective, OperationCosts
from megatron_real.plan_search.costs.stages import geometry
from megatron_real.plan_search.costs.traffic import Traffic, Window, realloc_traffic
from megatron_real.plan_search.costs.training_moves import TrainingMoveCost, training_move
from megatron_real.plan_search.memory import copy_memory
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.parameters import stage_parameters
from megatron_real.plan_search.workload import Workload
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES
from megatron_real.realloc_ops.planning.shards import DTYPE_BYTES

__all__ = ["MovePricer", "ReallocCost", "TransferCost"]

_MAIN_ITEMSIZE = 4
"""Bytes of a main parameter."""
_LENGTH_ITEMSIZE = 8


class ReallocCost(NamedTuple):
    """Of one reallocation."""

    seconds: float
    """By itself."""
    bytes_moved: int
    """Between ranks, all together."""
    max_received_bytes: int
    max_sent_bytes: int
    """By one rank."""
    messages: int
    """All together."""
    exposed_s: float = 0.0
    """What it adds to an iteration: less than `seconds` where it is streamed."""


class TransferCost(NamedTuple):
    """Of one transfer."""

    send_s: float
    """Of a producer's rank: packing; it goes on then."""
    wire_s: float
    """From there until the last byte has arrived."""
    receive_s: float
    """Of a consumer's rank: unpacking."""


class _Needs(NamedTuple):
    """What one receiving rank gets of a producer's outputs, on average."""

    num_bytes: float
    messages: float


_NOTHING = ReallocCost(0.0, 0, 0, 0, 0)
_NO_TRANSFER = TransferCost(0.0, 0.0, 0.0)


class MovePricer:
    """Prices moves of weights and data."""

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        cluster: Cluster,
        workload: Workload,
        operations: OperationCosts,
        graph: Graph,
    ) -> None:
        self.models = models
        self.cluster = cluster
        self.workload = workload
        self.operations = operations
        self.graph = graph
        self.bucket_bytes = DEFAULT_BUCKET_BYTES
        self._per_node = cluster.devices_per_node
        self._reallocs: dict[tuple[str, Window, Window], ReallocCost] = {}
        self._mixes: dict[tuple[Update, Window, Window, bool], float] = {}
        self._transfers: dict[tuple[str, str, Window, Window], TransferCost] = {}
        self._residence: dict[tuple[str, int, Layout, str], float] = {}

    # Weights

    def realloc(self, model: str, source: tuple[Mesh, Layout], target: tuple[Mesh, Layout]) -> ReallocCost:
        """Bring a copy at `target` to the weights of the one at `source`; free if they are the same copy.

        Raises:
            PlanError: the model cannot be cut into one of the layouts.
        """
        if source == target:
            return _NOTHING
        windows = self._relative(source, target)
        key = (model, *windows)
        if key not in self._reallocs:
            self._reallocs[key] = self._price_realloc(self.realloc_traffic(model, source, target))
        return self._reallocs[key]

    def mix(
        self,
        update: Update,
        source: tuple[Mesh, Layout],
        target: tuple[Mesh, Layout],
        *,
        from_host: bool,
    ) -> float:
        """Seconds that an iteration has in the mean of moving the target's weights toward the source's.

        Priced as the reallocation, what is there already included; what crosses nodes does so once for each rank that
        needs it, which is not.

        Args:
            update: which models, and how often.
            source: home of the trained model.
            target: home of the model that follows.
            from_host: the target's weights come from the host, and go back.
        """
        key = (update, *self._relative(source, target), from_host)
        if key not in self._mixes:
            seconds = self._price_realloc(self.realloc_traffic(update.target, source, target)).seconds
            if from_host:
                shard = max(copy_memory(self.models[update.target], target[1], False).weights_bytes)
                seconds += 2 * self._host_copy(target[0], shard)
            self._mixes[key] = seconds / update.every
        return self._mixes[key]

    def realloc_traffic(
        self, model: str, source: tuple[Mesh, Layout], target: tuple[Mesh, Layout]
    ) -> Traffic:
        """Bytes and messages of every rank; not cached."""
        spec = self.models[model]
        return realloc_traffic(
            spec.shape,
            spec.param_itemsize,
            *self._relative(source, target),
            per_node=self._per_node,
            bucket_bytes=self.bucket_bytes,
        )

    def _relative(self, source: tuple[Mesh, Layout], target: tuple[Mesh, Layout]) -> tuple[Window, Window]:
        """The two windows moved to the lowest ranks at which they lie alike in their nodes."""
        origin = min(source[0].start, target[0].start) // self._per_node * self._per_node
        return (
            Window(source[0].start - origin, _of_weights(source[1])),
            Window(target[0].start - origin, _of_weights(target[1])),
        )

    def _price_realloc(self, traffic: Traffic) -> ReallocCost:
        operations = self.operations
        crosses = bool(traffic.received_across.any() or traffic.sent_across.any())
        within = 1 / operations.bandwidth(within_node=True)
        # On one node there may be no price of what crosses nodes.
        across = 1 / operations.bandwidth(within_node=False) if crosses else 0.0
        received = traffic.received_within * within + traffic.received_across * across
        sent = traffic.sent_within * within + traffic.sent_across * across
        seconds = np.maximum(received, sent)
        seconds += np.maximum(traffic.received_relayed, traffic.sent_relayed) * within
        messages = np.maximum(traffic.messages_received, traffic.messages_sent)
        seconds += messages * operations.point_to_point(1.0, within_node=not crosses)
        relays = np.maximum(traffic.relays_received, traffic.relays_sent)
        if relays.any():
            seconds += relays * operations.point_to_point(1.0, within_node=True)
        # What stays on the rank is copied, what leaves and comes is packed and unpacked.
        copied = traffic.local + traffic.received + traffic.sent
        most = float(copied.max(initial=0.0))
        if most > 0:
            seconds += copied * (operations.local_copy(most) / most)
        return ReallocCost(
            seconds=float(seconds.max(initial=0.0)),
            bytes_moved=int(traffic.received.sum()),
            max_received_bytes=int(traffic.received.max(initial=0.0)),
            max_sent_bytes=int(traffic.sent.max(initial=0.0)),
            messages=int((traffic.messages_received + traffic.relays_received).sum()),
            exposed_s=float(seconds.max(initial=0.0)),
        )

    def move_training(
        self, model: str, source: tuple[Mesh, Layout], target: tuple[Mesh, Layout]
    ) -> TrainingMoveCost:
        """Bring a trained model with its optimizer's state from one home to another, weights made anew; not cached.

        Raises:
            PlanError: the model cannot be cut into one of the layouts.
        """
        price = training_move(self.models[model], source, target, self.operations, self._per_node)
        return price._replace(seconds=price.seconds + self._rebuild_s(model, *target))

    def offload(self, model: str, mesh: Mesh, layout: Layout, to: str) -> float:
        """Seconds until a copy's device memory is free.

        Frozen weights are on the host since the first time, and an optimizer has its main parameters anyway: nothing is
        copied then (`hooks.model_copy.ModelCopy.offload`).

        Raises:
            PlanError: `to` is neither ``host`` nor ``main_params``.
        """
        _check_place(to)
        if to == "main_params" or not self.graph.trained(model):
            return 0.0
        return self._host_copy(mesh, self._shard_bytes(model, layout))

    def reload(self, model: str, mesh: Mesh, layout: Layout, from_: str) -> float:
        """Seconds to bring weights into a copy: from the ``host``, the store of each ``node``, or ``main_params``.

        Raises:
            PlanError: `from_` is none of these.
        """
        _check_place(from_, "node")
        key = (model, mesh.start % self._per_node, layout, from_)
        if key not in self._residence:
            if from_ == "main_params":
                self._residence[key] = self._rebuild_s(model, mesh, layout)
            else:
                self._residence[key] = self._host_copy(mesh, self._shard_bytes(model, layout))
        return self._residence[key]

    def move_state(self, model: str, mesh: Mesh, layout: Layout) -> float:
        """Seconds to bring the optimizer state of a trained copy to the host, or back. Gradients are not copied."""
        key = (model, mesh.start % self._per_node, layout, "state")
        if key not in self._residence:
            most = max(copy_memory(self.models[model], layout, True).optimizer_bytes)
            self._residence[key] = self._host_copy(mesh, most)
        return self._residence[key]

    def _host_copy(self, mesh: Mesh, num_bytes: int) -> float:
        """Each rank of the window over its own link, all at once; where ranks have no cores of their own, they share.

        The memory of a node of GPUs feeds the links of all of them, which the devices' constants leave room for.
        """
        seconds = self.operations.host_copy(num_bytes)
        cores = self.cluster.device.constants.get("cores_per_node")
        together = min(mesh.size, self._per_node)
        return seconds * max(1.0, together / cores) if isinstance(cores, int | float) else seconds

    def _shard_bytes(self, model: str, layout: Layout) -> int:
        """Of the rank that has most."""
        return max(copy_memory(self.models[model], layout, self.graph.trained(model)).weights_bytes)

    def _rebuild_s(self, model: str, mesh: Mesh, layout: Layout) -> float:
        """Main parameters are cast into the rank's part of the weights, then parts are gathered."""
        spec = self.models[model]
        groups = geometry(spec.shape, layout, mesh.start % self._per_node, self._per_node, 1)
        slowest = 0.0
        for stage in set(stage_parameters(spec.shape, layout)):
            owned = stage.dense / groups.dense_group.size + stage.expert / groups.expert_group.size
            seconds = self.operations.local_copy(stage.total * spec.param_itemsize + owned * _MAIN_ITEMSIZE)
            for number, group in ((stage.dense, groups.dense_group), (stage.expert, groups.expert_group)):
                if number:
                    num_bytes = number * spec.param_itemsize
                    seconds += self.operations.collective(Collective.ALL_GATHER, num_bytes, group)
            slowest = max(slowest, seconds)
        return slowest

    # Data

    def transfer(self, producer: Call, consumer: Call, source: Placement, target: Placement) -> TransferCost:
        """The outputs of `producer`, placed at `source`, that `consumer` takes at `target`."""
        windows = self._relative((source.mesh, source.parallel), (target.mesh, target.parallel))
        key = (producer.name, consumer.name, *windows)
        if key not in self._transfers:
            self._transfers[key] = self._price_transfer(producer, consumer, *windows)
        return self._transfers[key]

    def lengths(self, source: Mesh, num_targets: int) -> TransferCost:
        """The lengths of a generation on `source` to other ranks, which share its ranks as their senders."""
        if num_targets == 0:
            return _NO_TRANSFER
        num_bytes = _LENGTH_ITEMSIZE * self.workload.num_sequences
        each = -(-num_targets // source.size)
        message_s = self.operations.point_to_point(num_bytes, within_node=self.cluster.spec.num_nodes == 1)
        copy_s = self.operations.local_copy(num_bytes)
        return TransferCost(each * copy_s, each * message_s, copy_s)

    def _price_transfer(self, producer: Call, consumer: Call, source: Window, target: Window) -> TransferCost:
        senders = source.layout.dp * source.layout.tp
        received_s = received_bytes = sent_bytes = sent_s = sent_messages = 0.0
        for stage in sorted({0, target.layout.pp - 1}):
            ends = (stage == 0, stage == target.layout.pp - 1)
            needs = self._needs(producer, consumer, source, target, ends)
            if needs.num_bytes <= 0:
                continue
            ranks = target.layout.size // target.layout.pp
            near = _near_share(source, target, stage, self._per_node)
            wire_s = self._wire_s(needs, near)
            received_s = max(received_s, wire_s)
            received_bytes = max(received_bytes, needs.num_bytes)
            sent_s += wire_s * ranks / senders
            sent_bytes += needs.num_bytes * ranks / senders
            sent_messages += needs.messages * ranks / senders
        if received_bytes <= 0:
            return _NO_TRANSFER
        copy = self.operations.local_copy
        return TransferCost(copy(sent_bytes), max(received_s, sent_s), copy(received_bytes))

    def _wire_s(self, needs: _Needs, near: float) -> float:
        total = 0.0
        for share, within in ((near, True), (1 - near, False)):
            if share > 0:
                total += share * needs.num_bytes / self.operations.bandwidth(within_node=within)
                total += share * needs.messages * self.operations.point_to_point(1.0, within_node=within)
        return total

    def _needs(
        self, producer: Call, consumer: Call, source: Window, target: Window, ends: tuple[bool, bool]
    ) -> _Needs:
        """Of a rank of the first stage, of the last one, or both."""
        stage = target.layout.pp - 1 if ends[1] else 0
        held = _held_share(source, target, stage)
        same = held > 0 and self._same_sequences(producer, consumer, source, target)
        count, num_bytes, sequences = self.workload.num_sequences, 0.0, 0.0
        for scope, per, itemsize in self._keys(producer, consumer):
            if not ends[1] and per is not Per.TOKEN:
                continue
            if scope is Scope.FULL:
                missing = 1 - held
            else:
                missing = 0.0 if same else (1 - held) / target.layout.dp
            num_bytes += count * missing * self._elements(per) * itemsize
            sequences = max(sequences, count * missing)
        shards = source.layout.dp - (1 if held > 0 else 0)
        return _Needs(num_bytes, min(float(shards), sequences) if num_bytes > 0 else 0.0)

    def _keys(self, producer: Call, consumer: Call) -> Iterator[tuple[Scope, Per, int]]:
        for entry in consumer.inputs:
            if entry.key in producer.outputs:
                spec = self.graph.key(entry.key)
                yield entry.scope, spec.per, DTYPE_BYTES[spec.dtype]

    def _elements(self, per: Per) -> float:
        """Of a sequence, on average."""
        if per is Per.SEQUENCE:
            return 1.0
        return self.workload.response.mean if per is Per.RESPONSE else self.workload.mean_length

    def _same_sequences(self, producer: Call, consumer: Call, source: Window, target: Window) -> bool:
        """Whether both calls cut the batch alike: by the same weights, at once, over ranks in the same order."""
        units = {self.workload.unit_of(call) for call in (producer, consumer)}
        if producer.sequences != consumer.sequences or len(units) > 1:
            return False
        for call in (producer, consumer):
            if call.type is CallType.GENERATE or (call.trains and self.workload.num_minibatches > 1):
                return False
        degrees = [(window.layout.dp, window.layout.cp, window.layout.tp) for window in (source, target)]
        return degrees[0] == degrees[1]


@lru_cache(maxsize=1 << 14)
def _of_weights(layout: Layout) -> Layout:
    """Without sequence parallelism, which changes no parameter's place."""
    return replace(layout, sp=False) if layout.sp else layout


def _check_place(place: str, *more: str) -> None:
    known = ("host", "main_params", *more)
    if place not in known:
        raise PlanError(f"offload: found {place!r}; expected one of {', '.join(known)}.")


def _stage_window(window: Window, stage: int) -> tuple[int, int]:
    size = window.layout.size // window.layout.pp
    return window.start + stage * size, window.start + (stage + 1) * size


def _held_share(source: Window, target: Window, stage: int) -> float:
    """Of a producer's outputs, what a rank of the consumer's `stage` has: 1 / dp if the producer ran there, else 0."""
    first, stop = _stage_window(target, stage)
    low, high = _stage_window(source, source.layout.pp - 1)
    inside = low <= first and stop <= high and source.layout.cp == 1
    return 1 / source.layout.dp if inside else 0.0


def _near_share(source: Window, target: Window, stage: int, per_node: int) -> float:
    """Share of (receiving rank, shard of the producer) with a holder of the shard in the receiver's node."""
    low, _ = _stage_window(source, source.layout.pp - 1)
    first, stop = _stage_window(target, stage)
    layout = source.layout
    return _near(low, layout.tp, layout.tp * layout.cp, layout.dp, (first, stop), per_node)


@lru_cache(maxsize=1 << 14)
def _near(low: int, width: int, stride: int, shards: int, span: tuple[int, int], per_node: int) -> float:
    """Holders of shard d are the ranks ``low + d * stride`` and the `width` - 1 after it; receivers are in `span`."""
    first, stop = span
    starts = low + stride * np.arange(shards)
    borders = np.zeros(max(int(starts[-1]) + width, stop) // per_node + 2)
    np.add.at(borders, starts // per_node, 1)
    np.add.at(borders, (starts + width - 1) // per_node + 1, -1)
    holders = np.cumsum(borders)  # shards with a holder in each node
    return float(holders[np.arange(first, stop) // per_node].sum()) / ((stop - first) * shards)
