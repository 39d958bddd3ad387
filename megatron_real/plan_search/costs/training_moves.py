"""What moving a trained model's optimizer state to another layout or window takes (`hooks.training_state`).

Main parameters and Adam's two moments travel, 12 bytes for each parameter that a rank owns; weights are made from them
at the target. Nothing is counted as held already: which parameters a rank owns follows from the order in DDP's buffers,
which differs with the layout, so a rank that is in both meshes keeps little. Bytes are therefore bounds from above,
spread over the source's ranks by what they own. Both copies hold all their memory until the move is over. Building
the new modules and process groups, seconds to minutes, is not in the price.

Invariants (tests/unit/plan_search/test_training_moves.py, tests/hooks/test_training_state.py):
    - no real move receives more on a rank or in all;
    - no move takes less time than its busiest rank's bytes over its fastest link.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.costs.operations import OperationCosts
from megatron_real.plan_search.memory import copy_memory
from megatron_real.plan_search.models import ModelSpec

__all__ = ["STATE_ITEMSIZE", "TrainingMoveCost", "both_copies_bytes", "training_move"]

STATE_ITEMSIZE = 12
"""Bytes of a parameter's main parameter and moments, all fp32."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


class TrainingMoveCost(NamedTuple):
    """Of moving one trained model."""

    seconds: float
    bytes_moved: int
    """Between ranks, all together, at most."""
    max_received_bytes: int
    """By one rank, at most."""
    max_sent_bytes: int
    """By one rank, where sources are spread evenly."""
    peak_bytes: int
    """Weights, gradients and optimizer state of both copies, on the rank that has most of them."""


def training_move(
    model: ModelSpec,
    source: tuple[Mesh, Layout],
    target: tuple[Mesh, Layout],
    operations: OperationCosts,
    per_node: int,
) -> TrainingMoveCost:
    """Seconds until the state has arrived, without making the weights from it.

    Raises:
        PlanError: the model cannot be cut into one of the layouts.
    """
    span = _span(source, target, per_node)
    held, needed = (_owned_bytes(model, where, span) for where in (source, target))
    sent = held * (needed.sum() / held.sum())
    seconds = np.maximum(
        _wire_s(needed, held, operations, per_node), _wire_s(sent, needed, operations, per_node)
    )
    copied = sent + needed  # packed and unpacked
    most = float(copied.max())
    seconds += copied * (operations.local_copy(most) / most)
    return TrainingMoveCost(
        seconds=float(seconds.max()),
        bytes_moved=int(needed.sum()),
        max_received_bytes=int(needed.max()),
        max_sent_bytes=int(sent.max()),
        peak_bytes=both_copies_bytes(model, source, target, trained=True),
    )


def both_copies_bytes(
    model: ModelSpec, source: tuple[Mesh, Layout], target: tuple[Mesh, Layout], *, trained: bool
) -> int:
    """What two copies of a model hold together, on the rank where that is most.

    Raises:
        PlanError: the model cannot be cut into one of the layouts.
    """
    span = _span(source, target, 1)
    total = np.zeros(len(span))
    for mesh, layout in (source, target):
        memory = copy_memory(model, layout, trained)
        total += _by_rank(np.add(memory.weights_bytes, memory.state_bytes), mesh, span)
    return int(total.max())


def _span(source: tuple[Mesh, Layout], target: tuple[Mesh, Layout], per_node: int) -> range:
    """Ranks from the first of either mesh's node to the last of either mesh."""
    first = min(source[0].start, target[0].start) // per_node * per_node
    return range(first, max(source[0].stop, target[0].stop))


def _owned_bytes(model: ModelSpec, where: tuple[Mesh, Layout], span: range) -> Floats:
    """Optimizer state that travels, of every rank; the padding of DDP's buffers is counted."""
    mesh, layout = where
    memory = copy_memory(model, layout, True)
    elements = np.array(memory.weights_bytes) // model.param_itemsize
    kept_itemsize = STATE_ITEMSIZE if model.has_main_params else STATE_ITEMSIZE - model.param_itemsize
    owned = (np.array(memory.state_bytes) - elements * model.grad_itemsize) // kept_itemsize
    return _by_rank(owned * STATE_ITEMSIZE, mesh, span)


def _by_rank(stages: Ints, mesh: Mesh, span: range) -> Floats:
    """Values of pipeline stages on their ranks, 0 on ranks outside the mesh."""
    values = np.zeros(len(span))
    values[mesh.start - span.start : mesh.stop - span.start] = np.repeat(stages, mesh.size // len(stages))
    return values


def _wire_s(mine: Floats, partners: Floats, operations: OperationCosts, per_node: int) -> Floats:
    """Of each rank's bytes over its links, from or to partners in proportion to theirs."""
    nodes = np.arange(len(mine)) // per_node
    near = np.bincount(nodes, weights=partners)[nodes] / partners.sum()
    within = 1 / operations.bandwidth(within_node=True)
    far = mine * (1 - near)
    # On one node there may be no price of what crosses nodes.
    across = 1 / operations.bandwidth(within_node=False) if far.any() else 0.0
    result: Floats = mine * near * within + far * across
    return result
