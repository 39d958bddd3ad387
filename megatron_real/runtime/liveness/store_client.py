"""Store clients: one per thread, because an operation that blocks on a client holds up every other one on it."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from megatron_real.errors import ConfigError

__all__ = ["open_client", "served_by_launcher"]


def open_client(store: dist.Store, *, purpose: str, who: str, timeout_s: float) -> dist.Store:
    """A new client of the store behind `store`, for the calling thread alone.

    Args:
        store: any store of ``torch.distributed``, such as the default group's.
        purpose: what it is for. Its keys are shared with all who open a client for this purpose for the same
            time: the second time they get fresh keys, so a second run on a store does not see the first one's.
        who: opens it, such as ``rank 3``.
        timeout_s: how long a blocking ``get`` waits.

    Raises:
        ConfigError: a kind of store that cannot be opened a second time.
        RuntimeError: the server does not answer.
    """
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    timeout = datetime.timedelta(seconds=timeout_s)
    client: dist.Store
    match base:
        case dist.TCPStore():
            client = dist.TCPStore(base.host, base.port, None, False, timeout, wait_for_workers=False)
        case dist.FileStore():
            # A second FileStore on the same file would count as a participant and remove the file too early.
            client = dist.FileStore(base.path + ".megatron_real", -1)
            client.set_timeout(timeout)
        case dist.HashStore():
            client = base
        case _:
            raise ConfigError(
                f"store: found a {type(base).__name__}; expected a TCPStore, FileStore or HashStore. "
                "Start torch.distributed with init_method env:// or tcp://."
            )
    # A launcher that restarts the ranks keeps its store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"megatron_real/{attempt}/{purpose}", client)
    times = shared.add(f"opened by {who}", 1)
    return dist.PrefixStore(str(times), shared)


def served_by_launcher() -> bool:
    """Whether torchrun's agent, not rank 0, serves the default store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
