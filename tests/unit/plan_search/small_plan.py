"""A small model on a few devices, for tests of what is read of plans."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.plan import Plan
from megatron_real.plan_search.inputs import PlanInputs
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.planner_inputs import planner_of
from megatron_real.plan_search.presets import split

MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 32000,
    "position_embedding_type": "rope",
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
}


@lru_cache(maxsize=8)
def planner(devices: int = 4, memory_gib: float | None = None) -> Planner:
    """PPO of models of 170 million parameters on one node of H100s."""
    tree = {
        "cluster": {
            "devices_per_node": devices,
            "device": "h100",
            **({"device_memory": int(memory_gib * 2**30)} if memory_gib is not None else {}),
        },
        "workload": {
            "batch_size": 32,
            "prompt": {"length": 256},
            "response": {"mean": 200, "spread": 0.5, "cap": 512},
        },
        "model": {"actor": {"name": "small", "megatron": MODEL}},
    }
    return planner_of(PlanInputs.from_tree(tree), ppo_graph())


def split_plan(found: Planner) -> Plan:
    """Actor and reference on one half, the others on the other; the actor generates in another layout."""
    half = found.cluster.num_devices // 2
    tp = min(half, 8)
    layouts = {"actor_gen": f"d{half // tp}t{tp}p1", "actor": f"d{half}t1p1"}
    return split(found.graph, found.cluster.spec, layouts=layouts, num_microbatches=2)
