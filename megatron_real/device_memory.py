"""The ledger of a memory: who holds how many bytes, with a limit that is checked before anything is allocated.

The ledger counts what is declared to it: owned storages (parameter segments, staging buffers, optimizer state) and
declared activations. It is the same on CPU and on CUDA, so a plan that does not fit fails in the same place with the
same words on a laptop as on the cluster, and fails before the allocator does.

Another ledger counts the host memory that a rank keeps for what left its device. What the ranks of a node share (a host
store) is in the ledger of the node's first rank, so the sum over a node's ranks is the node's.

Invariants (tests/unit/test_device_memory.py):
    - `current_bytes` is the sum of `held()`; it never exceeds `capacity_bytes`;
    - a refused reservation changes nothing;
    - `peak_bytes` is the largest `current_bytes` since the start or the last `reset_peak`.
"""

from __future__ import annotations

import threading
from typing import Literal

from megatron_real.errors import CapacityError

__all__ = ["MemoryLedger"]

_ADVICE = {
    "device": "Give the call more devices, shard or offload a holder, or raise cluster.device_memory.",
    "host": "Offload fewer models, frozen ones to the node's store (offload: node), or raise cluster.host_memory.",
}


class MemoryLedger:
    """Bytes of memory by owner. Thread-safe."""

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        name: str = "device",
        kind: Literal["device", "host"] = "device",
    ) -> None:
        """Make an empty ledger.

        Args:
            capacity_bytes: the limit; None counts without limiting.
            name: whose memory it is, in error messages: for example ``rank 3``.
            kind: of the memory, for error messages.
        """
        if capacity_bytes is not None and capacity_bytes < 0:
            raise CapacityError(
                f"{kind} memory of {name}: found capacity {capacity_bytes}; expected at least 0 bytes."
            )
        self.capacity_bytes = capacity_bytes
        self.name = name
        self.kind = kind
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._current_bytes = 0
        self._peak_bytes = 0

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Book `num_bytes` for `owner`, before they are allocated; a second reservation adds to the first.

        Raises:
            CapacityError: they do not fit; nothing is booked then.
        """
        if num_bytes < 0:
            raise ValueError(f"{owner}: cannot reserve {num_bytes} bytes")
        with self._lock:
            wanted = self._current_bytes + num_bytes
            if self.capacity_bytes is not None and wanted > self.capacity_bytes:
                raise CapacityError(self._refusal(owner, num_bytes))
            self._held[owner] = self._held.get(owner, 0) + num_bytes
            self._current_bytes = wanted
            self._peak_bytes = max(self._peak_bytes, wanted)

    def free(self, owner: str) -> int:
        """Drop everything that `owner` holds and return how much that was; an owner that holds nothing is fine."""
        with self._lock:
            num_bytes = self._held.pop(owner, 0)
            self._current_bytes -= num_bytes
            return num_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """Drop a part of what `owner` holds.

        Raises:
            ValueError: it holds less.
        """
        with self._lock:
            held = self._held.get(owner, 0)
            if not 0 <= num_bytes <= held:
                raise ValueError(f"{owner}: cannot release {num_bytes} of {held} bytes")
            self._held[owner] = held - num_bytes
            if held == num_bytes:
                self._held.pop(owner, None)
            self._current_bytes -= num_bytes

    @property
    def current_bytes(self) -> int:
        with self._lock:
            return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        with self._lock:
            return self._peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak measurement from what is held now."""
        with self._lock:
            self._peak_bytes = self._current_bytes

    def held(self) -> dict[str, int]:
        """A copy of the bytes by owner."""
        with self._lock:
            return dict(self._held)

    def _refusal(self, owner: str, num_bytes: int) -> str:
        largest = sorted(self._held.items(), key=lambda item: (-item[1], item[0]))
        holders = ", ".join(f"{name} {held:,}" for name, held in largest) or "nobody"
        free_bytes = (self.capacity_bytes or 0) - self._current_bytes
        return (
            f"{self.kind} memory of {self.name}: {owner} asks for {num_bytes:,} bytes; {free_bytes:,} of "
            f"{self.capacity_bytes:,} are free. Held by: {holders}. {_ADVICE[self.kind]}"
        )
