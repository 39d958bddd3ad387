"""Drawing tokens so that the same token is drawn under every plan.

The uniform number behind a token is a hash of (seed, call, iteration, sequence, position): no generator state, so it
does not matter on which rank, in which micro-batch or in which order sequences are sampled. Probabilities become
integers before they are summed, so every rank that has the same logits draws the same token bit for bit, also where
floating-point sums of a device depend on the order of addition.

Invariants (tests/unit/test_sampling.py):
    - a row's token depends on its own logits and uniform number alone;
    - a token of probability zero, or cut off by `top_k` or `top_p`, is never drawn;
    - draws follow the (truncated, renormalised) distribution;
    - a response ends with the token with which its decoded text first contains a stop string.

Shape legend: B sequences, V tokens of the real vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from megatron_real.backend import Sampling
from megatron_real.errors import ConfigError

__all__ = ["DrawKey", "check_sampling", "sample", "stops", "token_logprobs", "uniforms"]

_WEIGHT_BITS = 45  # weights of a vocabulary of 2**17 tokens add up to less than 2**53: exact in float64
_MORE_TOKENS = 4
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawKey:
    """What keys the draws of one generate call, beside sequence and position."""

    seed: int
    call: str
    iteration: int

    def hash(self) -> int:
        """64 bits as a signed integer."""
        text = f"{self.seed}\0{self.call}\0{self.iteration}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 (torch's own copies the sign)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser; int64 arithmetic wraps as uint64's does."""
    value = (value ^ _shift_right(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift_right(value, 27)) * _signed(_MIX_2)
    return value ^ _shift_right(value, 31)


def uniforms(key: DrawKey, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), one for each (sequence, position), broadcast against each other.

    Args:
        key: the call and iteration.
        sequences: int64 sequence ids.
        positions: int64 positions, counted from the start of the prompt.

    Returns:
        float64 multiples of 2**-53.
    """
    golden = _signed(_GOLDEN)
    per_sequence = _mix((sequences + 1) * golden + key.hash())
    bits = _mix(per_sequence + (positions + 1) * golden)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def check_sampling(sampling: Sampling) -> None:
    """Refuse options that no token can be drawn with.

    Raises:
        ConfigError: naming the option.
    """
    for name, good, expected in (
        (
            "temperature",
            sampling.temperature > 0,
            "a positive number; use greedy=True for the most likely token",
        ),
        ("top_k", sampling.top_k >= 0, "0 (keep all) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "a number in (0, 1]"),
        ("max_new_tokens", sampling.max_new_tokens >= 1, "at least 1"),
        ("stop", all(sampling.stop), "texts of at least one character"),
        ("stop", not sampling.stop or sampling.decode is not None, "none without the tokenizer's `decode`"),
    ):
        if not good:
            raise ConfigError(f"sampling.{name}: found {getattr(sampling, name)}; expected {expected}.")


def stops(tokens: torch.Tensor, begins: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Responses whose text contains a stop string, given that without their last token it does not.

    Looks at as many tokens as the longest stop string has bytes, since each token of text has at least one, and a few
    more: the first of a text that was cut may be half a character, or lose the space before its word.

    Args:
        tokens: [B, N], up to the token that was chosen now.
        begins: [B], where each response begins; N where nothing is asked.
        sampling: with `stop` and `decode`.

    Returns:
        [B] bool.
    """
    decode = sampling.decode
    assert decode is not None
    first = max(0, tokens.shape[1] - max(len(text.encode()) for text in sampling.stop) - _MORE_TOKENS)
    found = []
    for row, begin in zip(tokens[:, first:].tolist(), (begins - first).clamp(min=0).tolist(), strict=True):
        text = decode(row[begin:]) if begin < len(row) else ""
        found.append(any(stop in text for stop in sampling.stop))
    return torch.tensor(found, device=tokens.device)


def sample(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draw one token per row by inverting the distribution function, in the order of the vocabulary.

    `top_k` cuts first, then `top_p` keeps the smallest set of likeliest tokens whose share of what is left is at least
    `top_p`. Tokens as likely as the last one kept are kept too.

    Args:
        logits: [B, V], the whole real vocabulary.
        uniform: [B] float64 in [0, 1).
        sampling: temperature, truncation, greedy.

    Returns:
        [B] int64.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    scaled = logits.to(torch.float64)
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    weights = (torch.softmax(scaled, dim=-1) * 2.0**_WEIGHT_BITS).to(torch.int64)
    if 0 < sampling.top_k < weights.shape[-1]:
        least = weights.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights = torch.where(weights >= least, weights, 0)
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    cumulative = weights.cumsum(dim=-1)
    threshold = (uniform * cumulative[:, -1]).floor().to(torch.int64)
    return torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the smallest set of largest weights that adds up to `top_p` of the sum."""
    ordered = weights.sort(dim=-1, descending=True).values
    cumulative = ordered.cumsum(dim=-1)
    before = cumulative - ordered
    kept = before.to(torch.float64) < top_p * cumulative[:, -1:].to(torch.float64)
    least = ordered.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    return torch.where(weights >= least, weights, 0)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp32 log-probabilities [B] of `tokens` [B] under the untruncated softmax of logits [B, V] / temperature."""
    scaled = logits.to(torch.float32)
    if temperature != 1.0:
        scaled = scaled / temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(dim=-1)
