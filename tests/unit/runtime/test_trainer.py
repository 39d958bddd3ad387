"""The configuration of the loop: when it saves, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_real.errors import ConfigError
from megatron_real.runtime.trainer import TrainConfig


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, []),
        ({"save_folder": Path("x")}, [6]),
        ({"save_folder": Path("x"), "save_every": 3}, [2, 5, 6]),
        ({"save_folder": Path("x"), "save_every": 1}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_saves_every_so_often_and_at_the_end(options: dict[str, Any], saved: list[int]) -> None:
    config = TrainConfig(num_iterations=7, **options)
    assert [i for i in range(7) if config.saves_after(i)] == saved


def test_some_sequences_are_written_every_so_often() -> None:
    assert TrainConfig(num_iterations=7, num_samples=4).samples_of(0) == 0
    config = TrainConfig(num_iterations=7, samples_every=3, num_samples=4)
    assert [config.samples_of(i) for i in range(7)] == [4, 0, 0, 4, 0, 0, 4]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_iterations": 3, "first_iteration": 4}, "first_iteration=4 of num_iterations=3"),
        ({"num_iterations": 3, "save_every": 1}, "without save_folder"),
        ({"num_iterations": 3, "save_every": -1}, "save_every=-1"),
        (
            {"num_iterations": 3, "time_limit_s": 1.0, "save_folder": Path("x")},
            "time_limit_s without save_every",
        ),
    ],
)
def test_refuses_what_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**options)
