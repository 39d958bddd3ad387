"""All prices of one search together: calls, moves and memory under one workload, on one cluster.

The search asks for options of calls (`call_s`, `realloc_s`), the simulator for instructions of a program
(`of_program`); both get the same numbers. In the search a call's data transfers are folded into its own time, as if its
partners lay in a window like its own.

Where ranks share the cores of their node, a call is priced as if all that may be busy beside it were; or for those that
are, as long as they are, once that is known (`Busy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_real.dataflow import Call, Graph, Update
from megatron_real.errors import PlanError
from megatron_real.layout import Mesh, stage_layers
from megatron_real.plan import Placement
from megatron_real.plan_search.choices import Choice, Option
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.costs.calls import CallCost, CallPricer
from megatron_real.plan_search.costs.moves import MovePricer, ReallocCost
from megatron_real.plan_search.costs.operations import OperationCosts
from megatron_real.plan_search.memory import MemoryModel, copy_memory
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.simulator import TransferTime
from megatron_real.plan_search.workload import Workload
from megatron_real.program import Instruction, Mix, Offload, Program, Realloc, Reload, Run, Transfer

__all__ = ["Busy", "Prices", "ProgramPrices"]

Busy = Mapping[int, float]
"""Shares of a call's time, which add up to 1, by the number of ranks of its node that are busy then, its own too."""


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

    def call(self, call: Call, placement: Placement, busy: Busy | None = None) -> CallCost:
        """The parts of a call's time; `busy`: None is as many ranks as may be."""
        if busy is None or call.model is None or not self.calls.shares_cores:
            return self.calls.price(call, placement)
        return CallCost.mixed(
            [(share, self.calls.price(call, placement, number)) for number, share in busy.items()]
        )

    def call_s(self, call: Call, placement: Placement, busy: Busy | None = None) -> float:
        """A call's seconds with the data that it receives and sends; `busy` as in `call`."""
        total = self.call(call, placement, busy).seconds
        for parent in self.graph.parents(call):
            time = self.moves.transfer(parent, call, placement, placement)
            total += time.wire_s + time.receive_s
        for consumer in self.graph.calls:
            if any(parent.name == call.name for parent in self.graph.parents(consumer)):
                total += self.moves.transfer(call, consumer, placement, placement).send_s
        return total

    def with_bytes(self, call: Call, option: Option) -> Option:
        """An option with what it needs on the rank that needs most."""
        needed = self.memory.call_memory(call, option.placement(Mesh(0, option.size))).worst
        return replace(option, **needed._asdict())

    def with_seconds(self, call: Call, option: Option, mesh: Mesh | None = None) -> Option:
        """An option, with its bytes, and what it takes on `mesh` (None: the first window of its size).

        Raises:
            PlanError: something has no price.
        """
        placement = option.placement(mesh if mesh is not None else Mesh(0, option.size))
        return replace(
            option,
            seconds=self.call_s(call, placement),
            **self._moves_s(call, placement),
            **(self._streaming(call, placement) if option.stream else {}),
        )

    def _moves_s(self, call: Call, placement: Placement) -> dict[str, Any]:
        """Seconds of the offloads and the reloads that a placement asks for, by the option's field."""
        if call.model is None:
            return {}
        where = (call.model, placement.mesh, placement.parallel)
        moves = self.moves
        found: dict[str, Any] = {}
        if call.trains:
            if placement.drop_trained_weights:
                found["leave_s"] = moves.offload(*where, "main_params")
                found["return_s"] = moves.reload(*where, "main_params")
            if placement.offload == "host":
                found["state_leave_s"] = found["state_return_s"] = moves.move_state(*where)
        elif not self.graph.trained(call.model):
            home = self.graph.home_call(call.model).name == call.name
            if placement.offload == "host" and home:
                found["leave_s"] = moves.offload(*where, "host")
                found["return_s"] = moves.reload(*where, "host")
            elif placement.offload == "node" or not home:  # it counts where the home is in the nodes' stores
                found["return_s"] = moves.reload(*where, "node")
        return found

    def _streaming(self, call: Call, placement: Placement) -> dict[str, Any]:
        """When a call can start whose weights are streamed, and behind what the rest of them arrives.

        A rank waits for its first layers: for one of them, or on the first stage for the embedding if that is larger,
        and at least for a bucket.
        """
        assert call.model is not None
        spec, layout = self.models[call.model], placement.parallel
        shape = spec.shape
        layers = [sum(map(len, chunks)) for chunks in stage_layers(shape.num_layers, layout)]
        weights = copy_memory(spec, layout, False).weights_bytes
        embedding = shape.padded_vocab_size * shape.hidden_size * spec.param_itemsize / layout.tp
        shares = [1 / number for number in layers]
        shares.append(embedding / weights[0])
        shares += [self.moves.bucket_bytes / size for size in weights]
        return {
            "first_share": min(1.0, max(shares)),
            "first_pass_s": self.calls.first_pass_s(call, placement),
        }

    def realloc(self, model: str, home: Choice, other: Choice) -> ReallocCost:
        """Bring a model's second copy to the weights of its home copy."""
        return self.moves.realloc(model, (home.mesh, home.option.layout), (other.mesh, other.option.layout))

    def realloc_s(self, model: str, home: Choice, other: Choice) -> float:
        """Seconds of `realloc` by itself."""
        return self.realloc(model, home, other).seconds

    def mix_s(self, update: Update, source: Choice, target: Choice) -> float:
        """Of an update between the homes of two models."""
        homes = (source.mesh, source.option.layout), (target.mesh, target.option.layout)
        return self.moves.mix(update, *homes, from_host=target.option.offload == "host")

    def exposed_s(self, call: Call, placement: Placement, realloc_s: float) -> float:
        """What a reallocation that takes `realloc_s` adds to an iteration before and in a call."""
        if not placement.stream:
            return realloc_s
        how = self._streaming(call, placement)
        return Option(layout=placement.parallel, stream=True, seconds=0.0, **how).exposed_s(realloc_s)

    def of_program(self, program: Program, busy: Mapping[str, Busy] | None = None) -> ProgramPrices:
        """Prices of a program's instructions; `busy`: by call, where it is known."""
        return ProgramPrices(self, program, busy or {})


class ProgramPrices:
    """Seconds of the instructions of one program (`simulator.InstructionPrices`)."""

    def __init__(self, prices: Prices, program: Program, busy: Mapping[str, Busy]) -> None:
        self._prices = prices
        self._program = program
        self._busy = busy
        self._resident = self._needless_reloads()

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a run, offload or reload; of a realloc or mix what it adds to the iteration."""
        match instruction:
            case Run():
                return self.call(instruction.call).seconds
            case Realloc():
                return self.realloc(instruction).exposed_s
            case Mix(update=update, source=source, target=target, from_host=from_host):
                homes = (source.mesh, source.layout), (target.mesh, target.layout)
                return self._prices.moves.mix(update, *homes, from_host=from_host)
            case Offload(copy=copy, what="state") | Reload(copy=copy, what="state"):
                return self._prices.moves.move_state(copy.model, copy.mesh, copy.layout)
            case Offload(copy=copy, to=to):
                return self._prices.moves.offload(copy.model, copy.mesh, copy.layout, to)
            case Reload(copy=copy, source=place):
                if id(instruction) in self._resident:
                    return 0.0
                return self._prices.moves.reload(copy.model, copy.mesh, copy.layout, place)
            case _:
                raise PlanError(f"search: found no price for {instruction.name}.")

    def transfer(self, instruction: Transfer) -> TransferTime:
        """Seconds of a transfer."""
        graph, calls, moves = self._program.graph, self._program.plan.calls, self._prices.moves
        if instruction.consumer is None:
            time = moves.lengths(instruction.source, len(instruction.targets))
        else:
            consumer = graph.call(instruction.consumer)
            placements = calls[instruction.producer], calls[consumer.name]
            time = moves.transfer(graph.call(instruction.producer), consumer, *placements)
        return TransferTime(*time)

    def call(self, name: str) -> CallCost:
        """The parts of a call's time."""
        call, placement = self._program.graph.call(name), self._program.plan.calls[name]
        return self._prices.call(call, placement, self._busy.get(name))

    def realloc(self, instruction: Realloc) -> ReallocCost:
        """The parts of a realloc's time."""
        source, target = instruction.source, instruction.target
        cost = self._prices.moves.realloc(
            instruction.model, (source.mesh, source.layout), (target.mesh, target.layout)
        )
        call = self._program.graph.call(instruction.call)
        placement = self._program.plan.calls[call.name]
        return cost._replace(exposed_s=self._prices.exposed_s(call, placement, cost.seconds))

    def _needless_reloads(self) -> set[int]:
        """Reloads of what is there already: a frozen model's second call finds it."""
        there: set[object] = set()
        needless = set()
        for instruction in self._program.instructions:
            match instruction:
                case Reload(copy=copy, source="host", what="weights"):
                    if copy in there:
                        needless.add(id(instruction))
                    there.add(copy)
                case Offload(copy=copy, what="weights"):
                    there.discard(copy)
        return needless
