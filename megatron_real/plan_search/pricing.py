"""All prices of one search together: calls, moves and memory under one workload, on one cluster.

The search asks for options of calls (`call_s`, `realloc_s`), the simulator for instructions of a program
(`of_program`); both get the same numbers. In the search a call's data transfers are folded into its own time, as if its
partners lay in a window like its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_real.dataflow import Call, Graph
from megatron_real.errors import PlanError
from megatron_real.plan import Placement
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.costs.calls import CallCost, CallPricer
from megatron_real.plan_search.costs.moves import MovePricer, ReallocCost
from megatron_real.plan_search.costs.operations import OperationCosts
from megatron_real.plan_search.memory import MemoryModel
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.problem import Choice
from megatron_real.plan_search.simulator import TransferTime
from megatron_real.plan_search.workload import Workload
from megatron_real.program import Instruction, Offload, Program, Realloc, Reload, Run, Transfer

__all__ = ["Prices", "ProgramPrices"]


class Prices:
    """Prices of calls, moves and memory."""

    def __init__(
        self,
        graph: Graph,
        models: Mapping[str, ModelSpec],
        cluster: Cluster,
        workload: Workload,
        operations: OperationCosts,
    ) -> None:
        """Make the pricers.

        Raises:
            PlanError: a model of the graph has no specification.
        """
        missing = [name for name in graph.models if name not in models]
        if missing:
            raise PlanError(
                f"search: found no model for {', '.join(missing)}; the algorithm {graph.name} needs "
                f"{', '.join(graph.models)}. Give each one."
            )
        self.graph = graph
        self.models = dict(models)
        self.cluster = cluster
        self.workload = workload
        self.operations = operations
        self.calls = CallPricer(graph, models, cluster, workload, operations)
        self.moves = MovePricer(models, cluster, workload, operations, graph)
        self.memory = MemoryModel(graph, models, cluster, workload)

    def call(self, call: Call, placement: Placement) -> CallCost:
        """The parts of a call's time."""
        return self.calls.price(call, placement)

    def call_s(self, call: Call, placement: Placement) -> float:
        """A call's seconds with the data that it receives and sends."""
        total = self.calls.price(call, placement).seconds
        for parent in self.graph.parents(call):
            time = self.moves.transfer(parent, call, placement, placement)
            total += time.wire_s + time.receive_s
        for consumer in self.graph.calls:
            if any(parent.name == call.name for parent in self.graph.parents(consumer)):
                total += self.moves.transfer(call, consumer, placement, placement).send_s
        return total

    def residence_s(self, call: Call, placement: Placement) -> tuple[float, float]:
        """Seconds of the offload and the reload that a placement asks for."""
        if call.model is None:
            return 0.0, 0.0
        away = None
        if placement.offload == "host" and not call.trains:
            away = "host"
        elif placement.drop_trained_weights:
            away = "main_params"
        if away is None:
            return 0.0, 0.0
        where = (call.model, placement.mesh, placement.parallel)
        return self.moves.offload(*where, away), self.moves.reload(*where, away)

    def realloc(self, model: str, home: Choice, other: Choice) -> ReallocCost:
        """Bring a model's second copy to the weights of its home copy."""
        return self.moves.realloc(model, (home.mesh, home.option.layout), (other.mesh, other.option.layout))

    def realloc_s(self, model: str, home: Choice, other: Choice) -> float:
        """Seconds of `realloc`."""
        return self.realloc(model, home, other).seconds

    def of_program(self, program: Program) -> ProgramPrices:
        """Prices of a program's instructions."""
        return ProgramPrices(self, program)


class ProgramPrices:
    """Seconds of the instructions of one program (`simulator.InstructionPrices`)."""

    def __init__(self, prices: Prices, program: Program) -> None:
        self._prices = prices
        self._program = program
        self._resident = self._needless_reloads()

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a run, realloc, offload or reload."""
        match instruction:
            case Run():
                return self.call(instruction.call).seconds
            case Realloc():
                return self.realloc(instruction).seconds
            case Offload(copy=copy, to=to):
                return self._prices.moves.offload(copy.model, copy.mesh, copy.layout, to)
            case Reload(copy=copy):
                if id(instruction) in self._resident:
                    return 0.0
                source = "main_params" if self._program.graph.trained(copy.model) else "host"
                return self._prices.moves.reload(copy.model, copy.mesh, copy.layout, source)
            case _:
                raise PlanError(f"search: found no price for {instruction.name}.")

    def transfer(self, instruction: Transfer) -> TransferTime:
        """Seconds of a transfer."""
        graph, calls = self._program.graph, self._program.plan.calls
        consumer = graph.call(instruction.consumer) if instruction.consumer is not None else None
        source = calls[instruction.producer]
        target = calls[consumer.name] if consumer is not None else source
        time = self._prices.moves.transfer(graph.call(instruction.producer), consumer, source, target)
        return TransferTime(time.send_s, time.wire_s, time.receive_s)

    def call(self, name: str) -> CallCost:
        """The parts of a call's time."""
        return self._prices.call(self._program.graph.call(name), self._program.plan.calls[name])

    def realloc(self, instruction: Realloc) -> ReallocCost:
        """The parts of a realloc's time."""
        source, target = instruction.source, instruction.target
        return self._prices.moves.realloc(
            instruction.model, (source.mesh, source.layout), (target.mesh, target.layout)
        )

    def _needless_reloads(self) -> set[int]:
        """Reloads of what is there already: a frozen model's second call finds it."""
        there: set[object] = set()
        needless = set()
        for instruction in self._program.instructions:
            if isinstance(instruction, Reload):
                if instruction.copy in there:
                    needless.add(id(instruction))
                there.add(instruction.copy)
            elif isinstance(instruction, Offload):
                there.discard(instruction.copy)
        return needless
