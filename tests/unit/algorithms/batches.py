"""Whole batches with random numbers for any algorithm's train call, and plain Python answers to compare with."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.backend import Algorithm, Samples
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, Per, Scope

LENGTHS = (4, 1, 7, 2, 5, 3, 1, 6)


class NoScorer:
    """A scorer that is never called."""

    def score(self, call: str, samples: Samples) -> list[float]:
        raise AssertionError("nothing is scored in these tests")


def build(name: str, **options: Any) -> Algorithm:
    """An algorithm whose end token is 0, with a reward model."""
    definition = find_algorithm(name)
    return definition.build(definition.config(**options), end_token=0)


def train_call(algorithm: Algorithm) -> Call:
    """The first train call."""
    return next(call for call in algorithm.graph.calls if call.trains)


def random_scalars(
    algorithm: Algorithm, seed: int = 0, *, lengths: Sequence[int] = LENGTHS, missing: Sequence[int] = ()
) -> Batch:
    """What `prepare` gets: the inputs of scope FULL, with the rewards of the sequences `missing` NaN."""
    rng = random.Random(seed)
    batch = Batch(
        ids=tuple(range(len(lengths))),
        prompt_lengths=tuple(rng.randint(1, 5) for _ in lengths),
        response_lengths=tuple(lengths),
    )
    for entry in train_call(algorithm).inputs:
        if entry.scope is Scope.FULL:
            spec = algorithm.graph.key(entry.key)
            count = len(lengths) if spec.per is Per.SEQUENCE else sum(lengths)
            values = [rng.gauss(0, 2) for _ in range(count)]
            if "logprobs" in spec.name:
                values = [-abs(value) for value in values]
            batch.put(spec, torch.tensor(values, dtype=torch.float32))
    for sequence in missing:
        batch.data["rewards"][sequence] = math.nan
    return batch


def rows(batch: Batch, key: str) -> list[list[float]]:
    """A key as one list per sequence."""
    return [part.double().tolist() for part in batch.split(key)]
