"""What the user fixes of a plan before it is searched.

Invariant (tests/unit/plan_search/test_space.py): a pin that names nothing is refused with its dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_real.dataflow import Graph
from megatron_real.errors import Problem, raise_problems
from megatron_real.plan import LayoutSpec
from megatron_real.plan_search.choices import Option
from megatron_real.plan_search.cluster import Cluster

__all__ = ["Pin", "check_pins"]

_FIELDS = ("num_microbatches", "recompute", "offload", "drop_trained_weights", "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What the user fixes of one call's placement; None leaves a choice free."""

    ranks: tuple[int, int] | None = None
    layout: Mapping[str, int | bool] = field(default_factory=dict)
    """Degrees by name, such as ``{"tp": 2, "pp": 1}``."""
    num_microbatches: int | None = None
    recompute: str | None = None
    offload: str | None = None
    drop_trained_weights: bool | None = None
    stream: bool | None = None

    def allows(self, option: Option) -> bool:
        fixed = {name: getattr(self, name) for name in _FIELDS}
        return all(getattr(option.layout, name) == value for name, value in self.layout.items()) and all(
            value is None or getattr(option, name) == value for name, value in fixed.items()
        )

    def __str__(self) -> str:
        parts = [f"ranks {self.ranks[0]}-{self.ranks[1] - 1}"] if self.ranks is not None else []
        parts += [f"{name}={value}" for name, value in self.layout.items()]
        for name in _FIELDS:
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)}")
        return ", ".join(parts)


def check_pins(graph: Graph, cluster: Cluster, pins: Mapping[str, Pin]) -> None:
    """Whether pins are of calls and degrees that there are.

    Raises:
        PlanError: they are not; all problems together.
    """
    names = [call.name for call in graph.calls]
    problems = []
    for name, pin in pins.items():
        if name not in names:
            problems.append(Problem(path=f"pins.{name}", found="no such call", expected=f"one of {names}"))
        unknown = sorted(set(pin.layout) - set(LayoutSpec.model_fields))
        if unknown:
            problems.append(
                Problem(
                    path=f"pins.{name}.layout",
                    found=", ".join(unknown),
                    expected=f"degrees among {', '.join(LayoutSpec.model_fields)}",
                )
            )
        if pin.ranks is not None and not 0 <= pin.ranks[0] < pin.ranks[1] <= cluster.num_devices:
            problems.append(
                Problem(
                    path=f"pins.{name}.ranks",
                    found=str(list(pin.ranks)),
                    expected=f"a window inside the cluster's {cluster.num_devices} ranks",
                )
            )
    raise_problems(problems, subject="search")
