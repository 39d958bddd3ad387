"""Token generation with a key-value cache under tensor and pipeline parallelism.

A micro-batch is one decoding batch: its prompts are cut at the shortest, filled into the cache in one pass, and from
there every sequence moves one position at a time. Where a prompt is longer, its own token is taken instead of a
sampled one, so every token stands at its real position and no padding ever enters the cache. Under pipeline
parallelism each stage goes round its micro-batches: hidden states go to the next stage, and the last stage hands the
chosen tokens, and which of them end their sequences, to all ranks of the replica. With as many micro-batches as stages,
all stages work at once; more of them go in waves of so many, one wave's cache after the other's, so that more
micro-batches need less memory.

Invariants (tests/hooks/test_generation.py):
    - tokens are those of a loop of full forward passes, for every layout, order and cut into micro-batches;
    - log-probs are those that `forward.infer` computes for the same tokens;
    - all ranks of a replica end with the same lengths.

Shape legend: b sequences of a micro-batch, V real vocabulary, h hidden size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import Attention

from megatron_real.backend import Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, KeySpec, Per
from megatron_real.errors import PlanError, RealError
from megatron_real.hooks.activations import declared_activations, decode_bytes
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.padding import pad_tokens
from megatron_real.hooks.sampling import DrawKey, check_sampling, sample, stops, token_logprobs, uniforms
from megatron_real.layout import Coordinates, coordinates_of, rank_of

__all__ = ["generate", "kv_cache_bytes"]

_TOKENS = KeySpec(name="tokens", per=Per.TOKEN, dtype="int64")
_LOGPROBS = KeySpec(name="logprobs", per=Per.RESPONSE, dtype="float32")


def generate(
    copy: ModelCopy,
    call: Call,
    iteration: int,
    prompts: Batch,
    microbatches: Sequence[Sequence[int]],
    sampling: Sampling,
) -> Batch:
    """Sample a response to each of this data-parallel rank's prompts.

    Collective over the copy's model-parallel ranks (and, with experts spread over data-parallel ranks, over those).

    Args:
        copy: a language model; its ledger, if any, holds the cache and the activations of a pass meanwhile.
        call: keys the draws, with `iteration` and the sequence ids.
        iteration: of the run.
        prompts: sequences without responses; ``tokens`` on the first and the last pipeline stage.
        microbatches: the sequence ids of each decoding batch; together those of `prompts`.
        sampling: how tokens are drawn and when a response ends: at `end_token` or a stop string, which it keeps, or
            at `max_new_tokens`.

    Returns:
        The same sequences in the same order, with their response lengths; on the last pipeline stage also ``tokens``
        (prompt + response) and ``logprobs`` (fp32, of the response), equal on its tensor-parallel ranks.

    Raises:
        PlanError: the copy's layout does not generate.
        RealError: a sequence without a prompt, or longer than the model's positions.
        ConfigError: sampling options that no token can be drawn with.
        CapacityError: the cache, or a pass, does not fit into the device memory.
    """
    _check(copy, prompts, microbatches, sampling)
    chunk = copy.chunks[0]
    device = next(chunk.parameters()).device
    draws = DrawKey(seed=sampling.seed, call=call.name, iteration=iteration)
    with torch.no_grad(), copy.parallel.active(), InferenceMode.active():
        chunk.eval()
        links = _Links(copy, device)
        decodes = [_Decode.begin(prompts.select(ids), sampling, draws, device) for ids in microbatches]
        links.agree_on_passes(decodes)
        for wave in batched(decodes, copy.parallel.layout.pp):
            with _caches(copy, f"{copy.key} key-value cache of {call.name}", wave):
                _decode_all(copy, links, wave, sampling)
    return _collect(prompts, decodes, with_data=links.last)


@contextlib.contextmanager
def _caches(copy: ModelCopy, owner: str, decodes: Sequence[_Decode]) -> Iterator[None]:
    """Caches for `decodes`, and in the ledger these and the activations of a pass, for a block."""
    chunk, ledger = copy.chunks[0], copy.ledger
    needed = decode_bytes(copy, [(one.num_rows, one.end, one.capacity) for one in decodes])
    if ledger is not None:
        ledger.reserve(owner, sum(kv_cache_bytes(chunk, one.num_rows, one.capacity - 1) for one in decodes))
    try:
        for one in decodes:
            one.context = StaticInferenceContext(one.num_rows, one.capacity - 1)
        with declared_activations(copy, needed):
            yield
    finally:
        for one in decodes:
            one.context = None
        if ledger is not None:
            ledger.free(owner)


def kv_cache_bytes(chunk: torch.nn.Module, num_sequences: int, length: int) -> int:
    """Bytes of the cache of one model chunk on this rank.

    Args:
        chunk: unwrapped module.
        num_sequences: decoded together.
        length: positions of each.
    """
    elements: int = sum(
        module.num_query_groups_per_partition * (module.key_hidden_size + module.val_hidden_size)
        for module in chunk.modules()
        if isinstance(module, Attention)
    )
    states: int = sum(
        math.prod(shape) for mixer in _mixers(chunk) for shape in mixer.mamba_state_shapes_per_request()
    )
    itemsize: int = next(chunk.parameters()).element_size()
    return (elements * length + states) * num_sequences * itemsize


def _mixers(chunk: torch.nn.Module) -> list[MambaMixer]:
    return [module for module in chunk.modules() if isinstance(module, MambaMixer)]


def _check(
    copy: ModelCopy, prompts: Batch, microbatches: Sequence[Sequence[int]], sampling: Sampling
) -> None:
    layout = copy.parallel.layout
    for name, found, expected in (("vpp", layout.vpp, 1), ("sp", layout.sp, False), ("cp", layout.cp, 1)):
        if found != expected:
            raise PlanError(
                f"copy {copy.key}: found {name}={found} in a generate call; expected {expected}: Megatron's key-value "
                "cache does not go with it."
            )
    if layout.pp > 1 and _mixers(copy.chunks[0]):
        raise PlanError(
            f"copy {copy.key}: found pp={layout.pp} in a generate call of a model with Mamba layers; expected pp=1: "
            "Megatron's mixer keeps the state of one batch, and stages decode several in turn."
        )
    if copy.role.scalar_head:
        raise PlanError(
            f"copy {copy.key}: found a scalar head; expected a language model in a generate call."
        )
    check_sampling(sampling)
    ids = sorted(i for part in microbatches for i in part)
    if ids != sorted(prompts.ids) or not all(microbatches):
        raise RealError(
            f"copy {copy.key}: found micro-batches of {[len(part) for part in microbatches]} sequences; expected the "
            f"{len(prompts.ids)} prompts, and at least one in each."
        )
    if min(prompts.prompt_lengths) < 1:
        raise RealError(f"copy {copy.key}: found an empty prompt; expected at least one token in each.")
    longest = max(prompts.prompt_lengths) + sampling.max_new_tokens
    if copy.role.position_embedding_type == "learned_absolute" and longest > copy.role.max_sequence_length:
        raise RealError(
            f"copy {copy.key}: found a prompt that may grow to {longest} tokens; the model has embeddings for "
            f"{copy.role.max_sequence_length} positions. Shorten prompts or max_new_tokens."
        )


@dataclass(slots=True, kw_only=True)
class _Decode:
    """One micro-batch on its way. The next pass covers positions ``[start, end)`` and chooses the tokens at `end`."""

    ids: tuple[int, ...]
    prompt_lengths: torch.Tensor
    """[b] int64"""
    limits: torch.Tensor
    """[b] int64, prompt + max_new_tokens"""
    lengths: torch.Tensor
    """[b] int64, prompt + response so far"""
    tokens: torch.Tensor
    """[b, capacity] int64; zeros where no token is known yet, and behind the end of a sequence."""
    logprobs: torch.Tensor
    """[b, capacity] fp32, of sampled and forced tokens alike; only the last stage fills it."""
    uniform: torch.Tensor
    """[b, capacity] float64"""
    ended: torch.Tensor
    """[b] bool"""
    start: int
    end: int
    capacity: int
    finished: bool = False
    """Nothing is left to do, also for the ranks that have to keep step with this one."""
    context: StaticInferenceContext | None = None
    in_flight: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    """Messages of the last round with their buffers."""

    @classmethod
    def begin(cls, batch: Batch, sampling: Sampling, draws: DrawKey, device: torch.device) -> _Decode:
        lengths = batch.prompt_lengths
        capacity = max(lengths) + sampling.max_new_tokens
        prompt_lengths = torch.tensor(lengths, device=device)
        if "tokens" in batch.data:
            tokens = pad_tokens(batch.data["tokens"].to(device), lengths, capacity)
        else:
            tokens = torch.zeros(len(lengths), capacity, dtype=torch.int64, device=device)
        ids = torch.tensor(batch.ids, device=device).unsqueeze(-1)
        return cls(
            ids=batch.ids,
            prompt_lengths=prompt_lengths,
            limits=prompt_lengths + sampling.max_new_tokens,
            lengths=prompt_lengths.clone(),
            tokens=tokens,
            logprobs=torch.zeros(tokens.shape, dtype=torch.float32, device=device),
            uniform=uniforms(draws, ids, torch.arange(capacity, device=device)),
            ended=torch.zeros(len(lengths), dtype=torch.bool, device=device),
            start=0,
            end=min(lengths),
            capacity=capacity,
        )

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def has_run(self) -> bool:
        """Whether a pass was made: on all stages but the last its tokens come later."""
        return self.context is not None and self.context.sequence_len_offset > 0

    @property
    def num_passes(self) -> int:
        return self.capacity - self.end

    def extend(self, num_passes: int) -> None:
        """Make room for `num_passes` passes: more than this micro-batch needs itself."""
        more = num_passes - self.num_passes
        self.tokens, self.logprobs, self.uniform = (
            torch.nn.functional.pad(value, (0, more)) for value in (self.tokens, self.logprobs, self.uniform)
        )
        self.capacity += more

    def choose(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """The tokens at `end` from logits [b, V]: sampled ones, of longer prompts their own, zeros behind an end."""
        drawn = sample(logits, self.uniform[:, self.end], sampling)
        chosen = torch.where(self._sampled(), drawn, self.tokens[:, self.end])
        self.logprobs[:, self.end] = token_logprobs(logits, chosen, sampling.temperature)
        return chosen

    def endings(self, chosen: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """Which sequences end with the tokens that were chosen at `end`, [b] bool."""
        sampled = self._sampled()
        ends = sampled & ((chosen == sampling.end_token) | (self.end + 1 >= self.limits))
        if sampling.stop:
            so_far = torch.cat([self.tokens[:, : self.end], chosen.unsqueeze(-1)], dim=-1)
            ends |= stops(so_far, torch.where(sampled & ~ends, self.prompt_lengths, self.end + 1), sampling)
        return ends

    def advance(self, chosen: torch.Tensor, ends: torch.Tensor) -> None:
        """Put down the tokens at `end`, with which the sequences `ends` end, and go on to the next position."""
        self.tokens[:, self.end] = chosen
        self.lengths += self._sampled()
        self.ended |= ends
        self.start, self.end = self.end, self.end + 1

    def _sampled(self) -> torch.Tensor:
        """Rows whose token at `end` is sampled: not of a prompt, and not behind the end of a sequence. [b] bool."""
        return (self.prompt_lengths <= self.end) & ~self.ended


class _Links:
    """This rank's place in the pipeline, and whom it talks to."""

    def __init__(self, copy: ModelCopy, device: torch.device) -> None:
        groups, parallel = copy.parallel.pg_collection, copy.parallel
        assert groups is not None
        at = coordinates_of(dist.get_rank(), parallel.mesh, parallel.layout)
        self.device, self.hidden_size = device, copy.config.hidden_size
        self.dtype = copy.config.pipeline_dtype or copy.config.params_dtype
        self.pipeline = groups.pp
        self.first, self.last = at.pp == 0, at.pp == parallel.layout.pp - 1
        self.alone = parallel.layout.pp == 1
        self.previous, self.next = (
            rank_of(
                Coordinates(tp=at.tp, cp=0, dp=at.dp, pp=pp % parallel.layout.pp),
                parallel.mesh,
                parallel.layout,
            )
            for pp in (at.pp - 1, at.pp + 1)
        )
        self.replica = groups.mp
        self.sampler = rank_of(
            Coordinates(tp=0, cp=0, dp=at.dp, pp=parallel.layout.pp - 1), parallel.mesh, parallel.layout
        )
        self.in_step = _ranks_in_step(copy)

    def agree_on_passes(self, decodes: Sequence[_Decode]) -> None:
        """Make room for as many passes as the ranks need that keep step with this one. Collective over those."""
        if self.in_step is None:
            return
        passes = torch.tensor([one.num_passes for one in decodes], device=self.device)
        dist.all_reduce(passes, op=dist.ReduceOp.MAX, group=self.in_step)
        for one, num_passes in zip(decodes, passes.tolist(), strict=True):
            one.extend(num_passes)

    def receive_hidden(self, one: _Decode) -> torch.Tensor | None:
        if self.first:
            return None
        shape = (one.end - one.start, one.num_rows, self.hidden_size)
        hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.recv(hidden, src=self.previous, group=self.pipeline)
        return hidden

    def send_hidden(self, one: _Decode, hidden: torch.Tensor) -> None:
        hidden = hidden.contiguous()
        work = dist.isend(hidden, dst=self.next, group=self.pipeline)
        assert work is not None
        one.in_flight.append((work, hidden))

    def all_ended(self, one: _Decode) -> bool:
        """Whether all sequences have ended, here and where ranks keep step with this one."""
        if self.in_step is None:
            return bool(one.ended.all())
        open_ = (~one.ended).any().to(torch.int64)
        dist.all_reduce(open_, op=dist.ReduceOp.MAX, group=self.in_step)
        return not bool(open_)

    def hand_out(self, one: _Decode, chosen: torch.Tensor, ends: torch.Tensor) -> None:
        """Give tokens, what they end, and whether that was all from the last stage to the replica's other ranks.

        Does not wait.
        """
        if self.alone:
            return
        message = torch.cat([chosen, ends.to(chosen.dtype), chosen.new_tensor([one.finished])])
        work = dist.broadcast(message, src=self.sampler, group=self.replica, async_op=True)
        assert work is not None
        one.in_flight.append((work, message))

    def take(self, one: _Decode) -> None:
        """Go on by what the last stage hands out."""
        message = torch.empty(2 * one.num_rows + 1, dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=self.sampler, group=self.replica)
        chosen, ends, finished = message.split([one.num_rows, one.num_rows, 1])
        one.advance(chosen, ends.bool())
        one.finished = bool(finished)

    @staticmethod
    def settle(one: _Decode) -> None:
        """Wait for a micro-batch's own messages; by the time it is called they have arrived."""
        for work, _ in one.in_flight:
            work.wait()
        one.in_flight.clear()


def _ranks_in_step(copy: ModelCopy) -> dist.ProcessGroup | None:
    """Ranks of other replicas that hold experts for this one, so that all must run equally many passes; else None."""
    groups = copy.parallel.pg_collection
    if copy.config.num_moe_experts is None or groups is None:
        return None
    experts, own = (set(dist.get_process_group_ranks(group)) for group in (groups.tp_ep, groups.tp))
    group: dist.ProcessGroup = groups.tp_ep
    return group if experts - own else None


def _decode_all(copy: ModelCopy, links: _Links, decodes: Sequence[_Decode], sampling: Sampling) -> None:
    """Go round the micro-batches, one position of each at a time, until all are finished."""
    model, vocab_size = copy.chunks[0], copy.role.vocab_size
    positions = torch.arange(max(one.capacity for one in decodes), device=links.device).unsqueeze(0)
    # A rank that keeps step with another goes on behind its own last token, past the positions that the model knows.
    positions.clamp_(max=copy.role.max_sequence_length - 1)
    active = list(decodes)
    while active:
        for one in active:
            if not links.last and one.has_run:
                links.take(one)
            if not one.finished:
                _pass(model, links, one, positions, vocab_size, sampling)
        active = [one for one in active if not one.finished]
    for one in decodes:
        links.settle(one)


def _pass(
    model: Any, links: _Links, one: _Decode, positions: torch.Tensor, vocab_size: int, sampling: Sampling
) -> None:
    """One forward pass of a micro-batch through this stage."""
    context = one.context
    assert context is not None
    hidden = links.receive_hidden(one)
    links.settle(one)
    if one.start > 0:
        context.enable_decode_mode()
    model.set_input_tensor(hidden)
    # No mask: a first pass is causal by itself, and a single new position may see all that is in the cache.
    output = model(
        one.tokens[:, one.start : one.end],
        positions[:, one.start : one.end].expand(one.num_rows, -1),
        None,
        inference_context=context,
        runtime_gather_output=True,
    )
    context.increment_sequence_len_offset(one.end - one.start)
    if not links.last:
        links.send_hidden(one, output)
        return
    chosen = one.choose(output[:, -1, :vocab_size], sampling)
    ends = one.endings(chosen, sampling)
    one.advance(chosen, ends)
    one.finished = links.all_ended(one)
    links.hand_out(one, chosen, ends)


def _collect(prompts: Batch, decodes: Sequence[_Decode], *, with_data: bool) -> Batch:
    """The sequences in the order of the prompts."""
    place = {i: (one, row) for one in decodes for row, i in enumerate(one.ids)}
    totals = {i: total for one in decodes for i, total in zip(one.ids, one.lengths.tolist(), strict=True)}
    prompt_lengths = dict(zip(prompts.ids, prompts.prompt_lengths, strict=True))
    result = Batch(
        ids=prompts.ids,
        prompt_lengths=prompts.prompt_lengths,
        response_lengths=tuple(totals[i] - prompt_lengths[i] for i in prompts.ids),
    )
    if with_data:
        rows = [(*place[i], prompt_lengths[i], totals[i]) for i in prompts.ids]
        result.put_list(_TOKENS, [one.tokens[row, :total] for one, row, _, total in rows])
        result.put_list(_LOGPROBS, [one.logprobs[row, prompt:total] for one, row, prompt, total in rows])
    return result
