"""Executes one rank's part of a realloc plan, as often as wanted.

Why it cannot deadlock. Steps have one total order over all ranks, (hop, wave, index, distance), and both ends of a
message meet it in the step of equal order. A rank posts its steps in that order; before it posts one it waits only for
earlier steps of its own, and for its own copies. Take the lowest step that is not complete on some rank, and a message
in it: all steps before it are complete on both ends, so nothing stops either end from posting this one, and posted on
both ends it completes. This needs neither buffering by the transport nor a barrier, so a gloo send that returns only
when it is received is fine. On NCCL both directions of a step are one batch, and batches follow each other on one
stream in the same total order.

Relays do not change this. A rank forwards what it received in hop 0 or copied itself, so it posts no step of hop 1
before all its own steps of hop 0 are complete and its copies made; all of hop 0 comes before all of hop 1 in the total
order, so that too is waiting for earlier steps only.

Invariants (tests/property/test_realloc_execution.py, tests/distributed/test_realloc.py):
    - staging is at most two buckets in each direction, and none is held between runs;
    - the second run builds no plan, no view and no staging tensor, and uses no object collective;
    - storages are resolved anew at each run;
    - what can be refused is refused before a message is posted; after a later failure the transport is given up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TypedDict, Unpack

import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, ConfigError, PlanError, RealError
from megatron_real.realloc_ops.execution.bound_plan import Binder, BoundPlan, BoundStep, Copies, shard_waves
from megatron_real.realloc_ops.execution.in_place import InPlace, Residence, require_inside
from megatron_real.realloc_ops.execution.packing import Staging, copy_tensors, mix_tensors
from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.execution.streaming import Arrivals, Stream, WaveCounter
from megatron_real.realloc_ops.execution.transports import Exchange, Pending, Transport
from megatron_real.realloc_ops.planning.plan import RankPlan
from megatron_real.realloc_ops.storage.local_shards import LocalShards

__all__ = ["ExecutorOptions", "InPlace", "ReallocExecutor", "ReallocReport"]

MOST_IN_FLIGHT = 64
"""Steps that are posted and not finished; those that are staged must also find room in the staging buffer."""
MOST_IN_PLACE = 2
"""Fewer: each may begin a segment of the destination, and keep one of the source."""


class ExecutorOptions(TypedDict, total=False):
    """What a reallocation may do beside moving."""

    name: str
    """For the ledger and for messages, for example ``actor train -> gen``."""
    mix: float
    """Above 0, at most 1 (the default, which overwrites): ``new = mix * source + (1 - mix) * old``, by the rule in
    `packing`. A run that failed half-way has mixed some elements and others not: fill the copy again."""
    in_place: InPlace | None
    """Free the source while the destination fills."""


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
        **options: Unpack[ExecutorOptions],
    ) -> None:
        """Bind a plan to this rank's shards; touches no storage.

        Args:
            plan: this rank's part.
            src: the source copy on this rank; None outside its window.
            dst: the destination copy on this rank; None outside its window.
            transport: over a group that serves reallocations only.
            ledger: books the staging buffers while a run lasts.
            options: see `ExecutorOptions`.

        Raises:
            PlanError: options that contradict each other or the plan.
            ConfigError: `mix` is out of range.
            TypeError: an option that does not exist.
        """
        unknown = options.keys() - ExecutorOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"ReallocExecutor has no option {', '.join(sorted(unknown))}")
        self._plan = plan
        self._src = src
        self._dst = dst
        self._transport = transport
        self._ledger = ledger
        self.name = options.get("name", "realloc")
        self._mix = options.get("mix", 1.0)
        self._in_place = options.get("in_place")
        self._check_options()
        self.num_builds = 0
        """How often the views were bound: stays 1 while parameters keep their storages."""
        self._binder = Binder(
            self.name,
            plan,
            transport=transport,
            direct_receives=self._mix == 1.0,
            lean=self._in_place is not None,
        )
        self._deliver = copy_tensors if self._mix == 1.0 else partial(mix_tensors, mix=self._mix)
        self._bound: BoundPlan | None = None
        self._stream: Stream | None = None
        self._arrivals: Arrivals | None = None
        """Of the stream whose turn it is."""
        self._report: ReallocReport | None = None

    def run(self) -> ReallocReport:
        """Move the weights. Collective over the ranks of the plan: each runs its own part.

        On CUDA it first waits for the current stream (let it wait for others that still touch the weights), and has
        finished on the device when it returns, so the storage of the source may be freed at once. It does not wait
        for the whole device: sends of other groups may be under way there that are received only after this run.

        Raises:
            PeerError: another rank failed or did not come.
            RealError: a storage of either copy is freed, or an earlier run over this transport failed.
            CapacityError: no room for staging, or in place for a segment.
        """
        with self._transport.turn(), closing(self.steps(self._arrivals)) as steps:
            for pending in steps:
                self._transport.wait(pending)
        return self.report

    def start(self, run: Callable[[], ReallocReport] | None = None) -> Stream:
        """Move the weights in a background thread. Collective over the ranks of the plan, as `run`; not inside a turn.

        Until the stream has finished, the source must not change, and of the destination only what has arrived may be
        read. Runs that are asked for meanwhile over the same transport come after it. A plan of the order ``layers``
        lets layers arrive one by one; with two hops, what is forwarded arrives in the second hop only.

        Args:
            run: what the thread does instead of `run` alone; it calls `run` once. Whatever else it does over the
                transport (checks before and after) is in the same turn.

        Raises:
            PlanError: the executor moves in place, where the source goes away.
            RealError: the last stream was not finished.
        """
        if self._in_place is not None:
            raise PlanError(f"{self.name}: found a stream in place; expected one of the two. Use run().")
        if self._stream is not None and not self._stream.ended:
            raise RealError(f"{self.name}: found its last stream under way; call finish() on it first.")
        turn = self._transport.turn()

        def in_turn(arrivals: Arrivals) -> ReallocReport:
            with turn:
                self._arrivals = arrivals
                try:
                    return (run or self.run)()
                finally:
                    self._arrivals = None

        waves = shard_waves(self._plan)

        def wave_of(tensor: torch.Tensor) -> int | None:
            shards = self._dst.shards_in(tensor) if self._dst is not None else ()
            return max((waves[shard] for shard in shards if shard in waves), default=None)

        self._stream = Stream(self.name, in_turn, wave_of=wave_of, devices=self._devices())
        return self._stream

    @property
    def report(self) -> ReallocReport:
        """What the last finished run did."""
        if self._report is None:
            raise RealError(f"{self.name}: no run has finished on rank {self._plan.rank}; run it first.")
        return self._report

    def steps(self, arrivals: Arrivals | None = None) -> Generator[Pending]:
        """One run, as a generator that yields each exchange when it must be complete before the run can go on.

        Args:
            arrivals: is told which waves are here.
        """
        started_s = time.perf_counter()
        self._report = None
        run: _Run | None = None
        try:
            bound = self._prepare()
            residence = Residence(self._in_place, bound.reads()) if self._in_place is not None else None
            self._synchronize()
            if residence is None:
                self._zero_padding()
            run = _Run(
                bound, self._transport, deliver=self._deliver, residence=residence, devices=self._devices()
            )
            yield from run.exchange(arrivals or Arrivals())
            if residence is not None:
                residence.finish()
                self._zero_padding()
            self._synchronize()
            staging_peak_bytes = sum(staging.allocated_bytes for staging in bound.staging)
            for staging in bound.staging:
                staging.free()
        except BaseException:
            # The transport may still write into the staging buffers: leave them to it instead of freeing them.
            self._bound = None
            if run is not None:
                self._transport.give_up(f"{self.name} failed or was interrupted")
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

    def _check_options(self) -> None:
        if not 0.0 < self._mix <= 1.0:
            raise ConfigError(f"{self.name}: found mix={self._mix}; expected more than 0 and at most 1.")
        if self._mix == 1.0:
            return
        messages = (*self._plan.sends, *self._plan.receives)
        if any(message.relayed for message in messages):
            raise PlanError(
                f"{self.name}: found mix={self._mix} with a plan of two hops; expected one of the two: what a rank "
                "forwards would be mixed already. Build the plan without devices_per_node."
            )
        if self._in_place is not None:
            raise PlanError(
                f"{self.name}: found mix={self._mix} in place; expected one of the two: in place there is no old "
                "value to mix with."
            )

    def _prepare(self) -> BoundPlan:
        """Resolve storages, allocate staging, and bind the plan if parameters lie elsewhere than last time."""
        coming = self._in_place is not None and self._in_place.dst is not None
        src_views = self._src.resolve() if self._src is not None else {}
        dst_views = self._dst.resolve(check=not coming) if self._dst is not None else {}
        generations = (
            self._src.generation if self._src is not None else 0,
            self._dst.generation if self._dst is not None else 0,
        )
        if self._bound is not None and self._bound.generations == generations:
            self._allocate_staging(self._bound.staging)
            return self._bound
        if self._in_place is not None:
            require_inside(self.name, self._in_place.src, src_views)
            require_inside(self.name, self._in_place.dst, dst_views)
        self._bound = self._binder.bind(
            self._src, self._dst, src_views, dst_views, allocate=self._allocate_staging
        )
        self.num_builds += 1
        return self._bound

    def _zero_padding(self) -> None:
        if self._dst is not None:
            self._dst.zero_padding()

    def _allocate_staging(self, both: tuple[Staging, Staging]) -> None:
        if self._ledger is not None and self._staging_is_device_memory():
            self._ledger.reserve(self._ledger_owner, sum(staging.num_bytes for staging in both))
        try:
            for staging in both:
                staging.allocate()
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on CPU
            raise CapacityError(
                f"{self.name}: the device could not allocate the staging buffers ({error}). Use a smaller bucket."
            ) from error

    @property
    def _ledger_owner(self) -> str:
        return f"{self.name} staging"

    def _devices(self) -> frozenset[torch.device]:
        return frozenset(
            device for side in (self._src, self._dst) if side is not None for device in side.devices
        )

    def _staging_is_device_memory(self) -> bool:
        """Gloo stages CUDA parameters in host memory, which the ledger does not count."""
        return self._transport.staging_device().type in {device.type for device in self._devices()}

    def _synchronize(self) -> None:
        for device in self._devices():
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


class _Run:
    """One pass through the steps of a bound plan."""

    def __init__(
        self,
        bound: BoundPlan,
        transport: Transport,
        *,
        deliver: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
        residence: Residence | None,
        devices: frozenset[torch.device],
    ) -> None:
        self._bound = bound
        self._transport = transport
        self._deliver = deliver
        self._residence = residence
        self._devices = devices
        self._most_steps = MOST_IN_FLIGHT if residence is None else MOST_IN_PLACE
        self._under_way: deque[tuple[BoundStep, Exchange]] = deque()
        self._num_finished = 0
        self._rest = bound.rest
        self._counter = WaveCounter(bound.waves)
        self._duplicates = deque(bound.duplicates)

    def exchange(self, arrivals: Arrivals) -> Iterator[Pending]:
        """Everything between the preparation and the end; yields what must be complete before it can go on."""
        self._arrivals = arrivals
        self._announce(self._counter.next_wave)
        hop = 0
        for step in self._bound.steps:
            if step.hop != hop:
                yield from self._complete()
                hop = step.hop
            while self._under_way and (
                len(self._under_way) >= self._most_steps or self._num_finished < step.after
            ):
                yield from self._finish_first()
            self._under_way.append((step, self._post(step)))
            for copies in step.copies:  # while the messages travel
                self._copy(copies)
        yield from self._complete()

    def _post(self, step: BoundStep) -> Exchange:
        send, receive = step.send, step.receive
        if send is not None and send.packed:
            copy_tensors(send.parts, send.staged)
            self._after_read(send.parts)
        if receive is not None:
            self._before_write(receive.direct)
        return self._transport.exchange(
            send.parcel if send is not None else None, receive.parcel if receive is not None else None
        )

    def _finish_first(self) -> Iterator[Pending]:
        step, exchange = self._under_way.popleft()
        if step.receive is not None and exchange.received is not None:
            yield exchange.received
            if step.receive.parts:
                self._before_write(step.receive.parts)
                self._deliver(step.receive.staged, step.receive.parts)
            self._count(step.receive.wave)
        if step.send is not None and exchange.sent is not None:
            yield exchange.sent
            self._after_read(step.send.direct)
        self._num_finished += 1

    def _complete(self) -> Iterator[Pending]:
        """Make the copies that are left and finish all steps under way."""
        for copies in self._rest:
            self._copy(copies)
        self._rest = ()
        while self._under_way:
            yield from self._finish_first()

    def _copy(self, copies: Copies) -> None:
        self._before_write(copies.targets)
        self._deliver(copies.sources, copies.targets)
        self._after_read(copies.sources)
        self._count(copies.wave)

    def _count(self, wave: int) -> None:
        before = self._counter.next_wave
        self._counter.count(wave)
        if self._counter.next_wave != before:
            self._announce(self._counter.next_wave)

    def _announce(self, next_wave: int) -> None:
        """Complete the waves before `next_wave`, and say so."""
        while self._duplicates and self._duplicates[0][0] < next_wave:
            _, first, other = self._duplicates.popleft()
            self._before_write((other,))
            copy_tensors((first,), (other,))
        self._arrivals.advance(next_wave, self._devices)

    def _before_write(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._residence is not None:
            self._residence.before_write(tensors)

    def _after_read(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._residence is not None:
            self._residence.after_read(tensors)
