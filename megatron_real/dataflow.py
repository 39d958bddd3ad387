"""The dataflow graph of one iteration: which model function calls there are and what they hand to each other.

A graph knows nothing of ranks, layouts or tensors. Edges follow from the keys that calls consume and produce;
parameter-version edges follow from the models (a call of a trained model in iteration i+1 needs the weights of the
training of iteration i).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import networkx

from megatron_real.errors import PlanError, Problem, raise_problems

__all__ = ["Call", "CallType", "Graph", "Input", "KeySpec", "Per", "Scope"]


class CallType(StrEnum):
    """What a call does with its model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN = "train"


class Per(StrEnum):
    """What one element of a key stands for."""

    TOKEN = "token"
    """A token of prompt + response."""
    RESPONSE = "response"
    """A token of the response."""
    SEQUENCE = "sequence"
    """A whole sequence."""


class Scope(StrEnum):
    """How much of a key a data-parallel rank of the consumer needs."""

    SHARD = "shard"
    """Only the sequences that it works on."""
    FULL = "full"
    """Every sequence of the batch (advantages are whitened over all of it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec:
    """The type of one data key."""

    name: str
    per: Per
    dtype: str
    """``int64`` or ``float32``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A key that a call consumes."""

    key: str
    scope: Scope = Scope.SHARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model function call (MFC in ReaL's paper, section 3)."""

    name: str
    model: str | None
    """The role whose weights it uses; None for a Python function (a rule-based reward)."""
    type: CallType
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        return self.type is CallType.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The calls of one iteration of an algorithm, in their declared order, and the keys that pass between them.

    Raises:
        PlanError: a key without a specification or producer, two producers of a key, two train calls of a model,
            duplicate names, or a cycle. All problems are reported together.
    """

    name: str
    calls: tuple[Call, ...]
    keys: tuple[KeySpec, ...]

    def __post_init__(self) -> None:
        raise_problems(self._problems(), subject=f"graph {self.name}")

    def _problems(self) -> Iterator[Problem]:
        names = [call.name for call in self.calls]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem(path=f"calls.{name}", found="two calls of this name", expected="unique names")
        yield from self._ownership_problems()
        producers = {key: call.name for call in self.calls for key in call.outputs}
        yield from self._key_problems(producers)
        graph = self._networkx(producers)
        if not networkx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(edge[0] for edge in networkx.find_cycle(graph))
            yield Problem(path="calls", found=f"the cycle {cycle}", expected="a graph without cycles")

    def _ownership_problems(self) -> Iterator[Problem]:
        """Two producers of a key, or two train calls of a model."""
        producers: dict[str, str] = {}
        trained: dict[str, str] = {}
        for call in self.calls:
            for key in call.outputs:
                if key in producers:
                    yield Problem(
                        path=f"calls.{call.name}.outputs",
                        found=f"{key!r}, which {producers[key]} produces too",
                        expected="one producer of each key",
                    )
                producers[key] = call.name
            if call.trains and call.model is not None:
                if call.model in trained:
                    yield Problem(
                        path=f"calls.{call.name}",
                        found=f"a second train call of {call.model} (the first is {trained[call.model]})",
                        expected="one train call of each model",
                    )
                trained[call.model] = call.name

    def _key_problems(self, producers: dict[str, str]) -> Iterator[Problem]:
        """Keys without a specification or without a producer."""
        known = {spec.name for spec in self.keys}
        for call in self.calls:
            used = [entry.key for entry in call.inputs]
            for key in [*used, *call.outputs]:
                if key not in known:
                    yield Problem(
                        path=f"calls.{call.name}", found=f"key {key!r}", expected=f"one of {sorted(known)}"
                    )
            for key in used:
                if key not in producers:
                    yield Problem(
                        path=f"calls.{call.name}.inputs",
                        found=f"{key!r}",
                        expected="a key that some call produces",
                    )

    def _networkx(self, producers: dict[str, str]) -> networkx.DiGraph:
        graph = networkx.DiGraph()
        graph.add_nodes_from(call.name for call in self.calls)
        for call in self.calls:
            for entry in call.inputs:
                if entry.key in producers:
                    graph.add_edge(producers[entry.key], call.name)
        return graph

    def call(self, name: str) -> Call:
        """The call of this name.

        Raises:
            PlanError: there is none.
        """
        for call in self.calls:
            if call.name == name:
                return call
        raise PlanError(
            f"graph {self.name}: found no call {name!r}; it has {[call.name for call in self.calls]}."
        )

    def key(self, name: str) -> KeySpec:
        """The specification of key `name`."""
        return next(spec for spec in self.keys if spec.name == name)

    def producer(self, key: str) -> Call:
        """The call that produces `key`."""
        return next(call for call in self.calls if key in call.outputs)

    def parents(self, call: Call) -> tuple[Call, ...]:
        """Calls whose outputs `call` consumes, in declared order."""
        wanted = {self.producer(entry.key).name for entry in call.inputs}
        return tuple(other for other in self.calls if other.name in wanted)

    @property
    def models(self) -> tuple[str, ...]:
        """Roles in order of their first call."""
        return tuple(dict.fromkeys(call.model for call in self.calls if call.model is not None))

    def calls_of(self, model: str) -> tuple[Call, ...]:
        """The calls of one role, in declared order."""
        return tuple(call for call in self.calls if call.model == model)

    def trained(self, model: str) -> bool:
        """Whether some call trains this role."""
        return any(call.trains for call in self.calls_of(model))

    def home_call(self, model: str) -> Call:
        """The call at whose placement the role's weights live between calls: its train call, else its first."""
        calls = self.calls_of(model)
        return next((call for call in calls if call.trains), calls[0])

    def ordered(self, order: tuple[str, ...] | None = None) -> tuple[Call, ...]:
        """All calls in execution order.

        The rule of `compile`: among the calls whose inputs are there, the one that stands first in `order`, else first
        in the declaration, comes next.

        Raises:
            PlanError: `order` is not a permutation of the calls.
        """
        names = [call.name for call in self.calls]
        if order is not None and sorted(order) != sorted(names):
            raise PlanError(f"order: found {list(order)}; expected each of {names} once.")
        rank = {name: index for index, name in enumerate(order or names)}
        producers = {key: call.name for call in self.calls for key in call.outputs}
        sorted_names = networkx.lexicographical_topological_sort(
            self._networkx(producers), key=rank.__getitem__
        )
        return tuple(self.call(name) for name in sorted_names)
