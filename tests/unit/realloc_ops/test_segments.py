from __future__ import annotations

import pytest
import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, PlanError, RealError
from megatron_real.realloc_ops.storage.segments import BufferSegments, SegmentSet, layer_group


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(3, 5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.layers[0].register_buffer("expert_bias", torch.ones(3))
        self.layers[0].register_buffer("cache", torch.ones(3), persistent=False)
        self.scale = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.tied = torch.nn.Linear(3, 5, bias=False)
        self.tied.weight = self.embedding.weight


def test_parameters_keep_values_ties_and_objects_over_free_and_allocate() -> None:
    model = _Model()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in model.named_parameters()}
    ledger = MemoryLedger()
    segments = SegmentSet.adopt([model], owner="actor", ledger=ledger)
    assert {segment.name for segment in segments.segments} == {
        "actor 0.other torch.float32", "actor 0.layers.0 torch.float32", "actor 0.layers.1 torch.float32",
        "actor 0.other torch.bfloat16",
    }  # fmt: skip
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
        assert value.data_ptr() % 16 == 0
    assert {name: id(value) for name, value in model.named_parameters()} == objects
    assert model.tied.weight is model.embedding.weight
    storages = {segment.flat.untyped_storage().data_ptr() for segment in segments.segments}
    owned = [*model.parameters(), model.layers[0].expert_bias]
    assert {tensor.untyped_storage().data_ptr() for tensor in owned} == storages
    assert model.layers[0].cache.untyped_storage().data_ptr() not in storages
    assert ledger.held() == {"actor": segments.nbytes}

    view = model.layers[1].weight.detach()[1:3]
    segments.to_host()
    assert segments.allocated_bytes == ledger.current_bytes == 0
    assert model.layers[1].weight.untyped_storage().nbytes() == 0
    segments.from_host()
    assert segments.allocated_bytes == ledger.current_bytes == segments.nbytes
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert torch.equal(view, values["layers.1.weight"][1:3])


def test_an_unchanged_copy_is_not_copied_to_the_host_again() -> None:
    segments = SegmentSet.adopt([_Model()], owner="ref")
    segments.to_host()
    segments.from_host()
    flat = segments.segments[0].flat
    before = flat.clone()
    flat.fill_(7.0)
    segments.to_host(unchanged=True)
    segments.from_host(keep=False)
    assert torch.equal(flat, before)
    assert segments.host_bytes == 0
    with pytest.raises(RealError, match="found no host copy"):
        segments.from_host()
    segments.free()
    with pytest.raises(RealError, match="ref: found its segments freed"):
        segments.to_host()


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    model = _Model()
    ledger = MemoryLedger(2000)
    segments = SegmentSet.adopt([model], owner="actor", ledger=ledger)
    segments.free()
    ledger.reserve("others", 2000 - segments.nbytes + 1)
    with pytest.raises(CapacityError, match="actor asks for"):
        segments.allocate()
    assert segments.allocated_bytes == 0
    ledger.free("others")
    segments.allocate()
    segments.allocate()
    assert ledger.held() == {"actor": segments.nbytes}
    with pytest.raises(CapacityError):
        SegmentSet.adopt([_Model()], owner="critic", ledger=MemoryLedger(100))


@pytest.mark.parametrize("segment_bytes", [1, 300, 1000, 10**6])
def test_segments_of_a_bounded_size(segment_bytes: int) -> None:
    model = _Model()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    whole = SegmentSet.adopt([_Model()], owner="actor")
    segments = SegmentSet.adopt([model], owner="actor", segment_bytes=segment_bytes)
    assert segments.nbytes == whole.nbytes
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    largest = (largest + 127) // 128 * 128
    assert max(segment.num_bytes for segment in segments.segments) <= max(segment_bytes, largest)
    assert len({segment.name for segment in segments.segments}) == len(segments.segments)
    if segment_bytes == 1:
        assert len(segments.segments) == len(values) - 1, "one for each tensor, but for the tied one"
    if segment_bytes == 10**6:
        assert len(segments.segments) == len(whole.segments)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_segments_come_and_go_one_by_one() -> None:
    model, ledger = _Model(), MemoryLedger()
    segments = SegmentSet.adopt([model], owner="actor", ledger=ledger, segment_bytes=1)
    segments.free()
    for number, segment in enumerate(segments.segments):
        segments.allocate_segment(segment)
        segments.allocate_segment(segment)
        assert (
            ledger.current_bytes
            == segments.allocated_bytes
            == sum(s.num_bytes for s in segments.segments[: number + 1])
        )
    segments.free_segment(segments.segments[0])
    segments.free_segment(segments.segments[0])
    assert (
        ledger.current_bytes == segments.allocated_bytes == segments.nbytes - segments.segments[0].num_bytes
    )
    ledger.capacity_bytes = ledger.current_bytes
    with pytest.raises(CapacityError, match="actor asks for"):
        segments.allocate_segment(segments.segments[0])
    ledger.capacity_bytes = None
    segments.allocate()
    assert ledger.held() == {"actor": segments.nbytes}
    assert segments.segment_of(model.layers[0].weight) in segments.segments
    assert segments.segment_of(model.layers[0].cache) is None


def test_a_segment_that_the_device_refuses_is_not_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger()
    segments = SegmentSet.adopt([_Model()], owner="actor", ledger=ledger)
    first, last = segments.segments[0], segments.segments[-1]
    segments.free()
    segments.allocate_segment(first)

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(last, "allocate", fail)
    with pytest.raises(CapacityError, match="could not allocate"):
        segments.allocate_segment(last)
    assert ledger.current_bytes == first.num_bytes


def test_a_failed_allocation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger()
    segments = SegmentSet.adopt([_Model()], owner="actor", ledger=ledger)
    segments.free()

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(segments.segments[-1], "allocate", fail)
    with pytest.raises(CapacityError, match="could not allocate"):
        segments.allocate()
    assert segments.allocated_bytes == ledger.current_bytes == 0


def test_buffers_of_others_are_freed_whole() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    parameter = torch.nn.Parameter(flat[4:8].view(2, 2))
    ledger = MemoryLedger()
    buffers = BufferSegments([("buffer 0", flat)], owner="actor train", ledger=ledger)
    assert ledger.held() == {"actor train": 48}
    buffers.to_host()
    assert flat.untyped_storage().nbytes() == 0
    buffers.from_host()
    assert parameter.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    with pytest.raises(PlanError, match="found a tensor of 16 bytes in a storage of 48"):
        BufferSegments([("part", flat[:4])], owner="x")


def test_parameters_of_a_shared_buffer_are_not_adopted() -> None:
    flat = torch.zeros(8)
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])
    with pytest.raises(PlanError, match="chunk 0: b: found it in one storage with chunk 0: a"):
        SegmentSet.adopt([module], owner="actor")


class _Quantised(torch.Tensor):
    pass


def test_tensor_subclasses_are_not_adopted() -> None:
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(3).as_subclass(_Quantised))
    with pytest.raises(PlanError, match="chunk 0: w: found type _Quantised"):
        SegmentSet.adopt([module], owner="actor")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weight", "layers.3"),
        ("layers.11.bias", "layers.11"),
        ("decoder.final_layernorm.weight", "other"),
        ("embedding.word_embeddings.weight", "other"),
    ],
)
def test_groups(name: str, group: str) -> None:
    assert layer_group(name) == group
