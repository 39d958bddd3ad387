"""The optimizer's state of a trained copy as boxes of global tensors: table entries and views.

Megatron's distributed optimizer owns flat ranges of DDP's buffers, cut by data-parallel rank and not by tensor. Inside
the box of a sharded tensor such a range is row-major, so it is a few boxes (`Box.split`). The state of a parameter
``KEY`` is entries ``optimizer.main.KEY``, ``optimizer.exp_avg.KEY`` and ``optimizer.exp_avg_sq.KEY``, whose data are
views of the optimizer's own tensors. What the optimizer does not own, frozen parameters and persistent buffers, keeps
its key.

Invariants (tests/hooks/test_training_state.py):
    - over all ranks the boxes hold what Megatron's own model-space state holds, bit for bit;
    - `flat_boxes` cuts a range into boxes that are contiguous in the whole one, in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_real.errors import PlanError, Problem, raise_problems
from megatron_real.hooks.model_builder import sharded_tensors
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.training_options import reason_to_stay, training_stays
from megatron_real.realloc_ops.planning.shards import Box
from megatron_real.realloc_ops.storage.local_shards import LocalShards, ShardPart, local_table

__all__ = ["flat_boxes", "optimizer_parts", "training_shards"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_parts(copy: ModelCopy) -> list[Any]:
    """The distributed optimizers of a copy: one, or one for experts beside it.

    Raises:
        PlanError: it is another optimizer, or its state cannot be moved.
    """
    if copy.optimizer is None:
        raise PlanError(f"copy {copy.key}: found a frozen copy; expected a trained one.")
    parts = list(getattr(copy.optimizer, "chained_optimizers", [copy.optimizer]))
    others = [type(part).__name__ for part in parts if not isinstance(part, DistributedOptimizer)]
    if others:
        reason: str | None = f"the optimizer is a {others[0]}, not Megatron's DistributedOptimizer"
    else:
        reason = reason_to_stay(parts[0].config, parts[0].ddp_config)
    if reason is not None:
        raise training_stays(f"copy {copy.key}", reason)
    return [part for part in parts if not part.is_stub_optimizer]


def training_shards(copy: ModelCopy, *, moments: bool, sends: bool) -> LocalShards:
    """Table entries and views of this rank's part of a copy's training state.

    Args:
        copy: a trained copy, resident.
        moments: with Adam's moments, which are there after a first step.
        sends: leave out what another pipeline stage has too (tied embeddings): stages cut it differently.

    Raises:
        PlanError: listing each tensor that cannot be moved.
    """
    finder = _Finder(sharded_tensors(copy.chunks, copy.parallel))
    problems: list[Problem] = []
    pieces: list[ShardPart] = []
    flats: list[tuple[str, torch.Tensor]] = []
    for part in optimizer_parts(copy):
        finder.claim(parameter for buffer in part.buffers for parameter in buffer.param_index_map)
        for parameter, main in _owned(part):
            tensors = finder.inside(parameter)
            problem = _uncovered(parameter, tensors)
            if problem is not None:
                problems.append(problem)
                continue
            state = {"main": main.detach().view(-1)}
            if moments:
                state |= {name: part.optimizer.state[main][name].view(-1) for name in _MOMENTS}
            flats += state.items()
            owned = part._get_model_param_range_map(parameter)["param"]
            for tensor in tensors:
                if not (sends and _is_repeated(tensor)):
                    pieces += _pieces_of(tensor, parameter, (owned.start, owned.end), state)
    raise_problems(problems, subject=f"training state of {copy.key}")
    for tensor in finder.unclaimed():
        flats.append((tensor.key, tensor.data))
        pieces.append(tensor)
    return local_table(pieces, flats)


class _Finder:
    """Finds the sharded tensors that are views of a parameter."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._by_storage: dict[int, list[Any]] = {}
        for tensor in tensors:
            self._by_storage.setdefault(tensor.data.untyped_storage()._cdata, []).append(tensor)
        self._starts: dict[int, list[int]] = {}
        for storage, found in self._by_storage.items():
            found.sort(key=lambda tensor: int(tensor.data.storage_offset()))
            self._starts[storage] = [tensor.data.storage_offset() for tensor in found]
        self._claimed: set[int] = set()

    def inside(self, parameter: torch.Tensor) -> list[Any]:
        """In the order of memory."""
        storage, first = parameter.untyped_storage()._cdata, parameter.storage_offset()
        starts = self._starts.get(storage, [])
        span = slice(bisect_left(starts, first), bisect_left(starts, first + parameter.numel()))
        return self._by_storage.get(storage, [])[span]

    def claim(self, parameters: Iterable[torch.Tensor]) -> None:
        """The optimizer holds the state of these, on this rank or another one."""
        for parameter in parameters:
            self._claimed |= {id(tensor) for tensor in self.inside(parameter)}

    def unclaimed(self) -> Iterator[Any]:
        for found in self._by_storage.values():
            yield from (tensor for tensor in found if id(tensor) not in self._claimed)


def _uncovered(parameter: torch.Tensor, tensors: Sequence[Any]) -> Problem | None:
    """Row-major ranges of a parameter must be row-major ranges of its sharded tensors."""
    key = tensors[0].key if tensors else f"a parameter of shape {list(parameter.shape)}"
    if sum(tensor.data.numel() for tensor in tensors) != parameter.numel():
        return Problem(path=key, found="sharded tensors of a part of it", expected="all of it, once")
    if not all(tensor.data.is_contiguous() for tensor in tensors):
        return Problem(path=key, found="a strided view of a parameter", expected="whole rows of it")
    return None


def _is_repeated(tensor: Any) -> bool:
    """Whether another pipeline stage holds the same values and counts as their owner."""
    replica = getattr(tensor, "replica_id", 0)
    return isinstance(replica, tuple) and len(replica) == 3 and replica[0] != 0


def _owned(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of which this rank owns a range, with the main parameters of that range."""
    for parameters, mains in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for group, shards in zip(parameters, mains, strict=True):
            yield from zip(group, shards, strict=True)


def _pieces_of(
    tensor: Any, parameter: torch.Tensor, owned: tuple[int, int], state: Mapping[str, torch.Tensor]
) -> Iterator[ShardPart]:
    """The boxes of `tensor` that lie in the `owned` range of `parameter`, once per entry of `state`."""
    begin = tensor.data.storage_offset() - parameter.storage_offset()
    first, stop = max(owned[0], begin), min(owned[1], begin + tensor.data.numel())
    if first >= stop:
        return
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.data.shape)
    whole = Box(tuple(map(int, tensor.global_offset)), shape)
    position = first - owned[0]
    for box in flat_boxes(whole, first - begin, stop - begin):
        rows = slice(position, position + box.num_elements)
        position = rows.stop
        for name, flat in state.items():
            yield ShardPart(
                key=f"optimizer.{name}.{tensor.key}",
                data=flat[rows].view(box.shape),
                local_shape=box.shape,
                global_shape=tuple(map(int, tensor.global_shape)),
                global_offset=box.offset,
            )


def flat_boxes(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """Elements [start, stop) of `box` in row-major order, as boxes in that order; each is contiguous in `box`."""
    tail = box.split(start)[1]
    head: list[Box] = []
    left = stop - start
    for part in tail:
        if left <= 0:
            break
        head += part.split(left)[0]
        left -= part.num_elements
    return tuple(head)
