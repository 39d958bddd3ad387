"""Shared by all tests: one thread per process, the markers, and why a marked test is skipped here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

_MARKERS = (
    "dist: several processes over gloo",
    "megatron: needs megatron-core",
    "e2e: runs whole commands or scripts",
    "gpu: needs a CUDA device",
)


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
