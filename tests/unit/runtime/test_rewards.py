"""Reward functions in the rank: how they are found, what they may return, and what becomes of those that fail."""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_real.backend import Samples
from megatron_real.errors import ConfigError
from megatron_real.reward_worker import Late, limited
from megatron_real.runtime.rewards import functions as rewards_module
from megatron_real.runtime.rewards.functions import (
    RewardFunctions,
    RewardLimits,
    load_function,
    reward_metrics,
)
from megatron_real.runtime.rewards.options import RewardOptions
from tests.unit.runtime import reward_functions

FUNCTIONS = "tests.unit.runtime.reward_functions"


def samples(responses: Sequence[str], **columns: Any) -> Samples:
    """Sequences 10, 11, ... with these responses."""
    return Samples(
        ids=tuple(range(10, 10 + len(responses))),
        prompts=tuple(f"prompt {i}" for i in range(len(responses))),
        responses=tuple(responses),
        columns={name: tuple(values) for name, values in columns.items()},
    )


def score(function: str, given: Samples, **limits: Any) -> tuple[list[float], dict[str, float]]:
    """Rewards with NaN as -1, which can be compared, and the counts."""
    with RewardFunctions({f"{FUNCTIONS}:{function}": 1.0}, RewardLimits(**limits)) as rewards:
        result = rewards.score("rew_inf", given)
        assert all(type(value) is float for value in result)
        return [-1.0 if math.isnan(value) else value for value in result], rewards.take_counts()


def missing(counts: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("missing/"): n for name, n in counts.items() if name.startswith("missing/")}


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
        RewardFunctions({name: 1.0})


@pytest.mark.parametrize(("size", "calls"), [(None, [3, 3, 3]), (1, [1, 1, 1]), (2, [2, 2, 1])])
def test_gets_prompts_responses_and_columns(size: int | None, calls: list[int]) -> None:
    given = samples(["x", "yy", ""], goal=(1, 2, 3))
    assert score("goals", given, sequences_per_call=size)[0] == [1.0, 2.0, 3.0]
    assert score("length", given, sequences_per_call=size)[0] == [1.0, 2.0, 0.0]
    assert score("batch_size", given, sequences_per_call=size)[0] == calls
    assert score("length", samples([]))[0] == []


@pytest.mark.parametrize(
    "values", [[1, 2, 3], (1.0, 2.0, 3.0), [numpy.float32(1), numpy.float64(2), numpy.int64(3)]]
)
def test_accepts_numbers(values: Any) -> None:
    result, counts = score("returns", samples("abc", value=[values] * 3))
    assert result == [1.0, 2.0, 3.0]
    assert counts == {
        "sequences": 3,
        f"sum/{FUNCTIONS}:returns": 6.0,
        f"values/{FUNCTIONS}:returns": 3,
    }


@pytest.mark.parametrize(
    ("values", "reason", "text"),
    [
        ([1.0, 2.0], "no_list", "returned 2 values; expected 3, one for each of the sequences 10, 11, 12"),
        (
            [1.0, float("nan"), 2.0],
            "not_finite",
            "returned nan for sequence 11; expected a finite number. The response was 'b'",
        ),
        ([1.0, 2.0, float("inf")], "not_finite", "returned inf for sequence 12"),
        ([1.0, 10**400, 3.0], "not_finite", "expected a number in the range of float32"),
        ([1.0, 1e39, 3.0], "not_finite", "returned 1e+39 for sequence 11"),
        (["1", 2.0, 3.0], "no_number", "returned '1' for sequence 10"),
        ([1.0, None, 3.0], "no_number", "returned None for sequence 11"),
        (None, "no_list", "returned NoneType; expected a list of 3 floats"),
        ("123", "no_list", "returned str; expected a list of 3 floats"),
        (torch.ones(3), "no_list", "returned Tensor; expected a list of 3 floats"),
    ],
)
def test_other_results(values: Any, reason: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    given = samples("abc", value=[values] * 3)
    with pytest.raises(ConfigError) as caught:
        score("returns", given, stop=True)
    assert text in str(caught.value)
    assert f"calls.rew_inf: reward function {FUNCTIONS}:returns returned " in str(caught.value)

    # Called again with one sequence each, it returns the same three values: no list of one.
    alone = {"no_list": 3} if reason == "no_list" else {reason: 1}
    result, counts = score("returns", given)
    assert missing(counts) == alone
    assert result.count(-1.0) == sum(alone.values())
    assert len(caplog.messages) == 1
    assert reason == "no_list" or text in caplog.messages[0]


def test_only_what_fails_alone_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    given = samples(["1", "raise", "2", "none", "3", "sys.exit", "inf"])
    result, counts = score("act", given)
    assert result == [1.0, -1.0, 2.0, -1.0, 3.0, -1.0, -1.0]
    assert counts == {
        "sequences": 7,
        "missing/raised": 2,
        "missing/no_number": 1,
        "missing/not_finite": 1,
        f"sum/{FUNCTIONS}:act": 6.0,
        f"values/{FUNCTIONS}:act": 3,
    }
    (message,) = caplog.messages
    assert "calls.rew_inf: 4 of 7 rewards did not come (2 raised, 1 no_number, 1 not_finite)" in message
    place = re.escape(reward_functions.__file__)
    assert re.search(
        rf"act raised ZeroDivisionError: division by zero \({place}:\d+\) for sequence 11\. The", message
    )
    assert score("act", given, sequences_per_call=2) == (result, counts)


def test_the_sequence_that_raises_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        score("act", samples(["1", "2", "raise"]), stop=True)
    assert re.search(r"raised ZeroDivisionError: .*; sequence 12 alone makes it raise", str(caught.value))


def test_sequences_that_only_raise_together() -> None:
    with pytest.raises(ConfigError, match="only together do sequences 10, 11, 12 make it raise"):
        score("alone", samples("abc"), stop=True)
    assert score("alone", samples("abc"))[0] == [1.0, 1.0, 1.0]


def test_a_late_function_is_interrupted() -> None:
    start = time.monotonic()
    result, counts = score("act", samples(["1", "hang", "2", "regex"]), timeout_s=0.2)
    assert (result, missing(counts)) == ([1.0, -1.0, 2.0, -1.0], {"late": 2})
    assert time.monotonic() - start < 3
    with pytest.raises(ConfigError, match=r"did not return within 0.2 s for sequences 10, 11"):
        score("act", samples(["1", "hang"]), timeout_s=0.2, stop=True)


def test_a_function_that_catches_everything_is_interrupted_again() -> None:
    start = time.monotonic()
    assert score("act", samples(["stubborn"]), timeout_s=0.1)[0] == [1.0]  # it sleeps for a minute, twice
    assert 1.0 < time.monotonic() - start < 10


def test_what_has_no_turn_in_the_time_for_the_batch_is_late() -> None:
    given = samples(["slow 0.2"] * 50)
    start = time.monotonic()
    result, counts = score("act", given, sequences_per_call=1, batch_timeout_s=0.5)
    assert time.monotonic() - start < 3
    assert result[0] == 1.0
    assert missing(counts) == {"late": result.count(-1.0)}
    assert result == sorted(result, reverse=True)


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """A handler of SIGALRM that notes when it is called."""
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda signum, frame: rung.append(signum))
    rest, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # of pytest-timeout
    yield rung
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, rest)


def test_a_timer_that_runs_already_goes_on(alarms: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    assert limited(lambda: 7, 5.0) == 7
    with pytest.raises(Late):
        limited(lambda: time.sleep(60), 0.05)
    assert alarms == []
    time.sleep(1.1)
    assert alarms == [signal.SIGALRM]


def test_nothing_rings_after_the_call(alarms: list[int]) -> None:
    limited(lambda: None, 0.05)
    with pytest.raises(Late):
        limited(lambda: time.sleep(60), 0.05)
    time.sleep(0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert alarms == []


def test_another_thread_than_the_main_one_has_no_limit() -> None:
    results: list[float] = []
    thread = threading.Thread(
        target=lambda: results.extend(score("act", samples(["slow 0.2"]), timeout_s=0.05)[0])
    )
    thread.start()
    thread.join()
    assert results == [1.0]


def test_weights_and_means() -> None:
    names = [f"{FUNCTIONS}:{name}" for name in ("length", "twos", "act")]
    rewards = RewardFunctions(dict(zip(names, (0.5, -2.0, 1.0), strict=True)))
    result = rewards.score("rew_inf", samples(["10", "300", "nan"]))
    assert result[:2] == [0.5 * 2 - 2.0 * 2 + 10, 0.5 * 3 - 2.0 * 2 + 300]
    assert math.isnan(result[2])
    first = rewards.take_counts()
    assert missing(first) == {"not_finite": 1}
    assert rewards.take_counts() == {}
    rewards.score("rew_inf", samples(["5", "raise"]))
    assert reward_metrics([first, rewards.take_counts()]) == {
        "missing/not_finite": 1,
        "missing/raised": 1,
        names[0]: (2 + 3 + 3 + 1 + 5) / 5,
        names[1]: 2.0,
        names[2]: (10 + 300 + 5) / 3,
    }
    assert reward_metrics([]) == {}


def test_a_sum_outside_of_float32_is_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    rewards = RewardFunctions({f"{FUNCTIONS}:length": 3e38})
    result = rewards.score("rew_inf", samples(["a", "bb"]))
    assert result[0] == 3e38
    assert math.isnan(result[1])
    assert "the weighted sum of [2.0] is outside the range of float32" in caplog.messages[0]
    assert missing(rewards.take_counts()) == {"not_finite": 1}


def test_failures_are_logged_once_per_batch_and_none_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rewards = RewardFunctions({f"{FUNCTIONS}:act": 1.0})
    for responses in (["nan", "raise"], ["1", "2"], ["3", "none"]):
        rewards.score("rew_inf", samples(responses))
    assert [message.split(";")[0] for message in caplog.messages if "calls." in message] == [
        "calls.rew_inf: 2 of 2 rewards did not come (1 not_finite, 1 raised)",
        "calls.rew_inf: 1 of 2 rewards did not come (1 no_number)",
    ]


def test_async_calls_run_at_once_and_fail_alone() -> None:
    responses = ["slow 0.3"] * 20 + ["hang", "raise", "cancel", "none", "4", "sys.exit"]
    start = time.monotonic()
    result, counts = score("act_async", samples(responses), timeout_s=1.0)
    assert time.monotonic() - start < 3  # 6 s one after the other
    assert result == [1.0] * 20 + [-1.0, -1.0, -1.0, -1.0, 4.0, -1.0]
    assert missing(counts) == {"late": 1, "raised": 3, "no_number": 1}


def test_an_async_function_that_blocks_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "_ASYNC_GRACE_S", 0.2)
    start = time.monotonic()
    result, counts = score("act_async", samples(["1", "block"]), timeout_s=0.1)
    assert time.monotonic() - start < 10
    assert (result, missing(counts)) == ([1.0, -1.0], {"late": 1})


def test_async_calls_of_a_run_share_an_event_loop() -> None:
    reward_functions.OPEN[:] = [0, 0]
    with RewardFunctions({f"{FUNCTIONS}:gated": 1.0, f"{FUNCTIONS}:judge": 1.0}) as rewards:
        for _ in range(2):
            assert rewards.score("rew_inf", samples(["a"] * 12)) == [6.0] * 12
    assert reward_functions.OPEN == [0, 3]
    assert score("gated", samples([]))[0] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:f", {"a:f": 1.0}),
        ({"functions": ["a:f"]}, {"a:f": 1.0}),
        ({"functions": [{"function": "a:f", "weight": 0.5}, "b:g"]}, {"a:f": 0.5, "b:g": 1.0}),
    ],
)
def test_short_forms_of_the_options(given: Any, expected: dict[str, float]) -> None:
    options = RewardOptions.model_validate(given)
    assert {each.function: each.weight for each in options.functions} == expected
    assert RewardOptions.model_validate_json(options.model_dump_json()) == options


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("length", "reward (--real-reward): found 'length'; expected module:function"),
        (
            {"functions": ["a:f", "b:"]},
            "reward.functions.1: found 'b:'; expected module:function",
        ),
        ({"functions": ["a:f", "a:f"]}, "reward.functions.1: found a:f for the second time; expected each"),
        (
            {"functions": ["a:f"], "timeout_s": 30},
            "reward.timeout_s: found 30; expected less than liveness.stuck_after_s=30, after which the run",
        ),
    ],
)
def test_problems_of_the_options(given: Any, text: str) -> None:
    (problem,) = RewardOptions.model_validate(given).problems(stuck_after_s=30)
    assert text in str(problem)


def test_time_limits_follow_from_the_liveness_limit() -> None:
    name = f"{FUNCTIONS}:act"
    start = time.monotonic()
    rewards = RewardFunctions.of(RewardOptions(functions=(name,)), stuck_after_s=2.0)
    assert math.isnan(rewards.score("rew_inf", samples(["hang"]))[0])  # a tenth of it
    assert 0.15 < time.monotonic() - start < 10
    stopping = RewardOptions.model_validate({"functions": [name], "on_failure": "stop"})
    with pytest.raises(ConfigError, match="sequence 11 alone makes it raise"):
        RewardFunctions.of(stopping).score("rew_inf", samples(["1", "raise"]))
