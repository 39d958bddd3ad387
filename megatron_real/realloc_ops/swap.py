"""`swap_model_weights`: what Megatron's function of this name does, with a plan for each pair of models.

Invariants (tests/hooks/test_reallocator.py):
    - it never uses the plan of another pair of models, also on ranks that hold one side or none;
    - later calls of a pair use no object collective and plan nothing;
    - it keeps no model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_real.errors import ConfigError, RealError
from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.model_shards import Model, chunks_of
from megatron_real.realloc_ops.models import Reallocator, ReallocOptions, world_group

__all__ = ["swap_model_weights"]


def swap_model_weights(  # noqa: PLR0913  # the parameters of megatron.core.resharding.swap_model_weights
    src_model: Model | None,
    target_model: Model | None,
    refit_method: object = None,
    group: dist.ProcessGroup | None = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    transform: object = None,
    num_dst_pools: int = 1,
    dst_pool_index: int = 0,
    *,
    options: ReallocOptions | None = None,
) -> ReallocReport:
    """Copy the weights of `src_model` to `target_model`: takes the place of Megatron's function of this name.

    Collective over `group`: all its ranks call, with None for what they do not hold. The first call of a pair of models
    plans; later ones only agree on the pair (one small tensor) and move. Plans go with their models.

    Args:
        refit_method: without meaning; the backend of `group` carries the messages.
        group: see `Reallocator`; if a run fails over a group that was given, give another one next time.
        src_rank_offset: must be 0: ranks are those of one `torch.distributed` world.
        dst_rank_offset: the same.
        transform: must be None: formats are not converted.
        num_dst_pools: without meaning; one pass fills all pools, and sends to each what it needs.
        dst_pool_index: the same.
        options: how to move; not part of Megatron's signature.

    Raises:
        ConfigError: an argument that cannot be honoured; on the rank that gave it.
        RealError: as `Reallocator` and its `run`.
    """
    if src_rank_offset or dst_rank_offset or transform is not None:
        raise ConfigError(
            f"swap_model_weights: found rank offsets {src_rank_offset} and {dst_rank_offset}, and "
            f"transform={transform!r}; expected 0, 0 and None. Join one torch.distributed world, and convert formats "
            "after the move."
        )
    everyone = group if group is not None else world_group()
    pairs = _PAIRS.setdefault(everyone, [])
    for pair in pairs:
        pair.sweep()
    wanted = _Pair(src_model, target_model, options)
    known = _common_pair(pairs, wanted, everyone)
    if known is None:
        wanted.reallocator = Reallocator(src_model, target_model, group=group, options=options)
        pairs.append(wanted)
        known = wanted
    assert known.reallocator is not None, "a pair that was agreed on is alive"
    try:
        return known.reallocator.run()
    except RealError:
        known.drop()
        raise


class _Pair:
    """Two models, as this rank sees them, with their reallocator; it goes when either model does."""

    def __init__(self, src: Model | None, dst: Model | None, options: ReallocOptions | None) -> None:
        self._identity = tuple(
            tuple(weakref.ref(chunk, self.drop) for chunk in chunks_of(side)) if side is not None else None
            for side in (src, dst)
        )
        self._options = options
        self._ids = tuple(
            tuple(map(id, chunks_of(side))) if side is not None else None for side in (src, dst)
        )
        self.reallocator: Reallocator | None = None
        self._dropped: list[dist.ProcessGroup] = []

    def serves(self, other: _Pair) -> bool:
        return self.reallocator is not None and (self._ids, self._options) == (other._ids, other._options)

    def drop(self, _: object = None) -> None:
        """Give the reallocator up, and the tensors that it holds, at once."""
        if self.reallocator is not None and self.reallocator.own_group is not None:
            self._dropped.append(self.reallocator.own_group)
        self.reallocator = None

    def sweep(self) -> None:
        """Give process groups back, at a time when no run is under way."""
        while self._dropped:
            dist.destroy_process_group(self._dropped.pop())


_PAIRS: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Pair]] = weakref.WeakKeyDictionary()
"""By group, the pairs that were swapped, in an order that is the same on all its ranks."""


def _common_pair(pairs: Sequence[_Pair], wanted: _Pair, group: dist.ProcessGroup) -> _Pair | None:
    """The pair that all ranks mean. Collective over `group`.

    A rank that holds one side, or none, cannot tell pairs apart that differ on the other; all ranks together can.
    """
    if not pairs:
        return None
    on_cuda = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    possible = torch.tensor([pair.serves(wanted) for pair in pairs], dtype=torch.int32, device=device)
    dist.all_reduce(possible, op=dist.ReduceOp.MIN, group=group)
    numbers = possible.nonzero().flatten().tolist()
    return pairs[numbers[-1]] if numbers else None
