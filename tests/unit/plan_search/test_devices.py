"""The device files: complete, with units and sources, and physically possible."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan_search.cluster import Device, device_names, load_device
from megatron_real.plan_search.costs.analytic import AnalyticCost

FILES = sorted((Path(__file__).parents[3] / "megatron_real/plan_search/devices").glob("*.json"))
GPUS = ("a100", "gb200", "h100", "h200")


def test_the_known_devices_are_there() -> None:
    assert device_names() == ("a100", "cpu", "gb200", "h100", "h200")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_constant_has_a_unit_and_a_public_source(path: Path) -> None:
    constants = json.loads(path.read_text())["constants"]
    for name, entry in constants.items():
        assert set(entry) == {"value", "unit", "source"}, name
        assert entry["unit"], name
        assert len(entry["source"]) > 10, name
        assert not re.search(r"shared/|planner\.md|/work", entry["source"]), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_constant_is_unread(path: Path) -> None:
    """A constant that nothing reads is a number that nobody checks."""
    package = Path(__file__).parents[3] / "megatron_real"
    text = "\n".join(file.read_text() for file in (package / "plan_search").rglob("*.py"))
    for name in json.loads(path.read_text())["constants"]:
        generic = re.sub(r"^link_(all_reduce|all_gather|reduce_scatter|all_to_all)_", "link_{kind}_", name)
        generic = re.sub(r"^decode_(eager|graph)_", "decode_{how}_", generic)
        assert f'"{name}"' in text or f'"{generic}"' in text or name in DOCUMENTARY, name


DOCUMENTARY = {"framework_reserve_bytes", "devices_per_node"}
"""For the reader: the first is taken off `memory_bytes`, the second says for how many ranks the tables hold."""


@pytest.mark.parametrize("name", device_names())
def test_tables_ascend_and_shares_are_shares(name: str) -> None:
    device = load_device(name)
    for constant, value in device.constants.items():
        if isinstance(value, list):
            xs = [x for x, _ in device.table(constant)]
            assert xs == sorted(set(xs)), constant
            assert all(y > 0 for _, y in device.table(constant)), constant
        if "efficiency" in constant or constant == "link_ramp":
            ys = (
                [y for _, y in device.table(constant)]
                if isinstance(value, list)
                else [device.number(constant)]
            )
            assert all(0 < y <= 1 for y in ys), constant


@pytest.mark.parametrize("name", GPUS)
def test_no_link_beats_its_data_sheet(name: str) -> None:
    """One-way NVLink: 300 GB/s (A100), 450 (H100, H200), 900 (GB200). NVLS lets an all-reduce count as much."""
    sheet = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "gb200": 900e9}[name]
    device = load_device(name)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert all(speed < sheet for _, speed in device.table(f"link_{kind}_bytes_per_s"))
    assert all(speed < 1.05 * sheet for _, speed in device.table("link_all_reduce_bytes_per_s"))
    assert device.number("link_p2p_bytes_per_s") < sheet


def test_newer_devices_are_faster() -> None:
    a100, h100, gb200 = (load_device(name) for name in ("a100", "h100", "gb200"))
    for constant in ("peak_bf16_flops_per_s", "hbm_bytes_per_s", "inter_node_bytes_per_s"):
        assert a100.number(constant) < h100.number(constant) <= gb200.number(constant)


def test_a_missing_constant_is_an_error_that_names_it() -> None:
    whole = load_device("h100")
    constants = {name: value for name, value in whole.constants.items() if name != "hbm_bytes_per_s"}
    with pytest.raises(PlanError, match="h100: found no constant 'hbm_bytes_per_s'"):
        AnalyticCost(Device(name="h100", memory_bytes=1, constants=constants))


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tpu'; expected one of a100, cpu, gb200, h100, h200"):
        load_device("tpu")


def test_a_device_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(FILES[0].read_text())
    assert load_device(str(path)).name == "mine"
    path.with_name("bad.json").write_text('{"constants": {"memory_bytes": 3}}')
    with pytest.raises(ConfigError, match=r"bad\.json: found no device"):
        load_device(str(path.with_name("bad.json")))
