"""Run unmodified megatron.core and megatron.training on CPU over gloo.

Megatron asks for CUDA by name in several hundred places. Here "cuda" is made to mean the CPU: torch's
factories and `Tensor.to` map the device, `torch.cuda` gets stand-ins, and the few places of Megatron that
need more are patched one by one. The patches are global and not a `TorchFunctionMode`: a mode is thread-local
and costs twice the time per operator. For development, tests and the demo; on a machine with CUDA nothing of
this is active.

`install_cpu_device` patches torch at once and each Megatron module when it is imported, so it must run before
tensors are asked for "on cuda", and works best before Megatron is imported. Every patch carries its reason in
its table.

Invariants (tests/hooks/test_cpu_device.py):
    - with `torch.cuda.is_available()`, `install_cpu_device` does nothing;
    - `uninstall_cpu_device` puts every symbol back.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch

from megatron_real.hooks.cpu_megatron import MEGATRON_PATCHES
from megatron_real.hooks.cpu_torch import TORCH_PATCHES
from megatron_real.hooks.patching import Patch, apply_patches, cancel_on_import, patch_on_import

__all__ = [
    "cpu_patches",
    "device",
    "install_cpu_device",
    "is_active",
    "uninstall_cpu_device",
]

_RNG_LOGGER = "megatron.core.tensor_parallel.random"
_NOISE = (
    r"User provided device_type of 'cuda', but CUDA is not available",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"Transformer Engine and Apex are not installed",
    r"Only transformer-engine>=[\d.]+ supports MoE experts",
    r"full scope is deprecated",
)

_active = False


class _DropRngWarning(logging.Filter):
    """Drops Megatron's warning that the CPU RNG moved in a "GPU" RNG context: here they are one stream."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


_RNG_FILTER = _DropRngWarning()


def cpu_patches() -> tuple[Patch, ...]:
    """Every patch of this device: torch's first, then Megatron's."""
    return (*TORCH_PATCHES, *MEGATRON_PATCHES)


def is_active() -> bool:
    """Whether "cuda" means the CPU in this process."""
    return _active


def device() -> torch.device:
    """The device that models live on: the current CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def install_cpu_device() -> bool:
    """Make "cuda" mean the CPU; idempotent. Returns whether it is active, which it never is beside real CUDA.

    Raises:
        MegatronCompatError: a symbol is missing or has other parameters; nothing stays patched.
    """
    global _active
    if torch.cuda.is_available():
        return False
    if _active:
        return True
    fresh = apply_patches(TORCH_PATCHES)
    try:
        patch_on_import(MEGATRON_PATCHES)
    except BaseException:
        cancel_on_import((*fresh, *MEGATRON_PATCHES))
        raise
    logging.getLogger(_RNG_LOGGER).addFilter(_RNG_FILTER)
    for text in _NOISE:
        warnings.filterwarnings("ignore", message=text)
    os.environ.setdefault(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1"
    )  # asserted by Megatron for tp > 1; no meaning here
    _active = True
    return True


def uninstall_cpu_device() -> None:
    """Put every symbol back; idempotent.

    Modules that imported a replaced symbol by name keep what they imported.
    """
    global _active
    if not _active:
        return
    cancel_on_import((*TORCH_PATCHES, *MEGATRON_PATCHES))
    logging.getLogger(_RNG_LOGGER).removeFilter(_RNG_FILTER)
    _active = False
