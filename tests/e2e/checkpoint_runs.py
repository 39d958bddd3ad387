"""What the tests of checkpoints share: a small run and its plans, and how to read what a run saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.invariance_cases import Case, place

__all__ = [
    "RUN",
    "SMALL",
    "STEPS_PER_ITERATION",
    "VOCAB_SIZE",
    "built",
    "case",
    "load",
    "relative",
    "two_ranks",
]

VOCAB_SIZE = 257
SMALL = {"num_layers": 2, "vocab_size": VOCAB_SIZE}
RUN: dict[str, Any] = {
    "data": {"batch_size": 16},
    "algorithm": {
        "num_minibatches": 2,
        "num_epochs": 1,
        "max_new_tokens": 6,
        "kl_adaptive": True,
        "kl_target": 0.05,
        "kl_horizon": 200,
    },
}
STEPS_PER_ITERATION = 2


def case(name: str, num_ranks: int, calls: Mapping[str, Any], **megatron: Any) -> Case:
    """A run of the small model whose learning rate decays: one that goes on must know its step."""
    decaying = {"lr_decay_style": "linear", "min_lr": 1e-4}
    return Case(name=name, num_ranks=num_ranks, calls=calls, megatron={**SMALL, **decaying, **megatron})


def two_ranks() -> dict[str, Any]:
    """Another plan than the demo's: other windows, layouts and home copies."""
    return {
        "*": place(0, 2, dp=2, micro=1),
        "actor_gen": place(0, 2, tp=2),
        "actor_train": place(0, 2, pp=2),
        "critic_train": place(1, 2),
        "critic_inf": place(1, 2),
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def load(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """A checkpoint as torch alone reads it, by names of parameters."""
    from tests.e2e.cases import by_parameter, load_tensors

    return by_parameter(load_tensors(folder), prefix)


def built(tree: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: a run that was built and not started."""
    from tests.e2e.cases import run_tree

    return run_tree(tree, train=False)
