"""From checked inputs to a `Planner`, and from a plan back to the inputs that its estimate was made for.

What `Planner.inputs` writes into a plan is a tree of `PlanInputs` too (`recorded_inputs`), so that a plan can be priced
again where it is read, and under changes (`with_changes`). Graphs come from the caller: algorithms are a layer beside
this one. No torch.

Invariant (tests/unit/plan_search/test_inputs.py): the planner of a plan's recorded inputs has the same inputs and the
same hash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_real.dataflow import Graph
from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.plan import Plan
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.inputs import ModelInputs, PlanInputs, without_nothing
from megatron_real.plan_search.model_arguments import model_problems, model_spec
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.workload import Workload

__all__ = ["changed_inputs", "planner_from_predicted", "planner_of", "recorded_inputs", "with_changes"]

_COUNTS = {
    "samples_per_prompt": "group_size",
    "num_minibatches": "num_minibatches",
    "num_epochs": "num_epochs",
}
"""Options of an algorithm that say what the workload says; where they are given, they count."""


def planner_of(inputs: PlanInputs, graph: Graph) -> Planner:
    """The planner that `inputs` describe.

    Args:
        inputs: checked.
        graph: of ``inputs.algorithm``.

    Raises:
        ConfigError: listing what is wrong with the models, the device or the profile.
    """
    cluster = Cluster.of(inputs.cluster)
    _check_roles(inputs, graph)
    raise_problems(_model_problems(inputs, graph), subject=inputs.algorithm.name, error=ConfigError)
    models = {role: _model(inputs, graph, role, cluster) for role in graph.models}
    return Planner(graph, models, inputs.cluster, _workload(inputs, graph), inputs.operations())


def recorded_inputs(plan: Plan) -> dict[str, Any] | None:
    """The tree of `PlanInputs` that a plan was priced under; None if it does not say."""
    extra = (plan.predicted.model_extra or {}) if plan.predicted is not None else {}
    recorded = extra.get("inputs")
    if not isinstance(recorded, Mapping) or "workload" not in recorded or "models" not in recorded:
        return None
    return {
        "algorithm": {"name": plan.algorithm},
        "cluster": recorded.get("cluster", {}),
        "workload": {
            name: value for name, value in recorded["workload"].items() if name != "unit"
        },  # the graph's
        "model": {role: {"spec": spec} for role, spec in recorded["models"].items()},
    }


def planner_from_predicted(plan: Plan, graph: Graph) -> Planner:
    """The planner under whose inputs `plan` was priced, with the prices of the device's constants.

    Raises:
        ConfigError: the plan does not say, or what it says is malformed.
    """
    tree = recorded_inputs(plan)
    if tree is None:
        raise ConfigError(
            "plan: found no inputs in predicted; expected those that a search writes. Give models and workload."
        )
    return planner_of(PlanInputs.from_tree(tree, source="predicted.inputs"), graph)


def with_changes(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the given values of `changes` over it; None gives nothing.

    A model, and a distribution of lengths, replaces the former one whole: parts of two make neither.
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if value is None or value == {}:
            continue
        if key in ("prompt", "response"):
            result[key] = value
        elif key == "model" and isinstance(old, Mapping):
            result[key] = {**old, **without_nothing(value)}
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = with_changes(old, value)
        else:
            result[key] = value
    return result


def changed_inputs(plan: Plan, planner: Planner) -> tuple[str, ...]:
    """What is other in `planner` than where the plan's estimate was made, such as ``workload.batch_size: 128 -> 256``.

    Empty also where the plan has no estimate.
    """
    if plan.predicted is None or plan.predicted.iteration_s is None:
        return ()
    extra = plan.predicted.model_extra or {}
    if "inputs" not in extra:
        return ("everything: the plan does not say what its estimate was made for",)
    now = json.loads(json.dumps(planner.inputs(), default=str))
    changes = list(_differences(extra["inputs"], now, ""))
    costs = json.loads(json.dumps(planner.operations.provenance))
    if extra.get("costs") != costs:
        changes += _differences(extra.get("costs") or {}, costs, "prices")
    return tuple(changes)


def _check_roles(inputs: PlanInputs, graph: Graph) -> None:
    unknown = [
        role for role, model in inputs.model.items() if role not in graph.models and model.name is None
    ]
    raise_problems(
        (
            Problem(
                path=f"model.{role}",
                found="a role that the algorithm does not have",
                expected=f"one of {', '.join(graph.models)}",
            )
            for role in unknown
            if inputs.model[role].spec is None
        ),
        subject=inputs.algorithm.name,
        error=ConfigError,
    )


def _model_problems(inputs: PlanInputs, graph: Graph) -> Iterator[Problem]:
    seen: set[str] = set()
    for role in graph.models:
        if inputs.model.get(role, ModelInputs()).spec is not None:
            continue
        arguments, path = inputs.arguments(role)
        if path in seen:
            continue
        seen.add(path)
        if not arguments:
            yield Problem(
                path=f"model.{role}",
                found="no model",
                expected="one",
                fix=f"Add model/{'actor' if path == 'megatron' else role}=NAME, such as llama_7b, or model=tiny.",
            )
        else:
            yield from model_problems(arguments, path)


def _model(inputs: PlanInputs, graph: Graph, role: str, cluster: Cluster) -> ModelSpec:
    own = inputs.model.get(role, ModelInputs())
    if own.spec is not None:
        try:
            return TypeAdapter(ModelSpec).validate_python(own.spec)
        except (ValidationError, TypeError) as error:
            raise ConfigError(
                f"model.{role}: found no model as a plan records it ({error}). Choose one: model/{role}=NAME."
            ) from error
    arguments, _ = inputs.arguments(role)
    windows = cluster.meshes() if inputs.search.meshes == "aligned" else cluster.windows()
    pinned = {pin.ranks[1] - pin.ranks[0] for pin in inputs.pins.values() if pin.ranks is not None}
    return model_spec(
        arguments,
        scalar_head=graph.has_scalar_head(role),
        max_tp=inputs.search.max_tp or cluster.devices_per_node,
        sizes={mesh.size for mesh in windows} | pinned,
        device=inputs.cluster.device,
    )


def _workload(inputs: PlanInputs, graph: Graph) -> Workload:
    given = inputs.workload
    names = {call.name for call in graph.calls}
    raise_problems(
        (
            Problem(
                path=f"workload.function_s.{name}", found="no such call", expected=f"one of {sorted(names)}"
            )
            for name in given.function_s
            if name not in names
        ),
        subject=graph.name,
        error=ConfigError,
    )
    counts = {name: getattr(given, name) for name in _COUNTS.values()}
    for option, name in _COUNTS.items():
        value = inputs.algorithm.options.get(option, counts[name])
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"algorithm.{option}: found {value!r}; expected a whole number of at least 1.")
        counts[name] = value
    return Workload(
        batch_size=given.batch_size,
        prompt=given.prompt.distribution("workload.prompt"),
        response=given.response.distribution("workload.response"),
        unit=graph.data.unit,
        **counts,
        memory_quantile=given.memory_quantile,
        function_s=given.function_s,
    )


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if path in ("workload.prompt", "workload.response"):
        if not _alike(_histogram(old), _histogram(new)):
            yield f"{path}: {_lengths_text(old)} -> {_lengths_text(new)}"
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            inner = f"{path}.{key}" if path else str(key)
            yield from _differences(old.get(key), new.get(key), inner)
    elif not _alike(old, new):
        yield f"{path}: {_short(old)} -> {_short(new)}"


def _histogram(lengths: Mapping[str, Any]) -> list[Any]:
    """As recorded: one length, or several with their weights."""
    if "length" in lengths:
        return [[lengths["length"]], [1.0]]
    return [list(lengths["lengths"]), list(lengths["weights"])]


def _lengths_text(lengths: Mapping[str, Any]) -> str:
    values, weights = _histogram(lengths)
    mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(
        weights
    )
    return f"{values[0]} tokens" if len(values) == 1 else f"mean {mean:.0f}, at most {values[-1]} tokens"


def _alike(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_alike(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, float) or isinstance(new, float):
        return (
            isinstance(old, int | float)
            and isinstance(new, int | float)
            and math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-8)
        )
    return bool(old == new)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
