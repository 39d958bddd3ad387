"""Prices of reallocations, asked when they are needed, and once for pairs of windows that lie alike.

A price takes longer than anything else that a search asks for, and most pairs of layouts never matter: the least of
many is looked for among the calls' fastest options first.

Invariant (tests/property/test_exact.py): with these prices, the tree searches find what full enumeration finds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_real.plan_search.problem import Choice
from megatron_real.plan_search.strategies.tables import Item, Tables

__all__ = ["PairPrices", "ReallocFloor"]

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
        self._joint: float | None = None

    def price(self, source: int, item: Item) -> float:
        """What it adds to fill the copy of `item` from a home copy of layout `source`; 0 if it is that copy."""
        if self._same and source == item.layout:
            return 0.0
        known = self._known.get((source, item.layout))
        if known is None:
            home = Choice(self._meshes[0], self._homes[source])
            other = Choice(self._meshes[1], self._others[item.layout])
            known = self._known[source, item.layout] = self._problem.realloc_s(self._model, home, other)
        return item.option.exposed_s(known)

    def floor(self, sources: Collection[int], item: Item) -> float:
        """The least from any of the layouts `sources`."""
        if self._same and item.layout in sources:
            return 0.0
        return min([self.price(source, item) for source in sources])

    def joint(self, sources: Collection[int], items: Sequence[Item]) -> float:
        """The least of a reallocation and its call together; `items` come fastest first."""
        best = INFINITY
        seen: set[int] = set()
        for item in items:
            if item.seconds >= best:
                break
            if item.layout not in seen:
                if not item.option.stream:
                    seen.add(item.layout)
                best = min(best, item.seconds + self.floor(sources, item))
        return best

    @property
    def least_joint(self) -> float:
        """The same over all options of the two windows."""
        if self._joint is None:
            self._joint = self.joint(self._homes, self._items)
        return self._joint


class ReallocFloor:
    """The prices of all pairs of windows."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._pairs: dict[tuple[object, ...], PairPrices] = {}

    def pair(self, call: int, home_window: int, window: int) -> PairPrices:
        """Of the copy of `call` on `window`, with its model's home on `home_window`."""
        key = (call, self._tables.tree.pair(home_window, window))
        known = self._pairs.get(key)
        if known is None:
            known = self._pairs[key] = PairPrices(self._tables, call, home_window, window)
        return known
