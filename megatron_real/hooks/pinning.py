"""Give every rank of a machine without CUDA a core of its own, where there are enough.

Ranks that the system moves about lose their caches and take each other's turns; collectives wait for the one that lost.
``MEGATRON_REAL_PIN=0`` turns it off, for a machine that several jobs share.

Invariants (tests/unit/hooks/test_pinning.py):
    - ranks of a node get different cores, of those that the process may use;
    - nothing is changed with fewer cores than ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

__all__ = ["core_of", "is_pinned", "num_cores", "pin_rank"]

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Those that this process may use, before it is pinned."""


def pin_rank() -> None:
    """Pin this process, as the environment names it; nothing on a machine with CUDA."""
    if torch.cuda.is_available() or not hasattr(os, "sched_setaffinity"):
        return
    core = core_of(os.environ, _CORES)
    if core is not None:
        for task in os.listdir("/proc/self/task"):  # threads that torch has started already
            os.sched_setaffinity(int(task), {core})


def core_of(environment: Mapping[str, str], cores: list[int]) -> int | None:
    """The core of the rank that `environment` names, or None: pinning is off, or does not help."""
    if environment.get("MEGATRON_REAL_PIN", "1") == "0":
        return None
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if local_size < 2 or local_size > len(cores) or int(environment.get("OMP_NUM_THREADS") or 0) != 1:
        return None
    return cores[local_rank]


def num_cores() -> int:
    """Cores that this process might use before it was pinned."""
    return len(_CORES) or os.cpu_count() or 1


def is_pinned() -> bool:
    """Whether this process may use one core only, of several."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1 < num_cores()
