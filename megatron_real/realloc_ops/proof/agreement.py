"""The ranks of a reallocation fail together, and all of them name the same culprit.

A run ends with a collective that completes on a rank only when every rank got there (`verify.py`). A rank that fails
never gets there, and says why in the store that the process group was made with: its *claim*. A claim is an exception
of its own, or a rank that it waited for in vain: one that did not come in time, or whose connection broke. Then it
closes its connections, so that the ranks that wait for it fail at once instead of after their timeout, and make claims
too.

Who waited for whom leads to the culprit: the rank with an exception of its own; or the one that says nothing because it
died, or sleeps; or the one that came when others no longer waited. The first rank to find out fixes the verdict for
all.

A group whose connections were closed is of no more use: a reallocation after a failure needs a new one.

Invariants (tests/unit/realloc_ops/test_agreement.py, tests/distributed/test_realloc_faults.py):
    - a rank with an error of its own raises that error, all others a `PeerError` about it;
    - every rank is told within twice the timeout and a few seconds of the failure;
    - nothing is written to the store unless something failed.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megatron_real.errors import PeerError, RealError
from megatron_real.process_groups import default_store

__all__ = ["Agreement", "Claim", "Verdict", "find_culprit"]

_GRACE_S = 2.0
"""How long a rank that lost a connection waits for the other end to say why; longer than it takes to say so."""
_POLL_S = 0.02
_UNUSED_TAG = 0x7FFFFFFF
"""No message has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Why one rank failed."""

    kind: Literal["raised", "late", "lost"]
    """An error of its own; a peer that did not come in time; a connection to a peer that broke."""
    peer: int
    """The rank that it is about: itself if it raised."""
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Claim:
        """The claim of `rank` about its own exception."""
        if isinstance(error, PeerError) and error.peers:
            return cls(kind="late" if error.late else "lost", peer=error.peers[0], text=str(error))
        text = str(error) if isinstance(error, RealError) else f"{type(error).__name__}: {error}"
        return cls(kind="raised", peer=rank, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all ranks agree on."""

    culprit: int
    text: str


def find_culprit(chain: Sequence[tuple[int, Claim]], last: Claim | None) -> Verdict | None:
    """Whom a chain of claims leads to; None if the next rank has to be asked.

    Args:
        chain: ranks and their claims, each about the next rank.
        last: the claim of the rank that the chain ends at; None if it has none.
    """
    _, end = chain[-1]
    if last is None:
        state = "does not answer" if end.kind == "late" else "is gone"
        return Verdict(culprit=end.peer, text=f"rank {end.peer} {state}. {end.text}")
    if last.kind == "raised":
        return Verdict(culprit=end.peer, text=last.text)
    ring = [*chain, (end.peer, last)]
    places = [rank for rank, _ in chain]
    if last.peer not in places:
        return None
    ring = ring[places.index(last.peer) :]
    claims = dict(ring)
    # Of ranks that point at each other, the one that was waited for in vain while it did not wait itself.
    for _, claim in ring:
        if claim.kind == "late" and claims[claim.peer].kind == "lost":
            return Verdict(culprit=claim.peer, text=f"rank {claim.peer} came too late. {claim.text}")
    rank = min(claims)
    return Verdict(
        culprit=claims[rank].peer, text=f"ranks {sorted(claims)} wait for each other. {claims[rank].text}"
    )


class Agreement:
    """Settles why a run failed; made once per pair of copies, on every rank that the pair concerns."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        *,
        name: str,
        timeout_s: float = 600.0,
        store: dist.Store | None = None,
    ) -> None:
        """Say nothing yet.

        Args:
            group: that of the transport.
            rank: this rank.
            name: of the reallocation; the same on all its ranks, and used for no other pair of copies on `group`.
            timeout_s: that of the transport.
            store: where claims are made; the default group's if None. All ranks see the same one.
        """
        self._group = group
        self._rank = rank
        self._name = name
        self._timeout_s = timeout_s
        self._store = dist.PrefixStore(
            f"megatron_real/realloc/{group.group_name}/{name}",
            store if store is not None else default_store(),
        )

    def settle(self, error: BaseException) -> BaseException:
        """What this rank has to raise because its run ended with `error`; closes its connections in the group.

        To be called by each rank whose run failed. A rank with an error of its own does not wait. One that waited for
        another rank waits until it is known who failed: at most for the timeout and a few seconds more.

        Returns:
            `error` itself, or a `PeerError` that names the culprit.
        """
        claim = Claim.of(error, self._rank)
        try:
            self._store.set(str(self._rank), json.dumps(asdict(claim)))
            self._close_connections()
            if claim.kind == "raised":
                self._fix(Verdict(culprit=self._rank, text=claim.text))
                return error
            verdict = self._investigate(claim)
        except RuntimeError:  # the store is gone, and with it the rank that served it
            return error
        culprit = "itself" if verdict.culprit == self._rank else f"rank {verdict.culprit}"
        return PeerError(
            f"{self._name}: stopped on rank {self._rank} because of {culprit}: {verdict.text.rstrip('.')}. "
            "The destination has no version now, and the group of this reallocation is closed.",
            peers=(verdict.culprit,),
        )

    def _investigate(self, claim: Claim) -> Verdict:
        """Follow who waited for whom until somebody is to blame, or another rank has found out."""
        chain = [(self._rank, claim)]
        while True:
            last = chain[-1][1]
            found = self._wait(last.peer, _GRACE_S + (self._timeout_s if last.kind == "late" else 0.0))
            if isinstance(found, Verdict):
                return found
            verdict = find_culprit(chain, found)
            if verdict is not None:
                return self._fix(verdict)
            assert found is not None, "a rank that says nothing ends the chain"
            chain.append((last.peer, found))

    def _wait(self, peer: int, timeout_s: float) -> Claim | Verdict | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._store.check(["verdict"]):
                return Verdict(**json.loads(self._store.get("verdict")))
            if self._store.check([str(peer)]):
                return Claim(**json.loads(self._store.get(str(peer))))
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_POLL_S)

    def _fix(self, verdict: Verdict) -> Verdict:
        fixed = self._store.compare_set("verdict", "", json.dumps(asdict(verdict)))
        return Verdict(**json.loads(fixed))

    def _close_connections(self) -> None:
        """Let the ranks that wait for this one fail now.

        Gloo has no call for it, but an operation that times out closes all connections of its group. NCCL has
        no counterpart that its peers would notice: they wait for their timeout.
        """
        peers = [rank for rank in dist.get_process_group_ranks(self._group) if rank != self._rank]
        if dist.get_backend(self._group) != "gloo":
            return
        for peer in peers:  # some connections are broken already: then nothing times out
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, group=self._group, tag=_UNUSED_TAG)
                if work is not None:
                    work.wait(datetime.timedelta(milliseconds=1))
