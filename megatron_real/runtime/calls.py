"""Runs one call on one rank: cuts out this rank's share, hands it to the backend, keeps what comes back.

Which sequences a rank works on follows from the lengths alone (`data_plan.assign`), so every rank of a mesh
knows the shards and minibatches of all others; first and middle pipeline stages, which have no scalars, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_real.backend import Algorithm, Minibatch, ModelBackend
from megatron_real.batch import Batch
from megatron_real.data_plan import (
    CallAssignment,
    Lengths,
    assign,
    holders,
    is_first_stage,
    is_last_stage,
)
from megatron_real.dataflow import Call, CallType, Per, Scope
from megatron_real.errors import RealError
from megatron_real.layout import coordinates_of
from megatron_real.plan import CopyKey, Placement
from megatron_real.program import Program
from megatron_real.runtime.data_store import DataStore
from megatron_real.runtime.prompts import TOKENS, PromptBatch, Tokenizer
from megatron_real.runtime.rewards import Samples, call_reward

__all__ = ["CallMetrics", "CallRunner", "CallSite", "Iteration", "reporting_rank"]

CallMetrics = dict[str, Any]
"""Metric name -> number; under ``steps`` name -> list with one number per optimizer step."""


def reporting_rank(placement: Placement) -> int:
    """The rank that tells a call's metrics: last pipeline stage, data- and tensor-parallel rank 0."""
    return holders(0, placement.mesh, placement.parallel)[0]


@dataclass(slots=True, kw_only=True)
class Iteration:
    """What a rank knows of the iteration that it is in."""

    number: int
    prompts: PromptBatch
    store: DataStore
    assignments: dict[str, CallAssignment] = field(default_factory=dict)
    lengths: Lengths | None = None
    """None until the responses' lengths are known."""
    batch_metrics: dict[str, float] = field(default_factory=dict)
    """Of the whole batch, from `Algorithm.prepare`."""
    call_metrics: dict[str, CallMetrics] = field(default_factory=dict)
    """Of the calls that this rank reports."""

    @property
    def prompt_only(self) -> Lengths:
        """Lengths before the generation."""
        prompt = self.prompts.prompt_lengths
        return Lengths(prompt=prompt, response=(0,) * len(prompt))

    def known_lengths(self, call: Call) -> Lengths:
        if self.lengths is None:
            raise RealError(
                f"run:{call.name}: the lengths of the responses are not known; expected a generate call before "
                "it. Put the generate call first in `order`."
            )
        return self.lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """What a rank is to a call that runs on it."""

    call: Call
    placement: Placement
    dp_rank: int
    has_tokens: bool
    """First or last pipeline stage: needs token ids."""
    has_scalars: bool
    """Last pipeline stage: needs everything else."""
    keeps: bool
    """Holds the outputs of its data-parallel shard."""
    tells_lengths: bool
    """The one rank of its shard that tells the lengths of a generation."""
    reports: bool
    """Tells the call's metrics."""

    @classmethod
    def of(cls, call: Call, placement: Placement, rank: int) -> CallSite:
        """The site of `rank`, which is in the placement's mesh."""
        dp_rank = coordinates_of(rank, placement.mesh, placement.parallel).dp
        keepers = holders(dp_rank, placement.mesh, placement.parallel)
        last = is_last_stage(rank, placement)
        return cls(
            call=call,
            placement=placement,
            dp_rank=dp_rank,
            has_tokens=last or is_first_stage(rank, placement),
            has_scalars=last,
            keeps=rank in keepers,
            tells_lengths=rank == keepers[0],
            reports=rank == reporting_rank(placement),
        )


class CallRunner:
    """Runs the calls of one rank."""

    def __init__(
        self,
        program: Program,
        rank: int,
        backend: ModelBackend,
        algorithm: Algorithm,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        self._program = program
        self._graph = program.graph
        self._rank = rank
        self._backend = backend
        self._algorithm = algorithm
        self._tokenizer = tokenizer
        self._device = device
        self._sites = {
            call.name: CallSite.of(call, program.plan.calls[call.name], rank)
            for call in self._graph.calls
            if rank in program.plan.calls[call.name].mesh
        }
        generates = [call for call in self._graph.calls if call.type is CallType.GENERATE]
        self._temperature = algorithm.sampling(generates[0]).temperature if generates else 1.0

    def assign_all(self, state: Iteration) -> None:
        """Compute every call's assignment, once the lengths are known."""
        for call in self._graph.calls:
            if call.name not in state.assignments:
                state.assignments[call.name] = self._assign(call, state.known_lengths(call))

    def num_tokens(self, call: Call, state: Iteration) -> int:
        """Tokens of the call's sequences on this rank's data-parallel shard."""
        lengths = state.known_lengths(call)
        return sum(lengths.of(Per.TOKEN, i) for i in self._shard(self._sites[call.name], state))

    def generate(self, call: Call, copy: CopyKey, state: Iteration) -> tuple[dict[int, int], int]:
        """Run a generate call.

        Returns:
            Response length by sequence id, on one rank of each data-parallel shard and empty on the others; and
            the number of tokens of the shard's sequences.
        """
        site = self._sites[call.name]
        state.assignments[call.name] = self._assign(call, state.prompt_only)
        ids = self._shard(site, state)
        result = self._backend.generate(
            copy,
            call,
            state.number,
            state.prompts.batch(ids, self._device),
            self._microbatches(site, state),
            self._algorithm.sampling(call),
        )
        if set(result.ids) != set(ids):
            raise RealError(
                f"run:{call.name} on rank {self._rank}: the backend returned sequences {list(result.ids)[:8]}; "
                f"expected its shard {list(ids)[:8]}."
            )
        if site.keeps:
            self._keep(call, call.outputs, result, state)
        told = dict(zip(result.ids, result.response_lengths, strict=True)) if site.tells_lengths else {}
        return told, sum(result.prompt_lengths) + sum(result.response_lengths)

    def infer(self, call: Call, copy: CopyKey, state: Iteration) -> None:
        """Run an inference call of a model; its output is its first key."""
        site = self._sites[call.name]
        ids = self._shard(site, state)
        batch = self._inputs(site, ids, Scope.SHARD, state)
        values = self._backend.infer(
            copy, batch, self._microbatches(site, state), self._algorithm.head(call), self._temperature
        )
        if site.keeps:
            if values is None:
                raise RealError(
                    f"run:{call.name} on rank {self._rank}: the backend returned nothing; expected "
                    f"{call.outputs[0]!r} from the last pipeline stage."
                )
            result = self._empty(ids, state, call)
            result.put(self._graph.key(call.outputs[0]), values)
            self._keep(call, call.outputs[:1], result, state)

    def function(self, call: Call, state: Iteration) -> None:
        """Run a call without a model: decode this rank's sequences and call the algorithm's function.

        Raises:
            ConfigError: the function raised, or did not return one finite number per sequence.
        """
        site = self._sites[call.name]
        ids = self._shard(site, state)
        batch = self._inputs(site, ids, Scope.SHARD, state)
        responses = [
            self._response_text(tokens[prompt:].tolist())
            for tokens, prompt in zip(batch.split(TOKENS.name), batch.prompt_lengths, strict=True)
        ]
        samples = Samples(
            ids=ids,
            prompts=tuple(state.prompts.records[i].text for i in ids),
            responses=tuple(responses),
            columns=state.prompts.columns(ids),
        )
        rewards = call_reward(self._algorithm.function(call), call.name, samples)
        result = self._empty(ids, state, call)
        spec = self._graph.key(call.outputs[0])
        result.put(spec, torch.tensor(rewards, dtype=getattr(torch, spec.dtype), device=self._device))
        self._keep(call, call.outputs[:1], result, state)

    def train(self, call: Call, copy: CopyKey, state: Iteration) -> None:
        """Run a train call; last pipeline stages let the algorithm prepare the whole batch before."""
        site = self._sites[call.name]
        ids = self._shard(site, state)
        batch = self._inputs(site, ids, Scope.SHARD, state)
        metrics: dict[str, float] = {}
        if site.has_scalars:
            everything = tuple(range(state.known_lengths(call).count))
            scalars = self._inputs(site, everything, Scope.FULL, state)
            prepared, metrics = self._algorithm.prepare(call, state.number, scalars)
            mine = prepared.select(ids)
            for name, value in mine.data.items():
                batch.put(mine.keys[name], value)
        result = self._backend.train(
            copy, batch, self._minibatches(site, state), self._algorithm.objective(call), self._temperature
        )
        if site.reports:
            state.batch_metrics.update(metrics)
            state.call_metrics[call.name] = dict(result)

    def _assign(self, call: Call, lengths: Lengths) -> CallAssignment:
        num_minibatches = self._algorithm.minibatching(call).num_minibatches if call.trains else 1
        return assign(call, self._program.plan.calls[call.name], lengths, num_minibatches)

    def _shard(self, site: CallSite, state: Iteration) -> tuple[int, ...]:
        return state.assignments[site.call.name].shard(site.dp_rank)

    def _microbatches(self, site: CallSite, state: Iteration) -> tuple[tuple[int, ...], ...]:
        (step,) = state.assignments[site.call.name].steps
        return step[site.dp_rank]

    def _minibatches(self, site: CallSite, state: Iteration) -> list[Minibatch]:
        lengths = state.known_lengths(site.call)
        steps = []
        for step in state.assignments[site.call.name].steps:
            ids = [i for shard in step for microbatch in shard for i in microbatch]
            steps.append(
                Minibatch(
                    microbatches=step[site.dp_rank],
                    num_tokens=sum(lengths.response[i] for i in ids),
                    num_sequences=len(ids),
                )
            )
        return steps * self._algorithm.minibatching(site.call).num_epochs

    def _inputs(self, site: CallSite, ids: tuple[int, ...], scope: Scope, state: Iteration) -> Batch:
        """The sequences `ids` with those inputs of this scope that this rank needs."""
        batch = self._empty(ids, state, site.call)
        for entry in site.call.inputs:
            if entry.scope is scope:
                spec = self._graph.key(entry.key)
                if site.has_scalars or (site.has_tokens and spec.per is Per.TOKEN):
                    batch.put_list(spec, state.store.parts(entry.key, ids))
        return batch

    def _empty(self, ids: tuple[int, ...], state: Iteration, call: Call) -> Batch:
        lengths = state.known_lengths(call)
        return Batch(
            ids=ids,
            prompt_lengths=tuple(lengths.prompt[i] for i in ids),
            response_lengths=tuple(lengths.response[i] for i in ids),
        )

    def _keep(self, call: Call, keys: Iterable[str], result: Batch, state: Iteration) -> None:
        for key in keys:
            if key not in result.data:
                raise RealError(
                    f"run:{call.name} on rank {self._rank}: the backend returned {sorted(result.data)}; "
                    f"expected {key!r} too."
                )
            state.store.put(key, result.ids, result.split(key))

    def _response_text(self, tokens: list[int]) -> str:
        end = self._tokenizer.end_token
        return self._tokenizer.decode(tokens[:-1] if tokens and tokens[-1] == end else tokens)
