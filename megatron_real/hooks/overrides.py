"""A role's overrides of Megatron's arguments: names and types checked, since Megatron's parser does not see them."""

from __future__ import annotations

import contextlib
import functools
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Container, Mapping
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from megatron_real.errors import ConfigError, Problem, raise_problems

__all__ = ["read_overrides"]


def read_overrides(
    role: str, args: Namespace, overrides: Mapping[str, Any], *, decided_by_plan: Container[str]
) -> dict[str, Any]:
    """The overrides by attribute name, each in the type of the argument that it replaces.

    Args:
        role: for error messages.
        args: what the overrides will be written over.
        overrides: Megatron argument names (with ``-`` or ``_``) to values.
        decided_by_plan: arguments that an override may not touch.

    Raises:
        ConfigError: listing every override that is unknown to Megatron, decided by the plan or of another type.
    """
    changes: dict[str, Any] = {}
    problems: list[Problem] = []
    for given, value in overrides.items():
        name = given.replace("-", "_")
        path = f"models.{role}.{name}"
        if not hasattr(args, name):
            problems.append(
                Problem(path=path, found="an unknown Megatron argument", expected="one of Megatron's")
            )
        elif name in decided_by_plan:
            problems.append(
                Problem(path=path, found=repr(value), expected="nothing here: the plan decides layouts")
            )
        else:
            try:
                changes[name] = _converted(name, value, getattr(args, name))
            except ValueError as error:
                problems.append(Problem(path=path, found=repr(value), expected=str(error)))
    raise_problems(problems, subject="models", error=ConfigError)
    return changes


def _converted(name: str, value: Any, base: Any) -> Any:
    """`value` in the type of the argument `name`, whose value so far is `base`; numbers may be text.

    Raises:
        ValueError: it is of another type; says which one is expected.
    """
    if value is None and (base is None or _megatron_parser().get_default(name) is None):
        return None
    kind = type(base) if base is not None else _declared_type(name)
    if kind is None or type(value) is kind:
        return value
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-5 as text
            number = float(value)
            if kind is float and math.isfinite(number):
                return number
            if kind is int and number.is_integer():
                return int(number)
    raise ValueError(f"a value of type {kind.__name__}" + (f", like {base!r}" if base is not None else ""))


@functools.cache
def _megatron_parser() -> ArgumentParser:
    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def _declared_type(name: str) -> type | None:
    """The type of an argument's value as the command line declares it; None where that is not one plain type."""
    for action in _megatron_parser()._actions:
        if action.dest == name and action.nargs is None and action.type in (int, float, str):
            return action.type
    return None
