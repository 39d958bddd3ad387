"""The example of a user's own algorithm: found by its name, planned, and equal to a loop over groups."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from megatron_real.algorithms.registry import AlgorithmDefinition, find_algorithm
from megatron_real.backend import Minibatching, Sampling
from megatron_real.batch import Batch
from megatron_real.capabilities import graph_problems
from megatron_real.cli.main import main
from megatron_real.config import RunOptions
from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import ConfigError
from megatron_real.plan import Plan
from megatron_real.program import compile_program

NAME = "custom_algorithm:BEST_OF_N"
REWARDS = KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32")
NAN = math.nan


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "custom_algorithm", raising=False)


@pytest.fixture
def best_of_n() -> AlgorithmDefinition:
    return find_algorithm(NAME)


def _scalars(rewards: list[float], lengths: list[int]) -> Batch:
    batch = Batch(
        ids=tuple(range(len(rewards))), prompt_lengths=(2,) * len(rewards), response_lengths=tuple(lengths)
    )
    batch.put(REWARDS, torch.tensor(rewards))
    return batch


def test_the_runtime_can_execute_its_calls(best_of_n: AlgorithmDefinition) -> None:
    for reward, models in (("function", ("actor",)), ("model", ("actor", "reward"))):
        graph = best_of_n.graph_for(best_of_n.config(), reward=reward)
        assert graph.name == NAME
        assert graph.models == models
        assert not list(graph_problems(graph))
        edges = {(parent.name, call.name) for call in graph.calls for parent in graph.parents(call)}
        assert edges == {("actor_gen", "rew_inf"), ("actor_gen", "actor_train"), ("rew_inf", "actor_train")}


def test_a_plan_is_made_and_compiled_and_its_options_are_read(
    best_of_n: AlgorithmDefinition, tmp_path: Path
) -> None:
    path, prompts = tmp_path / "plan.json", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a"}) + "\n")
    made = ["plan", "symmetric", "--devices-per-node", "2", "--algorithm", NAME, "--reward", "function"]
    assert main([*made, "-o", str(path)]) == 0
    assert main(["show", str(path)]) == 0
    options = RunOptions.from_tree(
        {
            "plan": path,
            "iterations": 1,
            "data": {"prompts": str(prompts), "batch_size": 2},
            "algorithm": {"name": NAME, "samples_per_prompt": 4},
            "seed": 11,
            "reward": "rewards:vowel_share",
        }
    )
    config = options.algorithm_config()
    assert (config.samples_per_prompt, config.seed) == (4, 11)
    program = compile_program(best_of_n.graph_for(config, reward="function"), Plan.load(path))
    assert program.world_size == 2


def test_bad_options_are_named(best_of_n: AlgorithmDefinition) -> None:
    with pytest.raises(ConfigError, match="num_best: found 8; expected fewer than samples_per_prompt=8"):
        best_of_n.config(num_best=8)
    with pytest.raises(ConfigError, match="samples_per_prompt: found 1; expected a number at least 2"):
        best_of_n.config(samples_per_prompt=1, num_best=0)


def test_answers_to_the_runtime(best_of_n: AlgorithmDefinition) -> None:
    config = best_of_n.config(max_new_tokens=9, temperature=0.7, seed=3, num_epochs=2)
    algorithm = best_of_n.build(config, end_token=50)
    call = algorithm.graph.call
    assert algorithm.sampling(call("actor_gen")) == Sampling(
        max_new_tokens=9, end_token=50, temperature=0.7, seed=3
    )
    assert algorithm.minibatching(call("actor_train")) == Minibatching(num_epochs=2)
    assert (algorithm.samples_per_prompt, algorithm.temperature) == (8, 1.0)


@pytest.mark.parametrize(
    ("rewards", "num_best", "kept"),
    [
        ([1.0, 3.0, 2.0, 0.5, -1.0, -2.0], 1, [0, 1, 0, 1, 0, 0]),
        ([1.0, 3.0, 2.0, 0.5, -1.0, -2.0], 2, [0, 1, 1, 1, 1, 0]),
        ([1.0, 1.0, 1.0, 0.0, 2.0, 2.0], 1, [1, 0, 0, 0, 1, 0]),
        ([NAN, -5.0, NAN, NAN, NAN, NAN], 2, [0, 1, 0, 0, 0, 0]),
    ],
)
def test_the_best_are_kept(
    best_of_n: AlgorithmDefinition, rewards: list[float], num_best: int, kept: list[int]
) -> None:
    algorithm = best_of_n.build(best_of_n.config(samples_per_prompt=3, num_best=num_best), end_token=0)
    scalars = _scalars(rewards, [2] * 6)
    prepared, metrics = algorithm.prepare(algorithm.graph.call("actor_train"), 0, scalars)
    assert prepared.data["kept"].tolist() == kept
    assert set(scalars.data) == {"rewards"}
    best = [reward for reward, one in zip(rewards, kept, strict=True) if one]
    assert metrics["reward_best"] == pytest.approx(sum(best) / len(best))
    assert metrics["reward_missing"] == pytest.approx(sum(map(math.isnan, rewards)) / 6)


def test_the_loss_is_that_of_the_best_alone(best_of_n: AlgorithmDefinition) -> None:
    """Against a loop, with a gradient on nothing but the tokens of the best response to each prompt."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 5) for _ in range(8)]
    rewards = [rng.gauss(0, 1) for _ in range(8)]
    algorithm = best_of_n.build(best_of_n.config(samples_per_prompt=4), end_token=0)
    call = algorithm.graph.call("actor_train")
    prepared, _ = algorithm.prepare(call, 0, _scalars(rewards, lengths))
    logprobs = torch.tensor([-abs(rng.gauss(0, 1)) for _ in range(sum(lengths))], requires_grad=True)
    outputs = {"logprobs": logprobs, "entropy": torch.zeros(sum(lengths))}
    loss, _ = algorithm.objective(call).loss(outputs, prepared)
    best = [max(range(start, start + 4), key=rewards.__getitem__) for start in (0, 4)]
    parts = logprobs.detach().split(lengths)
    assert float(loss.detach()) == pytest.approx(-sum(float(parts[i].sum()) for i in best), rel=1e-5)
    loss.backward()
    assert logprobs.grad is not None
    expected = [-1.0 if i in best else 0.0 for i, length in enumerate(lengths) for _ in range(length)]
    assert logprobs.grad.tolist() == expected
