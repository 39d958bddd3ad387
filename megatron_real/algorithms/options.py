"""What the options of an algorithm may be: the allowed values stand beside each option's default. No torch.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class MyConfig(Options):
        clip_ratio: float = option(0.2, above=0, below=1)

An option without `option` may be any finite number. None is allowed where the type says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_real.errors import ConfigError, Problem, raise_problems

__all__ = ["Options", "option"]

_ALLOWED = "allowed"
_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "above": lambda value, bound: value > bound,
    "at least": lambda value, bound: value >= bound,
    "below": lambda value, bound: value < bound,
    "at most": lambda value, bound: value <= bound,
    "other than": lambda value, bound: value != bound,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    """The values of one option: one of `choices`, or numbers within all `bounds`."""

    bounds: tuple[tuple[str, float], ...] = ()
    choices: tuple[str, ...] = ()

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return math.isfinite(value) and all(_BOUNDS[kind](value, bound) for kind, bound in self.bounds)

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if not self.bounds:
            return "a finite number"
        kinds = dict(self.bounds)
        if set(kinds) == {"at least", "at most"}:
            return f"{kinds['at least']:g} to {kinds['at most']:g}"
        return "a number " + " and ".join(f"{kind} {bound:g}" for kind, bound in self.bounds)


def option(default: Any, *, choices: Iterable[str] = (), **bounds: float) -> Any:
    """A field of `Options`.

    Args:
        default: its default.
        choices: the texts that it may be; an enumeration of texts is one.
        bounds: of a number: ``above``, ``at_least``, ``below``, ``at_most``, ``other_than``.
    """
    allowed = _Allowed(
        bounds=tuple((kind.replace("_", " "), bound) for kind, bound in bounds.items()),
        choices=tuple(map(str, choices)),
    )
    return dataclasses.field(default=default, metadata={_ALLOWED: allowed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of every algorithm's options.

    Raises:
        ConfigError: listing every option that is not one of its allowed values, and what `problems` adds.
    """

    def __post_init__(self) -> None:
        raise_problems(self.problems(), subject="algorithm", error=ConfigError)

    def problems(self) -> Iterator[Problem]:
        """What is wrong. A subclass that adds to it calls its base by name: slotted classes have no ``super()``."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            optional = "None" in str(field.type)
            allowed = field.metadata.get(_ALLOWED, _Allowed() if numeric else None)
            if allowed is None or (optional and value is None) or allowed.allows(value):
                continue
            expected = f"{allowed}, or none" if optional else str(allowed)
            yield Problem(path=field.name, found=str(value) if numeric else repr(value), expected=expected)
