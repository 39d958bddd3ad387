"""Programs are agreed on, and metrics of several ranks come together, over a store in one process."""

from __future__ import annotations

import io
import logging
import time

import pytest
import torch.distributed as dist
from rich.console import Console

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import ConfigError, PeerError
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.presets import symmetric
from megatron_real.program import compile_program
from megatron_real.runtime.liveness.heartbeats import is_communication_error
from megatron_real.runtime.liveness.progress import Position
from megatron_real.runtime.liveness.publication import agree_on_program, agreement_text
from megatron_real.runtime.reports.display import Display, iteration_line, position_table, rank_ranges
from megatron_real.runtime.reports.master import Master
from megatron_real.runtime.reports.reports import IterationMetrics, MetricsPublisher


def test_ranks_agree_on_a_program() -> None:
    store = dist.HashStore()
    text = "world_size=2\n0 Run(a)\n1 Run(b)"
    name = agree_on_program(store, 0, text)
    assert agree_on_program(store, 1, text) == name
    with pytest.raises(ConfigError, match=r"rank 2 compiled .* rank 0 published") as error:
        agree_on_program(store, 2, text.replace("Run(b)", "Run(c)"))
    assert str(error.value).endswith("-1 Run(b)\n+1 Run(c)")
    # The second program of a store is another one: rank 1 does not take the first for it.
    with pytest.raises(PeerError, match=r"rank 0 did not publish its program within 0.1 s \(rank 1 asked\)"):
        agree_on_program(store, 1, text, timeout_s=0.1)


def test_ranks_agree_on_what_is_added_to_the_program() -> None:
    program = compile_program(ppo_graph(), symmetric(ppo_graph(), ClusterSpec(devices_per_node=2)))
    extra = {"seed": "1", "prompts": "ab\ncd"}
    store = dist.HashStore()
    agree_on_program(store, 0, agreement_text(program, extra))
    agree_on_program(store, 1, agreement_text(program, dict(reversed(extra.items()))))
    with pytest.raises(ConfigError, match="rank 2 compiled") as error:
        agree_on_program(store, 2, agreement_text(program, {**extra, "seed": "2"}))
    assert str(error.value).endswith('\n-seed="1"\n+seed="2"')


def test_metrics_of_all_ranks_come_together_in_order(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    got: list[tuple[int, IterationMetrics]] = []
    master = Master(
        store,
        2,
        sink=lambda iteration, metrics: got.append((iteration, metrics)),
        display=Display(3, live=False),
    )
    first, second = (MetricsPublisher(store, rank) for rank in (0, 1))
    with caplog.at_level(logging.INFO):
        master.start()
        first.publish(0, "actor_train", {"loss": 0.5, "steps": {"loss": [0.25, 0.75]}})
        for iteration in range(3):
            first.end_iteration(iteration)  # two iterations ahead of the other rank
        second.publish(0, None, {"reward": 2.0})
        second.publish(0, "actor_train", {"loss": 9.0, "entropy": 1.0})
        for iteration in range(2):
            second.end_iteration(iteration)
        second.publish(2, None, {"reward": 3.0})
        second.end_iteration(2)
        first.close()
        second.close()
        master.close()
    assert [iteration for iteration, _ in got] == [0, 1, 2]
    assert got[0][1][None] == {"reward": 2.0}
    loss = got[0][1]["actor_train"]
    assert loss["entropy"] == 1.0
    assert loss["loss"] in (0.5, 9.0)
    assert got[1:] == [(1, {}), (2, {None: {"reward": 3.0}})]
    assert caplog.messages == ["iteration 1/3: reward 2", "iteration 2/3: done", "iteration 3/3: reward 3"]


def test_a_second_run_on_a_store_does_not_see_the_first() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for run in range(2):
        got: list[tuple[int, IterationMetrics]] = []
        master = Master(
            store,
            1,
            sink=lambda i, metrics, got=got: got.append((i, metrics)),
            display=Display(None, live=False),
        )
        publisher = MetricsPublisher(store, 0)
        master.start()
        publisher.publish(0, None, {"run": run})
        publisher.end_iteration(0)
        publisher.close()
        master.close()
        assert got == [(0, {None: {"run": run}})]


def test_what_the_sink_raises_is_raised_at_the_end() -> None:
    store = dist.HashStore()

    def full(iteration: int, metrics: IterationMetrics) -> None:
        raise OSError("disk full")

    master = Master(store, 1, sink=full, display=Display(None, live=False))
    publisher = MetricsPublisher(store, 0)
    master.start()
    publisher.end_iteration(0)
    publisher.close()
    with pytest.raises(OSError, match="disk full"):
        master.close()


def test_lines_and_tables() -> None:
    metrics: IterationMetrics = {
        None: {"reward": 0.41237, "kl": 0.01, "advantage": 1},
        "iteration": {"duration_s": 2.0, "tokens": 3000},
    }
    assert iteration_line(4, 20, metrics) == "iteration 5/20: 2.00 s, 1500 tokens/s, reward 0.4124, kl 0.01"
    loss: IterationMetrics = {"actor_train": {"loss": 2.5, "steps": {"loss": [2.0, 3.0]}}}
    assert iteration_line(0, 20, loss, "loss") == "iteration 1/20: loss 2.5"
    assert rank_ranges([6, 0, 1, 2, 4]) == "0-2, 4, 6"
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    display = Display(20, live=True, console=console)
    gen = Position(serial=1, iteration=2, index=0, name="run:actor_gen")
    display.positions({0: gen, 1: gen, 2: Position()})
    display.iteration(4, metrics)
    display.close()
    assert "1500 tokens/s" in out.getvalue()
    plain = Console(file=io.StringIO(), width=80)
    with plain.capture() as captured:
        plain.print(position_table({0: gen, 1: gen, 2: Position()}))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[1:] == [["0-1", "3", "run:actor_gen"], ["2", "-", "between", "instructions"]]


def test_evaluations_have_a_line_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    found = {"accuracy": 0.71239, "accuracy_error": 0.0123, "loss": 0.5}
    metrics: IterationMetrics = {"eval": found, "actor_train": {"accuracy": 0.7}}
    display = Display(3, goal="accuracy", live=False)
    with caplog.at_level("INFO", logger="megatron_real"):
        for iteration in (2, 3):
            display.iteration(iteration, metrics if iteration < 3 else {"eval": {"loss": 0.25}})
    assert [record.message for record in caplog.records] == [
        "evaluation after 2 iterations: accuracy 0.7124 ± 0.012, loss 0.5",
        "iteration 3/3: accuracy 0.7",
        "evaluation after 3 iterations: loss 0.25",
    ]


def test_broken_connections_are_told_from_errors_of_their_own() -> None:
    cause = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33061")
    outer = ValueError("transfer failed")
    outer.__cause__ = cause
    assert is_communication_error(cause)
    assert is_communication_error(outer)
    assert is_communication_error(PeerError("rank 1 did not come"))
    assert is_communication_error(dist.DistNetworkError("x"))
    assert not is_communication_error(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert not is_communication_error(ConfigError("wrong"))


def test_a_rank_waits_until_the_metrics_are_written(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    written: list[int] = []

    def slow(iteration: int, metrics: IterationMetrics) -> None:
        time.sleep(0.2)
        written.append(iteration)

    master = Master(store, 2, sink=slow, display=Display(None, live=False))
    first, second = (MetricsPublisher(store, rank) for rank in (0, 1))
    master.start()
    first.end_iteration(0)
    assert not first.wait_written(0, timeout_s=0.1), "rank 1 has not reported: it goes on all the same"
    assert "iteration 1: its metrics are not written yet" in caplog.text
    second.end_iteration(0)
    for iteration in range(3):
        assert first.wait_written(iteration)
        assert written == list(range(iteration + 1))
        for publisher in (first, second):
            publisher.end_iteration(iteration + 1)
    first.close()
    second.close()
    master.close()
