"""Greedy: every call's fastest choice by itself, then repaired until memory fits.

The first half is where ReaL's search starts (arXiv:2406.14088): the least of each call's own times over all windows
and layouts. ReaL leaves such a plan as it is even if it does not fit, and its chain has to find the way to one
that does. Here it is repaired: as long as some rank is too full, the move of one call to another option or window is
made that adds the least time per byte saved, with time and bytes from `SearchProblem.evaluate`'s own arithmetic.

Invariants (tests/unit/plan_search/test_greedy.py):
    - where the fastest choices fit, they are the answer;
    - each move of the repair saves bytes, and what is returned fits;
    - the same problem gives the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from megatron_real.errors import PlanError
from megatron_real.layout import Mesh
from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import (
    Assignment,
    Choice,
    Evaluation,
    Limits,
    Option,
    Progress,
    SearchProblem,
    Solution,
)
from megatron_real.plan_search.steps import weights_stay
from megatron_real.plan_search.strategies.tables import bare_costs

__all__ = ["choices_of", "fastest", "least_memory", "pareto", "rank_peaks", "solve"]

_TRIED = 24
"""Moves that are evaluated in a step, by each of two estimates of what they save."""


def solve(
    problem: SearchProblem,
    limits: Limits,
    *,
    start: Solution | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The fastest choices, repaired.

    Args:
        problem: what to choose from.
        limits: `time_s` and `evaluations` end the repair.
        start: repaired instead of the fastest choices.
        progress: called when the answer is there.

    Returns:
        `proven_infeasible` if a call has no option at all; without an assignment if the repair found no way.
    """
    if not _has_choices(problem):
        return Solution(
            strategy="greedy",
            assignment=None,
            order=None,
            period_s=float("inf"),
            lower_bound_s=0.0,
            evaluations=0,
            seconds=0.0,
            proven_infeasible=True,
        )
    repair = _Repair(problem, limits)
    if start is not None and start.assignment is not None:
        assignment, order = dict(start.assignment), start.order
    else:
        assignment, order = fastest(problem), problem.order
    found = repair.run(assignment, order)
    if found is None:
        # No single move helps: begin at the other end.
        assignment, order = least_memory(problem, problem.capacity_bytes)[0] or assignment, problem.order
        found = repair.run(assignment, order)
    step = Progress(
        repair.seconds, repair.evaluations, found.period_s if found is not None else float("inf"), 0.0
    )
    if progress is not None:
        progress(step)
    return Solution(
        strategy="greedy",
        assignment=assignment if found is not None else None,
        order=order if found is not None else None,
        period_s=step.period_s,
        lower_bound_s=start.lower_bound_s if start is not None else 0.0,
        evaluations=repair.evaluations,
        seconds=repair.seconds,
        trace=(step,),
    )


def _has_choices(problem: SearchProblem) -> bool:
    return all(
        any(problem.options_on(call.name, mesh) for mesh in problem.meshes_of(call.name))
        for call in problem.graph.calls
    )


def fastest(problem: SearchProblem) -> dict[str, Choice]:
    """Every call's fastest option, on the largest and then first window that has it.

    Raises:
        PlanError: a call has no option.
    """
    if not _has_choices(problem):
        raise PlanError("search: found a call without options; expected at least one of each call.")
    result = {}
    for call in problem.graph.calls:
        choices = (
            Choice(mesh, option)
            for mesh in problem.meshes_of(call.name)
            for option in problem.options_on(call.name, mesh)
        )
        result[call.name] = min(choices, key=lambda choice: choice.option.seconds)
    return result


def least_memory(problem: SearchProblem, capacity_bytes: int) -> tuple[dict[str, Choice] | None, int]:
    """A plan that needs little: one call after the other takes what lowers the fullest rank, until none does.

    Returns:
        The plan (None if a call has no option), and by how many bytes its fullest rank exceeds `capacity_bytes`.
    """
    kernel = Kernel(problem)

    def need(assignment: Assignment) -> tuple[int, int]:
        peak = kernel.evaluate(assignment, problem.order).peak_bytes
        return peak, sum(choice.mesh.size * _total(choice.option) for choice in assignment.values())

    choices = {call.name: choices_of(problem, call.name, lean=True) for call in problem.graph.calls}
    if not all(choices.values()):
        return None, 0
    assignment = {
        call: min(found, key=lambda choice: (_total(choice.option), -choice.mesh.size))
        for call, found in choices.items()
    }
    best, improved = need(assignment), True
    while improved:
        improved = False
        for call, found in choices.items():
            for choice in found:
                tried = {**assignment, call: choice}
                if (least := need(tried)) < best:
                    assignment, best, improved = tried, least, True
    return assignment, best[0] - capacity_bytes


def rank_peaks(
    problem: SearchProblem, assignment: Assignment, order: Sequence[str] | None = None
) -> dict[Mesh, int]:
    """Peak bytes of each group of ranks that lie in the same windows; the largest is `Evaluation.peak_bytes`."""
    events = problem.events(assignment, order)
    windows = {choice.mesh for choice in assignment.values()}
    borders = sorted({border for mesh in windows for border in (mesh.start, mesh.stop)})
    peaks = {}
    for first, last in pairwise(borders):
        piece = Mesh(first, last)
        covered = {mesh: (0,) if mesh.overlaps(piece) else () for mesh in windows}
        if any(covered.values()):
            peaks[piece] = problem._peak(assignment, events, covered, 1)
    return peaks


def pareto(options: Sequence[Option], *, home: bool, alone: bool, lean: bool = False) -> tuple[Option, ...]:
    """Options without those that another one beats in seconds and in bytes and may stand in for.

    Args:
        options: of one call on one size of window.
        home: whether the call is its model's home, so that offload and drop of the option count.
        alone: whether its layout does not matter to reallocations (`steps.weights_stay`).
        lean: look at bytes only.
    """
    kept: dict[object, list[tuple[float, ...]]] = {}
    chosen = set()
    ranked = sorted((bare_costs(option, home=home)[lean:], index) for index, option in enumerate(options))
    for costs, index in ranked:
        option = options[index]
        residence = (option.offload, option.drop_trained_weights) if home else option.stream
        rivals = kept.setdefault((None if alone else option.layout, residence), [])
        if not any(all(a <= b for a, b in zip(other, costs, strict=True)) for other in rivals):
            rivals.append(costs)
            chosen.add(index)
    return tuple(option for index, option in enumerate(options) if index in chosen)


def choices_of(problem: SearchProblem, call: str, *, lean: bool = False) -> list[Choice]:
    """Every window and option of a call that another option on the window does not beat (see `pareto`)."""
    found = []
    model = problem.graph.call(call).model
    home = model is not None and problem.graph.home_call(model).name == call
    alone = weights_stay(problem.graph, problem.graph.call(call))
    by_size: dict[int, tuple[Option, ...]] = {}
    for mesh in problem.meshes_of(call):
        if mesh.size not in by_size:
            options = problem.options_on(call, mesh)
            by_size[mesh.size] = pareto(options, home=home, alone=alone, lean=lean)
        found += [Choice(mesh, option) for option in by_size[mesh.size]]
    return found


def _total(option: Option) -> int:
    return option.weights_bytes + option.state_bytes + option.active_bytes


class _Move(NamedTuple):
    call: str
    choice: Choice
    added_s: float
    """Of the call by itself."""
    saved: int
    """Bytes by its own footprint while it runs, over all too full ranks."""
    saved_resident: int


class _Repair:
    """Moves one call at a time until every rank fits."""

    def __init__(self, problem: SearchProblem, limits: Limits) -> None:
        self._problem = problem
        self._limits = limits
        self._kernel = Kernel(problem)
        self._start = time.monotonic()
        self._moves = {call.name: choices_of(problem, call.name) for call in problem.graph.calls}
        self.evaluations = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def run(self, assignment: dict[str, Choice], order: Sequence[str] | None) -> Evaluation | None:
        """Change `assignment` until it fits; None if no move helps or the limit is reached."""
        now = self._evaluate(assignment, order)
        while not now.fits:
            over = self._over(assignment, order)
            excess = sum(mesh.size * size for mesh, size in over.items())
            best: tuple[tuple[bool, float], _Move, Evaluation] | None = None
            for move in self._candidates(assignment, over):
                if self._stopped():
                    return None
                tried = {**assignment, move.call: move.choice}
                left = sum(mesh.size * size for mesh, size in self._over(tried, order).items())
                if left >= excess:
                    continue
                then = self._evaluate(tried, order)
                added = then.period_s - now.period_s
                # Time won comes first, the most of it; time lost is counted per byte.
                rank = (added > 0, added / (excess - left) if added > 0 else added)
                if best is None or rank < best[0]:
                    best = rank, move, then
            if best is None:
                return None
            assignment[best[1].call] = best[1].choice
            now = best[2]
        return now

    def _stopped(self) -> bool:
        most = self._limits.evaluations
        return self.seconds > self._limits.time_s or (most is not None and self.evaluations >= most)

    def _evaluate(self, assignment: Assignment, order: Sequence[str] | None) -> Evaluation:
        self.evaluations += 1
        return self._kernel.evaluate(assignment, order)

    def _over(self, assignment: Assignment, order: Sequence[str] | None) -> dict[Mesh, int]:
        """Bytes too many, by group of ranks that has any."""
        capacity = self._problem.capacity_bytes
        peaks = rank_peaks(self._problem, assignment, order)
        return {mesh: peak - capacity for mesh, peak in peaks.items() if peak > capacity}

    def _candidates(self, assignment: Assignment, over: Mapping[Mesh, int]) -> list[_Move]:
        """The most promising moves, by what they save while the call runs, and by what they save all the time."""
        moves = list(self._all(assignment, over))
        by_run = sorted((move for move in moves if move.saved > 0), key=lambda move: _ratio(move, move.saved))
        by_rest = sorted(
            (move for move in moves if move.saved_resident > 0),
            key=lambda move: _ratio(move, move.saved_resident),
        )
        chosen: dict[int, _Move] = {id(move): move for move in (*by_run[:_TRIED], *by_rest[:_TRIED])}
        return list(chosen.values())

    def _all(self, assignment: Assignment, over: Mapping[Mesh, int]) -> Iterator[_Move]:
        for call in self._problem.graph.calls:
            now = assignment[call.name]
            seen = set()
            for choice in self._moves[call.name]:
                inside = tuple(piece.overlaps(choice.mesh) for piece in over)
                if (choice.option, inside) in seen:
                    continue  # a window like one that was there, as far as the full ranks are concerned
                seen.add((choice.option, inside))
                saved, resident = 0, 0
                for (piece, excess), there in zip(over.items(), inside, strict=True):
                    before = now.option if piece.overlaps(now.mesh) else None
                    after = choice.option if there else None
                    saved += piece.size * _saving(before, after, excess, _total)
                    resident += piece.size * _saving(
                        before, after, excess, partial(self._problem.resident_bytes, call)
                    )
                added = choice.option.seconds - now.option.seconds
                yield _Move(call.name, choice, added, saved, resident)


def _saving(before: Option | None, after: Option | None, most: int, size: Callable[[Option], int]) -> int:
    less = (size(before) if before is not None else 0) - (size(after) if after is not None else 0)
    return min(most, less)


def _ratio(move: _Move, saved: int) -> tuple[bool, float]:
    return move.added_s > 0, move.added_s / saved if move.added_s > 0 else move.added_s
