"""Shared by all tests: one thread per process, the markers, why a marked test is skipped here, and who runs where.

`make test` has two workers (pytest-xdist). Tests that start ranks run one after another in one of them: more ranks at a
time than they ask for would make their waits, which are bounded, too long. The others, one process each, go to
whichever worker is free.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

_MARKERS = (
    "dist: several processes over gloo",
    "megatron: needs megatron-core",
    "e2e: runs whole commands or scripts",
    "gpu: needs a CUDA device",
)

_WITH_RANKS = tuple(f"tests/{name}/" for name in ("distributed", "e2e", "examples", "gpu", "hooks"))
"""Where tests are that start ranks or whole runs."""

settings.register_profile("tests", deadline=None)  # an example may wait for a core
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKERS:
        config.addinivalue_line("markers", line)


def _why_skipped(marker: str) -> str | None:
    if marker == "megatron" and importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed"
    if marker == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "there is no CUDA device: NCCL, streams and pinned memory cannot run"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one scope go to one worker, the largest scope first. Marks for it do not work under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(_WITH_RANKS) else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        for marker in ("megatron", "gpu"):
            if item.get_closest_marker(marker) is None:
                continue
            if marker not in reasons:
                reasons[marker] = _why_skipped(marker)
            if (reason := reasons[marker]) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cpu_device() -> Iterator[None]:
    """Megatron's device for the session: the CPU stands in for CUDA unless there is CUDA."""
    from megatron_real.hooks.cpu_device import install_cpu_device

    install_cpu_device()
    return
