"""Data sets: the order in which they are dealt out, and the sequences that a batch makes of them."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_real.errors import ConfigError
from megatron_real.runtime.data.dataset import Dataset, Record


def records(count: int) -> list[Record]:
    return [Record(text=str(n), tokens=(n, n), columns={"n": n}) for n in range(count)]


def drawn(prompts: Dataset, iterations: range) -> list[str]:
    return [record.text for i in iterations for record in prompts.batch(i).records]


def test_every_epoch_has_each_prompt_once_in_its_own_order() -> None:
    prompts = Dataset(records(10), batch_size=4, seed=3)
    order = drawn(prompts, range(10))  # four epochs; batches cross their borders
    epochs = [order[begin : begin + 10] for begin in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_depends_on_seed_and_iteration_alone() -> None:
    whole = drawn(Dataset(records(10), batch_size=4, seed=3), range(10))
    resumed = Dataset(records(10), batch_size=4, seed=3)
    assert drawn(resumed, range(6, 10)) == whole[24:]
    assert drawn(resumed, range(1, 2)) == whole[4:8], "also backwards"
    assert drawn(Dataset(records(10), batch_size=4, seed=4), range(10)) != whole


def test_samples_of_a_prompt_have_consecutive_ids() -> None:
    batch = Dataset(records(4), batch_size=2, samples_per_prompt=3, seed=0).batch(0)
    texts = [record.text for record in batch.records]
    assert len(texts) == 6
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4] == texts[5]


def test_a_batch_of_some_sequences() -> None:
    batch = Dataset(records(3), batch_size=3, seed=0).batch(0)
    chosen = batch.batch((2, 0))
    assert chosen.ids == (2, 0)
    assert chosen.prompt_lengths == (2, 2)
    assert chosen.response_lengths == (0, 0)
    right = [*batch.records[2].tokens, *batch.records[0].tokens]
    assert torch.equal(chosen.data["tokens"], torch.tensor(right))
    assert batch.columns((2, 0)) == {"n": (batch.records[2].columns["n"], batch.records[0].columns["n"])}


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0)])
def test_nothing_to_deal_out_is_refused(count: int, size: int) -> None:
    with pytest.raises(ConfigError, match="expected at least one of each"):
        Dataset(records(count), batch_size=size)


def pairs(count: int) -> list[Record]:
    """Pairs of which the n-th answers with 2n and 2n + 1, in as many tokens as the number says, up to 4."""
    return [
        Record(
            text=str(n // 2),
            tokens=(n // 2,) * (1 + n // 2 % 3),
            columns={"margin": n // 2},
            response=(n,) * (1 + n % 4),
        )
        for n in range(2 * count)
    ]


def test_a_batch_of_answers_has_prompt_and_response() -> None:
    answers = [Record(text=str(n), tokens=(n, n), columns={}, response=(10 + n,) * n) for n in range(1, 4)]
    data = Dataset(answers, batch_size=3).batch(0)
    assert data.prompt_lengths == (2, 2, 2)
    assert sorted(data.response_lengths) == [1, 2, 3]
    batch = data.batch((1, 2))
    assert batch.response_lengths == data.response_lengths[1:]
    for record, tokens in zip(data.records[1:], batch.split("tokens"), strict=True):
        assert tokens.tolist() == [*record.tokens, *record.response]


def test_prompts_have_no_responses() -> None:
    assert Dataset(records(3), batch_size=3).batch(0).response_lengths == (0, 0, 0)


def test_the_two_answers_of_a_pair_have_ids_that_follow_each_other() -> None:
    data = Dataset(pairs(5), batch_size=3, seed=7, unit=2)
    assert data.num_lines == 5
    seen = []
    for iteration in range(5):  # three epochs; batches cross their borders
        batch = data.batch(iteration)
        assert len(batch.records) == 6
        firsts = [record.response[0] for record in batch.records]
        assert [first % 2 for first in firsts] == [0, 1] * 3, "the chosen one comes first"
        assert [first + 1 for first in firsts[::2]] == firsts[1::2]
        assert batch.columns((0, 1))["margin"] == (firsts[0] // 2,) * 2
        seen += firsts[::2]
    assert [sorted(seen[begin : begin + 5]) for begin in (0, 5, 10)] == [[0, 2, 4, 6, 8]] * 3


def test_pairs_come_in_the_order_of_prompts() -> None:
    """The order is one of lines, whatever a line is."""
    lines = [
        record.columns["n"]
        for i in range(6)
        for record in Dataset(records(7), batch_size=3, seed=2).batch(i).records
    ]
    twos = [
        record.columns["margin"]
        for i in range(6)
        for record in Dataset(pairs(7), batch_size=3, seed=2, unit=2).batch(i).records[::2]
    ]
    assert lines == twos


def test_an_evaluation_goes_through_all_whole_batches_in_order(caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset(records(7), batch_size=3, samples_per_prompt=2, seed=9)
    with caplog.at_level(logging.INFO, logger="megatron_real"):
        first, second = data.batches()
    assert [record.text for record in first.records] == ["0", "0", "1", "1", "2", "2"]
    assert [record.text for record in second.records] == ["3", "3", "4", "4", "5", "5"]
    assert "the last 1 of 7 lines are left out" in caplog.text
    (whole,) = Dataset(pairs(2), batch_size=2, unit=2).batches()
    assert [record.response[0] for record in whole.records] == [0, 1, 2, 3]


def test_an_evaluation_needs_a_whole_batch() -> None:
    with pytest.raises(ConfigError, match="found 2 lines; expected at least a batch of 3"):
        Dataset(records(2), batch_size=3).batches()
