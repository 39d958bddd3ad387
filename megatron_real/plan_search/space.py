"""The choices of a plan: layouts, micro-batches, recomputation, offload and streaming of every call, priced and pruned.

Of the ways to run a call on a window of some size only those stay that no other one beats in seconds, in resident bytes
and in bytes while it runs. Calls of a model that is reallocated keep the best of each layout: which one is best depends
on where the weights come from.

Invariants (tests/unit/plan_search/test_space.py):
    - every option makes a placement that the plan, the model and, unless asked otherwise, the runtime accept;
    - no option of a class is beaten by another one of it, and what was dropped is;
    - pins hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_real.capabilities import placement_problems
from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import PlanError, Problem, raise_problems
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import OffloadTo, Placement
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.pins import Pin, check_pins
from megatron_real.plan_search.pricing import Prices
from megatron_real.plan_search.problem import Option, SearchProblem
from megatron_real.plan_search.steps import weights_stay
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES

__all__ = ["Pin", "SpaceOptions", "Space", "build_space", "candidates"]

_BYTES_STEP = 1 / 256
"""Options whose bytes differ by less than this part of the capacity count as equal."""
_SECONDS_STEP = 1e-3
"""As do options whose seconds differ by less than this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceOptions:
    """What the search may choose from."""

    plan_only: bool = False
    """Offer what can be priced, whether the runtime can execute it or not."""
    meshes: Literal["aligned", "any"] = "aligned"
    """``any``: all windows in a node and all runs of whole nodes (strategy ``cpsat``)."""
    min_mesh: int = 1
    max_tp: int | None = None
    """None: a node."""
    max_pp: int = 64
    context_parallel: bool = True
    virtual_stages: bool = True
    sequence_parallel: bool | None = None
    """Of calls that train or infer with tp > 1; None is on, but on CPU off: it saves nothing there."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: bool = True
    """Frozen weights on the host or in the nodes' host stores, optimizer state on the host."""
    drop_trained_weights: bool = True
    stream: bool = True
    keep_layouts: bool = False
    """Keep the best options of each layout, whether another layout beats them or not: presets ask for theirs."""
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Sequences of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """A search problem, and what did not make it into it."""

    problem: SearchProblem
    num_priced: int
    unpriced: Mapping[str, str]
    """By call: why options of it have no price (the first reason)."""
    too_large: Mapping[str, int]
    """By call that has no option that fits: bytes that the smallest one has too many."""


def build_space(
    graph: Graph,
    models: Mapping[str, ModelSpec],
    cluster: Cluster,
    prices: Prices,
    *,
    options: SpaceOptions | None = None,
    pins: Mapping[str, Pin] | None = None,
) -> Space:
    """Enumerate, price and prune the options of every call.

    Raises:
        PlanError: a pin names no call or nothing possible, or a call has no option with a price, or none that fits
            into a device by itself; all problems together.
    """
    options, pins = options or SpaceOptions(), pins or {}
    check_pins(graph, cluster, pins)
    meshes = _meshes(cluster, options, pins)
    builder = _Builder(graph, models, cluster, prices, options)
    table: dict[tuple[str, int], tuple[Option, ...]] = {}
    for call in graph.calls:
        pin = pins.get(call.name, Pin())
        sizes = {pin.ranks[1] - pin.ranks[0]} if pin.ranks is not None else {mesh.size for mesh in meshes}
        for size in sorted(sizes):
            found = builder.options_of(call, size, pin)
            if found:
                table[call.name, size] = found
    problem = SearchProblem(
        graph=graph,
        cluster=cluster.spec,
        meshes=meshes,
        capacity_bytes=cluster.capacity_bytes - prices.memory.reserve_bytes,
        options=table,
        realloc_s=prices.realloc_s,
        mix_s=prices.mix_s,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        laminar=options.meshes == "aligned" and _laminar(meshes),
        pinned={name: Mesh(*pin.ranks) for name, pin in pins.items() if pin.ranks is not None},
    )
    space = Space(
        problem=problem, num_priced=builder.num_priced, unpriced=builder.unpriced, too_large=builder.too_large
    )
    raise_problems(_missing(graph, space, pins), subject="search")
    return space


def candidates(
    prices: Prices, call: Call, size: int, options: SpaceOptions | None = None
) -> Iterator[Option]:
    """Every way to run `call` on a window of `size` ranks, neither priced nor pruned, whether it fits or not."""
    builder = _Builder(prices.graph, prices.models, prices.cluster, prices, options or SpaceOptions())
    for layout in builder.layouts(call, size, Pin()):
        yield from builder.unpriced_options(call, layout, Pin())


class _Builder:
    def __init__(
        self,
        graph: Graph,
        models: Mapping[str, ModelSpec],
        cluster: Cluster,
        prices: Prices,
        options: SpaceOptions,
    ) -> None:
        self._graph = graph
        self._models = models
        self._cluster = cluster
        self._prices = prices
        self._options = options
        self._capacity = cluster.capacity_bytes - prices.memory.reserve_bytes
        self.num_priced = 0
        self.unpriced: dict[str, str] = {}
        self.too_large: dict[str, int] = {}

    def options_of(self, call: Call, size: int, pin: Pin) -> tuple[Option, ...]:
        """The options of a call on any window of `size`, fastest first."""
        by_class: dict[object, list[Option]] = defaultdict(list)
        for layout in self.layouts(call, size, pin):
            for option in self._of_layout(call, layout, pin):
                by_class[self._class_of(call, option)].append(option)
        kept = [option for found in by_class.values() for option in self._pareto(call, found)]
        return tuple(sorted(kept, key=lambda option: option.seconds))

    def _class_of(self, call: Call, option: Option) -> object:
        """Options that may stand in for each other in everything but their own time and bytes."""
        alone = weights_stay(self._graph, call)
        if alone and not self._options.keep_layouts:
            return None
        stored = option.offload == "node" and not alone  # other calls then need no reallocation
        return option.layout, option.stream, stored

    def layouts(self, call: Call, size: int, pin: Pin) -> Iterator[Layout]:
        """Layouts over `size` ranks that the model and the batch allow."""
        if call.model is None:
            yield Layout(dp=size)
            return
        shape = self._models[call.model].shape
        for layout in self._degrees(call, size):
            if all(getattr(layout, name) == value for name, value in pin.layout.items()) and not any(
                shape.layout_problems(layout, "")
            ):
                yield layout

    def _degrees(self, call: Call, size: int) -> Iterator[Layout]:
        assert call.model is not None
        shape = self._models[call.model].shape
        most = self._options.max_tp or self._cluster.devices_per_node
        most_replicas = self._prices.workload.step_units(call)
        for tp in _divisors(size, most):
            sequence_parallel = tp > 1 and call.type is not CallType.GENERATE and self._sequence_parallel
            for pp in _divisors(size // tp, min(self._options.max_pp, shape.num_layers)):
                for cp in self._context_degrees(call, size // tp // pp):
                    dp = size // (tp * pp * cp)
                    if dp > most_replicas:
                        continue
                    for ep in self._expert_degrees(call, dp * cp * tp):
                        for vpp in self._virtual_degrees(call, pp):
                            yield Layout(
                                dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, sp=sequence_parallel,
                                etp=1 if shape.num_experts else None,
                            )  # fmt: skip

    @property
    def _sequence_parallel(self) -> bool:
        wanted = self._options.sequence_parallel
        return self._cluster.device.name != "cpu" if wanted is None else wanted

    def _context_degrees(self, call: Call, most: int) -> Iterator[int]:
        yield 1
        if not self._options.context_parallel or call.type is CallType.GENERATE:
            return
        cp = 2
        while most % cp == 0 and self._prices.workload.long_length // cp >= 2048:
            yield cp
            cp *= 2

    def _expert_degrees(self, call: Call, most: int) -> Iterator[int]:
        assert call.model is not None
        experts = self._models[call.model].shape.num_experts
        yield from (ep for ep in _divisors(most, experts) if experts % ep == 0) if experts else (1,)

    def _virtual_degrees(self, call: Call, pp: int) -> Iterator[int]:
        assert call.model is not None
        yield 1
        layers = self._models[call.model].shape.num_layers
        if call.trains and pp > 1 and self._options.virtual_stages and layers % pp == 0:
            yield from (vpp for vpp in (2, 4, 8) if (layers // pp) % vpp == 0)

    def _of_layout(self, call: Call, layout: Layout, pin: Pin) -> Iterator[Option]:
        for option in self.unpriced_options(call, layout, pin):
            priced = self._priced(call, option)
            if priced is not None:
                yield priced

    def unpriced_options(self, call: Call, layout: Layout, pin: Pin) -> Iterator[Option]:
        """Micro-batches, recomputation, residence and streaming in one layout."""
        for number in self._microbatches(call, layout, pin):
            for recompute in self._recomputes(call):
                for offload, drop, stream in self._residence(call):
                    option = Option(
                        layout=layout, num_microbatches=number, recompute=recompute, offload=offload,
                        drop_trained_weights=drop, stream=stream, seconds=0.0,
                    )  # fmt: skip
                    if pin.allows(option):
                        yield option

    def _microbatches(self, call: Call, layout: Layout, pin: Pin) -> tuple[int, ...]:
        if call.model is None:
            return (1,)
        workload = self._prices.workload
        count = workload.step_units(call) // layout.dp
        if pin.num_microbatches is not None:
            return (pin.num_microbatches,) if pin.num_microbatches <= count else ()
        if call.type is CallType.GENERATE:
            # Decoding batches go in waves of one per stage: more waves are slower and need less cache.
            wanted = {layout.pp * waves for waves in (1, 2, 4, 8, 16, 32)}
        else:
            unit = workload.unit_of(call)
            wanted = {-(-count * unit // max(size, unit)) for size in self._options.microbatch_sizes}
        if layout.vpp > 1:
            wanted = {-(-number // layout.pp) * layout.pp for number in wanted}
        return tuple(sorted(number for number in wanted if 1 <= number <= count))

    def _recomputes(self, call: Call) -> tuple[str, ...]:
        if not call.trains:
            return ("none",)
        assert call.model is not None
        fused = self._models[call.model].fused_attention
        return tuple(mode for mode in self._options.recompute if mode != "selective" or not fused)

    def _residence(self, call: Call) -> Iterator[tuple[OffloadTo, bool, bool]]:
        """Where bytes are between the model's calls, and how they come: (offload, drop_trained_weights, stream)."""
        yield "none", False, False
        if call.model is None:
            return
        if self._graph.home_call(call.model).name != call.name:
            if self._options.stream:
                yield "none", False, True
            return
        if self._options.offload:
            yield "host", False, False
        if not call.trains:
            # What a store holds stays what it is.
            if self._options.offload and self._graph.update_of(call.model) is None:
                yield "node", False, False
            return
        droppable = self._options.drop_trained_weights and self._models[call.model].has_main_params
        if droppable and len(self._graph.calls_of(call.model)) > 1:
            yield "none", True, False
            if self._options.offload:
                yield "host", True, False

    def _priced(self, call: Call, option: Option) -> Option | None:
        """The option with its bytes and seconds; None if it cannot be, does not fit or has no price."""
        placement = option.placement(Mesh(0, option.size))
        if not self._options.plan_only and any(placement_problems(call, placement)):
            return None
        if not self._fits_host(call, placement):
            return None
        option = self._prices.with_bytes(call, option)
        excess = option.weights_bytes + option.state_bytes + option.active_bytes - self._capacity
        if excess > 0:
            self.too_large[call.name] = min(excess, self.too_large.get(call.name, excess))
            return None
        try:
            option = self._prices.with_seconds(call, option)
        except PlanError as error:
            self.unpriced.setdefault(call.name, str(error))
            return None
        self.num_priced += 1
        self.too_large[call.name] = 0
        return option

    def _fits_host(self, call: Call, placement: Placement) -> bool:
        """Whether a node's host memory has room for what this placement alone keeps there."""
        limit, memory = self._cluster.spec.host_memory, self._prices.memory
        if limit is None or placement.offload == "none":
            return True
        if placement.offload == "node" and call.model is not None:
            return memory.store_bytes(call.model) <= limit
        together = min(placement.mesh.size, self._cluster.devices_per_node)
        return together * max(memory.call_memory(call, placement).host_bytes) <= limit

    def _pareto(self, call: Call, found: Sequence[Option]) -> Iterator[Option]:
        step = self._capacity * _BYTES_STEP
        kept: list[tuple[float, float, float, float]] = []

        def key(option: Option) -> tuple[float, float, float, float]:
            resident = 0
            if call.model is not None and self._graph.home_call(call.model).name == call.name:
                away = option.offload != "none"
                resident += 0 if away else option.state_bytes
                gone = option.drop_trained_weights or (away and not call.trains)
                resident += 0 if gone else option.weights_bytes
            active = option.weights_bytes + option.state_bytes + option.active_bytes - resident
            seconds = option.seconds + option.leave_s + option.return_s
            return (
                seconds + option.state_leave_s + option.state_return_s,
                resident,
                active,
                -option.first_pass_s,
            )

        for option in sorted(found, key=key):
            mine = key(option)
            beaten = any(
                other[0] <= mine[0] * (1 + _SECONDS_STEP)
                and other[1] <= mine[1] + step
                and other[2] <= mine[2] + step
                and other[3] <= mine[3] * (1 - _SECONDS_STEP)
                for other in kept
            )
            if not beaten:
                kept.append(mine)
                yield option


def _divisors(number: int, most: int) -> Iterator[int]:
    return (value for value in range(1, min(number, most) + 1) if number % value == 0)


def _meshes(cluster: Cluster, options: SpaceOptions, pins: Mapping[str, Pin]) -> tuple[Mesh, ...]:
    if options.meshes == "aligned":
        found = set(cluster.meshes())
    else:
        found = set(cluster.windows())
    pinned = {Mesh(*pin.ranks) for pin in pins.values() if pin.ranks is not None}
    found = {mesh for mesh in found if mesh.size >= options.min_mesh} | pinned
    return tuple(sorted(found, key=lambda mesh: (-mesh.size, mesh.start)))


def _laminar(meshes: Sequence[Mesh]) -> bool:
    stack: list[Mesh] = []
    for mesh in sorted(meshes, key=lambda mesh: (mesh.start, -mesh.stop)):
        while stack and stack[-1].stop <= mesh.start:
            stack.pop()
        if stack and mesh.stop > stack[-1].stop:
            return False
        stack.append(mesh)
    return True


def _missing(graph: Graph, space: Space, pins: Mapping[str, Pin]) -> Iterator[Problem]:
    for call in graph.calls:
        if any(name == call.name for name, _ in space.problem.options):
            continue
        fixed = f" under the pin {pins[call.name]}" if call.name in pins else ""
        excess = space.too_large.get(call.name, 0)
        if excess > 0:
            yield Problem(
                path=f"calls.{call.name}",
                found=f"no placement that fits{fixed}: the smallest is {excess / 2**30:.2f} GiB too large",
                expected=f"at most {space.problem.capacity_bytes / 2**30:.2f} GiB",
                fix="Take more or larger devices, a smaller batch, or loosen the pin."
                if fixed
                else "Take more or larger devices, or a smaller batch.",
            )
        elif call.name in space.unpriced:
            yield Problem(
                path=f"calls.{call.name}",
                found=f"no placement with a price{fixed} ({space.unpriced[call.name]})",
                expected="at least one",
            )
        else:
            yield Problem(
                path=f"calls.{call.name}",
                found=f"no placement{fixed} that the model's dimensions and the batch allow",
                expected="at least one",
                fix="Loosen the pin." if fixed else "Change the batch size or the cluster.",
            )
