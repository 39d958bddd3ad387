"""Evaluations between the iterations of a fake run: what they find, what they leave, and that training does not notice.

The fake backend checks every value that it is handed, and knows what the right answers are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_real.algorithms.graphs import dpo_graph, remax_graph
from megatron_real.backend import Goal
from megatron_real.dataflow import Graph
from megatron_real.plan import Plan
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import compile_program
from megatron_real.runtime.data.dataset import ByteTokenizer
from megatron_real.runtime.evaluation.best import BestCheckpoint
from megatron_real.runtime.evaluation.evaluator import EvaluationConfig, Evaluator, evaluated_calls, observed
from megatron_real.runtime.execution.executor import RankExecutor, RunParts
from megatron_real.runtime.execution.transfer import DataTransfers, acquire_groups
from megatron_real.runtime.trainer import TrainConfig, train
from tests.distributed.fake_backend import FakeBackend, expected, prompts_of, response_length
from tests.distributed.fake_run import PLANS, SEQUENCES, make_executor, make_plan
from tests.harness import run_ranks

pytestmark = pytest.mark.dist

ITERATIONS, BATCHES, SAMPLES = 3, 2, 4
_REMAX = ("actor_gen", "greedy_gen", "rew_inf", "greedy_rew_inf", "actor_train")
CASES: dict[str, tuple[Graph | None, Plan, Goal]] = {
    "mixed": (None, PLANS["mixed"], Goal(metric="reward")),
    "mechanisms": (None, PLANS["mechanisms"], Goal(metric="reward")),
    "remax": (
        remax_graph(),
        make_plan(4, {"greedy_gen": "d1t2p1@2-3", "rew_inf": "d2t1p1@1-2"}, "d2t2p1@0-3", _REMAX, "remax"),
        Goal(metric="reward"),
    ),
    "dpo": (
        dpo_graph(),
        make_plan(4, {"ref_inf": "d1t1p2@1-2"}, "d2t1p2@0-3", ("ref_inf", "actor_train"), "dpo"),
        Goal(metric="twice", higher_is_better=False),
    ),
}


class _Sink:
    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], Any] = {}

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        self.rows[iteration, call or ""] = values

    def end_iteration(self, iteration: int) -> None:
        self.rows[iteration, "end"] = True

    def wait_written(self, iteration: int) -> None:
        pass


class _Data:
    def __init__(self, *, answers: bool) -> None:
        self.answers = answers

    def batch(self, iteration: int) -> Any:
        return prompts_of(iteration, SEQUENCES, answers=self.answers)


def _evaluation(
    executor: RankExecutor, backend: FakeBackend, goal: Goal, groups: ProcessGroups
) -> RankExecutor:
    """The executor of evaluations; the backend is told whose values it has to do with."""
    whole = executor.program
    program = compile_program(whole.graph, whole.plan, evaluation=evaluated_calls(whole.graph, goal))
    walker = RankExecutor(
        RunParts(
            program=program,
            rank=executor.rank,
            backend=backend,
            algorithm=executor.algorithm,
            transfers=DataTransfers(program, executor.rank, acquire_groups(groups, program), timeout_s=20.0),
            tokenizer=ByteTokenizer(),
            observers=observed(executor.observers),
        )
    )
    evaluate, generate = walker.evaluate, backend.generate

    def told(number: int, data: Any, held_out: Any) -> Any:
        backend.iteration = held_out.index
        return evaluate(number, data, held_out)

    def logged(copy: Any, call: Any, iteration: int, *rest: Any) -> Any:
        backend.log.append(("generate", call.name, iteration, rest[-1].greedy))
        return generate(copy, call, iteration, *rest)

    walker.evaluate, backend.generate = told, logged
    return walker


def _run(folder: str, evaluated: bool) -> list[dict[str, Any]]:
    groups = ProcessGroups(timeout_s=20)
    results = []
    for name, (graph, plan, goal) in CASES.items():
        executor, backend, recorder = make_executor(plan, groups, graph=graph, unit=2 if name == "dpo" else 1)
        answers = executor.program.graph.generation() is None
        recorder.before = lambda iteration, name, index, to=backend: (
            None if name.startswith("eval:") else setattr(to, "iteration", iteration)
        )
        prepare = executor.algorithm.prepare
        executor.algorithm.prepare = lambda call, iteration, scalars, to=backend, prepare=prepare: prepare(
            call, to.iteration, scalars
        )
        save = backend.save
        backend.save = lambda to, *rest, save=save: (to.mkdir(parents=True, exist_ok=True), save(to, *rest))
        evaluator = best = None
        if evaluated:
            executor.evaluation = _evaluation(executor, backend, goal, groups)
            batches = [prompts_of(index, SEQUENCES, answers=answers) for index in range(BATCHES)]
            best = BestCheckpoint(Path(folder) / name / "best", goal)
            config = EvaluationConfig(
                num_iterations=ITERATIONS, every=2, greedy=name == "remax", num_samples=SAMPLES
            )
            evaluator = Evaluator(config, goal, batches, best)
        sink = _Sink()
        config = TrainConfig(num_iterations=ITERATIONS, save_folder=Path("/tmp"), save_every=1)
        train(config, executor, _Data(answers=answers), sink, evaluator=evaluator)
        results.append(
            {
                "log": backend.log,
                "rows": sink.rows,
                "best": best.known if best is not None else None,
                "spans": recorder.spans,
                "resident": sorted(map(str, backend.versions.items())),
            }
        )
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[dict[str, dict[str, Any]]]]:
    """With evaluations and without: by rank, each case."""
    folder = str(tmp_path_factory.mktemp("evaluation"))
    return {
        evaluated: [dict(zip(CASES, rank, strict=True)) for rank in run_ranks(4, _run, folder, evaluated)]
        for evaluated in (True, False)
    }


def _trained(result: dict[str, Any]) -> list[Any]:
    """What a run did to its models, and saved of them."""
    return [entry for entry in result["log"] if entry[0] in ("train", "save") and "best" not in entry[1]]


@pytest.mark.parametrize("name", CASES)
def test_training_does_not_notice(name: str, runs: Any) -> None:
    for with_, without in zip(runs[True], runs[False], strict=True):
        assert _trained(with_[name]) == _trained(without[name])
        assert with_[name]["resident"] == without[name]["resident"]
        rows = {key: row for key, row in with_[name]["rows"].items() if not key[1].startswith("eval")}
        del rows[ITERATIONS, "end"]
        timed = ("seconds", "iteration")
        assert {key: row for key, row in rows.items() if key[1] not in timed} == {
            key: row for key, row in without[name]["rows"].items() if key[1] not in timed
        }


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_of_all_held_out_sequences(name: str, runs: Any) -> None:
    rows = {key[0]: row for key, row in runs[True][0][name]["rows"].items() if key[1] == "eval"}
    assert list(rows) == [0, 2, 3], "before the first iteration, every second one, and after the last"
    goal = CASES[name][2]
    sequences = [(batch, i) for batch in range(BATCHES) for i in range(SEQUENCES)]
    lengths = [response_length(batch, i) for batch, i in sequences]
    if name == "dpo":
        losses = [
            float(expected("advantages", batch, i, n).double().sum())
            for (batch, i), n in zip(sequences, lengths, strict=True)
        ]
        mean = 2 * sum(losses) / sum(lengths)
        # A ratio of means over pairs: its error from the residuals of each pair.
        pairs = [
            2 * (losses[i] + losses[i + 1]) - mean * (lengths[i] + lengths[i + 1])
            for i in range(0, len(losses), 2)
        ]
        error = math.sqrt(sum(r * r for r in pairs) * len(pairs) / (len(pairs) - 1)) / sum(lengths)
        right = {"loss": mean / 2, "twice": mean, "twice_error": error}
    else:
        rewards = [float(expected("rewards", batch, i, 1)) for batch, i in sequences]
        right = {
            "reward": statistics.fmean(rewards),
            "reward_error": statistics.stdev(rewards) / math.sqrt(len(rewards)),
            "response_length": statistics.fmean(lengths),
            "reward_missing": 0.0,
        }
    for row in rows.values():
        assert {name: value for name, value in row.items() if name != "duration_s"} == pytest.approx(right)
    # All ranks know the value: it decides whether a checkpoint is written.
    for rank in runs[True]:
        best = rank[name]["best"]
        assert (best.iteration, best.metric) == (0, goal.metric)
        assert best.value == pytest.approx(right[goal.metric])


def test_draws_are_apart_from_those_of_training(runs: Any) -> None:
    drawn = {entry[1:] for rank in runs[True] for entry in rank["remax"]["log"] if entry[0] == "generate"}
    evaluated = {entry for entry in drawn if entry[0].startswith("eval:")}
    assert evaluated == {("eval:actor_gen", batch, True) for batch in range(BATCHES)}, "only what is scored"
    assert drawn - evaluated == {
        (call, iteration, False) for call in ("actor_gen", "greedy_gen") for iteration in range(ITERATIONS)
    }


@pytest.mark.parametrize("name", ["mixed", "remax"])
def test_sequences_to_read_come_from_whoever_scored_them(name: str, runs: Any) -> None:
    told: dict[str, Any] = {}
    for rank in runs[True]:
        told |= rank[name]["rows"].get((2, "eval/samples"), {})
    assert sorted(told) == [
        f"{i}/rew_inf" for i in sorted(range(0, SEQUENCES, SEQUENCES // SAMPLES), key=str)
    ]
    for key, sample in told.items():
        i = int(key.partition("/")[0])
        assert sample["prompt"] == f"prompt {i}"
        assert sample["rewards"] == float(expected("rewards", 0, i, 1))


@pytest.mark.parametrize("name", CASES)
def test_the_best_is_written_once_while_nothing_is_better(name: str, runs: Any) -> None:
    for rank in runs[True]:
        saves = [entry for entry in rank[name]["log"] if entry[0] == "save" and "best" in entry[1]]
        assert [(Path(entry[1]).name, entry[2]) for entry in saves] == [("best.new", 0)]
        spans = [span for span in rank[name]["spans"] if span["name"] == "evaluation"]
        assert [span["iteration"] for span in spans] == [0, 2, 3]
