"""Walks a program on one rank: each instruction becomes one call of a backend, or messages.

The executor decides nothing: what to do stands in the program, which sequences to do it on follows from the
lengths. Before every run it compares the version of the copy's weights with the one that the program asks
for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_real.backend import Algorithm, ModelBackend, Streaming
from megatron_real.capabilities import graph_problems
from megatron_real.data_plan import Lengths, build_transfer_plans
from megatron_real.dataflow import SAMPLES, Call, CallType
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import PlanError, RealError, raise_problems
from megatron_real.layout import rank_groups
from megatron_real.plan import CopyKey
from megatron_real.program import Mix, Offload, Program, Realloc, Reload, Run, Save, Side, Step, Transfer
from megatron_real.runtime.data.dataset import DataBatch, Tokenizer
from megatron_real.runtime.execution.calls import CallRunner, HeldOut, Iteration, reporting_rank, spread
from megatron_real.runtime.execution.data_store import DataStore
from megatron_real.runtime.execution.observers import Fact, Observers
from megatron_real.runtime.execution.plan_change import PlanChange
from megatron_real.runtime.execution.transfer import DataTransfers
from megatron_real.runtime.reports.reporting import IterationMetrics, NoReporter, Reporter

__all__ = ["RankExecutor", "RunParts"]

_KINDS = {
    Run: "run",
    Realloc: "realloc",
    Mix: "realloc",
    Transfer: "transfer",
    Offload: "offload",
    Reload: "offload",
    Save: "save",
}
"""Kinds of spans (`megatron_real.trace.SpanKind`)."""


_EVALUATION, _BATCH = -(2**40), 2**20
"""Where an evaluation stands in the order of an iteration: before its first instruction, one batch after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What an executor puts together."""

    program: Program
    rank: int
    backend: ModelBackend
    algorithm: Algorithm
    transfers: DataTransfers
    tokenizer: Tokenizer
    observers: Observers = field(default_factory=Observers)
    memory: MemoryLedger | None = None
    """Where the backend books device memory; the executor measures each instruction's peak in it."""
    base_version: int = 0
    """Version of the trained models' weights before iteration 0. A backend whose versions go on after a
    resume leaves 0."""
    change: PlanChange | None = None
    """Another plan that the run goes on under."""
    evaluation: RankExecutor | None = None
    """Runs the calls of an evaluation under the same plan."""


class RankExecutor:
    """Runs the program of one rank.

    Raises:
        PlanError: the graph has calls that the runtime cannot execute.
    """

    def __init__(self, parts: RunParts) -> None:
        self.program = parts.program
        self.rank = parts.rank
        self.algorithm = parts.algorithm
        graph = parts.program.graph
        raise_problems(graph_problems(graph), subject=f"graph {graph.name}", error=PlanError)
        self._backend = parts.backend
        self.transfers = parts.transfers
        self.observers = parts.observers
        self.change = parts.change
        self.evaluation = parts.evaluation
        self._memory = parts.memory
        self._seconds: dict[str, float] = {}
        self._base_version = parts.base_version
        self._steps = tuple(
            (step, _KINDS[type(step.instruction)], self._facts_of(step))
            for step in parts.program.steps(parts.rank)
        )
        self._offsets = {
            run.call: run.version_offset for run in parts.program.instructions if isinstance(run, Run)
        }
        self._store = DataStore()
        self._told: Mapping[int, int] | None = None
        """Response lengths by sequence that this rank tells, from its generation until they are gathered."""
        self._response: tuple[str, tuple[int, ...]] | None = None
        """A set of sequences with all its response lengths, from their arrival until they are planned with."""
        self._streams: dict[str, Streaming] = {}
        """Reallocs that are under way, by name."""
        self._reporter: Reporter = NoReporter()
        self._calls = CallRunner(
            parts.program, parts.rank, parts.backend, parts.algorithm, parts.tokenizer, parts.transfers.device
        )

    def run_iteration(
        self,
        iteration: int,
        data: DataBatch,
        *,
        save: Path | None = None,
        reporter: Reporter | None = None,
        num_samples: int = 0,
    ) -> IterationMetrics:
        """Run one iteration; every rank calls with the same arguments.

        Args:
            iteration: counted from 0 over the whole run.
            data: prompts, or sequences, of the iteration.
            save: where to write a checkpoint at the end; None skips the program's `Save`.
            reporter: gets what this returns, before the checkpoint is written.
            num_samples: sequences of which the metrics have the text.

        Returns:
            Metrics of the calls that this rank reports.

        Raises:
            RealError: a copy has other weights than the program asks for, or a peer did not come.
        """
        state = Iteration(number=iteration, data=data, store=self._store)
        self._reporter = reporter or NoReporter()
        self._walk(state)
        metrics = self._metrics(state, num_samples)
        # A killed run resumes after its last checkpoint: the metrics up to there must be on their way.
        self._reporter.report(iteration, metrics)
        for step, kind, facts in self._steps:
            if kind == "save" and save is not None:
                self._step(step, kind, facts, state, save)
        self.transfers.end_iteration()
        return metrics

    def evaluate(self, number: int, data: DataBatch, held_out: HeldOut) -> tuple[Iteration, CallRunner]:
        """Run the program of an evaluation; every rank calls with the same arguments.

        Args:
            number: iterations that the models were trained for.
            data: held-out prompts, or sequences.
            held_out: which of the evaluation's batches that is, and how to draw.

        Returns:
            What this rank knows afterwards, until it is called again; and what reads it.

        Raises:
            RealError: as `run_iteration`.
        """
        state = Iteration(
            number=number,
            data=data,
            store=self._store,
            held_out=held_out,
            first_index=_EVALUATION + held_out.index * _BATCH,
        )
        self._walk(state)
        self.transfers.end_iteration()
        return state, self._calls

    def checkpoint(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint of `iteration` iterations into `folder`.

        Collective over WORLD.
        """
        self.transfers.fence()
        state = self._algorithm_state()
        self.transfers.meet()
        self._backend.save(folder, iteration, state)

    def finish(self) -> None:
        """Leave nothing on its way, and the algorithm's state the same on all ranks, for an executor that follows.

        Collective over WORLD.
        """
        self.transfers.fence()
        self.algorithm.load_state_dict(self._algorithm_state())
        self.transfers.meet()

    def _walk(self, state: Iteration) -> None:
        """Do what the program says, without its `Save`."""
        self._store.clear()
        self._seconds = {}
        self._told = self._response = None
        self.transfers.begin(state.number, len(state.data.records))
        for sequences in self.program.graph.sequence_sets:
            if self.program.graph.generation(sequences) is None:
                self._learn_lengths(sequences, state.data.response_lengths, state)
        for step, kind, facts in self._steps:
            if kind != "save" and _due(step, state.number):
                self._step(step, kind, facts, state)
        self._finish(self._streams)

    def _step(
        self, step: Step, kind: str, facts: dict[str, Fact], state: Iteration, save: Path | None = None
    ) -> None:
        self.observers.progress.enter(state.number, state.first_index + step.index, step.name)
        self.observers.faults.before(state.number, step.name, step.index)
        self._finish(realloc.name for realloc in step.finish)
        if self._memory is not None:
            self._memory.reset_peak()
        began_s = time.monotonic()
        with self.observers.tracer.span(step.name, kind, state.number, **facts) as span:
            span.facts.update(self._execute(step, state, save))
            if self._memory is not None:
                span.facts["peak_bytes"] = self._memory.peak_bytes
        if isinstance(step.instruction, Run):
            self._seconds[step.instruction.call] = time.monotonic() - began_s
        if self._told is not None and isinstance(step.instruction, Run):
            told, self._told = self._told, None
            lengths = self._gather_lengths(step.instruction, told, state.number)
            self._response = (self._sequences(step.instruction.call), lengths)
        if self._response is not None:
            # Outside of all spans: it is the runtime's own time.
            self._learn_lengths(*self._response, state)
            self._response = None
        self.observers.progress.leave()

    def _metrics(self, state: Iteration, num_samples: int) -> IterationMetrics:
        sampled = state.lengths.get(SAMPLES)
        return IterationMetrics(
            batch=state.batch_metrics,
            calls=state.call_metrics,
            num_tokens=sum(sum(one.prompt) + sum(one.response) for one in state.lengths.values()),
            response_lengths=sampled.response if sampled is not None else (),
            seconds=self._seconds,
            reward_counts=state.reward_counts,
            samples=self._calls.samples(spread(len(state.data.records), num_samples), state),
        )

    def _execute(self, step: Step, state: Iteration, save: Path | None) -> dict[str, Fact]:
        """Do one instruction; returns facts for its span."""
        match step.instruction:
            case Run() as run:
                return self._run(run, state)
            case Transfer() as transfer:
                return self._transfer(transfer, step, state)
            case Realloc() as realloc:
                return self._realloc(realloc, state)
            case Mix() as mix:
                return self._mix(mix, state)
            case Offload(copy=copy, to=to, what=what):
                self._backend.offload(copy, to, what)
            case Reload(copy=copy, source=source, what=what):
                self._backend.reload(copy, source, what)
            case Save():
                assert save is not None, "skipped otherwise"
                self._save(state.number, save)
        return {}

    def _run(self, run: Run, state: Iteration) -> dict[str, Fact]:
        call = self.program.graph.call(run.call)
        copy = run.copy
        if copy is None:
            self._calls.function(call, state)
            return {}
        stream = self._streams.pop(f"realloc:{run.call}", None)
        if stream is None:
            self._check_version(run, copy, state.number)
        tokens = None
        match call.type:
            case CallType.GENERATE:
                self._told, tokens = self._calls.generate(call, copy, state)
            case CallType.INFERENCE:
                self._calls.infer(call, copy, state)
            case CallType.TRAIN if state.held_out is not None:
                self._calls.evaluate(call, copy, state)
            case CallType.TRAIN:
                self._calls.train(call, copy, state)
                self._check_advanced(run, copy, state.number)
        facts: dict[str, Fact] = {}
        if stream is not None:
            facts = {f"stream_{name}": value for name, value in stream.finish().items()}
            self._check_version(run, copy, state.number)
        if run.release:
            self._backend.release(copy)
        return {"tokens": self._calls.num_tokens(call, state) if tokens is None else tokens, **facts}

    def _finish(self, names: Iterable[str]) -> None:
        """Wait for streamed reallocs that this rank sends while it does something else."""
        for name in list(names):
            self._streams.pop(name).finish()

    def _gather_lengths(self, run: Run, told: Mapping[int, int], iteration: int) -> tuple[int, ...]:
        """The generating ranks tell each other; fast ones wait for the slowest here."""
        if run.mesh.size == 1:
            return self.transfers.gather_lengths(run.mesh, told)
        name, facts = f"transfer:{run.call}>lengths", {"side": "gather", "joint": str(run.mesh)}
        with self.observers.tracer.span(name, _KINDS[Transfer], iteration, **facts):
            return self.transfers.gather_lengths(run.mesh, told)

    def _realloc(self, realloc: Realloc, state: Iteration) -> dict[str, Fact]:
        version = self._version(realloc.model, self._offsets[realloc.call], state.number)
        if realloc.stream:
            stream = self._backend.stream(realloc.source, realloc.target, version)
            self._streams[realloc.name] = stream
            return {"stream": True}
        accounting = self._backend.realloc(realloc.source, realloc.target, version)
        return {**accounting, "bytes": accounting.get("bytes_moved", 0.0)}

    def _mix(self, mix: Mix, state: Iteration) -> dict[str, Fact]:
        old, new = (self._version(mix.target.model, 0, state.number + offset) for offset in (0, 1))
        resides = mix.from_host and self.rank in mix.target.mesh
        if resides:
            self._backend.reload(mix.target, "host", "weights")
        accounting = self._backend.mix(mix.source, mix.target, mix.update.mix, old=old, new=new)
        if resides:
            self._backend.offload(mix.target, "host", "weights")
        return {**accounting, "bytes": accounting.get("bytes_moved", 0.0)}

    def _transfer(self, transfer: Transfer, step: Step, state: Iteration) -> dict[str, Fact]:
        if transfer.consumer is None:
            sequences = self._sequences(transfer.producer)
            if step.side is Side.SEND:
                self.transfers.send_lengths(transfer, state.lengths[sequences].response)
            else:
                self._response = (sequences, self.transfers.receive_lengths(step.index))
                return {"from": _listed(self.transfers.senders(transfer))}
            return {}
        if step.side is Side.SEND:
            return {"bytes": self.transfers.post_sends(transfer, self._store)}
        senders = _listed(self.transfers.senders(transfer))
        return {"from": senders, "bytes": self.transfers.receive(step.index, self._store)}

    def _sequences(self, call: str) -> str:
        return self.program.graph.call(call).sequences

    def _learn_lengths(self, sequences: str, response: tuple[int, ...], state: Iteration) -> None:
        lengths = Lengths(prompt=state.data.prompt_lengths, response=response)
        state.lengths[sequences] = lengths
        self._calls.assign_all(sequences, state)
        plans = build_transfer_plans(self.program.graph, self.program.plan, state.assignments, sequences)
        self.transfers.set_plans(sequences, lengths, plans)

    def _version(self, model: str, offset: int, iteration: int) -> int:
        """The version that the weights of `model` must have."""
        graph = self.program.whole or self.program.graph
        return self._base_version + graph.version(model, iteration) + offset if graph.changes(model) else 0

    def _check_version(self, run: Run, copy: CopyKey, iteration: int) -> None:
        expected = self._version(copy.model, run.version_offset, iteration)
        found = self._backend.version(copy)
        if found != expected:
            has = "no weights" if found < 0 else f"weights of version {found}"
            raise RealError(
                f"{run.name} (iteration {iteration}) on rank {self.rank}: {copy} has {has}; expected version "
                f"{expected}. "
                "A realloc or a training step before it failed, or was left out."
            )

    def _check_advanced(self, run: Run, copy: CopyKey, iteration: int) -> None:
        expected = self._version(copy.model, run.version_offset, iteration) + 1
        found = self._backend.version(copy)
        if found != expected:
            raise RealError(
                f"{run.name} (iteration {iteration}) on rank {self.rank}: {copy} has version {found} after "
                "training; "
                f"expected {expected}. The backend must advance the version once per train call."
            )

    def _save(self, iteration: int, folder: Path) -> None:
        self.transfers.fence()
        self.transfers.meet()
        self._reporter.settle(iteration)
        self.checkpoint(folder, iteration + 1)

    def _algorithm_state(self) -> dict[str, Any]:
        """The algorithm's state of a rank that prepares batches, on every rank.

        Only the last stages of train calls prepare batches, so only their state has moved.
        """
        trains = [call for call in self.program.graph.ordered(self.program.plan.order) if call.trains]
        if not trains:
            return dict(self.algorithm.state_dict())
        source = reporting_rank(self.program.plan.calls[trains[-1].name])
        mine = json.dumps(dict(self.algorithm.state_dict())).encode() if self.rank == source else b""
        state: dict[str, Any] = json.loads(self.transfers.broadcast_bytes(mine, source))
        return state

    def _facts_of(self, step: Step) -> dict[str, Fact]:
        match step.instruction:
            case Run(call=name):
                call = self.program.graph.call(name)
                facts: dict[str, Fact] = {"type": str(call.type), "model": call.model}
                joint = self._joint_ranks(call)
                return facts if joint is None else {**facts, "joint": joint}
            case Realloc(model=model) | Mix(target=CopyKey(model=model)):
                return {"model": model}
            case Offload(copy=copy) | Reload(copy=copy):
                return {"model": copy.model}
            case Transfer():
                return {"side": str(step.side)}
            case Save():
                return {}

    def _joint_ranks(self, call: Call) -> str | None:
        """Ranks that go through a call together: replicas meet in training only; None if this rank is alone."""
        placement = self.program.plan.calls[call.name]
        mesh, layout = placement.mesh, placement.parallel
        if call.model is None or mesh.size == 1:
            return None
        if call.trains:
            return str(mesh)
        ranks = next(group for group in rank_groups(mesh, layout, "tp", "cp", "pp") if self.rank in group)
        return _listed(ranks) if len(ranks) > 1 else None


def _due(step: Step, iteration: int) -> bool:
    """Whether a step is made in this iteration: updates may leave some out."""
    return not isinstance(step.instruction, Mix) or step.instruction.update.due(iteration)


def _listed(ranks: Iterable[int]) -> str:
    return ",".join(map(str, ranks))
