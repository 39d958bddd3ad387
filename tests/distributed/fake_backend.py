"""A backend and an algorithm without a model: every value is a function of (key, iteration, sequence, position).

So whatever arrives anywhere can be compared with what it must be: a wrong, missing or swapped sequence shows at
once. Weights are their version; a realloc carries it through the default store.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_real.backend import Head, Minibatch, Minibatching, Objective, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import SAMPLES, Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.plan import CopyKey, Plan
from megatron_real.process_groups import default_store
from megatron_real.runtime.data.dataset import TOKENS, DataBatch, Record

VOCAB_SIZE = 251
ADVANTAGES = KeySpec(name="advantages", per=Per.RESPONSE, dtype="float32")


def ppo_like_graph(*, reward_model: bool) -> Graph:
    """Six calls with the edges of PPO."""
    tokens = (Input(key="tokens"),)
    scalars = tuple(
        Input(key=key, scope=Scope.FULL) for key in ("logprobs", "rewards", "ref_logprobs", "values")
    )
    return Graph(
        name="fake",
        calls=(
            Call(name="actor_gen", model="actor", type=CallType.GENERATE, outputs=("tokens", "logprobs")),
            Call(
                name="rew_inf",
                model="reward" if reward_model else None,
                type=CallType.INFERENCE,
                inputs=tokens,
                outputs=("rewards",),
            ),
            Call(
                name="ref_inf", model="ref", type=CallType.INFERENCE, inputs=tokens, outputs=("ref_logprobs",)
            ),
            Call(
                name="critic_inf", model="critic", type=CallType.INFERENCE, inputs=tokens, outputs=("values",)
            ),
            Call(name="actor_train", model="actor", type=CallType.TRAIN, inputs=(*tokens, *scalars)),
            Call(name="critic_train", model="critic", type=CallType.TRAIN, inputs=(*tokens, *scalars)),
        ),
        keys=(
            KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
            KeySpec(name="logprobs", per=Per.RESPONSE, dtype="float32"),
            KeySpec(name="ref_logprobs", per=Per.RESPONSE, dtype="float32"),
            KeySpec(name="values", per=Per.RESPONSE, dtype="float32"),
            KeySpec(name="rewards", per=Per.SEQUENCE, dtype="float32"),
        ),
    )


def expected(key: str, iteration: int, sequence: int, count: int) -> torch.Tensor:
    """The values of one sequence. Whole numbers below 2**24, so they are exact in float32 too."""
    base = zlib.crc32(f"{key}/{iteration}/{sequence}".encode()) % 9_000_000
    values = base + 17 * torch.arange(count, dtype=torch.int64)
    return values % VOCAB_SIZE if key.endswith("tokens") else values.float()


def prompt_length(iteration: int, sequence: int) -> int:
    return 1 + zlib.crc32(f"prompt/{iteration}/{sequence}".encode()) % 9


def response_length(iteration: int, sequence: int, sequences: str = SAMPLES) -> int:
    return 1 + zlib.crc32(f"response/{sequences}/{iteration}/{sequence}".encode()) % 40


def prompts_of(iteration: int, count: int, *, answers: bool = False) -> DataBatch:
    """The prompts of an iteration; their tokens are the first ones of the expected sequences.

    With `answers` the data set has the whole sequences.
    """
    records = []
    for sequence in range(count):
        prompt, response = prompt_length(iteration, sequence), response_length(iteration, sequence)
        tokens = expected("tokens", iteration, sequence, prompt + response).tolist()
        records.append(
            Record(
                text=f"prompt {sequence}",
                tokens=tuple(tokens[:prompt]),
                response=tuple(tokens[prompt:]) if answers else (),
                columns={"number": sequence},
            )
        )
    return DataBatch(records=tuple(records))


def check(batch: Batch, iteration: int, keys: Mapping[str, KeySpec], where: str) -> int:
    """Compare data of a batch (by name there: what it is) with what it must be; how many values were compared."""
    assert set(keys) <= set(batch.data), f"{where}: has {sorted(batch.data)}, needs {sorted(keys)}"
    compared = 0
    for name, spec in keys.items():
        for sequence, values in zip(batch.ids, batch.split(name), strict=True):
            prompt = prompt_length(iteration, sequence)
            response = response_length(iteration, sequence, spec.sequences)
            count = {Per.TOKEN: prompt + response, Per.RESPONSE: response, Per.SEQUENCE: 1}[spec.per]
            right = expected(spec.name, iteration, sequence, count)
            assert torch.equal(values, right), f"{where}: {spec.name} of {sequence}: {values} != {right}"
            compared += count
    return compared


def as_handed_over(call: Call, graph: Graph, scope: Scope | None = None) -> dict[str, KeySpec]:
    """The inputs of a call by the name under which it gets them: tokens always as ``tokens``."""
    specs = [graph.key(entry.key) for entry in call.inputs if scope in (None, entry.scope)]
    found = {"tokens" if spec.per is Per.TOKEN else spec.name: spec for spec in specs}
    if call.type is not CallType.GENERATE and scope is not Scope.FULL:
        found.setdefault("tokens", TOKENS)
    return found


@dataclass
class FakeObjective:
    """The mean advantage of a token."""

    head: Head = Head.LOGPROBS
    per: Per = Per.RESPONSE
    stop_above: Mapping[str, float] = field(default_factory=dict)

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = batch.data["advantages"].double().sum()
        return total, {"twice": 2 * total}


@dataclass
class FakeAlgorithm:
    """Checks the scalars that it is given; its state counts the batches that it prepared."""

    graph: Graph
    num_minibatches: int = 2
    num_epochs: int = 2
    unit: int = 1
    reward: Any = None
    temperature: float = 0.5
    prepared: dict[int, int] = field(default_factory=dict)
    compared: int = 0

    def sampling(self, call: Call) -> Sampling:
        return Sampling(max_new_tokens=40, end_token=VOCAB_SIZE, temperature=0.5)

    def head(self, call: Call) -> Head:
        return {Per.SEQUENCE: Head.SCORES, Per.RESPONSE: Head.LOGPROBS}[self.graph.key(call.outputs[0]).per]

    def function(self, call: Call) -> Any:
        return self.reward

    def minibatching(self, call: Call) -> Minibatching:
        assert call.trains, "asked for train calls only"
        return Minibatching(num_minibatches=self.num_minibatches, num_epochs=self.num_epochs, unit=self.unit)

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        assert scalars.ids == tuple(range(len(scalars.ids))), "all sequences, in id order"
        keys = as_handed_over(call, self.graph, Scope.FULL)
        self.compared += check(scalars, iteration, keys, f"prepare {call.name}")
        self.prepared[iteration] = self.prepared.get(iteration, 0) + 1
        result = scalars.select(scalars.ids)
        parts = [
            expected("advantages", iteration, i, n)
            for i, n in zip(scalars.ids, scalars.response_lengths, strict=True)
        ]
        result.put_list(ADVANTAGES, parts)
        if "rewards" not in scalars.data:
            return result, {}
        return result, {"reward": float(scalars.data["rewards"].mean())}

    def objective(self, call: Call) -> Objective:
        return FakeObjective()

    def state_dict(self) -> dict[str, Any]:
        return {"batches": len(self.prepared)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepared = {-1 - i: 1 for i in range(state["batches"])}


@dataclass
class FakeStream:
    """A streamed realloc; it ends when the source has told its version."""

    backend: FakeBackend
    source: CopyKey
    target: CopyKey
    key: str

    def finish(self) -> dict[str, float]:
        backend = self.backend
        if backend.rank in self.source.mesh:
            backend.sending.remove(self.source)
        if backend.rank in self.target.mesh:
            backend.versions[self.target] = int(default_store().get(self.key))
        return {"bytes_moved": 0.0, "wait_s": 0.0}


@dataclass
class FakeBackend:
    """Keeps versions instead of weights, and checks all data that it is given.

    Args:
        sleep_s: seconds by call name.
        stuck: models whose version a training does not advance.
    """

    graph: Graph
    plan: Plan
    rank: int
    sleep_s: Mapping[str, float] = field(default_factory=dict)
    stuck: frozenset[str] = frozenset()
    versions: dict[CopyKey, int] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    compared: int = 0
    iteration: int = -1
    reallocs: int = 0
    sending: list[CopyKey] = field(default_factory=list)
    """Sources of streams that are not finished here."""

    def __post_init__(self) -> None:
        for model in self.graph.models:
            home = self.plan.copy_of(self.graph.home_call(model))
            assert home is not None, "a model has a copy"
            if self.rank in home.mesh and self.plan.calls[self.graph.home_call(model).name].offload != "node":
                self.versions[home] = 0

    def generate(
        self,
        copy: CopyKey,
        call: Call,
        iteration: int,
        prompts: Batch,
        microbatches: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> Batch:
        self.iteration = iteration
        assert sorted(i for part in microbatches for i in part) == sorted(prompts.ids), (
            "micro-batches cover the shard"
        )
        for sequence, tokens in zip(prompts.ids, prompts.split("tokens"), strict=True):
            right = expected("tokens", iteration, sequence, prompt_length(iteration, sequence))
            assert torch.equal(tokens, right), f"prompt of sequence {sequence}"
        time.sleep(self.sleep_s.get(call.name, 0.0))
        result = Batch(
            ids=prompts.ids,
            prompt_lengths=prompts.prompt_lengths,
            response_lengths=tuple(response_length(iteration, i, call.sequences) for i in prompts.ids),
        )
        for key in call.outputs:
            spec = (
                TOKENS
                if self.graph.key(key).per is Per.TOKEN
                else KeySpec(name="logprobs", per=Per.RESPONSE, dtype="float32")
            )
            result.put_list(spec, self._right(key, result))
        return result

    def infer(
        self,
        copy: CopyKey,
        batch: Batch,
        microbatches: Sequence[Sequence[int]],
        head: Head,
        temperature: float,
    ) -> torch.Tensor | None:
        call = self._call_of(copy, batch)
        assert temperature == 0.5, "the temperature of the sampling"
        assert sorted(i for part in microbatches for i in part) == list(batch.ids), (
            "micro-batches cover the shard"
        )
        self._check(batch, call, {"tokens": as_handed_over(call, self.graph)["tokens"]})
        time.sleep(self.sleep_s.get(call.name, 0.0))
        if self._stage(copy) != copy.layout.pp - 1:
            return None
        return torch.cat(self._right(call.outputs[0], batch))

    def train(
        self,
        copy: CopyKey,
        batch: Batch,
        minibatches: Sequence[Minibatch],
        objective: Objective,
        temperature: float,
    ) -> dict[str, float]:
        call = next(call for call in self.graph.calls if call.model == copy.model and call.trains)
        last = self._stage(copy) == copy.layout.pp - 1
        keys = as_handed_over(call, self.graph)
        self._check(batch, call, {**keys, "advantages": ADVANTAGES} if last else {"tokens": keys["tokens"]})
        assert copy not in self.sending, f"{copy} is still sent"
        self.log.append(("train", call.name, self.iteration, batch.ids, tuple(minibatches)))
        time.sleep(self.sleep_s.get(call.name, 0.0))
        if copy.model not in self.stuck:
            self.versions[copy] += 1
        return {"loss": float(self.iteration)} if last else {}

    def evaluate(
        self, copy: CopyKey, batch: Batch, minibatch: Minibatch, objective: Objective, temperature: float
    ) -> dict[str, float]:
        call = next(call for call in self.graph.calls if call.model == copy.model and call.trains)
        keys = as_handed_over(call, self.graph)
        if self._stage(copy) != copy.layout.pp - 1:
            self._check(batch, call, {"tokens": keys["tokens"]})
            return {}
        self._check(batch, call, {**keys, "advantages": ADVANTAGES})
        # All values are known, so those of the other ranks are too.
        lengths = tuple(response_length(self.iteration, i) for i in range(minibatch.num_sequences))
        everything = Batch(
            ids=tuple(range(len(lengths))), prompt_lengths=(1,) * len(lengths), response_lengths=lengths
        )
        parts = [expected("advantages", self.iteration, i, length) for i, length in enumerate(lengths)]
        everything.put_list(ADVANTAGES, parts)
        assert minibatch.num_tokens == sum(lengths)
        loss, sums = objective.loss({}, everything)
        return {name: float(value) / sum(lengths) for name, value in {"loss": loss, **sums}.items()}

    def realloc(self, source: CopyKey, target: CopyKey, version: int) -> dict[str, float]:
        self.reallocs += 1
        key = f"fake/{source}>{target}/{self._serial(source, target)}"
        store = default_store()
        if self.rank in source.mesh:
            store.set(key, str(self.versions[source]))
        if self.rank in target.mesh:
            self.versions[target] = int(store.get(key))
        return {"bytes_moved": 0.0}

    def mix(self, source: CopyKey, target: CopyKey, mix: float, *, old: int, new: int) -> dict[str, float]:
        if self.rank in source.mesh:
            assert self.versions[source] == new
        if self.rank in target.mesh:
            assert self.versions[target] == old
            self.versions[target] = new
        return {"bytes_moved": 0.0}

    def stream(self, source: CopyKey, target: CopyKey, version: int) -> FakeStream:
        self.reallocs += 1
        key = f"fake/{source}>{target}/{self._serial(source, target)}"
        if self.rank in source.mesh:
            assert self.versions[source] == version
            default_store().set(key, str(version))
            self.sending.append(source)
        return FakeStream(backend=self, source=source, target=target, key=key)

    def release(self, copy: CopyKey) -> None:
        del self.versions[copy]

    def offload(self, copy: CopyKey, to: str, what: str) -> None:
        assert what == "state" or copy not in self.sending, f"{copy} is still sent"
        self.log.append(("offload", str(copy), to, what))

    def reload(self, copy: CopyKey, source: str, what: str) -> None:
        self.log.append(("reload", str(copy), source, what))
        if source == "node":
            self.versions[copy] = 0

    def version(self, copy: CopyKey) -> int:
        return self.versions.get(copy, -1)

    def save(self, folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        self.log.append(("save", str(folder), iteration, dict(state)))

    def _serial(self, source: CopyKey, target: CopyKey) -> int:
        """How often this pair was reallocated; equal on all its ranks, since all take part each time."""
        self.log.append(("realloc", str(source), str(target)))
        return self.log.count(("realloc", str(source), str(target)))

    def _stage(self, copy: CopyKey) -> int:
        return (self.rank - copy.mesh.start) // (copy.layout.size // copy.layout.pp)

    def _call_of(self, copy: CopyKey, batch: Batch) -> Call:
        """The inference call of a copy whose sequences have the lengths of `batch`."""
        found = [
            call
            for call in self.graph.calls
            if call.type is CallType.INFERENCE
            and self.plan.copy_of(call) == copy
            and batch.response_lengths == self._lengths(batch, call)
        ]
        assert len(found) == 1, (
            f"{copy}: {[call.name for call in found]} have lengths {batch.response_lengths}"
        )
        return found[0]

    def _lengths(self, batch: Batch, call: Call) -> tuple[int, ...]:
        return tuple(response_length(self.iteration, i, call.sequences) for i in batch.ids)

    def _right(self, key: str, batch: Batch) -> list[torch.Tensor]:
        counts = batch.lengths(self.graph.key(key).per)
        return [expected(key, self.iteration, i, n) for i, n in zip(batch.ids, counts, strict=True)]

    def _check(self, batch: Batch, call: Call, keys: Mapping[str, KeySpec]) -> None:
        right = self._lengths(batch, call)
        assert batch.response_lengths == right, f"{call.name}: lengths {batch.response_lengths} != {right}"
        copy = self.plan.copy_of(call)
        assert copy is not None, "a model has a copy"
        if self._stage(copy) in (0, copy.layout.pp - 1):
            self.compared += check(batch, self.iteration, keys, f"{call.name} on rank {self.rank}")
        else:
            assert not batch.data, "middle stages get no data"
