"""What a call costs on its placement: operations composed into passes, optimizer steps and generations.

A price is of the rank that is busiest, on which the others wait: computing, communication that nothing hides, idling in
the pipeline, the optimizer, and fixed times. It depends on where a window lies in its nodes, not on which nodes; where
ranks share the cores of their node also on how many of them are busy meanwhile.

Invariants (tests/unit/plan_search/test_call_prices.py, tests/property/test_call_prices.py):
    - prices are the closed forms of the documentation of `stages`, `training` and `generation`;
    - more sequences, longer ones, or more layers are never cheaper;
    - what has no price is a PlanError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from megatron_real.dataflow import Call, CallType, Graph, Per
from megatron_real.errors import PlanError
from megatron_real.layout import Layout
from megatron_real.plan import Placement
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.costs.generation import (
    Decoding,
    continuous_generation,
    first_pass_s,
    static_generation,
)
from megatron_real.plan_search.costs.lengths import Histogram, padded_length, total_histogram
from megatron_real.plan_search.costs.operations import MicroBatch, OperationCosts, Pass
from megatron_real.plan_search.costs.stages import (
    Geometry,
    Pipelined,
    StageTimer,
    pipelined,
    shares_cores,
)
from megatron_real.plan_search.costs.training import StepPricer, hop_seconds
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.workload import Workload

__all__ = ["BackendTraits", "CallCost", "CallPricer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """Seconds of a call, on the rank that is busiest."""

    compute_s: float
    communication_s: float = 0.0
    """Collectives and messages that nothing hides."""
    bubble_s: float = 0.0
    """Idle in the pipeline."""
    optimizer_s: float = 0.0
    overhead_s: float = 0.0
    """Launches beyond what they launch, and what comes once per call."""

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s + self.bubble_s + self.optimizer_s + self.overhead_s

    @classmethod
    def mixed(cls, costs: Sequence[tuple[float, CallCost]]) -> CallCost:
        """Of a call that spends shares of its time, which add up to 1, as if it had these costs all the time.

        While it goes at the pace of P seconds, dt / P of its work is done in dt. So all of it takes T with
        ``sum over shares w of w T / P = 1``.
        """
        pace = 1 / sum(share / cost.seconds for share, cost in costs)
        done = [(share * pace / cost.seconds, cost) for share, cost in costs]
        return cls(
            **{part.name: sum(work * getattr(cost, part.name) for work, cost in done) for part in fields(cls)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """How the backend runs a call. The defaults are those of this package's Megatron backend."""

    padded: bool = True
    """A micro-batch is as wide as its longest sequence; else sequences are packed without padding."""
    continuous_batching: bool = False
    """Generation drops finished sequences; else a batch runs as it is until its last one ends."""
    kv_capacity_bytes: int | None = None
    """Of a rank's key-value cache under continuous batching, which runs in waves beyond; None is no limit."""


class CallPricer:
    """Prices calls of one graph; everything that placements share is computed once."""

    def __init__(
        self,
        graph: Graph,
        models: Mapping[str, ModelSpec],
        cluster: Cluster,
        workload: Workload,
        operations: OperationCosts,
        *,
        traits: BackendTraits | None = None,
    ) -> None:
        self._graph = graph
        self._models = models
        self._cluster = cluster
        self._workload = workload
        self._operations = operations
        self._traits = traits if traits is not None else BackendTraits()
        self._timers: dict[ModelSpec, tuple[StageTimer, StepPricer]] = {}
        self._timer_of: dict[str, tuple[StageTimer, StepPricer]] = {}
        self.shares_cores = shares_cores(cluster)
        """Whether prices depend on the number of busy ranks."""
        self._alone = {call.name: _runs_alone(graph, call) for call in graph.calls if self.shares_cores}
        self._total = total_histogram(workload)
        self._longest_of_unit = total_histogram(workload, longest_of=workload.unit)
        self._prompts = Histogram.of_lengths(workload.prompt)
        self._responses = Histogram.of_lengths(workload.response)
        self._negated_prompts = self._prompts.negated()
        self._prices: dict[tuple[str, Layout, int, str, int, int], CallCost] = {}

    def price(self, call: Call, placement: Placement, busy_ranks: int | None = None) -> CallCost:
        """Seconds of `call` on `placement`.

        Args:
            call: of the graph.
            placement: of it.
            busy_ranks: of its node while it runs, its own included, where they share cores. None: those of the call
                alone if all other calls of an iteration come before or after it for their data, else all of the node.

        Raises:
            PlanError: there are fewer sequences than the placement cuts them into, the layers do not divide over its
                stages, or something has no price: the model, a Python function, or an operation.
        """
        layout = placement.parallel
        offset = placement.ranks[0] % self._cluster.devices_per_node
        recompute = placement.recompute if call.trains else ""
        if busy_ranks is None or not self.shares_cores:
            busy_ranks = self._most_busy(call, layout)
        key = (call.name, layout, placement.num_microbatches, recompute, offset, busy_ranks)
        found = self._prices.get(key)
        if found is None:
            found = self._price(call, layout, placement, busy_ranks)
            self._prices[key] = found
        return found

    def _most_busy(self, call: Call, layout: Layout) -> int:
        """Ranks of a node that may be busy while `call` runs; 1 where each has a core of its own."""
        if not self.shares_cores:
            return 1
        per_node = self._cluster.devices_per_node
        return min(layout.size, per_node) if self._alone[call.name] else per_node

    def _price(self, call: Call, layout: Layout, placement: Placement, busy_ranks: int) -> CallCost:
        per_replica = self._sequences(call, layout, placement.num_microbatches)
        if call.model is None:
            return CallCost(compute_s=self._function(call) * per_replica)
        timer, steps = self._timer(call)
        at = timer.geometry(layout, placement.ranks[0], busy_ranks)
        if call.type is CallType.TRAIN:
            return self._train(call, steps, at, placement)
        if call.type is CallType.GENERATE:
            passes = self._generate(call, timer, at, placement)
        else:
            batch = self._micro_batch(call, layout, placement.num_microbatches)
            times = timer.times(at.stages, Pass.FORWARD, batch, at.grid)
            hops = hop_seconds(timer, at, batch.tokens, split=layout.tp if layout.sp else 1)
            passes = pipelined(at.stages, times, placement.num_microbatches, layout.vpp, hops)
        return CallCost(
            compute_s=passes.compute_s,
            communication_s=passes.communication_s,
            bubble_s=passes.bubble_s,
            overhead_s=passes.overhead_s + self._operations.call_overhead(call.type, at.grid),
        )

    def first_pass_s(self, call: Call, placement: Placement) -> float:
        """Of the first micro-batch of an inference or generation over a stage's layers, where that is fastest.

        Raises:
            PlanError: as `price`.
        """
        timer, _ = self._timer(call)
        layout = placement.parallel
        at = timer.geometry(layout, placement.ranks[0], self._most_busy(call, layout))
        if call.type is CallType.GENERATE:
            return first_pass_s(timer, at, self._negated_prompts, self._cut(call, at, placement))
        batch = self._micro_batch(call, layout, placement.num_microbatches)
        return min(time.seconds for time in timer.times(at.stages, Pass.FORWARD, batch, at.grid))

    def _train(self, call: Call, pricer: StepPricer, at: Geometry, placement: Placement) -> CallCost:
        layout, number = placement.parallel, placement.num_microbatches
        batch = self._micro_batch(call, layout, number)
        step = pricer.price(at, layout, batch, number, placement.recompute)
        steps = self._workload.num_steps(call)
        return CallCost(
            compute_s=steps * step.passes.compute_s,
            communication_s=steps * (step.passes.communication_s + step.reduction_s),
            bubble_s=steps * step.passes.bubble_s,
            optimizer_s=steps * step.optimizer_s,
            overhead_s=steps * step.passes.overhead_s + self._operations.call_overhead(call.type, at.grid),
        )

    def _generate(self, call: Call, timer: StageTimer, at: Geometry, placement: Placement) -> Pipelined:
        cut = self._cut(call, at, placement)
        if self._traits.continuous_batching:
            lengths = (self._prompts, self._responses)
            return continuous_generation(timer, at, lengths, cut, self._traits.kv_capacity_bytes)
        return static_generation(timer, at, self._total, self._negated_prompts, cut)

    def _cut(self, call: Call, at: Geometry, placement: Placement) -> Decoding:
        layout, number = placement.parallel, placement.num_microbatches
        return Decoding(
            rows=self._sequences(call, layout, number) / number,
            batches=number,
            replicas=layout.dp,
            num_sequences=self._workload.num_sequences,
            in_step=at.grid.ep * at.grid.etp > layout.tp,
            # Our engine's batches go in waves of one per stage; a continuous one has waves of its own.
            waves=1 if self._traits.continuous_batching else -(-number // layout.pp),
        )

    def _micro_batch(self, call: Call, layout: Layout, number: int) -> MicroBatch:
        """The mean micro-batch of the slowest replica."""
        workload = self._workload
        rows = self._sequences(call, layout, number) / number
        if self._traits.padded:
            total = self._longest_of_unit if call.trains else self._total
            padded = padded_length(total, workload.step_units(call), layout.dp, number)
            length, square = padded.length, padded.mean_square
        else:
            length, square = workload.mean_length, workload.mean_square_length
        if layout.sp:  # the output layer gathers the sequence itself, so that all positions pass through it
            positions = rows * length
        elif self._scores(call):
            positions = rows
        else:
            positions = rows * workload.response.mean
        return MicroBatch(rows, length, length, positions, square)

    def _scores(self, call: Call) -> bool:
        """Whether its model returns one number per sequence."""
        if call.outputs:
            return self._graph.key(call.outputs[0]).per is Per.SEQUENCE
        # A loss over a scalar head that takes nothing of single tokens is one over whole sequences (a reward model's).
        takes = {self._graph.key(entry.key).per for entry in call.inputs}
        return self._models[call.model or ""].shape.scalar_head and Per.RESPONSE not in takes

    def _sequences(self, call: Call, layout: Layout, number: int) -> int:
        """Sequences that the fullest replica works on at a time: in an optimizer step, or in the whole call."""
        units, unit = self._workload.step_units(call), self._workload.unit_of(call)
        if units // layout.dp < number:
            together = f" (of which {unit} each stay together)" if unit > 1 else ""
            raise PlanError(
                f"calls.{call.name}: {units * unit} sequences{together} cannot be cut into dp={layout.dp} x {number} "
                "micro-batches. Lower dp, num_microbatches or the number of minibatches, or raise the batch size."
            )
        return -(-units // layout.dp) * unit

    def _function(self, call: Call) -> float:
        seconds = self._workload.function_s.get(call.name)
        if seconds is None:
            raise PlanError(
                f"calls.{call.name}: found no time of its Python function; expected workload.function_s to have the "
                f"seconds per sequence of {call.name!r}. Measure it, or give an estimate."
            )
        return seconds

    def _timer(self, call: Call) -> tuple[StageTimer, StepPricer]:
        assert call.model is not None
        found = self._timer_of.get(call.name)
        if found is None:
            model = self._models.get(call.model)
            if model is None:
                raise PlanError(
                    f"calls.{call.name}: found no shape of model {call.model!r}; expected one of "
                    f"{sorted(self._models)}. Describe the model."
                )
            # Roles of one shape share their times.
            found = self._timers.get(model)
            if found is None:
                timer = StageTimer(model, self._operations, self._cluster)
                found = self._timers[model] = (timer, StepPricer(timer))
            self._timer_of[call.name] = found
        return found


def _runs_alone(graph: Graph, call: Call) -> bool:
    """Whether every other call of an iteration needs this one's outputs, or comes before it for its own."""
    before = {call.name}
    for other in reversed(graph.ordered()):
        if other.name in before:
            before.update(parent.name for parent in graph.parents(other))
    after = {call.name}
    for other in graph.ordered():
        if any(parent.name in after for parent in graph.parents(other)):
            after.add(other.name)
    return len(before | after) == len(graph.calls)
