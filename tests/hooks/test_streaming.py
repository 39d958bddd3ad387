"""Real models that compute while their weights arrive: results bit for bit those of a copy that was whole before."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_real.backend import Head, Sampling
from megatron_real.dataflow import Call, CallType
from megatron_real.errors import PeerError
from megatron_real.hooks import forward, generation
from megatron_real.hooks.streaming import Gate, units
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.execution.transports import Pending, TorchTransport
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.harness import run_ranks
from tests.hooks.sequences import make_batch, microbatches_of, seen_by
from tests.hooks.tiny import experts, layouts, make_copy, placement, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

COUNT, VOCAB = 8, 13
CALL = Call(name="actor_gen", model="actor", type=CallType.GENERATE)
SAMPLING = Sampling(max_new_tokens=4, end_token=3, seed=2)
CASES = [
    pytest.param({}, "d1t2p2@0-3", "d4t1p1@0-3", id="gathered"),
    pytest.param({"tied_embeddings": True}, "d1t4p1@0-3", "d1t1p4@0-3", id="tied pipeline"),
    pytest.param({}, "d1t1p2@0-1", "d1t2p1@2-3", id="disjoint"),
    pytest.param({"role": "critic", "scalar_head": True}, "d4t1p1@0-3", "d1t2p2v2s@0-3", id="virtual stages"),
    pytest.param(experts(), "d2t1p1e2@0-1", "d4t1p1e4@0-3", id="experts"),
]


class _Slow(TorchTransport):
    """Delivers at most so many bytes per second."""

    bytes_per_s = 4e5

    def wait(self, pending: Pending) -> None:
        super().wait(pending)
        if pending.receives:
            time.sleep(pending.parcel.memory.num_bytes / self.bytes_per_s)


def _outputs(copy) -> list[torch.Tensor]:
    """What a call computes: values, or log-probabilities and generated tokens."""
    parallel = copy.parallel
    batch = make_batch(COUNT, vocab_size=VOCAB)
    parts = microbatches_of(batch.ids, parallel, parallel.layout.pp)
    ids = tuple(i for part in parts for i in part)
    if copy.role.scalar_head:
        found = [forward.infer(copy, seen_by(parallel, batch, ids), parts, Head.VALUES, 1.0)]
    else:
        prompts = seen_by(parallel, make_batch(COUNT, vocab_size=VOCAB, responses=False), ids)
        generated = generation.generate(copy, CALL, 1, prompts, parts, SAMPLING)
        found = [generated.data.get(name) for name in ("tokens", "logprobs")]
        found.append(forward.infer(copy, seen_by(parallel, batch, ids), parts, Head.LOGPROBS, 1.0))
    return [tensor for tensor in found if tensor is not None]


def _hooks(copy) -> int:
    return sum(len(module._forward_pre_hooks) for chunk in copy.chunks for module in chunk.modules())


def _poison(copy) -> None:
    for segment in copy.segments.segments:
        segment.flat.fill_(float("nan"))


class _Moving:
    """A copy with values, one without, and what moves the first to the second."""

    def __init__(self, made, role, source: str, target: str, transport: TorchTransport) -> None:
        self.src, self.dst = (make_copy(placement(made, text), role) for text in (source, target))
        tables = [
            gather_tables(copy.shards.entries if copy else (), dist.group.WORLD)
            for copy in (self.src, self.dst)
        ]
        rank = dist.get_rank()
        self.executor = ReallocExecutor(
            build_realloc_plan(*tables, bucket_bytes=1 << 13, rank=rank, order="layers").of(rank),
            src=self.src.shards if self.src else None,
            dst=self.dst.shards if self.dst else None,
            transport=transport,
        )
        if self.dst:
            _poison(self.dst)


def _connect(made, kind: type[TorchTransport] = TorchTransport, timeout_s: float = 60.0) -> TorchTransport:
    return kind.connect(made.groups.acquire(range(4), purpose="realloc"), timeout_s=timeout_s)


def _with_and_without_a_stream(changes: dict, source: str, target: str) -> None:
    with layouts() as made:
        role = tiny_role(vocab_size=VOCAB, padded_vocab_size=16, **changes)
        moving = _Moving(made, role, source, target, _connect(made, _Slow))
        moving.executor.run()
        before = _outputs(moving.dst) if moving.dst else []
        for _ in range(2):
            if moving.dst:
                _poison(moving.dst)
            dist.barrier()
            stream = moving.executor.start()
            if moving.dst is None:
                stream.finish()
                continue
            gate = Gate(moving.dst.chunks, stream)
            assert (
                gate.closed
                == sum(1 for chunk in moving.dst.chunks for _ in units(chunk))
                == _hooks(moving.dst)
            )
            after = _outputs(moving.dst)
            assert gate.closed == 0, "every unit was called as a module"
            gate.finish()
            assert _hooks(moving.dst) == 0
            assert len(before) == len(after)
            for one, other in zip(before, after, strict=True):
                assert torch.equal(one, other)
        made.groups.release(range(4), purpose="realloc")


@pytest.mark.parametrize(("changes", "source", "target"), CASES)
def test_outputs_are_bit_equal_with_and_without_a_stream(changes: dict, source: str, target: str) -> None:
    run_ranks(4, _with_and_without_a_stream, changes, source, target)


def _times() -> tuple[list[float], float] | None:
    """When each layer began, and when the last byte was here, in seconds from the start."""
    with layouts() as made:
        role = tiny_role(vocab_size=VOCAB, padded_vocab_size=16)
        moving = _Moving(made, role, "d1t1p2@0-1", "d1t2p1@2-3", _connect(made, _Slow))
        dist.barrier()
        stream = moving.executor.start()
        if moving.dst is None:
            stream.finish()
            return None
        started_s, begun = time.perf_counter(), []
        gate = Gate(moving.dst.chunks, stream)
        for layer in moving.dst.chunks[0].decoder.layers:
            layer.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter() - started_s))
        batch = make_batch(COUNT, vocab_size=VOCAB)
        forward.infer(moving.dst, batch, [batch.ids], Head.LOGPROBS, 1.0)
        report = gate.finish()
        made.groups.release(range(4), purpose="realloc")
        return begun, report.seconds


def test_the_first_layer_computes_before_the_last_has_arrived() -> None:
    for begun, whole_s in filter(None, run_ranks(4, _times)):
        assert len(begun) == 4
        assert begun == sorted(begun)
        assert begun[0] < 0.6 * whole_s
        assert begun[-1] > 0.6 * whole_s, "the last layer had to wait"


def _a_source_that_does_not_come() -> str | None:
    with layouts() as made:
        role = tiny_role(vocab_size=VOCAB, padded_vocab_size=16)
        moving = _Moving(made, role, "d1t1p1@0-0", "d1t1p1@1-1", _connect(made, timeout_s=0.5))
        text = None
        if moving.dst:
            gate = Gate(moving.dst.chunks, moving.executor.start())
            batch = make_batch(COUNT, vocab_size=VOCAB)
            with pytest.raises(PeerError):
                forward.infer(moving.dst, batch, [batch.ids], Head.LOGPROBS, 1.0)
            with pytest.raises(PeerError) as caught:
                gate.finish()
            assert _hooks(moving.dst) == 0
            text = str(caught.value)
        dist.barrier()
        made.groups.release(range(4), purpose="realloc")
        return text


def test_a_source_that_does_not_come_is_named_in_the_forward_pass() -> None:
    (text,) = filter(None, run_ranks(4, _a_source_that_does_not_come))
    assert "Look at rank 0 first" in text


class _Cached(torch.nn.Module):
    """Keeps a function of its weight, as Mamba's mixer does for decoding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.refresh_cache()

    def refresh_cache(self) -> None:
        self._cache = self.weight.detach() * 2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self._cache


class _Delivered:
    """A stream whose bytes come while it is waited for."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.waited: list[int] = []

    def wait(self, wave: int) -> None:
        self.waited.append(wave)
        self._weight.data.fill_(5.0)

    def wave_of(self, tensor: torch.Tensor) -> int | None:
        return 7 if tensor is self._weight else None

    def finish(self) -> str:
        return "report"


def test_caches_are_refreshed_before_the_first_forward_and_at_the_end() -> None:
    model = torch.nn.ModuleList([_Cached()])
    stream = _Delivered(model[0].weight)
    gate = Gate([model], stream)
    assert model[0](torch.zeros(3)).tolist() == [10.0] * 3
    assert model[0](torch.zeros(3)).tolist() == [10.0] * 3
    assert stream.waited == [7], "a unit waits once"
    gate.finish()
    idle = _Cached()
    gate = Gate([torch.nn.ModuleList([idle])], _Delivered(idle.weight))
    idle.weight.data.fill_(1.0)
    assert gate.finish() == "report"
    assert idle(torch.zeros(3)).tolist() == [2.0] * 3, "a unit that was never called is refreshed too"
