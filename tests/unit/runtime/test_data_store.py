"""Messages as bytes."""

from __future__ import annotations

import pytest
import torch

from megatron_real.data_plan import Lengths, Message
from megatron_real.dataflow import Call, CallType, Graph, KeySpec, Per
from megatron_real.errors import RealError
from megatron_real.runtime.execution.data_store import DataStore, message_bytes, pack, unpack

GRAPH = Graph(
    name="g",
    calls=(Call(name="gen", model="m", type=CallType.GENERATE, outputs=("tokens", "values", "score")),),
    keys=(
        KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
        KeySpec(name="values", per=Per.RESPONSE, dtype="float32"),
        KeySpec(name="score", per=Per.SEQUENCE, dtype="float32"),
    ),
)
LENGTHS = Lengths(prompt=(2, 1), response=(1, 2))
CPU = torch.device("cpu")


def store() -> DataStore:
    result = DataStore()
    result.put("tokens", (0, 1), [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])])
    result.put("values", (0, 1), [torch.tensor([0.5]), torch.tensor([1.5, 2.5])])
    result.put("score", (0, 1), [torch.tensor([7.0]), torch.tensor([8.0])])
    return result


def test_items_are_aligned() -> None:
    """values of both sequences: 12 bytes, padded to 16; then tokens of sequence 1: 24 bytes."""
    message = Message(src=0, dst=1, items=(("values", (0, 1)), ("tokens", (1,))))
    assert message_bytes(message, GRAPH, LENGTHS) == 16 + 24
    flat = pack(message, GRAPH, LENGTHS, store(), CPU)
    assert flat.dtype is torch.uint8
    assert flat[:12].view(torch.float32).tolist() == [0.5, 1.5, 2.5]
    assert flat[16:].view(torch.int64).tolist() == [4, 5, 6]
    received = DataStore()
    unpack(flat, message, GRAPH, LENGTHS, received)
    assert [part.tolist() for part in received.parts("values", (1, 0))] == [[1.5, 2.5], [0.5]]
    assert received.parts("tokens", (1,))[0].tolist() == [4, 5, 6]


def test_a_message_of_empty_responses_still_has_bytes() -> None:
    message = Message(src=0, dst=1, items=(("values", (0,)),))
    nothing = Lengths(prompt=(2,), response=(0,))
    empty = DataStore()
    empty.put("values", (0,), [torch.empty(0)])
    flat = pack(message, GRAPH, nothing, empty, CPU)
    assert flat.numel() == message_bytes(message, GRAPH, nothing) > 0
    received = DataStore()
    unpack(flat, message, GRAPH, nothing, received)
    assert received.parts("values", (0,))[0].numel() == 0


def test_missing_and_misshapen_sequences_are_named() -> None:
    with pytest.raises(RealError, match=r"key 'tokens' has no sequences \[3\] here"):
        store().parts("tokens", (0, 3))
    wrong = Lengths(prompt=(2, 1), response=(1, 3))
    message = Message(src=0, dst=1, items=(("values", (0, 1)),))
    with pytest.raises(RealError, match="rank 1: key 'values' of sequence 1 has 2 elements; expected 3"):
        pack(message, GRAPH, wrong, store(), CPU)
