"""The reallocations between pairs of copies: each pair is planned when it is first used, and kept.

Invariants (tests/hooks/test_session.py, tests/e2e/test_mechanisms.py):
    - a pair is planned once, from tables alone;
    - with a mode of verification no copy takes a version that was not proven, but by a stream or by mixing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from megatron_real.device_memory import MemoryLedger
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.plan import CopyKey
from megatron_real.program import Program, Realloc
from megatron_real.realloc_ops import ParamTable, build_realloc_plan
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.execution.streaming import Stream
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.proof.agreement import Agreement
from megatron_real.realloc_ops.proof.delivery import verified_run
from megatron_real.realloc_ops.proof.verify import Ends, Verifier, VerifyMode

__all__ = ["ReallocPairs", "Wire"]

Pair = tuple[CopyKey, CopyKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What reallocations go over, and how."""

    group: dist.ProcessGroup
    """Of `transport`."""
    transport: TorchTransport
    bucket_bytes: int
    timeout_s: float
    verify: VerifyMode = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    executor: ReallocExecutor
    proof: tuple[Verifier, Agreement] | None


class ReallocPairs:
    """Runs the reallocations of a program on this rank."""

    def __init__(
        self,
        wire: Wire,
        *,
        copies: Mapping[CopyKey, ModelCopy],
        tables: Mapping[CopyKey, ParamTable],
        ledger: MemoryLedger,
    ) -> None:
        """Nothing is planned yet; `copies` and `tables` are looked up when a pair is first used."""
        self._wire = wire
        self._copies = copies
        self._tables = tables
        self._ledger = ledger
        self._made: dict[tuple[Pair, float], _Made] = {}

    def run(self, pair: Pair, program: Program, *, mix: float = 1.0) -> ReallocReport:
        """Move the weights, or that share of them into what the second copy has. Collective over the ranks of both.

        What is mixed is staged on arrival, bucket by bucket, and crosses nodes once for each rank that needs it. It is
        not verified: a sum over the bits does not tell what they were mixed from.

        Raises:
            VerificationError: what arrived is not what was sent, on all ranks.
            PeerError: another rank failed.
        """
        made = self._get(pair, program, mix)
        if made.proof is None:
            return made.executor.run()
        return verified_run(made.executor, *made.proof)

    def start(self, pair: Pair, program: Program) -> Stream:
        """Move the weights beside what follows. Collective over the ranks of both copies."""
        return self._get(pair, program).executor.start()

    def forget(self, pair: Pair | None = None) -> None:
        """Drop what was made for a pair, or for all."""
        if pair is None:
            self._made.clear()
        else:
            for key in [key for key in self._made if key[0] == pair]:
                del self._made[key]

    def _get(self, pair: Pair, program: Program, mix: float = 1.0) -> _Made:
        if (pair, mix) not in self._made:
            self._made[pair, mix] = self._make(pair, program, mix)
        return self._made[pair, mix]

    def _make(self, pair: Pair, program: Program, mix: float) -> _Made:
        wire, cluster, rank = self._wire, program.plan.cluster, dist.get_rank()
        src_table, dst_table = (self._tables[key] for key in pair)
        plan = build_realloc_plan(
            src_table,
            dst_table,
            bucket_bytes=wire.bucket_bytes,
            rank=rank,
            # What a rank passes on inside its node would be mixed already.
            devices_per_node=cluster.devices_per_node if cluster.num_nodes > 1 and mix == 1.0 else None,
            order="layers" if pair in _streamed(program) else "fused",
            fuse_large=wire.transport.gathers_with_all,
        )
        src, dst = (self._copies[key].shards if key in self._copies else None for key in pair)
        name = f"{pair[0]} -> {pair[1]}"
        executor = ReallocExecutor(
            plan.of(rank), src=src, dst=dst, transport=wire.transport, ledger=self._ledger, name=name, mix=mix
        )
        if wire.verify == "off" or mix != 1.0:
            return _Made(executor=executor, proof=None)
        ends = Ends(rank=rank, src_table=src_table, dst_table=dst_table, src=src, dst=dst)
        return _Made(
            executor=executor,
            proof=(
                Verifier(ends, wire.verify, wire.transport, name=name),
                Agreement(wire.group, rank, name=name, timeout_s=wire.timeout_s),
            ),
        )


def _streamed(program: Program) -> frozenset[Pair]:
    return frozenset(
        (one.source, one.target) for one in program.instructions if isinstance(one, Realloc) and one.stream
    )
