"""Host memory: how much is free, page-locked buffers, a block that all ranks of a node map, copies to a device.

A shared block is a memory file without a name (``memfd_create``): the rank that makes it tells the others of its node
the number of its descriptor, and they open that under ``/proc``. So nothing can be left in ``/dev/shm``, whenever a
process is killed, and the size of ``/dev/shm`` (64 MB in a container by default) is no limit.

For CUDA, memory is page-locked with ``cudaHostRegister`` instead of torch's pinned allocator, which rounds sizes up to
powers of two and cannot serve shared memory. Where registering fails, copies go through two page-locked buffers.

Invariants (tests/unit/realloc_ops/test_host_memory.py, tests/distributed/test_host_store.py):
    - what does not fit into the free host memory is refused before it is allocated;
    - every process that attached a block sees what the others write; the memory goes with the last of them.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_real.errors import CapacityError, RealError
from megatron_real.realloc_ops.planning.shards import Box

__all__ = ["HostBuffer", "HostCopier", "SharedBlock", "Ticket", "free_host_bytes", "require_host_bytes"]

_BOUNCE_BYTES = 32 * 2**20
_NUM_BOUNCES = 2


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Host memory that may still be allocated: what the machine has available, or the container's limit leaves.

    Args:
        root: where ``proc`` and ``sys`` are mounted.

    Returns:
        Bytes; None where the system does not tell (no ``/proc/meminfo``).
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    cgroup = root / "sys/fs/cgroup"
    for folder, limit, usage in (
        (cgroup, "memory.max", "memory.current"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            held_bytes = int((folder / usage).read_text())
            stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
            # The kernel takes back cached files when memory is short.
            reclaimable_bytes = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            found.append(int((folder / limit).read_text()) - held_bytes + reclaimable_bytes)
        except (OSError, ValueError):  # no such controller, or the limit is "max"
            continue
    return max(min(found), 0) if found else None


def require_host_bytes(owner: str, num_bytes: int) -> None:
    """Check that `num_bytes` of host memory are free now.

    Raises:
        CapacityError: they are not.
    """
    free_bytes = free_host_bytes()
    if free_bytes is not None and num_bytes > free_bytes:
        raise CapacityError(
            f"host memory: {owner} asks for {num_bytes:,} bytes; found {free_bytes:,} bytes free on this node. Free "
            "host memory, raise the container's memory limit, or set offload to 'none' for some models."
        )


def _lock_pages(data: torch.Tensor) -> bool:
    """Page-lock memory for CUDA; whether that worked."""
    portable = 1  # cudaHostRegisterPortable: for every device of this process
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, portable)) == 0:
        return True
    try:
        torch.zeros(1, device="cuda").add_(
            1
        )  # its launch check takes the failure, so that nobody else finds it
    except RuntimeError:
        torch.cuda.current_stream().synchronize()
    return False


def _unlock_pages(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class HostBuffer:
    """Flat host memory of this process; page-locked if asked for and possible."""

    def __init__(self, owner: str, num_bytes: int, *, lock: bool) -> None:
        """Allocate it.

        Args:
            owner: for error messages.
            num_bytes: its size.
            lock: page-lock it, for copies from and to CUDA.

        Raises:
            CapacityError: so much host memory is not free.
        """
        require_host_bytes(owner, num_bytes)
        try:
            # Whole pages of its own: a page can be locked once only.
            pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"host memory: {owner} could not allocate {num_bytes:,} bytes ({error.strerror})."
            ) from error
        self.data = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        self.locked = lock and num_bytes > 0 and _lock_pages(self.data)
        if self.locked:
            weakref.finalize(self, _unlock_pages, self.data.data_ptr()).atexit = False


class Ticket(NamedTuple):
    """How other processes of the node find a block."""

    pid: int
    descriptor: int
    inode: int
    num_bytes: int


class SharedBlock:
    """Bytes that several processes of one node share."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map an open memory file; use `allocate` or `attach`."""
        self._descriptor = descriptor
        self._num_bytes = num_bytes
        self.locked = False
        # torch keeps the mapping alive as long as any tensor looks into it.
        self.data = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def allocate(cls, owner: str, num_bytes: int) -> SharedBlock:
        """Make a block of zeros, all of its memory taken at once.

        Raises:
            CapacityError: so much host memory is not free.
            RealError: the system has no memory files.
        """
        if not hasattr(os, "memfd_create"):
            raise RealError(
                f"{owner}: found a system without memfd_create; expected Linux. Set offload to 'host'."
            )
        require_host_bytes(owner, num_bytes)
        descriptor = os.memfd_create(f"megatron_real {owner}"[:200])
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise CapacityError(
                f"host memory: {owner} could not allocate {num_bytes:,} shared bytes ({error.strerror}). Set offload "
                "to 'none' for some models."
            ) from error

    @property
    def ticket(self) -> Ticket:
        """For `attach`; valid until `seal`."""
        return Ticket(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, self._num_bytes)

    @classmethod
    def attach(cls, ticket: Ticket) -> SharedBlock:
        """Map the block of another process of this node.

        Raises:
            RealError: it cannot be opened.
        """
        path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _unreachable(path, error.strerror) from error
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (ticket.inode, ticket.num_bytes):
            os.close(descriptor)
            raise _unreachable(path, f"it is another file, of {found.st_size:,} bytes")
        return cls(descriptor, ticket.num_bytes)

    def seal(self) -> None:
        """Close the descriptor: nobody else can attach; the mappings stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def lock_pages(self) -> None:
        """Page-lock the mapping of this process for CUDA, if possible."""
        if not self.locked and _lock_pages(self.data):
            self.locked = True
            weakref.finalize(self, _unlock_pages, self.data.data_ptr()).atexit = False


def _unreachable(path: str, reason: str | None) -> RealError:
    return RealError(
        f"host store: {path} of the node's first rank cannot be mapped ({reason}). The ranks of a node must run as one "
        "user in one container (one PID namespace); check cluster.devices_per_node, or set offload to 'host'."
    )


class _Bounce:
    """One page-locked buffer, and when the device has read it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        self._read: torch.cuda.Event | None = None

    def acquire(self) -> torch.Tensor:
        if self._read is not None:
            self._read.synchronize()
        return self.buffer

    def release(self) -> None:
        if self._on_cuda:
            self._read = torch.cuda.Event()
            self._read.record()


class HostCopier:
    """Copies host tensors to tensors on a device, converting dtypes."""

    def __init__(self, *, locked: bool, bounce_bytes: int = _BOUNCE_BYTES) -> None:
        """Allocates nothing.

        Args:
            locked: the sources are page-locked.
            bounce_bytes: size of each of the two buffers for what cannot go directly.
        """
        self._locked = locked
        self._bounce_bytes = bounce_bytes

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target, of equal shape; complete when it returns.

        On CUDA it is queued on the current stream, after everything there that still reads the targets.
        """
        bounces: list[_Bounce] = []
        devices = set()
        for source, target in zip(sources, targets, strict=True):
            devices.add(target.device)
            direct = self._locked and source.is_contiguous() and source.dtype == target.dtype
            if target.device.type == "cpu" or direct:
                target.copy_(source, non_blocking=True)
            else:
                if not bounces:
                    bounces = [_Bounce(self._bounce_bytes, target.device) for _ in range(_NUM_BOUNCES)]
                self.copy_staged(source, target, bounces)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def copy_staged(self, source: torch.Tensor, target: torch.Tensor, bounces: list[_Bounce]) -> None:
        """Pack and convert on the host, piece by piece, while the piece before travels; `bounces` are used in turn."""
        whole = Box((0,) * target.dim(), tuple(target.shape))
        for piece in _pieces(whole, max(self._bounce_bytes // target.element_size(), 1)):
            place = piece.slices_in(whole)
            bounces.append(bounces.pop(0))
            buffer = bounces[-1].acquire()
            num_bytes = piece.num_elements * target.element_size()
            staged = buffer[:num_bytes].view(target.dtype).view(piece.shape)
            staged.copy_(source[place])
            target[place].copy_(staged, non_blocking=True)
            bounces[-1].release()


def _pieces(whole: Box, num_elements: int) -> Iterator[Box]:
    """Parts of a box, in row-major order, of at most `num_elements` each."""
    rest = [whole]
    while rest:
        head, tail = rest.pop(0).split(num_elements)
        yield from head
        rest[:0] = tail
