"""What Megatron keeps in module globals per layout, as values that can be taken and put back.

Two parts: the globals of `megatron.core.parallel_state`, and the few objects elsewhere that are bound to a
layout (RNG tracker, micro-batch calculator, communication buffers, the device's default generator).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state

__all__ = [
    "MICROBATCH_CALCULATOR",
    "RNG_TRACKER",
    "SideState",
    "blank_globals",
    "capture_globals",
    "capture_side",
    "restore_globals",
    "restore_side",
]

_STATE_NAME = re.compile(r"^_[A-Z]|^_global_process_group_list$")

RNG_TRACKER = "megatron.core.tensor_parallel.random:_CUDA_RNG_STATE_TRACKER"
MICROBATCH_CALCULATOR = "megatron.core.num_microbatches_calculator:_GLOBAL_NUM_MICROBATCHES_CALCULATOR"

_SIDE_STATE: dict[str, Callable[[], Any]] = {
    RNG_TRACKER: lambda: None,
    "megatron.core.tensor_parallel.random:_CUDA_RNG_STATE_TRACKER_INITIALIZED": lambda: False,
    MICROBATCH_CALCULATOR: lambda: None,
    # Buffers that Megatron binds to the first groups it sees.
    "megatron.core.transformer.moe.fused_a2a:_buffer": lambda: None,
    "megatron.core.inference.symmetric_memory:SymmetricMemoryManager._buffers": dict,
}
"""State outside `parallel_state` that belongs to a layout, with its value before there is any."""


@functools.cache
def _state_names() -> tuple[str, ...]:
    """All are assigned when the module is imported, so looking once is enough."""
    return tuple(name for name in vars(parallel_state) if _STATE_NAME.match(name))


def capture_globals() -> dict[str, Any]:
    """What `megatron.core.parallel_state` holds now, by name."""
    held = vars(parallel_state)
    return {name: held[name] for name in _state_names()}


def restore_globals(values: dict[str, Any]) -> None:
    """Put the objects of `capture_globals` back."""
    vars(parallel_state).update(values)


def blank_globals() -> dict[str, Any]:
    """The globals as they are when `parallel_state` has just been imported: None, and one empty dict."""
    return {name: {} if isinstance(value, dict) else None for name, value in capture_globals().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideState:
    """A layout's state outside `parallel_state`."""

    values: dict[str, Any] = field(default_factory=dict)
    """By ``module:attribute``; what is missing has its value from before there was any."""
    rng_state: torch.Tensor
    """The device's default generator: a tensor-parallel group must draw alike outside parallel regions."""


def _holders() -> Iterator[tuple[str, Any, str]]:
    """The entries of `_SIDE_STATE` whose module is loaded: key, holder, attribute name."""
    for key in _SIDE_STATE:
        module_name, _, path = key.partition(":")
        if module_name not in sys.modules:
            continue
        owner: Any = sys.modules[module_name]
        *parents, name = path.split(".")
        for part in parents:
            owner = getattr(owner, part)
        yield key, owner, name


def capture_side() -> SideState:
    """What Megatron and torch hold now outside `parallel_state`."""
    values = {key: getattr(owner, name) for key, owner, name in _holders()}
    return SideState(values=values, rng_state=torch.cuda.get_rng_state())


def restore_side(state: SideState) -> None:
    """Put the objects of `capture_side` back."""
    for key, owner, name in _holders():
        setattr(owner, name, state.values[key] if key in state.values else _SIDE_STATE[key]())
    torch.cuda.set_rng_state(state.rng_state)
