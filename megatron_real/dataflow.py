"""The dataflow graph of one iteration: which model function calls there are and what they hand to each other.

A graph knows nothing of ranks, layouts or tensors. Edges follow from the keys that calls consume and produce;
parameter-version edges follow from the models (a call of a trained model in iteration i+1 needs the weights of the
training of iteration i).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import networkx

from megatron_real.errors import PlanError, Problem, raise_problems

__all__ = ["SAMPLES", "Call", "CallType", "DataKind", "Graph", "Input", "KeySpec", "Per", "Scope", "Update"]

SAMPLES = "samples"
"""The set of sequences of most graphs: a data set's, or the responses that are sampled."""


class CallType(StrEnum):
    """What a call does with its model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN = "train"


class DataKind(StrEnum):
    """What a line of a data set is."""

    PROMPTS = "prompts"
    """A prompt; the iteration generates responses."""
    ANSWERS = "answers"
    """A prompt with its answer: one sequence."""
    PAIRS = "pairs"
    """A prompt with two answers: two sequences with consecutive ids, the chosen one first."""

    @property
    def unit(self) -> int:
        """Sequences that a line makes; they stay in one micro-batch."""
        return 2 if self is DataKind.PAIRS else 1


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
    sequences: str = SAMPLES
    """The set of sequences that it is of. Sets have equally many sequences, each set its own lengths."""


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
    sequences: str = SAMPLES
    """The set of sequences that it works on: those of its outputs, and of its inputs of scope SHARD."""

    @property
    def trains(self) -> bool:
        return self.type is CallType.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A model that no call trains moves toward a trained one at the end of an iteration.

    ``target = mix * source + (1 - mix) * target``, weight by weight; a reference that follows the actor.
    """

    target: str
    source: str
    mix: float
    """Above 0; 1 replaces the target's weights."""
    every: int = 1
    """Iterations from one update to the next."""

    def due(self, iteration: int) -> bool:
        """Whether it is made at the end of `iteration`, counted from 0."""
        return (iteration + 1) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The calls of one iteration of an algorithm, in their declared order, and the keys that pass between them.

    Raises:
        PlanError: a key without a specification or producer, two producers of a key, two train calls of a model, two
            generations of a set of sequences, a key of another set than its call's, duplicate names, a cycle, an
            update that is not from a trained model to one that nothing else changes, pairs where all answers are
            generated, or a scalar head of no model. All problems are reported together.
    """

    name: str
    calls: tuple[Call, ...]
    keys: tuple[KeySpec, ...]
    updates: tuple[Update, ...] = ()
    """Made after all calls of an iteration, in this order."""
    pairs: bool = False
    """Whether a line of the data set has two answers, a chosen and a rejected one."""
    scalar_heads: tuple[str, ...] = ()
    """Models that return numbers in the place of log-probabilities, as a critic does. Those that make a key with one
    number per sequence need not be named."""

    def __post_init__(self) -> None:
        raise_problems(self._problems(), subject=f"graph {self.name}")

    def _problems(self) -> Iterator[Problem]:
        names = [call.name for call in self.calls]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem(path=f"calls.{name}", found="two calls of this name", expected="unique names")
        yield from self._ownership_problems()
        yield from self._sequence_problems()
        yield from self._update_problems()
        yield from self._data_problems()
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

    def _sequence_problems(self) -> Iterator[Problem]:
        """Keys of other sequences than their call works on, or two generations of a set."""
        sets = {spec.name: spec for spec in self.keys}
        generations: dict[str, str] = {}
        for call in self.calls:
            if call.type is CallType.GENERATE:
                first = generations.setdefault(call.sequences, call.name)
                if first != call.name:
                    yield Problem(
                        path=f"calls.{call.name}",
                        found=f"a second generation of the sequences {call.sequences!r} (the first is {first})",
                        expected="one generation of each set of sequences",
                    )
            own = [(entry.key, entry.scope) for entry in call.inputs]
            for key, scope in [*own, *((key, Scope.SHARD) for key in call.outputs)]:
                spec = sets.get(key)
                if spec is None or spec.sequences == call.sequences:
                    continue
                if scope is Scope.SHARD or spec.per is not Per.SEQUENCE:
                    yield Problem(
                        path=f"calls.{call.name}",
                        found=f"key {key!r} ({spec.per} data of the sequences {spec.sequences!r})",
                        expected=f"one of the sequences {call.sequences!r}, or an input of scope full with one number "
                        "per sequence",
                    )

    def _update_problems(self) -> Iterator[Problem]:
        """Updates between models that cannot take part, two of a model, or numbers out of range."""
        for index, update in enumerate(self.updates):
            path = f"updates.{update.target}"
            if update.target not in self.models or self.trained(update.target):
                yield Problem(
                    path=path,
                    found=f"the target {update.target!r}",
                    expected="a model with calls, none of them a training",
                )
            if not self.trained(update.source):
                yield Problem(path=path, found=f"the source {update.source!r}", expected="a trained model")
            if any(other.target == update.target for other in self.updates[:index]):
                yield Problem(path=path, found="a second update", expected="one update of each model")
            if not 0.0 < update.mix <= 1.0:
                yield Problem(path=f"{path}.mix", found=str(update.mix), expected="more than 0 and at most 1")
            if update.every < 1:
                yield Problem(path=f"{path}.every", found=str(update.every), expected="at least 1")

    def _data_problems(self) -> Iterator[Problem]:
        """Pairs that no data set has, or a head of no model."""
        if self.pairs and self.data is DataKind.PROMPTS:
            yield Problem(path="pairs", found="true", expected="false: all answers are generated")
        for model in self.scalar_heads:
            if model not in self.models:
                yield Problem(
                    path="scalar_heads", found=repr(model), expected=f"some of the models {list(self.models)}"
                )

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

    def only(self, names: Collection[str]) -> Graph:
        """The graph of these calls alone, which changes no other models.

        Raises:
            PlanError: one of them consumes what none of them produces.
        """
        calls = tuple(call for call in self.calls if call.name in names)
        models = {call.model for call in calls}
        heads = tuple(model for model in self.scalar_heads if model in models)
        return replace(self, calls=calls, updates=(), scalar_heads=heads)

    @property
    def models(self) -> tuple[str, ...]:
        """Roles in order of their first call."""
        return tuple(dict.fromkeys(call.model for call in self.calls if call.model is not None))

    @property
    def data(self) -> DataKind:
        """What a line of the data set is: a prompt alone where all sequences are generated."""
        if all(self.generation(sequences) for sequences in self.sequence_sets):
            return DataKind.PROMPTS
        return DataKind.PAIRS if self.pairs else DataKind.ANSWERS

    def has_scalar_head(self, model: str) -> bool:
        """Whether a model returns a number per token or sequence, and not log-probabilities."""
        outputs = (key for call in self.calls_of(model) for key in call.outputs)
        return model in self.scalar_heads or any(self.key(key).per is Per.SEQUENCE for key in outputs)

    @property
    def sequence_sets(self) -> tuple[str, ...]:
        """The sets of sequences that calls work on, in order of their first call."""
        return tuple(dict.fromkeys(call.sequences for call in self.calls))

    def generation(self, sequences: str = SAMPLES) -> Call | None:
        """The call that generates the responses of a set; None where the data set has them."""
        found = (
            call for call in self.calls if call.type is CallType.GENERATE and call.sequences == sequences
        )
        return next(found, None)

    def sequences_needed(self, call: Call) -> tuple[str, ...]:
        """Sets whose lengths a rank must know to run `call`: its own, unless it generates it, and its inputs'."""
        own = () if call.type is CallType.GENERATE else (call.sequences,)
        return tuple(dict.fromkeys([*own, *(self.key(entry.key).sequences for entry in call.inputs)]))

    def calls_of(self, model: str) -> tuple[Call, ...]:
        """The calls of one role, in declared order."""
        return tuple(call for call in self.calls if call.model == model)

    def trained(self, model: str) -> bool:
        """Whether some call trains this role."""
        return any(call.trains for call in self.calls_of(model))

    def update_of(self, model: str) -> Update | None:
        """The update whose target this role is."""
        return next((update for update in self.updates if update.target == model), None)

    def changes(self, model: str) -> bool:
        """Whether this role's weights change from iteration to iteration: it is trained, or updated."""
        return self.trained(model) or self.update_of(model) is not None

    def version(self, model: str, iteration: int) -> int:
        """The number of iterations whose training is in this role's weights when `iteration` begins; 0 if they stay."""
        update = self.update_of(model)
        if update is not None:
            return iteration - iteration % update.every
        return iteration if self.trained(model) else 0

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
