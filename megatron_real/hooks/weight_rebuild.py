"""A trained copy's weights from the main parameters of its distributed optimizer, as after every optimizer step.

This rests on private functions of Megatron, so the first rebuild of a copy is compared with the weights that were
dropped.

Invariants (tests/hooks/test_model_copy.py):
    - the weights come back bit for bit, padding between parameters is zero;
    - a first rebuild that gives other weights is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_real.errors import RealError
from megatron_real.hooks.training_options import Training, reason_to_keep_weights, weights_stay
from megatron_real.realloc_ops.proof.checksums import sum_of
from megatron_real.realloc_ops.storage.segments import BufferSegments, SegmentSet

__all__ = ["WeightRebuild"]


class WeightRebuild:
    """Drops the weights of one copy and makes them again."""

    def __init__(
        self, subject: str, chunks: Sequence[Any], wrapped: Sequence[Any], optimizers: Sequence[Any]
    ) -> None:
        """Touches nothing.

        Args:
            subject: for messages.
            chunks: the unwrapped modules.
            wrapped: DDP around each.
            optimizers: the distributed optimizers that have the main parameters.
        """
        self._subject = subject
        self._chunks = chunks
        self._wrapped = wrapped
        self._optimizers = optimizers
        self._checksums: list[int] | None = None
        self._proven = False

    def require_possible(self, training: Training | None) -> None:
        """Refuse weights that could not be rebuilt; `training` is None for a frozen copy.

        Raises:
            PlanError: these.
        """
        if training is None:
            raise weights_stay(self._subject, "the copy is not trained and has no optimizer")
        reason = reason_to_keep_weights(self._chunks[0].config, training)
        if reason is None and not all(p.requires_grad for chunk in self._chunks for p in chunk.parameters()):
            reason = "some parameters are frozen and have no main parameter"
        if reason is None and not all(isinstance(part, DistributedOptimizer) for part in self._optimizers):
            reason = "the optimizer is not Megatron's distributed optimizer"
        if reason is not None:
            raise weights_stay(self._subject, reason)

    def drop(self, segments: SegmentSet | BufferSegments) -> None:
        """Free the weights."""
        self._checksums = None if self._proven else self._sum_bits()
        segments.free()

    @torch.no_grad()
    def rebuild(self, segments: SegmentSet | BufferSegments) -> None:
        """Allocate and fill the weights. Collective over the data-parallel group, with the copy's layout active.

        Raises:
            CapacityError: they do not fit.
            RealError: they are not what was dropped.
        """
        segments.allocate()
        for segment in segments.segments:
            segment.flat.zero_()  # also between the parameters, where nothing is copied to
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for ddp in self._wrapped:
            ddp.start_param_sync(force_sync=True)
        if self._checksums is not None:
            if self._checksums != self._sum_bits():
                raise RealError(
                    f"{self._subject}: weights rebuilt from the optimizer's main parameters differ from those that "
                    "were dropped. Set drop_trained_weights to false."
                )
            self._proven = True

    def _sum_bits(self) -> list[int]:
        """Of every parameter."""
        return [
            int(sum_of(parameter, parameter.dtype))
            for chunk in self._chunks
            for parameter in chunk.parameters()
        ]
