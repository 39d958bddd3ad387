"""A run goes on under another plan: between two iterations one executor follows another, over the same models.

At the end of an iteration every temporary copy is released and every model is at home, so only homes have to move
(`hooks.replan`). The executor that goes leaves nothing on its way, and the algorithm's state, which the ranks that
prepare batches have alone, equal everywhere.

Invariants (tests/e2e/test_plan_change.py):
    - a run that changes its plan has the numbers of one that does not;
    - a run resumed at or after the change starts under the new plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_real.runtime.execution.executor import RankExecutor

__all__ = ["PlanChange", "executor_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """What follows on an executor."""

    iteration: int
    """The first one under the new plan, counted from 0 over the whole run."""
    make: Callable[[], RankExecutor]
    """Moves the models and makes the executor that follows. Collective over WORLD."""


def executor_for(executor: RankExecutor, iteration: int) -> RankExecutor:
    """The executor that runs `iteration`: the given one, or what follows on it.

    Collective over WORLD at the iteration of a change; every rank calls with the same arguments.

    Raises:
        RealError: a model cannot be moved, or a rank did not come.
    """
    change = executor.change
    if change is None or iteration < change.iteration:
        return executor
    # An evaluation may follow, and stands before the iteration's first instruction too.
    executor.observers.progress.enter(iteration, -(2**50), "change of plan")
    with executor.observers.tracer.span("change of plan", "other", iteration):
        executor.finish()
        follower = change.make()
    executor.observers.progress.leave()
    return follower
