"""A reallocation with proof of delivery: sums before, the move, sums after, and one end for all ranks.

Invariants (tests/distributed/test_realloc_faults.py, tests/property/test_realloc_verify.py):
    - it returns on a rank only when all ranks have moved and what arrived is right everywhere;
    - otherwise every rank concerned raises, within a bounded time, and names the same tensor or the same culprit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron_real.errors import VerificationError
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.execution.streaming import Stream
from megatron_real.realloc_ops.execution.transports import Pending
from megatron_real.realloc_ops.proof.agreement import Agreement
from megatron_real.realloc_ops.proof.verify import Verifier

__all__ = ["Moves", "finish_verified", "start_verified", "verified_run", "verified_steps"]


class Moves(Protocol):
    """What is verified: `ReallocExecutor`, or anything else that moves weights."""

    def run(self) -> ReallocReport:
        """Move the weights."""
        ...

    def steps(self) -> Generator[Pending]:
        """Move the weights, as a generator."""
        ...


def verified_run(moves: Moves, verifier: Verifier, agreement: Agreement) -> ReallocReport:
    """Move weights and prove that they arrived. Collective over the verifier's participants.

    Wrap it in `VersionStamp.updating`: the version advances when this returns.

    Returns:
        The report of the run, with `checksum_s`.

    Raises:
        VerificationError: replicas of the source differ, or the destination differs from the source; on all ranks.
        PeerError: another rank failed; names it. That rank raises what it met.
    """
    with _failing_together(verifier, agreement), verifier.transport.turn():
        verifier.before()
        report = moves.run()
        verifier.after()
    return dataclasses.replace(report, checksum_s=verifier.sum_s)


def start_verified(executor: ReallocExecutor, verifier: Verifier, agreement: Agreement) -> Stream:
    """Sum the source, then start to move in the background. Collective over the verifier's participants.

    What arrives is used before it is proven; `finish_verified` tells whether it was right.

    Raises:
        As `verified_run`.
    """
    with _failing_together(verifier, agreement):
        with verifier.transport.turn():
            verifier.before()
        return executor.start()


def finish_verified(stream: Stream, verifier: Verifier, agreement: Agreement) -> ReallocReport:
    """Wait for a stream's end, and prove what arrived. Collective over the verifier's participants.

    Nothing else may have begun over the same transport since the stream was started.

    Raises:
        As `verified_run`.
    """
    with _failing_together(verifier, agreement):
        report = stream.finish()
        with verifier.transport.turn():
            verifier.after()
    return dataclasses.replace(report, checksum_s=verifier.sum_s)


@contextmanager
def _failing_together(verifier: Verifier, agreement: Agreement) -> Iterator[None]:
    """Whatever ends the body on one rank ends it on all."""
    try:
        yield
    except VerificationError:  # on all ranks already, and no message is under way
        raise
    except BaseException as error:
        verifier.transport.give_up(f"{verifier.name} failed or was interrupted")
        told = agreement.settle(error)
        if told is error:
            raise
        raise told from error


def verified_steps(moves: Moves, verifier: Verifier) -> Generator[Pending]:
    """The same as a generator, for ranks that share a process (`LocalNetwork.run`)."""
    yield from verifier.before_steps()
    yield from moves.steps()
    yield from verifier.after_steps()
