"""Drift on synthetic traces: nothing is said of what was planned for, and soon of what was not."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.plan import ClusterSpec, Predicted
from megatron_real.plan_search.presets import split
from megatron_real.program import Program, compile_program
from megatron_real.runtime.reports.drift import CuSum, DriftMonitor, Priced, PricedLengths, other_workload
from megatron_real.runtime.reports.metrics import (
    RESPONSE,
    SECONDS,
    IterationRecorder,
    MetricsWriter,
    fold,
    meetings,
    read_metrics,
)

CAP = 1024
Draw = Callable[[random.Random], int]


def lognormal(mean: float, spread: float = 0.6) -> Draw:
    mu = math.log(mean) - spread**2 / 2
    return lambda source: min(CAP, max(1, round(source.lognormvariate(mu, spread))))


def workload_of(draw: Draw, quantile: float = 0.99) -> dict[str, Any]:
    """As a plan has it: a histogram of very many responses."""
    source = random.Random(7)
    counts: dict[int, int] = {}
    for _ in range(200_000):
        length = draw(source)
        counts[length] = counts.get(length, 0) + 1
    lengths = sorted(counts)
    weights = [round(counts[n] / 200_000, 8) for n in lengths]
    return {
        "batch_size": 64,
        "memory_quantile": quantile,
        "response": {"lengths": lengths, "weights": weights},
    }


PLANNED = lognormal(200)
WORKLOAD = workload_of(PLANNED)
CALLS = {"actor_gen": 2.0, "actor_train": 1.0}


def predicted(**extra: Any) -> Predicted:
    return Predicted(calls=CALLS, **{"inputs": {"workload": WORKLOAD}, **extra})


def monitor() -> DriftMonitor:
    priced = Priced.of(predicted())
    assert priced is not None
    return DriftMonitor(priced)


def kinds(
    watch: DriftMonitor, draws: Sequence[Draw], batch: int, seed: int, seconds: dict[str, float] | None = None
) -> list[tuple[int, str]]:
    """(iteration, kind) of what is said."""
    source = random.Random(seed)
    said = []
    for iteration, draw in enumerate(draws):
        notices = watch.observe([draw(source) for _ in range(batch)], seconds or {})
        said += [(iteration, notice.kind) for notice in notices]
    return said


@pytest.mark.parametrize("batch", [4, 16, 64, 512])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_said_of_what_was_planned_for(batch: int, seed: int) -> None:
    assert kinds(monitor(), [PLANNED] * 400, batch, seed) == []


@pytest.mark.parametrize(("factor", "soon"), [(1.25, 15), (1.5, 4), (3.0, 2), (0.7, 8), (0.4, 3)])
def test_another_mean_is_noticed_soon(factor: float, soon: int) -> None:
    for seed in range(5):
        said = kinds(monitor(), [PLANNED] * 50 + [lognormal(200 * factor)] * 30, 256, seed)
        when = [iteration - 50 for iteration, kind in said if kind == "response mean"]
        assert len(when) == 1, said
        assert 0 <= when[0] < soon, when


def test_a_slow_rise_is_noticed_before_it_has_gone_far() -> None:
    """1 % per iteration: reported by the time the mean is 40 % off."""
    draws = [lognormal(200 * 1.01**i) for i in range(80)]
    said = {kind: iteration for iteration, kind in kinds(monitor(), draws, 128, 1)}
    assert 10 <= said["response mean"] <= 34


def test_a_longer_tail_is_noticed_though_the_mean_stays() -> None:
    """One in twenty responses is far beyond the planned 99 %, the others are shorter."""
    short, far = lognormal(160), WORKLOAD["response"]["lengths"][-2]
    tailed: Draw = lambda source: far if source.random() < 0.05 else short(source)  # noqa: E731
    for seed in range(5):
        said = kinds(monitor(), [PLANNED] * 30 + [tailed] * 20, 64, seed)
        assert [kind for _, kind in said] == ["long responses"]
        assert 30 <= said[0][0] < 45


def test_a_response_beyond_the_cap_is_told_at_once_and_once() -> None:
    watch = monitor()
    assert watch.observe([200] * 64, {}) == ()
    (notice,) = watch.observe([200] * 63 + [CAP + 1], {})
    assert notice.kind == "response cap"
    assert f"found a response of {CAP + 1} tokens; the plan was priced for at most {CAP}" in str(notice)
    assert watch.observe([200] * 63 + [CAP + 2], {}) == ()


def test_a_constant_length_has_no_tail_to_watch() -> None:
    priced = Priced.of(Predicted(inputs={"workload": {"response": {"length": 32}}}))
    assert priced is not None
    assert priced.lengths == PricedLengths(mean=32, deviation=0, long=32, long_share=0, cap=32)
    watch = DriftMonitor(priced)
    assert all(watch.observe([32] * 16, {"actor_gen": 5.0}) == () for _ in range(50))
    assert [notice.kind for _ in range(5) for notice in watch.observe([20] * 16, {})] == ["response mean"]


def run_times(ratios: Sequence[float], watch: DriftMonitor | None = None) -> list[tuple[int, str, str]]:
    watch = watch or monitor()
    said = []
    for iteration, ratio in enumerate(ratios):
        notices = watch.observe([], {"actor_gen": 2.0 * ratio, "actor_train": 1.0})
        said += [(iteration, notice.kind, str(notice)) for notice in notices]
    return said


def test_a_call_that_takes_longer_is_told_after_some_iterations() -> None:
    assert run_times([1.4, 0.7, 1.2, 1.45] * 50) == []
    for ratio in (2.0, 10.0):
        ((iteration, kind, text),) = run_times([1.0] * 20 + [ratio] * 20)
        assert (iteration, kind) == (23, "time of actor_gen")
        assert "times the 2 s that the plan was priced with; expected a ratio of 0.67 to 1.5" in text
        assert "profile this machine anew" in text
    ((iteration, _, _),) = run_times([1.0] * 20 + [0.4] * 20)
    assert iteration == 23


def test_single_slow_iterations_are_no_drift() -> None:
    assert run_times([30.0]) == [], "the first iteration of a run is always slow"
    assert run_times(([1.0] * 9 + [20.0]) * 20) == []


def test_what_sways_around_the_limit_is_told_once_and_a_relapse_again() -> None:
    source = random.Random(3)
    sway = [1.6 * math.exp(source.gauss(0, 0.2)) for _ in range(200)]
    assert len(run_times(sway)) == 1
    again = run_times([2.0] * 20 + [1.0] * 20 + [2.0] * 20)
    assert [iteration for iteration, _, _ in again] == [4, 43]


def test_slow_calls_of_longer_responses_ask_for_a_new_plan_and_not_a_new_profile() -> None:
    watch = monitor()
    texts = [
        str(notice)
        for _ in range(10)
        for notice in watch.observe([600] * 64, {"actor_gen": 6.0, "actor_train": 1.0})
    ]
    assert sum("search a new plan with the new lengths" in text for text in texts) == 1
    assert not any("profile" in text for text in texts)


def test_the_sums_by_hand() -> None:
    """Slack 0.1, limit 0.3: values of 0.25 add 0.15 each."""
    sums = CuSum(slack=0.1, limit=0.31)
    assert [sums.add(0.25) for _ in range(4)] == [0, 0, 1, 0]
    sums = CuSum(slack=0.1, limit=0.31)
    assert [sums.add(x) for x in (0.25, -0.1, 0.25, 0.25, 0.25)] == [
        0,
        0,
        0,
        0,
        1,
    ]  # 0.15, 0, 0.15, 0.3, 0.45
    sums = CuSum(slack=0.1, limit=0.31, steps=4)  # at most 0.31 / 3.5 each
    assert [sums.add(-9.0) for _ in range(5)] == [0, 0, 0, -1, 0]


def test_plans_without_a_prediction_are_not_watched() -> None:
    assert Priced.of(None) is None
    assert Priced.of(Predicted(iteration_s=3.0)) is None
    only_calls = Priced.of(Predicted(calls={"actor_gen": 1.0, "rew_inf": 0.0}))
    assert only_calls == Priced(lengths=None, calls={"actor_gen": 1.0})
    assert DriftMonitor(only_calls).observe([5], {"actor_gen": 1.0}) == ()


def test_the_planned_lengths_by_hand() -> None:
    workload = {"memory_quantile": 0.75, "response": {"lengths": [10, 20, 40], "weights": [0.5, 0.3, 0.2]}}
    lengths = PricedLengths.of(workload)
    assert lengths is not None
    assert lengths.mean == pytest.approx(19.0)
    assert lengths.deviation == pytest.approx(math.sqrt(50 + 120 + 320 - 19**2))
    assert (lengths.long, lengths.cap) == (20, 40)
    assert lengths.long_share == pytest.approx(0.2)
    assert PricedLengths.of({}) is None
    assert PricedLengths.of({"response": {"lengths": [1, 2], "weights": [1.0]}}) is None


def test_a_run_of_other_numbers_than_the_plan_was_priced_for() -> None:
    run = {"batch_size": 64, "num_minibatches": 4, "max_new_tokens": CAP}
    assert other_workload(None, run) is None
    assert other_workload(predicted(), run) is None  # of the minibatches the plan does not say anything
    text = other_workload(predicted(), {**run, "batch_size": 32, "max_new_tokens": 2 * CAP})
    assert text is not None
    assert f"found batch_size=32 (priced for 64), max_new_tokens={2 * CAP} (priced for {CAP});" in text


def four_ranks() -> Program:
    layouts = {"actor": "d1t2p1", "actor_gen": "d2t1p1", "critic_inf": "d2t1p1"}
    return compile_program(
        ppo_graph("function"), split(ppo_graph("function"), ClusterSpec(devices_per_node=4), layouts=layouts)
    )


def test_a_calls_seconds_are_those_of_who_waits_for_nobody() -> None:
    """Of a tensor-parallel pair the later rank counts, of replicas that do not meet the slower one."""
    together = meetings(four_ranks())
    assert together["actor_gen"] == ((0,), (1,))
    assert together["actor_train"] == ((0, 1),)
    assert together["critic_train"] == ((2, 3),)  # replicas meet in training
    assert together["critic_inf"] == together["rew_inf"] == ((2,), (3,))
    told = {
        "actor_gen/0": 2.0,
        "actor_gen/1": 3.0,
        "actor_train/0": 5.0,  # waited for rank 1
        "actor_train/1": 4.0,
        "critic_inf/2": 1.0,
        "critic_inf/3": 1.5,
        "critic_train/2": 2.0,  # rank 3 has not told
    }
    folded = fold({SECONDS: told, RESPONSE: {"lengths": (1, 2, 3, 10)}, None: {"reward": 1.0}}, together)
    assert folded == {
        None: {"reward": 1.0},
        "seconds": {"actor_gen": 3.0, "actor_train": 4.0, "critic_inf": 1.5},
        "response": {"mean": 4.0, "p50": 2, "p99": 10, "max": 10},
    }
    assert fold({None: {"reward": 1.0}}, together) == {None: {"reward": 1.0}}


def test_the_recorder_writes_rows_and_lengths_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = four_ranks()
    priced = program.plan.model_copy(update={"predicted": predicted()})
    recorder = IterationRecorder(MetricsWriter(tmp_path, tensorboard=False), replace(program, plan=priced))
    with caplog.at_level(logging.WARNING, logger="megatron_real"):
        for iteration in range(8):
            told = {"actor_train/0": 1.0, "actor_train/1": 1.0, "actor_gen/0": 2.0, "actor_gen/1": 9.0}
            metrics = {RESPONSE: {"lengths": [190 + iteration] * 64}, SECONDS: told}
            recorder.take(iteration, metrics)
    recorder.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("iteration 5: drift: found actor_gen to take 9 s")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[3]["seconds/actor_gen"] == 9.0
    assert rows[3]["response/mean"] == 193
    lengths = json.loads((tmp_path / "response_lengths.json").read_text())
    assert lengths == [190 + i for i in range(8) for _ in range(64)]


def test_after_a_change_of_plan_calls_are_those_of_the_new_one(tmp_path: Path) -> None:
    """Under the later plan the actor generates as one group of two ranks: the last one to come tells the time."""
    program = four_ranks()
    layouts = {"actor": "d1t2p1", "actor_gen": "d1t2p1", "critic_inf": "d2t1p1"}
    graph = ppo_graph("function")
    later = compile_program(graph, split(graph, ClusterSpec(devices_per_node=4), layouts=layouts))
    recorder = IterationRecorder(MetricsWriter(tmp_path, tensorboard=False), program, later={2: later})
    for iteration in range(4):
        recorder.take(iteration, {SECONDS: {"actor_gen/0": 2.0, "actor_gen/1": 3.0}})
    recorder.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["seconds/actor_gen"] for row in rows] == [3.0, 3.0, 2.0, 2.0]
