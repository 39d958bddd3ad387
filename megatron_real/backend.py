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
from megatron_real.dataflow import Call, Graph
from megatron_real.plan import CopyKey

__all__ = [
    "Algorithm",
    "Head",
    "Minibatch",
    "Minibatching",
    "ModelBackend",
    "Objective",
    "RewardFunction",
    "Sampling",
    "Streaming",
]

RewardFunction = Callable[..., "list[float]"]
"""``(prompts: list[str], responses: list[str], **columns: list) -> list[float]``."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatching:
    """How a train call cuts its batch into optimizer steps."""

    num_minibatches: int = 1
    num_epochs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer step, as this data-parallel rank sees it."""

    microbatches: tuple[tuple[int, ...], ...]
    """Sequence ids of each micro-batch of this data-parallel rank."""
    num_tokens: int
    """Response tokens of the minibatch over *all* data-parallel ranks: what losses are divided by."""
    num_sequences: int
    """Sequences of the minibatch over all data-parallel ranks."""


class Objective(Protocol):
    """A differentiable loss over a micro-batch."""

    @property
    def head(self) -> Head:
        """What the backend hands to `loss`."""
        ...

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of one micro-batch, *summed* over response tokens, and sums of statistics.

        Args:
            outputs: ``logprobs`` [R] and ``entropy`` [R] (head LOGPROBS), or ``values`` [R] (head VALUES).
            batch: the micro-batch with the keys of `Algorithm.prepare`.

        Returns:
            The scalar sum, and name -> scalar sum over response tokens. The backend divides both by
            `Minibatch.num_tokens` after adding up micro-batches and data-parallel ranks.
        """
        ...


class Algorithm(Protocol):
    """The mathematics of an iteration."""

    graph: Graph

    def sampling(self, call: Call) -> Sampling:
        """How a generate call samples."""
        ...

    def head(self, call: Call) -> Head:
        """What an inference call of a model returns (its first output key holds it)."""
        ...

    def function(self, call: Call) -> RewardFunction:
        """The function of a call without a model."""
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
        """Write a checkpoint of every trained model. Collective over WORLD."""
        ...
