"""Spans: writing and reading, waits split off by hand-worked cases, and the Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_real.errors import ConfigError
from megatron_real.trace import Span, SpanKind, Tracer, attribute_waits, read_spans, write_chrome_trace


def span(
    rank: int, name: str, kind: str, start_s: float, end_s: float, iteration: int = 0, **facts: object
) -> Span:
    return Span(
        rank=rank,
        iteration=iteration,
        name=name,
        kind=SpanKind(kind),
        start_s=start_s,
        end_s=end_s,
        facts=facts,
    )


def cut(spans: tuple[Span, ...]) -> list[tuple[int, str, float, float]]:
    return [(item.rank, item.kind.value, item.start_s, item.end_s) for item in spans]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for rank in (1, 0):
        tracer = Tracer(tmp_path, rank)
        with tracer.span("run:actor_gen", "run", 3, type="generate", model="actor") as measured:
            measured.facts["tokens"] = 7
        with pytest.raises(KeyError), tracer.span("save", SpanKind.SAVE, 3):
            raise KeyError("x")
        tracer.close()
    spans = read_spans(tmp_path)
    assert [(item.rank, item.name, item.iteration, item.kind) for item in spans] == [
        (rank, name, 3, kind)
        for rank in (0, 1)
        for name, kind in (("run:actor_gen", SpanKind.RUN), ("save", SpanKind.SAVE))
    ]
    assert spans[0].facts == {"type": "generate", "model": "actor", "tokens": 7}
    assert spans[1].facts == {"error": "KeyError"}
    assert 0 <= spans[0].duration_s < 1
    assert spans[1].start_s >= spans[0].end_s


def test_a_killed_rank_leaves_whole_spans(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, 0)
    for iteration in range(3):
        with tracer.span("save", "save", iteration):
            pass
    text = tracer.path.read_text()  # not closed: every line is out already
    assert text.count("\n") == 3
    tracer.path.write_text(text[:-30])
    assert [item.iteration for item in read_spans(tmp_path)] == [0, 1]
    Tracer(tmp_path, 0)
    assert read_spans(tmp_path) == (), "a resumed run has a trace of its own"


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"rank": 0}\n{}\n')
    with pytest.raises(ConfigError, match=r"rank-0.jsonl:1: found"):
        read_spans(tmp_path)


def test_a_realloc_waits_for_its_last_participant() -> None:
    spans = [
        span(0, "realloc:actor_gen", "realloc", 1, 6),
        span(1, "realloc:actor_gen", "realloc", 4, 6),
        span(
            2, "realloc:actor_gen", "realloc", 2, 3
        ),  # done before rank 1 came: it waited for rank 0 at most
        span(0, "realloc:actor_gen", "realloc", 11, 12, iteration=1),
        span(1, "realloc:actor_gen", "realloc", 10, 12, iteration=1),
    ]
    assert cut(attribute_waits(spans)) == [
        (0, "wait", 1, 4),
        (0, "realloc", 4, 6),
        (0, "realloc", 11, 12),
        (1, "realloc", 4, 6),
        (1, "wait", 10, 11),
        (1, "realloc", 11, 12),
        (2, "realloc", 2, 3),
    ]


def test_a_receive_waits_for_its_sender() -> None:
    name = "transfer:actor_gen>ref_inf"
    spans = [
        span(0, "run:actor_gen", "run", 0, 5),
        span(0, name, "transfer", 5, 5.5, side="send"),
        span(2, name, "transfer", 1, 6, side="receive", bytes=8),
        span(3, name, "transfer", 5.2, 6, side="receive"),
        span(
            2, "transfer:other", "transfer", 6, 7, side="receive"
        ),  # no sender known: nothing is said about it
    ]
    result = attribute_waits(spans)
    assert cut(result) == [
        (0, "run", 0, 5),
        (0, "transfer", 5, 5.5),
        (2, "wait", 1, 5),
        (2, "transfer", 5, 6),
        (2, "transfer", 6, 7),
        (3, "transfer", 5.2, 6),
    ]
    assert result[2].name == name
    assert result[2].facts["bytes"] == 8
    assert sum(item.duration_s for item in result) == pytest.approx(sum(item.duration_s for item in spans))
    assert attribute_waits(result) == result, "splitting twice changes nothing"


def test_chrome_trace(tmp_path: Path) -> None:
    spans = [
        span(1, "run:actor_gen", "run", 100.5, 102, iteration=2, tokens=3),
        span(0, "realloc:actor_gen", "wait", 100, 100.25),
    ]
    path = tmp_path / "trace" / "chrome.json"
    write_chrome_trace(spans, path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    complete = [event for event in events if event["ph"] == "X"]
    assert complete[0] == {
        "ph": "X",
        "name": "run:actor_gen",
        "cat": "run",
        "pid": 1,
        "tid": 0,
        "ts": 500000.0,
        "dur": 1500000.0,
        "args": {"iteration": 2, "tokens": 3},
    }
    assert (complete[1]["name"], complete[1]["ts"], complete[1]["dur"]) == (
        "wait realloc:actor_gen",
        0.0,
        250000.0,
    )


def test_a_save_waits_for_the_last_rank() -> None:
    spans = [span(0, "save", "save", 3, 9), span(1, "save", "save", 7, 9)]
    assert cut(attribute_waits(spans)) == [(0, "wait", 3, 7), (0, "save", 7, 9), (1, "save", 7, 9)]


def test_a_call_waits_for_the_ranks_that_go_through_it_with_this_one() -> None:
    """Rank 1 of a tensor-parallel training enters 9 s late; of two replicas of a call each waits for its own."""
    train = {"type": "train", "joint": "0-1"}
    spans = [
        span(0, "run:actor_train", "run", 1, 12, **train),
        span(1, "run:actor_train", "run", 10, 12, **train),
        span(0, "run:ref_inf", "run", 20, 25, joint="0,2"),
        span(2, "run:ref_inf", "run", 21, 25, joint="0,2"),
        span(1, "run:ref_inf", "run", 20, 29, joint="1,3"),
        span(3, "run:ref_inf", "run", 24, 29, joint="1,3"),
        span(0, "run:rew_inf", "run", 30, 31),  # nobody is waited for
        span(1, "run:rew_inf", "run", 30.5, 31),
    ]
    result = attribute_waits(spans)
    assert cut(result) == [
        (0, "wait", 1, 10),
        (0, "run", 10, 12),
        (0, "wait", 20, 21),
        (0, "run", 21, 25),
        (0, "run", 30, 31),
        (1, "run", 10, 12),
        (1, "wait", 20, 24),
        (1, "run", 24, 29),
        (1, "run", 30.5, 31),
        (2, "run", 21, 25),
        (3, "run", 24, 29),
    ]
    assert result[0].facts == train
    assert attribute_waits(result) == result, "splitting twice changes nothing"


def test_a_gathering_waits_for_the_slowest_generation() -> None:
    name, facts = "transfer:actor_gen>lengths", {"side": "gather", "joint": "0-1"}
    spans = [
        span(0, name, "transfer", 2, 7, **facts),
        span(1, name, "transfer", 6, 7, **facts),
        span(0, name, "transfer", 7, 7.5, side="send"),
        span(2, name, "transfer", 1, 8, side="receive", **{"from": "0"}),
    ]
    assert cut(attribute_waits(spans)) == [
        (0, "wait", 2, 6),
        (0, "transfer", 6, 7),
        (0, "transfer", 7, 7.5),
        (1, "transfer", 6, 7),
        (2, "wait", 1, 7),
        (2, "transfer", 7, 8),
    ]


def test_a_receive_waits_for_those_only_that_send_to_it() -> None:
    name = "transfer:actor_gen>ref_inf"
    spans = [
        *(
            span(rank, name, "transfer", start, start + 0.1, side="send")
            for rank, start in ((0, 2), (1, 8), (2, 4))
        ),
        span(3, name, "transfer", 1, 9, side="receive", **{"from": "0,2"}),
        span(4, name, "transfer", 1, 9, side="receive", **{"from": ""}),
        span(12, name, "transfer", 1, 9, side="receive", **{"from": "1"}),
        span(5, name, "transfer", 1, 9, side="receive"),  # as older traces have it
    ]
    waits = [item for item in cut(attribute_waits(spans)) if item[1] == "wait"]
    assert waits == [(3, "wait", 1, 4), (5, "wait", 1, 8), (12, "wait", 1, 8)]
