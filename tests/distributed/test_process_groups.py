"""Process groups: sharing, counting, destruction, and meetings that name who is missing."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_real.errors import PeerError, PlanError
from megatron_real.process_groups import ProcessGroups, default_store, exchange, rendezvous
from tests.harness import run_ranks

pytestmark = pytest.mark.dist

NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _alive() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _sum_of_ranks(group: Any) -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return float(value)


def _shares_and_counts() -> None:
    rank = dist.get_rank()
    groups = ProcessGroups(timeout_s=20)
    first = groups.acquire([0, 2], purpose="model")
    assert groups.acquire((2, 0), purpose="model") is first
    other = groups.acquire([0, 2], purpose="data")
    outer = groups.acquire([1, 2, 3], purpose="model")
    if rank in (0, 2):
        assert other is not first
        assert _sum_of_ranks(first) == _sum_of_ranks(other) == 2.0
    else:
        assert first == other == NOT_A_MEMBER
    if rank > 0:
        assert _sum_of_ranks(outer) == 6.0
    assert len(groups) == 3

    groups.release([0, 2], purpose="model")
    if rank in (0, 2):
        assert _sum_of_ranks(first) == 2.0, "one holder is left"
    groups.release([0, 2], purpose="model")
    assert len(groups) == 2
    with pytest.raises(PlanError, match="released more often"):
        groups.release([0, 2], purpose="model")
    with pytest.raises(PlanError, match="distinct ranks of 0 to 3"):
        groups.acquire([0, 4], purpose="model")
    with pytest.raises(PlanError, match="distinct ranks"):
        groups.acquire([1, 1], purpose="model")
    groups.close()
    assert len(groups) == 0
    assert _alive() == 1, "only WORLD is left"


def _one_group_of_its_own() -> None:
    rank = dist.get_rank()
    groups = ProcessGroups(timeout_s=20)
    before = _alive()
    for purpose in ("model", "data", "pipeline"):
        for lone in range(4):
            group = groups.acquire([lone], purpose=purpose)
            assert (group == NOT_A_MEMBER) == (lone != rank)
            if lone == rank:
                assert _sum_of_ranks(group) == rank
    assert _alive() == before + 1
    pair = groups.acquire([1, 3], purpose="model")  # ranks still agree on names
    if rank in (1, 3):
        assert _sum_of_ranks(pair) == 4.0
    groups.close()


def _leaves_nothing() -> None:
    groups = ProcessGroups(timeout_s=20)
    groups.acquire([dist.get_rank()], purpose="own")
    asked = ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3])
    seen = []
    for _ in range(11):
        for ranks in asked:
            groups.acquire(ranks, purpose="model")
        groups.rendezvous("made")
        for ranks in reversed(asked):
            groups.release(ranks, purpose="model")
        seen.append((_descriptors(), _alive()))
    assert max(seen[1:]) <= seen[0], seen
    groups.close()


def _names_the_missing() -> tuple[str, float]:
    """Rank 2 does not come to the second meeting."""
    groups = ProcessGroups(timeout_s=1.5)
    groups.rendezvous("first")
    began_s = time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(3)
        return "", 0.0
    with pytest.raises(PeerError) as error:
        groups.acquire([0, 1], purpose="model")
    return str(error.value), time.monotonic() - began_s


def _names_those_at_another_meeting() -> str:
    groups = ProcessGroups(timeout_s=1.5)
    with pytest.raises(PeerError) as error:
        groups.rendezvous("layout A" if dist.get_rank() < 3 else "layout B")
    dist.barrier()
    return str(error.value)


def _subset_meets() -> None:
    rank = dist.get_rank()
    if rank in (1, 3):
        rendezvous(default_store(), "pair", [1, 3], rank, timeout_s=10)


def _all_cases() -> None:
    for case in (_shares_and_counts, _one_group_of_its_own, _leaves_nothing, _subset_meets):
        case()
        dist.barrier()


def test_groups_are_shared_counted_and_destroyed() -> None:
    run_ranks(4, _all_cases)


def _exchanges() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert exchange(rank * 10, None, group=group, what="numbers") == {0: 0, 1: 10, 2: 20}
    problem = {0: None, 1: PlanError("no layout"), 2: OSError("no file")}[rank]
    with pytest.raises(type(problem) if problem else PeerError) as caught:
        exchange(rank, problem, group=group, what="numbers")
    if rank == 0:
        assert str(caught.value) == "numbers: ranks [1, 2] failed. Rank 1: no layout"
    else:
        assert caught.value is problem
    problem = OSError("no file") if rank == 2 else None
    with pytest.raises((PeerError, OSError)) as caught:
        exchange(rank, problem, group=group, what="numbers")
    assert rank == 2 or str(caught.value) == "numbers: ranks [2] failed. Rank 2: OSError: no file"


def test_a_problem_of_one_rank_is_everybodys() -> None:
    run_ranks(3, _exchanges)


def test_missing_rank_is_named_within_the_timeout() -> None:
    results = run_ranks(4, _names_the_missing)
    for rank in (0, 1, 3):
        text, waited_s = results[rank]
        assert "rank 2 of 4 did not come" in text
        assert "group model of ranks 0, 1" in text
        assert 1.0 < waited_s < 3.0


def test_rank_at_another_meeting_is_named() -> None:
    results = run_ranks(4, _names_those_at_another_meeting)
    for rank in range(3):
        assert "layout A" in results[rank]
        assert "rank 3 of 4" in results[rank]
    assert "layout B" in results[3]
    assert "ranks 0, 1, 2 of 4" in results[3]


def test_needs_torch_distributed() -> None:
    with pytest.raises(PlanError, match="not initialised"):
        ProcessGroups()
