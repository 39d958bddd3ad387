"""Algorithms on what a data set has: SFT, DPO and reward models, as the runtime sees them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.backend import MARGIN, Goal, Head, Minibatching
from megatron_real.batch import Batch
from megatron_real.dataflow import DataKind, KeySpec, Per
from megatron_real.errors import ConfigError, RealError
from tests.unit.algorithms.batches import build, train_call

KINDS = {
    "sft": (DataKind.ANSWERS, Goal(metric="loss", higher_is_better=False), 1, Head.LOGPROBS, Per.RESPONSE),
    "dpo": (DataKind.PAIRS, Goal(metric="accuracy"), 2, Head.LOGPROBS, Per.SEQUENCE),
    "reward": (DataKind.PAIRS, Goal(metric="accuracy"), 2, Head.SCORES, Per.SEQUENCE),
}


@pytest.mark.parametrize("name", KINDS)
def test_answers_to_the_runtime(name: str) -> None:
    data, goal, unit, head, per = KINDS[name]
    algorithm = build(name, num_minibatches=2, num_epochs=3)
    call = train_call(algorithm)
    assert (algorithm.graph.data, algorithm.goal) == (data, goal)
    assert (algorithm.samples_per_prompt, algorithm.temperature) == (1, 1.0)
    assert algorithm.minibatching(call) == Minibatching(num_minibatches=2, num_epochs=3, unit=unit)
    objective = algorithm.objective(call)
    assert (objective.head, objective.per, dict(objective.stop_above)) == (head, per, {})
    assert algorithm.state_dict() == {}
    algorithm.load_state_dict({})
    for method in (algorithm.sampling, algorithm.function, algorithm.head):
        with pytest.raises(RealError, match=f"found call '{call.name}' of type train; expected"):
            method(call)


def test_the_reference_of_dpo_gives_log_probabilities() -> None:
    algorithm = build("dpo")
    call = algorithm.graph.call("ref_inf")
    assert algorithm.head(call) is Head.LOGPROBS
    for method in (algorithm.minibatching, algorithm.objective):
        with pytest.raises(RealError, match="expected a train call"):
            method(call)


@pytest.mark.parametrize("name", KINDS)
def test_prepare_passes_the_batch_on(name: str) -> None:
    algorithm = build(name)
    scalars = Batch(ids=(0, 1), prompt_lengths=(3, 3), response_lengths=(2, 4))
    prepared, metrics = algorithm.prepare(train_call(algorithm), 0, scalars)
    assert prepared == scalars
    assert prepared is not scalars
    assert metrics == {"response_length": 3.0}


def _pair(**data: tuple[KeySpec, list[float]]) -> Batch:
    batch = Batch(ids=(4, 5), prompt_lengths=(3, 3), response_lengths=(2, 3))
    for spec, values in data.values():
        batch.put(spec, torch.tensor(values))
    return batch


REF = KeySpec(name="ref_logprobs", per=Per.RESPONSE, dtype="float32")
LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0])
CHOSEN, REJECTED = (-3.0) - (-4.0), (-6.0) - (-4.5)  # log-ratios of the batch below


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"beta": 0.3}, math.log1p(math.exp(-0.3 * (CHOSEN - REJECTED)))),
        (
            {"beta": 0.3, "label_smoothing": 0.2},
            0.8 * math.log1p(math.exp(-0.3 * 2.5)) + 0.2 * math.log1p(math.exp(0.3 * 2.5)),
        ),
        ({"beta": 0.3, "loss": "ipo"}, (CHOSEN / 2 - REJECTED / 3 - 1 / 0.6) ** 2),
    ],
)
def test_options_of_dpo_reach_the_loss(options: dict[str, Any], loss: float) -> None:
    algorithm = build("dpo", **options)
    batch = _pair(ref=(REF, [-2.0, -2.0, -1.5, -1.5, -1.5]))
    found, statistics = algorithm.objective(train_call(algorithm)).loss(
        {"logprobs": LOGPROBS, "entropy": torch.zeros(5)}, batch
    )
    assert float(found) == pytest.approx(2 * loss, rel=1e-5), "a pair counts for both its sequences"
    assert float(statistics["accuracy"]) == 2.0


@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_options_of_a_reward_model_reach_the_loss(centering: float) -> None:
    algorithm = build("reward", centering=centering)
    found, statistics = algorithm.objective(train_call(algorithm)).loss(
        {"scores": torch.tensor([1.0, 3.0])}, _pair()
    )
    assert float(found) == pytest.approx(2 * (math.log1p(math.exp(2.0)) + centering * 16.0))
    assert float(statistics["accuracy"]) == 0.0


def test_a_column_margin_of_the_data_reaches_the_loss() -> None:
    """Under the name that the runtime gives it; of the chosen one (Llama 2, eq. 2)."""
    algorithm = build("reward")
    batch = _pair(margin=(MARGIN, [0.5, 9.0]))
    found, statistics = algorithm.objective(train_call(algorithm)).loss(
        {"scores": torch.tensor([3.0, 1.0])}, batch
    )
    assert float(found) == pytest.approx(2 * math.log1p(math.exp(-(3.0 - 1.0 - 0.5))))
    assert float(statistics["margin"]) == 4.0


def test_sft_is_the_cross_entropy() -> None:
    algorithm = build("sft")
    found, _ = algorithm.objective(train_call(algorithm)).loss(
        {"logprobs": LOGPROBS, "entropy": torch.zeros(5)}, _pair()
    )
    assert float(found) == 9.0


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("dpo", {"beta": 0.0}, "beta: found 0.0"),
        ("dpo", {"loss": "hinge"}, "loss: found 'hinge'; expected one of sigmoid, ipo"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing: found 0.5; expected a number at least 0 and below 0.5"),
        ("dpo", {"loss": "ipo", "label_smoothing": 0.1}, "found 0.1 with loss=ipo; expected 0"),
        ("reward", {"centering": -1.0}, "centering"),
        ("sft", {"num_minibatches": 0}, "num_minibatches: found 0; expected a number at least 1"),
    ],
)  # fmt: skip
def test_bad_options(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        find_algorithm(name).config(**options)
