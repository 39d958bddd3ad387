"""The numbers that `make bench-estimator` prints, counted by hand on a few pairs; and the licences of its data."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _on_path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def numbers(_on_path):
    import estimator_numbers

    return estimator_numbers


@pytest.fixture(scope="module")
def validation_rows(_on_path):
    import validation_rows

    return validation_rows


def test_spearman(numbers) -> None:
    assert numbers.spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert numbers.spearman([1, 2, 3], [5, 4, 3]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5 over sqrt(4.5 * 5).
    assert numbers.spearman([1, 7, 7, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(numbers.spearman([1, 1], [1, 2]))


def test_errors(numbers) -> None:
    found = numbers.errors_of([(90, 100), (100, 100), (130, 100)])
    assert found == {"median_error": 0.1, "p90_error": pytest.approx(0.26), "bias": 0.0}


def test_regret_is_of_the_layout_that_is_predicted_best(numbers) -> None:
    groups = {"a": [(1.0, 12.0), (2.0, 10.0)], "b": [(1.0, 5.0), (3.0, 9.0)], "alone": [(1.0, 1.0)]}
    found = numbers.choices_of(groups)
    assert found == {"groups": 2, "regret": 0.1, "max_regret": 0.2}


def test_a_factor_is_fitted_to_the_other_models(numbers) -> None:
    def samples(model: str, truth: float):
        return [numbers.Sample("g", model, truth, lambda factor: factor) for _ in range(200)]

    both = samples("a", 1.2) + samples("b", 0.9)
    factors, distinct = numbers.leave_one_model_out(both)
    assert factors[0] == pytest.approx(0.9, rel=0.02)
    assert factors[-1] == pytest.approx(1.2, rel=0.02)
    assert len(distinct) == 2
    # Few rows, far off: the prior holds the factor back, and one row that no factor explains does not move it.
    one = numbers.fit(samples("a", 1.2)[:1], prior=0.05)
    assert 1.0 < one < 1.1


def test_every_row_has_a_source_and_a_licence() -> None:
    with (BENCHMARKS / "data" / "validation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 400
    for row in rows:
        assert row["source"], row["id"]
        assert "/" in row["where"], row["id"]
        assert row["licence"].split(" (")[0] in {"MIT", "Apache-2.0", "Megatron-LM"}, row["id"]
        assert "recalled" not in row["checked"], row["id"]


def test_rows_become_the_runs_that_they_tell_of(validation_rows) -> None:
    rows = {row.text("id"): row for row in validation_rows.read_rows("train")}
    row = rows["vtrain_multi_000"]  # GPT-3.6B, 64 A100, no model parallelism, micro-batch 8 of 512
    assert str(row.layout) == "d64t1p1"
    assert row.microbatches == 1
    assert row.cluster.spec.num_nodes == 8
    assert row.device.number("inter_node_bytes_per_s") == pytest.approx(0.84 * 12.5e9)
    parameters = 12 * 30 * 3072**2 + 51200 * 3072
    assert parameters == pytest.approx(3.6e9, rel=0.03)
    assert row.shape.ffn_hidden_size == 4 * 3072
    llama = rows["nemo2407_Llama2-7B_8"]
    assert llama.iteration_s == pytest.approx(128 * 4096 / (16847 * 8))
    with pytest.raises(validation_rows.RowError, match="8-bit"):
        _ = llama.model
