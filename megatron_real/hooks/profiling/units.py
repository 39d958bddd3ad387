"""The list of measurements of a profile: which entries each makes, and what it runs.

Measurements that share models stand in one block, so that these are built once. The list follows from the options, the
models, and whether ranks share cores: all ranks have the same one, in the same order.

Invariants (tests/e2e/test_profile.py):
    - a unit makes exactly the entries that it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from megatron_real.dataflow import CallType
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.profiling import communication, machine
from megatron_real.hooks.profiling.blocks import At, Block, Target, Unit
from megatron_real.hooks.profiling.calls import (
    DECODE_STEPS,
    Shape,
    embedding_seconds,
    generate_call,
    infer_call,
    prepare_seconds,
    train_call,
)
from megatron_real.hooks.profiling.models import Copies, ProfiledRole
from megatron_real.layout import Layout
from megatron_real.plan_search.costs.operations import Pass
from megatron_real.plan_search.parameters import stage_parameters
from megatron_real.plan_search.profile_db import Operation, head_key, layer_key
from megatron_real.plan_search.profile_options import ProfileOptions
from megatron_real.process_groups import ProcessGroups

__all__ = ["blocks"]


def blocks(
    options: ProfileOptions,
    models: Sequence[ProfiledRole],
    copies: Copies,
    groups: ProcessGroups,
    *,
    cores_shared: bool,
) -> Iterator[Block]:
    """All measurements, models first.

    Args:
        options: what to measure.
        models: to measure.
        copies: builds the models.
        groups: of the ranks.
        cores_shared: the ranks of a node share its cores: measure how they slow each other down.
    """
    known: set[str] = set()
    for role in models:
        layer = layer_key(role.spec, role.spec.shape.num_layers - 1)
        corners = layer in known
        known.add(layer)
        for tp in role.tps:
            for sp in (False, True) if tp > 1 and options.sequence_parallel else (False,):
                yield _ModelBlock(options, role, tp, sp).block(copies, corners=corners)
    for size in communication.group_sizes(options.num_ranks, options.devices_per_node):
        yield machine.collectives(options, groups, size)
    yield from machine.messages(options, groups)
    yield machine.memory_copies(options)
    if cores_shared:
        per_node = options.devices_per_node
        for tp in (tp for tp in models[0].tps if tp < per_node and per_node % tp == 0):
            yield machine.contention(options, models[0], tp, copies)


class _ModelBlock:
    """Measurements of one role in one layout."""

    def __init__(self, options: ProfileOptions, role: ProfiledRole, tp: int, sp: bool) -> None:
        self._options, self._role, self._tp, self._sp = options, role, tp, sp
        self._layer = layer_key(role.spec, role.spec.shape.num_layers - 1)
        self._head = head_key(role.spec)
        nodes = max(1, tp // options.devices_per_node)
        self._where: At = {"tp": tp, "sp": int(sp), "tp_nodes": nodes}
        self._few, self._many = options.layers
        self._lengths = options.length_grid()
        self._middle = Shape(*options.middle_shape())

    @property
    def _vocab(self) -> At:
        return {"vocab": self._role.model.padded_vocab_size}

    def block(self, copies: Copies, *, corners: bool) -> Block:
        """The block.

        Args:
            copies: builds the models.
            corners: the layers are measured already, of another role: a few points do for the rest of a pass.
        """
        generates = not self._role.model.scalar_head and not self._sp
        units = []
        shapes = self._options.shapes()
        for sequences, length in _corners(shapes) if corners else shapes:
            shape = Shape(sequences, length)
            units += [self._inference(shape), self._training(shape)]
            if generates:
                units.append(self._generation(shape))
        units += [self._logits(response) for response in self._responses()]
        units += [self._embedding(sequences * length) for sequences, length in self._token_points()]
        units.append(self._optimizer())
        if self._tp == 1 and generates:
            units += self._calls()
        name = f"{self._role.model.role} tp={self._tp}{' sp' if self._sp else ''}"
        built = partial(copies.pair, self._role, self._tp, self._sp, self._options.layers)
        return Block(name=name, units=tuple(units), built=built)

    def _token_points(self) -> list[tuple[int, int]]:
        by_tokens = {sequences * length: (sequences, length) for sequences, length in self._options.shapes()}
        return [by_tokens[tokens] for tokens in sorted(by_tokens)] + [(1, 1)]

    def _responses(self) -> list[int]:
        longest = self._middle.length - 1
        return sorted({1, max(1, longest // 4), longest})

    # -- entries of a pass --------------------------------------------------------------------------------------------

    def _targets(
        self, pass_: Pass, name: str, sequences: int, length: float, context: float
    ) -> tuple[Target, Target]:
        """Layer and rest of a pass, whose seconds are under `name` in a repetition of few and of many layers."""
        at = {**self._where, "sequences": sequences, "length": length, "context": context}
        number = self._many - self._few

        def layer(works: Sequence[Mapping[str, float]]) -> float:
            return (works[1][name] - works[0][name]) / number

        def rest(works: Sequence[Mapping[str, float]]) -> float:
            return works[0][name] - self._few * layer(works)

        return (
            Target(operation=Operation.LAYER, kind=pass_, shape=self._layer, at=at, value=layer),
            Target(
                operation=Operation.REST, kind=pass_, shape=self._head, at={**at, **self._vocab}, value=rest
            ),
        )

    def _inference(self, shape: Shape) -> Unit:
        return Unit(
            name=f"forward {shape.sequences} x {shape.length}",
            targets=self._targets(Pass.FORWARD, "pass", shape.sequences, shape.length, shape.length),
            works=lambda pair: [partial(infer_call, copy, shape) for copy in pair],
        )

    def _training(self, shape: Shape) -> Unit:
        targets = (
            *self._targets(Pass.TRAIN_FORWARD, "forward", shape.sequences, shape.length, shape.length),
            *self._targets(Pass.BACKWARD, "backward", shape.sequences, shape.length, shape.length),
        )
        return Unit(
            name=f"train {shape.sequences} x {shape.length}",
            targets=targets,
            works=lambda pair: [partial(train_call, copy, shape) for copy in pair],
        )

    def _generation(self, shape: Shape) -> Unit:
        prompt = max(1, shape.length - DECODE_STEPS)
        context = prompt + (DECODE_STEPS + 1) / 2
        targets = (
            *self._targets(Pass.PREFILL, "prefill", shape.sequences, prompt, prompt),
            *self._targets(Pass.DECODE, "decode", shape.sequences, 1, context),
        )
        return Unit(
            name=f"generate {shape.sequences} x {shape.length}",
            targets=targets,
            works=lambda pair: [
                partial(generate_call, copy, Shape(shape.sequences, prompt)) for copy in pair
            ],
        )

    def _logits(self, response: int) -> Unit:
        shape = Shape(self._middle.sequences, self._middle.length, response)
        at = {**self._where, **self._vocab, "logits": shape.sequences * response}
        names = {Pass.FORWARD: "pass", Pass.TRAIN_FORWARD: "forward", Pass.BACKWARD: "backward"}

        def target(pass_: Pass, work: int) -> Target:
            name = names[pass_]
            return Target(
                operation=Operation.LOGITS,
                kind=pass_,
                shape=self._head,
                at=at,
                value=lambda works: works[work][name],
            )

        return Unit(
            name=f"{shape.sequences * response} logits",
            targets=(target(Pass.FORWARD, 0), target(Pass.TRAIN_FORWARD, 1), target(Pass.BACKWARD, 1)),
            works=lambda pair: [partial(infer_call, pair[0], shape), partial(train_call, pair[0], shape)],
        )

    def _embedding(self, num_tokens: int) -> Unit:
        at = {**self._where, **self._vocab, "tokens": num_tokens}
        split = self._tp if self._sp else 1
        padded = -(-num_tokens // split) * split

        def target(pass_: Pass) -> Target:
            return Target(
                operation=Operation.EMBEDDING,
                kind=pass_,
                shape=self._head,
                at=at,
                value=lambda works: works[0][pass_.value],
            )

        return Unit(
            name=f"embedding of {num_tokens} tokens",
            targets=tuple(target(pass_) for pass_ in (Pass.FORWARD, Pass.TRAIN_FORWARD, Pass.BACKWARD)),
            works=lambda pair: [partial(embedding_seconds, pair[0], padded)],
        )

    # -- steps and calls ----------------------------------------------------------------------------------------------

    def _optimizer(self) -> Unit:
        """Of both depths, so that prices can follow the number of parameters."""
        shape = Shape(1, self._lengths[0])
        model = f"{self._layer} / {self._head}"

        def target(operation: Operation, name: str, work: int) -> Target:
            return Target(
                operation=operation,
                shape=model,
                at={"tp": self._tp, "parameters": self._parameters(self._options.layers[work])},
                value=lambda works: works[work][name],
            )

        return Unit(
            name="optimizer step",
            targets=tuple(
                target(operation, name, work)
                for operation, name in ((Operation.ZERO_GRADIENTS, "zero"), (Operation.OPTIMIZER, "step"))
                for work in (0, 1)
            ),
            works=lambda pair: [partial(train_call, copy, shape) for copy in pair],
        )

    def _parameters(self, layers: int) -> float:
        """Of a rank, in a model of so many layers."""
        shape = dataclasses.replace(self._role.spec.shape, num_layers=layers, num_dense_layers=0)
        (own,) = stage_parameters(shape, Layout(tp=self._tp))
        return float(own.total)

    def _calls(self) -> list[Unit]:
        shape = self._middle
        # What comes once per call depends a little on the whole batch; this one is of the largest micro-batch.
        batch = Shape(self._options.max_sequences, self._options.max_length, self._options.max_length // 2)

        def whole_train_call(copy: ModelCopy, shape: Shape) -> dict[str, float]:
            return {"call": train_call(copy, shape)["call"] + prepare_seconds(batch)}

        kinds = {
            CallType.GENERATE: generate_call,
            CallType.INFERENCE: infer_call,
            CallType.TRAIN: whole_train_call,
        }

        def unit(kind: CallType) -> Unit:
            target = Target(operation=Operation.CALL, kind=kind, value=lambda works: works[0]["call"])
            return Unit(
                name=f"overhead of a {kind} call",
                targets=(target,),
                works=lambda pair: [partial(kinds[kind], pair[0], shape)],
            )

        return [unit(kind) for kind in kinds]


def _corners(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Fewest and most sequences of the shortest length, fewest of the longest."""
    short, long = min(length for _, length in shapes), max(length for _, length in shapes)
    rows = [sequences for sequences, length in shapes if length == short]
    found = {(min(rows), short), (max(rows), short), (min(rows), long)}
    return sorted(found, key=lambda shape: -shape[0] * shape[1])
