"""The decisions of a plan as variables of a CP-SAT model: which choice, which order, who shares what.

One boolean per (call, window, option); what follows from them (a call's window, its copy, whether two windows overlap,
whether a copy is filled already) are literals tied to them. A literal that is known is a Python bool.

Held by tests/property/test_cpsat.py, with the model that `cpsat` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.problem import Choice, SearchProblem
from megatron_real.plan_search.strategies.greedy import choices_of

__all__ = ["Literal", "Terms"]

Literal = Any
"""A boolean variable, its negation, or a bool."""
Copy = tuple[Mesh, Layout]


class Terms:
    """Variables for every decision.

    Args:
        problem: what to choose from.
        model: an empty ``cp_model.CpModel``.
    """

    def __init__(self, problem: SearchProblem, model: Any) -> None:
        self.problem = problem
        self.model = model
        graph = problem.graph
        self.calls = {call.name: call for call in graph.calls}
        self.choices = {name: choices_of(problem, name) for name in self.calls}
        self.chosen = {
            name: [model.new_bool_var(f"{name}#{index}") for index in range(len(found))]
            for name, found in self.choices.items()
        }
        for variables in self.chosen.values():
            model.add_exactly_one(variables)
        self.windows = {name: self.grouped(name, lambda choice: choice.mesh) for name in self.calls}
        self.copies: dict[str, dict[Copy, Literal]] = {
            name: self.grouped(name, lambda choice: (choice.mesh, choice.option.layout))
            for name in self.calls
        }
        self.home = {model: graph.home_call(model).name for model in graph.models}
        self._before: dict[tuple[str, str], Literal] = {}
        self._order_calls()
        self._overlap: dict[tuple[str, str], Literal] = {}
        self._same: dict[tuple[str, str], Literal] = {}
        self._filled: dict[str, Literal] = {}
        self._reallocated: dict[str, Literal] = {}
        self._stored: dict[str, Literal] = {}
        self._streams: dict[str, Literal] = {}

    # Choices

    def where(self, call: str, holds: Callable[[Choice], bool]) -> Literal:
        """Whether the choice of `call` is one of those."""
        found = [
            variable
            for choice, variable in zip(self.choices[call], self.chosen[call], strict=True)
            if holds(choice)
        ]
        if len(found) == len(self.chosen[call]):
            return True
        return self.any(found)

    def total(self, call: str, value: Callable[[Choice], int]) -> Any:
        """A number that the choice of `call` decides: a linear expression."""
        pairs = zip(self.choices[call], self.chosen[call], strict=True)
        return sum(value(choice) * variable for choice, variable in pairs if value(choice))

    def siblings(self, model: str) -> list[str]:
        """Calls of a model but its home."""
        return [call.name for call in self.problem.graph.calls_of(model) if call.name != self.home[model]]

    def model_of(self, call: str) -> str | None:
        return self.calls[call].model

    def grouped(self, call: str, key: Callable[[Choice], Hashable]) -> dict[Any, Literal]:
        """By what choices of `call` have in common: whether one of them is taken."""
        groups: dict[Hashable, list[Literal]] = {}
        for choice, variable in zip(self.choices[call], self.chosen[call], strict=True):
            groups.setdefault(key(choice), []).append(variable)
        result = {}
        for name, variables in groups.items():
            if len(variables) == 1:
                result[name] = variables[0]
                continue
            result[name] = self.model.new_bool_var(f"{call}@{name}")
            self.model.add(sum(variables) == result[name])
        return result

    # Literals

    def negated(self, literal: Literal) -> Literal:
        return (not literal) if isinstance(literal, bool) else literal.negated()

    def all(self, literals: Iterable[Literal]) -> Literal:
        """Whether all hold: a literal that is equal to it."""
        left = [literal for literal in literals if literal is not True]
        if any(literal is False for literal in left):
            return False
        if len(left) <= 1:
            return left[0] if left else True
        both = self.model.new_bool_var("all")
        self.model.add_bool_and(left).only_enforce_if(both)
        self.model.add_bool_or([*(literal.negated() for literal in left), both])
        return both

    def any(self, literals: Iterable[Literal]) -> Literal:
        """Whether one holds: a literal that is equal to it."""
        return self.negated(self.all(self.negated(literal) for literal in literals))

    def require(self, *literals: Literal, given: Iterable[Literal] = ()) -> None:
        """One of `literals` holds wherever all of `given` do."""
        clause = [*literals, *(self.negated(literal) for literal in given)]
        if any(literal is True for literal in clause):
            return
        self.model.add_bool_or([literal for literal in clause if literal is not False])

    def add(self, constraint: Any, given: Iterable[Literal]) -> None:
        """A linear constraint that holds wherever all of `given` do."""
        left = list(dict.fromkeys(literal for literal in given if literal is not True))
        if any(literal is False for literal in left):
            return
        added = self.model.add(constraint)
        if left:
            added.only_enforce_if(left)

    # Order

    def before(self, first: str, second: str) -> Literal:
        """Whether a call comes before another one."""
        return self._before[first, second]

    def _order_calls(self) -> None:
        names = list(self.calls)
        known = self._known_order()
        for at, first in enumerate(names):
            for second in names[at + 1 :]:
                if (first, second) in known or (second, first) in known:
                    literal: Literal = (first, second) in known
                else:
                    literal = self.model.new_bool_var(f"{first}<{second}")
                self._before[first, second] = literal
                self._before[second, first] = self.negated(literal)
        for first in names:
            for second in names:
                for third in names:
                    if len({first, second, third}) == 3:
                        given = (self._before[first, second], self._before[second, third])
                        self.require(self._before[first, third], given=given)

    def _known_order(self) -> set[tuple[str, str]]:
        graph = self.problem.graph
        order = [call.name for call in graph.ordered(self.problem.order)]
        if self.problem.order is not None:
            return {(first, second) for at, first in enumerate(order) for second in order[at + 1 :]}
        ancestors: dict[str, set[str]] = {}
        for name in order:
            parents = [parent.name for parent in graph.parents(self.calls[name])]
            ancestors[name] = {*parents, *(one for parent in parents for one in ancestors[parent])}
        return {(first, name) for name, found in ancestors.items() for first in found}

    # Sharing

    def overlap(self, one: str, other: str) -> Literal:
        """Holds if the windows of two calls share a rank; may hold as well if they do not (at a cost)."""
        if one == other:
            return True
        key = (one, other) if (one, other) in self._overlap else (other, one)
        if key in self._overlap:
            return self._overlap[key]
        apart = {
            mesh: [there for second, there in self.windows[other].items() if not mesh.overlaps(second)]
            for mesh in self.windows[one]
        }
        literal: Literal = True
        if any(apart.values()):
            literal = self.model.new_bool_var(f"{one}&{other}")
            for mesh, there in apart.items():
                self.require(literal, *there, given=[self.windows[one][mesh]])
        self._overlap[one, other] = literal
        return literal

    def same_copy(self, one: str, other: str) -> Literal:
        """Whether two calls of a model have the same window and layout."""
        key = (one, other) if one < other else (other, one)
        if key not in self._same:
            self._same[key] = self._equal(self.copies[one], self.copies[other])
        return self._same[key]

    def _equal(self, one: Mapping[Copy, Literal], other: Mapping[Copy, Literal]) -> Literal:
        if not one.keys() & other.keys():
            return False
        same = self.model.new_bool_var("same")
        for copy in one.keys() | other.keys():
            if copy in one and copy in other:
                self.require(same, given=(one[copy], other[copy]))
                self.require(self.negated(one[copy]), other[copy], given=(same,))
            else:
                self.require(self.negated(one.get(copy, other.get(copy))), given=(same,))
        return same

    def temporary(self, call: str) -> Literal:
        """Whether a call runs on a copy of its own, beside its model's home."""
        model = self.model_of(call)
        if model is None or self.home[model] == call:
            return False
        return self.negated(self.same_copy(call, self.home[model]))

    def stored(self, model: str) -> Literal:
        """Whether a model is in the nodes' host stores, from which every copy is filled."""
        if model not in self._stored:
            self._stored[model] = self.where(self.home[model], lambda choice: choice.option.offload == "node")
        return self._stored[model]

    def found(self, call: str) -> Literal:
        """Whether an earlier call of the model, its home or another one, is on the same copy."""
        model = self.model_of(call)
        assert model is not None
        others = (name for name in (self.home[model], *self.siblings(model)) if name != call)
        return self.any(self.all((self.before(other, call), self.same_copy(other, call))) for other in others)

    def streams(self, call: str) -> Literal:
        """Whether the reallocation to the call's copy, if there is one, goes on beside the call."""
        if call not in self._streams:
            self._streams[call] = self.where(call, lambda choice: choice.option.stream)
        return self._streams[call]

    def filled(self, call: str) -> Literal:
        """Whether an earlier call of the model has brought the weights into the call's temporary copy."""
        model = self.model_of(call)
        if model is None:
            return False
        if call not in self._filled:
            earlier = [
                self.all((self.before(other, call), self.keeps(other, call)))
                for other in self.siblings(model)
                if other != call and call != self.home[model]
            ]
            self._filled[call] = self.any(earlier) if earlier else False
        return self._filled[call]

    def reallocated(self, call: str) -> Literal:
        """Whether weights are reallocated to the call's copy right before it."""
        model = self.model_of(call)
        if model is None or call == self.home[model]:
            return False
        if call not in self._reallocated:
            given = (self.temporary(call), self.negated(self.filled(call)), self.negated(self.stored(model)))
            self._reallocated[call] = self.all(given)
        return self._reallocated[call]

    def keeps(self, one: str, other: str) -> Literal:
        """Of two calls in this order: whether one temporary copy serves both, with no training between them."""
        model = self.model_of(one)
        assert model is not None
        home = self.home[model]
        terms = [self.temporary(one), self.same_copy(one, other)]
        if self.calls[home].trains:
            terms.append(self.negated(self.all((self.before(one, home), self.before(home, other)))))
        return self.all(terms)
