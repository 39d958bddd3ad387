"""Lookups in measured tables, and the times of collectives on a device's links.

A collective inside a node takes its measured latency plus its bus bytes over the measured bus bandwidth, which small
messages do not reach (`link_ramp`). Across nodes it is hierarchical, as NCCL's rings are: each device of a node carries
its share over its own adapter while the node's links carry the rest, so the slower of the two counts.

Bus bytes of S bytes over n ranks (NCCL tests' definition): all-reduce ``2 (n-1)/n S``, all-gather and reduce-scatter
``(n-1)/n S``, broadcast S, all-to-all ``(n-1)/n S/n``, where S is the whole, unsharded tensor throughout.

Invariants (tests/unit/plan_search/test_analytic.py): closed forms by hand; more bytes or nodes never take less time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from megatron_real.plan_search.cluster import Device
from megatron_real.plan_search.costs.operations import Collective, Group

__all__ = ["Links", "Lookup"]


class Lookup:
    """A function through measured points: linear in the logarithm of x between them, constant outside."""

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: tuple[tuple[float, float], ...]) -> None:
        self._xs = [math.log2(x) for x, _ in points]
        self._ys = [y for _, y in points]

    def __call__(self, x: float) -> float:
        if x <= 0:
            return self._ys[0]
        at = math.log2(x)
        index = bisect_right(self._xs, at)
        if index == 0:
            return self._ys[0]
        if index == len(self._xs):
            return self._ys[-1]
        left, right = self._xs[index - 1], self._xs[index]
        share = (at - left) / (right - left)
        return self._ys[index - 1] * (1 - share) + self._ys[index] * share


@dataclass(frozen=True, slots=True)
class _Kind:
    bandwidth: Lookup
    latency: Lookup


class Links:
    """Times of messages and collectives between a device and its peers."""

    def __init__(self, device: Device) -> None:
        kinds: dict[Collective, _Kind] = {
            kind: _Kind(
                Lookup(device.table(f"link_{kind}_bytes_per_s")),
                Lookup(device.table(f"link_{kind}_latency_s")),
            )
            for kind in Collective
            if kind is not Collective.BROADCAST
        }
        kinds[Collective.BROADCAST] = kinds[Collective.ALL_GATHER]
        self._kinds = kinds
        self._ramp = Lookup(device.table("link_ramp"))
        self.within_bytes_per_s = device.number("link_p2p_bytes_per_s")
        self.within_latency_s = device.number("link_p2p_latency_s")
        self.across_bytes_per_s = device.number("inter_node_bytes_per_s")
        self.across_latency_s = device.number("inter_node_latency_s")

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        """Seconds of one collective of `num_bytes` (of the whole tensor); 0 for a group of one."""
        if group.size <= 1:
            return 0.0
        in_node = group.size / group.num_nodes
        seconds, latency = 0.0, 0.0
        if in_node > 1:
            one = self._kinds[kind]
            message = num_bytes / in_node if kind is Collective.ALL_TO_ALL else num_bytes
            speed = one.bandwidth(in_node) * self._ramp(message)
            if kind is Collective.ALL_TO_ALL:  # of a rank's own S/n, only (g-1)/n stay inside the node
                seconds = num_bytes / group.size * (in_node - 1) / group.size / speed
            else:
                seconds = _bus_share(kind, in_node) * num_bytes / speed
            latency = one.latency(in_node)
        if group.num_nodes > 1:
            if kind is Collective.ALL_TO_ALL:
                across = num_bytes / group.size * (group.size - in_node) / group.size
            else:
                across = _bus_share(kind, group.num_nodes) * num_bytes / in_node
            seconds = max(seconds, across / self.across_bytes_per_s)
            latency += _steps(kind, group.num_nodes) * self.across_latency_s
        return seconds + latency

    def message(self, num_bytes: float, *, within_node: bool) -> float:
        """Seconds of one message."""
        if within_node:
            return num_bytes / self.within_bytes_per_s + self.within_latency_s
        return num_bytes / self.across_bytes_per_s + self.across_latency_s

    def bandwidth(self, *, within_node: bool) -> float:
        """Bytes per second of large messages, one way."""
        return self.within_bytes_per_s if within_node else self.across_bytes_per_s


def _bus_share(kind: Collective, ranks: float) -> float:
    if kind is Collective.BROADCAST:
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if kind is Collective.ALL_REDUCE else share


def _steps(kind: Collective, nodes: int) -> int:
    """Messages in a row between nodes: trees for all-reduce and broadcast, rings for gathers and scatters."""
    depth = math.ceil(math.log2(nodes))
    if kind is Collective.ALL_REDUCE:
        return 2 * depth
    return depth if kind in (Collective.BROADCAST, Collective.ALL_TO_ALL) else nodes - 1
