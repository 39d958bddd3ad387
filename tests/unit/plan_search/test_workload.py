"""How much work an iteration is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.algorithms.graphs import dpo_graph, ppo_graph
from megatron_real.errors import ConfigError
from megatron_real.plan_search.workload import LengthDistribution, Workload

samples = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(samples)
def test_a_histogram_has_the_moments_of_its_samples(lengths: list[int]) -> None:
    found = LengthDistribution.of(lengths)
    assert found.mean == pytest.approx(np.mean(lengths))
    assert found.mean_square == pytest.approx(np.mean(np.square(lengths)))
    assert found.cap == max(lengths)
    assert found.quantile(1.0) == max(lengths)
    assert sum(found.weights) == pytest.approx(1.0)


@given(samples, st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_length_that_covers_it(lengths: list[int], level: float) -> None:
    found = LengthDistribution.of(lengths).quantile(level)
    assert np.mean(np.array(lengths) <= found) >= level - 1e-6
    assert np.mean(np.array(lengths) < found) < level + 1e-6


def test_a_lognormal_gathers_what_is_too_long_at_its_cap() -> None:
    wide = LengthDistribution.lognormal(400.0, 0.8, 512)
    assert wide.cap == 512
    draws = np.minimum(np.random.default_rng(0).lognormal(np.log(400) - 0.32, 0.8, 200_000), 512)
    assert wide.mean == pytest.approx(draws.mean(), rel=0.02)
    assert wide.weights[-1] == pytest.approx(np.mean(draws >= 508), abs=0.02)


def test_calls_share_out_the_batch() -> None:
    graph = ppo_graph()
    workload = Workload(
        batch_size=64,
        prompt=LengthDistribution.constant(16),
        response=LengthDistribution.constant(48),
        group_size=2,
        num_minibatches=4,
        num_epochs=3,
    )
    train, generate = graph.call("actor_train"), graph.call("actor_gen")
    assert workload.num_sequences == 128
    assert (workload.num_steps(train), workload.step_sequences(train)) == (12, 32)
    assert (workload.num_steps(generate), workload.step_sequences(generate)) == (1, 128)
    assert workload.mean_square_length == pytest.approx(64**2)


def test_pairs_are_two_sequences_that_only_a_training_keeps_together() -> None:
    graph = dpo_graph()
    one = LengthDistribution.constant(8)
    workload = Workload(batch_size=10, prompt=one, response=one, unit=2, num_minibatches=3)
    train, ref = graph.call("actor_train"), graph.call("ref_inf")
    assert workload.num_sequences == 20
    assert (workload.step_units(ref), workload.step_sequences(ref)) == (20, 20)
    # Three minibatches of three pairs; the tenth pair makes one of them larger.
    assert (workload.step_units(train), workload.step_sequences(train)) == (3, 6)


@pytest.mark.parametrize(
    "lengths",
    [
        ((), ()),
        ((4, 2), (0.5, 0.5)),
        ((0,), (1.0,)),
        ((3,), (0.4,)),
        ((3, 4), (1.5, -0.5)),
        ((3,), (0.5, 0.5)),
    ],
)
def test_what_is_no_distribution_is_refused(lengths: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match="lengths: found"):
        LengthDistribution(*lengths)


def test_a_workload_without_work_is_refused() -> None:
    one = LengthDistribution.constant(1)
    with pytest.raises(ConfigError, match="batch_size=0"):
        Workload(batch_size=0, prompt=one, response=one)
    with pytest.raises(ConfigError, match=r"memory_quantile=1\.5"):
        Workload(batch_size=1, prompt=one, response=one, memory_quantile=1.5)
