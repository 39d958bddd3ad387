"""What holds for every algorithm that generates and scores, and each one's advantages from a plain Python loop."""

from __future__ import annotations

import inspect
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_real.algorithms.losses import Average, PolicyObjective
from megatron_real.algorithms.registry import ALGORITHMS, find_algorithm
from megatron_real.backend import Algorithm, Goal, Head, Minibatching, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import DataKind
from megatron_real.errors import ConfigError, RealError
from tests.unit.algorithms.batches import LENGTHS, NoScorer, build, random_scalars, rows, train_call

POLICIES = {
    "ppo": {},
    "grpo": {"samples_per_prompt": 4},
    "rloo": {"samples_per_prompt": 4},
    "reinforce_pp": {},
    "remax": {"reference": True, "kl_coefficient": 0.2},
}
SHAPED = {"reward_bias": 0.5, "reward_scale": 0.7, "reward_clip": 2.0}
MISSING = (2, 5)


def _prepare(algorithm: Algorithm, scalars: Batch, iteration: int = 0) -> tuple[Batch, dict[str, float]]:
    return algorithm.prepare(train_call(algorithm), iteration, scalars)


def test_these_are_all() -> None:
    assert set(POLICIES) == {name for name in ALGORITHMS if build(name).graph.data is DataKind.PROMPTS}
    assert all(build(name).goal == Goal(metric="reward") for name in POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_prepare_gives_the_same_bits_and_changes_nothing(name: str) -> None:
    options = {
        **POLICIES[name],
        **({"kl_adaptive": True, "kl_target": 0.1, "kl_horizon": 10.0} if name != "grpo" else {}),
    }
    one, other = build(name, **options), build(name, **options)
    for iteration in range(3):
        scalars = random_scalars(one, iteration, missing=MISSING)
        before = {key: value.clone() for key, value in scalars.data.items()}
        results = [
            algorithm.prepare(call, iteration, scalars)
            for algorithm in (one, one, other)
            for call in algorithm.graph.calls
            if call.trains
        ]
        assert set(scalars.data) == set(before)
        for batch, metrics in results:
            assert metrics == results[0][1]
            for key, value in results[0][0].data.items():
                assert torch.equal(batch.data[key].nan_to_num(), value.nan_to_num()), key
            for key, value in before.items():
                assert torch.equal(scalars.data[key].nan_to_num(), value.nan_to_num())
                assert torch.equal(batch.data[key].nan_to_num(), value.nan_to_num())
        assert one.state_dict() == other.state_dict()
    resumed = build(name, **options)
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
    scalars = random_scalars(one, 3)
    assert _prepare(resumed, scalars, 3)[1] == _prepare(one, scalars, 3)[1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_missing_reward_masks_its_sequence_and_is_counted(name: str) -> None:
    algorithm = build(name, **POLICIES[name])
    prepared, metrics = _prepare(algorithm, random_scalars(algorithm, missing=MISSING))
    kept = [i not in MISSING for i in range(len(LENGTHS))]
    assert prepared.data["kept"].tolist() == [float(one) for one in kept]
    assert (metrics["reward_missing"], metrics["kept"]) == (2 / 8, 6 / 8)
    came = [value for value in prepared.data["rewards"].double().tolist() if not math.isnan(value)]
    assert metrics["reward"] == pytest.approx(statistics.fmean(came))
    assert metrics["reward_std"] == pytest.approx(statistics.pstdev(came))
    for sequence, values in enumerate(rows(prepared, "advantages")):
        assert all(map(math.isfinite, values))
        assert any(values) is kept[sequence], "masked ones have no advantage"
    everything, whole = _prepare(build(name, **POLICIES[name]), random_scalars(algorithm))
    assert "kept" not in everything.data, "added only where a sequence is masked"
    assert (whole["reward_missing"], whole["kept"]) == (0.0, 1.0)


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_single_reward_nothing_is_trained_on(name: str) -> None:
    algorithm = build(name, **POLICIES[name])
    prepared, metrics = _prepare(algorithm, random_scalars(algorithm, missing=range(len(LENGTHS))))
    assert not prepared.data["kept"].any()
    assert not prepared.data["advantages"].any()
    assert "reward" not in metrics, "no number that was not seen"
    assert metrics["reward_missing"] == 1.0
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "remax"])
def test_a_masked_sequence_is_as_good_as_one_that_is_not_there(name: str) -> None:
    """Whitening included. (Algorithms with groups: by the loops below; a group cannot be of another size.)"""
    algorithm = build(name, **POLICIES[name])
    scalars = random_scalars(algorithm, missing=MISSING)
    prepared, _ = _prepare(algorithm, scalars)
    kept = [i for i in range(len(LENGTHS)) if i not in MISSING]
    alone, _ = _prepare(build(name, **POLICIES[name]), scalars.select(kept))
    assert torch.equal(alone.data["advantages"], prepared.select(kept).data["advantages"])


@pytest.mark.parametrize("name", POLICIES)
def test_numbers_that_are_not_finite_are_named(name: str) -> None:
    algorithm = build(name, **POLICIES[name])
    for key in random_scalars(algorithm).data:
        scalars = random_scalars(algorithm)
        scalars.data[key][1 if "rewards" in key else LENGTHS[0]] = math.inf  # of sequence 1
        with pytest.raises(RealError, match=rf"{key} of sequences \[1\] are not finite; .* produces '{key}'"):
            _prepare(algorithm, scalars)
        scalars.data[key][1 if "rewards" in key else LENGTHS[0]] = math.nan
        if "rewards" not in key:
            with pytest.raises(RealError, match="are not finite"):
                _prepare(algorithm, scalars)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_to_the_runtime(name: str) -> None:
    options = {
        **POLICIES[name],
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 3,
        "stop": ("\n",),
        "num_minibatches": 2,
        "num_epochs": 3,
    }
    definition = find_algorithm(name)
    config = definition.config(**options)
    algorithm = definition.build(config, end_token=50)
    assert algorithm.graph == definition.graph_for(config)
    assert algorithm.temperature == 0.7
    assert algorithm.samples_per_prompt == options.get("samples_per_prompt", 1)
    heads = {
        "ref_logprobs": Head.LOGPROBS,
        "values": Head.VALUES,
        "rewards": Head.SCORES,
        "greedy_rewards": Head.SCORES,
    }
    for call in algorithm.graph.calls:
        kind = str(call.type)
        if kind == "generate":
            assert algorithm.sampling(call) == Sampling(
                max_new_tokens=9, end_token=50, temperature=0.7, top_k=5, top_p=0.9, seed=3, stop=("\n",),
                greedy=call.name == "greedy_gen",
            )  # fmt: skip
        elif kind == "inference":
            assert algorithm.head(call) is heads[call.outputs[0]]
        else:
            assert algorithm.minibatching(call) == Minibatching(num_minibatches=2, num_epochs=3)
        wrong = {
            "generate": (algorithm.head, algorithm.minibatching, algorithm.objective, algorithm.function),
            "inference": (
                algorithm.sampling,
                algorithm.minibatching,
                algorithm.objective,
                algorithm.function,
            ),
            "train": (algorithm.sampling, algorithm.head, algorithm.function),
        }[kind]
        for method in wrong:
            with pytest.raises(RealError, match=f"found call '{call.name}' of type {kind}; expected"):
                method(call)
        if kind != "train":
            with pytest.raises(RealError, match="expected a train call"):
                algorithm.prepare(call, 0, random_scalars(algorithm))


@pytest.mark.parametrize("name", POLICIES)
def test_a_scorer_takes_the_place_of_the_reward_model(name: str) -> None:
    definition, scorer = find_algorithm(name), NoScorer()
    algorithm = definition.build(definition.config(**POLICIES[name]), end_token=0, scorer=scorer)
    scored = [call for call in algorithm.graph.calls if call.model is None]
    assert {call.name for call in scored} == {
        call.name for call in algorithm.graph.calls if "rew" in call.name
    }
    for call in scored:
        assert algorithm.function(call) is scorer
        with pytest.raises(RealError, match="an inference call of a model"):
            algorithm.head(call)


@pytest.mark.parametrize("name", POLICIES)
def test_the_actor_is_trained_as_the_options_say(name: str) -> None:
    plain = build(name, **POLICIES[name])
    objective = plain.objective(train_call(plain))
    assert isinstance(objective, PolicyObjective)
    assert (objective.clip_low, objective.clip_high, objective.dual_clip) == (0.2, 0.2, None)
    assert (objective.stop_above, objective.entropy_coefficient) == ({}, 0.0)
    assert objective.average is (Average.SEQUENCES if name == "grpo" else Average.TOKENS)
    assert objective.kl_coefficient == (0.04 if name == "grpo" else 0.0), "others have it in the reward"
    changed = build(
        name, **POLICIES[name], clip_ratio=0.1, clip_ratio_high=0.3, dual_clip=3.0, entropy_coefficient=0.01,
        stop_ratio=5.0, stop_kl=0.5, average="constant", max_new_tokens=40,
    )  # fmt: skip
    objective = changed.objective(train_call(changed))
    assert (objective.clip_low, objective.clip_high, objective.dual_clip) == (0.1, 0.3, 3.0)
    assert (objective.average, objective.constant) == (Average.CONSTANT, 40)
    assert (objective.stop_above, objective.entropy_coefficient) == (
        {"ratio": 5.0, "approx_kl_k3": 0.5},
        0.01,
    )


@pytest.mark.parametrize("name", POLICIES)
def test_lengths_are_told(name: str) -> None:
    algorithm = build(name, **POLICIES[name], max_new_tokens=5)
    _, metrics = _prepare(algorithm, random_scalars(algorithm))
    assert metrics["response_length"] == pytest.approx(statistics.fmean(LENGTHS))
    assert metrics["response_at_limit"] == 3 / 8  # lengths 7, 5 and 6


# Advantages: a loop over sequences per algorithm, in plain Python.


def _score(reward: float) -> float:
    return max(-2.0, min(2.0, (reward - 0.5) * 0.7))


def _kl(scalars: Batch) -> list[list[float]]:
    """k2 of every token."""
    pairs = zip(rows(scalars, "logprobs"), rows(scalars, "ref_logprobs"), strict=True)
    return [[(a - b) ** 2 / 2 for a, b in zip(own, ref, strict=True)] for own, ref in pairs]


def _present(values: list[float], group: range) -> list[int]:
    return [i for i in group if not math.isnan(values[i])]


def _groups(size: int) -> list[range]:
    return [range(start, start + size) for start in range(0, len(LENGTHS), size)]


def _grpo(scalars: Batch, scale: bool) -> list[list[float]]:
    scores = [_score(value) for value in scalars.data["rewards"].double().tolist()]
    scores = [
        score if not math.isnan(raw) else raw
        for score, raw in zip(scores, scalars.data["rewards"].tolist(), strict=True)
    ]
    found = [[0.0] * length for length in LENGTHS]
    for group in _groups(4):
        came = _present(scores, group)
        values = [scores[i] for i in came]
        for i in came:
            advantage = scores[i] - statistics.fmean(values)
            found[i] = [advantage / (statistics.stdev(values) + 1e-6) if scale else advantage] * LENGTHS[i]
    return found


def _rloo(scalars: Batch) -> list[list[float]]:
    penalties = [0.3 * sum(row) for row in _kl(scalars)]
    raw = scalars.data["rewards"].double().tolist()
    totals = [math.nan if math.isnan(r) else _score(r) - p for r, p in zip(raw, penalties, strict=True)]
    found = [[0.0] * length for length in LENGTHS]
    for group in _groups(4):
        came = _present(totals, group)
        for i in came:
            found[i] = [totals[i] - statistics.fmean(totals[j] for j in came if j != i)] * LENGTHS[i]
    return found


def _returns(ends: list[float], kl: list[list[float]], gamma: float) -> list[list[float]]:
    """What follows each token: penalties of 0.3 * KL, and the number at the end."""
    found = []
    for end, row in zip(ends, kl, strict=True):
        rewards = [-0.3 * value for value in row]
        rewards[-1] += end
        length = len(rewards)
        found.append([sum(gamma ** (k - t) * rewards[k] for k in range(t, length)) for t in range(length)])
    return found


def _whitened(found: list[list[float]], kept: list[int]) -> list[list[float]]:
    tokens = [value for i in kept for value in found[i]]
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)
    return [
        [(value - mean) / deviation for value in row] if i in kept else [0.0] * len(row)
        for i, row in enumerate(found)
    ]


def _reinforce_pp(scalars: Batch, baseline: bool) -> list[list[float]]:
    raw = scalars.data["rewards"].double().tolist()
    kept = _present(raw, range(len(raw)))
    scores = [0.0 if math.isnan(value) else _score(value) for value in raw]
    if baseline:
        means = {i: statistics.fmean(scores[j] for j in _present(raw, g)) for g in _groups(4) for i in g}
        scores = [score - means[i] for i, score in enumerate(scores)]
    return _whitened(_returns(scores, _kl(scalars), 0.9), kept)


def _remax(scalars: Batch) -> list[list[float]]:
    raw, greedy = (scalars.data[key].double().tolist() for key in ("rewards", "greedy_rewards"))
    ends = [_score(r) - _score(g) if not math.isnan(r) else 0.0 for r, g in zip(raw, greedy, strict=True)]
    found = _returns(ends, _kl(scalars), 1.0)
    return [row if not math.isnan(raw[i]) else [0.0] * len(row) for i, row in enumerate(found)]


PENALTY = {"kl_coefficient": 0.3, "kl_estimator": "k2", "reference": True}
LOOPS: dict[str, tuple[str, dict[str, Any], Callable[[Batch], list[list[float]]]]] = {
    "grpo": ("grpo", {"samples_per_prompt": 4}, lambda b: _grpo(b, scale=True)),
    "dr_grpo": ("grpo", {"samples_per_prompt": 4, "scale_rewards": False}, lambda b: _grpo(b, scale=False)),
    "rloo": ("rloo", {"samples_per_prompt": 4, **PENALTY}, _rloo),
    "reinforce_pp": ("reinforce_pp", {"gamma": 0.9, **PENALTY}, lambda b: _reinforce_pp(b, baseline=False)),
    "reinforce_pp_baseline": (
        "reinforce_pp",
        {"gamma": 0.9, "samples_per_prompt": 4, "group_baseline": True, **PENALTY},
        lambda b: _reinforce_pp(b, baseline=True),
    ),
    "remax": ("remax", PENALTY, _remax),
}


@pytest.mark.parametrize("missing", [(), MISSING])
@pytest.mark.parametrize("case", LOOPS)
def test_advantages_equal_a_loop(case: str, missing: tuple[int, ...]) -> None:
    name, options, loop = LOOPS[case]
    algorithm = build(name, **options, **SHAPED)
    scalars = random_scalars(algorithm, 7, missing=missing)
    prepared, metrics = _prepare(algorithm, scalars)
    for found, expected in zip(rows(prepared, "advantages"), loop(scalars), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if "kl_estimator" in options:
        kl = _kl(scalars)
        tokens = [value for row in kl for value in row]
        assert metrics["kl"] == pytest.approx(statistics.fmean(tokens))
        assert metrics["kl_per_sequence"] == pytest.approx(statistics.fmean(map(sum, kl)))
        assert metrics["kl_coefficient"] == 0.3


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "remax"])
def test_without_a_reference_only_rewards_count(name: str) -> None:
    algorithm = build(name, **{**POLICIES[name], "reference": False, "kl_coefficient": 0.0})
    scalars = random_scalars(algorithm)
    assert not any("logprobs" in key for key in scalars.data)
    prepared, metrics = _prepare(algorithm, scalars)
    assert not any(key.startswith("kl") for key in metrics)
    if name != "reinforce_pp":
        assert all(len(set(row)) == 1 for row in rows(prepared, "advantages")), "a response is one action"


def test_a_response_is_not_kept_without_its_greedy_reward() -> None:
    algorithm = build("remax")
    scalars = random_scalars(algorithm)
    scalars.data["greedy_rewards"][3] = math.nan
    prepared, metrics = _prepare(algorithm, scalars)
    assert prepared.data["kept"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert metrics["reward_missing"] == 0.0


def test_a_long_response_costs_reward() -> None:
    """DAPO, eq. 13: with a limit of 8 and a buffer of 4 lengths up to 4 are free, 6 costs half, 7 three quarters."""
    options = {"samples_per_prompt": 4, "scale_rewards": False, "max_new_tokens": 8}
    algorithm = build("grpo", **options, overlong_buffer=4, overlong_penalty=2.0)
    scalars = random_scalars(algorithm)
    penalised = scalars.select(scalars.ids)
    costs = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.5, 6: 1.0, 7: 1.5}
    penalised.data["rewards"] = scalars.data["rewards"] - torch.tensor([costs[n] for n in LENGTHS])
    found, metrics = _prepare(algorithm, scalars)
    expected, _ = _prepare(build("grpo", **options), penalised)
    torch.testing.assert_close(found.data["advantages"], expected.data["advantages"])
    assert metrics["reward"] == pytest.approx(float(scalars.data["rewards"].double().mean())), "as they came"


def test_the_algorithm_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(inspect.getfile(find_algorithm)).parent / "README.md").read_text()
    (tmp_path / "readme_algorithm.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "readme_algorithm", raising=False)
    algorithm = build("readme_algorithm:CENTRED", **PENALTY)
    scalars = random_scalars(algorithm, missing=MISSING)
    prepared, metrics = _prepare(algorithm, scalars)
    raw = scalars.data["rewards"].double().tolist()
    mean = statistics.fmean(value for value in raw if not math.isnan(value))
    expected = _returns([value - mean for value in raw], _kl(scalars), 1.0)
    for sequence, found in enumerate(rows(prepared, "advantages")):
        wanted = [0.0] * len(found) if sequence in MISSING else expected[sequence]
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert metrics["kl_coefficient"] == 0.3


# GRPO: dynamic sampling.

SPREAD = {"samples_per_prompt": 2, "dynamic_sampling": True}


def _with_rewards(algorithm: Algorithm, rewards: list[float]) -> Batch:
    scalars = random_scalars(algorithm, lengths=(2,) * len(rewards))
    scalars.data["rewards"] = torch.tensor(rewards)
    return scalars


def test_groups_without_spread_are_masked() -> None:
    algorithm = build("grpo", **SPREAD)
    nan = math.nan
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, nan, 1.0, nan, nan, 0.0, 0.0]
    prepared, metrics = _prepare(algorithm, _with_rewards(algorithm, rewards))
    assert prepared.data["kept"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert (metrics["groups_kept"], metrics["kept"]) == (2 / 6, 4 / 12)


@pytest.mark.parametrize(
    ("oversampling", "kept"),
    [
        (1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2.0, [0, 2, 4, 6]),
        (8 / 3, [0, 2, 5]),
        (100.0, [0]),
    ],
)
def test_of_more_groups_than_wanted_some_are_kept_evenly(oversampling: float, kept: list[int]) -> None:
    """Minibatches are cut by sequence id: each keeps its share."""
    algorithm = build("grpo", **SPREAD, oversampling=oversampling)
    prepared, metrics = _prepare(algorithm, _with_rewards(algorithm, [0.0, 1.0] * 8))
    mask = prepared.data.get("kept", torch.ones(16)).view(8, 2)
    assert mask[:, 0].nonzero().flatten().tolist() == kept
    assert torch.equal(mask[:, 0], mask[:, 1])
    assert metrics["groups_kept"] == len(kept) / 8


def test_too_few_groups_with_spread_are_all_kept() -> None:
    algorithm = build("grpo", **SPREAD, oversampling=2.0)
    prepared, _ = _prepare(algorithm, _with_rewards(algorithm, [1.0, 1.0] * 6 + [0.0, 1.0] * 2))
    assert prepared.data["kept"].tolist() == [0.0] * 12 + [1.0] * 4


def test_the_divergence_of_grpo_is_in_the_loss() -> None:
    algorithm = build("grpo", kl_coefficient=0.5, kl_estimator="k2")
    objective = algorithm.objective(train_call(algorithm))
    assert (objective.kl_coefficient, objective.kl_estimator) == (0.5, "k2")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("grpo", {"samples_per_prompt": 1}, "samples_per_prompt: found 1; expected a number at least 2"),
        ("grpo", {"oversampling": 2.0}, "oversampling: found 2.0 without dynamic_sampling"),
        ("grpo", {"kl_estimator": "k1"}, "found 'k1'; expected one of k2, k3"),
        ("grpo", {"average": "mean"}, "average: found 'mean'; expected one of tokens, sequences, constant"),
        ("rloo", {"samples_per_prompt": 1}, "samples_per_prompt"),
        ("reinforce_pp", {"group_baseline": True}, "samples_per_prompt: found 1 with group_baseline"),
        ("remax", {"samples_per_prompt": 2}, "samples_per_prompt: found 2"),
        ("remax", {"kl_coefficient": 0.1}, r"0, since there is no reference model \(reference=false\)"),
        ("ppo", {"kl_adaptive": True, "kl_coefficient": 0.0}, "adapted by a factor"),
        ("ppo", {"overlong_buffer": 200}, "overlong_buffer: found 200; expected at most max_new_tokens=128"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip: found 1.0; expected a number above 1, or none"),
        (
            "ppo",
            {"stop": ("END", "")},
            r"stop: found \['END', ''\]; expected texts of at least one character",
        ),
        ("ppo", {"stop_ratio": 0.5}, "stop_ratio"),
        ("ppo", {"stop_kl": 0.0}, "stop_kl"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        find_algorithm(name).config(**options)
