"""Runs that several modules look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.invariance_cases import demo_calls
from tests.e2e.checkpoint_runs import RUN, case


@pytest.fixture(scope="session")
def whole(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Four iterations under the demo's plan, saved at two and four: the folder, to copy, and what every rank saw."""
    from tests.e2e.cases import run

    folder = tmp_path_factory.mktemp("whole")
    return folder, run(case("whole", 4, demo_calls()), folder, iterations=4, save_interval=2, **RUN)
