"""Executes one rank's part of a realloc plan, as often as wanted.

Why it cannot deadlock. Steps have one total order over all ranks, and both ends of a message meet it in the step of
equal order. A rank posts its steps in that order; before it posts one it waits only for its own step two places
earlier. Take the lowest step that is not complete on some rank, and a message in it: all steps before it are complete
on both ends, so nothing stops either end from posting this one, and posted on both ends it completes. This needs
neither buffering by the transport nor a barrier, so a gloo send that returns only when it is received is fine. On NCCL
both directions of a step are one batch, and batches follow each other on one stream in the same total order.

Invariants (tests/property/test_realloc_plan.py, tests/distributed/test_realloc.py):
    - staging is at most two buckets in each direction, and none is held between runs;
    - the second run builds no plan, no view and no staging tensor, and uses no object collective;
    - storages are resolved anew at each run.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, PlanError, RealError
from megatron_real.realloc_ops.buckets import Slice
from megatron_real.realloc_ops.local_shards import LocalShards
from megatron_real.realloc_ops.packing import Direction, Leg, Staging
from megatron_real.realloc_ops.plan import STAGING_SLOTS, RankPlan
from megatron_real.realloc_ops.shards import Box, Shard
from megatron_real.realloc_ops.transports import Pending, Transport

__all__ = ["ReallocExecutor", "ReallocReport"]

_Views = Mapping[Shard, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReallocReport:
    """What one run of one rank did."""

    bytes_moved: int
    """Received from other ranks."""
    bytes_bound: int
    """The fewest bytes that this rank could receive."""
    bytes_sent: int
    bytes_local: int
    """Copied inside this rank."""
    messages: int
    """Sent and received."""
    staging_peak_bytes: int
    """Both directions together."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Every tensor that a run touches; made once per generation of views."""

    generations: tuple[int, int]
    legs: tuple[tuple[Leg | None, Leg | None], ...]
    """What is sent and what is received in each step."""
    copy_from: tuple[torch.Tensor, ...]
    copy_to: tuple[torch.Tensor, ...]


class ReallocExecutor:
    """Moves the weights of one copy to another on this rank; made once per pair of copies, run for each version."""

    def __init__(
        self,
        plan: RankPlan,
        *,
        src: LocalShards | None,
        dst: LocalShards | None,
        transport: Transport,
        ledger: MemoryLedger | None = None,
        name: str = "realloc",
    ) -> None:
        """Bind a plan to this rank's shards; touches no storage.

        Args:
            plan: this rank's part.
            src: the source copy on this rank; None outside its window.
            dst: the destination copy on this rank; None outside its window.
            transport: over a group that serves reallocations only.
            ledger: books the staging buffers while a run lasts.
            name: for the ledger and for messages, for example ``actor train -> gen``.
        """
        self._plan = plan
        self._src = src
        self._dst = dst
        self._transport = transport
        self._ledger = ledger
        self.name = name
        self.num_builds = 0
        """How often the index of views was built: stays 1 while parameters keep their storages."""
        self._index: _Index | None = None
        self._staging: tuple[Staging, ...] = ()
        self._report: ReallocReport | None = None

    def run(self) -> ReallocReport:
        """Move the weights. Collective over the ranks of the plan: each runs its own part.

        On CUDA it first waits for the current stream (let it wait for others that still touch the weights), and has
        finished on the device when it returns, so the storage of the source may be freed at once. It does not wait
        for the whole device: sends of other groups may be under way there that are received only after this run.

        Raises:
            PeerError: another rank failed or did not come.
            RealError: a storage of either copy is freed.
            CapacityError: no room for staging.
        """
        with closing(self.steps()) as steps:
            for pending in steps:
                self._transport.wait(pending)
        return self.report

    @property
    def report(self) -> ReallocReport:
        """What the last finished run did."""
        if self._report is None:
            raise RealError(f"{self.name}: no run has finished on rank {self._plan.rank}; run it first.")
        return self._report

    def steps(self) -> Generator[Pending]:
        """One run, as a generator that yields each exchange when it must be complete before the run can go on."""
        started_s = time.perf_counter()
        self._report = None
        try:
            index = self._prepare()
            self._synchronize()
            yield from self._exchange(index)
            if self._dst is not None:
                self._dst.fill_duplicates()
            self._synchronize()
            staging_peak_bytes = sum(staging.allocated_bytes for staging in self._staging)
            for staging in self._staging:
                staging.free()
        except BaseException:
            # The transport may still write into the staging buffers: leave them to it instead of freeing them.
            self._index, self._staging = None, ()
            raise
        finally:
            if self._ledger is not None:
                self._ledger.free(self._ledger_owner)
        plan = self._plan
        self._report = ReallocReport(
            bytes_moved=plan.bytes_received,
            bytes_bound=plan.bytes_bound,
            bytes_sent=plan.bytes_sent,
            bytes_local=plan.bytes_local,
            messages=sum(1 for _ in plan.sends) + sum(1 for _ in plan.receives),
            staging_peak_bytes=staging_peak_bytes,
            seconds=time.perf_counter() - started_s,
        )

    def _exchange(self, index: _Index) -> Iterator[Pending]:
        under_way: list[tuple[Pending, Leg | None]] = []
        for send, receive in index.legs:
            if len(under_way) == STAGING_SLOTS:
                yield from _finish(*under_way.pop(0))
            if send is not None and send.params:
                _copy(send.params, send.staged)
            pending = self._transport.exchange(
                send.parcel if send is not None else None, receive.parcel if receive is not None else None
            )
            under_way.append((pending, receive))
        _copy(index.copy_from, index.copy_to)  # while the last messages travel
        for pending, receive in under_way:
            yield from _finish(pending, receive)

    def _prepare(self) -> _Index:
        """Resolve storages, allocate staging, and build the index if parameters lie elsewhere than last time."""
        src_views = self._src.resolve() if self._src is not None else {}
        dst_views = self._dst.resolve() if self._dst is not None else {}
        generations = (
            self._src.generation if self._src is not None else 0,
            self._dst.generation if self._dst is not None else 0,
        )
        if self._index is not None and self._index.generations == generations:
            self._allocate_staging()
            return self._index
        self._index = self._build(src_views, dst_views, generations)
        self.num_builds += 1
        return self._index

    def _build(self, src_views: _Views, dst_views: _Views, generations: tuple[int, int]) -> _Index:
        plan, device = self._plan, self._transport.staging_device()
        wire_dtypes = {key: getattr(torch, name) for key, name in plan.wire_dtypes.items()}

        def source(piece: Slice) -> torch.Tensor:
            view = self._shard(src_views, piece.key, piece.src_box, "source")
            return view[piece.box.slices_in(piece.src_box)]

        def target(piece: Slice) -> torch.Tensor:
            view = self._shard(dst_views, piece.key, piece.dst_box, "destination")
            return view[piece.box.slices_in(piece.dst_box)]

        outgoing = Direction(
            [step.send for step in plan.steps], part_of=source, wire_dtypes=wire_dtypes, device=device
        )
        incoming = Direction(
            [step.receive for step in plan.steps], part_of=target, wire_dtypes=wire_dtypes, device=device
        )
        self._staging = (outgoing.staging, incoming.staging)
        self._allocate_staging()
        return _Index(
            generations=generations,
            legs=tuple(zip(outgoing.legs(plan.rank), incoming.legs(plan.rank), strict=True)),
            copy_from=tuple(source(piece) for piece in plan.copies),
            copy_to=tuple(target(piece) for piece in plan.copies),
        )

    def _shard(self, views: _Views, key: str, box: Box, side: str) -> torch.Tensor:
        view = views.get(Shard(key, box))
        if view is None:
            raise PlanError(
                f"{self.name}: the plan uses {key} {box} of the {side} on rank {self._plan.rank}; expected one of the "
                f"{len(views)} shards found there. Build the plan from the tables of these two copies."
            )
        return view

    def _allocate_staging(self) -> None:
        if self._ledger is not None and self._staging_is_device_memory():
            self._ledger.reserve(self._ledger_owner, sum(staging.num_bytes for staging in self._staging))
        try:
            for staging in self._staging:
                staging.allocate()
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on CPU
            raise CapacityError(
                f"{self.name}: the device could not allocate the staging buffers ({error}). Use a smaller bucket."
            ) from error

    @property
    def _ledger_owner(self) -> str:
        return f"{self.name} staging"

    def _devices(self) -> set[torch.device]:
        return {device for side in (self._src, self._dst) if side is not None for device in side.devices}

    def _staging_is_device_memory(self) -> bool:
        """Gloo stages CUDA parameters in host memory, which the ledger does not count."""
        return self._transport.staging_device().type in {device.type for device in self._devices()}

    def _synchronize(self) -> None:
        for device in self._devices():
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _finish(pending: Pending, receive: Leg | None) -> Iterator[Pending]:
    yield pending
    if receive is not None:
        _copy(receive.staged, receive.params)


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, converting dtypes and crossing devices where they differ."""
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
