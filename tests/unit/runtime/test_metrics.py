"""The metrics writer: rows, resume, events."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_real.errors import ConfigError
from megatron_real.runtime.reports.metrics import MetricsWriter, flatten, fold, goal_value, read_metrics


def test_flattens_by_call() -> None:
    metrics = {
        "actor_train": {"loss": 0.5, "steps": {"loss": [0.6, 0.4]}},
        None: {"reward": 1.0},
        "iteration": {"duration_s": 2.0},
    }
    assert flatten(metrics) == {
        "reward": 1.0,
        "actor_train/loss": 0.5,
        "actor_train/steps/loss": [0.6, 0.4],
        "iteration/duration_s": 2.0,
    }


def test_the_goal_is_the_batchs_or_a_calls() -> None:
    row = {"iteration": 3, "eval/loss": 9.0, "eval/actor_train/loss": 8.0, "actor_train/steps/loss": [1.0]}
    assert goal_value(row, "loss") is None
    assert goal_value(row | {"actor_train/loss": 2}, "loss") == 2.0
    assert goal_value(row | {"actor_train/loss": 2.0, "loss": 1.0}, "loss") == 1.0


def test_what_ranks_counted_of_rewards_is_added_up() -> None:
    counts = {
        "0": {"missing/late": 2, "sum/f": 3.0, "values/f": 2},
        "1": {"missing/late": 1, "sum/f": 1.0, "values/f": 2},
    }
    folded = fold({"rewards": counts, "eval/rewards": {"1": {"missing/crashed": 1}}}, {})
    assert flatten(folded) == {"rewards/missing/late": 3, "rewards/f": 1.0, "eval/rewards/missing/crashed": 1}


def test_a_resumed_run_leaves_one_row_per_iteration(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for iteration in range(5):
            writer.write(iteration, {None: {"reward": float(iteration)}})
    with writer.path.open("a") as file:
        file.write('{"iteration": 5, "rew')  # killed while it wrote
    with MetricsWriter(tmp_path, first_iteration=3, tensorboard=False) as writer:
        for iteration in range(3, 6):
            writer.write(iteration, {None: {"reward": 10.0 + iteration}})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["reward"] for row in rows] == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]


def test_rows_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        assert writer.write(0, {"actor_train": {"loss": 1.5}}) == {"iteration": 0, "actor_train/loss": 1.5}
        assert read_metrics(writer.path) == [{"iteration": 0, "actor_train/loss": 1.5}]


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_metrics(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"iteration": 0}\nno\n{"iteration": 1}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: found 'no'; expected a JSON object"):
        read_metrics(tmp_path / "bad.jsonl")


def test_numbers_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {None: {"reward": 1.25}, "actor_train": {"steps": {"loss": [1.0]}}})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward"]
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(7, 1.25)]
