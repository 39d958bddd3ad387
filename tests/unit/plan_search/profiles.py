"""Profiles with known times, for the tests of the database and of the prices made from it."""

from __future__ import annotations

from typing import Any

from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.operations import Collective, Pass
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.profile_db import (
    Entry,
    Operation,
    ProfileDatabase,
    Provenance,
    head_key,
    layer_key,
)

__all__ = ["database", "entry", "layer_s", "provenance", "rest_s", "spec"]

SEQUENCES = (1, 4, 16)
LENGTHS = (16, 64, 256)


def spec(**changes: Any) -> ModelSpec:
    """A small dense model in fp32; `changes` go to its shape."""
    shape = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "padded_vocab_size": 512,
        "gated_mlp": True,
        "linear_bias": False,
        "norm_bias": False,
    }
    return ModelSpec(shape=ModelShape(**{**shape, **changes}), param_dtype="float32")


def provenance(**changes: Any) -> Provenance:
    """Of a machine of two cores with two ranks."""
    fields = {
        "device": "cpu",
        "device_model": "Some CPU",
        "cpu_model": "Some CPU",
        "host": "here",
        "num_cores": 2,
        "threads": 1,
        "pinned": True,
        "backend": "gloo",
        "num_ranks": 2,
        "ranks_per_node": 2,
        "versions": {"torch": "2.14"},
        "implementation": "local",
        "date": "2026-01-01T00:00:00+00:00",
    }
    return Provenance(**{**fields, **changes})


def entry(operation: Operation, seconds: float, *, kind: str = "", shape: str = "", **at: float) -> Entry:
    """An entry at these coordinates."""
    return Entry(
        operation=operation, kind=kind, shape=shape, at=at, median_s=seconds, spread_s=0.0, repetitions=3
    )


def layer_s(sequences: float, length: float, tp: int) -> float:
    """The time of a layer in `database`: a floor, and a part that grows with the tokens."""
    return (1e-3 + 1e-5 * sequences * length) / tp


def rest_s(sequences: float, length: float) -> float:
    """The rest of a pass in `database`."""
    return 2e-3 + 1e-6 * sequences * length


def contention(kind: str, tp: int, busy: int, length: int, seconds: float) -> Entry:
    """What takes `seconds` while so many ranks of a node are at work."""
    return entry(Operation.CONTENTION, seconds, kind=kind, tp=tp, busy=busy, sequences=1, length=length)


def database(**changes: Any) -> ProfileDatabase:
    """tp 1 and 2; `changes` go to the provenance."""
    model = spec()
    layer, head = layer_key(model, 0), head_key(model)
    found: list[Entry] = []
    for tp in (1, 2):
        where = {"tp": tp, "sp": 0, "tp_nodes": 1}
        for pass_ in Pass:
            decode = pass_ is Pass.DECODE
            for sequences in SEQUENCES:
                for length in LENGTHS:
                    at = {
                        **where,
                        "sequences": sequences,
                        "length": 1 if decode else length,
                        "context": length,
                    }
                    seconds = layer_s(sequences, length, tp)
                    found.append(entry(Operation.LAYER, seconds, kind=pass_, shape=layer, **at))
                    rest = rest_s(sequences, length)
                    found.append(entry(Operation.REST, rest, kind=pass_, shape=head, vocab=512, **at))
        for pass_ in (Pass.FORWARD, Pass.TRAIN_FORWARD, Pass.BACKWARD):
            common = {"vocab": 512, **where}
            found += [
                entry(
                    Operation.EMBEDDING, 1e-4 + 1e-8 * tokens, kind=pass_, shape=head, tokens=tokens, **common
                )
                for tokens in (1, 4096)
            ]
            found += [
                entry(Operation.LOGITS, 3e-3 + 1e-5 * logits, kind=pass_, shape=head, logits=logits, **common)
                for logits in (4, 64, 252)
            ]
    found += [
        entry(operation, base + 1e-9 * count, shape=f"{layer} / {head}", tp=1, parameters=count)
        for operation, base in ((Operation.ZERO_GRADIENTS, 1e-4), (Operation.OPTIMIZER, 1e-3))
        for count in (100_000, 180_000)
    ]
    found += [entry(Operation.CALL, 2e-3, kind=kind) for kind in ("generate", "inference", "train")]
    found += [
        entry(
            Operation.COLLECTIVE,
            group * (1e-4 + 1e-9 * count),
            kind=kind,
            group=group,
            num_nodes=1,
            bytes=count,
        )
        for kind in Collective
        for group in (2, 4)
        for count in (1024, 1 << 20)
    ]
    for operation, cost in ((Operation.POINT_TO_POINT, 1e-9), (Operation.EXCHANGE, 2e-9)):
        found += [
            entry(operation, 1e-4 + cost * count, within_node=1, bytes=count) for count in (1024, 1 << 20)
        ]
    for operation in (Operation.LOCAL_COPY, Operation.HOST_COPY):
        found += [entry(operation, 1e-6 + 1e-10 * count, bytes=count) for count in (1024, 1 << 20)]
    kinds = (Pass.PREFILL, Pass.DECODE, Pass.TRAIN_FORWARD, Pass.BACKWARD, Operation.OPTIMIZER)
    found += [
        contention(kind, tp, busy, length, 1e-5 * length * busy)
        for kind in kinds
        for tp in (1, 2)
        for busy in (1, 2, 4)[tp - 1 :]
        for length in (16, 64)
    ]
    return ProfileDatabase(provenance=provenance(**changes), entries=tuple(found))
