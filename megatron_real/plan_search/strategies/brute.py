"""Every choice and every order, one after another: what the tests hold the other strategies to.

For problems with some thousand choices; the number is the product over the calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Choice, Limits, Progress, SearchProblem, Solution

__all__ = ["solve"]


def solve(
    problem: SearchProblem,
    limits: Limits,
    *,
    start: Solution | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The optimum by full enumeration; limits and `start` are not looked at, and progress is told at the end."""
    del limits, start
    began = time.monotonic()
    kernel = Kernel(problem)
    names = kernel.names
    orders = [tuple(names.index(name) for name in order) for order in problem.orders()]
    choices = [
        [
            Choice(mesh, option)
            for mesh in problem.meshes_of(name)
            for option in problem.options_on(name, mesh)
        ]
        for name in names
    ]
    best: tuple[float, tuple[Choice, ...], tuple[int, ...]] | None = None
    for chosen in itertools.product(*choices):
        for order in orders:
            evaluation = kernel.evaluate_choices(chosen, order)
            if evaluation.fits and (best is None or evaluation.period_s < best[0]):
                best = (evaluation.period_s, chosen, order)
    period = best[0] if best is not None else float("inf")
    seconds = time.monotonic() - began
    now = Progress(seconds, kernel.evaluations, period, period)
    if progress is not None:
        progress(now)
    return Solution(
        strategy="brute",
        assignment=dict(zip(names, best[1], strict=True)) if best is not None else None,
        order=tuple(names[number] for number in best[2]) if best is not None else None,
        period_s=period,
        lower_bound_s=period,
        evaluations=kernel.evaluations,
        seconds=seconds,
        proven_infeasible=best is None,
        trace=(now,),
    )
