"""Ways to find a plan in a `plan_search.problem.SearchProblem`.

Each module has ``solve(problem, limits, *, start=None, progress=None) -> Solution``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from megatron_real.errors import ConfigError
from megatron_real.plan_search.problem import Limits, Progress, SearchProblem, Solution

__all__ = ["STRATEGIES", "Solve", "strategy"]

STRATEGIES = ("exact", "beam", "mcmc", "greedy", "cpsat", "brute")
"""Names of strategies; presets (`plan_search.presets.PRESETS`) go by theirs."""


class Solve(Protocol):
    """What a strategy is."""

    def __call__(
        self,
        problem: SearchProblem,
        limits: Limits,
        *,
        start: Solution | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution: ...


def strategy(name: str) -> Solve:
    """The strategy of this name. Loaded when it is asked for: one of them needs a solver.

    Raises:
        ConfigError: there is none.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"search.strategy: found {name!r}; expected one of {', '.join(STRATEGIES)}.")
    module = importlib.import_module(f"megatron_real.plan_search.strategies.{name}")
    return cast("Solve", module.solve)
