"""Beam search over the tree of `strategies/exact.py`, for graphs that it does not finish.

All nodes of a depth are extended together, and the best `width` go on, by their bound and then by how even the loads
are. The lower bound is that of the root, so it holds for every choice, kept or not.

Invariant (tests/property/test_exact.py): never better than the optimum.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_real.plan_search.problem import Limits, Progress, SearchProblem, Solution
from megatron_real.plan_search.strategies.exact import Search

__all__ = ["solve"]

_WIDTH = 64
_LEAF_NODES = 200
"""Sets of options of one leaf that are looked at."""


def solve(
    problem: SearchProblem,
    limits: Limits,
    *,
    start: Solution | None = None,
    progress: Callable[[Progress], None] | None = None,
    width: int = _WIDTH,
) -> Solution:
    """A good choice, and the lower bound of the root of the tree.

    Args:
        problem: what to search.
        limits: when to stop; the beam in progress is then given up for the best choice so far.
        start: a choice to begin with.
        progress: called at every improvement.
        width: nodes that go on from each depth.
    """
    search = Search(problem, limits, progress)
    search.warm_start(start)
    windows = (-1,) * search.tables.num_calls
    root = search.bound(windows).seconds if all(search.tables.candidates) else float("inf")
    search.open_bound = root
    level = [windows] if root < float("inf") else []
    bounds = {windows: root}
    for depth in range(len(search.branching)):
        found = []
        for node in level:
            if search.stopped():
                break
            found += search.children(node, depth)
        found.sort()
        bounds = {child: bound for bound, _, child in found[:width]}
        level = list(bounds)
    for leaf in level:
        if search.stopped():
            break
        if bounds[leaf] < search.cutoff:
            search.leaves.solve(leaf, search, [search.leaves.whole(leaf, bounds[leaf])], _LEAF_NODES)
    return search.solution("beam", root, complete=root == float("inf"))
