"""Inference and training passes of a model copy over packed sequences, on Megatron's pipeline schedules.

What a pass returns is one number per response token (or per sequence); logits never leave the tensor-parallel rank
that computed them, and only those of positions that predict a response token are computed.

Invariants (tests/hooks/test_forward.py):
    - outputs, losses, statistics and gradient norms are the same under every layout and every cut into micro-batches;
    - a gradient is that of the objective's sum over the *global* minibatch divided by its number of kept response
      tokens, or sequences, as the objective says;
    - activations are in the ledger before they are allocated, and gone from it after the pass.

Shape legend: s positions, b sequences, h hidden size, R response tokens and S sequences of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from megatron_real.backend import Head, Minibatch, Objective
from megatron_real.batch import Batch
from megatron_real.dataflow import Per
from megatron_real.errors import PlanError, RealError
from megatron_real.hooks.activations import declared_activations, pass_bytes
from megatron_real.hooks.logprobs import vocab_parallel_logprobs_and_entropy
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.padding import PaddedMicrobatch, Positions
from megatron_real.hooks.patching import applied
from megatron_real.hooks.routing import ROUTER_PATCHES, padding_mask
from megatron_real.hooks.schedule import is_last_stage, pad_all, run_schedule

__all__ = ["evaluate", "infer", "train"]


@torch.no_grad()
def infer(
    copy: ModelCopy, batch: Batch, microbatches: Sequence[Sequence[int]], head: Head, temperature: float
) -> torch.Tensor | None:
    """Forward pass over this data-parallel rank's sequences, in evaluation mode.

    Collective over the copy's model-parallel ranks.

    Args:
        copy: the model.
        batch: its sequences; ``tokens`` on the first and the last pipeline stage.
        microbatches: the sequence ids of each micro-batch; together those of the batch.
        head: what to return.
        temperature: divides the logits (head LOGPROBS).

    Returns:
        The head's flat fp32 tensor in the order of `batch.ids` on the last stage, equal on its tensor-parallel ranks;
        None elsewhere.

    Raises:
        PlanError: the model has no such head, or the layout does not take these micro-batches.
        CapacityError: the activations do not fit into the device memory; nothing has run then.
    """
    _check(copy, head)
    ids = tuple(i for part in microbatches for i in part)
    if sorted(ids) != sorted(batch.ids):
        raise RealError(
            f"copy {copy.key}: found micro-batches of {len(ids)} sequences; expected the batch's {len(batch.ids)}."
        )
    padded = pad_all(copy, batch, microbatches)
    _check_length(copy, padded)

    def forward_step(iterator: Iterator[PaddedMicrobatch], model: Any) -> tuple[Any, Any]:
        outputs = _run_model(copy, model, next(iterator), head, temperature, with_entropy=False)
        return outputs, lambda found, non_loss_data: found[head.value]

    needed = 0 if copy.ledger is None else pass_bytes(copy, batch, [microbatches], training=False)
    with copy.parallel.active(), declared_activations(copy, needed):
        for chunk in copy.chunks:
            chunk.eval()
        parts = run_schedule(copy, copy.chunks, forward_step, padded, train=False)
    if not is_last_stage(copy):
        return None
    flat = torch.cat(parts)
    if ids == batch.ids:
        return flat
    per = Per.SEQUENCE if head is Head.SCORES else Per.RESPONSE
    lengths = dict(zip(batch.ids, batch.lengths(per), strict=True))
    pieces = dict(zip(ids, flat.split([lengths[i] for i in ids]), strict=True))
    return torch.cat([pieces[i] for i in batch.ids])


def train(
    copy: ModelCopy, batch: Batch, minibatches: Sequence[Minibatch], objective: Objective, temperature: float
) -> dict[str, Any]:
    """One optimizer step per minibatch.

    Collective over the copy's mesh.

    Args:
        copy: a trainable model. Its `scheduler`, if any, advances by one per step.
        batch: this data-parallel rank's sequences: ``tokens`` on the first and the last stage, what the objective reads
            on the last.
        minibatches: the steps; every data-parallel rank gives equally many, each with equally many micro-batches.
        objective: the loss.
        temperature: divides the logits (head LOGPROBS).

    Returns:
        On the last stage the means over the steps of ``loss``, ``grad_norm`` (before clipping) and the objective's
        statistics, under ``steps`` each of them as a list, one number per step, and ``skipped_steps``: those left out
        because a statistic rose above the objective's `stop_above`. Empty elsewhere.

    Raises:
        PlanError: the copy is not trainable, or has no such head, or its layout does not take these micro-batches.
        CapacityError: the activations do not fit into the device memory; nothing has run then.
        RealError: a gradient is not finite, on all ranks of the mesh; the weights are spoiled then.
    """
    if copy.optimizer is None:
        raise PlanError(
            f"copy {copy.key}: found no optimizer; expected the trainable copy of {copy.key.model}."
        )
    _check(copy, objective.head)
    rows: list[dict[str, torch.Tensor]] = []
    skipped = 0
    grad_norms: list[float] = []
    steps = [minibatch.microbatches for minibatch in minibatches]
    needed = 0 if copy.ledger is None else pass_bytes(copy, batch, steps, training=True)
    counted = ROUTER_PATCHES if copy.config.moe_router_enable_expert_bias else ()
    with (
        copy.parallel.active(),
        _training_config(copy),
        declared_activations(copy, needed),
        applied(counted),
    ):
        for chunk in copy.wrapped:
            chunk.train()
        for number, minibatch in enumerate(minibatches, start=1):
            padded = pad_all(copy, batch, minibatch.microbatches)
            _check_length(copy, padded)
            for chunk in copy.wrapped:
                chunk.zero_grad_buffer()
            copy.optimizer.zero_grad()
            forward_step = _training_step(copy, objective, temperature, minibatch)
            sums = _add(run_schedule(copy, copy.wrapped, forward_step, padded, train=True))
            if objective.stop_above and _exceeds(copy, objective, sums, minibatch):
                skipped = len(minibatches) - number + 1
                break
            updated, grad_norm, _ = copy.optimizer.step()
            grad_norms.append(math.nan if grad_norm is None else float(grad_norm))
            if updated:
                _require_finite(copy, grad_norms[-1], f"step {number} of {len(minibatches)}")
            if copy.scheduler is not None:
                copy.scheduler.step(increment=1)
            rows.append(sums)
    if copy.scheduler is not None and skipped:
        copy.scheduler.step(increment=skipped)  # the learning rate is one of the iteration, whatever the data
    if not is_last_stage(copy):
        return {}
    means = _means(copy, rows, [minibatch.count(objective.per) for minibatch in minibatches[: len(rows)]])
    if rows:
        means["grad_norm"] = grad_norms
    averages = {name: sum(values) / len(values) for name, values in means.items()}
    return {**averages, "steps": means, "skipped_steps": skipped}


@torch.no_grad()
def evaluate(
    copy: ModelCopy, batch: Batch, minibatch: Minibatch, objective: Objective, temperature: float
) -> dict[str, float]:
    """The objective's means over a minibatch, without training.

    Collective over the copy's mesh.

    Args:
        copy: the model.
        batch: as for `train`.
        minibatch: all of it.
        objective: what to measure.
        temperature: divides the logits (head LOGPROBS).

    Returns:
        ``loss`` and the objective's statistics on the last stage; empty elsewhere.

    Raises:
        PlanError, CapacityError: as `infer`.
    """
    _check(copy, objective.head)
    padded = pad_all(copy, batch, minibatch.microbatches)
    _check_length(copy, padded)

    def forward_step(iterator: Iterator[PaddedMicrobatch], model: Any) -> tuple[Any, Any]:
        one = next(iterator)
        outputs = _run_model(copy, model, one, objective.head, temperature, with_entropy=True)
        return outputs, lambda found, non_loss_data: _sums(objective, found, one.batch)[1]

    needed = 0 if copy.ledger is None else pass_bytes(copy, batch, [minibatch.microbatches], training=False)
    with copy.parallel.active(), declared_activations(copy, needed):
        for chunk in copy.chunks:
            chunk.eval()
        rows = [_add(run_schedule(copy, copy.chunks, forward_step, padded, train=False))]
    if not is_last_stage(copy):
        return {}
    return {name: mean for name, (mean,) in _means(copy, rows, [minibatch.count(objective.per)]).items()}


def _sums(
    objective: Objective, found: Mapping[str, torch.Tensor], batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro-batch, and its sums for the report."""
    loss, statistics = objective.loss(found, batch)
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in statistics.items()}}


def _exceeds(
    copy: ModelCopy, objective: Objective, sums: Mapping[str, torch.Tensor], minibatch: Minibatch
) -> bool:
    """Whether a mean of the minibatch is above its limit, on all ranks. Collective over the copy's mesh."""
    groups = copy.parallel.pg_collection
    assert groups is not None
    names = list(objective.stop_above)
    device = next(copy.chunks[0].parameters()).device
    above = torch.zeros(1, dtype=torch.int64, device=device)
    if is_last_stage(copy):
        totals = torch.stack([sums[name].to(device) for name in names])
        dist.all_reduce(totals, group=groups.dp)
        means = (totals / max(minibatch.count(objective.per), 1)).tolist()
        above += any(mean > objective.stop_above[name] for name, mean in zip(names, means, strict=True))
    dist.all_reduce(above, op=dist.ReduceOp.MAX, group=groups.mp)
    return bool(above.item())


def _check(copy: ModelCopy, head: Head) -> None:
    if (head is Head.LOGPROBS) == copy.role.scalar_head:
        has = "a scalar head" if copy.role.scalar_head else "a language-model head"
        raise PlanError(
            f"copy {copy.key}: found {has}; it does not return {head}. Use the role's other call or model."
        )
    if copy.parallel.layout.cp > 1:
        raise PlanError(
            f"copy {copy.key}: found cp={copy.parallel.layout.cp}; expected cp=1: sequences are not split over "
            "context-parallel ranks here. Use tp with sp, or pp."
        )


def _require_finite(copy: ModelCopy, grad_norm: float, step: str) -> None:
    """Refuse to go on after an update with a gradient that is not finite.

    The norm is over the whole mesh, so all its ranks fail together. A loss scaler skips such updates, which is its way
    of finding the scale; without one Megatron's optimizer has written the gradient into weights and moments.
    """
    if not math.isfinite(grad_norm):
        raise RealError(
            f"copy {copy.key}: found a gradient norm of {grad_norm} in optimizer {step} of the call; expected a finite "
            "one. Its weights are spoiled and are not saved: resume from the last checkpoint, with a lower learning "
            "rate or gradient clipping, or look at the data and rewards of this iteration."
        )


def _check_length(copy: ModelCopy, microbatches: Sequence[PaddedMicrobatch]) -> None:
    if copy.role.position_embedding_type != "learned_absolute":
        return
    longest = max(max(one.batch.lengths(Per.TOKEN)) for one in microbatches)
    if longest > copy.role.max_sequence_length:
        raise RealError(
            f"copy {copy.key}: found a sequence of {longest} tokens; the model has embeddings for "
            f"{copy.role.max_sequence_length} positions. Shorten prompts or max_new_tokens."
        )


def _run_model(
    copy: ModelCopy, model: Any, one: PaddedMicrobatch, head: Head, temperature: float, *, with_entropy: bool
) -> Any:
    """Hidden states of the stage, or on the last the outputs of the head by name."""
    positions = None
    if one.tokens is not None:
        # Padding may go past the positions that the model knows.
        positions = torch.arange(one.length, device=one.device).clamp_(max=copy.role.max_sequence_length - 1)
        positions = positions.expand(one.num_rows, -1)
    compute = _HeadOutputs(copy=copy, one=one, head=head, temperature=temperature, with_entropy=with_entropy)
    # No attention mask: attention is causal by itself and padding stands behind the real tokens.
    padding = padding_mask(copy, model, one)
    others = {} if padding is None else {"padding_mask": padding}
    return model(one.tokens, positions, None, output_processor=compute, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadOutputs:
    """What the last stage returns; `GPTModel.forward` calls it in place of its own post-processing."""

    copy: ModelCopy
    one: PaddedMicrobatch
    head: Head
    temperature: float
    with_entropy: bool

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,
        **_others: Any,
    ) -> dict[str, torch.Tensor]:
        one = self.one
        if one.tokens is None:
            raise RealError(
                f"copy {self.copy.key}: found no tokens on the last pipeline stage; expected a transfer to it."
            )
        at = one.last_positions() if self.head is Head.SCORES else one.response_positions()
        count = at.rows.numel()
        if count == 0:  # collectives and gradients want at least one row
            at = Positions(rows=at.rows.new_zeros(1), columns=at.columns.new_zeros(1))
        if self.copy.config.sequence_parallel:
            # The layer itself gathers the sequence, so all positions pass through it.
            rows = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)[0]
            rows = rows[at.columns, at.rows]
        else:
            chosen = hidden_states[at.columns, at.rows].unsqueeze(1)
            rows = output_layer(chosen, weight=output_weight, runtime_gather_output=False)[0].squeeze(1)
        if self.head is not Head.LOGPROBS:
            return {self.head.value: rows.squeeze(-1).float()[:count]}
        return {name: values[:count] for name, values in self._logprobs(rows, at).items()}

    def _logprobs(self, logits: torch.Tensor, at: Positions) -> dict[str, torch.Tensor]:
        groups, tokens = self.copy.parallel.pg_collection, self.one.tokens
        assert groups is not None
        assert tokens is not None
        following = (at.columns + 1).clamp_(max=self.one.length - 1)
        logprobs, entropy = vocab_parallel_logprobs_and_entropy(
            logits,
            tokens[at.rows, following],
            tp_group=groups.tp,
            vocab_size=self.copy.role.vocab_size,
            temperature=self.temperature,
            with_entropy=self.with_entropy,
        )
        return {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}


def _training_step(copy: ModelCopy, objective: Objective, temperature: float, minibatch: Minibatch) -> Any:
    """The forward step of one optimizer step, for Megatron's schedule."""
    assert copy.parallel.pg_collection is not None
    # The schedule divides a loss by the number of micro-batches, DDP averages gradients over data-parallel ranks.
    replicas = copy.parallel.pg_collection.dp.size()
    scale = len(minibatch.microbatches) * replicas / max(minibatch.count(objective.per), 1)

    def forward_step(iterator: Iterator[PaddedMicrobatch], model: Any) -> tuple[Any, Any]:
        one = next(iterator)
        outputs = _run_model(copy, model, one, objective.head, temperature, with_entropy=True)

        def loss_of(found: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, sums = _sums(objective, found, one.batch)
            return loss * scale, sums

        return outputs, loss_of

    return forward_step


@contextlib.contextmanager
def _training_config(copy: ModelCopy) -> Iterator[None]:
    """Tell Megatron's schedules how to finish and scale gradients, for a block."""
    config, optimizer = copy.config, copy.optimizer
    assert optimizer is not None
    changes: dict[str, Any] = {
        "finalize_model_grads_func": finalize_model_grads,
        "grad_scale_func": optimizer.scale_loss,
    }
    if copy.wrapped[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in copy.wrapped]
        changes["no_sync_func"] = no_sync if len(no_sync) > 1 else no_sync[0]
    former = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in former.items():
            setattr(config, name, value)


def _add(sums: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """float64 sums over micro-batches by name."""
    if not sums:
        return {}
    stacked = torch.stack([torch.stack([torch.as_tensor(v).double() for v in one.values()]) for one in sums])
    return dict(zip(sums[0], stacked.sum(dim=0), strict=True))


def _means(
    copy: ModelCopy, rows: Sequence[Mapping[str, torch.Tensor]], counts: Sequence[int]
) -> dict[str, list[float]]:
    """Name -> mean of each step over its minibatch. Collective over the data-parallel ranks of the last stage."""
    if not rows:
        return {}
    assert copy.parallel.pg_collection is not None
    names = list(rows[0])
    totals = torch.stack([torch.stack([row[name] for name in names]) for row in rows])
    dist.all_reduce(totals, group=copy.parallel.pg_collection.dp)
    totals = totals / totals.new_tensor([max(count, 1) for count in counts]).unsqueeze(-1)
    return dict(zip(names, totals.T.tolist(), strict=True))
