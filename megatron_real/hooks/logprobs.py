"""Log-probabilities and entropies of tokens from logits whose vocabulary is sharded over tensor-parallel ranks.

Both are taken from one fp32 log-softmax of logits / temperature over the *real* vocabulary: the columns that pad the
vocabulary to a multiple of tp are left out. Both are differentiable; nothing of vocabulary size is gathered, and one
fp32 tensor of the size of the local logits is kept for the backward pass.

Invariants (tests/hooks/test_logprobs.py):
    - values and gradients equal those of plain torch on the gathered logits, for every number of ranks;
    - the gradient of a padded column is exactly zero, whatever its logit.

Shape legend: N any leading dimensions, V columns of the padded vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_real.errors import PlanError

__all__ = ["vocab_parallel_logprobs_and_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's columns of the vocabulary: ``[start, start + columns)`` of the padded one, `real` of them real."""

    group: dist.ProcessGroup | None
    start: int
    columns: int
    real: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, columns: int, vocab_size: int) -> _Shard:
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        if columns * size < vocab_size:
            raise PlanError(
                f"log-probs: found {columns} logits on each of {size} ranks; expected at least {vocab_size} in all, "
                "the vocabulary. Do not gather or cut the logits before."
            )
        start = rank * columns
        real = min(max(vocab_size - start, 0), columns)
        return cls(group=group if size > 1 else None, start=start, columns=columns, real=real)

    def reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(value, op=op, group=self.group)
        return value


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: _Shard,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        shifted = logits[..., : shard.real].to(wide, copy=True)
        if temperature != 1.0:
            shifted.div_(temperature)
        if shard.real:
            maximum = shifted.amax(dim=-1)
        else:
            maximum = torch.full(targets.shape, -torch.inf, dtype=wide, device=logits.device)
        shifted.sub_(shard.reduce(maximum, dist.ReduceOp.MAX).unsqueeze(-1))

        local = targets - shard.start
        here = (local >= 0) & (local < shard.real)
        index = torch.where(here, local, 0).unsqueeze(-1)
        sums = torch.zeros((3 if with_entropy else 2, *targets.shape), dtype=wide, device=logits.device)
        if shard.real:
            exponentials = shifted.exp()
            torch.sum(exponentials, dim=-1, out=sums[0])
            sums[1] = torch.where(here, shifted.gather(-1, index).squeeze(-1), 0.0)
            if with_entropy:
                torch.sum(exponentials.mul_(shifted), dim=-1, out=sums[2])
            del exponentials
        shard.reduce(sums, dist.ReduceOp.SUM)

        log_normaliser = sums[0].log()
        logprobs = sums[1] - log_normaliser
        entropy = log_normaliser - sums[2] / sums[0] if with_entropy else None
        # Kept for the backward pass: the log-softmax of this shard.
        log_softmax = shifted.sub_(log_normaliser.unsqueeze(-1))
        ctx.save_for_backward(log_softmax, index, here, entropy)
        ctx.shard, ctx.temperature, ctx.dtype = shard, temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        log_softmax, index, here, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        # d logprob / d x_i = [i is the target] - p_i;  d entropy / d x_i = -p_i (log p_i + entropy).
        grad = log_softmax.exp().neg_()
        if grad_entropy is None:
            assert grad_logprobs is not None
            grad.mul_(grad_logprobs.unsqueeze(-1))
        else:
            constant = (
                grad_entropy * entropy if grad_logprobs is None else grad_logprobs + grad_entropy * entropy
            )
            grad.mul_(torch.addcmul(constant.unsqueeze(-1), grad_entropy.unsqueeze(-1), log_softmax))
        if grad_logprobs is not None and shard.real:
            grad.scatter_add_(-1, index, torch.where(here, grad_logprobs, 0.0).unsqueeze(-1))
        if ctx.temperature != 1.0:
            grad.div_(ctx.temperature)
        grad = grad.to(ctx.dtype)
        if shard.real < shard.columns:
            grad = torch.nn.functional.pad(grad, (0, shard.columns - shard.real))
        return grad, None, None, None, None


def vocab_parallel_logprobs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of `targets` and entropy of the distribution, differentiable in `logits`.

    Collective over `tp_group`.

    Args:
        logits: [N, V] of any float dtype, this rank's columns; not modified.
        targets: [N] int64 token ids in the whole vocabulary.
        tp_group: the ranks that share the vocabulary, in column order; None for one rank.
        vocab_size: real tokens; columns from there on are padding and take no part.
        temperature: divides the logits first.
        with_entropy: False saves a third of the work and returns None for the entropy.

    Returns:
        Two tensors [N], equal on all ranks; fp32 (float64 for float64 logits).

    Raises:
        PlanError: the shards do not cover the vocabulary, or the temperature is not positive.
    """
    if temperature <= 0:
        raise PlanError(f"log-probs: found temperature {temperature}; expected a positive number.")
    shard = _Shard.of(tp_group, logits.shape[-1], vocab_size)
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, targets, shard, temperature, with_entropy)
    return logprobs, entropy
