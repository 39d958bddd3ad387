"""Moving a model's parameters from one layout to another; README.md in this folder has the call chain.

Between two Megatron models, without a plan or a runtime: `Reallocator` and `swap_model_weights`. Below them, planning
(`planning`) is pure arithmetic, imports no torch and serves the plan search as well; what executes is imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_real.realloc_ops.planning.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, ShardEntry
from megatron_real.realloc_ops.proof.versions import VersionStamp

if TYPE_CHECKING:
    from megatron_real.realloc_ops.execution.executor import ReallocExecutor
    from megatron_real.realloc_ops.execution.in_place import InPlace
    from megatron_real.realloc_ops.execution.report import ReallocReport
    from megatron_real.realloc_ops.models import Reallocator, ReallocOptions
    from megatron_real.realloc_ops.storage.segments import SegmentSet
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
    "InPlace": "execution.in_place",
    "ReallocExecutor": "execution.executor",
    "ReallocOptions": "models",
    "ReallocReport": "execution.report",
    "Reallocator": "models",
    "SegmentSet": "storage.segments",
    "swap_model_weights": "swap",
}
"""Module by public name, for what imports torch."""


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
