"""Finding plans: `search` in one call, `Planner` for more. No torch; names are loaded when they are asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_real.plan_search.models import ModelSpec
    from megatron_real.plan_search.planner import Estimate, Planner, SearchReport, search
    from megatron_real.plan_search.problem import Limits
    from megatron_real.plan_search.space import Pin, SpaceOptions
    from megatron_real.plan_search.workload import LengthDistribution, Workload

__all__ = [
    "Estimate",
    "LengthDistribution",
    "Limits",
    "ModelSpec",
    "Pin",
    "Planner",
    "SearchReport",
    "SpaceOptions",
    "Workload",
    "search",
]

_MODULES = {
    "Estimate": "planner",
    "LengthDistribution": "workload",
    "Limits": "problem",
    "ModelSpec": "models",
    "Pin": "space",
    "Planner": "planner",
    "SearchReport": "planner",
    "SpaceOptions": "space",
    "Workload": "workload",
    "search": "planner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
