from __future__ import annotations

import pytest
import torch

from megatron_real.errors import PlanError, RealError
from megatron_real.realloc_ops.planning.shards import Box, Shard, ShardEntry
from megatron_real.realloc_ops.storage.local_shards import LocalShards, ShardedTensorLike, local_table
from tests.synthetic_copies import FakeShardedTensor


def _sharded(key: str, data: torch.Tensor, **changes: object) -> FakeShardedTensor:
    shape = tuple(data.shape)
    fields = {"local_shape": shape, "global_shape": shape, "global_offset": (0,) * len(shape), **changes}
    return FakeShardedTensor(key=key, data=data, **fields)  # type: ignore[arg-type]


def _gated() -> tuple[torch.nn.Parameter, LocalShards]:
    """linear_fc1 of layer 2 on tp rank 1 of 2: [gate; up], each 128 of 256 rows, 64 columns."""
    parameter = torch.nn.Parameter(torch.arange(256 * 64, dtype=torch.float32).view(256, 64))
    halves = torch.chunk(parameter, 2)
    tensors = [
        FakeShardedTensor(
            key="fc1", data=half, local_shape=(128, 64), global_shape=(4, 512, 64),
            global_offset=(2, 128 + 256 * part, 0), prepend_axis_num=1,
        )
        for part, half in enumerate(halves)
    ]  # fmt: skip
    return parameter, local_table(tensors, [("fc1.weight", parameter)])


def test_prepended_axes_are_axes_of_the_box() -> None:
    parameter, shards = _gated()
    gate, up = Box((2, 128, 0), (1, 128, 64)), Box((2, 384, 0), (1, 128, 64))
    assert shards.entries == (
        ShardEntry("fc1", gate, (4, 512, 64), "float32"),
        ShardEntry("fc1", up, (4, 512, 64), "float32"),
    )
    views = shards.resolve()
    assert views[Shard("fc1", up)].shape == (1, 128, 64)
    views[Shard("fc1", up)].fill_(-1.0)
    assert (parameter[128:] == -1.0).all()
    assert (parameter[:128] >= 0.0).all()


def test_views_follow_freed_and_rebound_storages() -> None:
    parameter, shards = _gated()
    shard = Shard("fc1", Box((2, 384, 0), (1, 128, 64)))
    first = shards.resolve()[shard]
    storage = parameter.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(RealError, match="fc1: found its storage freed"):
        shards.resolve()
    storage.resize_(size)
    assert shards.resolve()[shard] is first
    assert shards.generation == 1

    big = torch.zeros(10 + 256 * 64)
    parameter.data = big[10:].view(256, 64)
    shards.resolve()[shard].fill_(3.0)
    assert shards.generation == 2
    assert (parameter[128:] == 3.0).all()
    assert (parameter[:128] == 0.0).all()


def test_a_tied_tensor_is_one_entry_and_a_second_copy_is_filled() -> None:
    one, two = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.zeros(4, 2))
    named = [("embedding", one), ("output", two)]
    same = local_table([_sharded("emb", one), _sharded("emb", one)], named)
    assert len(same.entries) == 1
    shards = local_table([_sharded("emb", one), _sharded("emb", two)], named)
    assert len(shards.entries) == 1
    shards.resolve()[shards.entries[0].shard].fill_(5.0)
    shards.fill_duplicates()
    assert (two == 5.0).all()


def test_everything_that_cannot_be_moved_is_listed_by_name() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    fp8 = torch.zeros(4).to(torch.float8_e4m3fn)
    tensors: list[ShardedTensorLike] = [
        _sharded("good", parameter),
        _sharded("copied", parameter.detach().clone()),
        _sharded("fp8", fp8),
        _sharded("flattened", parameter, flattened_range=slice(0, 3)),
        _sharded("wrong_shape", parameter, local_shape=(2, 4)),
        _sharded("wrong_axes", parameter, prepend_axis_num=1),
        FakeShardedTensor(key="empty", data=None, local_shape=(1,), global_shape=(1,), global_offset=(0,)),
    ]
    with pytest.raises(PlanError) as caught:
        local_table(tensors, [("p", parameter), ("q", fp8)])
    text = str(caught.value)
    assert "6 problems" in text
    assert "good" not in text
    assert "copied: found a tensor that is no view of a parameter or buffer" in text
    assert "fp8: found dtype float8_e4m3fn" in text
    assert "flattened: found a flattened range slice(0, 3, None)" in text
    assert "wrong_shape: found data [4, 2], local shape [2, 4]" in text
    assert "wrong_axes" in text
    assert "empty: found NoneType as data" in text


def test_a_view_that_reaches_outside_its_parameter_is_a_copy() -> None:
    flat = torch.zeros(16)
    parameter = torch.nn.Parameter(flat[:8])
    with pytest.raises(PlanError, match="beyond: found a tensor that is no view"):
        local_table([_sharded("beyond", flat[4:12])], [("p", parameter)])
    with pytest.raises(PlanError, match="recast: found a tensor that is no view"):
        local_table([_sharded("recast", flat[:8].view(torch.int32))], [("p", parameter)])


def test_transposed_tensors_are_placed_by_stride() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 5))
    shards = local_table([_sharded("w", parameter.detach().t())], [("w", parameter)])
    shards.resolve()[shards.entries[0].shard][4, 2] = 1.0
    assert parameter[2, 4] == 1.0


def test_rows_behind_the_real_ones_are_padding() -> None:
    """Of 12 rows over three ranks 7 are real: four, three and none; the rest is zero after a run."""
    for rank, real in enumerate((4, 3, 0)):
        parameter = torch.nn.Parameter(torch.full((4, 2), 7.0))
        part = _sharded("embedding", parameter, global_shape=(12, 2), global_offset=(4 * rank, 0))
        shards = local_table([part], [("embedding", parameter)], {"embedding": 7})
        box = Box((4 * rank, 0), (real, 2))
        assert shards.entries == ((ShardEntry("embedding", box, (7, 2), "float32"),) if real else ())
        for view in shards.resolve().values():
            view.fill_(1.0)
        shards.fill_duplicates()
        assert parameter[:real].eq(1.0).all()
        assert parameter[real:].eq(0.0).all()


def test_fewer_rows_than_real_ones_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(PlanError, match="embedding: found 4 rows; expected at least the 5 real ones"):
        local_table([_sharded("embedding", parameter)], [("p", parameter)], {"embedding": 5})
