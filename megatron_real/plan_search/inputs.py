"""What a user asks of the planner, typed and checked.

The tree has the dotted names of ``conf/search.yaml``; `planner_inputs.planner_of` makes a planner of it. No torch.

Invariant (tests/unit/plan_search/test_inputs.py): all problems of a tree are reported in one error, each with its
dotted name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.plan import ClusterSpec, OffloadTo
from megatron_real.plan_search.cluster import load_device
from megatron_real.plan_search.costs.operations import OperationCosts
from megatron_real.plan_search.costs.profiled import ProfiledCost
from megatron_real.plan_search.model_arguments import (
    argument_mapping,
    with_overrides,
)
from megatron_real.plan_search.problem import Limits
from megatron_real.plan_search.profile_db import ProfileDatabase
from megatron_real.plan_search.space import Pin, SpaceOptions
from megatron_real.plan_search.workload import LengthDistribution

__all__ = [
    "AlgorithmInputs",
    "LengthInputs",
    "ModelInputs",
    "PinInputs",
    "PlanInputs",
    "SearchInputs",
    "WorkloadInputs",
    "without_nothing",
]

Count = Annotated[int, Field(ge=1)]
Value = bool | int | float | str | list[int | float | str] | None


class _Inputs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AlgorithmInputs(BaseModel):
    """Which graph; the other keys are options of the algorithm, as a training has them.

    ``samples_per_prompt``, ``num_minibatches`` and ``num_epochs`` take the place of what the workload says.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "ppo"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelInputs(_Inputs):
    """One role's model."""

    name: str | None = None
    """Of the model that `megatron` describes wholly. None: `megatron` is what differs from another role."""
    megatron: dict[str, Value] | list[str] = {}
    """Megatron's arguments by attribute name, or as a command line."""
    spec: dict[str, Any] | None = None
    """A `ModelSpec` as a plan records it; stands by itself."""


class LengthInputs(_Inputs):
    """Tokens. The first of `file`, `lengths`, `length`, `mean` that is given counts."""

    file: Path | None = None
    """Measured lengths: one a line, or a JSON list."""
    lengths: list[Count] | None = None
    weights: list[float] | None = None
    """Of `lengths`; None is equal ones."""
    length: Count | None = None
    """All sequences have it."""
    mean: Annotated[float, Field(gt=0)] | None = None
    spread: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithm; 0 makes all lengths `mean`."""
    cap: Count | None = None
    """No sequence is longer."""

    def problems(self, path: str) -> Iterator[Problem]:
        """What keeps this from being a distribution."""
        if self.file is None and self.lengths is None and self.length is None:
            if self.mean is None:
                yield Problem(path=path, found="no lengths", expected="one of length, mean, file")
            elif self.spread > 0 and self.cap is None:
                yield Problem(
                    path=f"{path}.cap", found="nothing", expected="the longest length, beside mean and spread"
                )
        if self.file is not None and not self.file.is_file():
            yield Problem(
                path=f"{path}.file", found=f"{self.file}, which is no file", expected="measured lengths"
            )
        if self.lengths is not None and self.weights is not None and len(self.lengths) != len(self.weights):
            yield Problem(
                path=f"{path}.weights",
                found=f"{len(self.weights)} weights",
                expected=f"{len(self.lengths)}, one per length",
            )

    def distribution(self, path: str) -> LengthDistribution:
        """As a histogram.

        Raises:
            ConfigError: the file is malformed.
        """
        if self.file is not None:
            found = LengthDistribution.of(_read_lengths(self.file, path))
            return found if self.cap is None else _capped(found, self.cap)
        if self.lengths is not None:
            weights = self.weights if self.weights is not None else [1.0] * len(self.lengths)
            total = math.fsum(weights)
            if total <= 0:
                raise ConfigError(f"{path}.weights: found a sum of {total:g}; expected more than 0.")
            return LengthDistribution(tuple(self.lengths), tuple(weight / total for weight in weights))
        if self.length is not None:
            return LengthDistribution.constant(self.length)
        assert self.mean is not None, "problems were raised"
        if self.spread == 0:
            length = max(1, round(self.mean))
            return LengthDistribution.constant(length if self.cap is None else min(length, self.cap))
        assert self.cap is not None, "problems were raised"
        return LengthDistribution.lognormal(self.mean, self.spread, self.cap)


class WorkloadInputs(_Inputs):
    """An iteration's work; see `Workload`."""

    batch_size: Count
    """Prompts per iteration; of data with answers their lines."""
    prompt: LengthInputs
    response: LengthInputs
    group_size: Count = 1
    num_minibatches: Count = 1
    num_epochs: Count = 1
    memory_quantile: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Times are priced for expected lengths, memory for responses of this quantile; 1 is the cap."""
    function_s: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Seconds per sequence of calls that are Python functions."""


class SearchInputs(_Inputs):
    """How to search: `strategy`, the fields of `Limits`, and those of `SpaceOptions`."""

    strategy: str = "exact"
    time_s: Annotated[float, Field(gt=0)] = 60.0
    gap: Annotated[float, Field(ge=0)] = 0.0
    evaluations: Count | None = None
    seed: int = 0
    plan_only: bool = False
    meshes: Literal["aligned", "any"] = "aligned"
    min_mesh: Count = 1
    max_tp: Count | None = None
    max_pp: Count = 64
    context_parallel: bool = True
    virtual_stages: bool = True
    sequence_parallel: bool | None = None
    recompute: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    offload: bool = True
    drop_trained_weights: bool = True
    stream: bool = True
    microbatch_sizes: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64)

    @property
    def limits(self) -> Limits:
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    @property
    def space(self) -> SpaceOptions:
        known = type(self).model_fields
        return SpaceOptions(
            **{field.name: getattr(self, field.name) for field in fields(SpaceOptions) if field.name in known}
        )


class PinInputs(_Inputs):
    """What is fixed of one call; see `Pin`."""

    ranks: tuple[int, int] | None = None
    layout: dict[str, int | bool] = {}
    num_microbatches: Count | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    offload: OffloadTo | None = None
    drop_trained_weights: bool | None = None
    stream: bool | None = None

    def to_pin(self) -> Pin:
        """As the search takes it."""
        return Pin(**{field.name: getattr(self, field.name) for field in fields(Pin)})


class PlanInputs(_Inputs):
    """Everything that a planner is asked.

    Raises:
        ConfigError: from `from_tree`, listing every problem.
    """

    algorithm: AlgorithmInputs = AlgorithmInputs()
    cluster: ClusterSpec
    megatron: dict[str, Value] | list[str] = {}
    """Megatron's arguments of the actor, as a training's configuration has them."""
    model: dict[str, ModelInputs] = {}
    """By role. Without an entry, the reference is like the actor, the reward like a named critic, others like
    `megatron`, or like the actor."""
    workload: WorkloadInputs
    search: SearchInputs = SearchInputs()
    pins: dict[str, PinInputs] = {}
    profile: Path | None = None
    """Measured prices (`megatron-real profile`); None takes the device's constants."""

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], *, source: str = "search") -> PlanInputs:
        """From plain nested data; errors begin with `source`."""
        try:
            inputs = cls.model_validate(without_nothing(tree))
        except ValidationError as error:
            raise_problems(_problems(error), subject=source, error=ConfigError)
            raise AssertionError("a validation error without problems") from error
        raise_problems(inputs._problems(), subject=source, error=ConfigError)
        return inputs

    @property
    def all_pins(self) -> dict[str, Pin]:
        return {name: pin.to_pin() for name, pin in self.pins.items()}

    def operations(self) -> OperationCosts | None:
        """Measured prices; None asks for the device's constants.

        Raises:
            ConfigError: the profile cannot be read, or is of another device.
        """
        if self.profile is None:
            return None
        return ProfiledCost(ProfileDatabase.load(self.profile), load_device(self.cluster.device))

    def arguments(self, role: str) -> tuple[Mapping[str, Any], str]:
        """Megatron's arguments of a role, and the dotted name under which the user finds them."""
        own = self.model.get(role, ModelInputs())
        arguments = _mapping(own.megatron)
        if own.name is not None:
            return arguments, f"model.{role}.megatron"
        like = self._like(role)
        if like is None:
            base: Mapping[str, Any] = _mapping(self.megatron)
            path = "megatron"
        else:
            base, path = self.arguments(like)
        return with_overrides(base, arguments), f"model.{role}.megatron" if arguments else path

    def _like(self, role: str) -> str | None:
        """The role that a model without a name starts from; None is `megatron`."""
        if role == "actor":
            return None
        critic = self.model.get("critic")
        if role.startswith("reward") and critic is not None and critic.name is not None:
            return "critic"
        if role.startswith("reward") and role != "reward":
            return "reward"
        return None if self.megatron else "actor"

    def _problems(self) -> Iterator[Problem]:
        for name in ("prompt", "response"):
            yield from getattr(self.workload, name).problems(f"workload.{name}")
        actor = self.model.get("actor", ModelInputs())
        if self.megatron and (actor.name is not None or actor.spec is not None):
            yield Problem(
                path="megatron",
                found="arguments of the actor",
                expected=f"none beside model/actor={actor.name}",
                fix="Drop one of the two.",
            )
        for role, model in self.model.items():
            if model.spec is not None and model.megatron:
                yield Problem(
                    path=f"model.{role}.megatron",
                    found="arguments beside the shape that the plan records",
                    expected="one of the two",
                    fix=f"Choose the model anew: model/{role}=NAME.",
                )


def _mapping(arguments: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    return dict(arguments) if isinstance(arguments, Mapping) else argument_mapping(arguments)


def _read_lengths(path: Path, where: str) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if text.lstrip().startswith("[") else text.split()
        lengths = [int(item) for item in raw]
        if lengths and min(lengths) >= 1:
            return lengths
        found = "no lengths" if not lengths else str(min(lengths))
    except (OSError, ValueError, TypeError) as error:
        found = str(error)
    raise ConfigError(
        f"{where}.file: {path}: found {found}; expected whole numbers of at least 1, one a line or as a JSON list."
    )


def _capped(distribution: LengthDistribution, cap: int) -> LengthDistribution:
    weights: dict[int, float] = {}
    for length, weight in zip(distribution.lengths, distribution.weights, strict=True):
        weights[min(length, cap)] = weights.get(min(length, cap), 0.0) + weight
    return LengthDistribution(tuple(weights), tuple(weights.values()))


def without_nothing(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` without the keys that have no value, so that defaults hold."""
    return {
        str(key): without_nothing(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }


_KNOWN: Mapping[str, type[BaseModel]] = {
    "": PlanInputs,
    "cluster": ClusterSpec,
    "workload": WorkloadInputs,
    "workload.prompt": LengthInputs,
    "workload.response": LengthInputs,
    "search": SearchInputs,
    "pins.*": PinInputs,
    "model.*": ModelInputs,
}
"""Which options there are, by place."""


def _problems(error: ValidationError) -> Iterator[Problem]:
    seen: set[str] = set()
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if "megatron" in where[:-1]:
            where = where[: where.index("megatron") + 2]  # not one problem per type that it might have been
        path = ".".join(where)
        if path in seen:
            continue
        seen.add(path)
        if item["type"] == "extra_forbidden":
            place = ".".join(
                "*" if i == 1 and where[0] in ("pins", "model") else p for i, p in enumerate(where[:-1])
            )
            names = ", ".join(_KNOWN[place].model_fields) if place in _KNOWN else "none"
            yield Problem(path=path, found="an unknown option", expected=f"one of {names}")
        elif item["type"] == "missing":
            fix = f"Add {path}=..." if len(where) > 1 else f"Add {path}=NAME, or its parts ({path}.KEY=...)."
            yield Problem(path=path, found="nothing", expected="a value: it has no default", fix=fix)
        else:
            yield Problem(path=path, found=repr(item["input"]), expected=item["msg"])
