"""Reallocation between two Megatron models, without a plan or a runtime.

Invariants (tests/hooks/test_reallocator.py):
    - after a run every destination parameter holds the source's value at its global coordinates;
    - all ranks refuse together, before anything moves, when one cannot describe its model or asks for something else;
    - the second run uses no object collective;
    - neither model is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import ConfigError, PlanError, RealError
from megatron_real.process_groups import exchange
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.in_place import InPlace, part_bytes
from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.execution.streaming import Stream
from megatron_real.realloc_ops.execution.transports import Pending, TorchTransport
from megatron_real.realloc_ops.model_shards import Model, ModelSide
from megatron_real.realloc_ops.planning.plan import (
    DEFAULT_BUCKET_BYTES,
    RankPlan,
    ReallocOrder,
    build_realloc_plan,
)
from megatron_real.realloc_ops.proof.agreement import Agreement
from megatron_real.realloc_ops.proof.comparison import Ends
from megatron_real.realloc_ops.proof.delivery import finish_verified, start_verified, verified_run
from megatron_real.realloc_ops.proof.verify import Verifier, VerifyMode
from megatron_real.realloc_ops.proof.versions import VersionStamp
from megatron_real.realloc_ops.storage.local_shards import LocalShards, gather_tables

__all__ = ["ModelStream", "ReallocOptions", "Reallocator", "world_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReallocOptions:
    """How weights are moved. The same on all ranks, but for `in_place` and `ledger`, which are about this rank."""

    order: ReallocOrder = "fused"
    """``layers`` lets a stream deliver layer by layer; ``in_place`` frees the source as the destination fills."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """The most bytes in a message; staging is at most two of them in each direction. In place messages have a quarter
    of it, and the peak is the larger copy and four buckets (`in_place` says for which segments)."""
    devices_per_node: int | None = None
    """With it, each byte enters a node once and is passed on inside the node. None: one node."""
    verify: VerifyMode = "off"
    """Proof of delivery: ``checksum`` sums the bits at both ends (on CPUs that takes two to three times the move),
    ``full`` compares them, ``off`` proves nothing."""
    mix: float = 1.0
    """``new = mix * source + (1 - mix) * old``."""
    real_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows that are real, by key of a padded tensor (``embedding.word_embeddings.weight``, ``output_layer.weight``):
    lets the two models pad their vocabulary to different sizes. Padding becomes zero."""
    in_place: InPlace | None = None
    """The segments that are freed and allocated during a run (`InPlace.adopt`); asks for the order ``in_place``."""
    ledger: MemoryLedger | None = None
    """Books the staging buffers of this rank while a run lasts."""
    name: str = "realloc"
    """For messages."""
    timeout_s: float = 600.0
    """How long one message may take. A source may still be computing when a destination waits for it."""
    node_links: bool = True
    """Over gloo, let ranks of one node copy out of each other's memory where the kernel allows it (`node_links.py`)."""

    @property
    def shared(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        rows = tuple(sorted(self.real_rows.items()))
        fields = (
            self.order,
            self.bucket_bytes,
            self.devices_per_node,
            self.verify,
            self.mix,
            self.node_links,
        )
        return *fields, rows


class _Roster(NamedTuple):
    """What one rank has and asks for."""

    source: bool
    destination: bool
    shared: tuple[object, ...]


class Reallocator:
    """Moves the weights of one model to another of equal configuration and any layout; made once per pair of models."""

    def __init__(
        self,
        src: Model | LocalShards | None,
        dst: Model | LocalShards | None,
        *,
        group: dist.ProcessGroup | None = None,
        src_context: AbstractContextManager[Any] | None = None,
        dst_context: AbstractContextManager[Any] | None = None,
        options: ReallocOptions | None = None,
    ) -> None:
        """Exchange what the ranks hold, and plan this rank's part. Collective over `group`.

        Both models must have their storage now. Their chunks are kept by weak reference.

        Args:
            src: the model that is read; None on ranks that hold none of it. Shards from `local_table` do as well.
            dst: the model that is written; the same.
            group: covers all ranks of both models, and carries nothing else while weights move. None makes one over all
                ranks, which `close` gives back. A run that failed closes its group: make a new `Reallocator`, over
                another one. A `stream` beside another reallocation asks for a group of its own.
            src_context: active while `src.sharded_state_dict` runs: whatever makes Megatron's `parallel_state` show
                its layout. Not needed by a model with a `pg_collection`, unless Megatron says so.
            dst_context: the same for `dst`.
            options: how to move; the same on all ranks.

        Raises:
            PlanError: the models differ, a tensor cannot be moved correctly, or the ranks ask for different things;
                names the tensors.
            ConfigError: options that contradict each other.
            PeerError: another rank met one of these. All ranks raise.
        """
        options = options if options is not None else ReallocOptions()
        problem: RealError | None = None
        try:
            _check_options(options)
            self._src = ModelSide("source", src, src_context, options.real_rows)
            self._dst = ModelSide("destination", dst, dst_context, options.real_rows)
        except RealError as error:
            problem = error
        meeting = group if group is not None else world_group()
        mine = _Roster(src is not None, dst is not None, options.shared)
        _require_agreement(exchange(mine, problem, group=meeting, what="reallocation"))
        self._src_table, self._dst_table = (
            gather_tables(side.shards.entries if side.shards is not None else (), meeting)
            for side in (self._src, self._dst)
        )
        self.own_group = dist.new_group() if group is None else None
        """The process group that was made for this."""
        group = group if group is not None else self.own_group
        number = _NUM_MADE[group] = _NUM_MADE.get(group, 0) + 1
        self._transport = TorchTransport.connect(
            group, timeout_s=options.timeout_s, node_links=options.node_links
        )
        self._agreement = Agreement(
            group, dist.get_rank(), name=f"library {number}", timeout_s=options.timeout_s
        )
        try:
            self._plan(options)
        except RealError as error:
            problem = error
        try:
            exchange(None, problem, group=group, what="reallocation")
        except RealError:
            self.close()
            raise
        self.stamp = VersionStamp("destination")
        """The version of the destination's weights; none while they move and after that failed."""
        self._num_runs = 0

    def _plan(self, options: ReallocOptions) -> None:
        rank = dist.get_rank()
        self.plan: RankPlan = build_realloc_plan(
            self._src_table,
            self._dst_table,
            bucket_bytes=(
                part_bytes(options.bucket_bytes) if options.order == "in_place" else options.bucket_bytes
            ),
            rank=rank,
            devices_per_node=options.devices_per_node,
            order=options.order,
            fuse_large=self._transport.gathers_with_all,
        ).of(rank)
        """This rank's part."""
        self._executor = ReallocExecutor(
            self.plan,
            src=self._src.shards,
            dst=self._dst.shards,
            transport=self._transport,
            ledger=options.ledger,
            name=options.name,
            mix=options.mix,
            in_place=options.in_place,
        )
        self._verifier = Verifier(
            Ends(
                rank=rank,
                src_table=self._src_table,
                dst_table=self._dst_table,
                src=self._src.shards,
                dst=self._dst.shards,
            ),
            options.verify,
            self._transport,
            name=options.name,
            in_place=options.order == "in_place",
            mix=options.mix,
        )

    def run(self, version: int | None = None) -> ReallocReport:
        """Move the weights. Collective over the ranks of both models; the others may call it, and do nothing.

        It returns on a rank only when all of them have what they need.

        Args:
            version: the training step that the weights are from; None counts the runs from 1.

        Raises:
            VerificationError: what arrived is not what the source has; on all ranks. The destination has no version.
            PeerError: another rank failed or did not come in time; names it. The same of the destination.
            RealError: a storage is freed, or a tensor of a model was replaced.
        """
        version = self._next_version(version)
        with self.stamp.updating(version):
            report = verified_run(_Checked(self), self._verifier, self._agreement)
            self._dst.refresh_caches()
        return report

    def stream(self, version: int | None = None) -> ModelStream:
        """Start to move the weights in the background; under the order ``layers`` they arrive layer by layer.

        Collective as `run`. The source must not change until `ModelStream.finish` returns.

        Raises:
            As `run`.
        """
        version = self._next_version(version)
        self.stamp.invalidate(f"a stream to version {version} is under way or failed")
        self._require_unchanged()
        return ModelStream(self, start_verified(self._executor, self._verifier, self._agreement), version)

    def close(self) -> None:
        """Give back the process group that was made for this; it runs no more after that. Collective over all ranks."""
        if self.own_group is not None:
            dist.destroy_process_group(self.own_group)
            self.own_group = None

    def _next_version(self, version: int | None) -> int:
        self._num_runs += 1
        return self._num_runs if version is None else version

    def _require_unchanged(self) -> None:
        self._src.require_unchanged()
        self._dst.require_unchanged()

    def _finish(self, stream: Stream, version: int) -> ReallocReport:
        report = finish_verified(stream, self._verifier, self._agreement)
        self._dst.refresh_caches()
        self.stamp.set(version)
        return report


class _Checked:
    """The executor's run, refused where a model has other tensors than it was made for."""

    def __init__(self, reallocator: Reallocator) -> None:
        self._reallocator = reallocator

    def run(self) -> ReallocReport:
        self._reallocator._require_unchanged()
        return self._reallocator._executor.run()

    def steps(self) -> Generator[Pending]:
        return self._reallocator._executor.steps()


class ModelStream:
    """A reallocation under way. Made by `Reallocator.stream`; `hooks.streaming.Gate` lets a model wait for it."""

    def __init__(self, reallocator: Reallocator, stream: Stream, version: int) -> None:
        """See `Reallocator.stream`."""
        self._reallocator = reallocator
        self._stream = stream
        self._version = version

    def wait(self, wave: int) -> None:
        """See `streaming.Stream.wait`."""
        self._stream.wait(wave)

    def wave_of(self, tensor: torch.Tensor) -> int | None:
        """See `streaming.Stream.wave_of`."""
        return self._stream.wave_of(tensor)

    def finish(self) -> ReallocReport:
        """Return when all weights are here, proven, and sent; the destination then has its version.

        Collective as `run`.

        Raises:
            As `Reallocator.run`.
        """
        return self._reallocator._finish(self._stream, self._version)


_NUM_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""By group, how many reallocators were made; the same on all its ranks."""


def world_group() -> dist.ProcessGroup:
    """The group of all ranks.

    Raises:
        PlanError: there is none.
    """
    world = dist.group.WORLD
    if world is None:
        raise PlanError("reallocation: torch.distributed is not initialised; call init_process_group first.")
    return world


def _check_options(options: ReallocOptions) -> None:
    if options.in_place is not None and options.order != "in_place":
        raise ConfigError(
            f"reallocation: found segments for in-place movement under the order {options.order!r}; expected "
            "order='in_place' on all ranks, or the memory would not be bounded."
        )


# What the ranks agree on


def _require_agreement(rosters: Mapping[int, _Roster]) -> None:
    """Check that all ranks ask for one thing, and that both models are somewhere.

    Raises:
        PlanError: the same on all ranks.
    """
    first_rank, first = next(iter(rosters.items()))
    for rank, roster in rosters.items():
        if roster.shared != first.shared:
            raise PlanError(
                "reallocation: found (order, bucket_bytes, devices_per_node, verify, mix, node_links, real_rows) = "
                f"{roster.shared} on rank {rank}; expected {first.shared} as on rank {first_rank}. Give all ranks the "
                "same options."
            )
    for what in ("source", "destination"):
        if not any(getattr(roster, what) for roster in rosters.values()):
            raise PlanError(
                f"reallocation: found no {what} model on ranks {sorted(rosters)}; expected it on one at least."
            )
