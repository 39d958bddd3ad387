"""The host store of a node: one copy of a frozen model's whole weights, in memory that all ranks of the node share.

A frozen model in a store needs no home copy on any device. Its weights enter a copy of any layout by a local copy of
this rank's boxes: no network, no collective, no waiting for others. Filling the store is an ordinary reallocation to
the layout of `store_table`, so that any layout may be its source, and each node receives each byte once.

Who calls what:
    create   collective over the group, once per model at set-up, after the tables were gathered
    fill     collective over the group, when the weights were loaded, and again only when they change
    load     one rank for itself, whenever a copy shall have the weights
    close    one rank for itself

Invariants (tests/distributed/test_host_store.py):
    - host memory of a node is one copy of the weights, whatever the number of its ranks and the layouts;
    - nothing is left in /dev/shm, whenever a process is killed;
    - `load` gives the bits that `fill` found, in the dtype of the destination; it takes part in no collective;
    - weights of another version than asked for are not loaded, and none after a `fill` that failed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import Problem, RealError, raise_problems
from megatron_real.process_groups import exchange
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import Transport
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, ShardEntry, TensorSpec
from megatron_real.realloc_ops.planning.store_layout import store_offsets, store_table
from megatron_real.realloc_ops.proof.versions import VersionStamp
from megatron_real.realloc_ops.storage.host_memory import HostCopier, SharedBlock, Ticket
from megatron_real.realloc_ops.storage.local_shards import LocalShards, ShardPart, local_table

__all__ = ["NodeStore", "StoreGroup", "StoreReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What one `fill` or `load` of one rank did."""

    host_bytes: int
    """Of the node's store: one copy of the weights, shared by all its ranks; 0 where the node has no store."""
    bytes_copied: int
    """Between the store and the device by this rank, in the dtype of the store."""
    bytes_moved: int
    """Received from other ranks; always 0 for a load."""
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGroup:
    """The ranks that fill stores together."""

    group: dist.ProcessGroup
    """All ranks of all nodes with a store, and all ranks of every copy that the stores are filled from; any backend
    that can gather objects."""
    transport: Transport
    """Over the same ranks, in a group of its own: that of the reallocations will do."""
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of each node that gets a store (`nodes_of`)."""

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node; none if it gets no store."""
        rank = dist.get_rank()
        return next((node for node in self.nodes if rank in node), ())

    def agree(self, name: str, mine: Any, problem: Exception | None) -> dict[int, Any]:
        """Exchange one value of every rank, or fail on all ranks if one has a problem. Collective over the group.

        Raises:
            PeerError: another rank has a problem or did not come; a rank that has one raises its own.
        """
        return exchange(mine, problem, group=self.group, what=name)


class NodeStore:
    """The weights of one frozen model in this node's host memory, as this rank sees them."""

    def __init__(
        self,
        name: str,
        specs: Mapping[str, TensorSpec],
        members: StoreGroup,
        block: SharedBlock | None,
        ledger: MemoryLedger | None,
    ) -> None:
        """Use `create`."""
        self.name = name
        self.specs = dict(specs)
        """The whole tensors, in the dtypes of the store."""
        self.stamp = VersionStamp(name)
        self._members = members
        self._block = block
        self._ledger = ledger
        self._tensors = _tensors_in(block.data, specs) if block is not None else {}
        self._filler: tuple[ParamTable, LocalShards | None, ReallocExecutor] | None = None
        self._loads: WeakKeyDictionary[LocalShards, _Load] = WeakKeyDictionary()

    @classmethod
    def create(
        cls,
        table: ParamTable,
        members: StoreGroup,
        *,
        name: str,
        dtypes: Mapping[str, str] | None = None,
        ledger: MemoryLedger | None = None,
    ) -> NodeStore:
        """Allocate the store on the first rank of each node and map it on the others; its contents are not set.

        Collective over the group of `members`; each rank gives the same arguments but for the ledger.

        Args:
            table: of any copy of the model.
            members: who takes part.
            name: for messages and the ledger, for example ``store of ref``.
            dtypes: dtype by key where it shall differ from the table's.
            ledger: of host memory; the store is booked once per node, by its first rank.

        Raises:
            CapacityError: a node has not so much free host memory; nothing stays allocated on any node.
            RealError: a rank cannot map the memory of its node's first rank.
            PeerError: another rank met one of these.
        """
        specs = {
            key: spec._replace(dtype=(dtypes or {}).get(key, spec.dtype)) for key, spec in table.specs.items()
        }
        _, num_bytes = store_offsets(specs)
        return cls(name, specs, members, _map_block(name, num_bytes, members, ledger), ledger)

    @property
    def version(self) -> int | None:
        """The training step that the stored weights are from; None when they are not usable."""
        return self.stamp.version

    @property
    def host_bytes(self) -> int:
        """Host memory of this node's store, shared by its ranks; 0 where the node has none."""
        return self._block.data.nbytes if self._block is not None else 0

    def fill(
        self,
        shards: LocalShards | None,
        *,
        table: ParamTable,
        version: int,
        ledger: MemoryLedger | None = None,
    ) -> StoreReport:
        """Take the weights of a copy into the stores of all nodes. Collective over the group.

        It begins when every rank has come, so no rank still reads the former weights. The second time from the same
        copy plans and builds nothing.

        Args:
            shards: the copy's shards on this rank, allocated; None outside its window.
            table: the copy's table.
            version: of its weights.
            ledger: of device memory, for the staging buffers.

        Raises:
            PlanError: the copy has other tensors than the store.
            PeerError: another rank failed or did not come; the store has no version then.
            RealError: the copy's storage is freed.
        """
        started_s = time.perf_counter()
        executor: ReallocExecutor | None = None
        problem: RealError | RuntimeError | None = None
        try:
            executor = self._executor_for(shards, table, ledger)
        except RealError as error:
            problem = error
        self._members.agree(self.name, None, problem)
        assert executor is not None
        with self.stamp.updating(version):
            try:
                executor.run()
            except (RealError, RuntimeError) as error:
                problem = error
            self._members.agree(self.name, None, problem)
        report = executor.report
        return StoreReport(
            host_bytes=self.host_bytes,
            bytes_copied=report.bytes_local,
            bytes_moved=report.bytes_moved,
            messages=report.messages,
            seconds=time.perf_counter() - started_s,
        )

    def load(self, shards: LocalShards, *, version: int) -> StoreReport:
        """Copy this rank's boxes from the store into a copy of any layout; not collective.

        Complete when it returns. On CUDA it is queued behind what the current stream still does with the copy.

        Args:
            shards: the copy's shards on this rank, allocated.
            version: that the stored weights must have.

        Raises:
            RealError: the store has another version or none, the node has no store, or the copy's storage is freed.
            PlanError: the copy has a tensor that the store does not have in this shape; nothing is written then.
        """
        started_s = time.perf_counter()
        if self._block is None:
            raise RealError(
                f"{self.name}: found no store in the node of rank {dist.get_rank()}; expected one of nodes "
                f"{[list(node) for node in self._members.nodes]}. Create the store on every node whose calls use it."
            )
        self.stamp.require(version)
        plan = self._loads.get(shards)
        if plan is None:
            _require_tensors(self.name, self.specs, shards.entries)
        views = shards.resolve()
        if plan is None or plan.generation != shards.generation:
            self._lock_pages(shards)
            plan = self._loads[shards] = _Load(
                generation=shards.generation,
                sources=tuple(self._part(shard.key, shard.box) for shard in views),
                targets=tuple(views.values()),
            )
        HostCopier(locked=self._block.locked).copy(plan.sources, plan.targets)
        shards.fill_duplicates()
        return StoreReport(
            host_bytes=self.host_bytes,
            bytes_copied=sum(source.numel() * source.element_size() for source in plan.sources),
            bytes_moved=0,
            messages=0,
            seconds=time.perf_counter() - started_s,
        )

    def close(self) -> None:
        """Unmap the store on this rank; not collective. The memory goes with the last rank of the node."""
        self.stamp.invalidate("the store was closed")
        self._filler, self._block = None, None
        self._loads.clear()
        self._tensors.clear()
        if self._ledger is not None:
            self._ledger.free(self.name)

    def _lock_pages(self, shards: LocalShards) -> None:
        if self._block is not None and any(device.type == "cuda" for device in shards.devices):
            self._block.lock_pages()

    def _part(self, key: str, box: Box) -> torch.Tensor:
        shape = self.specs[key].global_shape
        return self._tensors[key][box.slices_in(Box((0,) * len(shape), shape))]

    def _executor_for(
        self, shards: LocalShards | None, table: ParamTable, ledger: MemoryLedger | None
    ) -> ReallocExecutor:
        if self._filler is not None and self._filler[0] is table and self._filler[1] is shards:
            return self._filler[2]
        if shards is not None:
            self._lock_pages(shards)
        rank = dist.get_rank()
        destination = store_table(table, self._members.nodes, self._specs_like(table))
        plan = build_realloc_plan(table, destination, rank=rank)
        executor = ReallocExecutor(
            plan.of(rank),
            src=shards,
            dst=self._shards_in(destination) if self._block is not None else None,
            transport=self._members.transport,
            ledger=ledger,
            name=f"filling {self.name}",
        )
        self._filler = (table, shards, executor)
        return executor

    def _specs_like(self, table: ParamTable) -> Mapping[str, TensorSpec]:
        entries = [
            ShardEntry(key, Box((), ()), spec.global_shape, spec.dtype) for key, spec in table.specs.items()
        ]
        _require_tensors(self.name, self.specs, entries)
        missing = [key for key in self.specs if key not in table.specs]
        raise_problems(
            [
                Problem(path=key, found="it in the store only", expected="it in the copy too")
                for key in missing
            ],
            subject=self.name,
        )
        return self.specs

    def _shards_in(self, table: ParamTable) -> LocalShards:
        """The parts of the store that this rank fills."""
        parts = [
            ShardPart(
                key=shard.key,
                data=self._part(shard.key, shard.box),
                local_shape=shard.box.shape,
                global_shape=self.specs[shard.key].global_shape,
                global_offset=shard.box.offset,
            )
            for shard in table.shards_of(dist.get_rank())
        ]
        return local_table(parts, self._tensors.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a load of one copy copies; made once per generation of its views."""

    generation: int
    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]


def _tensors_in(data: torch.Tensor, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    offsets, _ = store_offsets(specs)
    tensors = {}
    for key, spec in specs.items():
        flat = data[offsets[key] : offsets[key] + spec.num_bytes].view(getattr(torch, spec.dtype))
        tensors[key] = flat.view(spec.global_shape)
    return tensors


def _map_block(
    name: str, num_bytes: int, members: StoreGroup, ledger: MemoryLedger | None
) -> SharedBlock | None:
    """This node's block, mapped; None where it has none. Collective over the group."""
    rank, node = dist.get_rank(), members.node
    first = bool(node) and rank == node[0]
    block: SharedBlock | None = None
    problem: RealError | None = None
    try:
        if first:
            if ledger is not None:
                ledger.reserve(name, num_bytes)
            block = SharedBlock.allocate(name, max(num_bytes, 1))
    except RealError as error:
        problem = error
    try:
        tickets: dict[int, Ticket | None] = members.agree(name, block.ticket if block else None, problem)
        try:
            if node and not first:
                ticket = tickets[node[0]]
                assert ticket is not None
                block = SharedBlock.attach(ticket)
        except RealError as error:
            problem = error
        members.agree(name, None, problem)
    except BaseException:
        if ledger is not None:
            ledger.free(name)
        raise
    finally:
        if block is not None:
            block.seal()
    return block


def _require_tensors(name: str, specs: Mapping[str, TensorSpec], entries: Sequence[ShardEntry]) -> None:
    problems = {
        entry.key: Problem(
            path=entry.key,
            found=f"global shape {list(entry.global_shape)} in the copy",
            expected=f"{list(specs[entry.key].global_shape)} as in the store"
            if entry.key in specs
            else "no such tensor",
        )
        for entry in entries
        if entry.key not in specs or specs[entry.key].global_shape != entry.global_shape
    }
    raise_problems(problems.values(), subject=name)
