"""Moving a model's parameters from one layout to another; README.md in this folder has the call chain.

Planning imports no torch: `shards` and `plan` are pure arithmetic and serve the plan search as well. Executing does:
`segments`, `local_shards`, `transports` and `executor` are imported from their own modules.
"""

from megatron_real.realloc_ops.plan import ReallocPlan, build_realloc_plan
from megatron_real.realloc_ops.shards import Box, ParamTable, ShardEntry
from megatron_real.realloc_ops.versions import VersionStamp

__all__ = ["Box", "ParamTable", "ReallocPlan", "ShardEntry", "VersionStamp", "build_realloc_plan"]
