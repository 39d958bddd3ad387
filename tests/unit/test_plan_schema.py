"""`plan_schema.json` is what the code generates, and it accepts what the loader's structure check accepts."""

from __future__ import annotations

import copy
import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.plan import ClusterSpec, Plan, plan_schema
from megatron_real.plan_search.presets import split, symmetric

FULL: dict[str, Any] = {
    "version": 1,
    "algorithm": "ppo",
    "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "cpu", "device_memory": 1000},
    "calls": {
        "actor_train": {
            "ranks": [0, 4],
            "layout": {
                "dp": 1,
                "tp": 2,
                "pp": 2,
                "cp": 1,
                "ep": 1,
                "etp": 1,
                "vpp": 2,
                "sp": True,
                "layers": [1, 1, 1, 1],
            },
            "num_microbatches": 2,
            "recompute": "none",
            "offload": "none",
            "drop_trained_weights": False,
        }
    },
    "order": ["actor_train"],
    "predicted": {
        "iteration_s": 1.5,
        "lower_bound_s": 1,
        "peak_memory_bytes": {"0": 3},
        "calls": {"actor_train": 1.0},
        "profile_hash": "anything goes here",
    },
}
DELETE, EXTRA = object(), object()
REPLACEMENTS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2.0, 1.5, "2", "", "true", "none", "full"),
    *([], {}, [0, 4], [1], ["actor_train"], DELETE, EXTRA),
)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(importlib.resources.files("megatron_real").joinpath("plan_schema.json").read_text())


def test_schema_is_generated(schema: dict[str, Any]) -> None:
    assert schema == plan_schema(), (
        "write json.dumps(plan_schema(), indent=2) to megatron_real/plan_schema.json"
    )


def test_schema_is_a_schema(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*at, key))


def _changed(place: tuple[Any, ...], replacement: Any) -> Any:
    plan = copy.deepcopy(FULL)
    parent: Any = {"": plan}
    for key in ("", *place)[:-1]:
        parent = parent[key]
    key = ("", *place)[-1]
    if replacement is DELETE:
        del parent[key]
    elif replacement is EXTRA and isinstance(parent[key], dict):
        parent[key]["unknown_key"] = 1
    elif replacement is not EXTRA:
        parent[key] = replacement
    return (
        plan
        if place
        else (None if replacement is DELETE else replacement if replacement is not EXTRA else plan)
    )


def test_schema_and_loader_agree(schema: dict[str, Any]) -> None:
    """Every value of a full plan in turn is replaced by each of many, deleted, or given an unknown key."""
    validator = Draft202012Validator(schema)
    verdicts: dict[bool, int] = {True: 0, False: 0}
    disagree = []
    for place in _places(FULL):
        for replacement in REPLACEMENTS:
            raw = _changed(place, replacement)
            try:
                Plan.model_validate(raw)
                loads = True
            except ValidationError:
                loads = False
            verdicts[loads] += 1
            if validator.is_valid(raw) is not loads:
                disagree.append((".".join(map(str, place)), replacement, f"loader says {loads}"))
    assert not disagree
    assert min(verdicts.values()) > 100, "the changes must give both kinds"


@pytest.mark.parametrize("preset", [symmetric, split])
def test_presets_follow_the_schema(schema: dict[str, Any], preset: Any) -> None:
    plan = preset(ppo_graph(), ClusterSpec(devices_per_node=4))
    Draft202012Validator(schema).validate(json.loads(plan.dumps()))
    assert Plan.loads(plan.dumps()) == plan
