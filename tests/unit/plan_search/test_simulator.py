"""The simulator against schedules worked out by hand, and against a machine that walks each rank by itself."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per
from megatron_real.layout import parse_placement
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from megatron_real.plan_search.simulator import Simulation, TransferTime, simulate
from megatron_real.program import Instruction, Program, Save, Side, Step, Transfer, compile_program
from megatron_real.trace import Span, SpanKind
from tests.property.strategies import graphs, plans

FREE = TransferTime(0.0, 0.0, 0.0)


@dataclass
class Table:
    """Prices by instruction name; what is not named is free. Counts how often each was asked for."""

    calls: Mapping[str, float]
    transfers: Mapping[str, TransferTime] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def seconds(self, instruction: Instruction) -> float:
        self.asked[id(instruction)] += 1
        return self.calls.get(instruction.name, 0.0)

    def transfer(self, instruction: Transfer) -> TransferTime:
        self.asked[id(instruction)] += 1
        return self.transfers.get(instruction.name, FREE)


def call(name: str, model: str | None, kind: str, inputs: str = "", outputs: str = "") -> Call:
    return Call(
        name=name,
        model=model,
        type=CallType(kind),
        inputs=tuple(Input(key=key) for key in inputs.split()),
        outputs=tuple(outputs.split()),
    )


def program_of(calls: Iterable[Call], placements: Mapping[str, str], num_ranks: int) -> Program:
    """Compile `calls` on placements such as ``d2t1p1@0-1``."""
    calls = tuple(calls)
    keys = dict.fromkeys(key for made in calls for key in made.outputs)
    graph = Graph(
        name="hand",
        calls=calls,
        keys=tuple(KeySpec(name=key, per=Per.TOKEN, dtype="int64") for key in keys),
    )
    placed = {}
    for name, text in placements.items():
        mesh, layout = parse_placement(text)
        spec = LayoutSpec(dp=layout.dp, tp=layout.tp, pp=layout.pp)
        placed[name] = Placement(ranks=(mesh.start, mesh.stop), layout=spec)
    plan = Plan(algorithm="hand", cluster=ClusterSpec(devices_per_node=num_ranks), calls=placed)
    return compile_program(graph, plan)


def rows(simulation: Simulation, rank: int, iteration: int) -> list[tuple[str, float, float]]:
    """(what, from, to) of a rank, a wait marked."""
    return [
        (f"wait {span.name}" if span.kind is SpanKind.WAIT else span.name, span.start_s, span.end_s)
        for span in simulation.spans
        if (span.rank, span.iteration) == (rank, iteration)
    ]


def starts(simulation: Simulation, rank: int, name: str) -> list[float]:
    """When a rank was in `name`, iteration by iteration."""
    return [
        span.start_s
        for span in simulation.spans
        if span.rank == rank and span.name == name and span.kind is not SpanKind.WAIT
    ]


def approx_rows(*expected: tuple[str, float, float]) -> list[tuple[str, object, object]]:
    return [(name, pytest.approx(start), pytest.approx(end)) for name, start, end in expected]


def generate_score_train() -> Program:
    """Generation on both ranks, scoring on rank 1, training on rank 0."""
    return program_of(
        [
            call("gen", "actor", "generate", outputs="tokens"),
            call("rew", None, "inference", "tokens", "rewards"),
            call("train", "actor", "train", "tokens rewards"),
        ],
        {"gen": "d2t1p1@0-1", "rew": "d1t1p1@1-1", "train": "d1t1p1@0-0"},
        2,
    )


def test_two_ranks_with_a_reallocation_in_between() -> None:
    """The trained weights are on rank 0, so that both ranks meet in the reallocation at the start."""
    travel = TransferTime(0.25, 0.5, 0.125)
    names = ("transfer:gen>rew", "transfer:gen>train", "transfer:rew>train")
    prices = Table(
        {"realloc:gen": 0.5, "run:gen": 2.0, "run:rew": 1.0, "run:train": 3.0}, dict.fromkeys(names, travel)
    )
    result = simulate(generate_score_train(), prices)
    # Scoring: the tokens leave at 2.75 and are there at 3.25; rank 1 itself is done with sending at 3.
    assert rows(result, 1, 0) == approx_rows(
        ("realloc:gen", 0.0, 0.5),
        ("run:gen", 0.5, 2.5),
        ("transfer:gen>rew", 2.5, 2.75),
        ("transfer:gen>train", 2.75, 3.0),
        ("wait transfer:gen>rew", 3.0, 3.25),
        ("transfer:gen>rew", 3.25, 3.375),
        ("run:rew", 3.375, 4.375),
        ("transfer:rew>train", 4.375, 4.625),
    )
    # Training: rank 0 unpacks the tokens as soon as they are there, then waits for the rewards until 5.125.
    assert rows(result, 0, 0) == approx_rows(
        ("realloc:gen", 0.0, 0.5),
        ("run:gen", 0.5, 2.5),
        ("transfer:gen>rew", 2.5, 2.75),
        ("transfer:gen>train", 2.75, 3.0),
        ("wait transfer:gen>train", 3.0, 3.5),
        ("transfer:gen>train", 3.5, 3.625),
        ("wait transfer:rew>train", 3.625, 5.125),
        ("transfer:rew>train", 5.125, 5.25),
        ("run:train", 5.25, 8.25),
    )
    assert rows(result, 1, 1)[:2] == approx_rows(
        ("wait realloc:gen", 4.625, 8.25), ("realloc:gen", 8.25, 8.75)
    )
    assert result.first_iteration_s == result.period_s == pytest.approx(8.25)
    path = [(step.name, step.iteration) for step in result.critical_path]
    assert path == [
        (name, 3)
        for name in (
            "realloc:gen", "run:gen", "transfer:gen>rew", "transfer:gen>rew", "run:rew", "transfer:rew>train",
            "transfer:rew>train", "run:train",
        )
    ]  # fmt: skip
    assert set(prices.asked.values()) == {1}


def two_models(critic_train_s: float) -> Simulation:
    """Actor on rank 0, critic on rank 1; the actor's training needs the critic's values."""
    program = program_of(
        [
            call("gen", "actor", "generate", outputs="tokens"),
            call("critic_inf", "critic", "inference", "tokens", "values"),
            call("train", "actor", "train", "tokens values"),
            call("critic_train", "critic", "train", "tokens values"),
        ],
        dict.fromkeys(("gen", "train"), "d1t1p1@0-0")
        | dict.fromkeys(("critic_inf", "critic_train"), "d1t1p1@1-1"),
        2,
    )
    calls = {"run:gen": 2.0, "run:critic_inf": 1.0, "run:train": 3.0, "run:critic_train": critic_train_s}
    return simulate(program, Table(calls))


def test_the_critics_training_overlaps_the_next_generation() -> None:
    short = two_models(4.0)
    assert starts(short, 1, "run:critic_train") == [3, 9, 15, 21]  # each until 7, 13, ...
    assert starts(short, 0, "run:gen") == [0, 6, 12, 18]
    assert short.period_s == 6  # gen, critic_inf, train: the critic waits for the next tokens
    assert [step.name.partition(":")[2] for step in short.critical_path][-1] == "critic_train"
    # Longer than generation and training together: now rank 1 is always busy, and the generation still overlaps.
    long = two_models(6.0)
    assert starts(long, 1, "run:critic_train") == [3, 10, 17, 24]
    assert starts(long, 0, "run:gen") == [0, 6, 13, 20]
    assert long.period_s == 7
    busy = [span for span in long.spans if span.rank == 1 and span.iteration > 1]
    assert not any(span.kind is SpanKind.WAIT and span.duration_s > 0 for span in busy)


def test_a_fast_producer_is_held_back_by_what_it_has_sent() -> None:
    """A sender gives back a buffer at the end of the next iteration: so it is at most two iterations ahead."""
    program = program_of(
        [
            call("gen", "writer", "generate", outputs="tokens"),
            call("inf", "reader", "inference", "tokens", "out"),
        ],
        {"gen": "d1t1p1@0-0", "inf": "d1t1p1@1-1"},
        2,
    )
    result = simulate(program, Table({"run:gen": 1.0, "run:inf": 3.0}), iterations=6)
    assert starts(result, 1, "run:inf") == [1, 4, 7, 10, 13, 16]
    # What was sent in iteration 1 is received at 4, when the first reading is over; that of iteration 2 at 7.
    assert starts(result, 0, "run:gen") == [0, 1, 2, 4, 7, 10]
    assert result.period_s == 3
    # The path to the end of iteration 5 is the reader's: no generation is on it.
    path = [(step.name, step.iteration) for step in result.critical_path if step.seconds > 0]
    assert path == [("run:inf", 5)]


def test_unconnected_ranks_have_the_slower_ones_period() -> None:
    program = program_of(
        [call("gen", "a", "generate", outputs="tokens"), call("other", "b", "inference", "", "out")],
        {"gen": "d1t1p1@0-0", "other": "d1t1p1@1-1"},
        2,
    )
    assert simulate(program, Table({"run:gen": 1.0, "run:other": 4.0})).period_s == 4


def oracle(
    program: Program, prices: Table, iterations: int
) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(rank, iteration, step) -> (start, end), each rank by itself and by recursion, as the runtime is documented.

    A step starts when the one before is over and, of a whole instruction, its ranks are there, of a receive, what was
    sent is there. An iteration ends when what was sent in the iteration before has been received.
    """
    steps = {
        rank: [s for s in program.steps(rank) if not isinstance(s.instruction, Save)]
        for rank in range(program.world_size)
    }
    at: dict[tuple[int, int, Side], int] = {
        (rank, step.index, step.side): position
        for rank, mine in steps.items()
        for position, step in enumerate(mine)
    }

    @cache
    def times(rank: int, iteration: int, position: int) -> tuple[float, float]:
        step = steps[rank][position]
        start = ready(rank, iteration, position)
        instruction = step.instruction
        if step.side is Side.WHOLE:
            start = max(ready(r, iteration, at[r, step.index, Side.WHOLE]) for r in instruction.ranks)
            return start, start + prices.calls.get(instruction.name, 0.0)
        assert isinstance(instruction, Transfer)
        price = prices.transfers.get(instruction.name, FREE)
        if step.side is Side.SEND:
            return start, start + price.send_s
        sent = max(times(r, iteration, at[r, step.index, Side.SEND])[1] for r in instruction.source.ranks)
        start = max(start, sent + price.wire_s)
        return start, start + price.receive_s

    @cache
    def ready(rank: int, iteration: int, position: int) -> float:
        if position > 0:
            return times(rank, iteration, position - 1)[1]
        return over(rank, iteration - 1)

    @cache
    def over(rank: int, iteration: int) -> float:
        """When a rank is done with an iteration."""
        if iteration < 0:
            return 0.0
        mine = steps[rank]
        end = times(rank, iteration, len(mine) - 1)[1] if mine else over(rank, iteration - 1)
        if iteration == 0:
            return end
        taken = [
            times(target, iteration - 1, at[target, step.index, Side.RECEIVE])[1]
            for step in mine
            if step.side is Side.SEND and isinstance(step.instruction, Transfer)
            for target in step.instruction.targets
        ]
        return max([end, *taken])

    result = {}
    for iteration in range(iterations):
        for rank, mine in steps.items():
            for position in range(len(mine)):
                result[rank, iteration, position] = times(rank, iteration, position)
            over(rank, iteration)
    return result


@st.composite
def priced_programs(draw: st.DrawFn) -> tuple[Program, Table]:
    graph = draw(graphs())
    program = compile_program(graph, draw(plans(graph, draw(st.integers(1, 6)))))
    seconds = st.integers(0, 8).map(lambda n: n / 4)
    calls: dict[str, float] = {}
    transfers: dict[str, TransferTime] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Transfer):
            transfers[instruction.name] = TransferTime(
                draw(seconds) / 8, draw(seconds) / 8, draw(seconds) / 8
            )
        else:
            calls.setdefault(instruction.name, draw(seconds))
    return program, Table(calls, transfers)


@settings(max_examples=80, deadline=None)
@given(priced_programs())
def test_every_rank_does_what_it_would_do_by_itself(case: tuple[Program, Table]) -> None:
    program, prices = case
    iterations = 5
    result = simulate(program, prices, iterations=iterations)
    right = oracle(program, prices, iterations)
    for rank in range(program.world_size):
        mine = [span for span in result.spans if span.rank == rank]
        for before, after in itertools.pairwise(mine):
            assert before.end_s <= after.start_s, "spans of a rank do not overlap"
        worked = [span for span in mine if span.kind is not SpanKind.WAIT]
        expected = [
            (step.name, _side(step), iteration, *right[rank, iteration, position])
            for iteration in range(iterations)
            for position, step in enumerate(program.steps(rank))
            if not isinstance(step.instruction, Save)
        ]
        found = [(s.name, s.facts.get("side"), s.iteration, s.start_s, s.end_s) for s in worked]
        assert found == expected, f"rank {rank}"
        _check_waits(mine)


def _side(step: Step) -> str | None:
    return None if step.side is Side.WHOLE else step.side.value


def _check_waits(spans: list[Span]) -> None:
    for span, after in itertools.pairwise(spans):
        if span.kind is SpanKind.WAIT:
            assert (after.name, after.iteration, after.start_s) == (span.name, span.iteration, span.end_s)


@settings(max_examples=60, deadline=None)
@given(priced_programs())
def test_the_period_is_the_growth_in_the_long_run(case: tuple[Program, Table]) -> None:
    program, prices = case
    many, lag = 90, 60  # 60 iterations hold a whole number of cycles of up to six iterations
    right = oracle(program, prices, many)

    def end(iteration: int) -> dict[int, float]:
        ends: dict[int, float] = {}
        for (rank, number, _), (_, stop) in right.items():
            if number == iteration:
                ends[rank] = max(ends.get(rank, 0.0), stop)
        return ends

    late, early = end(many - 1), end(many - 1 - lag)
    growth = max(((late[rank] - early[rank]) / lag for rank in late), default=0.0)
    assert simulate(program, prices).period_s == pytest.approx(growth, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(priced_programs(), st.data())
def test_longer_instructions_never_shorten_the_period(
    case: tuple[Program, Table], data: st.DataObject
) -> None:
    program, prices = case
    if not prices.calls:
        return
    name = data.draw(st.sampled_from(sorted(prices.calls)))
    slower = Table({**prices.calls, name: prices.calls[name] + 1.5}, prices.transfers)
    assert simulate(program, slower).period_s >= simulate(program, prices).period_s - 1e-9
