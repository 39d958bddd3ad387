"""Reward functions of the user: found before anything else starts, their results checked.

A reward function is ``(prompts: list[str], responses: list[str], **columns: list) -> list[float]``, where the
columns are those of the prompts file.
"""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_real.backend import RewardFunction
from megatron_real.errors import ConfigError

__all__ = ["Samples", "call_reward", "load_function"]


def load_function(name: str) -> RewardFunction:
    """The function that ``module:function`` names.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, has no such function, or it is
            not callable.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"reward function: found {name!r}; expected module:function, for example rewards:short_answers."
        )
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # a module of the user: importing it can raise anything
        raise ConfigError(
            f"reward function {name}: module {module_name!r} cannot be imported ({type(error).__name__}: "
            f"{error}). "
            "Put its folder on PYTHONPATH, or mend the module."
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            known = [
                key for key, value in vars(target).items() if callable(value) and not key.startswith("_")
            ]
            raise ConfigError(
                f"reward function {name}: {module_name} has no {attribute!r}; it has "
                f"{', '.join(sorted(known)) or 'none'}."
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(
            f"reward function {name}: found {type(target).__name__}; expected a function of prompts and "
            "responses."
        )
    function: RewardFunction = target
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What a reward function is called with: sequences `ids` as text."""

    ids: tuple[int, ...]
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]

    def at(self, index: int) -> Samples:
        """Only the sequence at this position."""
        return Samples(
            ids=self.ids[index : index + 1],
            prompts=self.prompts[index : index + 1],
            responses=self.responses[index : index + 1],
            columns={name: values[index : index + 1] for name, values in self.columns.items()},
        )


def call_reward(function: RewardFunction, call: str, samples: Samples) -> list[float]:
    """Call a reward function and check what it returns.

    Raises:
        ConfigError: it raised, or did not return one finite number per sequence; names function, call and
            sequence.
    """
    subject = f"calls.{call}: reward function {_name(function)}"
    try:
        values = _invoke(function, samples)
    except Exception as error:  # the user's code can raise anything
        raise ConfigError(
            f"{subject} raised {type(error).__name__}: {error}; {_first_culprit(function, samples)}. Mend "
            "the function."
        ) from error
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ConfigError(
            f"{subject} returned {type(values).__name__}; expected a list of {len(samples.ids)} floats."
        )
    if len(values) != len(samples.ids):
        raise ConfigError(
            f"{subject} returned {len(values)} values; expected {len(samples.ids)}, one for each of the "
            "sequences "
            f"{_ids_text(samples.ids)}."
        )
    for sequence, value in zip(samples.ids, values, strict=True):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ConfigError(
                f"{subject} returned {value!r} for sequence {sequence}; expected a finite number. The "
                "response was "
                f"{samples.responses[samples.ids.index(sequence)][:80]!r}."
            )
    return [float(value) for value in values]


def _invoke(function: RewardFunction, samples: Samples) -> Any:
    return function(
        list(samples.prompts),
        list(samples.responses),
        **{name: list(values) for name, values in samples.columns.items()},
    )


def _first_culprit(function: RewardFunction, samples: Samples) -> str:
    """Which sequence makes the function raise, by calling it with one at a time."""
    for index, sequence in enumerate(samples.ids):
        try:
            _invoke(function, samples.at(index))
        except Exception:  # noqa: BLE001 - as above; the error of the whole batch is the one that is shown
            return (
                f"sequence {sequence} alone makes it raise (its response: {samples.responses[index][:80]!r})"
            )
    return f"only together do sequences {_ids_text(samples.ids)} make it raise"


def _ids_text(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def _name(function: RewardFunction) -> str:
    module = getattr(function, "__module__", "")
    return f"{module}:{getattr(function, '__qualname__', repr(function))}"
