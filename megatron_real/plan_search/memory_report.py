"""The bytes of every rank over a program: peaks, who holds them, and what to change where they do not fit.

A report walks the instructions, so it counts both copies of a reallocation and what is resident beside a call.

Invariant (tests/unit/plan_search/test_memory.py): a report's peak is that of a walk rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from megatron_real.capabilities import placement_problems
from megatron_real.errors import PlanError, Problem
from megatron_real.layout import Mesh
from megatron_real.plan import CopyKey, Placement
from megatron_real.plan_search.memory import MemoryModel, copy_memory
from megatron_real.program import Mix, Offload, Program, Realloc, Reload, Run, Save, What, compile_program
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES, STAGING_SLOTS

__all__ = ["MemoryReport", "RankMemory", "memory_report"]


def memory_report(memory: MemoryModel, program: Program) -> MemoryReport:
    """Walk a program rank by rank; ranks that hold the same are walked together.

    Raises:
        PlanError: a model cannot be cut into the layout of its call.
    """
    groups = tuple(_Walk(memory, program, mesh).run() for mesh in _groups(program))
    return MemoryReport(
        memory=memory, program=program, groups=groups, host_bytes=_host_bytes(memory, program)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What each of some neighbouring ranks holds."""

    mesh: Mesh
    static_bytes: int
    """Between two iterations."""
    peak_bytes: int
    peak_at: str
    """The instruction that needs most."""
    holders: tuple[tuple[str, int], ...]
    """Bytes by owner at the peak, largest first."""
    timeline: tuple[tuple[str, int], ...]
    """(instruction, bytes while it runs): the set-up and the first iteration, then a later one."""
    history: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    """The same with the bytes by owner."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryReport:
    """Bytes of every rank and host under a plan."""

    memory: MemoryModel
    program: Program
    groups: tuple[RankMemory, ...]
    """Ascending in rank; together all ranks."""
    host_bytes: tuple[int, ...]
    """Of offloaded weights and optimizer state, and of host stores, by node."""

    def of(self, rank: int) -> RankMemory:
        """What `rank` holds."""
        return next(group for group in self.groups if rank in group.mesh)

    @property
    def peak_bytes(self) -> int:
        return max(group.peak_bytes for group in self.groups)

    def by_rank(self) -> dict[str, int]:
        """Peak bytes by rank, as ``predicted.peak_memory_bytes`` of a plan has them."""
        return {str(rank): group.peak_bytes for group in self.groups for rank in group.mesh.ranks}

    def problems(self, capacity_bytes: int) -> tuple[Problem, ...]:
        """What does not fit: one problem per instruction, of the rank that lacks most, with a change that helps."""
        worst: dict[str, RankMemory] = {}
        for group in self.groups:
            if group.peak_bytes > capacity_bytes:
                known = worst.setdefault(group.peak_at, group)
                if group.peak_bytes > known.peak_bytes:
                    worst[group.peak_at] = group
        return tuple(self._problem(group, capacity_bytes) for group in worst.values())

    def host_problems(self, limit_bytes: int | None) -> Iterator[Problem]:
        """Nodes whose host memory does not hold what is offloaded."""
        for node, found in enumerate(self.host_bytes):
            if limit_bytes is not None and found > limit_bytes:
                yield Problem(
                    path=f"host memory of node {node}",
                    found=f"{found:,} bytes of offloaded models",
                    expected=f"at most {limit_bytes:,}",
                    fix="Offload less, or keep frozen models in the node's store (offload=node): one copy per node.",
                )

    def _problem(self, group: RankMemory, capacity_bytes: int) -> Problem:
        excess = group.peak_bytes - capacity_bytes
        held = ", ".join(f"{owner} {size:,}" for owner, size in group.holders[:6])
        return Problem(
            path=f"{group.peak_at} on rank {group.mesh.start}",
            found=f"{group.peak_bytes:,} bytes, {excess:,} too many (held by {held})",
            expected=f"at most {capacity_bytes:,}",
            fix=_Changes(self, group, capacity_bytes).advice(),
        )


class _Walk:
    """The instructions of a program as one group of ranks goes through them."""

    def __init__(self, memory: MemoryModel, program: Program, mesh: Mesh) -> None:
        self._memory = memory
        self._program = program
        self._mesh = mesh
        self._rank = mesh.start
        self._steps = program.steps(mesh.start)
        self._homes = {model: program.home(model) for model in program.graph.models}
        self._held: dict[str, int] = {}
        self._timeline: list[tuple[str, int]] = []
        self._history: list[tuple[str, tuple[tuple[str, int], ...]]] = []
        self._peak = (-1, "", {"": 0})

    def run(self) -> RankMemory:
        self._set_up()
        self._iterate()
        static_bytes = sum(self._held.values())
        self._iterate()
        peak_bytes, peak_at, holders = self._peak
        return RankMemory(
            mesh=self._mesh,
            static_bytes=static_bytes,
            peak_bytes=peak_bytes,
            peak_at=peak_at,
            holders=tuple(sorted(holders.items(), key=lambda item: -item[1])),
            timeline=tuple(self._timeline),
            history=tuple(self._history),
        )

    def _set_up(self) -> None:
        """Every copy is built and freed again, then that in which a model lives, which goes where it rests."""
        self._note("set-up", {})
        for model in self._program.graph.models:
            home = self._homes[model]
            for copy in sorted(self._program.copies(), key=home.__eq__):
                if copy.model == model and self._rank in copy.mesh:
                    self._allocate(copy)
                    self._note("set-up", {})
                    if copy != home:
                        self._free(copy)
            placement = self._program.plan.calls[self._program.graph.home_call(model).name]
            if placement.offload != "none" and self._rank in home.mesh:
                self._free(home, "state" if self._program.graph.trained(model) else "weights")

    def _iterate(self) -> None:
        for step in self._steps:
            for realloc in step.finish:
                self._held.pop(_staging_of(realloc))
            match step.instruction:
                case Realloc(source=source, target=target) as realloc:
                    if self._rank in target.mesh:
                        self._allocate(target)
                    staging = self._staging(source, target)
                    self._note(step.name, {_staging_of(realloc): staging})
                    if realloc.stream:
                        self._held[_staging_of(realloc)] = staging
                case Mix() as mix:
                    self._mix(mix)
                case Run() as run:
                    self._run(run)
                case Reload(copy=copy, what=what):
                    self._allocate(copy, what)
                    self._note(step.name, {})
                case Offload(copy=copy, what=what):
                    self._note(step.name, {})
                    self._free(copy, what)
                case Save():
                    self._save()
                case _:
                    pass

    def _mix(self, mix: Mix) -> None:
        if mix.from_host and self._rank in mix.target.mesh:
            self._allocate(mix.target)
        self._note(mix.name, {f"{mix.name} staging": self._staging(mix.source, mix.target)})
        if mix.from_host:
            self._free(mix.target)

    def _save(self) -> None:
        """Optimizer state that is on the host comes back, model by model."""
        for copy in self._homes.values():
            needed = copy_memory(self._memory.models[copy.model], copy.layout, True)
            away = self._program.graph.trained(copy.model) and _owner(copy, "state") not in self._held
            if away and self._rank in copy.mesh:
                self._note("save", {_owner(copy, "state"): needed.state_bytes[self._stage(copy)]})

    def _run(self, run: Run) -> None:
        call, copy = self._program.graph.call(run.call), run.copy
        active = self._memory.call_memory(call, self._program.plan.calls[run.call]).active_bytes
        stage = self._stage(copy) if copy is not None else 0
        self._note(run.name, {f"{run.call} activations": active[stage]})
        self._held.pop(f"realloc:{run.call} staging", None)
        if run.release and copy is not None:
            self._free(copy)

    def _note(self, name: str, during: dict[str, int]) -> None:
        total = sum(self._held.values()) + sum(during.values())
        self._timeline.append((name, total))
        self._history.append((name, (*self._held.items(), *during.items())))
        if total > self._peak[0]:
            self._peak = (total, name, {**self._held, **during})

    def _allocate(self, copy: CopyKey, what: What | None = None) -> None:
        """Weights or optimizer state; of a copy that is built, both."""
        spec, stage = self._memory.models[copy.model], self._stage(copy)
        trained = copy == self._homes[copy.model] and self._program.graph.trained(copy.model)
        needed = copy_memory(spec, copy.layout, trained)
        if what != "state":
            self._held[_owner(copy, "weights")] = needed.weights_bytes[stage]
        if what != "weights" and trained:
            self._held[_owner(copy, "state")] = needed.state_bytes[stage]

    def _free(self, copy: CopyKey, what: What = "weights") -> None:
        self._held.pop(_owner(copy, what), None)

    def _staging(self, source: CopyKey, target: CopyKey) -> int:
        """Two buckets per direction; a message is never larger than what the rank has or gets."""
        total = 0
        for copy in (source, target):
            if self._rank in copy.mesh:
                shard = self._held.get(_owner(copy, "weights"), 0)
                total += STAGING_SLOTS * min(DEFAULT_BUCKET_BYTES, shard)
        return total

    def _stage(self, copy: CopyKey) -> int:
        return (self._rank - copy.mesh.start) // (copy.mesh.size // copy.layout.pp)


def _owner(copy: CopyKey, what: What) -> str:
    return f"{copy} parameters" if what == "weights" else f"{copy} gradients and optimizer"


def _staging_of(realloc: Realloc) -> str:
    return f"{realloc.name} staging"


def _host_bytes(memory: MemoryModel, program: Program) -> tuple[int, ...]:
    """Of offloaded copies, by node. What the host keeps stays there while it is on the device."""
    found = [0] * memory.cluster.spec.num_nodes
    calls, graph = program.plan.calls, program.graph
    for model in graph.models:
        home_call, copy = graph.home_call(model), program.home(model)
        placement = calls[home_call.name]
        if placement.offload == "node" and not home_call.trains:
            meshes = [calls[call.name].mesh for call in graph.calls_of(model)]
            for node in {node for mesh in meshes for node in memory.cluster.nodes_of(mesh)}:
                found[node] += memory.store_bytes(model)
            continue
        stages = memory.call_memory(home_call, placement).host_bytes
        per_stage = copy.mesh.size // copy.layout.pp
        for rank in copy.mesh.ranks:
            found[memory.cluster.node_of(rank)] += stages[(rank - copy.mesh.start) // per_stage]
    return tuple(found)


def _groups(program: Program) -> Iterator[Mesh]:
    """Ranks in pieces that no border of a window or of a pipeline stage goes through."""
    borders = {0, program.world_size}
    for placement in program.plan.calls.values():
        mesh, pp = placement.mesh, placement.parallel.pp
        borders.update(mesh.start + mesh.size // pp * stage for stage in range(pp + 1))
    for start, stop in pairwise(sorted(borders)):
        yield Mesh(start, stop)


class _Changes:
    """Looks for a change of the plan that makes a group of ranks fit."""

    def __init__(self, report: MemoryReport, group: RankMemory, capacity_bytes: int) -> None:
        self._memory = report.memory
        self._graph = report.program.graph
        self._plan = report.program.plan
        self._group = group
        self._capacity = capacity_bytes

    def advice(self) -> str:
        """The first change that fits, smallest first; else the one that helps most."""
        best: tuple[int, str] | None = None
        for text, calls in self._candidates():
            excess = self._excess(calls)
            if excess is not None and excess <= 0:
                return f"Fits with {text}."
            if excess is not None and (best is None or excess < best[0]):
                best = (excess, text)
        if best is None or best[0] >= self._group.peak_bytes - self._capacity:
            return "No single change of this plan helps: use more devices, or larger ones."
        return (
            f"No single change of this plan suffices. What helps most is {best[1]}: {best[0]:,} bytes are then still "
            "too many. Use more devices for the call as well."
        )

    def _excess(self, calls: Mapping[str, Placement]) -> int | None:
        """Bytes too many on the group's ranks under a changed plan; None if the plan is not legal."""
        plan = self._plan.model_copy(update={"calls": {**self._plan.calls, **calls}})
        for name, placement in calls.items():
            call = self._graph.call(name)
            shape = self._memory.models[call.model].shape if call.model is not None else None
            executable = not any(placement_problems(call, self._plan.calls[name]))
            if executable and any(placement_problems(call, placement)):
                return None
            if shape is not None and any(shape.layout_problems(placement.parallel, "")):
                return None
        try:
            changed = memory_report(self._memory, compile_program(self._graph, plan))
        except PlanError:
            return None
        peaks = [group.peak_bytes for group in changed.groups if group.mesh.overlaps(self._group.mesh)]
        return max(peaks) - self._capacity

    def _candidates(self) -> Iterator[tuple[str, Mapping[str, Placement]]]:
        running = self._group.peak_at.partition(":")
        if running[0] == "run":
            yield from self._work(running[2])
        for name, placement in self._plan.calls.items():
            if placement.stream and self._here(name):
                yield f"stream=false in {name}", {name: placement.model_copy(update={"stream": False})}
        yield from self._residence()
        if running[0] in ("run", "realloc"):
            yield from self._layouts(running[2])
        for call in self._graph.calls:
            if call.trains and call.name != running[2] and self._here(call.name):
                yield from self._layouts(call.name)

    def _here(self, name: str) -> bool:
        return self._plan.calls[name].mesh.overlaps(self._group.mesh)

    def _work(self, name: str) -> Iterator[tuple[str, Mapping[str, Placement]]]:
        """Smaller micro-batches, recomputation, both."""
        call, placement = self._graph.call(name), self._plan.calls[name]
        if call.model is None:
            return
        most = self._memory.workload.step_units(call) // placement.parallel.dp
        numbers = [placement.num_microbatches]
        while numbers[-1] * 2 <= most:
            numbers.append(numbers[-1] * 2)
        modes = ("selective", "full") if call.trains else ()
        changes: list[dict[str, object]] = [{"num_microbatches": number} for number in numbers[1:]]
        changes += [{"recompute": mode} for mode in modes if mode != placement.recompute]
        changes += [
            {"num_microbatches": number, "recompute": mode} for mode in modes for number in numbers[1:]
        ]
        for change in changes:
            text = " and ".join(f"{key}={value}" for key, value in change.items())
            yield f"{text} in {name}", {name: placement.model_copy(update=change)}

    def _residence(self) -> Iterator[tuple[str, Mapping[str, Placement]]]:
        for model in self._graph.models:
            name = self._graph.home_call(model).name
            placement = self._plan.calls[name]
            if not self._here(name):
                continue
            if placement.offload == "none":
                yield f"offload=host in {name}", {name: placement.model_copy(update={"offload": "host"})}
            if (
                self._graph.trained(model)
                and not placement.drop_trained_weights
                and self._memory.models[model].has_main_params
            ):
                change = {"drop_trained_weights": True}
                yield f"drop_trained_weights in {name}", {name: placement.model_copy(update=change)}

    def _layouts(self, name: str) -> Iterator[tuple[str, Mapping[str, Placement]]]:
        """More tensor- or pipeline-parallel ranks in place of data-parallel ones."""
        placement = self._plan.calls[name]
        if self._graph.call(name).model is None:
            return
        spec = placement.layout
        for factor in (2, 4, 8):
            if spec.dp % factor:
                return
            for degree in ("tp", "pp"):
                wider = {"dp": spec.dp // factor, degree: getattr(spec, degree) * factor, "layers": None}
                if degree == "tp" and wider["tp"] > self._memory.cluster.devices_per_node:
                    continue
                if degree == "pp" and spec.layers is not None:
                    continue
                if degree == "tp":
                    wider["layers"] = spec.layers
                text = f"dp={wider['dp']} {degree}={wider[degree]} in {name}"
                yield text, {name: placement.model_copy(update={"layout": spec.model_copy(update=wider)})}
