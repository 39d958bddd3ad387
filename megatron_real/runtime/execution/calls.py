"""Runs one call on one rank: cuts out this rank's share, hands it to the backend, keeps what comes back.

Which sequences a rank works on follows from the lengths alone (`data_plan.assign`), so every rank of a mesh
knows the shards and minibatches of all others; first and middle pipeline stages, which have no scalars, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_real.backend import (
    KEPT,
    MARGIN,
    Algorithm,
    Minibatch,
    Minibatching,
    ModelBackend,
    Samples,
    Sampling,
)
from megatron_real.batch import Batch
from megatron_real.data_plan import (
    CallAssignment,
    Lengths,
    assign,
    holders,
    is_first_stage,
    is_last_stage,
)
from megatron_real.dataflow import SAMPLES, Call, Per, Scope
from megatron_real.errors import RealError
from megatron_real.layout import coordinates_of
from megatron_real.plan import CopyKey, Placement
from megatron_real.program import Program
from megatron_real.runtime.data.dataset import TOKENS, DataBatch, Tokenizer
from megatron_real.runtime.evaluation.estimates import Measured, Sums
from megatron_real.runtime.execution.data_store import DataStore

__all__ = ["CallMetrics", "CallRunner", "CallSite", "HeldOut", "Iteration", "reporting_rank", "spread"]

CallMetrics = dict[str, Any]
"""Metric name -> number; under ``steps`` name -> list with one number per optimizer step."""


def reporting_rank(placement: Placement) -> int:
    """The rank that tells a call's metrics: last pipeline stage, data- and tensor-parallel rank 0."""
    return holders(0, placement.mesh, placement.parallel)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Which held-out batch is evaluated, and how."""

    index: int
    metric: str
    """Of an objective, the one whose standard error is wanted."""
    greedy: bool = False

    def draws(self, call: Call, sampling: Sampling) -> tuple[Call, int, Sampling]:
        """The call and number that key the draws, and how to draw: not as in training, and the same every time."""
        greedy = self.greedy or sampling.greedy
        return replace(call, name=f"eval:{call.name}"), self.index, replace(sampling, greedy=greedy)


def spread(count: int, wanted: int) -> tuple[int, ...]:
    """At most `wanted` of 0..count-1, evenly spaced from 0 on: of different prompts, where a prompt has several."""
    step = max(1, count // max(wanted, 1))
    return tuple(range(0, count, step))[:wanted]


@dataclass(slots=True, kw_only=True)
class Iteration:
    """What a rank knows of the iteration that it is in, or of the evaluation before it."""

    number: int
    data: DataBatch
    store: DataStore
    held_out: HeldOut | None = None
    """None in training."""
    first_index: int = 0
    """Added to an instruction's index, so that positions of ranks compare over evaluations and training."""
    assignments: dict[str, CallAssignment] = field(default_factory=dict)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    """By set of sequences, once its lengths are known: of a data set's answers from the start, of responses when they
    are generated."""
    batch_metrics: dict[str, float] = field(default_factory=dict)
    """Of the whole batch, from `Algorithm.prepare`."""
    call_metrics: dict[str, CallMetrics] = field(default_factory=dict)
    """Of the calls that this rank reports."""
    reward_counts: Counter[str] = field(default_factory=Counter)
    """What happened where this rank called reward functions (`Scorer.take_counts`)."""
    measured: dict[str, Sums] = field(default_factory=dict)
    """Of train calls on held-out data, which this rank reports."""

    @property
    def prompt_only(self) -> Lengths:
        """Lengths before the generation."""
        prompt = self.data.prompt_lengths
        return Lengths(prompt=prompt, response=(0,) * len(prompt))

    def known_lengths(self, call: Call) -> Lengths:
        lengths = self.lengths.get(call.sequences)
        if lengths is None:
            raise RealError(
                f"run:{call.name}: the lengths of the sequences {call.sequences!r} are not known; expected a generate "
                "call before it."
            )
        return lengths


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
    tells: bool
    """The one rank of its shard that tells what others must know: the lengths of a generation, held-out rewards."""
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
            tells=rank == keepers[0],
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

    def assign_all(self, sequences: str, state: Iteration) -> None:
        """Compute the assignment of every call on a set of sequences, once its lengths are known."""
        for call in self._graph.calls:
            if call.sequences == sequences and call.name not in state.assignments:
                state.assignments[call.name] = self._assign(call, state.known_lengths(call), state)

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
        state.assignments[call.name] = self._assign(call, state.prompt_only, state)
        ids = self._shard(site, state)
        sampling = replace(self._algorithm.sampling(call), decode=self._tokenizer.decode)
        drawn, number = call, state.number
        if state.held_out is not None:
            drawn, number, sampling = state.held_out.draws(call, sampling)
        prompts = state.data.batch(ids, self._device)
        result = self._backend.generate(
            copy, drawn, number, prompts, self._microbatches(site, state), sampling
        )
        if set(result.ids) != set(ids):
            raise RealError(
                f"run:{call.name} on rank {self._rank}: the backend returned sequences {list(result.ids)[:8]}; "
                f"expected its shard {list(ids)[:8]}."
            )
        if site.keeps:
            self._keep_generated(call, result, state)
        told = dict(zip(result.ids, result.response_lengths, strict=True)) if site.tells else {}
        return told, sum(result.prompt_lengths) + sum(result.response_lengths)

    def infer(self, call: Call, copy: CopyKey, state: Iteration) -> None:
        """Run an inference call of a model; its output is its first key."""
        site = self._sites[call.name]
        ids = self._shard(site, state)
        batch = self._inputs(site, ids, Scope.SHARD, state)
        values = self._backend.infer(
            copy,
            batch,
            self._microbatches(site, state),
            self._algorithm.head(call),
            self._algorithm.temperature,
        )
        if site.keeps:
            if values is None:
                raise RealError(
                    f"run:{call.name} on rank {self._rank}: the backend returned nothing; expected "
                    f"{call.outputs[0]!r} from the last pipeline stage."
                )
            result = self._empty(ids, state, call)
            result.put(self._graph.key(call.outputs[0]), values)
            state.store.put(call.outputs[0], ids, result.split(call.outputs[0]))

    def function(self, call: Call, state: Iteration) -> None:
        """Run a call without a model: decode this rank's sequences and let the algorithm's function score them.

        Raises:
            ConfigError: the function failed, and the user chose that this stops the run.
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
            prompts=tuple(state.data.records[i].text for i in ids),
            responses=tuple(responses),
            columns=state.data.columns(ids),
        )
        scorer = self._algorithm.function(call)
        rewards = scorer.score(call.name, samples)
        state.reward_counts.update(scorer.take_counts())
        result = self._empty(ids, state, call)
        spec = self._graph.key(call.outputs[0])
        result.put(spec, torch.tensor(rewards, dtype=getattr(torch, spec.dtype), device=self._device))
        state.store.put(spec.name, ids, result.split(spec.name))

    def train(self, call: Call, copy: CopyKey, state: Iteration) -> None:
        """Run a train call; last pipeline stages let the algorithm prepare the whole batch before."""
        site = self._sites[call.name]
        batch, minibatches, metrics = self._prepare(site, state)
        result = self._backend.train(
            copy,
            batch,
            minibatches * self._algorithm.minibatching(call).num_epochs,
            self._algorithm.objective(call),
            self._algorithm.temperature,
        )
        if site.reports:
            state.batch_metrics.update(metrics)
            state.call_metrics[call.name] = dict(result)

    def evaluate(self, call: Call, copy: CopyKey, state: Iteration) -> None:
        """Compute the objective of a train call on held-out data."""
        assert state.held_out is not None, "in an evaluation"
        site = self._sites[call.name]
        batch, (minibatch,), _ = self._prepare(site, state)
        inner, unit = self._algorithm.objective(call), self._algorithm.minibatching(call).unit
        objective = Measured(inner=inner, metric=state.held_out.metric, unit=unit)
        means = self._backend.evaluate(copy, batch, minibatch, objective, self._algorithm.temperature)
        if site.reports:
            state.measured[call.name] = Sums.of_means(minibatch.count(inner.per), means)

    def told(self, key: str, state: Iteration) -> dict[int, torch.Tensor]:
        """By sequence id, the values of a key that this rank is the one to tell of."""
        site = self._sites.get(self._graph.producer(key).name)
        if site is None or not site.tells:
            return {}
        ids = self._shard(site, state)
        return dict(zip(ids, state.store.parts(key, ids), strict=True))

    def samples(self, ids: Collection[int], state: Iteration) -> dict[str, dict[str, Any]]:
        """Those of the sequences whose scores this rank is the one to tell of, as text to read.

        Returns:
            ``ID/CALL`` (of the scoring call) -> ``prompt``, ``response`` (``greedy_response`` of a set ``greedy``) and
            the score under its key.
        """
        found: dict[str, dict[str, Any]] = {}
        if not ids:  # as in most iterations
            return found
        for call in self._graph.calls:
            tokens = [entry.key for entry in call.inputs if self._graph.key(entry.key).per is Per.TOKEN]
            scored = [key for key in call.outputs if self._graph.key(key).per is Per.SEQUENCE]
            if call.trains or not tokens or not scored:
                continue
            name = "response" if call.sequences == SAMPLES else f"{call.sequences}_response"
            for sequence, score in self.told(scored[0], state).items():
                if sequence in ids:
                    record = state.data.records[sequence]
                    (whole,) = state.store.parts(tokens[0], (sequence,))
                    response = self._response_text(whole[len(record.tokens) :].tolist())
                    found[f"{sequence}/{call.name}"] = {
                        "prompt": record.text,
                        name: response,
                        scored[0]: float(score),
                    }
        return found

    def _prepare(self, site: CallSite, state: Iteration) -> tuple[Batch, list[Minibatch], dict[str, float]]:
        """What a train call works on, the steps of a pass over it, and the metrics of the whole batch."""
        ids = self._shard(site, state)
        batch = self._inputs(site, ids, Scope.SHARD, state)
        metrics: dict[str, float] = {}
        kept: Batch | None = None
        if site.has_scalars:
            everything = tuple(range(state.known_lengths(site.call).count))
            scalars = self._inputs(site, everything, Scope.FULL, state)
            prepared, metrics = self._algorithm.prepare(site.call, state.number, scalars)
            kept = prepared if KEPT.name in prepared.data else None
            mine = prepared.select(ids)
            for name, value in mine.data.items():
                batch.put(mine.keys[name], value)
        return batch, self._minibatches(site, state, kept), metrics

    def _assign(self, call: Call, lengths: Lengths, state: Iteration) -> CallAssignment:
        cut = self._algorithm.minibatching(call) if call.trains else Minibatching()
        steps = cut.num_minibatches if state.held_out is None else 1
        return assign(call, self._program.plan.calls[call.name], lengths, steps, unit=cut.unit)

    def _shard(self, site: CallSite, state: Iteration) -> tuple[int, ...]:
        return state.assignments[site.call.name].shard(site.dp_rank)

    def _microbatches(self, site: CallSite, state: Iteration) -> tuple[tuple[int, ...], ...]:
        (step,) = state.assignments[site.call.name].steps
        return step[site.dp_rank]

    def _minibatches(self, site: CallSite, state: Iteration, kept: Batch | None) -> list[Minibatch]:
        """The optimizer steps of a pass; what is masked out of the loss (`KEPT` of `kept`) is not counted."""
        lengths = state.known_lengths(site.call)
        masked: set[int] = set()
        if kept is not None:
            masked = {i for i, one in zip(kept.ids, kept.data[KEPT.name].tolist(), strict=True) if not one}
        steps = []
        for step in state.assignments[site.call.name].steps:
            ids = [i for shard in step for part in shard for i in part if i not in masked]
            steps.append(
                Minibatch(
                    microbatches=step[site.dp_rank],
                    num_tokens=sum(lengths.response[i] for i in ids),
                    num_sequences=len(ids),
                )
            )
        return steps

    def _inputs(self, site: CallSite, ids: tuple[int, ...], scope: Scope, state: Iteration) -> Batch:
        """The sequences `ids` with those inputs of this scope that this rank needs.

        A call that takes no tokens from others gets those of the data set.
        """
        batch = self._empty(ids, state, site.call)
        takes_tokens = any(self._graph.key(entry.key).per is Per.TOKEN for entry in site.call.inputs)
        if scope is Scope.SHARD and not takes_tokens:
            self._put_data(batch, site, state)
        for entry in site.call.inputs:
            if entry.scope is scope:
                spec = self._graph.key(entry.key)
                if site.has_scalars or (site.has_tokens and spec.per is Per.TOKEN):
                    # A model takes its tokens under one name, whatever the set of sequences.
                    known_as = TOKENS if spec.per is Per.TOKEN else spec
                    batch.put_list(known_as, state.store.parts(entry.key, ids))
        return batch

    def _put_data(self, batch: Batch, site: CallSite, state: Iteration) -> None:
        """Tokens and margins of the data set."""
        if site.has_tokens:
            batch.put(TOKENS, state.data.batch(batch.ids, self._device).data[TOKENS.name])
        margins = state.data.columns(batch.ids).get(MARGIN.name)
        if site.has_scalars and margins is not None:
            batch.put(MARGIN, torch.tensor(margins, dtype=torch.float32, device=self._device))

    def _empty(self, ids: tuple[int, ...], state: Iteration, call: Call) -> Batch:
        lengths = state.known_lengths(call)
        return Batch(
            ids=ids,
            prompt_lengths=tuple(lengths.prompt[i] for i in ids),
            response_lengths=tuple(lengths.response[i] for i in ids),
        )

    def _keep_generated(self, call: Call, result: Batch, state: Iteration) -> None:
        """Keep what a generation made under the names that its keys have in the graph."""
        for key in call.outputs:
            made = TOKENS.name if self._graph.key(key).per is Per.TOKEN else "logprobs"
            if made not in result.data:
                raise RealError(
                    f"run:{call.name} on rank {self._rank}: the backend returned {sorted(result.data)}; "
                    f"expected {made!r} too."
                )
            state.store.put(key, result.ids, result.split(made))

    def _response_text(self, tokens: list[int]) -> str:
        end = self._tokenizer.end_token
        return self._tokenizer.decode(tokens[:-1] if tokens and tokens[-1] == end else tokens)
