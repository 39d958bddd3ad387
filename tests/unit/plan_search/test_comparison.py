"""Predicted beside measured: by hand, and of a run that is its own simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan import ClusterSpec, Plan, Predicted
from megatron_real.plan_search.comparison import (
    MemoryRow,
    PredictedRun,
    compare,
    decisions_hash,
    instruction_seconds,
    iteration_seconds,
    predicted_simulation,
    priced_instructions,
)
from megatron_real.plan_search.presets import split
from megatron_real.plan_search.simulator import TransferTime, simulate
from megatron_real.program import Instruction, Program, Transfer, compile_program
from megatron_real.trace import Span, SpanKind

KINDS = {kind.value: kind for kind in SpanKind} | {"reload": SpanKind.OFFLOAD, "evaluation": SpanKind.OTHER}


class Prices:
    """Every instruction has a price of its own."""

    def seconds(self, instruction: Instruction) -> float:
        return 0.5 + len(instruction.name) / 16

    def transfer(self, instruction: Transfer) -> TransferTime:
        return TransferTime(0.125, 0.25, 0.0625)


def plan_of() -> Plan:
    layouts = {"actor": "d1t2p1", "actor_gen": "d2t1p1", "critic_train": "d1t1p2"}
    plan = split(ppo_graph(), ClusterSpec(devices_per_node=4), layouts=layouts)
    ref = plan.calls["ref_inf"].model_copy(update={"offload": "host"})
    return plan.model_copy(update={"calls": {**plan.calls, "ref_inf": ref}})


def priced_plan() -> tuple[Program, Plan]:
    plan = plan_of()
    program = compile_program(ppo_graph(), plan)
    predicted = Predicted(
        iteration_s=simulate(program, Prices()).period_s,
        peak_memory_bytes={"0": 1000, "3": 500},
        instructions=priced_instructions(program, Prices()),
        decisions=decisions_hash(plan),
    )
    return program, plan.model_copy(update={"predicted": predicted})


def test_a_plan_keeps_the_timeline_that_it_was_priced_with(tmp_path: Path) -> None:
    program, plan = priced_plan()
    plan.dump(tmp_path / "plan.json")
    read = compile_program(ppo_graph(), Plan.load(tmp_path / "plan.json"))
    simulation = predicted_simulation(read, iterations=3)
    assert simulation == simulate(program, Prices(), iterations=3)
    run = PredictedRun.of(plan.predicted, simulation)
    run.dump(tmp_path / "predicted.json")
    assert PredictedRun.load(tmp_path / "predicted.json") == run
    assert PredictedRun.load(tmp_path / "other.json") is None
    (tmp_path / "broken.json").write_text('{"iteration_s": 1.0}')
    with pytest.raises(ConfigError, match=r"broken\.json: found no prediction"):
        PredictedRun.load(tmp_path / "broken.json")


def test_an_edited_plan_has_no_timeline() -> None:
    _, plan = priced_plan()
    gen = plan.calls["actor_gen"].model_copy(update={"num_microbatches": 2})
    edited = plan.model_copy(update={"calls": {**plan.calls, "actor_gen": gen}})
    with pytest.raises(PlanError, match="edited after it was priced"):
        predicted_simulation(compile_program(ppo_graph(), edited))
    assert predicted_simulation(compile_program(ppo_graph(), plan_of())) is None
    only_calls = plan_of().model_copy(update={"predicted": Predicted(calls={"actor_gen": 1.0})})
    assert predicted_simulation(compile_program(ppo_graph(), only_calls)) is None


def test_a_run_that_is_its_simulation_has_a_ratio_of_one() -> None:
    program, plan = priced_plan()
    simulation = simulate(program, Prices(), iterations=5)
    predicted = PredictedRun.of(plan.predicted, simulate(program, Prices()))
    # As a run would have measured it: a wait is part of what it waits in.
    measured: list[Span] = []
    for span in simulation.spans:
        if measured and measured[-1].kind is SpanKind.WAIT:
            span = replace(span, start_s=measured.pop().start_s)
        measured.append(
            span if span.kind is not SpanKind.RUN else replace(span, facts={**span.facts, "joint": "x"})
        )
    result = compare(measured, predicted)
    assert result.iterations == 4
    assert result.iteration.ratio == pytest.approx(1.0)
    assert {row.name: row.ratio for row in result.rows} == {
        row.name: pytest.approx(1.0) for row in result.rows
    }
    names = [(str(row.kind), row.name) for row in result.rows]
    assert next(name for kind, name in names if kind == "run") == "actor_gen"
    assert ("realloc", "actor_gen") in names
    assert ("transfer", "actor_gen>critic_inf") in names
    assert [name for kind, name in names if kind == "offload"] == ["reload:ref", "offload:ref"]
    run = {
        item.name: Prices().seconds(item) for item in program.instructions if not isinstance(item, Transfer)
    }
    for row in result.rows:
        if row.kind is SpanKind.RUN:
            assert row.measured_s == pytest.approx(run[f"run:{row.name}"]), "without the waits"


def span(rank: int, iteration: int, name: str, start_s: float, end_s: float, **facts: object) -> Span:
    kind = KINDS[name.partition(":")[0]]
    return Span(
        rank=rank, iteration=iteration, name=name, kind=kind, start_s=start_s, end_s=end_s, facts=facts
    )


def two_iterations() -> list[Span]:
    """Rank 1 is late for the training of iteration 0, and sends late in iteration 1; a checkpoint lies between."""
    return [
        span(0, 0, "run:gen", 0, 2, peak_bytes=70),
        span(0, 0, "run:train", 2, 6, joint="0-1", peak_bytes=90),
        span(0, 0, "save", 6, 16),
        span(0, 1, "run:gen", 16, 19, peak_bytes=95),
        span(0, 1, "transfer:gen>lengths", 19, 20, side="gather"),
        span(0, 1, "transfer:rew>train", 20, 24, side="receive", **{"from": "1"}),
        span(0, 1, "run:train", 24.5, 28, joint="0-1"),
        span(1, 0, "run:rew", 0, 4),
        span(1, 0, "run:train", 4, 6, joint="0-1"),
        span(1, 0, "save", 6, 15),
        span(1, 1, "run:rew", 15, 22),
        span(1, 1, "transfer:rew>train", 22, 22.5, side="send"),
        span(1, 1, "run:train", 24, 28, joint="0-1"),
    ]


def test_what_is_measured_by_hand() -> None:
    spans = two_iterations()
    assert iteration_seconds(spans) == {0: 6, 1: 12}  # from the end of the checkpoint, 16, to 28
    result = compare(spans, None, warmup=0)
    assert {(row.name, row.measured_s) for row in result.rows} == {
        ("gen", 2.5),  # 2 and 3
        ("rew", 5.5),  # 4 and 7
        ("train", 2.75),  # 2, since rank 1 came at 4; 3.5, since rank 0 came at 24.5
        ("rew>train", 2.5),  # half a second of sending, and from 22, when the sender began, to 24
    }
    assert result.iteration.measured_s == 9.0
    assert result.iteration.predicted_s is None
    assert result.iteration.ratio is None
    assert result.memory == (MemoryRow(rank=0, predicted_bytes=None, measured_bytes=95),)
    # Rank 0 waits from 2 to 4 in training, and from 20 to 22 for what rank 1 sends; rank 1 from 24 to 24.5.
    assert result.waits == {0: pytest.approx(2.0), 1: pytest.approx(0.25)}
    # Rank 0: half a second before the training of iteration 1; rank 1: from 22.5 to 24 in iteration 1.
    assert result.between_s == pytest.approx((0.25 + 0.75) / 2)


def test_an_evaluation_is_in_no_iteration() -> None:
    spans = [
        span(*one)
        for one in ((0, 0, "evaluation", -5, 0), (0, 1, "evaluation", 16, 16.5), (0, 2, "evaluation", 28, 40))
    ]
    assert iteration_seconds([*two_iterations(), *spans]) == {0: 6, 1: 11.5}
    assert compare([*two_iterations(), *spans], None, warmup=0).iterations == 2


def test_iterations_of_the_warm_up_do_not_count_but_one_always_does() -> None:
    spans = two_iterations()
    assert compare(spans, None).iterations == 1
    assert compare(spans, None).iteration.measured_s == 12
    assert compare(spans, None, warmup=7).iteration.measured_s == 12
    with pytest.raises(ConfigError, match="found no spans"):
        compare([], None)


def test_rows_and_memory_that_only_one_side_knows() -> None:
    predicted = PredictedRun(
        iteration_s=6.0,
        peak_memory_bytes={"0": 100, "2": 50},
        spans=(span(0, 0, "run:gen", 0, 2), span(0, 0, "realloc:gen", 2, 3)),
    )
    result = compare(two_iterations(), predicted)
    rows = {row.name: (row.kind, row.predicted_s, row.measured_s) for row in result.rows}
    assert rows["gen"] == (SpanKind.REALLOC, 1.0, None)  # the later of two rows of this name
    assert rows["rew"] == (SpanKind.RUN, None, 7.0)
    assert result.iteration.ratio == 2.0
    assert [(row.rank, row.ratio) for row in result.memory] == [(0, pytest.approx(0.95)), (2, None)]


def test_the_median_of_the_slowest_rank() -> None:
    spans = [span(rank, i, "realloc:x", 0, (1 + rank) * (1 + i)) for rank in range(2) for i in range(3)]
    assert instruction_seconds(spans, {0, 1, 2}) == {(SpanKind.REALLOC, "realloc:x"): 4.0}


def test_what_a_call_waits_for_streamed_weights_is_the_reallocs() -> None:
    def span(rank: int, kind: SpanKind, start_s: float, end_s: float, **facts: float) -> Span:
        name = f"{kind.value}:actor_gen"
        return Span(rank=rank, iteration=0, name=name, kind=kind, start_s=start_s, end_s=end_s, facts=facts)

    spans = [
        span(0, SpanKind.REALLOC, 0.0, 0.125),
        span(0, SpanKind.RUN, 0.125, 1.125, stream_wait_s=0.25),
        span(1, SpanKind.REALLOC, 0.0, 0.0625),  # a rank that only sends goes on
    ]
    assert instruction_seconds(spans, {0}) == {
        (SpanKind.REALLOC, "realloc:actor_gen"): 0.375,
        (SpanKind.RUN, "run:actor_gen"): 0.75,
    }
