"""ReaL's search (arXiv:2406.14088): a Markov chain over plans, that keeps the best one it meets.

A plan p has the probability exp(-beta * cost(p)), where the cost is the period, or three times the period if the plan
does not fit. A step draws a call and, from all its (window, option) pairs but the present one, another: a symmetric
proposal, so accepting with probability min(1, exp(-beta * (cost' - cost))) (Metropolis) has just that distribution.
Chains start at the greedy plan. Done here as the paper says, and unlike it or its code where that goes wrong:

- beta is per greedy cost: ``exp(-beta * (cost' - cost) / greedy)``. With an absolute one the same beta is a hill climb
  on a slow plan and a random walk on a fast one; ReaL's code divides milliseconds by 100000 in integers, so that
  nearly every move is accepted.
- Several chains with betas from warm to cold take turns, instead of one after the other; each may be annealed.
- The greedy start is repaired until it fits (see `greedy`): ReaL's may lie among plans of threefold cost.
- The order of the calls is part of the plan: a step may swap two neighbours that no data orders. ReaL's order follows
  from times at which calls become ready.
- Every call is charged for its own reallocation, in seconds, as `SearchProblem.evaluate` does: the period of the steady
  state, not the makespan of five iterations.
- What a chain proposes from is the whole table, not the first 1000 pairs of a call.

There is no certificate: the lower bound is the one of `start`, else 0. It is here to compare with; `exact` is better.

Invariants (tests/property/test_mcmc.py):
    - a chain's visits have the probabilities above (on a space that can be enumerated);
    - what is returned fits, is no slower than the start, and is what `evaluate` says;
    - a seed and a limit of evaluations fix the result.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_real.errors import ConfigError
from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import (
    Assignment,
    Choice,
    Evaluation,
    Limits,
    Progress,
    SearchProblem,
    Solution,
)
from megatron_real.plan_search.strategies import greedy

__all__ = ["Chain", "Settings", "solve"]

_TURN = 256
"""Steps of a chain before the next one goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the chains walk."""

    betas: tuple[float, ...] = (20.0, 60.0, 200.0, 600.0)
    """One chain each. At beta, a move that adds 1/beta of the greedy cost is accepted with probability 1/e."""
    anneal: float = 10.0
    """A chain's beta grows by this factor over the run; 1 keeps it."""
    oom_factor: float = 3.0
    """Cost of a plan that does not fit, in periods."""
    order_moves: float = 0.1
    """Part of the steps that change the order."""

    def __post_init__(self) -> None:
        sound = self.betas and min(self.betas) > 0 and self.anneal > 0 and self.oom_factor >= 1
        if not sound or not 0 <= self.order_moves <= 1:
            raise ConfigError(
                f"mcmc: found {self}; expected positive betas, anneal > 0, oom_factor >= 1 and order_moves in [0, 1]."
            )


def solve(
    problem: SearchProblem,
    limits: Limits,
    *,
    start: Solution | None = None,
    progress: Callable[[Progress], None] | None = None,
    settings: Settings | None = None,
) -> Solution:
    """Walk until a limit is reached.

    Args:
        problem: what to choose from.
        limits: `evaluations` counts the chains' steps and makes the result depend on `seed` alone; `gap` counts
            against the lower bound of `start`. Annealing follows the nearer of the two ends.
        start: where the chains start; None is the greedy plan.
        progress: called at each improvement.
        settings: of the chains.

    Returns:
        `proven_infeasible` if a call has no option at all.
    """
    run = _Run(problem, limits, progress, start.lower_bound_s if start is not None else 0.0)
    if start is None or start.assignment is None:
        start = greedy.solve(problem, limits)
    if start.proven_infeasible:
        return replace(start, strategy="mcmc")
    settings = settings if settings is not None else Settings()
    assignment = start.assignment if start.assignment is not None else greedy.fastest(problem)
    order = start.order if start.order is not None else problem.order
    order = order if order is not None else tuple(call.name for call in problem.graph.ordered())
    chains = [
        Chain(problem, run.kernel, settings, random.Random(f"{limits.seed}/{index}"))
        for index in range(len(settings.betas))
    ]
    first = run.kernel.evaluate(assignment, order)
    for chain in chains:
        chain.start(assignment, order, first)
    run.offer(chains[0], first)
    while not run.finished():
        for chain, beta in zip(chains, settings.betas, strict=True):
            for _ in range(_TURN):
                if run.finished():
                    break
                run.steps += 1
                seen = chain.step(beta * settings.anneal ** run.fraction())
                if seen is not None:
                    run.offer(chain, seen)
    return run.solution()


class Chain:
    """One walk. `choices` and `order` are where it is."""

    def __init__(
        self, problem: SearchProblem, kernel: Kernel, settings: Settings, draw: random.Random
    ) -> None:
        self._kernel = kernel
        self._settings = settings
        self._draw = draw
        graph = problem.graph
        self._names = kernel.names
        self._pairs = [
            [
                Choice(mesh, option)
                for mesh in problem.meshes_of(name)
                for option in problem.options_on(name, mesh)
            ]
            for name in self._names
        ]
        number = {name: index for index, name in enumerate(self._names)}
        self._parents = [{number[other.name] for other in graph.parents(call)} for call in graph.calls]
        self._order_moves = settings.order_moves if problem.order is None and len(self._names) > 1 else 0.0
        self.choices: list[Choice] = []
        self.order: tuple[int, ...] = ()
        self._cost = self._scale = float("inf")
        self.tried: tuple[list[Choice], tuple[int, ...]] = ([], ())
        """What the last step proposed."""

    def start(self, assignment: Assignment, order: Sequence[str], found: Evaluation) -> None:
        """Begin at a plan; its period is the unit of costs."""
        self.choices = [assignment[name] for name in self._names]
        self.order = tuple(self._names.index(name) for name in order)
        self._scale = found.period_s
        self._cost = self._cost_of(found)

    def step(self, beta: float) -> Evaluation | None:
        """Propose and perhaps move.

        Returns:
            What the proposal amounts to, and `tried` is it; None if it was no plan.
        """
        tried = self._other_order() if self._draw.random() < self._order_moves else self._other_choice()
        if tried is None:
            return None
        found = self._kernel.evaluate_choices(*tried)
        cost = self._cost_of(found)
        self.tried = tried
        if cost <= self._cost or self._draw.random() < math.exp(-beta * (cost - self._cost) / self._scale):
            self.choices, self.order = tried
            self._cost = cost
        return found

    def _cost_of(self, found: Evaluation) -> float:
        return found.period_s if found.fits else self._settings.oom_factor * found.period_s

    def _other_choice(self) -> tuple[list[Choice], tuple[int, ...]] | None:
        call = self._draw.randrange(len(self._pairs))
        pairs = self._pairs[call]
        other = pairs[self._draw.randrange(len(pairs))]
        # One that is drawn at its own place is no move: the others keep equal chances.
        if other == self.choices[call]:
            return None
        choices = self.choices[:]
        choices[call] = other
        return choices, self.order

    def _other_order(self) -> tuple[list[Choice], tuple[int, ...]] | None:
        at = self._draw.randrange(len(self.order) - 1)
        first, second = self.order[at : at + 2]
        if first in self._parents[second]:
            return None
        return self.choices, (*self.order[:at], second, first, *self.order[at + 2 :])


class _Run:
    """What the chains share: the best plan, the limits."""

    def __init__(
        self,
        problem: SearchProblem,
        limits: Limits,
        progress: Callable[[Progress], None] | None,
        lower_bound_s: float,
    ) -> None:
        self.kernel = Kernel(problem)
        self.steps = 0
        self._problem = problem
        self._limits = limits
        self._progress = progress
        self._lower_bound_s = lower_bound_s
        self._began = time.monotonic()
        self._best: tuple[list[Choice], tuple[int, ...]] | None = None
        self._best_s = float("inf")
        self._trace: list[Progress] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def fraction(self) -> float:
        """How much of the run is over, 0 to 1."""
        most = self._limits.evaluations
        if most is not None:
            return min(1.0, self.steps / most)
        return min(1.0, self.seconds / max(self._limits.time_s, 1e-9))

    def finished(self) -> bool:
        """Whether a limit is reached."""
        most = self._limits.evaluations
        enough = (
            self._best is not None
            and self._lower_bound_s > 0
            and self._best_s - self._lower_bound_s <= self._limits.gap * self._best_s
        )
        return enough or self.seconds >= self._limits.time_s or (most is not None and self.steps >= most)

    def offer(self, chain: Chain, found: Evaluation) -> None:
        """Keep what the chain looked at, if it fits and is faster than everything before."""
        if not found.fits or found.period_s >= self._best_s:
            return
        self._best = chain.tried if chain.tried[0] else (chain.choices, chain.order)
        self._best_s = found.period_s
        step = Progress(self.seconds, self.steps, self._best_s, self._lower_bound_s)
        self._trace.append(step)
        if self._progress is not None:
            self._progress(step)

    def solution(self) -> Solution:
        """The best plan."""
        names = self.kernel.names
        best = self._best
        return Solution(
            strategy="mcmc",
            assignment=dict(zip(names, best[0], strict=True)) if best is not None else None,
            order=tuple(names[call] for call in best[1]) if best is not None else None,
            period_s=self._best_s,
            lower_bound_s=min(self._lower_bound_s, self._best_s),
            evaluations=self.steps,
            seconds=self.seconds,
            trace=tuple(self._trace),
        )
