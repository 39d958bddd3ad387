"""Memory in the CP-SAT model: what `SearchProblem._peak` walks through, as inequalities at every point where it grows.

Bytes on a rank only grow when a copy is allocated, and only while a call or a reallocation runs is there more. So it is
enough that they fit when an iteration starts, while each call runs and while each reallocation does: resident copies
(less the weights that are dropped just then), temporary copies that serve a call before and a call after, and the
call's own copy and activations. A temporary copy that serves two calls counts from the first to the second; one that
serves three counts twice between them.

One rank stands for all that lie in the same windows. Bytes are divided by their greatest common divisor: nothing is
rounded. Copies of one model in one layout have equal weights.

Held by tests/property/test_cpsat.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_real.plan_search.problem import Choice
from megatron_real.plan_search.strategies.cpsat_terms import Literal, Terms
from megatron_real.realloc_ops.planning.plan import STAGING_SLOTS

__all__ = ["add_memory", "ranks_to_watch"]

_MOST = 1 << 42
"""More than a rank has, in any unit."""


def ranks_to_watch(terms: Terms) -> tuple[int, ...]:
    """The first rank of each group that lies in the same of all possible windows."""
    windows = sorted({mesh for found in terms.windows.values() for mesh in found})
    first: dict[tuple[bool, ...], int] = {}
    for rank in sorted({mesh.start for mesh in windows}):
        first.setdefault(tuple(rank in mesh for mesh in windows), rank)
    return tuple(first.values())


def add_memory(terms: Terms) -> None:
    """Add the inequalities to the model."""
    memory = _Memory(terms)
    for rank in ranks_to_watch(terms):
        memory.add_rank(rank)


class _Memory:
    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        options = [choice.option for found in terms.choices.values() for choice in found]
        self._unit = max(
            1,
            math.gcd(
                STAGING_SLOTS * terms.problem.bucket_bytes,
                *(option.weights_bytes for option in options),
                *(option.state_bytes for option in options),
                *(option.active_bytes for option in options),
            ),
        )
        self._capacity = terms.problem.capacity_bytes // self._unit
        self._dropped = {
            (model, name): self._dropped_at(model, name) for model in terms.home for name in terms.calls
        }
        self._loaded = {
            (model, name): self._loaded_at(model, name) for model in terms.home for name in terms.calls
        }
        self._alive = {name: list(self._alive_at(name)) for name in terms.calls}

    def add_rank(self, rank: int) -> None:
        """Nothing exceeds the capacity on one rank."""
        terms = self._terms
        base = sum(
            self._variable(self._bytes(home, rank, partial(self._resident, home)))
            + self._at_least(self._bytes(home, rank, terms.problem.staging_of), self._sends(model))
            for model, home in terms.home.items()
        )
        terms.model.add(base <= self._capacity)
        for home in terms.home.values():
            terms.model.add(base + self._bytes(home, rank, partial(self._parked, home)) <= self._capacity)
        for name in terms.calls:
            held, own = self._held(name, rank, base)
            active = 0
            if terms.model_of(name) is not None:
                active = self._bytes(name, rank, lambda choice: choice.option.active_bytes)
                active = active + self._bytes(name, rank, partial(self._parked, name))
            terms.model.add(held + active <= self._capacity)
            streamed = (terms.reallocated(name), terms.streams(name))
            staging = self._bytes(name, rank, terms.problem.staging_of)
            terms.add(held + active + staging <= self._capacity, streamed)
            self._add_realloc(name, rank, held + own)

    def _sends(self, model: str) -> Literal:
        """Whether a reallocation of a model may go on while its home's ranks do something else."""
        terms = self._terms
        return terms.any(terms.streams(name) for name in terms.siblings(model))

    def _held(self, name: str, rank: int, base: Any) -> tuple[Any, Any]:
        """Bytes when a call starts to run, and those of its home's weights that were dropped right before."""
        terms = self._terms
        held, just_dropped = base, 0
        for model, home in terms.home.items():
            gone = self._dropped[model, name]
            if gone is not False:
                there = self._bytes(
                    home,
                    rank,
                    lambda choice: choice.option.weights_bytes if choice.option.drop_trained_weights else 0,
                )
                less = self._limited(there, gone)
                held = held - less
                just_dropped = less if terms.model_of(name) == model else just_dropped
            loaded = self._loaded[model, name]
            if loaded is not False:
                held = held + self._at_least(
                    self._bytes(
                        home, rank, lambda choice: choice.option.weights_bytes if _is_away(choice) else 0
                    ),
                    loaded,
                )
        for other, alive in self._alive[name]:
            held = held + self._at_least(
                self._bytes(other, rank, lambda choice: choice.option.weights_bytes), alive
            )
        model_of_call = terms.model_of(name)
        apart = terms.temporary(name)
        if model_of_call is not None:
            apart = terms.any((apart, terms.stored(model_of_call)))
        if apart is not False:
            own = self._bytes(name, rank, lambda choice: choice.option.weights_bytes)
            held = held + self._at_least(own, apart)
        return held, just_dropped

    def _add_realloc(self, name: str, rank: int, held: Any) -> None:
        """While the copy is filled, its home's weights are still there, and both sides stage buckets.

        Of a streamed one, what the home stages is counted all the time.
        """
        terms = self._terms
        model, given = terms.model_of(name), terms.reallocated(name)
        if model is None or given is False:
            return
        home, streams = terms.home[model], terms.streams(name)
        receiving = terms.total(name, self._staging)
        sending = terms.total(home, self._staging)
        for side in (name, home):
            inside = terms.where(side, lambda choice: rank in choice.mesh)
            terms.add(held + receiving <= self._capacity, (given, inside, streams))
            terms.add(held + receiving + sending <= self._capacity, (given, inside, terms.negated(streams)))

    def _staging(self, choice: Choice) -> int:
        return self._terms.problem.staging_of(choice) // self._unit

    def _parked(self, home: str, choice: Choice) -> int:
        """Gradients and optimizer state of a training that are on the host between trainings."""
        parked = self._terms.calls[home].trains and choice.option.offload == "host"
        return choice.option.state_bytes if parked else 0

    def _bytes(self, call: str, rank: int, value: Callable[[Choice], int]) -> Any:
        """Of a call's choice on a rank: a linear expression."""
        return self._terms.total(
            call, lambda choice: value(choice) // self._unit if rank in choice.mesh else 0
        )

    def _variable(self, total: Any) -> Any:
        variable = self._terms.model.new_int_var(0, _MOST, "bytes")
        self._terms.model.add(variable == total)
        return variable

    def _at_least(self, total: Any, given: Literal) -> Any:
        """`total` where `given` holds, else what the solver likes best: 0."""
        if given is True:
            return total
        variable = self._terms.model.new_int_var(0, _MOST, "bytes")
        self._terms.add(variable >= total, (given,))
        return variable

    def _limited(self, total: Any, given: Literal) -> Any:
        """At most `total`, and 0 where `given` does not hold."""
        variable = self._terms.model.new_int_var(0, _MOST, "bytes")
        self._terms.model.add(variable <= total)
        self._terms.add(variable == 0, (self._terms.negated(given),))
        return variable

    def _resident(self, home: str, choice: Choice) -> int:
        """When an iteration starts: a trained model's weights are there, dropped later or not."""
        if choice.option.offload == "none":
            return choice.option.weights_bytes + choice.option.state_bytes
        return choice.option.weights_bytes if self._terms.calls[home].trains else 0

    def _dropped_at(self, model: str, name: str) -> Literal:
        """Implies that a trained model's home weights are dropped while a call runs."""
        terms = self._terms
        home, siblings = terms.home[model], terms.siblings(model)
        if not terms.calls[home].trains or not siblings or name == home:
            return False
        drops = terms.where(home, lambda choice: choice.option.drop_trained_weights)
        others = [other for other in siblings if other != name]
        before = [terms.before(other, name) for other in others]
        conditions = [
            drops,
            terms.before(name, home),
            # Every reader of the weights is done, or comes after the training, or reads another call's copy.
            *(
                terms.any((done, terms.before(home, other), terms.filled(other)))
                for done, other in zip(before, others, strict=True)
            ),
        ]
        if name in siblings:
            conditions.append(terms.temporary(name))
            conditions.append(terms.any((terms.negated(terms.streams(name)), terms.filled(name))))
        else:
            conditions.append(terms.any(before))
        return terms.all(conditions)

    def _loaded_at(self, model: str, name: str) -> Literal:
        """Implied where an offloaded model's weights are on its home while a call runs."""
        terms = self._terms
        home = terms.home[model]
        if terms.calls[home].trains:
            return False
        away = terms.where(home, _is_away)
        if terms.model_of(name) == model:
            return away
        calls = [home, *terms.siblings(model)]
        first = terms.any(terms.before(other, name) for other in calls)
        last = terms.any(terms.before(name, other) for other in calls)
        return terms.all((away, first, last)) if len(calls) > 1 else False

    def _alive_at(self, name: str) -> list[tuple[str, Literal]]:
        """Temporary copies that wait for a later call while a call runs: whose, and whether."""
        terms = self._terms
        found = []
        for model, home in terms.home.items():
            calls = (
                [home, *terms.siblings(model)] if terms.stored(model) is not False else terms.siblings(model)
            )
            for one in calls:
                for other in calls:
                    if one != other and name not in (one, other):
                        between = (terms.before(one, name), terms.before(name, other))
                        alive = terms.all((*between, self._keeps(model, one, other)))
                        if alive is not False:
                            found.append((one, alive))
        return found

    def _keeps(self, model: str, one: str, other: str) -> Literal:
        """Of two calls in this order: whether the copy of the first waits for the second."""
        terms = self._terms
        stored = terms.all((terms.stored(model), terms.same_copy(one, other)))
        if terms.home[model] in (one, other):
            return stored
        return terms.any((stored, terms.keeps(one, other)))


def _is_away(choice: Choice) -> bool:
    return choice.option.offload == "host"
