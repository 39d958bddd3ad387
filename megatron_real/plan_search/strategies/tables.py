"""A search problem in the form that tree searches work on: numbered calls and windows, pruned options.

Invariants (tests/property/test_exact.py):
    - an option is dropped only for another that serves the same copies and is nowhere worse;
    - windows that `placements` leaves out are images of those that it gives, under exchanges of equal sibling windows
      that move no call placed so far. (Prices must not change under such exchanges: equal nodes, aligned windows.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_real.dataflow import Call
from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.problem import Option, SearchProblem
from megatron_real.plan_search.steps import weights_stay

__all__ = ["Item", "Tables", "WindowTree", "bare_costs"]


class Item(NamedTuple):
    """An option in numbers. Bytes are on each rank of its window."""

    seconds: float
    load_s: float
    """Seconds, with what else of this option always runs on its ranks."""
    kept: int
    """Resident between calls, at the least."""
    full: int
    """Resident while the weights are there."""
    own: int
    """While the call runs, of its own and its home copy, if it needs a copy of its own or is the home."""
    shared: int
    """The same if it runs on its model's home copy: that is not counted."""
    layout: int
    """Equal for options of one layout. A home that is in the nodes' host stores has none in common with others: there
    is no copy to share."""
    option: Option


class WindowTree:
    """The windows, in preorder, and how they lie in each other."""

    def __init__(self, windows: Sequence[Mesh]) -> None:
        self.windows = tuple(sorted(set(windows), key=lambda mesh: (mesh.start, -mesh.stop)))
        self.number = {mesh: index for index, mesh in enumerate(self.windows)}
        self.size = [mesh.size for mesh in self.windows]
        self.num_ranks = len({rank for mesh in self.windows for rank in mesh.ranks})
        self.inside = [0] * len(self.windows)
        """Bit set of the windows that lie in a window, itself included."""
        self.parent: list[int] = [-1] * len(self.windows)
        self.children: list[list[int]] = [[] for _ in self.windows]
        self.roots: list[int] = []
        self.laminar = self._link()
        self.shape: list[int] = self._shapes()
        self.path: list[int] = self._paths()

    def overlap(self, one: int, two: int) -> bool:
        return self.windows[one].overlaps(self.windows[two])

    def _link(self) -> bool:
        """Parents and children; False (and no tree at all) if two windows overlap only in part."""
        open_windows: list[int] = []
        for index, mesh in enumerate(self.windows):
            while open_windows and self.windows[open_windows[-1]].stop <= mesh.start:
                open_windows.pop()
            if open_windows and self.windows[open_windows[-1]].stop < mesh.stop:
                self.roots = list(range(len(self.windows)))
                self.children = [[] for _ in self.windows]
                self.inside = [1 << index for index in range(len(self.windows))]
                self.parent = [-1] * len(self.windows)
                return False
            if open_windows:
                self.parent[index] = open_windows[-1]
                self.children[open_windows[-1]].append(index)
            else:
                self.roots.append(index)
            for outer in [*open_windows, index]:
                self.inside[outer] |= 1 << index
            open_windows.append(index)
        return True

    def _shapes(self) -> list[int]:
        """Equal numbers for windows that are equal up to a shift; without a tree, every window is its own shape."""
        if not self.laminar:
            return list(range(len(self.windows)))
        known: dict[tuple[object, ...], int] = {}
        shape = [0] * len(self.windows)
        for index in reversed(range(len(self.windows))):
            start = self.windows[index].start
            key = (
                self.size[index],
                *((self.windows[child].start - start, shape[child]) for child in self.children[index]),
            )
            shape[index] = known.setdefault(key, len(known))
        return shape

    def _paths(self) -> list[int]:
        """Equal numbers for windows that an exchange of equal siblings can map to each other."""
        known: dict[tuple[int, int], int] = {}
        path = [0] * len(self.windows)
        for index in range(len(self.windows)):
            parent = self.parent[index]
            key = (path[parent] if parent >= 0 else -1, self.shape[index])
            path[index] = known.setdefault(key, len(known))
        return path

    def pair(self, one: int, two: int) -> tuple[int, int, int]:
        """Equal for pairs of windows that exchanges of equal siblings can map to each other."""
        if not self.laminar:
            return one, two, 0
        common = one
        while common >= 0 and not self.inside[common] >> two & 1:
            common = self.parent[common]
        return self.path[one], self.path[two], self.path[common] if common >= 0 else -1

    def placements(self, taken: int) -> Iterator[int]:
        """Windows for the next call if those of the bit set `taken` hold calls, one of each kind."""
        stack = list(reversed(self._distinct(self.roots, taken)))
        while stack:
            index = stack.pop()
            yield index
            stack += reversed(self._distinct(self.children[index], taken))

    def _distinct(self, siblings: Sequence[int], taken: int) -> list[int]:
        seen: set[int] = set()
        chosen = []
        for index in siblings:
            if self.inside[index] & taken:
                chosen.append(index)
            elif self.shape[index] not in seen:
                seen.add(self.shape[index])
                chosen.append(index)
        return chosen


class Tables:
    """The problem's calls and options. Calls are numbered as the graph declares them."""

    def __init__(self, problem: SearchProblem) -> None:
        graph = problem.graph
        self.problem = problem
        self.calls: tuple[Call, ...] = graph.calls
        self.num_calls = len(graph.calls)
        number = {call.name: index for index, call in enumerate(graph.calls)}
        self.home = [
            number[graph.home_call(call.model).name] if call.model is not None else index
            for index, call in enumerate(graph.calls)
        ]
        self.alone = [weights_stay(graph, call) for call in graph.calls]
        self.before = self._ancestors([[number[p.name] for p in graph.parents(call)] for call in graph.calls])
        self.after = [
            sum(1 << other for other in range(self.num_calls) if self.before[other] >> call & 1)
            for call in range(self.num_calls)
        ]
        self.holds_full = self._full()
        self._staging_bytes = [self._least_staging(call.name) for call in graph.calls]
        """Of a reallocation to or from the call's copy, at least."""
        self._layouts: dict[tuple[Layout, bool], int] = {}
        self.may_be_stored = [self._may_be_stored(self.home[call]) for call in range(self.num_calls)]
        """Whether a call's model may be in the nodes' host stores: then nothing is known of reallocations."""
        self.tree = WindowTree([*problem.meshes, *problem.pinned.values()])
        self.items: list[dict[int, tuple[Item, ...]]] = [self._items(call) for call in range(self.num_calls)]
        """By call and window size, fastest first."""
        self.candidates = [self._candidates(call) for call in range(self.num_calls)]
        self.twin = self._twins()

    def _ancestors(self, parents: Sequence[Sequence[int]]) -> list[int]:
        before = [0] * len(parents)
        for _ in parents:
            for call, above in enumerate(parents):
                for parent in above:
                    before[call] |= 1 << parent | before[parent]
        return before

    def _least_staging(self, call: str) -> int:
        problem = self.problem
        found = (problem.options.get((call, mesh.size), ()) for mesh in problem.meshes_of(call))
        return min((problem.staging_bytes(option) for options in found for option in options), default=0)

    def _may_be_stored(self, home: int) -> bool:
        name = self.calls[home].name
        meshes = self.problem.meshes_of(name)
        options = (option for mesh in meshes for option in self.problem.options_on(name, mesh))
        return any(option.offload == "node" for option in options)

    def is_home(self, call: int) -> bool:
        return self.calls[call].model is not None and self.home[call] == call

    def _full(self) -> list[list[bool]]:
        """``[home][call]``: whether droppable weights of a home copy are there while `call` runs, under every order."""
        table = []
        for home in range(self.num_calls):
            uses = [
                call
                for call in range(self.num_calls)
                if call != home and self.home[call] == home and self.before[home] >> call & 1
            ]
            table.append(
                [
                    call == home
                    or bool(self.before[call] >> home & 1)
                    or any(self.before[use] >> call & 1 for use in uses)
                    for call in range(self.num_calls)
                ]
            )
        return table

    def _candidates(self, call: int) -> tuple[int, ...]:
        problem, name = self.problem, self.calls[call].name
        return tuple(
            self.tree.number[mesh]
            for mesh in sorted(set(problem.meshes_of(name)), key=lambda mesh: (mesh.start, -mesh.stop))
            if self.items[call].get(mesh.size)
        )

    def _items(self, call: int) -> dict[int, tuple[Item, ...]]:
        name = self.calls[call].name
        sizes = {mesh.size for mesh in self.problem.meshes_of(name)}
        return {size: tuple(self._pruned(call, self.problem.options.get((name, size), ()))) for size in sizes}

    def _pruned(self, call: int, options: Sequence[Option]) -> list[Item]:
        """Items of the options that no other dominates, fastest first."""
        if self.calls[call].model is None:
            return [self._item(call, min(options, key=lambda option: option.seconds))] if options else []
        classes: dict[tuple[object, ...], list[Option]] = {}
        for option in options:
            classes.setdefault(self._serves(call, option), []).append(option)
        kept = [option for group in classes.values() for option in _pareto(group, self._costs(call, group))]
        items = [self._item(call, option) for option in kept]
        capacity = self.problem.capacity_bytes
        items = [item for item in items if min(item.own, item.shared) <= capacity]
        return sorted(items, key=lambda item: (item.seconds, item.load_s, item.own))

    def _serves(self, call: int, option: Option) -> tuple[object, ...]:
        """Options of one class can stand in for each other."""
        if self.alone[call]:
            return ()
        if self.is_home(call):
            return (option.layout, option.offload, option.drop_trained_weights)
        return (option.layout, option.stream)

    def _costs(self, call: int, options: Sequence[Option]) -> list[tuple[float, ...]]:
        """What must be nowhere worse for an option to replace another of its class."""
        if self.alone[call]:
            items = [self._item(call, option) for option in options]
            moves = [self.moves(call, option) for option in options]
            return [
                (item.seconds, *move, item.option.state_bytes, item.kept, item.full, item.own)
                for item, move in zip(items, moves, strict=True)
            ]
        return [bare_costs(option, home=self.is_home(call)) for option in options]

    def moves(self, call: int, option: Option) -> tuple[float, float, float, float]:
        """Seconds of the reload and the offload that an iteration always has: of weights, then of optimizer state."""
        if not self.is_home(call):
            return 0.0, 0.0, 0.0, 0.0
        used = any(
            other != call and self.home[other] == call and self.before[call] >> other & 1
            for other in range(self.num_calls)
        )
        dropped = option.drop_trained_weights and used
        if self.calls[call].trains:
            weights = (option.return_s, option.leave_s) if dropped else (0.0, 0.0)
            state = (option.state_return_s, option.state_leave_s) if option.offload == "host" else (0.0, 0.0)
            return *weights, *state
        if option.offload == "host":
            return option.return_s, option.leave_s, 0.0, 0.0
        stored = option.offload == "node" and self.alone[call]  # else another call may have filled the copy
        return option.return_s if stored else 0.0, 0.0, 0.0, 0.0

    def _trained(self, call: int) -> bool:
        model = self.calls[call].model
        return model is not None and self.problem.graph.trained(model)

    def _item(self, call: int, option: Option) -> Item:
        layout = self._layout(option.layout)
        weights, active = option.weights_bytes, option.active_bytes
        load = option.seconds + sum(self.moves(call, option))
        if self.calls[call].model is None:
            return Item(option.seconds, load, 0, 0, 0, 0, layout, option)
        if not self.is_home(call):
            # Of several such calls, one may find the copy filled.
            fills = sum(1 for other, home in enumerate(self.home) if home == self.home[call] != other) == 1
            staging = self.problem.staging_bytes(option)
            if not fills or self.may_be_stored[call]:
                own = weights + active
            elif option.stream:
                own = weights + active + staging
            else:
                own = weights + max(active, staging + self._staging_bytes[self.home[call]])
            return Item(option.seconds, load, 0, 0, own, active, layout, option)
        own = option.state_bytes + weights + active
        if not self.calls[call].trains and option.offload != "none":
            if option.offload == "node":
                layout = self._layout(option.layout, stored=True)
            return Item(option.seconds, load, 0, 0, own, own, layout, option)
        state = option.state_bytes if option.offload == "none" else 0
        kept = state if option.drop_trained_weights and not self.alone[call] else state + weights
        return Item(option.seconds, load, kept, state + weights, own, own, layout, option)

    def _layout(self, layout: Layout, *, stored: bool = False) -> int:
        return self._layouts.setdefault((layout, stored), len(self._layouts))

    def _twins(self) -> list[int]:
        """The call before it with which a frozen call may change places; -1 where there is none."""
        twin = [-1] * self.num_calls
        last: dict[object, int] = {}
        for index, call in enumerate(self.calls):
            fixed = call.name in self.problem.pinned or self.problem.order is not None
            if not self.alone[index] or self._trained(index) or fixed:
                continue
            for kind, other in last.items():
                if self._equal(other, index):
                    twin[index] = other
                    del last[kind]
                    break
            last[call.name] = index
        return twin

    def _equal(self, one: int, two: int) -> bool:
        a, b = self.calls[one], self.calls[two]
        return (
            (a.model is None) == (b.model is None)
            and a.type == b.type
            and self.before[one] == self.before[two]
            and self.after[one] == self.after[two]
            and self.candidates[one] == self.candidates[two]
            and all(
                [item[:7] for item in self.items[one][size]] == [item[:7] for item in self.items[two][size]]
                and [self.moves(one, item.option) for item in self.items[one][size]]
                == [self.moves(two, item.option) for item in self.items[two][size]]
                for size in self.items[one]
            )
        )


def bare_costs(option: Option, *, home: bool) -> tuple[float, ...]:
    """What an option must be nowhere worse in to stand in for another of its layout and residence: seconds first."""
    costs = (option.seconds, option.weights_bytes, option.active_bytes, option.return_s)
    if home:
        moves = (option.leave_s, option.state_return_s, option.state_leave_s)
        return (*costs, option.state_bytes, *moves)
    return (*costs, option.first_share, -option.first_pass_s)


def _pareto(options: Sequence[Option], costs: Sequence[tuple[float, ...]]) -> list[Option]:
    """Options that no other one equals or beats in everything; of equal ones the first."""
    order = sorted(range(len(options)), key=costs.__getitem__)
    table = np.array([costs[index] for index in order])
    kept: list[int] = []
    for row in range(len(order)):
        if not kept or not (table[kept] <= table[row]).all(axis=1).any():
            kept.append(row)
    return [options[order[row]] for row in kept]
