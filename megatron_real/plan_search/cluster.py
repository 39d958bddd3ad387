"""The devices that a plan is made for: physical constants, and which of them lie in one node.

A device is described by a JSON file in ``devices/``: every constant is ``{"value": ..., "unit": ..., "source": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_real.errors import ConfigError, PlanError
from megatron_real.layout import Mesh
from megatron_real.plan import ClusterSpec

__all__ = ["Cluster", "Device", "device_names", "load_device"]

_FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of accelerator in its node; values are by constant name, as in its file."""

    name: str
    memory_bytes: int
    constants: Mapping[str, Any] = field(hash=False, compare=False)
    """Value by name: a number, or a table ``[[x, y], ...]``."""
    sources: Mapping[str, str] = field(hash=False, compare=False, default_factory=dict)

    def number(self, name: str) -> float:
        """A constant.

        Raises:
            PlanError: the device's file does not have it: a missing price is never zero.
        """
        value = self.constants.get(name)
        if not isinstance(value, int | float):
            raise PlanError(
                f"device {self.name}: found no constant {name!r}; expected a number. Add it, with its source, to "
                f"{_FOLDER / (self.name + '.json')}."
            )
        return float(value)

    def table(self, name: str) -> tuple[tuple[float, float], ...]:
        """A constant that is a curve: points ``(x, y)`` of ascending x."""
        value = self.constants.get(name)
        if not isinstance(value, list):
            raise PlanError(f"device {self.name}: found no table {name!r}; expected [[x, y], ...].")
        return tuple((float(x), float(y)) for x, y in value)


def device_names() -> tuple[str, ...]:
    """Devices that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@lru_cache(maxsize=64)
def load_device(name: str) -> Device:
    """A device by the name of its file, or by the path of a JSON file of the user's own.

    Raises:
        ConfigError: there is none, or its file is malformed.
    """
    path = Path(name) if name.endswith(".json") else _FOLDER / f"{name}.json"
    if not path.is_file():
        raise ConfigError(
            f"cluster.device: found {name!r}; expected one of {', '.join(device_names())}, or the path of a JSON file."
        )
    try:
        raw = json.loads(path.read_text())
        constants = {key: entry["value"] for key, entry in raw["constants"].items()}
        sources = {key: str(entry["source"]) for key, entry in raw["constants"].items()}
        return Device(
            name=path.stem, memory_bytes=int(constants["memory_bytes"]), constants=constants, sources=sources
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: found no device ({error!r}); expected "
            '{"constants": {NAME: {"value": ..., "unit": ..., "source": ...}}}.'
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. Ranks are numbered node by node."""

    spec: ClusterSpec
    device: Device

    @classmethod
    def of(cls, spec: ClusterSpec) -> Cluster:
        """With the constants of ``spec.device``."""
        return cls(spec=spec, device=load_device(spec.device))

    @property
    def num_devices(self) -> int:
        return self.spec.num_devices

    @property
    def devices_per_node(self) -> int:
        return self.spec.devices_per_node

    @property
    def world(self) -> Mesh:
        return Mesh(0, self.num_devices)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a rank may own: what the user set, else the device's memory less its head-room."""
        if self.spec.device_memory is not None:
            return self.spec.device_memory
        headroom = self.device.constants.get("headroom_fraction", 0.0)
        return int(self.device.memory_bytes * (1.0 - headroom))

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def nodes_of(self, mesh: Mesh) -> range:
        """Nodes that a window touches."""
        return range(self.node_of(mesh.start), self.node_of(mesh.stop - 1) + 1)

    def meshes(self) -> tuple[Mesh, ...]:
        """Aligned windows, largest first: the whole, its halves, theirs, down to single ranks.

        They are nested or disjoint. A number of nodes (or of devices in a node) that is odd is cut into its largest
        power of two and the rest, so that 6 nodes give 3 + 3, then 2 + 1 each. A window lies in one node or consists
        of whole ones.
        """
        found: list[Mesh] = []
        self._halve(self.world, found)
        return tuple(sorted(set(found), key=lambda mesh: (-mesh.size, mesh.start)))

    def windows(self) -> tuple[Mesh, ...]:
        """All windows in a node and all runs of whole nodes, largest first: aligned or not."""
        per_node, found = self.devices_per_node, set()
        for node in range(self.spec.num_nodes):
            first = node * per_node
            found |= {Mesh(first + i, first + j) for i in range(per_node) for j in range(i + 1, per_node + 1)}
            found |= {Mesh(first, stop * per_node) for stop in range(node + 1, self.spec.num_nodes + 1)}
        return tuple(sorted(found, key=lambda mesh: (-mesh.size, mesh.start)))

    def _halve(self, mesh: Mesh, found: list[Mesh]) -> None:
        found.append(mesh)
        unit = self.devices_per_node if mesh.size > self.devices_per_node else 1
        count = mesh.size // unit
        if count == 1:
            return
        left = count // 2 if count % 2 == 0 else 1 << (count.bit_length() - 1)
        middle = mesh.start + left * unit
        self._halve(Mesh(mesh.start, middle), found)
        self._halve(Mesh(middle, mesh.stop), found)
