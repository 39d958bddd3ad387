"""What a Megatron model says that this rank holds, read by attribute: this package does not import Megatron.

A model is a chunk or a list of chunks, bare or inside DDP or `Float16Module`; None on ranks that hold none of it.

Invariants (tests/hooks/test_reallocator.py):
    - every parameter and persistent buffer of a model is described, or refused by name;
    - a parameter or buffer that was replaced since is refused by name;
    - a model is not kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_real.errors import PlanError, Problem, RealError, raise_problems
from megatron_real.realloc_ops.module_caches import refresh_caches
from megatron_real.realloc_ops.storage.local_shards import LocalShards, ShardedTensorLike, local_table

__all__ = ["Model", "ModelSide", "chunks_of", "sharded_tensors"]

type Model = torch.nn.Module | Sequence[torch.nn.Module]
"""One chunk, or the chunks of an interleaved pipeline stage."""


class ModelSide:
    """One of the two models of a reallocation, on this rank."""

    def __init__(
        self,
        what: str,
        model: Model | LocalShards | None,
        context: AbstractContextManager[Any] | None,
        real_rows: Mapping[str, int],
    ) -> None:
        self.what = what
        self.shards: LocalShards | None = model if isinstance(model, LocalShards) else None
        self._chunks: tuple[weakref.ref[torch.nn.Module], ...] = ()
        self._tensors: tuple[torch.Tensor, ...] = ()
        if model is not None and not isinstance(model, LocalShards):
            chunks = chunks_of(model)
            self.shards = _described(what, chunks, context, real_rows)
            self._chunks = tuple(map(weakref.ref, chunks))
            self._tensors = tuple(tensor for _, tensor in _owned_tensors(chunks))

    def require_unchanged(self) -> None:
        """Refuse to read or write tensors that the model no longer uses."""
        now = list(_owned_tensors(self._alive()))
        replaced = [
            name for (name, tensor), known in zip(now, self._tensors, strict=False) if tensor is not known
        ]
        if replaced or len(now) != len(self._tensors):
            where = replaced[0] if replaced else f"{len(now)} tensors where there were {len(self._tensors)}"
            raise RealError(
                f"{self.what}: found other tensors than when this Reallocator was made ({where}); expected the same "
                "parameter and buffer objects. Make a new Reallocator after replacing any."
            )

    def refresh_caches(self) -> None:
        refresh_caches(self._alive())

    def _alive(self) -> list[torch.nn.Module]:
        chunks = [chunk for reference in self._chunks if (chunk := reference()) is not None]
        if len(chunks) != len(self._chunks):
            raise RealError(
                f"{self.what}: the model is gone; expected it to live as long as its Reallocator is used."
            )
        return chunks


def chunks_of(model: Model) -> list[torch.nn.Module]:
    """The bare chunks of a model."""
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    return [_unwrapped(chunk) for chunk in chunks]


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Without DDP, `Float16Module` and the like: modules whose only child is called ``module``."""
    while list(module._modules) == ["module"] and module._modules["module"] is not None:
        module = module._modules["module"]
    return module


def _described(
    what: str,
    chunks: Sequence[torch.nn.Module],
    context: AbstractContextManager[Any] | None,
    real_rows: Mapping[str, int],
) -> LocalShards:
    sharded: list[ShardedTensorLike] = []
    with context if context is not None else nullcontext():
        for chunk in chunks:
            _settle_dtypes(chunk)
            sharded += sharded_tensors(what, chunk)
    owned = list(_owned_tensors(chunks))
    shards = local_table(sharded, owned, real_rows)
    _require_all(what, sharded, owned)
    return shards


def _settle_dtypes(chunk: torch.nn.Module) -> None:
    """Let routers put their bias into fp32 now, as they do in their first forward: it is planned as what it stays."""
    for module in chunk.modules():
        settle = getattr(module, "_maintain_float32_expert_bias", None)
        if callable(settle):
            settle()


def sharded_tensors(what: str, chunk: torch.nn.Module) -> Iterator[ShardedTensorLike]:
    """Megatron's own description of what this rank holds of a chunk; `data` are parameters or views of them.

    Args:
        what: the model, for errors.
        chunk: unwrapped. A process group that it does not know itself must be that of `parallel_state`.

    Raises:
        PlanError: it does not describe itself.
    """
    describe = getattr(chunk, "sharded_state_dict", None)
    if not callable(describe):
        raise PlanError(
            f"{what}: found a {type(chunk).__name__}; expected a module with Megatron's sharded_state_dict. Give the "
            "shards themselves (local_table) for other models."
        )
    metadata: dict[str, Any] = {"singleton_local_shards": False}
    groups = getattr(chunk, "pg_collection", None)
    data = next((getattr(groups, name) for name in ("dp_cp", "dp") if hasattr(groups, name)), None)
    if data is not None:
        metadata["dp_cp_group"] = data
    try:
        state = describe(metadata=metadata)
    except (AssertionError, AttributeError, RuntimeError) as error:
        raise PlanError(
            f"{what}: sharded_state_dict of {type(chunk).__name__} failed: {error}. If it misses a process group of "
            "parallel_state, give a context that shows this model's layout."
        ) from error
    yield from _leaves(state)


def _leaves(value: Any) -> Iterator[ShardedTensorLike]:
    """The sharded tensors in a sharded state dict, with factories built.

    Other entries are the ``_extra_state`` objects of modules: they hold nothing in the dtypes that are moved.
    """
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif hasattr(value, "build_fn"):
        yield from _leaves(value.build())
    elif isinstance(value, ShardedTensorLike):
        yield value


def _owned_tensors(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all parameters and persistent buffers."""
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield f"chunk {index}: {name}", parameter
        for prefix, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"chunk {index}: {prefix}.{name}", buffer


def _require_all(
    what: str, sharded: Iterable[ShardedTensorLike], owned: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Refuse a model with weights that its sharded state dict leaves out: they would stay as they are."""
    described = {_start(tensor.data) for tensor in sharded if tensor.data is not None}
    raise_problems(
        (
            Problem(
                path=name,
                found="nothing of it in the sharded state dict",
                expected="all parameters and persistent buffers",
                fix="Let its module describe it, or register the buffer as not persistent.",
            )
            for name, tensor in owned
            if tensor.numel() and _start(tensor) not in described
        ),
        subject=what,
    )


def _start(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins: a sharded tensor or its first part begins where its parameter does."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()
