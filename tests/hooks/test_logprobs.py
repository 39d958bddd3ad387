"""Vocabulary-parallel log-probs and entropies against plain torch on the whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_real.errors import PlanError
from megatron_real.hooks.logprobs import vocab_parallel_logprobs_and_entropy
from tests.harness import run_ranks

PADDED, SHAPE = 24, (5, 3)


def _inputs(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(*SHAPE, PADDED, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits[..., vocab_size:] = 50.0  # padding that would dominate if it were used
    return logits, torch.randint(vocab_size, SHAPE, generator=generator)


def _plain(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_softmax = torch.log_softmax(logits[..., :vocab_size] / temperature, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _compare(vocab_size: int, temperature: float, weights: tuple[float, float]) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole, targets = _inputs(vocab_size, torch.float64)
    columns = PADDED // size
    local = whole[..., rank * columns : (rank + 1) * columns].clone().requires_grad_()
    whole.requires_grad_()
    wanted = _plain(whole, targets, vocab_size, temperature)
    found = vocab_parallel_logprobs_and_entropy(
        local, targets, tp_group=dist.group.WORLD, vocab_size=vocab_size, temperature=temperature
    )
    scale = torch.linspace(-1, 2, targets.numel(), dtype=torch.float64).reshape(SHAPE)
    for values in (wanted, found):
        sum(
            (w * (scale * v).sum() for w, v in zip(weights, values, strict=True) if w), torch.zeros(())
        ).backward()
    for expected, value in zip(wanted, found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert whole.grad is not None
    torch.testing.assert_close(
        local.grad, whole.grad[..., rank * columns : (rank + 1) * columns], rtol=1e-11, atol=1e-12
    )
    assert (local.grad[..., max(vocab_size - rank * columns, 0) :] == 0).all()


def _all_cases() -> None:
    for vocab_size in (24, 19, 5):  # 5: some ranks hold nothing but padding
        for temperature in (1.0, 0.7):
            for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.3)):
                _compare(vocab_size, temperature, weights)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_equal_plain_torch(size: int) -> None:
    run_ranks(size, _all_cases)


def test_gradcheck() -> None:
    logits, targets = _inputs(19, torch.float64)

    def both(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = vocab_parallel_logprobs_and_entropy(
            value, targets, tp_group=None, vocab_size=19, temperature=1.3
        )
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(both, (logits.requires_grad_(),))


def test_low_precision_logits_give_fp32_and_are_not_modified() -> None:
    logits, targets = _inputs(19, torch.bfloat16)
    before = logits.clone()
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs_and_entropy(
        logits, targets, tp_group=None, vocab_size=19, temperature=0.5
    )
    wanted = _plain(before.float(), targets, 19, 0.5)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, wanted[1], rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert torch.equal(logits.detach(), before)


def test_without_entropy_and_without_rows() -> None:
    logits, targets = _inputs(19, torch.float32)
    logprobs, entropy = vocab_parallel_logprobs_and_entropy(
        logits, targets, tp_group=None, vocab_size=19, with_entropy=False
    )
    assert entropy is None
    torch.testing.assert_close(logprobs, _plain(logits, targets, 19, 1.0)[0])
    empty, _ = vocab_parallel_logprobs_and_entropy(
        logits[0, :0].requires_grad_(), targets[0, :0], tp_group=None, vocab_size=19
    )
    empty.sum().backward()
    assert empty.shape == (0,)


def test_refusals() -> None:
    logits, targets = _inputs(19, torch.float32)
    with pytest.raises(PlanError, match="vocabulary"):
        vocab_parallel_logprobs_and_entropy(logits, targets, tp_group=None, vocab_size=25)
    with pytest.raises(PlanError, match="temperature"):
        vocab_parallel_logprobs_and_entropy(logits, targets, tp_group=None, vocab_size=19, temperature=0.0)
