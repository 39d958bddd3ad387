"""What a measurement of a profile is: the entries it makes, and what it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_real.plan_search.profile_db import Entry, EntryKey, Operation

__all__ = ["At", "Block", "Target", "Unit", "Values", "Work"]

Work = Callable[[], Mapping[str, float]]
"""One repetition: seconds by name."""
Values = Callable[[Sequence[Mapping[str, float]]], float]
"""From one repetition of every work of a unit to the seconds of an entry."""
At = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An entry that a unit makes."""

    operation: Operation
    kind: str = ""
    shape: str = ""
    at: At = field(default_factory=dict)
    value: Values

    @property
    def key(self) -> EntryKey:
        return Entry(
            operation=self.operation,
            kind=self.kind,
            shape=self.shape,
            at=self.at,
            median_s=0.0,
            spread_s=0.0,
            repetitions=1,
        ).key


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One measurement."""

    name: str
    """For people."""
    targets: tuple[Target, ...]
    works: Callable[[Any], Sequence[Work]]
    """From what the block builds to what is run, alternating. Collective over WORLD, as is running it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Measurements that share what they run on."""

    name: str
    units: tuple[Unit, ...]
    built: Callable[[], contextlib.AbstractContextManager[Any]]
    """What they share. Collective over WORLD."""
