"""Planning needs neither torch nor Megatron: every planning command, and the search as a function, without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]

_BLOCKED = """
import sys

for name in ("torch", "megatron", "megatron.core", "megatron.training", "ortools"):
    sys.modules[name] = None
"""

_COMMANDS = (
    _BLOCKED
    + """
from megatron_real.cli.main import main

small = ["workload.batch_size=8", "workload.prompt.mean=16", "workload.response.length=16"]
assert main(["search", "model=tiny", "cluster=cpu2", *small, "output=a.json", "pictures=pictures"]) == 0
assert main(["search", "model=tiny", "cluster=cpu2", *small, "search.strategy=symmetric", "output=b.json"]) == 0
assert main(["simulate", "a.json", "workload.response.length=24", "pictures=pictures"]) == 0
assert main(["explain", "a.json", "most=1"]) == 0
assert main(["diff", "a.json", "b.json"]) == 0
assert main(["show", "a.json"]) == 0
assert not any(name.partition(".")[0] in ("torch", "megatron") for name, module in sys.modules.items() if module)
"""
)

_FUNCTION = (
    _BLOCKED
    + """
from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search import LengthDistribution, ModelSpec, Pin, Planner, SpaceOptions, Workload, search

shape = dict(num_layers=8, hidden_size=1024, num_attention_heads=8, num_query_groups=8, ffn_hidden_size=4096,
             padded_vocab_size=32000)
actor = ModelSpec(shape=ModelShape(**shape))
critic = ModelSpec(shape=ModelShape(**shape, scalar_head=True))
models = {"actor": actor, "ref": actor, "critic": critic, "reward": critic}
workload = Workload(batch_size=32, prompt=LengthDistribution.constant(128), response=LengthDistribution.constant(128))
report = search(ppo_graph(), models, ClusterSpec(devices_per_node=2, device="h100"), workload,
                options=SpaceOptions(max_tp=1), pins={"actor_gen": Pin(ranks=(0, 1))})
assert report.plan.calls["actor_gen"].ranks == (0, 1)
assert report.pin_prices[0].cost_s >= 0
planner = Planner(ppo_graph(), models, ClusterSpec(devices_per_node=2, device="h100"), workload)
assert planner.estimate(report.plan).period_s == report.estimate.period_s
print("period", report.estimate.period_s)
"""
)


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_all_planning_commands_run_without_torch(tmp_path: Path) -> None:
    done = _run(_COMMANDS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "neighbouring plans evaluated" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json", "pictures"}


def test_the_search_is_a_function_without_torch(tmp_path: Path) -> None:
    done = _run(_FUNCTION, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("period ")


def test_a_graph_with_a_cycle_is_one_error(tmp_path: Path) -> None:
    code = (
        _BLOCKED
        + """
from megatron_real.dataflow import Call, CallType, Graph, Input, KeySpec, Per
from megatron_real.errors import PlanError

keys = tuple(KeySpec(name=name, per=Per.TOKEN, dtype="int64") for name in "ab")
calls = (
    Call(name="one", model="actor", type=CallType.INFERENCE, inputs=(Input(key="b"),), outputs=("a",)),
    Call(name="two", model="actor", type=CallType.INFERENCE, inputs=(Input(key="a"),), outputs=("b",)),
)
try:
    Graph(name="ring", calls=calls, keys=keys)
except PlanError as error:
    print(error)
"""
    )
    done = _run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "graph ring: calls: found the cycle one -> two; expected a graph without cycles" in done.stdout
