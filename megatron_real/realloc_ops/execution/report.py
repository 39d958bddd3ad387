"""What a run of a reallocation says about itself.

Invariants (tests/unit/realloc_ops/test_executor.py):
    - every number is of one run on one rank; sums over ranks are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReallocReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReallocReport:
    """What one run of one rank did."""

    bytes_moved: int
    """Received from other ranks."""
    bytes_bound: int
    """The fewest bytes that this rank could receive."""
    bytes_sent: int
    bytes_local: int
    """Copied inside this rank."""
    messages: int
    """Sent and received."""
    staging_peak_bytes: int
    """Both directions together."""
    seconds: float
    checksum_s: float = 0.0
    """Spent on sums that prove the delivery, on this rank, without waiting for others; not part of `seconds`."""
