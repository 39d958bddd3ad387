"""What the runtime asks of a model library (`ModelBackend`) and of an algorithm (`Algorithm`).

The runtime talks to these protocols only. `megatron_real.hooks.megatron_backend` implements the first with
Megatron-Core;
`megatron_real.algorithms` implements the second. Tests implement both with a few lines.

Shape legend: S sequences, T tokens of prompt + response, R response tokens, each over all sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_real.batch import Batch
from megatron_real.dataflow import Call, Graph, KeySpec, Per
from megatron_real.plan import CopyKey

__all__ = [
    "KEPT",
    "MARGIN",
    "Algorithm",
    "Goal",
    "Head",
    "Minibatch",
    "Minibatching",
    "ModelBackend",
    "Objective",
    "RewardFunction",
    "Samples",
    "Sampling",
    "Scorer",
    "Streaming",
]

RewardFunction = Callable[..., "list[float]"]
"""``(prompts: list[str], responses: list[str], **columns: list) -> list[float]``."""

KEPT = KeySpec(name="kept", per=Per.SEQUENCE, dtype="float32")
"""A key that `Algorithm.prepare` may add: 1 for sequences that count in the loss, 0 for those that are masked out of it
(a reward that did not come). Tokens and sequences of a minibatch are counted, and statistics averaged, over the kept
ones alone."""


MARGIN = KeySpec(name="margin", per=Per.SEQUENCE, dtype="float32")
"""By how much a pair's chosen answer is better: an optional column of preference data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Sequences as text, for a reward function."""

    ids: tuple[int, ...]
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]
    """Of the data set."""

    def at(self, index: int) -> Samples:
        """Only the sequence at this position."""
        return Samples(
            ids=self.ids[index : index + 1],
            prompts=self.prompts[index : index + 1],
            responses=self.responses[index : index + 1],
            columns={name: values[index : index + 1] for name, values in self.columns.items()},
        )


class Scorer(Protocol):
    """What computes the rewards of a call without a model."""

    def score(self, call: str, samples: Samples) -> list[float]:
        """One number per sequence; NaN for a reward that did not come.

        Raises:
            ConfigError: the function is broken, and the user chose that this stops the run.
        """
        ...

    def take_counts(self) -> Mapping[str, float]:
        """What happened since the last time, as numbers that add up over ranks (`runtime.rewards.reward_metrics`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The metric by which an algorithm's success is judged."""

    metric: str
    higher_is_better: bool = True
    key: str = "rewards"
    """Where responses are generated: the per-sequence key whose mean over held-out prompts is the metric's value."""


class Head(StrEnum):
    """What a forward pass of a call returns."""

    LOGPROBS = "logprobs"
    """Log-probability of each response token, [R] fp32: log-softmax of logits / temperature over the real
    vocabulary.
    """
    VALUES = "values"
    """Value of the state before each response token, [R] fp32."""
    SCORES = "scores"
    """Scalar head at the last token of each sequence, [S] fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The draw is keyed by (seed, call, iteration, sequence id, position)."""

    max_new_tokens: int
    end_token: int
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    greedy: bool = False
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end a response, as `end_token` does: it keeps the token that completes the first of them."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Of the tokenizer, which `stop` needs. The runtime sets it; an algorithm leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatching:
    """How a train call cuts its batch into optimizer steps."""

    num_minibatches: int = 1
    num_epochs: int = 1
    unit: int = 1
    """Sequences with consecutive ids that must be in one micro-batch: 2 for a loss over preference pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer step, as this data-parallel rank sees it."""

    microbatches: tuple[tuple[int, ...], ...]
    """Sequence ids of each micro-batch of this data-parallel rank."""
    num_tokens: int
    """Response tokens of the minibatch's kept sequences over *all* data-parallel ranks."""
    num_sequences: int
    """Kept sequences of the minibatch over all data-parallel ranks."""

    def count(self, per: Per) -> int:
        """What an objective's sums are divided by: tokens (RESPONSE) or sequences (SEQUENCE)."""
        return self.num_tokens if per is Per.RESPONSE else self.num_sequences


class Objective(Protocol):
    """A differentiable loss over a micro-batch."""

    @property
    def head(self) -> Head:
        """What the backend hands to `loss`."""
        ...

    @property
    def per(self) -> Per:
        """What loss and statistics are sums over: response tokens (RESPONSE), or sequences (SEQUENCE)."""
        ...

    @property
    def stop_above(self) -> Mapping[str, float]:
        """Statistics with the mean of a minibatch above which its update and the rest of the call are skipped."""
        ...

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of one micro-batch, *summed* over what `per` says, and sums of statistics.

        Args:
            outputs: ``logprobs`` and ``entropy`` [R] (head LOGPROBS), ``values`` [R] (head VALUES) or ``scores`` [S]
                (head SCORES).
            batch: the micro-batch with the keys of `Algorithm.prepare`; masked sequences (`KEPT`) must add nothing.

        Returns:
            The scalar sum, and name -> scalar sum. The backend divides both by the minibatch's number of tokens or
            sequences after adding up micro-batches and data-parallel ranks.
        """
        ...


class Algorithm(Protocol):
    """The mathematics of an iteration."""

    graph: Graph

    @property
    def goal(self) -> Goal:
        """What an evaluation reports, and what the best checkpoint is the best in."""
        ...

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt, with consecutive sequence ids."""
        ...

    @property
    def temperature(self) -> float:
        """Divides the logits behind every log-probability and entropy."""
        ...

    def sampling(self, call: Call) -> Sampling:
        """How a generate call samples."""
        ...

    def head(self, call: Call) -> Head:
        """What an inference call of a model returns (its first output key holds it)."""
        ...

    def function(self, call: Call) -> Scorer:
        """What computes a call without a model."""
        ...

    def minibatching(self, call: Call) -> Minibatching:
        """How a train call cuts its batch."""
        ...

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        """Derive the per-token keys of a train call from the full batch; float64 inside, so all ranks agree.

        Called on the ranks of the call's last pipeline stage. Must be idempotent per (call, iteration).

        Args:
            scalars: all sequences in id order with the call's `Scope.FULL` inputs.

        Returns:
            The batch with keys such as ``advantages``, and metrics of the whole batch.
        """
        ...

    def objective(self, call: Call) -> Objective:
        """The loss of a train call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs (KL coefficient, running statistics): plain numbers and strings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        ...


class Streaming(Protocol):
    """A realloc that goes on beside what this rank does."""

    def finish(self) -> dict[str, float]:
        """Return when everything is here and sent. Called once, on every rank that started it.

        Returns:
            The accounting of `ModelBackend.realloc`, and ``wait_s``: the seconds that the call waited for its layers.
        """
        ...


class ModelBackend(Protocol):
    """A library that holds the copies of models and computes on them.

    Unless said otherwise a method is called on exactly the ranks of the copy's mesh, with equal arguments but for the
    data-parallel shard, and may communicate inside that mesh.
    """

    def generate(
        self,
        copy: CopyKey,
        call: Call,
        iteration: int,
        prompts: Batch,
        microbatches: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> Batch:
        """Sample responses to this data-parallel rank's `prompts` (key ``tokens``: prompt tokens).

        Returns:
            The same sequences with ``tokens`` (prompt + response) and ``logprobs``; only `ids` and lengths matter on
            ranks outside the last pipeline stage, but lengths are right everywhere.
        """
        ...

    def infer(
        self,
        copy: CopyKey,
        batch: Batch,
        microbatches: Sequence[Sequence[int]],
        head: Head,
        temperature: float,
    ) -> torch.Tensor | None:
        """Forward pass over this data-parallel rank's sequences.

        Returns:
            The head's flat tensor in the order of `batch.ids` on the last pipeline stage, None elsewhere.
        """
        ...

    def train(
        self,
        copy: CopyKey,
        batch: Batch,
        minibatches: Sequence[Minibatch],
        objective: Objective,
        temperature: float,
    ) -> dict[str, float]:
        """One optimizer step per minibatch.

        Returns:
            On the last pipeline stage: means over all minibatches of the loss, ``grad_norm`` (before clipping) and the
            objective's statistics; per-step lists under ``steps``. Empty elsewhere.
        """
        ...

    def evaluate(
        self, copy: CopyKey, batch: Batch, minibatch: Minibatch, objective: Objective, temperature: float
    ) -> dict[str, float]:
        """The objective's means over a minibatch, without training.

        Returns:
            On the last pipeline stage ``loss`` and the objective's statistics; empty elsewhere.
        """
        ...

    def realloc(self, source: CopyKey, target: CopyKey, version: int) -> dict[str, float]:
        """Bring `target` to the weights of `source`. Called on the union of the two meshes.

        Args:
            version: of the weights: the source refuses to send others, the target has it afterwards.

        Returns:
            Accounting: ``bytes_moved``, ``bytes_bound``, ``messages``, ``staging_peak_bytes``.
        """
        ...

    def stream(self, source: CopyKey, target: CopyKey, version: int) -> Streaming:
        """As `realloc`, but start it and return. The next call on `target` waits for each of its layers.

        Until it is finished the source must not change, and no other realloc starts on this rank.
        """
        ...

    def mix(self, source: CopyKey, target: CopyKey, mix: float, *, old: int, new: int) -> dict[str, float]:
        """Make the weights of `target`, which are there, ``mix * source + (1 - mix) * target``, weight by weight.

        Called on the union of the two meshes, for copies of two models of one shape. Each product and the sum are
        rounded to fp32, the result to the target's dtype, so that every layout and every replica gets the same bits.

        Args:
            source: the copy that is read.
            target: the copy that is changed.
            mix: the share of the source: above 0, at most 1.
            old: the version that the target has.
            new: the version that the source has, and the target afterwards.

        Returns:
            The accounting of `realloc`.
        """
        ...

    def release(self, copy: CopyKey) -> None:
        """Free the storage of a copy that is filled anew before its next call."""
        ...

    def offload(self, copy: CopyKey, to: str, what: str) -> None:
        """Free a copy's storage, keeping its values.

        Args:
            copy: what to free.
            to: the ``host``, or the optimizer's ``main_params``.
            what: its ``weights``, or of a trained copy the ``state`` of its optimizer, with the gradients.
        """
        ...

    def reload(self, copy: CopyKey, source: str, what: str) -> None:
        """Undo `offload`; nothing to do when `what` is resident. From the ``node``: fill a copy from its host store."""
        ...

    def version(self, copy: CopyKey) -> int:
        """Training step that the copy's weights are from; -1 when it has no weights."""
        ...

    def save(self, folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of every model that changes (`Graph.changes`). Collective over WORLD."""
        ...
