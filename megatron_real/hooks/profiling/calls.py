"""Times of passes, optimizer steps and calls of a model copy, taken inside this package's own calls.

What is timed is `forward.infer`, `forward.train` and `generation.generate` on real `ModelCopy`s, with marks at the
borders of micro-batches, decode steps and the optimizer step. So padding, the schedule, the sampler and Megatron's own
work per pass are in the times, as in a run.

Invariants (tests/e2e/test_profile.py):
    - the parts of a call add up to the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_real.algorithms.configs import PPOConfig
from megatron_real.algorithms.losses import PolicyObjective, ValueObjective
from megatron_real.algorithms.registry import find_algorithm
from megatron_real.backend import Head, Minibatch, Objective, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, CallType, KeySpec, Per
from megatron_real.hooks import cpu_device, forward, generation
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.padding import pad_microbatch
from megatron_real.hooks.profiling.clock import Marks, median, probed, timed

__all__ = [
    "DECODE_STEPS",
    "Shape",
    "embedding_seconds",
    "generate_call",
    "infer_call",
    "prepare_seconds",
    "train_call",
]

DECODE_STEPS = 6
"""Decode steps that are timed after a prefill."""
_MICROBATCHES = 2
_TOKENS = KeySpec(name="tokens", per=Per.TOKEN, dtype="int64")
_SCALARS = tuple(
    KeySpec(name=name, per=Per.RESPONSE, dtype="float32")
    for name in ("logprobs", "advantages", "values", "returns")
)
_GENERATE = Call(name="profile", model="profile", type=CallType.GENERATE)
_EMBEDDINGS = 5
"""In a row, to be long enough to be timed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A micro-batch of equal sequences."""

    sequences: int
    length: int
    """Prompt and response; for a generation the prompt."""
    response: int = 1
    """Tokens of each response: the positions whose logits are computed."""


def infer_call(copy: ModelCopy, shape: Shape) -> dict[str, float]:
    """Seconds: ``pass`` of a micro-batch, and ``call`` for what the call takes beside its passes.

    Collective over the copy's ranks, as the functions below.
    """
    batch = _batch(copy, shape, _MICROBATCHES)
    head = Head.VALUES if copy.role.scalar_head else Head.LOGPROBS
    cut = _cut(batch, _MICROBATCHES)
    padding = _padding_s(copy, batch, cut)
    marks = Marks()
    with _marked_passes(copy, marks):
        marks("call")
        forward.infer(copy, batch, cut, head, 1.0)
        marks("return")
    marks.finish()
    one = marks.seconds("begin", 0, "begin", 1) + padding
    return {"pass": one, "call": marks.seconds("call", 0, "return", 0) - _MICROBATCHES * one}


def train_call(copy: ModelCopy, shape: Shape) -> dict[str, float]:
    """Seconds of the parts of a call of one optimizer step.

    ``forward`` and ``backward`` are of one micro-batch, ``zero`` clears gradients, ``step`` finishes gradients, clips
    them and runs Adam, ``call`` is the rest.
    """
    batch = _batch(copy, shape, _MICROBATCHES, scalars=True)
    cut = _cut(batch, _MICROBATCHES)
    padding = _padding_s(copy, batch, cut)
    count = len(batch.ids)
    minibatch = Minibatch(microbatches=cut, num_tokens=sum(batch.response_lengths), num_sequences=count)
    marks = Marks()
    chunk, optimizer = copy.wrapped[0], copy.optimizer
    with contextlib.ExitStack() as stack:
        stack.enter_context(_marked_passes(copy, marks))
        stack.enter_context(probed(chunk, "zero_grad_buffer", marks, "buffer"))
        stack.enter_context(probed(optimizer, "zero_grad", marks, "zero"))
        stack.enter_context(probed(chunk, "finish_grad_sync", marks, "sync"))
        stack.enter_context(probed(optimizer, "step", marks, "step"))
        marks("call")
        forward.train(copy, batch, [minibatch], _MarkedObjective(copy, marks), 1.0)
        marks("return")
    marks.finish()
    last = _MICROBATCHES - 1
    through = [marks.seconds("begin", index, "loss", index) for index in range(_MICROBATCHES)]
    back = [marks.seconds("loss", index, "begin", index + 1) for index in range(last)]
    back.append(marks.seconds("loss", last, "sync begin", 0))
    seconds = {
        "forward": sum(through) / _MICROBATCHES + padding,
        "backward": sum(back) / _MICROBATCHES,
        "zero": marks.seconds("buffer begin", 0, "zero end", 0),
        "step": marks.seconds("sync begin", 0, "step end", 0),
    }
    passes = _MICROBATCHES * (seconds["forward"] + seconds["backward"])
    total = marks.seconds("call", 0, "return", 0)
    return {**seconds, "call": total - passes - seconds["zero"] - seconds["step"]}


def generate_call(copy: ModelCopy, shape: Shape) -> dict[str, float]:
    """Seconds: ``prefill``, ``decode`` of one step, and ``call``, the rest.

    The steps have a mean context of ``length + (DECODE_STEPS + 1) / 2``.
    """
    prompts = _batch(copy, dataclasses.replace(shape, response=0), 1)
    marks = Marks()
    # The first pass is the prefill; the last step ends with the call, so it is not timed.
    sampling = Sampling(max_new_tokens=DECODE_STEPS + 2, end_token=-1)
    with _marked_passes(copy, marks):
        marks("call")
        generation.generate(copy, _GENERATE, 0, prompts, (prompts.ids,), sampling)
        marks("return")
    marks.finish()
    passes = marks.count("begin")
    prefill = marks.seconds("begin", 0, "begin", 1)
    step = median([marks.seconds("begin", index, "begin", index + 1) for index in range(1, passes - 1)])
    total = marks.seconds("call", 0, "return", 0)
    return {"prefill": prefill, "decode": step, "call": total - prefill - (passes - 1) * step}


def embedding_seconds(copy: ModelCopy, num_tokens: int) -> dict[str, float]:
    """Seconds of the word embedding of a trained copy: ``forward``, ``train_forward``, ``backward``."""
    embedding: Any = copy.chunks[0].embedding
    device = next(copy.chunks[0].parameters()).device
    tokens = torch.randint(copy.role.vocab_size, (1, num_tokens), device=device)
    positions = torch.zeros_like(tokens)
    with copy.parallel.active():
        with torch.no_grad():
            scoring = timed(lambda: embedding(tokens, positions), _EMBEDDINGS)
        outputs: list[torch.Tensor] = []
        training = timed(lambda: outputs.append(embedding(tokens, positions)), _EMBEDDINGS)
        gradient = torch.ones_like(outputs[0])
        backward = timed(lambda: outputs.pop().backward(gradient), _EMBEDDINGS)
        copy.wrapped[0].zero_grad_buffer()
    return {"forward": scoring, "train_forward": training, "backward": backward}


def prepare_seconds(shape: Shape) -> float:
    """Seconds of what a train call does with the scalars of the whole batch before its first step.

    Args:
        shape: the batch.
    """
    algorithm = find_algorithm("ppo").build(PPOConfig(), end_token=0)
    batch = Batch(
        ids=tuple(range(shape.sequences)),
        prompt_lengths=(shape.length - shape.response,) * shape.sequences,
        response_lengths=(shape.response,) * shape.sequences,
    )
    device = cpu_device.device()
    for name in ("logprobs", "ref_logprobs", "values"):
        batch.put(
            KeySpec(name=name, per=Per.RESPONSE, dtype="float32"),
            torch.randn(shape.sequences * shape.response, device=device),
        )
    batch.put(
        KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"),
        torch.randn(shape.sequences, device=device),
    )
    call = algorithm.graph.call("actor_train")
    return timed(lambda: algorithm.prepare(call, 0, batch), 1)


@contextlib.contextmanager
def _marked_passes(copy: ModelCopy, marks: Marks) -> Any:
    """Mark the begin of every pass of the model, for a block."""
    handle = copy.chunks[0].register_forward_pre_hook(lambda module, args: marks("begin"))
    try:
        yield
    finally:
        handle.remove()


class _MarkedObjective:
    """The loss of the copy's role, with a mark where it ends: at the end of the forward pass."""

    def __init__(self, copy: ModelCopy, marks: Marks) -> None:
        self._inner: Objective = (
            ValueObjective(clip=0.2)
            if copy.role.scalar_head
            else PolicyObjective(clip_low=0.2, clip_high=0.2)
        )
        self._marks = marks
        self.head, self.per, self.stop_above = self._inner.head, self._inner.per, self._inner.stop_above

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `Objective.loss`."""
        result = self._inner.loss(outputs, batch)
        self._marks("loss")
        return result


def _batch(copy: ModelCopy, shape: Shape, microbatches: int, *, scalars: bool = False) -> Batch:
    """Random tokens, and what the losses read."""
    count = shape.sequences * microbatches
    response = min(shape.response, shape.length - 1)
    batch = Batch(
        ids=tuple(range(count)),
        prompt_lengths=(shape.length - response,) * count,
        response_lengths=(response,) * count,
    )
    device = next(copy.chunks[0].parameters()).device
    # The same on all ranks of a replica, which must agree on the tokens.
    generator = torch.Generator().manual_seed(shape.sequences * 1009 + shape.length)
    tokens = torch.randint(copy.role.vocab_size, (count * shape.length,), generator=generator)
    batch.put(_TOKENS, tokens.to(device))
    if scalars:
        for spec in _SCALARS:
            batch.put(spec, torch.randn(count * response, generator=generator).to(device))
    return batch


def _cut(batch: Batch, microbatches: int) -> tuple[tuple[int, ...], ...]:
    size = len(batch.ids) // microbatches
    return tuple(batch.ids[index * size : (index + 1) * size] for index in range(microbatches))


def _padding_s(copy: ModelCopy, batch: Batch, cut: tuple[tuple[int, ...], ...]) -> float:
    """Seconds of padding one micro-batch, which a call does before its schedule runs."""
    device = next(copy.chunks[0].parameters()).device
    pad: Callable[[], object] = lambda: pad_microbatch(batch, cut[0], multiple=1, device=device)  # noqa: E731
    return timed(pad, 3)
