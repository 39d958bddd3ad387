"""Counting waves, waiting for them from another thread, and what a stream raises. Whole streams: tests/hooks."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch

from megatron_real.errors import PeerError, PlanError, RealError
from megatron_real.realloc_ops.execution.executor import InPlace, ReallocExecutor
from megatron_real.realloc_ops.execution.regions import Regions
from megatron_real.realloc_ops.execution.streaming import Arrivals, WaveCounter
from megatron_real.realloc_ops.execution.transports import Exchange, LocalNetwork, Parcel, Pending, Turns
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.planning.shards import ParamTable
from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from tests.synthetic_copies import FakeShardedTensor, expected_values

_LAYERS = 4
_SHAPE = (_LAYERS, 6, 5)
_WAIT_S = 10.0


def test_waves_arrive_in_order_whatever_comes_first() -> None:
    rng = random.Random(0)
    for _ in range(200):
        waves = [rng.randrange(0, 50, 7) for _ in range(rng.randint(0, 12))]
        counter = WaveCounter(waves)
        left = list(waves)
        for wave in rng.sample(waves, len(waves)):
            assert counter.next_wave == min(left)
            counter.count(wave)
            left.remove(wave)
        assert counter.next_wave > 2**40


def _start_waiting(arrivals: Arrivals, wave: int) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def wait() -> None:
        try:
            arrivals.wait(wave)
        except RealError as error:
            outcome.append(error)
        else:
            outcome.append("here")

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, outcome


def test_a_wait_ends_when_its_wave_is_here_or_never_will_be() -> None:
    arrivals = Arrivals()
    waits = {wave: _start_waiting(arrivals, wave) for wave in (-1, 0, 3, 8)}
    arrivals.advance(0, ())
    waits[-1][0].join(_WAIT_S)
    arrivals.advance(4, ())
    waits[0][0].join(_WAIT_S)
    waits[3][0].join(_WAIT_S)
    assert [waits[wave][1] for wave in (-1, 0, 3, 8)] == [["here"], ["here"], ["here"], []]
    error = PeerError("rank 3 is gone")
    arrivals.end(error)
    waits[8][0].join(_WAIT_S)
    assert waits[8][1] == [error]
    arrivals.wait(3)  # what arrived before the failure is still here


class _Pipes:
    """Ranks in threads of one process: a receive is filled by its sender, at a limited rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._condition = threading.Condition()
        self._sent: dict[tuple[int, int], list[Parcel]] = {}

    def end(self, rank: int, timeout_s: float = _WAIT_S) -> _PipeEnd:
        return _PipeEnd(self, rank, timeout_s)

    def put(self, rank: int, parcel: Parcel) -> None:
        time.sleep(parcel.memory.num_bytes / self._bytes_per_s)
        with self._condition:
            copy = Parcel(peer=parcel.peer, memory=Regions(parcel.payload.clone()), label=parcel.label)
            self._sent.setdefault((rank, parcel.peer), []).append(copy)
            self._condition.notify_all()

    def get(self, rank: int, parcel: Parcel, timeout_s: float) -> None:
        with self._condition:
            queue = self._sent.setdefault((parcel.peer, rank), [])
            if not self._condition.wait_for(lambda: queue, timeout_s):
                raise PeerError(f"{parcel.label} did not come. Look at rank {parcel.peer} first.")
            parcel.payload.copy_(queue.pop(0).payload)


class _PipeEnd:
    def __init__(self, pipes: _Pipes, rank: int, timeout_s: float) -> None:
        self._pipes, self._rank, self._timeout_s = pipes, rank, timeout_s
        self._turns = Turns()
        self.turn = self._turns.take
        self.given_up: list[str] = []
        self.give_up = self.given_up.append

    def staging_device(self) -> torch.device:
        return torch.device("cpu")

    def gathers(self, peer: int) -> bool:
        return False

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Exchange:
        if send is not None:
            self._pipes.put(self._rank, send)
        return Exchange(
            sent=Pending(parcel=send, receives=False) if send is not None else None,
            received=Pending(parcel=receive, receives=True) if receive is not None else None,
        )

    def wait(self, pending: Pending) -> None:
        if pending.receives:
            self._pipes.get(self._rank, pending.parcel, self._timeout_s)


def _copy(key_order: tuple[int, ...] = tuple(range(_LAYERS))) -> tuple[dict[int, torch.Tensor], LocalShards]:
    layers = {layer: torch.zeros(_SHAPE[1:]) for layer in key_order}
    sharded = [
        FakeShardedTensor(
            key="decoder.layers.w", data=data, local_shape=_SHAPE[1:], global_shape=_SHAPE,
            global_offset=(layer, 0, 0), prepend_axis_num=1,
        )
        for layer, data in layers.items()
    ]  # fmt: skip
    return layers, local_table(sharded, [(str(layer), data) for layer, data in layers.items()])


def _expected(layer: int) -> torch.Tensor:
    return expected_values("decoder.layers.w", (layer, 0, 0), (1, *_SHAPE[1:]))[0]


def _fill(layers: dict[int, torch.Tensor]) -> None:
    for layer, data in layers.items():
        data.copy_(_expected(layer))


def _two_ranks(
    bytes_per_s: float, timeout_s: float = _WAIT_S
) -> tuple[dict[int, torch.Tensor], list[ReallocExecutor], list[_PipeEnd]]:
    source, src = _copy()
    target, dst = _copy(tuple(reversed(range(_LAYERS))))
    _fill(source)
    tables = [ParamTable.of({rank: shards.entries}) for rank, shards in enumerate((src, dst))]
    plan = build_realloc_plan(*tables, bucket_bytes=128, order="layers")  # no bucket is a whole layer
    pipes = _Pipes(bytes_per_s)
    ends = [pipes.end(rank, timeout_s) for rank in range(2)]
    executors = [
        ReallocExecutor(plan.of(0), src=src, dst=None, transport=ends[0]),
        ReallocExecutor(plan.of(1), src=None, dst=dst, transport=ends[1], name="actor"),
    ]
    return target, executors, ends


def test_layers_can_be_used_while_later_ones_travel() -> None:
    target, executors, _ = _two_ranks(bytes_per_s=2e3)  # 0.06 s per layer
    sending, stream = executors[0].start(), executors[1].start()
    with pytest.raises(RealError, match="actor: found its last stream under way"):
        executors[1].start()
    waves = [stream.wave_of(target[layer]) for layer in range(_LAYERS)]
    assert waves == sorted(set(waves))
    assert stream.wave_of(torch.zeros(3)) is None
    first_is_early = False
    for layer, wave in enumerate(waves):
        stream.wait(wave)
        assert torch.equal(target[layer], _expected(layer))
        first_is_early |= layer == 0 and not torch.equal(target[_LAYERS - 1], _expected(_LAYERS - 1))
    assert first_is_early
    report = stream.finish()
    assert report == executors[1].report
    assert report.bytes_moved == sum(data.numel() * 4 for data in target.values())
    assert sending.finish().bytes_sent == report.bytes_moved
    stream.wait(10**6)
    assert executors[1].start() is not stream, "a finished stream can follow another"


def test_a_stream_of_a_rank_without_either_copy_is_over_at_once() -> None:
    _, src = _copy()
    plan = build_realloc_plan(
        ParamTable.of({0: src.entries}), ParamTable.of({0: src.entries, 5: ()}), order="layers"
    )
    stream = ReallocExecutor(plan.of(5), src=None, dst=None, transport=LocalNetwork().transport(5)).start()
    stream.wait(3)
    assert stream.finish().bytes_moved == 0


def test_a_peer_that_does_not_come_is_named_where_it_is_waited_for() -> None:
    target, executors, ends = _two_ranks(1e9, timeout_s=0.2)
    stream = executors[1].start()
    with pytest.raises(PeerError, match=r"message 0 from rank 0 to rank 1 .* Look at rank 0 first"):
        stream.wait(stream.wave_of(target[0]))
    with pytest.raises(PeerError, match="Look at rank 0 first"):
        stream.finish()
    assert ends[1].given_up == ["actor failed or was interrupted"]
    assert not ends[1]._turns._waiting, "the next run need not wait for the failed one"
    with pytest.raises(RealError, match="no run has finished on rank 1"):
        _ = executors[1].report


def test_runs_over_one_transport_do_not_overlap() -> None:
    """Streams of two models are started at once; the messages of the second come behind those of the first."""
    target, executors, ends = _two_ranks(bytes_per_s=1e4)
    other_source, src = _copy()
    other_target, dst = _copy()
    for data in other_source.values():
        data.fill_(5.0)
    tables = [ParamTable.of({rank: shards.entries}) for rank, shards in enumerate((src, dst))]
    plan = build_realloc_plan(*tables, bucket_bytes=128)
    others = [
        ReallocExecutor(plan.of(0), src=src, dst=None, transport=ends[0]),
        ReallocExecutor(plan.of(1), src=None, dst=dst, transport=ends[1]),
    ]
    streams = [executor.start() for executor in itertools.chain(executors, others)]
    for stream in streams:
        stream.finish()
    for layer in range(_LAYERS):
        assert torch.equal(target[layer], _expected(layer))
        assert other_target[layer].eq(5.0).all()


def test_what_is_done_around_a_run_is_in_its_turn() -> None:
    target, executors, ends = _two_ranks(bytes_per_s=1e6)
    done: list[str] = []

    def around() -> object:
        done.append("before")
        report = executors[1].run()
        done.append("after")
        return report

    sending, stream = executors[0].start(), executors[1].start(around)
    with ends[1].turn():
        done.append("next turn")
    assert stream.finish().bytes_moved > 0
    sending.finish()
    assert done == ["before", "after", "next turn"]
    stream.wait(stream.wave_of(target[0]))


def test_no_stream_in_place() -> None:
    _, src = _copy()
    plan = build_realloc_plan(ParamTable.of({0: src.entries}), ParamTable.of({1: src.entries}))
    executor = ReallocExecutor(
        plan.of(0),
        src=src,
        dst=None,
        transport=LocalNetwork().transport(0),
        in_place=InPlace(src=None, dst=None),
    )
    with pytest.raises(PlanError, match="found a stream in place"):
        executor.start()
