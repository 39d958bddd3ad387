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
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per, Scope
from megatron_real.plan import CopyKey, Plan
from megatron_real.process_groups import default_store
from megatron_real.runtime.prompts import PromptBatch, Record

VOCAB_SIZE = 251


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
    return values % VOCAB_SIZE if key == "tokens" else values.float()


def prompt_length(iteration: int, sequence: int) -> int:
    return 1 + zlib.crc32(f"prompt/{iteration}/{sequence}".encode()) % 9


def response_length(iteration: int, sequence: int) -> int:
    return 1 + zlib.crc32(f"response/{iteration}/{sequence}".encode()) % 40


def prompts_of(iteration: int, count: int) -> PromptBatch:
    """The prompts of an iteration; their tokens are the first ones of the expected sequences."""
    records = []
    for sequence in range(count):
        tokens = expected("tokens", iteration, sequence, prompt_length(iteration, sequence)).tolist()
        records.append(Record(text=f"prompt {sequence}", tokens=tuple(tokens), columns={"number": sequence}))
    return PromptBatch(records=tuple(records))


def check(batch: Batch, iteration: int, keys: Sequence[str], where: str) -> int:
    """Compare `keys` of a batch with what they must be; returns how many values were compared."""
    assert set(keys) <= set(batch.data), f"{where}: has {sorted(batch.data)}, needs {sorted(keys)}"
    compared = 0
    for key in keys:
        for sequence, values in zip(batch.ids, batch.split(key), strict=True):
            prompt, response = prompt_length(iteration, sequence), response_length(iteration, sequence)
            count = {Per.TOKEN: prompt + response, Per.RESPONSE: response, Per.SEQUENCE: 1}[
                batch.keys[key].per
            ]
            right = expected(key, iteration, sequence, count)
            assert torch.equal(values, right), f"{where}: {key} of sequence {sequence}: {values} != {right}"
            compared += count
    return compared


@dataclass
class FakeAlgorithm:
    """Checks the scalars that it is given; its state counts the batches that it prepared."""

    graph: Graph
    num_minibatches: int = 2
    num_epochs: int = 2
    reward: Any = None
    prepared: dict[int, int] = field(default_factory=dict)
    compared: int = 0

    def sampling(self, call: Call) -> Sampling:
        return Sampling(max_new_tokens=40, end_token=VOCAB_SIZE, temperature=0.5)

    def head(self, call: Call) -> Head:
        return {"rew_inf": Head.SCORES, "ref_inf": Head.LOGPROBS, "critic_inf": Head.VALUES}[call.name]

    def function(self, call: Call) -> Any:
        return self.reward

    def minibatching(self, call: Call) -> Minibatching:
        assert call.trains, "asked for train calls only"
        return Minibatching(num_minibatches=self.num_minibatches, num_epochs=self.num_epochs)

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        assert scalars.ids == tuple(range(len(scalars.ids))), "all sequences, in id order"
        self.compared += check(
            scalars, iteration, ["logprobs", "ref_logprobs", "values", "rewards"], f"prepare {call.name}"
        )
        self.prepared[iteration] = self.prepared.get(iteration, 0) + 1
        result = scalars.select(scalars.ids)
        parts = [
            expected("advantages", iteration, i, n)
            for i, n in zip(scalars.ids, scalars.response_lengths, strict=True)
        ]
        result.put_list(KeySpec(name="advantages", per=Per.RESPONSE, dtype="float32"), parts)
        return result, {"reward": float(scalars.data["rewards"].mean())}

    def objective(self, call: Call) -> Objective:
        return None  # type: ignore[return-value]  # the fake backend computes no loss

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
            response_lengths=tuple(response_length(iteration, i) for i in prompts.ids),
        )
        for key in call.outputs:
            result.put_list(self.graph.key(key), self._right(key, result))
        return result

    def infer(
        self,
        copy: CopyKey,
        batch: Batch,
        microbatches: Sequence[Sequence[int]],
        head: Head,
        temperature: float,
    ) -> torch.Tensor | None:
        call = self._call_of(copy, CallType.INFERENCE)
        assert temperature == 0.5, "the temperature of the sampling"
        assert sorted(i for part in microbatches for i in part) == list(batch.ids), (
            "micro-batches cover the shard"
        )
        self._check(batch, call, ["tokens"])
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
        call = self._call_of(copy, CallType.TRAIN)
        last = self._stage(copy) == copy.layout.pp - 1
        self._check(batch, call, ["tokens"])
        if last:
            self._check(batch, call, ["advantages", "logprobs"])
        assert copy not in self.sending, f"{copy} is still sent"
        self.log.append(("train", call.name, self.iteration, batch.ids, tuple(minibatches)))
        time.sleep(self.sleep_s.get(call.name, 0.0))
        if copy.model not in self.stuck:
            self.versions[copy] += 1
        return {"loss": float(self.iteration)} if last else {}

    def realloc(self, source: CopyKey, target: CopyKey, version: int) -> dict[str, float]:
        self.reallocs += 1
        key = f"fake/{source}>{target}/{self._serial(source, target)}"
        store = default_store()
        if self.rank in source.mesh:
            store.set(key, str(self.versions[source]))
        if self.rank in target.mesh:
            self.versions[target] = int(store.get(key))
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

    def _call_of(self, copy: CopyKey, kind: CallType) -> Call:
        return next(call for call in self.graph.calls if call.model == copy.model and call.type is kind)

    def _right(self, key: str, batch: Batch) -> list[torch.Tensor]:
        counts = batch.lengths(self.graph.key(key).per)
        return [expected(key, self.iteration, i, n) for i, n in zip(batch.ids, counts, strict=True)]

    def _check(self, batch: Batch, call: Call, keys: Sequence[str]) -> None:
        right = tuple(response_length(self.iteration, i) for i in batch.ids)
        assert batch.response_lengths == right, f"{call.name}: lengths {batch.response_lengths} != {right}"
        copy = self.plan.copy_of(call)
        assert copy is not None, "a model has a copy"
        if self._stage(copy) in (0, copy.layout.pp - 1):
            self.compared += check(batch, self.iteration, keys, f"{call.name} on rank {self.rank}")
        else:
            assert not batch.data, "middle stages get no data"
