"""Where the ranks of a run first meet: the store that rank 0 serves, opened so that who does not come is named.

torch's own ``env://`` waits for all ranks without saying which are missing, for as long as a collective may take.
"""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from megatron_real.errors import ConfigError, PeerError
from megatron_real.process_groups import rendezvous

__all__ = ["JOIN_S", "meet"]

JOIN_S = 180.0
"""How long ranks may be apart when they start: they import, and read checkpoints' metadata, at their own pace."""


def meet(rank: int, world_size: int, *, timeout_s: float = JOIN_S) -> dist.Store:
    """The store at ``MASTER_ADDR:MASTER_PORT``, once all ranks have come to it. Collective over all ranks.

    A run of one rank needs no environment.

    Raises:
        ConfigError: the environment does not say where, or rank 0 cannot serve a store there.
        PeerError: naming the ranks that did not come within `timeout_s`.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and world_size > 1:
        raise ConfigError(
            f"environment: found WORLD_SIZE={world_size} without {' and '.join(missing)}; expected both. Start "
            "the ranks with torchrun, srun or megatron-real train."
        )
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(host, port, world_size, rank == 0, limit, wait_for_workers=False)
    except RuntimeError as error:  # what torch's store raises for all that can go wrong
        reason = str(error).partition("\n")[0]
        if rank == 0:
            raise ConfigError(
                f"MASTER_PORT: found {port}, where rank 0 cannot serve a store ({reason}). Give a free port."
            ) from error
        raise PeerError(
            f"start: rank 0 did not come within {timeout_s:g} s: no store at {host}:{port} ({reason}). Look at its log "
            "first."
        ) from error
    try:
        rendezvous(store, "start", range(world_size), rank, timeout_s)
    except RuntimeError as error:
        raise PeerError(
            f"start: rank 0, which serves the store at {host}:{port}, has ended. Look at its log first."
        ) from error
    return store
