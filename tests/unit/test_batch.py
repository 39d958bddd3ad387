"""Packed batches."""

from __future__ import annotations

import pytest
import torch

from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per
from megatron_real.errors import RealError

TOKENS = KeySpec(name="tokens", per=Per.TOKEN, dtype="int64")
VALUES = KeySpec(name="values", per=Per.RESPONSE, dtype="float32")
SCORE = KeySpec(name="score", per=Per.SEQUENCE, dtype="float32")


def batch(*ids: int) -> Batch:
    """Sequence i has i + 1 prompt and i response tokens; its tokens are 100 i, 100 i + 1, ..."""
    result = Batch(ids=ids, prompt_lengths=tuple(i + 1 for i in ids), response_lengths=ids)
    result.put_list(TOKENS, [100 * i + torch.arange(2 * i + 1) for i in ids])
    result.put_list(VALUES, [torch.full((i,), float(i)) for i in ids])
    result.put_list(SCORE, [torch.tensor(float(i)) for i in ids])
    return result


def test_puts_and_splits() -> None:
    both = batch(2, 0)
    assert both.data["tokens"].tolist() == [200, 201, 202, 203, 204, 0]
    assert both.data["values"].tolist() == [2.0, 2.0]
    assert both.data["values"].dtype is torch.float32
    assert [part.tolist() for part in both.split("tokens")] == [[200, 201, 202, 203, 204], [0]]
    assert [part.tolist() for part in both.split("values")] == [[2.0, 2.0], []]
    assert both.num_tokens == 6


def test_selects_in_the_order_that_is_asked_for() -> None:
    chosen = batch(3, 1, 2).select((1, 3), ["score", "tokens"])
    assert chosen.ids == (1, 3)
    assert (chosen.prompt_lengths, chosen.response_lengths) == ((2, 4), (1, 3))
    assert sorted(chosen.data) == ["score", "tokens"]
    assert chosen.data["tokens"].tolist() == [100, 101, 102, *range(300, 307)]
    nothing = batch(1).select(())
    assert nothing.data["tokens"].numel() == 0
    assert nothing.data["tokens"].dtype is torch.int64


def test_merges_in_id_order_with_the_common_keys() -> None:
    other = batch(0, 3)
    del other.data["score"]
    merged = Batch.merge([batch(2, 1), other])
    whole = batch(0, 1, 2, 3)
    assert merged.ids == whole.ids
    assert sorted(merged.data) == ["tokens", "values"]
    for key in merged.data:
        assert torch.equal(merged.data[key], whole.data[key])
    assert Batch.merge([]).ids == ()


def test_split_then_merge_is_the_same() -> None:
    whole = batch(*range(6))
    again = Batch.merge([whole.select((5, 0)), whole.select((2, 1, 4)), whole.select((3,))])
    assert again.ids == whole.ids
    assert all(torch.equal(again.data[key], whole.data[key]) for key in whole.data)


def test_mistakes_are_named() -> None:
    with pytest.raises(RealError, match=r"key 'values' .response data. has shape .5,.; expected .3,."):
        batch(1, 2).put(VALUES, torch.zeros(5))
    with pytest.raises(RealError, match=r"has shape .1, 3.; expected .3,."):
        batch(1, 2).put(VALUES, torch.zeros(1, 3))
    with pytest.raises(RealError, match=r"sequences \[7\] are not here"):
        batch(1, 2).select((1, 7))
    with pytest.raises(RealError, match="a sequence in two parts"):
        Batch.merge([batch(1), batch(1)])
