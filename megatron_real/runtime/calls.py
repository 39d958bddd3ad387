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
from megatron_real.runtime.prompts import PromptBatch, Tokenizer
from megatron_real.runtime.rewards import Samples, call_reward

__all__ = ["CallMetrics", "CallRunner", "Iteration", "reporting_rank"]

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
                f"run:{call.name}: the lengths of the responses are not known; expected a generate call "
                "before it. "
                "Put the generate call first in `order`."
            )
        return self.lengths


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
        generates = [call for call in self._graph.calls if call.type is CallType.GENERATE]
        self._temperature = algorithm.sampling(generates[0]).temperature if generates else 1.0

    def assign_all(self, state: Iteration) -> None:
        """Compute every call's assignment, once the lengths are known."""
        for call in self._graph.calls:
            if call.name not in state.assignments:
                state.assignments[call.name] = self._assign(call, state.known_lengths(call))

    def generate(self, call: Call, copy: CopyKey, state: Iteration) -> dict[int, int]:
        """Run a generate call.

        Returns:
            Response length by sequence id, on one rank of each data-parallel shard; empty on the others.
        """
        placement = self._placement(call)
        state.assignments[call.name] = self._assign(call, state.prompt_only)
        ids = self._shard(call, state)
        result = self._backend.generate(
            copy,
            call,
            state.number,
            state.prompts.batch(ids, self._device),
            self._microbatches(call, state),
            self._algorithm.sampling(call),
        )
        if set(result.ids) != set(ids):
            raise RealError(
                f"run:{call.name} on rank {self._rank}: the backend returned sequences "
                f"{list(result.ids)[:8]}; expected "
                f"its shard {list(ids)[:8]}."
            )
        first, *others = holders(self._at(placement), placement.mesh, placement.parallel)
        if self._rank in (first, *others):
            self._keep(call, call.outputs, result, state)
        return dict(zip(result.ids, result.response_lengths, strict=True)) if self._rank == first else {}

    def infer(self, call: Call, copy: CopyKey, state: Iteration) -> None:
        """Run an inference call of a model; its output is its first key."""
        placement = self._placement(call)
        ids = self._shard(call, state)
        batch = self._inputs(call, ids, Scope.SHARD, state)
        values = self._backend.infer(
            copy, batch, self._microbatches(call, state), self._algorithm.head(call), self._temperature
        )
        if self._rank in holders(self._at(placement), placement.mesh, placement.parallel):
            if values is None:
                raise RealError(
                    f"run:{call.name} on rank {self._rank}: the last pipeline stage returned no "
                    f"{call.outputs[0]!r}."
                )
            result = self._empty(ids, state, call)
            result.put(self._graph.key(call.outputs[0]), values)
            self._keep(call, call.outputs[:1], result, state)

    def function(self, call: Call, state: Iteration) -> None:
        """Run a call without a model: decode this rank's sequences and call the algorithm's function.

        Raises:
            ConfigError: the function raised, or returned something else than one finite number per sequence.
        """
        ids = self._shard(call, state)
        batch = self._inputs(call, ids, Scope.SHARD, state)
        responses = [
            self._response_text(tokens[prompt:].tolist())
            for tokens, prompt in zip(batch.split("tokens"), batch.prompt_lengths, strict=True)
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
        placement = self._placement(call)
        ids = self._shard(call, state)
        batch = self._inputs(call, ids, Scope.SHARD, state)
        metrics: dict[str, float] = {}
        if is_last_stage(self._rank, placement):
            everything = tuple(range(state.known_lengths(call).count))
            scalars = self._inputs(call, everything, Scope.FULL, state)
            prepared, metrics = self._algorithm.prepare(call, state.number, scalars)
            mine = prepared.select(ids)
            for name, value in mine.data.items():
                batch.put(mine.keys[name], value)
        result = self._backend.train(
            copy, batch, self._minibatches(call, state), self._algorithm.objective(call), self._temperature
        )
        if self._rank == reporting_rank(placement):
            state.batch_metrics.update(metrics)
            state.call_metrics[call.name] = dict(result)

    def _placement(self, call: Call) -> Placement:
        return self._program.plan.calls[call.name]

    def _at(self, placement: Placement) -> int:
        """This rank's data-parallel rank."""
        return coordinates_of(self._rank, placement.mesh, placement.parallel).dp

    def _assign(self, call: Call, lengths: Lengths) -> CallAssignment:
        num_minibatches = self._algorithm.minibatching(call).num_minibatches if call.trains else 1
        return assign(call, self._placement(call), lengths, num_minibatches)

    def _shard(self, call: Call, state: Iteration) -> tuple[int, ...]:
        return state.assignments[call.name].shard(self._at(self._placement(call)))

    def _microbatches(self, call: Call, state: Iteration) -> tuple[tuple[int, ...], ...]:
        (step,) = state.assignments[call.name].steps
        return step[self._at(self._placement(call))]

    def _minibatches(self, call: Call, state: Iteration) -> list[Minibatch]:
        lengths = state.known_lengths(call)
        dp_rank = self._at(self._placement(call))
        steps = []
        for step in state.assignments[call.name].steps:
            ids = [i for shard in step for microbatch in shard for i in microbatch]
            steps.append(
                Minibatch(
                    microbatches=step[dp_rank],
                    num_tokens=sum(lengths.response[i] for i in ids),
                    num_sequences=len(ids),
                )
            )
        return steps * self._algorithm.minibatching(call).num_epochs

    def _inputs(self, call: Call, ids: tuple[int, ...], scope: Scope, state: Iteration) -> Batch:
        """The sequences `ids` with those inputs of `call` of this scope that this rank needs."""
        batch = self._empty(ids, state, call)
        placement = self._placement(call)
        first, last = is_first_stage(self._rank, placement), is_last_stage(self._rank, placement)
        for entry in call.inputs:
            spec = self._graph.key(entry.key)
            if entry.scope is scope and (last or (first and spec.per is Per.TOKEN)):
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
