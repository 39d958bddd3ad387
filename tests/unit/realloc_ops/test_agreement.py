"""Whom a chain of claims leads to. With processes: tests/distributed/test_realloc_faults.py."""

from __future__ import annotations

import pytest

from megatron_real.errors import CapacityError, PeerError
from megatron_real.realloc_ops.proof.agreement import Claim, find_culprit


def _late(peer: int) -> Claim:
    return Claim(kind="late", peer=peer, text=f"waited for {peer}")


def _lost(peer: int) -> Claim:
    return Claim(kind="lost", peer=peer, text=f"lost {peer}")


_RAISED = Claim(kind="raised", peer=3, text="no memory")


@pytest.mark.parametrize(
    ("chain", "last", "culprit", "text"),
    [
        ([(0, _late(3))], None, 3, "rank 3 does not answer. waited for 3"),
        ([(0, _lost(3))], None, 3, "rank 3 is gone. lost 3"),
        ([(0, _lost(3))], _RAISED, 3, "no memory"),
        ([(0, _lost(1)), (1, _late(3))], _RAISED, 3, "no memory"),
        ([(0, _late(1)), (1, _late(2))], None, 2, "rank 2 does not answer. waited for 2"),
        ([(0, _late(1))], _lost(0), 1, "rank 1 came too late. waited for 1"),
        ([(1, _lost(0))], _late(1), 1, "rank 1 came too late. waited for 1"),
        ([(2, _lost(0)), (0, _late(1))], _lost(0), 1, "rank 1 came too late. waited for 1"),
        ([(0, _late(1))], _late(0), 1, "ranks [0, 1] wait for each other. waited for 1"),
        ([(2, _late(0)), (0, _lost(1))], _lost(0), 1, "ranks [0, 1] wait for each other. lost 1"),
    ],
)
def test_culprits(chain: list[tuple[int, Claim]], last: Claim | None, culprit: int, text: str) -> None:
    verdict = find_culprit(chain, last)
    assert verdict is not None
    assert (verdict.culprit, verdict.text) == (culprit, text)


def test_a_chain_goes_on_until_somebody_is_to_blame() -> None:
    assert find_culprit([(0, _late(1))], _late(2)) is None
    assert find_culprit([(0, _lost(1)), (1, _lost(2))], _lost(3)) is None


def test_claims() -> None:
    assert Claim.of(PeerError("rank 2 is late", peers=(2,), late=True), 0) == Claim(
        kind="late", peer=2, text="rank 2 is late"
    )
    assert Claim.of(PeerError("rank 2 broke", peers=(2,)), 0).kind == "lost"
    assert Claim.of(PeerError("nobody knows"), 0) == Claim(kind="raised", peer=0, text="nobody knows")
    assert Claim.of(CapacityError("no room"), 1) == Claim(kind="raised", peer=1, text="no room")
    assert Claim.of(ValueError("7"), 1).text == "ValueError: 7"
