"""Faults during a reallocation over gloo: no hang, all name the culprit, no new version, and the next one is right."""

from __future__ import annotations

import gc
import os
import random
import time

import pytest
import torch.distributed as dist

from tests.distributed.realloc_faults import Fault, Job, Outcome
from tests.harness import run_ranks
from tests.synthetic_copies import SyntheticLayout

pytestmark = pytest.mark.dist

_TIMEOUT_S = 3.0
_SLEEP_S = 4.0
_SRC = SyntheticLayout(tp=2, stages=((0,), (1, 2, 3)))
_DST = SyntheticLayout(dp=4)
_SPREAD = SyntheticLayout(tp=2, dp=2)


def _shares(seed: int, count: int) -> list[float]:
    """Where in a run: its two ends, and random places."""
    pick = random.Random(seed)
    return [0.0, 1.0, *(pick.random() for _ in range(count - 2))]


_FAULTS = [
    *(Fault(rank=2, kind="raise", share=share) for share in _shares(1, 3)),
    *(Fault(rank=0, kind="raise", share=share) for share in _shares(2, 2)),
    Fault(rank=3, kind="no memory"),
    *(Fault(rank=rank, kind="sleep", share=share, sleep_s=_SLEEP_S) for rank, share in ((1, 0.0), (3, 0.6))),
]


def _all_faults(seed: int) -> tuple[list[tuple[Fault, Outcome, Outcome]], list[tuple[int, int]]]:
    """Each fault under a random way to move, mode and transport, then the same reallocation without it.

    Also how many process groups and open files there were after each.
    """
    pick = random.Random(seed)
    job = Job(_SRC)
    seen, left = [], []
    for number, fault in enumerate(_FAULTS):
        how = pick.choice(["fused", "layers", "stream", "in place"])
        mode = pick.choice(["off", "checksum"])
        links = pick.choice([True, False])
        failed = job.run(
            _DST, 2 * number, fault=fault, mode=mode, how=how, timeout_s=_TIMEOUT_S, node_links=links
        )
        dist.barrier()
        seen.append((fault, failed, job.run(_DST, 2 * number + 1, how=how)))
        gc.collect()
        left.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))))
    return seen, left


def test_faults_stop_all_ranks_and_the_next_run_is_right() -> None:
    results = run_ranks(4, _all_faults, 7)
    by_rank = [seen for seen, _ in results]
    for _, left in results:
        assert max(left[1:]) <= left[0], "groups are gone with their connections"
    for number, fault in enumerate(_FAULTS):
        for rank, seen in enumerate(by_rank):
            _, failed, after = seen[number]
            where = f"{fault} on rank {rank}: {failed}"
            assert failed.seconds < 2 * _TIMEOUT_S + _SLEEP_S, where
            assert failed.version is None, where
            if rank == fault.rank and fault.kind == "raise":
                assert failed.error == "Injected: a fault", where
            elif rank == fault.rank and fault.kind == "no memory":
                assert failed.error.startswith("CapacityError: realloc: the device could not"), where
            elif rank == fault.rank:
                assert "because of itself" in failed.error, where
            else:
                assert failed.error.startswith(
                    f"PeerError: actor: stopped on rank {rank} because of rank {fault.rank}: "
                ), where
            assert (after.error, after.version, after.wrong) == ("", 2 * number + 1, ()), where
        if fault.kind != "sleep":
            assert max(seen[number][1].seconds for seen in by_rank) < _TIMEOUT_S, (
                "nobody waited for the timeout"
            )
        reason = {"raise": "a fault", "no memory": "there is no memory", "sleep": f"rank {fault.rank} "}[
            fault.kind
        ]
        assert all(reason in seen[number][1].error for seen in by_rank)


def _arrivals(seed: int) -> list[Outcome]:
    """Sources and targets on ranks of their own; they arrive in any order, and each is slow somewhere on the way."""
    pick = random.Random(seed)
    layouts = [
        (SyntheticLayout(tp=2), SyntheticLayout(tp=1, dp=2, start=2)),
        (SyntheticLayout(stages=((0, 1), (2, 3))), SyntheticLayout(tp=2, start=2)),
        (SyntheticLayout(stages=((0, 2), (1, 3))), SyntheticLayout(start=3)),
    ]
    seen = []
    for number, (src, dst) in enumerate(layouts):
        order = list(range(4))
        pick.shuffle(order)
        slow = Fault(rank=dist.get_rank(), kind="sleep", share=pick.random(), sleep_s=0.2)
        delay_s = 0.1 * order.index(dist.get_rank())
        seen.append(
            Job(src).run(dst, number, fault=slow, before=lambda _, delay_s=delay_s: time.sleep(delay_s))
        )
    return seen


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    for rank, seen in enumerate(run_ranks(4, _arrivals, seed)):
        for number, outcome in enumerate(seen):
            assert (outcome.error, outcome.wrong) == ("", ())
            assert outcome.version == (number if rank >= (2, 2, 3)[number] else None)


def _one_dies(share: float, node_links: bool) -> tuple[Outcome, Outcome]:
    """Rank 3 dies; the others hold all weights and go on without it."""
    job = Job(_SPREAD)
    fault = Fault(rank=3, kind="die", share=share)
    failed = job.run(SyntheticLayout(dp=4), 1, fault=fault, timeout_s=20.0, node_links=node_links)
    job.ranks = [0, 1, 2]
    return failed, job.run(SyntheticLayout(dp=3), 2)


@pytest.mark.parametrize("share", _shares(3, 3))
@pytest.mark.parametrize("node_links", [True, False], ids=["memory", "gloo"])
def test_a_dead_rank_is_named_and_the_others_can_go_on(share: float, node_links: bool) -> None:
    *survivors, dead = run_ranks(4, _one_dies, share, node_links, may_die={3})
    assert dead is None
    for rank, (failed, after) in enumerate(survivors):
        assert failed.error.startswith(
            f"PeerError: actor: stopped on rank {rank} because of rank 3: rank 3 is gone. "
        ), failed
        assert failed.seconds < 10, "a broken connection is not a timeout"
        assert failed.version is None
        assert (after.error, after.version, after.wrong) == ("", 2, ())
