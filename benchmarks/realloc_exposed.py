"""What a reallocation adds to an iteration, with and without streaming, over a transport of a given rate.

On one machine the transport is as fast as memory, and computing and moving share the cores, so streaming can gain
little there. Here messages take the time that a link of the given rate needs, during which the cores are free. The next
call is a real forward pass of the destination.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from realloc_methods import Pair

from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.streaming import Gate
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import Exchange, Parcel, Pending, TorchTransport
from megatron_real.realloc_ops.planning.plan import ReallocOrder, build_realloc_plan
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.harness import run_ranks
from tests.hooks.tiny import layouts, placement

__all__ = ["RatedTransport", "exposed_rows"]

RANKS = 4
RATES_BYTES_PER_S = (2e8, 4e8, 8e8)
TOKENS = 128
BUCKET_BYTES = 8 << 20
WARMUPS, REPETITIONS = 1, 3


class RatedTransport:
    """A transport that lets a rank's messages through no faster than a link with the same rate in both directions."""

    def __init__(self, inner: TorchTransport, rate_bytes_per_s: float) -> None:
        """Limit `inner`."""
        self._inner = inner
        self._rate_bytes_per_s = rate_bytes_per_s
        self._free_at_s = 0.0
        self._done_at_s: dict[int, float] = {}
        """By id of a parcel."""

    def __getattr__(self, name: str) -> Any:
        """All else is the inner transport's."""
        return getattr(self._inner, name)

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Exchange:
        """Start both directions behind what is on the link already."""
        parcels = [parcel for parcel in (send, receive) if parcel is not None]
        num_bytes = max(parcel.memory.num_bytes for parcel in parcels)
        self._free_at_s = max(self._free_at_s, monotonic()) + num_bytes / self._rate_bytes_per_s
        self._done_at_s.update({id(parcel): self._free_at_s for parcel in parcels})
        return self._inner.exchange(send, receive)

    def wait(self, pending: Pending) -> None:
        """Return when the message is complete, and not before the link has let it through."""
        self._inner.wait(pending)
        sleep(max(self._done_at_s[id(pending.parcel)] - monotonic(), 0.0))


def exposed_rows(role: RoleModel, source: str, target: str) -> Iterator[dict[str, Any]]:
    """One line per rate."""
    for rate in RATES_BYTES_PER_S:
        results = run_ranks(RANKS, _measure, role, source, target, rate, timeout_s=300)
        whole_s, streamed_s, call_s = (max(times) for times in zip(*results, strict=True))
        yield {
            "case": f"exposed {source} -> {target}",
            "rate_bytes_per_s": rate,
            "whole_s": round(whole_s, 4),
            "streamed_s": round(streamed_s, 4),
            "call_s": round(call_s, 4),
            "whole_exposed_s": round(whole_s - call_s, 4),
            "exposed_s": round(streamed_s - call_s, 4),
        }


def _measure(role: RoleModel, source: str, target: str, rate: float) -> tuple[float, float, float]:
    """Median seconds: moving and then calling, calling while it moves, and the call alone."""
    logging.disable(logging.WARNING)
    with layouts() as made:
        group = made.groups.acquire(range(RANKS), purpose="realloc")
        pair = Pair.build(role, (placement(made, source), placement(made, target)), group)
        transport = RatedTransport(TorchTransport.connect(group), rate)
        whole, layered = (_executor(pair, transport, order) for order in ("fused", "layers"))
        assert pair.dst is not None
        chunks = pair.dst.chunks
        call = _forward(pair)

        def move_then_call() -> None:
            whole.run()
            call()

        def call_while_moving() -> None:
            gate = Gate(chunks, layered.start())
            call()
            gate.finish()

        medians = tuple(map(_median, (move_then_call, call_while_moving, call)))
        made.groups.release(range(RANKS), purpose="realloc")
    return medians


def _executor(pair: Pair, transport: RatedTransport, order: ReallocOrder) -> ReallocExecutor:
    rank = dist.get_rank()
    src, dst = (copy.shards if copy is not None else None for copy in (pair.src, pair.dst))
    tables = [
        gather_tables(side.entries if side is not None else (), dist.group.WORLD) for side in (src, dst)
    ]
    plan = build_realloc_plan(*tables, rank=rank, order=order, bucket_bytes=BUCKET_BYTES).of(rank)
    return ReallocExecutor(plan, src=src, dst=dst, transport=transport)


def _forward(pair: Pair) -> Callable[[], None]:
    assert pair.dst is not None
    (chunk,) = pair.dst.chunks
    parallel = pair.dst.parallel
    tokens = torch.arange(TOKENS).view(1, TOKENS) % 97
    positions = torch.arange(TOKENS).view(1, TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def call() -> None:
        with torch.no_grad(), parallel.active():
            chunk(tokens, positions, mask)

    return call


def _median(run: Callable[[], None]) -> float:
    times = []
    for _ in range(WARMUPS + REPETITIONS):
        dist.barrier()
        began_s = perf_counter()
        run()
        times.append(perf_counter() - began_s)
    return statistics.median(times[WARMUPS:])
