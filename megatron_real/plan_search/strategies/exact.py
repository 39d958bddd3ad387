"""Branch and bound: the best plan, with a certificate.

The tree gives one call after another a window (those that weigh most first); `strategies/leaf.py` chooses options and
order where all have one. The node with the least bound comes next, and its best child right after it, down to a leaf.
Reallocations are priced for a node that comes next, not for its siblings.
At any time the least bound of the nodes that are open or were left out is a lower bound of the period of every choice.

Invariants (tests/property/test_exact.py):
    - the optimum equals full enumeration, and so does "nothing fits";
    - the lower bound never exceeds the optimum, however early the search stops.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_real.plan_search.kernel import Kernel
from megatron_real.plan_search.problem import Choice, Evaluation, Limits, Progress, SearchProblem, Solution
from megatron_real.plan_search.strategies.bounds import WindowBound
from megatron_real.plan_search.strategies.leaf import LeafSolver, Part
from megatron_real.plan_search.strategies.reallocs import INFINITY, ReallocFloor
from megatron_real.plan_search.strategies.rows import Serial
from megatron_real.plan_search.strategies.tables import Tables

__all__ = ["Search", "solve"]

_ROUNDING = 1e-9
"""Relative difference that counts as none: sums of the same seconds in another order differ by less."""

_LEAF_NODES = 100
"""Sets of options of one leaf that are looked at before other leaves get their turn."""

Reporter = Callable[[Progress], None]
Windows = tuple[int, ...]


class _Node(NamedTuple):
    """A node of the tree: some calls have windows, or all have, and the options of `part` are left."""

    bound: float
    turn: int
    """Of nodes with equal bounds, the deepest comes first (less than 0), and leaves that took long come last."""
    spread: float
    serial: int
    """Different for all nodes, so that no two compare by what follows."""
    windows: Windows
    part: Part | None = None
    priced: bool = False
    """Whether the bound counts reallocations."""


class Search:
    """What tree searches share: tables, bounds, the best choice so far, and what was left out."""

    def __init__(self, problem: SearchProblem, limits: Limits, progress: Reporter | None) -> None:
        self.problem = problem
        self.limits = limits
        self.kernel = Kernel(problem)
        self._started = time.monotonic()
        self._progress = progress
        self._best: tuple[tuple[Choice, ...], tuple[int, ...]] | None = None
        self._trace: list[Progress] = []
        self.period = INFINITY
        self.left_out = INFINITY
        """Least bound of the parts that are not followed."""
        self.open_bound = 0.0
        self.tables = Tables(problem)
        serial = Serial(self.tables)
        reallocs = ReallocFloor(self.tables)
        self.bound = WindowBound(self.tables, serial, reallocs)
        self.leaves = LeafSolver(self.tables, serial, reallocs, self.kernel)
        self.branching = self._branching()
        self._serial = 0
        self._told = 0.0

    def _branching(self) -> tuple[int, ...]:
        """Calls in the order in which they get windows: pinned ones first, then by the rank-seconds they need."""
        tables = self.tables
        pinned = [call for call in range(tables.num_calls) if tables.calls[call].name in self.problem.pinned]
        rest = [call for call in range(tables.num_calls) if call not in pinned]
        rest.sort(key=lambda call: (-self.bound.least_area(call), call))
        order = [*pinned, *rest]
        for call in list(order):
            twin = tables.twin[call]
            if twin >= 0:  # interchangeable calls stand together
                order.remove(call)
                order.insert(order.index(twin) + 1, call)
        return tuple(order)

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def cutoff(self) -> float:
        """Bounds from here on are not worth following."""
        # A little above what the gap allows, so that what is left out proves the gap in spite of rounding.
        return self.period * (1 - max(self.limits.gap * (1 - _ROUNDING), _ROUNDING))

    def leave_out(self, bound: float) -> None:
        self.left_out = min(self.left_out, bound)

    def stopped(self) -> bool:
        """Whether time is up, or the evaluations are used up."""
        most = self.limits.evaluations
        return self.elapsed >= self.limits.time_s or (most is not None and self.kernel.evaluations >= most)

    def offer(self, choices: Sequence[Choice], order: tuple[int, ...], evaluation: Evaluation) -> None:
        if evaluation.fits and evaluation.period_s < self.period:
            self.period = evaluation.period_s
            self._best = (tuple(choices), order)
            self.report()

    def report(self, *, improved: bool = True) -> None:
        """Tell what is known by now."""
        bound = min(self.left_out, self.open_bound, self.period)
        now = Progress(self.elapsed, self.kernel.evaluations, self.period, bound)
        self._told = now.seconds
        if improved:
            self._trace.append(now)
        if self._progress is not None:
            self._progress(now)

    def rise(self, bound: float) -> None:
        """The least bound of the open nodes is this now: tell it once a second."""
        self.open_bound = bound
        if self._progress is not None and self.elapsed > self._told + 1:
            self.report(improved=False)

    def warm_start(self, start: Solution | None) -> None:
        """Take over the choice of another strategy, if it is one of this problem."""
        if start is None or start.assignment is None:
            return
        names = self.kernel.names
        for name in names:
            choice = start.assignment[name]
            options = self.problem.options_on(name, choice.mesh)
            if choice.mesh not in self.problem.meshes_of(name) or choice.option not in options:
                return
        choices = [start.assignment[name] for name in names]
        orders = [start.order] if start.order is not None else [next(self.problem.orders())]
        for order in orders:
            numbers = tuple(names.index(name) for name in order)
            self.offer(choices, numbers, self.kernel.evaluate_choices(choices, numbers))

    def children(self, windows: Windows, depth: int) -> list[tuple[float, float, Windows]]:
        """Bound (without reallocations), spread and windows of every way to place the next call, the best first."""
        call = self.branching[depth]
        allowed = set(self.tables.candidates[call])
        taken = 0
        for window in windows:
            if window >= 0:
                taken |= 1 << window
        twin = self.tables.twin[call]
        found = []
        pinned = self.tables.calls[call].name in self.problem.pinned
        for window in allowed if pinned else self.tables.tree.placements(taken):
            if window not in allowed or (twin >= 0 and window < windows[twin]):
                continue
            child = (*windows[:call], window, *windows[call + 1 :])
            bound = self.bound(child, self.cutoff, reallocs=False)
            if bound.seconds >= self.cutoff:
                self.leave_out(bound.seconds)
            else:
                found.append((bound.seconds, bound.spread, child))
        found.sort()
        return found

    def solution(self, strategy: str, lower_bound: float, *, complete: bool) -> Solution:
        """The answer; `complete`: every part of the tree was followed or left out by a bound."""
        if self._best is None:
            assignment, order = None, None
        else:
            choices, numbers = self._best
            assignment = dict(zip(self.kernel.names, choices, strict=True))
            order = tuple(self.kernel.names[number] for number in numbers)
        if lower_bound >= self.period * (1 - _ROUNDING):
            lower_bound = self.period
        return Solution(
            strategy=strategy,
            assignment=assignment,
            order=order,
            period_s=self.period,
            lower_bound_s=lower_bound,
            evaluations=self.kernel.evaluations,
            seconds=self.elapsed,
            proven_infeasible=complete and self._best is None and lower_bound == INFINITY,
            trace=tuple(self._trace),
        )


def solve(
    problem: SearchProblem,
    limits: Limits,
    *,
    start: Solution | None = None,
    progress: Reporter | None = None,
) -> Solution:
    """The choice of the least period, or the best one found until a limit, with a lower bound for every choice.

    Args:
        problem: prices must not change when equal sibling windows change places.
        limits: at `gap` above 0, parts of the tree that cannot be better by more than it are left out.
        start: a choice to begin with, of any strategy.
        progress: called at every improvement, and once a second for the bound.
    """
    search = Search(problem, limits, progress)
    search.warm_start(start)
    windows = (-1,) * search.tables.num_calls
    root = search.bound(windows)
    heap = [_Node(root.seconds, 0, root.spread, 0, windows)]
    if not all(search.tables.candidates):
        heap = []
    while heap:
        search.rise(heap[0].bound)
        if search.open_bound >= search.cutoff or search.stopped():
            break
        node = _next(search, heap)
        if node is not None:
            _dive(search, heap, node)
    open_bound = heap[0].bound if heap else INFINITY
    return search.solution("exact", min(open_bound, search.left_out, search.period), complete=not heap)


def _next(search: Search, heap: list[_Node]) -> _Node | None:
    """Take the node of the least bound with its reallocations counted; None if the first one turned out worse."""
    node = heapq.heappop(heap)
    if node.priced or node.part is not None:
        return node
    bound = max(node.bound, search.bound(node.windows, search.cutoff).seconds)
    node = node._replace(bound=bound, priced=True)
    if bound >= search.cutoff:
        search.leave_out(bound)
        return None
    if heap and bound > heap[0].bound:
        heapq.heappush(heap, node)
        return None
    return node


def _dive(search: Search, heap: list[_Node], node: _Node) -> None:
    """Follow a node and its best descendants down to a leaf; siblings go to the heap."""
    for depth in range(len(node.windows) - node.windows.count(-1), len(node.windows)):
        siblings = [
            _Node(max(node.bound, bound), -depth - 1, spread, search.next_serial(), child)
            for bound, spread, child in search.children(node.windows, depth)
        ]
        heapq.heapify(siblings)
        best: _Node | None = None
        while siblings and best is None:
            best = _next(search, siblings)
        for sibling in siblings:
            heapq.heappush(heap, sibling)
        if best is None:
            return
        node = best
    part = node.part if node.part is not None else search.leaves.whole(node.windows, node.bound)
    for left in search.leaves.solve(node.windows, search, [part], _LEAF_NODES):
        bound = max(node.bound, left[0])
        heapq.heappush(heap, _Node(bound, 1, 0.0, search.next_serial(), node.windows, left))
