"""The first meeting of the ranks names who does not come; no rank waits for longer than the limit."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from megatron_real.cli.ranks import free_port
from megatron_real.errors import ConfigError, PeerError
from megatron_real.runtime.liveness.meeting import meet
from tests.harness import run_ranks

pytestmark = pytest.mark.dist


def come(port: int, size: int, present: tuple[int, ...], timeout_s: float) -> str:
    """What comes of a meeting of `size` ranks to which the process with index i comes as ``present[i]``."""
    rank = present[dist.get_rank()]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        store = meet(rank, size, timeout_s=timeout_s)
    except PeerError as error:
        dist.barrier()  # rank 0 keeps its store until all know
        return str(error)
    met = store.check([f"megatron_real/rendezvous/start/{other}" for other in range(size)])
    dist.barrier()
    return "met" if met else "too early"


def test_all_come() -> None:
    assert run_ranks(3, come, free_port(), 3, (0, 1, 2), 30.0) == ["met"] * 3


def test_one_does_not_come() -> None:
    for text in run_ranks(2, come, free_port(), 3, (0, 2), 2.0):
        assert text.startswith("start: rank 1 of 3 did not come within 2 s")


def test_rank_0_does_not_come() -> None:
    for text in run_ranks(2, come, free_port(), 3, (1, 2), 2.0):
        assert text.startswith("start: rank 0 did not come within 2 s: no store at 127.0.0.1:")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="found WORLD_SIZE=2 without MASTER_ADDR and MASTER_PORT"):
        meet(0, 2)
    assert meet(0, 1).check(["megatron_real/rendezvous/start/0"])  # one rank needs to be told nothing
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(ConfigError, match="where rank 0 cannot serve a store"):
            meet(0, 2, timeout_s=2.0)
