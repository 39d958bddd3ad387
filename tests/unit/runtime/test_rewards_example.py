"""The rule-based checker of examples/rewards.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_real.backend import Samples
from megatron_real.runtime.rewards.functions import RewardFunctions, RewardLimits

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)


@pytest.mark.parametrize(
    ("response", "answer", "right", "form"),
    [
        ("It is <answer>42</answer>.", 42, 1.0, 1.0),
        ("<answer> 42.0 </answer>", "42", 1.0, 1.0),
        ("<answer>-1,000.5</answer>", -1000.5, 1.0, 1.0),
        ("<answer>1/2</answer>", 0.5, 1.0, 1.0),
        ("<answer>0.333</answer>", "1/3", 0.0, 1.0),
        ("<answer>41</answer>", 42, 0.0, 1.0),
        ("42", 42, 0.0, 0.0),
        ("<answer>42</answer> or <answer>43</answer>", 42, 0.0, 0.0),
        ("<answer>forty-two</answer>", 42, 0.0, 0.0),
        ("<answer>1/0</answer>", 42, 0.0, 0.0),
        ("<answer>4,2</answer>", 42, 0.0, 0.0),
        ("<answer>" + "4" * 100_000, 42, 0.0, 0.0),
        ("<answer>\u0664\u0662</answer>", 42, 0.0, 0.0),
        ("<answer>many</answer>", "many", 0.0, 0.0),
        ("", 42, 0.0, 0.0),
    ],
)
def test_answers_are_checked_exactly(response: str, answer: object, right: float, form: float) -> None:
    import rewards

    assert rewards.right_answer(["?"], [response], answer=[answer], level=["easy"]) == [right]
    assert rewards.answer_format(["?"], [response], answer=[answer]) == [form]


def test_both_functions_in_processes() -> None:
    given = Samples(
        ids=(0, 1, 2),
        prompts=("1 + 1 =", "2 + 2 =", "3 + 3 ="),
        responses=("<answer>2</answer>", "<answer>5</answer>", "6"),
        columns={"answer": (2, 4, 6)},
    )
    weights = {"rewards:right_answer": 1.0, "rewards:answer_format": 0.1}
    with RewardFunctions(weights, RewardLimits(processes=1)) as functions:
        assert functions.score("rew_inf", given) == [1.1, 0.1, 0.0]
