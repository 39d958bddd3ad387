"""The planning commands on graphs without a generation, with a single call, and with two generations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import graph_of
from megatron_real.cli.main import main
from megatron_real.plan import Plan
from megatron_real.plan_search.comparison import predicted_simulation
from megatron_real.program import compile_program
from megatron_real.trace import SpanKind

SMALL = ["workload.batch_size=8", "workload.prompt.mean=16", "workload.response.length=16"]
FUNCTIONS = ["workload.function_s.rew_inf=1e-4", "workload.function_s.greedy_rew_inf=1e-4"]
OPTIONS = {
    "dpo": [],
    "sft": [],
    "remax": ["algorithm.reward=function", *FUNCTIONS],
    "grpo": ["algorithm.reference_ema=0.5", "algorithm.reference_ema_every=2"],
}


@pytest.fixture(scope="module", params=OPTIONS)
def searched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "plan.json"
    options = [f"algorithm={request.param}", *OPTIONS[request.param], *SMALL, "search.time_s=5"]
    assert main(["search", "model=tiny", "cluster=cpu2", *options, f"output={path}"]) == 0
    return path


@pytest.mark.parametrize("command", ["simulate", "explain", "show"])
def test_what_is_read_of_a_plan(command: str, searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([command, str(searched)]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load(searched)
    assert all(name in printed for name in plan.calls)
    if command != "show":
        assert "executable: yes" in printed
        assert "estimated anew" not in printed, "for what it was searched"


def test_its_plan_beside_one_without_a_search(
    searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(searched)
    other = tmp_path / "symmetric.json"
    given = ["--reward", "function"] if plan.algorithm == "remax" else []
    made = ["plan", "symmetric", "--algorithm", plan.algorithm, *given, "--devices-per-node", "2"]
    assert main([*made, "--output", str(other)]) == 0
    capsys.readouterr()
    assert main(["diff", str(searched), str(other)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"│ period ", printed)
    assert "both are priced for what" in printed


@pytest.mark.parametrize("searched", ["remax"], indirect=True)
def test_two_generations_on_two_ranks_run_at_the_same_time(searched: Path) -> None:
    """The searched plan has them apart: each on a rank of its own."""
    plan = Plan.load(searched)
    assert not plan.calls["actor_gen"].mesh.overlaps(plan.calls["greedy_gen"].mesh)
    found = predicted_simulation(compile_program(graph_of("remax", reward="function"), plan))
    assert found is not None
    runs = {(span.iteration, span.subject): span for span in found.spans if span.kind is SpanKind.RUN}
    for iteration in range(4):
        one, other = runs[iteration, "actor_gen"], runs[iteration, "greedy_gen"]
        together = min(one.end_s, other.end_s) - max(one.start_s, other.start_s)
        assert together > 0.9 * min(one.duration_s, other.duration_s)


_OWN = """
from dataclasses import dataclass, replace
from megatron_real.algorithms.configs import TrainingConfig
from megatron_real.algorithms.graphs import grpo_graph, sft_graph
from megatron_real.algorithms.options import option
from megatron_real.algorithms.registry import AlgorithmDefinition

@dataclass(frozen=True, slots=True, kw_only=True)
class Groups(TrainingConfig):
    samples_per_prompt: int = option(6, at_least=2)

def pairs_graph():
    return replace(sft_graph(), pairs=True)

PAIRS = AlgorithmDefinition(name="pairs", graph=pairs_graph, config=TrainingConfig, algorithm=object)
GROUPS = AlgorithmDefinition(name="groups", graph=grpo_graph, config=Groups, algorithm=object)
"""


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("own_kinds:PAIRS", [], (1, 2)),
        ("own_kinds:GROUPS", [], (6, 1)),
        ("own_kinds:GROUPS", ["algorithm.samples_per_prompt=3"], (3, 1)),
        ("own_kinds:GROUPS", ["workload.group_size=2"], (2, 1)),
    ],
)
def test_an_algorithm_of_ones_own_says_how_many_sequences_there_are(
    name: str, more: list[str], expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_kinds.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "plan.json"
    argv = ["search", "model=tiny", "cluster=cpu2", f"algorithm.name={name}", *more, *SMALL]
    assert main([*argv, "search.strategy=greedy", f"output={output}"]) == 0
    plan = Plan.load(output)
    assert plan.algorithm == name
    assert plan.predicted is not None
    workload = (plan.predicted.model_extra or {})["inputs"]["workload"]
    assert (workload["group_size"], workload["unit"]) == expected
