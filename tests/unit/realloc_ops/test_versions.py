from __future__ import annotations

import pytest

from megatron_real.errors import RealError
from megatron_real.realloc_ops.proof.versions import VersionStamp


def test_a_finished_update_advances() -> None:
    stamp = VersionStamp("actor d4t1p1@0-3")
    with pytest.raises(
        RealError, match=r"copy actor d4t1p1@0-3: found no usable weights \(no weights ever arrived\)"
    ):
        stamp.require(0)
    with stamp.updating(3):
        assert stamp.version is None
    stamp.require(3)
    with pytest.raises(RealError, match="found version 3; expected version 4"):
        stamp.require(4)


def test_a_failed_update_leaves_no_version() -> None:
    stamp = VersionStamp("actor")
    stamp.set(3)
    with pytest.raises(ZeroDivisionError), stamp.updating(4):
        raise ZeroDivisionError
    for version in (3, 4):
        with pytest.raises(RealError, match="version 4 is under way or failed half-way"):
            stamp.require(version)


def test_freed_weights_say_why() -> None:
    stamp = VersionStamp("ref")
    stamp.set(0)
    stamp.invalidate("freed after ref_inf")
    with pytest.raises(RealError, match="freed after ref_inf"):
        stamp.require(0)
