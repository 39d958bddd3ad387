"""Reward functions: how they are found, and what they may return."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_real.errors import ConfigError
from megatron_real.runtime.rewards import Samples, call_reward, load_function

SAMPLES = Samples(
    ids=(4, 7, 9), prompts=("a", "b", "c"), responses=("x", "yy", ""), columns={"goal": (1, 2, 3)}
)


def test_finds_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "class Box:\n    @staticmethod\n    def f(prompts, responses): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("my_rewards:Box.f")(["p"], ["r"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "found 'nothing'; expected module:function"),
        (":f", "expected module:function"),
        ("no_such_module_here:f", "module 'no_such_module_here' cannot be imported (ModuleNotFoundError"),
        (
            "broken_rewards:f",
            "module 'broken_rewards' cannot be imported (ZeroDivisionError: division by zero)",
        ),
        ("json:no_such", "json has no 'no_such'; it has JSONDecodeError, JSONDecoder, JSONEncoder"),
        ("json:__name__", "found str; expected a function of prompts and responses"),
    ],
)
def test_what_cannot_be_found_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(text)):
        load_function(name)


def test_gets_prompts_responses_and_columns() -> None:
    def function(prompts: list[str], responses: list[str], goal: list[int]) -> list[float]:
        assert (prompts, responses, goal) == (["a", "b", "c"], ["x", "yy", ""], [1, 2, 3])
        return [float(len(response)) for response in responses]

    assert call_reward(function, "rew_inf", SAMPLES) == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "values", [[1, 2, 3], (1.0, 2.0, 3.0), [numpy.float32(1), numpy.float64(2), numpy.int64(3)]]
)
def test_accepts_numbers(values: Any) -> None:
    result = call_reward(lambda *_, **__: values, "rew_inf", SAMPLES)
    assert result == [1.0, 2.0, 3.0]
    assert all(type(value) is float for value in result)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 2.0], "returned 2 values; expected 3, one for each of the sequences 4, 7, 9"),
        (
            [1.0, float("nan"), 2.0],
            "returned nan for sequence 7; expected a finite number. The response was 'yy'",
        ),
        ([1.0, 2.0, float("inf")], "returned inf for sequence 9"),
        (["1", 2.0, 3.0], "returned '1' for sequence 4"),
        (None, "returned NoneType; expected a list of 3 floats"),
        ("123", "returned str; expected a list of 3 floats"),
        (torch.ones(3), "returned Tensor; expected a list of 3 floats"),
    ],
)
def test_refuses_other_results(values: Any, text: str) -> None:
    def scores(prompts: list[str], responses: list[str], goal: list[int]) -> Any:
        return values

    with pytest.raises(ConfigError) as caught:
        call_reward(scores, "rew_inf", SAMPLES)
    assert text in str(caught.value)
    assert "calls.rew_inf: reward function" in str(caught.value)
    assert "scores" in str(caught.value)


def test_the_sequence_that_raises_is_named() -> None:
    def scores(prompts: list[str], responses: list[str], goal: list[int]) -> list[float]:
        return [1 / len(response) for response in responses]

    with pytest.raises(
        ConfigError, match=r"raised ZeroDivisionError: .*; sequence 9 alone makes it raise"
    ) as caught:
        call_reward(scores, "rew_inf", SAMPLES)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_sequences_that_only_raise_together_are_named() -> None:
    def scores(prompts: list[str], responses: list[str], goal: list[int]) -> list[float]:
        if len(prompts) > 1:
            raise ValueError("one at a time")
        return [1.0]

    with pytest.raises(ConfigError, match="only together do sequences 4, 7, 9 make it raise"):
        call_reward(scores, "rew_inf", SAMPLES)
