from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_real.errors import CapacityError, RealError
from megatron_real.realloc_ops.storage import host_memory
from megatron_real.realloc_ops.storage.host_memory import (
    HostBuffer,
    HostCopier,
    SharedBlock,
    free_host_bytes,
    require_host_bytes,
)


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4000 * 1024),
        (
            {
                "sys/fs/cgroup/memory.max": "3000000\n",
                "sys/fs/cgroup/memory.current": "2500000\n",
                "sys/fs/cgroup/memory.stat": "anon 7\ninactive_file 400000\n",
            },
            900_000,
        ),
        (
            {
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "2500000\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 400000\n",
            },
            4000 * 1024,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 500\n",
            },
            0,
        ),
    ],
    ids=["no limit", "limit", "no limit of the container", "over the limit"],
)
def test_free_memory_is_the_machines_or_what_the_container_leaves(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert free_host_bytes(_machine(tmp_path, files)) == expected


def test_free_memory_of_this_machine_and_of_one_that_does_not_tell(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
    found = free_host_bytes()
    assert found is not None
    assert 0 < found < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_what_is_not_free_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 1000)
    require_host_bytes("ref", 1000)
    for allocate in (
        lambda: require_host_bytes("ref", 1001),
        lambda: HostBuffer("ref", 1001, lock=False),
        lambda: SharedBlock.allocate("ref", 1001),
    ):
        with pytest.raises(
            CapacityError, match="ref asks for 1,001 bytes; found 1,000 bytes free on this node"
        ):
            allocate()


def test_a_block_is_one_memory_under_two_mappings_and_has_no_name() -> None:
    before = sorted(os.listdir("/dev/shm"))
    block = SharedBlock.allocate("store of ref", 5000)
    other = SharedBlock.attach(block.ticket)
    assert block.data.data_ptr() != other.data.data_ptr()
    assert not other.data.any()
    block.data.fill_(7)
    assert bool((other.data == 7).all())
    assert sorted(os.listdir("/dev/shm")) == before
    ticket = block.ticket
    view = other.data[10:20]
    block.seal()
    other.seal()
    with pytest.raises(RealError, match=r"cannot be mapped .*one PID namespace"):
        SharedBlock.attach(ticket)
    del block, other
    assert view.tolist() == [7] * 10  # a view keeps the memory


def test_a_descriptor_of_another_file_is_not_taken_for_the_block(tmp_path: Path) -> None:
    block = SharedBlock.allocate("store of ref", 100)
    with (
        (tmp_path / "other").open("w+b") as other,
        pytest.raises(RealError, match="another file, of 0 bytes"),
    ):
        SharedBlock.attach(block.ticket._replace(descriptor=other.fileno()))
    block.seal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5, 3), (1,), (), (130,)])
def test_staged_copies_give_the_same_as_one_copy(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The path of page-locked buffers, with buffers of ordinary memory."""
    wide = torch.randn([2 * n for n in shape])
    source = wide[tuple(slice(0, n) for n in shape)]
    target = torch.full(shape, float("nan"), dtype=dtype)
    copier = HostCopier(locked=False, bounce_bytes=64)
    copier.copy_staged(source, target, [host_memory._Bounce(64, torch.device("cpu")) for _ in range(2)])
    assert torch.equal(target, source.to(dtype))
    other = torch.full(shape, float("nan"), dtype=dtype)
    copier.copy([source], [other])
    assert torch.equal(other, target)
