"""Which training step a copy's weights are from.

Invariants (tests/unit/realloc_ops/test_versions.py):
    - while weights are being written, and after that failed, a copy has no version at all: they may be half written;
    - only an update that finished advances the stamp;
    - a call that requires another version than the copy has does not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_real.errors import RealError

__all__ = ["FROZEN_VERSION", "VersionStamp"]

FROZEN_VERSION = 0
"""Weights that are never trained stay what was loaded."""


class VersionStamp:
    """The version of one copy's weights."""

    def __init__(self, copy_name: str) -> None:
        """A copy that never had weights.

        Args:
            copy_name: model and placement for error messages, for example ``actor d4t1p1@0-3``.
        """
        self.copy_name = copy_name
        self._version: int | None = None
        self._reason = "no weights ever arrived"

    @property
    def version(self) -> int | None:
        """The training step that the weights are from; None when they are not usable."""
        return self._version

    def set(self, version: int) -> None:
        """Say that the weights are now those of `version`, for example after an optimizer step or a load."""
        self._version = version

    def invalidate(self, reason: str) -> None:
        """Say that the weights are gone; `reason` is shown to the next call that requires them."""
        self._version = None
        self._reason = reason

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Weights are being overwritten with those of `version`; the stamp advances only when the body finishes."""
        self.invalidate(f"a reallocation to version {version} is under way or failed half-way")
        yield
        self._version = version

    def require(self, version: int) -> None:
        """Refuse to go on unless the weights are those of `version`.

        Raises:
            RealError: the copy has other weights, or none.
        """
        if self._version == version:
            return
        found = (
            f"version {self._version}" if self._version is not None else f"no usable weights ({self._reason})"
        )
        raise RealError(
            f"copy {self.copy_name}: found {found}; expected version {version}. Reallocate the weights to this "
            "copy before the call that uses them."
        )
