"""Which core a rank gets."""

import os
import subprocess
import sys

import pytest

from megatron_real.hooks.pinning import core_of


def environment(rank: int, size: int, **changes: str) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", **changes}


def test_ranks_of_a_node_get_different_cores_of_those_there_are() -> None:
    cores = [2, 3, 6, 7]
    assert [core_of(environment(rank, 4), cores) for rank in range(4)] == cores
    assert [core_of(environment(rank, 2), cores) for rank in range(2)] == [2, 3]


@pytest.mark.parametrize(
    "changed",
    [
        environment(0, 8),  # fewer cores than ranks
        environment(0, 1),  # alone
        environment(0, 2, MEGATRON_REAL_PIN="0"),
        environment(0, 2, OMP_NUM_THREADS="2"),  # more threads than a core
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {},
    ],
)
def test_nothing_is_changed_where_it_would_not_help(changed: dict[str, str]) -> None:
    assert core_of(changed, [0, 1, 2, 3]) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_rank_stays_on_its_core() -> None:
    code = "import os; from megatron_real.hooks.pinning import pin_rank, is_pinned, num_cores\n"
    code += "pin_rank(); print(sorted(os.sched_getaffinity(0)), is_pinned(), num_cores() > 1)"
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(2):
        env = {**os.environ, **environment(rank, 2), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == f"[{cores[rank]}] True True"
