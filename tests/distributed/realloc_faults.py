"""One rank's part of a reallocation that something goes wrong in, and what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from megatron_real.errors import RealError
from megatron_real.realloc_ops.execution.executor import InPlace, ReallocExecutor
from megatron_real.realloc_ops.execution.packing import Staging
from megatron_real.realloc_ops.execution.transports import TorchTransport, Transport
from megatron_real.realloc_ops.planning.plan import ReallocOrder, build_realloc_plan
from megatron_real.realloc_ops.proof.agreement import Agreement
from megatron_real.realloc_ops.proof.delivery import finish_verified, start_verified, verified_run
from megatron_real.realloc_ops.proof.verify import Ends, Verifier, VerifyMode
from megatron_real.realloc_ops.proof.versions import VersionStamp
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.synthetic_copies import SyntheticLayout, SyntheticModel, build_copy

__all__ = ["MODEL", "Fault", "How", "Injected", "Job", "Outcome"]

How = Literal["fused", "layers", "stream", "in place"]
_ORDERS: dict[How, ReallocOrder] = {
    "fused": "fused",
    "layers": "layers",
    "stream": "layers",
    "in place": "in_place",
}

MODEL = SyntheticModel(layers=4, hidden=16, ffn=32, tied=True, fp32_bias=True, kv_groups=4)
_BUCKET_BYTES = 1024


class Injected(Exception):
    """Not an error of the package: it can only come from a test."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens on one rank, at which of the rank's exchanges."""

    rank: int
    kind: Literal["raise", "die", "sleep", "no memory"]
    share: float = 0.0
    """0 is its first exchange and 1 its last one."""
    sleep_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw of one run."""

    error: str
    """Type and text; empty if there was none."""
    seconds: float
    version: int | None
    """Of the destination, None also outside its window."""
    wrong: tuple[str, ...]
    """Keys with wrong bits, after a run without an error: one in place that failed leaves some segments freed."""


class _Faulty:
    """A transport that does something at one of its exchanges."""

    def __init__(self, inner: Transport, at: int, act: Callable[[], None]) -> None:
        self._inner, self._at, self._act = inner, at, act
        self._count = 0

    def exchange(self, *args: Any, **kwargs: Any) -> Any:
        if self._count == self._at:
            self._act()
        self._count += 1
        return self._inner.exchange(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Job:
    """The copies of this rank; each run has a group, a plan and an executor of its own."""

    def __init__(self, src: SyntheticLayout, ranks: Sequence[int] | None = None) -> None:
        """Collective over `ranks` (all if None) as every method is."""
        self.rank = dist.get_rank()
        self.ranks = ranks
        self.src = build_copy(MODEL, src, self.rank)
        self.stamp = VersionStamp("actor gen")

    def run(
        self,
        dst: SyntheticLayout,
        version: int,
        *,
        fault: Fault | None = None,
        mode: VerifyMode = "checksum",
        how: How = "fused",
        timeout_s: float = 20.0,
        node_links: bool = True,
        before: Callable[[ReallocExecutor], None] = lambda executor: None,
    ) -> Outcome:
        group = (
            dist.new_group(backend="gloo")
            if self.ranks is None
            else dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)
        )
        there = build_copy(MODEL, dst, self.rank)
        if there is not None:
            there.poison()
        if self.src is not None:
            self.src.segments.allocate()  # freed by a run in place
            self.src.fill()
        shards = [copy.shards if copy is not None else None for copy in (self.src, there)]
        tables = [gather_tables(side.entries if side is not None else (), group) for side in shards]
        plan = build_realloc_plan(*tables, bucket_bytes=_BUCKET_BYTES, rank=self.rank, order=_ORDERS[how])
        part = plan.of(self.rank)
        inner = TorchTransport.connect(group, timeout_s=timeout_s, node_links=node_links)
        transport: Any = inner
        if fault is not None and fault.rank == self.rank and fault.kind != "no memory":
            transport = _Faulty(inner, round(fault.share * (len(part.steps) - 1)), lambda: _act(fault))
        segments = [copy.segments if copy is not None else None for copy in (self.src, there)]
        in_place = InPlace(src=segments[0], dst=segments[1]) if how == "in place" else None
        executor = ReallocExecutor(part, src=shards[0], dst=shards[1], transport=transport, in_place=in_place)
        ends = Ends(rank=self.rank, src_table=tables[0], dst_table=tables[1], src=shards[0], dst=shards[1])
        verifier = Verifier(ends, mode, inner, name="actor")
        agreement = Agreement(group, self.rank, name="actor", timeout_s=timeout_s)
        before(executor)
        allocate = Staging.allocate
        if fault is not None and fault.rank == self.rank and fault.kind == "no memory":
            Staging.allocate = _no_memory  # type: ignore[method-assign]
        started_s = time.monotonic()
        error = ""
        try:
            with self.stamp.updating(version):
                if how == "stream":
                    stream = start_verified(executor, verifier, agreement)
                    report = finish_verified(stream, verifier, agreement)
                else:
                    report = verified_run(executor, verifier, agreement)
            assert (report.checksum_s > 0) == (mode == "checksum" and self.rank in verifier.participants)
        except (RealError, Injected) as caught:
            error = f"{type(caught).__name__}: {caught}"
        finally:
            Staging.allocate = allocate  # type: ignore[method-assign]
        seconds = time.monotonic() - started_s
        dist.destroy_process_group(group)
        return Outcome(
            error=error,
            seconds=seconds,
            version=self.stamp.version if there is not None else None,
            wrong=tuple(there.mismatches(dst.dtype)) if there is not None and not error else (),
        )


def _no_memory(_: Staging) -> None:
    raise RuntimeError("there is no memory")


def _act(fault: Fault) -> None:
    if fault.kind == "die":
        os._exit(7)
    if fault.kind == "sleep":
        time.sleep(fault.sleep_s)
    if fault.kind == "raise":
        raise Injected("a fault")
