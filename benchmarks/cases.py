"""Models, clusters and workloads that the search benchmarks share: shapes come from ``conf/model``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.model_arguments import model_spec
from megatron_real.plan_search.models import ModelSpec

_MODELS = Path(__file__).parent.parent / "conf" / "model"


@lru_cache(maxsize=64)
def model(name: str, *, scalar_head: bool = False) -> ModelSpec:
    """A model of ``conf/model``, with TransformerEngine's attention."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(_MODELS / f"{name}.yaml"))
    return model_spec(tree["megatron"], scalar_head=scalar_head, max_tp=8, sizes=(1, 2, 4, 8), device="h100")


def models(actor: str, critic: str | None = None, extra: int = 0) -> Mapping[str, ModelSpec]:
    """Actor and reference alike, critic and reward models alike."""
    critic = critic or actor
    scored = {f"reward{index + 2}": model(critic, scalar_head=True) for index in range(extra)}
    return {
        "actor": model(actor),
        "ref": model(actor),
        "critic": model(critic, scalar_head=True),
        "reward": model(critic, scalar_head=True),
        **scored,
    }


def cluster(num_devices: int, device: str = "h100") -> ClusterSpec:
    """Nodes of 8, or less than one."""
    per_node = min(8, num_devices)
    return ClusterSpec(num_nodes=num_devices // per_node, devices_per_node=per_node, device=device)
