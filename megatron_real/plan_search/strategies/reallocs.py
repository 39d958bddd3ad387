"""Prices of reallocations, asked when they are needed, and once for pairs of windows that lie alike.

A price takes longer than anything else that a search asks for, and most pairs of layouts never matter: the least of
many is looked for among the calls' fastest options first.

Invariant (tests/property/test_exact.py): with these prices, the tree searches find what full enumeration finds.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from megatron_real.plan_search.problem import Choice
from megatron_real.plan_search.strategies.tables import Item, Tables

__all__ = ["INFINITY", "PairPrices", "ReallocFloor", "shared_joint"]

INFINITY = float("inf")


class PairPrices:
    """Of the reallocation of one call, between two windows; layouts of the home are numbers (see `Item`)."""

    def __init__(self, tables: Tables, call: int, home_window: int, window: int) -> None:
        model = tables.calls[call].model
        assert model is not None
        size = tables.tree.size
        self._problem = tables.problem
        self._model = model
        self._meshes = (tables.tree.windows[home_window], tables.tree.windows[window])
        self._same = home_window == window
        home_items = tables.items[tables.home[call]].get(size[home_window], ())
        self._items = tables.items[call].get(size[window], ())
        self._homes = {item.layout: item.option for item in home_items}
        self._others = {item.layout: item.option for item in self._items}
        self._known: dict[tuple[int, int], float] = {}
        self._least: dict[tuple[frozenset[int], int], float] = {}
        self._joint: float | None = None

    def price(self, source: int, item: Item) -> float:
        """What it adds to fill the copy of `item` from a home copy of layout `source`; 0 if it is that copy."""
        return item.option.exposed_s(self._alone(source, item.layout))

    def _alone(self, source: int, layout: int) -> float:
        """The reallocation by itself."""
        if self._same and source == layout:
            return 0.0
        known = self._known.get((source, layout))
        if known is None:
            home = Choice(self._meshes[0], self._homes[source])
            other = Choice(self._meshes[1], self._others[layout])
            known = self._known[source, layout] = self._problem.realloc_s(self._model, home, other)
        return known

    def floor(self, sources: Set[int], item: Item) -> float:
        """The least from any of the layouts `sources`."""
        key = (frozenset(sources), item.layout)
        least = self._least.get(key)
        if least is None:
            least = self._least[key] = min([self._alone(source, item.layout) for source in sources])
        return item.option.exposed_s(least)

    def joint(self, sources: Set[int], items: Sequence[Item]) -> float:
        """The least of a reallocation and its call together; `items` come fastest first."""
        best = INFINITY
        seen: set[int] = set()
        for item in items:
            if item.seconds >= best:
                break
            if item.option.stream or item.layout not in seen:
                if not item.option.stream:
                    seen.add(item.layout)  # later ones take longer, for the same price
                best = min(best, item.seconds + self.floor(sources, item))
        return best

    @property
    def least_joint(self) -> float:
        """The same over all options of the two windows."""
        if self._joint is None:
            self._joint = self.joint(self.sources, self._items)
        return self._joint

    @property
    def sources(self) -> frozenset[int]:
        """The layouts that the home copy may have."""
        return frozenset(self._homes)

    @property
    def items(self) -> Sequence[Item]:
        """Options of the call on its window."""
        return self._items


def shared_joint(pairs: Sequence[PairPrices], sources: Set[int], domains: Sequence[Sequence[Item]]) -> float:
    """The least of all calls on one window, which may share copies, with what fills these.

    A copy is filled for at most all of the calls: each counts that share of its price.

    Args:
        pairs: prices of each call.
        sources: layouts of the home copy.
        domains: options of each call, fastest first.
    """
    fills: dict[int, float] = {}

    def fill(layout: int) -> float:
        if layout not in fills:
            fills[layout] = min(
                pair.floor(sources, item)
                for pair, items in zip(pairs, domains, strict=True)
                for item in items
                if item.layout == layout
            )
        return fills[layout]

    total = 0.0
    for items in domains:
        best = INFINITY
        for item in items:
            if item.seconds >= best:
                break
            best = min(best, item.seconds + fill(item.layout) / len(pairs))
        total += best
    return total


class ReallocFloor:
    """The prices of all pairs of windows."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._pairs: dict[tuple[object, ...], PairPrices] = {}
        self._together: dict[tuple[object, ...], float] = {}

    def pair(self, call: int, home_window: int, window: int) -> PairPrices:
        """Of the copy of `call` on `window`, with its model's home on `home_window`."""
        key = (call, self._tables.tree.pair(home_window, window))
        known = self._pairs.get(key)
        if known is None:
            known = self._pairs[key] = PairPrices(self._tables, call, home_window, window)
        return known

    def together(self, calls: Sequence[int], home_window: int, window: int) -> float:
        """The least of several calls of one model on one window, with what fills their copies (`shared_joint`)."""
        key = (*calls, self._tables.tree.pair(home_window, window))
        known = self._together.get(key)
        if known is None:
            pairs = [self.pair(call, home_window, window) for call in calls]
            known = shared_joint(pairs, pairs[0].sources, [pair.items for pair in pairs])
            self._together[key] = known
        return known
