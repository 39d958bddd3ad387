"""Nodes, devices and the windows that calls may take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.errors import ConfigError, PlanError
from megatron_real.layout import Mesh
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.cluster import Cluster, Device, load_device


def cluster(nodes: int, per_node: int, memory: int | None = None) -> Cluster:
    return Cluster(
        spec=ClusterSpec(num_nodes=nodes, devices_per_node=per_node, device_memory=memory),
        device=Device(name="toy", memory_bytes=80, constants={}),
    )


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 12))
def test_windows_are_nested_or_disjoint_and_never_cut_a_node_in_part(nodes: int, per_node: int) -> None:
    meshes = cluster(nodes, per_node).meshes()
    assert meshes[0] == Mesh(0, nodes * per_node)
    assert {mesh.start for mesh in meshes if mesh.size == 1} == set(range(nodes * per_node))
    for one in meshes:
        whole_nodes = one.start % per_node == 0 and one.stop % per_node == 0
        assert whole_nodes or one.start // per_node == (one.stop - 1) // per_node
        for other in meshes:
            nested = one.start <= other.start and other.stop <= one.stop
            nested = nested or (other.start <= one.start and one.stop <= other.stop)
            assert nested or not one.overlaps(other)


def test_a_power_of_two_is_halved_down_to_single_ranks() -> None:
    assert [str(mesh) for mesh in cluster(2, 4).meshes()] == [
        "0-7", "0-3", "4-7", "0-1", "2-3", "4-5", "6-7", *(f"{rank}-{rank}" for rank in range(8)),
    ]  # fmt: skip


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 6), (3, 2), (12, 1)])
def test_all_windows_contain_the_aligned_ones(nodes: int, per_node: int) -> None:
    there = cluster(nodes, per_node)
    assert set(there.meshes()) <= set(there.windows())
    inside, runs = nodes * per_node * (per_node + 1) // 2, nodes * (nodes + 1) // 2
    assert len(there.windows()) == inside + runs - nodes  # a whole node counts in both


def test_the_users_memory_counts_before_the_devices() -> None:
    assert cluster(1, 2).capacity_bytes == 80
    assert cluster(1, 2, memory=50).capacity_bytes == 50


def test_a_device_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {
                "constants": {
                    "memory_bytes": {"value": 7, "unit": "B", "source": "me"},
                    "curve": {"value": [[1, 2.5]], "unit": "", "source": "me"},
                }
            }
        )
    )
    device = load_device(str(path))
    assert (device.name, device.memory_bytes, device.table("curve")) == ("mine", 7, ((1.0, 2.5),))
    with pytest.raises(PlanError, match=r"device mine: found no constant 'hbm'.*Add it"):
        device.number("hbm")
    with pytest.raises(PlanError, match="no table 'memory_bytes'"):
        device.table("memory_bytes")


def test_an_unknown_or_malformed_device_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.device: found 'h900'; expected one of .*, or the path"):
        load_device("h900")
    path = tmp_path / "broken.json"
    path.write_text('{"constants": {"memory_bytes": 3}}')
    with pytest.raises(ConfigError, match="found no device"):
        load_device(str(path))
