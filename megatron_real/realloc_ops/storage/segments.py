"""Owned storages of a copy's parameters, freed and allocated again without touching the modules.

A segment is one flat tensor. Its storage is freed with ``untyped_storage().resize_(0)`` and allocated again by resizing
it back; tensors that are views of it stay the same objects and are valid again after that. Contents are lost unless
they were copied to the host first. Sizes are booked in a `MemoryLedger` before the allocation.

Invariants (tests/unit/realloc_ops/test_segments.py):
    - after `free`, storages hold zero bytes and the ledger holds none for the set;
    - when `allocate` fails half-way nothing of the set is allocated; only an in-place reallocation, which goes segment
      by segment, leaves a part of a set allocated, and the ledger then holds just that part;
    - adopting changes no value, and afterwards no parameter's memory is outside a segment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, PlanError, Problem, RealError, raise_problems
from megatron_real.realloc_ops.storage.host_memory import HostBuffer, require_host_bytes

__all__ = ["BufferSegments", "Segment", "SegmentSet", "layer_group"]

_ALIGN_BYTES = 128
"""Each parameter starts at a multiple of this, as kernels with vector loads expect."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Storage, offset, shape and strides: equal for two tensors that are the same memory seen in the same way."""


def layer_group(name: str) -> str:
    """The default grouping of parameters: ``layers.N`` for those of a layer (of this stage), else ``other``."""
    match = _LAYER.search(name)
    return f"layers.{match[1]}" if match else "other"


class Segment:
    """One flat storage that can be freed and allocated again."""

    def __init__(self, name: str, flat: torch.Tensor) -> None:
        """Take over `flat`, a one-dimensional tensor that covers its whole storage.

        Raises:
            PlanError: `flat` is only a part of its storage, which would free memory of others.
        """
        storage_bytes = flat.untyped_storage().nbytes()
        if flat.dim() != 1 or flat.storage_offset() or flat.numel() * flat.element_size() != storage_bytes:
            raise PlanError(
                f"segment {name}: found a tensor of {flat.numel() * flat.element_size()} bytes in a storage of "
                f"{storage_bytes}; expected a flat tensor that is its whole storage. Keep this buffer allocated."
            )
        self.name = name
        self.flat = flat
        self.num_bytes = storage_bytes
        self._host: HostBuffer | None = None

    @property
    def allocated_bytes(self) -> int:
        return int(self.flat.untyped_storage().nbytes())

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else int(self._host.data.nbytes)

    def allocate(self) -> None:
        if not self.allocated_bytes:
            self.flat.untyped_storage().resize_(self.num_bytes)

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def reserve_host(self) -> None:
        """Take host memory, page-locked for a CUDA segment, unless the segment has it already."""
        if self._host is None:
            self._host = HostBuffer(self.name, self.num_bytes, lock=self.flat.device.type == "cuda")

    def save_to_host(self) -> None:
        self.reserve_host()
        assert self._host is not None
        self._host.data.view(self.flat.dtype).copy_(self.flat, non_blocking=True)

    def load_from_host(self) -> None:
        assert self._host is not None, f"segment {self.name} was never saved to the host"
        self.flat.copy_(self._host.data.view(self.flat.dtype), non_blocking=True)

    def drop_host(self) -> None:
        self._host = None


class _SegmentStore:
    """What `SegmentSet` and `BufferSegments` have in common."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        owner: str,
        ledger: MemoryLedger | None,
        host_ledger: MemoryLedger | None,
    ) -> None:
        self.segments = tuple(segments)
        self.owner = owner
        """Name in the ledgers."""
        self._ledger = ledger
        self._host_ledger = host_ledger
        self._has_host_copy = False
        self._by_storage = {segment.flat.untyped_storage()._cdata: segment for segment in self.segments}

    @property
    def nbytes(self) -> int:
        """Bytes when allocated."""
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.allocated_bytes for segment in self.segments)

    @property
    def host_bytes(self) -> int:
        return sum(segment.host_bytes for segment in self.segments)

    def allocate(self) -> None:
        """Allocate all segments, contents undefined; nothing happens if they are allocated.

        Raises:
            CapacityError: they do not fit, by the ledger or by the device; then none is allocated.
        """
        missing_bytes = self.nbytes - self.allocated_bytes
        if not missing_bytes:
            return
        if self._ledger is not None:
            self._ledger.reserve(self.owner, missing_bytes)
        try:
            for segment in self.segments:
                segment.allocate()
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on CPU
            self.free()
            raise self._refused(missing_bytes, error) from error

    def allocate_segment(self, segment: Segment) -> None:
        """Allocate one segment of the set, contents undefined; nothing happens if it is allocated.

        Raises:
            CapacityError: it does not fit, by the ledger or by the device.
        """
        if segment.allocated_bytes:
            return
        if self._ledger is not None:
            self._ledger.reserve(self.owner, segment.num_bytes)
        try:
            segment.allocate()
        except RuntimeError as error:
            if self._ledger is not None:
                self._ledger.release(self.owner, segment.num_bytes)
            raise self._refused(segment.num_bytes, error) from error

    def free_segment(self, segment: Segment) -> None:
        """Free one segment of the set; nothing happens if it is freed."""
        num_bytes = segment.allocated_bytes
        segment.free()
        if self._ledger is not None and num_bytes:
            self._ledger.release(self.owner, num_bytes)

    def segment_of(self, tensor: torch.Tensor) -> Segment | None:
        """The segment that a tensor lies in, allocated or not; None if it is outside the set."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def _refused(self, num_bytes: int, error: RuntimeError) -> CapacityError:
        return CapacityError(
            f"{self.owner}: the device could not allocate {num_bytes:,} bytes of parameters ({error}). Lower "
            "cluster.device_memory to what is really free, so that the plan is refused beforehand."
        )

    def free(self) -> None:
        """Free all segments; their contents are lost, tensors that point into them stay valid objects."""
        for segment in self.segments:
            segment.free()
        if self._ledger is not None:
            self._ledger.free(self.owner)

    def to_host(self, *, unchanged: bool = False) -> None:
        """Copy the contents to host memory (pinned for CUDA segments), then free the segments.

        Args:
            unchanged: the host copy of the last time is still right, so nothing is copied.

        Raises:
            RealError: the segments are freed, so there is nothing to copy.
            CapacityError: there is not enough host memory; nothing is freed then.
        """
        if self.allocated_bytes != self.nbytes:
            raise RealError(
                f"{self.owner}: found its segments freed; expected them allocated when moving to the host."
            )
        if not (unchanged and self._has_host_copy):
            self._reserve_host()
            for segment in self.segments:
                segment.save_to_host()
            self._synchronize()
            self._has_host_copy = True
        self.free()

    def from_host(self, *, keep: bool = True) -> None:
        """Allocate the segments and copy the contents back.

        On CUDA it returns at once unless the host memory is given back: what the current stream does next comes after
        the copies.

        Args:
            keep: keep the host memory for the next `to_host`; pinned memory is slow to allocate.

        Raises:
            RealError: `to_host` was never called.
            CapacityError: as `allocate`.
        """
        if not self._has_host_copy:
            raise RealError(f"{self.owner}: found no host copy; expected to_host before from_host.")
        self.allocate()
        for segment in self.segments:
            segment.load_from_host()
        if not keep:
            self.drop_host()

    def drop_host(self) -> None:
        """Give the host memory back, when no copy from it is under way any more."""
        if self._has_host_copy:
            self._synchronize()
        for segment in self.segments:
            segment.drop_host()
        self._has_host_copy = False
        if self._host_ledger is not None:
            self._host_ledger.free(self.owner)

    def _reserve_host(self) -> None:
        """Make room on the host for what has no host memory yet."""
        missing = [segment for segment in self.segments if not segment.host_bytes and segment.num_bytes]
        num_bytes = sum(segment.num_bytes for segment in missing)
        require_host_bytes(self.owner, num_bytes)
        if self._host_ledger is not None:
            self._host_ledger.reserve(self.owner, num_bytes)
        try:
            for segment in missing:
                segment.reserve_host()
        except CapacityError:
            self.drop_host()
            raise

    def _synchronize(self) -> None:
        for device in {segment.flat.device for segment in self.segments}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


class SegmentSet(_SegmentStore):
    """Segments that hold all parameters and persistent buffers of a frozen copy."""

    @classmethod
    def adopt(
        cls,
        modules: Iterable[torch.nn.Module],
        *,
        owner: str,
        group_of: Callable[[str], str] = layer_group,
        ledger: MemoryLedger | None = None,
        segment_bytes: int | None = None,
        host_ledger: MemoryLedger | None = None,
    ) -> SegmentSet:
        """Move every parameter and persistent floating-point buffer into new segments and point it there.

        Parameter objects, values and ties stay; what was not contiguous becomes so.

        Args:
            modules: the model chunks of this rank.
            owner: name in the ledger, for example ``actor d4t1p1@0-3``.
            group_of: group of a parameter by its name in its module; each (dtype, chunk, group) is one segment.
            ledger: books the bytes of the segments.
            segment_bytes: makes several segments of a group that is larger, in the order of its parameters; only a
                parameter that is larger itself exceeds it. An in-place reallocation frees segment by segment.
            host_ledger: books what `to_host` takes.

        Raises:
            PlanError: a parameter is of a tensor type that cannot be re-pointed, or shares its memory with others
                (a buffer of DDP, for example: use `BufferSegments` for that).
            CapacityError: the segments do not fit.
        """
        tensors = list(_named_tensors(modules))
        _refuse_unownable(tensors, owner)
        groups: dict[tuple[torch.dtype, torch.device, str], list[list[torch.Tensor]]] = {}
        places: dict[_Place, list[torch.Tensor]] = {}
        for chunk, name, tensor in tensors:
            place = _place_of(tensor)
            if place in places:  # tied: the same memory under two parameter objects
                places[place].append(tensor)
                continue
            places[place] = [tensor]
            key = (tensor.dtype, tensor.device, f"{chunk}.{group_of(name)}")
            groups.setdefault(key, []).append(places[place])
        if ledger is not None:
            everything = (tied[0] for members in groups.values() for tied in members)
            ledger.reserve(owner, sum(_padded(tensor) * tensor.element_size() for tensor in everything))
        segments: list[Segment] = []
        for (dtype, _, group), members in groups.items():
            parts = _split(members, segment_bytes)
            for number, part in enumerate(parts):
                name = f"{owner} {group} {dtype}" + (f" {number}" if len(parts) > 1 else "")
                segments.append(_adopt_group(name, part))
        return cls(segments, owner=owner, ledger=ledger, host_ledger=host_ledger)


class BufferSegments(_SegmentStore):
    """Storages that somebody else made, such as the flat parameter buffers of DDP: freed and allocated whole."""

    def __init__(
        self,
        buffers: Iterable[tuple[str, torch.Tensor]],
        *,
        owner: str,
        ledger: MemoryLedger | None = None,
        host_ledger: MemoryLedger | None = None,
    ) -> None:
        """Take over allocated (name, flat tensor) pairs and book them.

        Raises:
            PlanError: a tensor is only a part of its storage.
            CapacityError: they do not fit.
        """
        segments = [Segment(f"{owner} {name}", flat.detach()) for name, flat in buffers]
        super().__init__(segments, owner=owner, ledger=ledger, host_ledger=host_ledger)
        if ledger is not None:
            ledger.reserve(owner, self.allocated_bytes)


def _named_tensors(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(chunk, name, tensor) of parameters and persistent floating-point buffers, each tensor object once."""
    seen: set[int] = set()
    for chunk, module in enumerate(modules):
        for prefix, child in module.named_modules():
            local = [(name, param) for name, param in child._parameters.items() if param is not None]
            local += [
                (name, buffer)
                for name, buffer in child._buffers.items()
                if buffer is not None
                and buffer.is_floating_point()
                and name not in child._non_persistent_buffers_set
            ]
            for name, tensor in local:
                if id(tensor) not in seen and tensor.numel():
                    seen.add(id(tensor))
                    yield chunk, f"{prefix}.{name}" if prefix else name, tensor


def _place_of(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _refuse_unownable(tensors: Sequence[tuple[int, str, torch.Tensor]], owner: str) -> None:
    problems: list[Problem] = []
    by_storage: dict[int, tuple[str, _Place]] = {}
    for chunk, name, tensor in tensors:
        path = f"chunk {chunk}: {name}"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            problems.append(
                Problem(path=path, found=f"type {type(tensor).__name__}", expected="a plain tensor")
            )
            continue
        storage = tensor.untyped_storage()._cdata
        other, place = by_storage.setdefault(storage, (path, _place_of(tensor)))
        if place != _place_of(tensor):
            problems.append(
                Problem(
                    path=path,
                    found=f"it in one storage with {other}",
                    expected="a storage of its own",
                    fix="Adopt a copy before anything re-points its parameters; BufferSegments takes DDP's buffers.",
                )
            )
    raise_problems(problems, subject=f"segments of {owner}")


def _padded(tensor: torch.Tensor) -> int:
    """Elements of a tensor, rounded up to the alignment."""
    step = _ALIGN_BYTES // int(tensor.element_size())
    return int(tensor.numel() + step - 1) // step * step


def _split(members: list[list[torch.Tensor]], segment_bytes: int | None) -> list[list[list[torch.Tensor]]]:
    """Consecutive members that together are at most `segment_bytes`, or one member that is larger."""
    if segment_bytes is None:
        return [members]
    parts: list[list[list[torch.Tensor]]] = []
    room_bytes = -1
    for tied in members:
        num_bytes = _padded(tied[0]) * int(tied[0].element_size())
        if num_bytes > room_bytes:
            parts.append([])
            room_bytes = segment_bytes
        parts[-1].append(tied)
        room_bytes -= num_bytes
    return parts


def _adopt_group(name: str, members: Sequence[list[torch.Tensor]]) -> Segment:
    sizes = [_padded(tied[0]) for tied in members]
    first = members[0][0]
    segment = Segment(name, torch.zeros(sum(sizes), dtype=first.dtype, device=first.device))
    start = 0
    for tied, size in zip(members, sizes, strict=True):
        view = segment.flat[start : start + tied[0].numel()].view(tied[0].shape)
        view.copy_(tied[0].detach())
        for tensor in tied:
            tensor.data = view
        start += size
    return segment
