"""Moving a model's parameters from one layout to another; README.md in this folder has the call chain.

Between two Megatron models, without a plan or a runtime: `Reallocator` and `swap_model_weights`. Below them, planning
(`plan`, `shards`) is pure arithmetic, imports no torch and serves the plan search as well; what executes is imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_real.realloc_ops.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.shards import Box, ParamTable, ShardEntry
from megatron_real.realloc_ops.versions import VersionStamp

if TYPE_CHECKING:
    from megatron_real.realloc_ops.executor import ReallocExecutor
    from megatron_real.realloc_ops.in_place import InPlace
    from megatron_real.realloc_ops.models import Reallocator, ReallocOptions
    from megatron_real.realloc_ops.report import ReallocReport
    from megatron_real.realloc_ops.segments import SegmentSet
    from megatron_real.realloc_ops.swap import swap_model_weights

__all__ = [
    "Box",
    "InPlace",
    "ParamTable",
    "ReallocExecutor",
    "ReallocOptions",
    "ReallocPlan",
    "ReallocReport",
    "Reallocator",
    "SegmentSet",
    "ShardEntry",
    "VersionStamp",
    "build_realloc_plan",
    "swap_model_weights",
]

_WITH_TORCH = {
    "InPlace": "in_place",
    "ReallocExecutor": "executor",
    "ReallocOptions": "models",
    "ReallocReport": "report",
    "Reallocator": "models",
    "SegmentSet": "segments",
    "swap_model_weights": "swap",
}
"""Module by public name, for what imports torch."""


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
