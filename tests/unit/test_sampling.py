"""Keyed draws: distribution, truncation, and that nothing but the key matters."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_real.backend import Sampling
from megatron_real.errors import ConfigError
from megatron_real.hooks.sampling import DrawKey, check_sampling, sample, stops, token_logprobs, uniforms
from megatron_real.runtime.data.dataset import ByteTokenizer

KEY = DrawKey(seed=3, call="actor_gen", iteration=5)
MASK = (1 << 64) - 1


def _options(**changes) -> Sampling:
    return Sampling(**{"max_new_tokens": 4, "end_token": 0} | changes)


def _reference_uniform(key: DrawKey, sequence: int, position: int) -> float:
    """The same hash in Python's unbounded integers."""

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    row = mix(((sequence + 1) * golden + (key.hash() & MASK)) & MASK)
    return (mix((row + (position + 1) * golden) & MASK) >> 11) / 2**53


def _draw(probabilities: list[float], count: int, sampling: Sampling) -> torch.Tensor:
    """How often each token comes, over `count` draws."""
    logits = torch.tensor(probabilities).log().expand(count, -1)
    uniform = uniforms(KEY, torch.arange(count), torch.zeros(1, dtype=torch.int64))
    return torch.bincount(sample(logits, uniform, sampling), minlength=len(probabilities))


def test_uniforms_equal_unbounded_integers() -> None:
    found = uniforms(KEY, torch.tensor([[0], [7], [2**40]]), torch.tensor([0, 1, 4095]))
    for i, sequence in enumerate((0, 7, 2**40)):
        for j, position in enumerate((0, 1, 4095)):
            assert found[i, j].item() == _reference_uniform(KEY, sequence, position)


def test_uniforms_differ_in_every_part_of_the_key() -> None:
    keys = [
        DrawKey(seed=seed, call=call, iteration=iteration)
        for seed in (0, 1)
        for call in ("gen", "gen2")
        for iteration in (0, 1)
    ]
    values = torch.cat(
        [uniforms(key, torch.arange(64)[:, None], torch.arange(64)).reshape(-1) for key in keys]
    )
    assert values.unique().numel() == values.numel()
    assert values.min() >= 0
    assert values.max() < 1


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    grid = uniforms(KEY, torch.arange(400)[:, None], torch.arange(500))
    counts = torch.histc(grid, bins=20, min=0, max=1)
    expected = grid.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees: p = 0.001
    centred = grid - 0.5
    for neighbour in (centred[1:, :] * centred[:-1, :], centred[:, 1:] * centred[:, :-1]):
        correlation = neighbour.mean() * 12
        assert abs(correlation) < 4 / math.sqrt(neighbour.numel())


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.1, 0.15, 0.05])
    count = 40000
    counts = _draw(probabilities.tolist(), count, _options())
    assert counts[1] == 0
    kept = probabilities > 0
    expected = probabilities[kept] * count
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.5  # 4 degrees: p = 0.001


def test_temperature() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    cooled = probabilities**2 / (probabilities**2).sum()
    expected = cooled * 40000
    counts = _draw(probabilities.tolist(), 40000, _options(temperature=0.5))
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # 2 degrees


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_k": 99}, [0, 2, 3, 4, 5]),
        ({"top_p": 0.1}, [0]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 2]),
        ({"top_p": 0.86}, [0, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2]),  # 0.7 of 0.85 is 0.82
    ],
)
def test_truncation_keeps(changes: dict[str, float], kept: list[int]) -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.1, 0.15, 0.05])
    counts = _draw(probabilities.tolist(), 20000, _options(**changes))
    assert counts.nonzero().flatten().tolist() == kept
    share = probabilities[kept] / probabilities[kept].sum()
    if len(kept) > 1:
        torch.testing.assert_close(counts[kept] / 20000, share, atol=0.015, rtol=0)


def test_rows_do_not_matter_to_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 37, generator=generator) * 3
    uniform = uniforms(KEY, torch.arange(50), torch.full((50,), 9))
    order = torch.randperm(50, generator=generator)
    for options in (_options(), _options(top_k=5), _options(top_p=0.7), _options(greedy=True)):
        whole = sample(logits, uniform, options)
        assert torch.equal(sample(logits[order], uniform[order], options), whole[order])
        single = torch.cat([sample(logits[i : i + 1], uniform[i : i + 1], options) for i in range(50)])
        assert torch.equal(single, whole)


def test_extreme_uniforms_stay_inside_the_support() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    tokens = sample(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), _options())
    assert tokens.tolist() == [1, 2]


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sample(logits, torch.tensor([0.99]), _options(greedy=True)).item() == 1


def test_token_logprobs_are_untruncated() -> None:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    tokens = torch.tensor([0, 3, 10, 5])
    wanted = torch.log_softmax(logits.float() / 0.7, dim=-1)[torch.arange(4), tokens]
    found = token_logprobs(logits, tokens, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_new_tokens": 0},
        {"stop": ("\n", ""), "decode": str},
        {"stop": ("\n",)},
    ],
)
def test_bad_options_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        check_sampling(_options(**changes))


@pytest.mark.parametrize("stop", [("b",), ("aé",), ("ba", "éé"), ("abab", "é")])
def test_a_response_stops_where_its_whole_text_first_contains_a_stop_string(stop: tuple[str, ...]) -> None:
    """Token by token over random bytes, some parts of a character and some without text, against decoding all of it."""
    tokenizer, sampling = ByteTokenizer(), _options(stop=stop, decode=ByteTokenizer().decode)
    rows = torch.tensor([*"abé".encode(), tokenizer.end_token])[
        torch.randint(5, (200, 40), generator=torch.Generator().manual_seed(7))
    ]
    begins = torch.arange(200) % 9
    found, right = torch.full((200,), -1), []
    for end in range(1, 41):
        ended = stops(rows[:, :end], torch.where(found < 0, begins, end), sampling)
        found[ended] = end
    for row, begin in zip(rows.tolist(), begins.tolist(), strict=True):
        texts = [tokenizer.decode(row[begin:end]) if begin < end else "" for end in range(1, 41)]
        right.append(next((end for end, text in enumerate(texts, 1) if any(one in text for one in stop)), -1))
    assert found.tolist() == right
    assert len(set(right)) > 3
