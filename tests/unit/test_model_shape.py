"""One padded vocabulary for all layouts of a plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_real.model_shape import padded_vocab_size


def test_padding_counts_each_tp_once() -> None:
    assert padded_vocab_size(1000, 128, (2,)) == 1024
    assert padded_vocab_size(1001, 128, (1, 4)) == 1024
    assert padded_vocab_size(1000, 128, (2, 2, 2)) == 1024
    assert padded_vocab_size(128, 128, ()) == 128


@given(st.integers(1, 3000), st.integers(1, 64), st.lists(st.integers(1, 6), max_size=4))
def test_the_smallest_size_that_every_tp_divides(vocab_size: int, divisible_by: int, tps: list[int]) -> None:
    found = padded_vocab_size(vocab_size, divisible_by, tuple(tps))
    steps = [divisible_by * tp for tp in tps or [1]]
    wanted = next(n for n in range(vocab_size, 10**6) if all(n % step == 0 for step in steps))
    assert found == wanted
