"""A model that starts to compute while its weights still arrive.

Forward pre-hooks hold each module back until the stream has delivered the last wave that writes to it. Units are the
elements of a list of layers (decoder layers, layers of multi-token prediction), and outside of such lists the outermost
modules with parameters of their own: embeddings, the final norm, the output layer or a scalar head. Which wave a unit
waits for follows from its parameters and the plan, so layers are found by their global number whatever their place in
the pipeline, and a unit without moved weights waits for the beginning only.

Only for frozen models whose modules are called as modules: a CUDA graph replays kernels and no hooks.

Invariants (tests/hooks/test_streaming.py):
    - losses and generated tokens are bit-equal with and without a stream;
    - a unit's forward starts after its own weights arrived, and need not wait for those behind it;
    - what a unit keeps that is derived from its weights is refreshed before its first forward;
    - after `finish` the model has no hook of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from megatron_real.realloc_ops.execution.report import ReallocReport
from megatron_real.realloc_ops.module_caches import refresh_caches

__all__ = ["Gate", "WaveStream", "units"]

_BEGUN = -1
"""Before every wave: has arrived once the run has begun and zeroed padding, which may be all that a unit holds."""


class WaveStream(Protocol):
    """What a gate needs of `realloc_ops.streaming.Stream`."""

    def wait(self, wave: int) -> None:
        """Return when the wave is here."""
        ...

    def wave_of(self, tensor: torch.Tensor) -> int | None:
        """The last wave that writes to a tensor; None if none does."""
        ...

    def finish(self) -> ReallocReport:
        """Return when all is here."""
        ...


def units(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that wait for their weights one by one; together they hold all parameters and persistent buffers."""
    if any(True for _ in _own_tensors(module)):
        yield module
        return
    for child in module.children():
        if isinstance(module, torch.nn.ModuleList) and next(_tensors(child), None) is not None:
            yield child
        else:
            yield from units(child)


class Gate:
    """Holds the modules of one copy on this rank back until their weights are here."""

    def __init__(self, chunks: Sequence[torch.nn.Module], stream: WaveStream) -> None:
        """Register the hooks. No collective; `stream` was started with `chunks` as its destination.

        Args:
            chunks: the unwrapped modules, one per virtual pipeline stage.
            stream: a reallocation under way.
        """
        self._stream = stream
        self._handles: dict[torch.nn.Module, RemovableHandle] = {}
        for chunk in chunks:
            for unit in units(chunk):
                waves = [wave for tensor in _tensors(unit) if (wave := stream.wave_of(tensor)) is not None]
                self._hold(unit, max(waves, default=_BEGUN))

    @property
    def closed(self) -> int:
        """How many units have not been entered yet."""
        return len(self._handles)

    def finish(self) -> ReallocReport:
        """Remove the hooks and return when everything is here and sent. On this rank; call it also after an error.

        Raises:
            RealError: what the run raised.
        """
        for handle in self._handles.values():
            handle.remove()
        waiting = tuple(self._handles)
        self._handles.clear()
        report = self._stream.finish()
        refresh_caches(waiting)
        return report

    def _hold(self, unit: torch.nn.Module, wave: int) -> None:
        def enter(module: torch.nn.Module, _: object) -> None:
            self._stream.wait(wave)
            self._handles.pop(module).remove()
            refresh_caches([module])

        self._handles[unit] = unit.register_forward_pre_hook(enter)


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and persistent buffers of the module itself."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The same of the module and all below it."""
    for each in module.modules():
        yield from _own_tensors(each)
