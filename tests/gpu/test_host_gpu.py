"""Host memory and the device: page-locked, shared, in the order of streams."""

from __future__ import annotations

import pytest
import torch

from megatron_real.realloc_ops.storage import host_memory
from megatron_real.realloc_ops.storage.host_memory import HostBuffer, HostCopier, SharedBlock
from megatron_real.realloc_ops.storage.segments import SegmentSet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: page-locking is CUDA's"),
]
_CYCLES = 200_000_000
"""About a tenth of a second of the device's time."""


@pytest.mark.parametrize("locked", [True, False])
def test_boxes_of_a_shared_block_reach_the_device(locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not locked:
        monkeypatch.setattr(host_memory, "_lock_pages", lambda data: False)
    block = SharedBlock.allocate("store of ref", 4 * 1024 * 1024)
    block.lock_pages()
    assert block.locked == block.data.is_pinned() == locked
    whole = block.data.view(torch.float32).view(1024, 1024)
    whole.copy_(torch.randn(1024, 1024))
    sources = [whole[10:200], whole[:, 100:300], whole[5:7, 3], whole[:512]]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    targets = [torch.zeros_like(s, dtype=d, device="cuda") for s, d in zip(sources, dtypes, strict=True)]
    targets[0] = torch.zeros(190, 2048, device="cuda")[:, ::2]
    HostCopier(locked=block.locked, bounce_bytes=65536).copy(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.cpu(), source.to(target.dtype))
    block.seal()


def test_memory_that_cannot_be_locked_leaves_no_error_behind() -> None:
    buffer = HostBuffer("state", 1 << 20, lock=True)
    assert buffer.locked
    assert not host_memory._lock_pages(buffer.data)  # a second time
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_segments_come_back_in_the_order_of_the_stream() -> None:
    module = torch.nn.Linear(512, 512, device="cuda")
    segments = SegmentSet.adopt([module], owner="ref")
    weight = module.weight.detach().clone()
    torch.cuda._sleep(_CYCLES)
    with torch.no_grad():
        module.weight.mul_(2)  # still to come when the host goes on
    segments.to_host()
    torch.cuda._sleep(_CYCLES)
    segments.from_host()
    assert torch.equal(module.weight, 2 * weight)
    segments.drop_host()
