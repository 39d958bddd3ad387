"""ReaL for Megatron-Core: every call of an RLHF iteration on its own device mesh, in its own parallel layout.

Public names are imported on first use, so that planning needs neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_real.errors import RealError
    from megatron_real.hooks.install import install
    from megatron_real.hooks.session import Session, Stage
    from megatron_real.layout import Layout, Mesh
    from megatron_real.plan import Plan

__version__ = "0.1.0"

__all__ = ["Layout", "Mesh", "Plan", "RealError", "Session", "Stage", "install"]

_WHERE = {
    "Layout": "megatron_real.layout",
    "Mesh": "megatron_real.layout",
    "Plan": "megatron_real.plan",
    "RealError": "megatron_real.errors",
    "Session": "megatron_real.hooks.session",
    "Stage": "megatron_real.hooks.session",
    "install": "megatron_real.hooks.install",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
