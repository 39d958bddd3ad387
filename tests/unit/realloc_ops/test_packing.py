"""What is packed, once or at all, and the arithmetic of mixing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_real.realloc_ops.execution import packing
from megatron_real.realloc_ops.execution.packing import Direction, Staging, mix_tensors
from megatron_real.realloc_ops.planning.buckets import Message, Slice
from megatron_real.realloc_ops.planning.shards import Box

_CPU = torch.device("cpu")
_LIMIT_BYTES = 2 * 48


def _message(dst: int, keys: str, *, rows: int = 2, first: int = 0) -> Message:
    shard = Box((0, 0), (4, 3))
    slices = tuple(
        Slice(order, key, shard, Box((0, 0), (4, 3)), Box((first, 0), (rows, 3)), rows * 12, 0)
        for order, key in enumerate(keys)
    )
    return Message(src=0, dst=dst, index=0, slices=slices, num_bytes=len(keys) * rows * 12)


def _direction(
    messages: list[Message | None],
    tensors: dict[str, torch.Tensor],
    *,
    sends: bool = True,
    gathers: bool = False,
) -> Direction:
    def part_of(_: Message, piece: Slice) -> tuple[torch.Tensor, torch.dtype]:
        return tensors[piece.key][piece.box.slices_in(piece.src_box)], torch.float32

    return Direction(
        messages,
        part_of=part_of,
        staging=Staging(_CPU, _LIMIT_BYTES),
        sends=sends,
        gathers=lambda _: gathers,
    )


def test_equal_bytes_for_several_receivers_are_packed_once() -> None:
    tensors = {key: torch.arange(12.0).view(4, 3) + ord(key) for key in "abc"}
    messages = [
        _message(1, "ab"),
        _message(2, "ab"),
        None,
        _message(3, "ab"),
        _message(1, "bc"),
        _message(2, "b"),  # direct, between two that are equal
        _message(2, "bc"),
        _message(1, "ab"),  # there since the first
        _message(1, "ac"),  # in its place
        _message(1, "ab"),
    ]
    direction = _direction(messages, tensors)
    direction.staging.allocate()
    legs = direction.legs()
    first, second = range(48), range(48, 96)
    assert [leg and (leg.place, leg.packed, leg.parcel.peer) for leg in legs] == [
        (first, True, 1), (first, False, 2), None, (first, False, 3), (second, True, 1), (None, False, 2),
        (second, False, 2), (first, False, 1), (first, True, 1), (second, True, 1),
    ]  # fmt: skip
    assert direction.staging.num_bytes == 2 * 48
    assert legs[0].parcel.payload.data_ptr() == legs[1].parcel.payload.data_ptr()


def test_what_is_received_is_never_shared() -> None:
    tensors = {key: torch.zeros(4, 3) for key in "ab"}
    direction = _direction([_message(1, "ab"), _message(1, "ab")], tensors, sends=False)
    direction.staging.allocate()
    assert [leg.place for leg in direction.legs()] == [range(48), range(48, 96)]


def test_only_short_pieces_are_staged_where_the_transport_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {key: torch.arange(12.0).view(4, 3) for key in "abcde"}
    tensors["b"] = torch.arange(24.0).view(4, 6)[:, :3]  # rows of 12 bytes
    tensors["c"] = torch.arange(12.0).view(3, 4).t()
    tensors["d"] = torch.arange(12, dtype=torch.float64).view(4, 3)  # sent as float32

    def staged(keys: str, *, sends: bool, most: int = 32) -> str:
        monkeypatch.setattr(packing, "MOST_SENT_REGIONS", most)
        direction = _direction([_message(1, keys, rows=4)], tensors, sends=sends, gathers=True)
        direction.staging.allocate()
        (leg,) = direction.legs()
        assert leg is not None
        places = [part.data_ptr() for part in leg.parts]
        kept = "".join(key for key in keys if tensors[key].data_ptr() in places)
        assert leg.place == (range(48 * len(kept)) if kept else None)
        assert leg.parcel.memory.num_bytes == 48 * len(keys)
        assert len(leg.direct) == len(keys) - len(kept)
        assert not sends or len(leg.parcel.memory.table()) <= most
        return kept

    for name in ("_LEAST_SENT_BYTES", "_LEAST_RECEIVED_BYTES"):
        monkeypatch.setattr(packing, name, 12)
    assert staged("a", sends=True) == staged("ae", sends=True) == ""
    assert staged("ab", sends=True) == staged("ab", sends=False) == ""
    assert staged("ac", sends=True) == staged("ac", sends=False) == "c"
    assert staged("ad", sends=True) == staged("ad", sends=False) == "d"
    # b needs four regions; whatever is staged between direct ones needs one more each
    assert staged("ab", sends=True, most=7) == "b"
    assert staged("ab", sends=True, most=8) == ""
    assert staged("ab", sends=False, most=1) == ""


def test_a_buffer_keeps_its_limit() -> None:
    staging = Staging(_CPU, 64)
    places = [staging.reserve(num_bytes) for num_bytes in (5, 32, 17, 33, 64, 1)]
    assert places == [range(5), range(16, 48), range(17), range(33), range(64), range(1)]
    staging.allocate()
    assert staging.allocated_bytes == staging.num_bytes == 64
    staging.free()
    assert staging.allocated_bytes == 0


def test_bytes_lie_in_the_order_of_the_slices() -> None:
    tensors = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(12.0, 24.0).view(3, 4).t()}
    direction = _direction([_message(1, "ba", first=1)], tensors)
    direction.staging.allocate()
    (leg,) = direction.legs()
    packing.copy_tensors(leg.parts, leg.staged)
    expected = np.concatenate([tensors[key][1:3].numpy().reshape(-1) for key in "ba"])
    assert leg.parcel.payload.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("mix", [0.25, 0.1, 1 / 3])
def test_mixing_rounds_each_product_and_the_sum_to_fp32(monkeypatch: pytest.MonkeyPatch, mix: float) -> None:
    monkeypatch.setattr(packing, "MIX_CHUNK_ELEMENTS", 7)  # chunks that do not divide the tensor
    rng = np.random.default_rng(0)
    old, new = (rng.standard_normal((5, 3, 4)).astype(np.float32) for _ in range(2))
    target = torch.from_numpy(old.copy()).permute(2, 0, 1)
    mix_tensors([torch.from_numpy(new).permute(2, 0, 1)], [target], mix)
    expected = old * np.float32(1 - mix) + new * np.float32(mix)
    assert np.array_equal(target.permute(1, 2, 0).numpy().view(np.uint32), expected.view(np.uint32))


def test_mixing_keeps_the_wider_dtype_and_copies_integers() -> None:
    double = torch.tensor([1.0], dtype=torch.float64)
    mix_tensors([torch.tensor([1.0 + 2**-40], dtype=torch.float64)], [double], 0.5)
    assert double.item() == 1.0 + 2**-41
    half = torch.tensor([256.0], dtype=torch.bfloat16)
    mix_tensors([torch.tensor([259.0])], [half], 0.5)  # 257.5 rounds to 258 in bf16
    assert half.item() == 258.0
    number = torch.tensor([3])
    mix_tensors([torch.tensor([9])], [number], 0.5)
    assert number.item() == 9


def test_mixing_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    real = torch.Tensor.mul

    def spy(tensor: torch.Tensor, factor: float) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return real(tensor, factor)

    monkeypatch.setattr(torch.Tensor, "mul", spy)
    monkeypatch.setattr(packing, "MIX_CHUNK_ELEMENTS", 100)
    target = torch.zeros(1, 33, 70)
    mix_tensors([torch.ones(1, 33, 70)], [target], 0.5)
    assert 0 < largest <= 100
    assert target.eq(0.5).all()
