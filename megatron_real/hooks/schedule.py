"""Run padded micro-batches through Megatron's pipeline schedules, each in its own shape.

Megatron's schedules want one shape for all micro-batches, or exchange shapes before every tensor; the exchange costs a
message each way and pairs up the wrong shapes when two stages are each other's both neighbours (pp=2, interleaved).
Here every rank knows the lengths of all micro-batches and the order in which a schedule receives them, so shapes are
looked up instead: nothing is padded to the longest micro-batch and nothing is sent.

Invariants (tests/hooks/test_forward.py):
    - outputs and gradients equal those of one rank, with micro-batches of different shapes, with and without
      interleaving, whatever the number of micro-batches that the schedule takes;
    - after a pass, every shape was used exactly once.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_real.batch import Batch
from megatron_real.errors import PlanError
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.padding import PaddedMicrobatch, pad_microbatch
from megatron_real.hooks.patching import require_parameters

__all__ = ["ForwardStep", "is_last_stage", "pad_all", "run_schedule"]

ForwardStep = Callable[[Iterator[PaddedMicrobatch], Any], tuple[Any, Callable[..., Any]]]
"""``(micro-batches, model chunk) -> (output, function of the output)``, as Megatron's schedules call it."""

_COMMUNICATE_SHAPES = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes"


def is_last_stage(copy: ModelCopy) -> bool:
    """Whether this rank computes the head."""
    groups = copy.parallel.pg_collection
    assert groups is not None
    last: bool = groups.pp.rank() == groups.pp.size() - 1
    return last


def pad_all(copy: ModelCopy, batch: Batch, microbatches: Sequence[Sequence[int]]) -> list[PaddedMicrobatch]:
    """All micro-batches of a pass, padded for the copy's layout."""
    layout = copy.parallel.layout
    device = next(copy.chunks[0].parameters()).device
    multiple = layout.tp if layout.sp else 1
    return [pad_microbatch(batch, ids, multiple=multiple, device=device) for ids in microbatches]


def run_schedule(
    copy: ModelCopy,
    chunks: Sequence[Any],
    forward_step: ForwardStep,
    microbatches: Sequence[PaddedMicrobatch],
    *,
    train: bool,
) -> list[Any]:
    """One forward, or forward and backward, pass; under the copy's active layout.

    Collective over the copy's model-parallel ranks, and with `train` over its data-parallel ranks too.

    Args:
        copy: the model.
        chunks: its modules, wrapped if they are trained.
        forward_step: see `ForwardStep`.
        microbatches: in order.
        train: run the backward pass and reduce gradients.

    Returns:
        On the last stage what the function of the output returned for each micro-batch; empty elsewhere.

    Raises:
        PlanError: the interleaved schedule does not take this number of micro-batches.
    """
    layout, groups = copy.parallel.layout, copy.parallel.pg_collection
    interleaved = layout.vpp > 1
    if interleaved and len(microbatches) % layout.pp:
        raise PlanError(
            f"copy {copy.key}: found {len(microbatches)} micro-batches with vpp={layout.vpp}; expected a multiple of "
            f"pp={layout.pp}. Change num_microbatches, or set vpp to 1."
        )
    run = get_forward_backward_func(layout.pp, layout.vpp if interleaved else None)
    iterators = [iter(microbatches) for _ in chunks]
    communicator = _Communicator(copy, microbatches) if layout.pp > 1 else None
    copy.parallel.set_num_microbatches(len(microbatches))
    outputs: list[Any] = run(
        forward_step_func=forward_step,
        data_iterator=iterators if interleaved else iterators[0],
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=microbatches[0].length,  # these two are not used: shapes come from the communicator
        micro_batch_size=microbatches[0].num_rows,
        forward_only=not train,
        collect_non_loss_data=not train,
        p2p_communicator=communicator,
        pg_collection=groups,
    )
    if communicator is not None:
        communicator.finish(train=train)
    return outputs


class _Communicator(P2PCommunicator):
    """Megatron's communicator, but receiving each micro-batch in its own shape, known beforehand."""

    def __init__(self, copy: ModelCopy, microbatches: Sequence[PaddedMicrobatch]) -> None:
        groups, layout = copy.parallel.pg_collection, copy.parallel.layout
        assert groups is not None
        require_parameters(
            _COMMUNICATE_SHAPES, ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
        )
        config = copying.copy(copy.config)
        config.variable_seq_lengths = True  # makes the base class ask `_communicate_shapes`
        super().__init__(groups.pp, config)
        split = layout.tp if layout.sp else 1
        shapes = [(one.length // split, one.num_rows, config.hidden_size) for one in microbatches]
        group_size = config.microbatch_group_size_per_vp_stage if layout.vpp > 1 else len(shapes)
        # The first stage receives no inputs of its first chunk, the last no gradients of its last.
        self._forward = _receive_order(shapes, layout.vpp - self.is_pp_first_stage, group_size)
        self._backward = _receive_order(shapes, layout.vpp - self.is_pp_last_stage, group_size)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Sequence[int], Sequence[int]]:
        return (
            next(self._forward) if recv_prev else (0, 0, 0),
            next(self._backward) if recv_next else (0, 0, 0),
        )

    def finish(self, *, train: bool) -> None:
        """Check that the schedule received as often as we thought it would."""
        left = (self._forward, self._backward) if train else (self._forward,)
        assert all(next(shapes, None) is None for shapes in left), (
            "the schedule received less than its stages sent"
        )


def _receive_order(
    shapes: Sequence[tuple[int, int, int]], num_chunks: int, group_size: int
) -> Iterator[tuple[int, int, int]]:
    """Shapes as a stage receives them: a group of micro-batches through each of its chunks, then the next group."""
    for start in range(0, len(shapes), group_size):
        for _ in range(num_chunks):
            yield from shapes[start : start + group_size]
