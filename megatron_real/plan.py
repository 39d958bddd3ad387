"""`plan.json`: for every call of an algorithm its mesh, layout and memory choices; loading, checking, writing.

All problems of a plan are collected and reported in one error, each with its JSON path. Nothing is left to be found out
after the first collective.

Invariants (tests/unit/test_plan.py):
    - `load(dump(plan)) == plan`;
    - `plan_schema.json` accepts exactly what `Plan` accepts in structure (it is generated from it).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import PlanError, Problem, raise_problems
from megatron_real.layout import Layout, Mesh, format_placement
from megatron_real.model_shape import ModelShape

__all__ = [
    "ClusterSpec",
    "CopyKey",
    "LayoutSpec",
    "OffloadTo",
    "Placement",
    "Plan",
    "Predicted",
    "plan_schema",
]


def _number(value: object) -> object:
    """JSON's numbers only: pydantic would take true for 1 and "2" for 2, which the JSON Schema refuses."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("number", "a number")
    return value


Natural = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Degree = Annotated[int, Field(ge=1), BeforeValidator(_number)]
Seconds = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]
OffloadTo = Literal["none", "host", "node"]
"""Where a model's bytes are between its calls; see `Placement.offload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyKey:
    """A model's weights on one window in one layout. Placements that are equal in these share a copy."""

    model: str
    mesh: Mesh
    layout: Layout

    def __str__(self) -> str:
        return f"{self.model}:{format_placement(self.mesh, self.layout)}"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterSpec(_Strict):
    """The devices that the plan was made for."""

    num_nodes: Degree = 1
    devices_per_node: Degree
    device: str = "cpu"
    device_memory: Degree | None = None
    """Bytes that a rank may own at once; None is no limit."""
    host_memory: Degree | None = None
    """Bytes of a node's host memory that offloaded models may take; None is no limit."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


class LayoutSpec(_Strict):
    """Parallel degrees, as written in JSON; see `megatron_real.layout.Layout`."""

    dp: Degree = 1
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: Degree | None = None
    vpp: Degree = 1
    sp: Flag = False
    layers: tuple[Natural, ...] | None = None

    def to_layout(self) -> Layout:
        return _layout_of(self)


@lru_cache(maxsize=4096)
def _layout_of(spec: LayoutSpec) -> Layout:
    # The runtime asks for every instruction; building one costs as much as a short instruction.
    return Layout(**spec.model_dump())


class Placement(_Strict):
    """Where and how one call runs."""

    ranks: tuple[Natural, Degree]
    """Half-open window of global ranks."""
    layout: LayoutSpec = LayoutSpec()
    num_microbatches: Degree = 1
    """Passes per data-parallel rank; in a train call, per optimizer step."""
    recompute: Literal["none", "selective", "full"] = "none"
    offload: OffloadTo = "none"
    """Where bytes are between calls. Said at the call in which the model lives (its train call, else its first):
    ``host``: each rank's own on the host, of a frozen model its weights, of a trained one its optimizer state and
    gradients; ``node``: a frozen model has no copy on devices, but one in each node's host memory, from which each of
    its calls is filled."""
    drop_trained_weights: Flag = False
    """Train calls: free the weights after they were reallocated; rebuild them from the optimizer's main parameters."""
    stream: Flag = False
    """Start the call as soon as its first layers have been reallocated; of calls in which the model does not live."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(*self.ranks)

    @property
    def parallel(self) -> Layout:
        return self.layout.to_layout()


class Predicted(_Strict):
    """An estimate with its provenance; never a decision."""

    model_config = ConfigDict(extra="allow", frozen=True)

    iteration_s: Seconds | None = None
    lower_bound_s: Seconds | None = None
    peak_memory_bytes: dict[str, Annotated[int, BeforeValidator(_number)]] = {}
    calls: dict[str, Seconds] = {}
    """Seconds per call, where known."""


class Plan(_Strict):
    """Placements of all calls of one algorithm on one cluster (version 1)."""

    version: Annotated[Literal[1], BeforeValidator(_number)] = 1
    algorithm: str
    cluster: ClusterSpec
    calls: dict[str, Placement]
    order: tuple[str, ...] | None = None
    predicted: Predicted | None = None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: no such file, not JSON, or its structure is wrong (all problems together).
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"{path}: cannot be read ({error.strerror}). Give the path of a plan.json."
            ) from error
        except UnicodeDecodeError as error:
            raise PlanError(
                f"{path}: byte {error.start} is not UTF-8. Give the path of a plan.json."
            ) from error
        return cls.loads(text, source=str(path))

    @classmethod
    def loads(cls, text: str, *, source: str = "plan.json") -> Plan:
        """Read a plan from JSON text; errors name `source`."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{source}: line {error.lineno}, column {error.colno}: not JSON ({error.msg})."
            ) from error
        try:
            plan = cls.model_validate(raw)
        except ValidationError as error:
            raise_problems(_structure_problems(error), subject=source)
            raise AssertionError("a validation error without problems") from error
        raise_problems(plan._placement_problems(), subject=source)
        return plan

    def dumps(self) -> str:
        """JSON text without the fields that are at their defaults."""
        raw = self.model_dump(mode="json", exclude_defaults=True)
        raw = {"version": self.version, **raw}
        return json.dumps(raw, indent=1) + "\n"

    def dump(self, path: str | Path) -> None:
        """Write the plan to `path`, which is never seen half written: several ranks may write the same plan."""
        target = Path(path)
        if target.exists() and not target.is_file():  # such as a pipe, which cannot be replaced
            target.write_text(self.dumps())
            return
        target = target.resolve()
        # Ranks on two hosts that share the folder may have the same pid.
        temporary = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            temporary.write_text(self.dumps())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def check(
        self, graph: Graph, shapes: Mapping[str, ModelShape] | None = None, *, source: str = "plan.json"
    ) -> None:
        """Check the plan against an algorithm's graph and, where given, the shapes of its models.

        Raises:
            PlanError: listing every problem.
        """
        problems = [*self._placement_problems(), *self._graph_problems(graph)]
        for call in graph.calls:
            placement = self.calls.get(call.name)
            shape = (shapes or {}).get(call.model or "")
            if placement is not None and shape is not None and not _degree_problems(call.name, placement):
                problems += shape.layout_problems(placement.parallel, f"calls.{call.name}.layout")
        raise_problems(problems, subject=source)

    def copy_of(self, call: Call) -> CopyKey | None:
        """The copy that `call` runs on; None for a call without a model."""
        if call.model is None:
            return None
        placement = self.calls[call.name]
        return CopyKey(model=call.model, mesh=placement.mesh, layout=placement.parallel)

    def _placement_problems(self) -> Iterator[Problem]:
        for name, placement in self.calls.items():
            start, stop = placement.ranks
            path = f"calls.{name}"
            if start >= stop:
                yield Problem(path=f"{path}.ranks", found=f"[{start}, {stop}]", expected="start < stop")
                continue
            if stop > self.cluster.num_devices:
                yield Problem(
                    path=f"{path}.ranks",
                    found=f"[{start}, {stop}]",
                    expected=f"a window inside the cluster's {self.cluster.num_devices} ranks",
                )
            yield from _degree_problems(name, placement)

    def _graph_problems(self, graph: Graph) -> Iterator[Problem]:
        if self.algorithm != graph.name:
            yield Problem(
                path="algorithm",
                found=repr(self.algorithm),
                expected=f"{graph.name!r}; run it with algorithm={self.algorithm}, or search one for {graph.name}",
            )
        names = [call.name for call in graph.calls]
        for name in self.calls:
            if name not in names:
                yield Problem(
                    path=f"calls.{name}",
                    found="a call that the algorithm does not have",
                    expected=f"one of {names}",
                )
        for call in graph.calls:
            placement = self.calls.get(call.name)
            path = f"calls.{call.name}"
            if placement is None:
                yield Problem(path=path, found="no placement", expected=f"one for each call of {graph.name}")
                continue
            if placement.layout.vpp > 1 and call.type is not CallType.TRAIN:
                yield Problem(
                    path=f"{path}.layout.vpp",
                    found=f"vpp={placement.layout.vpp} in a call of type {call.type}",
                    expected="1: Megatron interleaves model chunks in training only",
                )
            if placement.drop_trained_weights and call.type is not CallType.TRAIN:
                yield Problem(
                    path=f"{path}.drop_trained_weights",
                    found=f"true in a call of type {call.type}",
                    expected="false",
                )
            sound = placement.ranks[0] < placement.ranks[1] and not _degree_problems(call.name, placement)
            if call.model is None and sound and placement.parallel.dp != placement.mesh.size:
                yield Problem(
                    path=f"{path}.layout",
                    found=str(placement.parallel),
                    expected=f"d{placement.mesh.size}t1p1: a function has no weights to split",
                )
            yield from _residence_problems(graph, call, placement)
        if self.order is not None and sorted(self.order) != sorted(names):
            yield Problem(path="order", found=str(list(self.order)), expected=f"each of {names} once")
        elif self.order is not None and [call.name for call in graph.ordered(self.order)] != list(self.order):
            yield Problem(
                path="order",
                found=str(list(self.order)),
                expected=f"producers before consumers: {[call.name for call in graph.ordered(self.order)]}",
            )


def _degree_problems(name: str, placement: Placement) -> list[Problem]:
    spec = placement.layout
    path = f"calls.{name}.layout"
    try:
        layout = spec.to_layout()
    except PlanError as error:
        return [
            Problem(
                path=path, found=str(spec.model_dump(exclude_defaults=True)), expected=str(error).rstrip(".")
            )
        ]
    if placement.ranks[0] < placement.ranks[1] and layout.size != placement.mesh.size:
        return [
            Problem(
                path=path,
                found=f"dp*tp*pp*cp = {layout.dp}*{layout.tp}*{layout.pp}*{layout.cp} = {layout.size} ranks",
                expected=f"{placement.mesh.size}, the size of the window {list(placement.ranks)}",
                fix="Change a degree or the window.",
            )
        ]
    return []


def _residence_problems(graph: Graph, call: Call, placement: Placement) -> Iterator[Problem]:
    """Offload and streaming where there is nothing to offload or to stream."""
    path = f"calls.{call.name}"
    home = graph.home_call(call.model) if call.model is not None else call
    if placement.stream and call == home:
        yield Problem(
            path=f"{path}.stream",
            found=f"true in the call in which {call.model} lives" if call.model else "true in a function",
            expected="false: no weights are reallocated to it",
        )
    if call.model is None:
        return
    if graph.trained(call.model) and placement.offload == "node":
        yield Problem(
            path=f"{path}.offload",
            found="node for a trained model",
            expected="none, or in its train call host: a host store has frozen weights",
        )
    elif graph.update_of(call.model) is not None and placement.offload == "node":
        yield Problem(
            path=f"{path}.offload",
            found=f"node for {call.model}, which is moved toward a trained model",
            expected="none or host: the weights in a host store stay what they are",
        )
    elif graph.trained(call.model) and placement.offload == "host" and not call.trains:
        yield Problem(
            path=f"{path}.offload",
            found=f"host in a call of type {call.type} of a trained model",
            expected="none: its weights are released anyway",
            fix=f"Say it in {home.name}, to keep the optimizer's state on the host.",
        )


def _structure_problems(error: ValidationError) -> Iterator[Problem]:
    for item in error.errors():
        path = ".".join(map(str, item["loc"])) or "(top level)"
        if item["type"] == "extra_forbidden":
            yield Problem(
                path=path, found="an unknown key", expected="one of the keys of the plan schema, or none"
            )
        elif item["type"] == "missing":
            yield Problem(path=path, found="nothing", expected="a value: the key is required")
        else:
            yield Problem(path=path, found=repr(item["input"]), expected=item["msg"])


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of version 1; `plan_schema.json` in the package is this, and a test keeps it so."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
