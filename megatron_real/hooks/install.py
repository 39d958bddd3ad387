"""`install()`: make Megatron know `--real-plan`, in whatever order things are imported.

Three ways lead here: the flag alone (`megatron_real.pth`), ``python -m megatron_real script.py``, and
``import megatron_real.auto``. Nothing heavy is imported: Megatron's modules are patched when they are imported, and on
a machine without CUDA the CPU stands in for it from the moment at which Megatron is first imported.

Patched:
    - ``megatron.training.arguments.add_megatron_arguments``: it is where every script's parser comes from;
    - ``megatron.training.arguments.validate_args``: it runs before anything depends on the layout, and unlike
      ``parse_args`` its result cannot be overwritten by arguments from a checkpoint.

Not patched: `--yaml-cfg`, which goes past both (and is refused together with a plan).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType

from megatron_real.errors import RealError
from megatron_real.hooks.arguments import wrap_add_arguments, wrap_validate_args
from megatron_real.hooks.patching import Patch, cancel_on_import, patch_on_import

__all__ = ["ARGUMENT_PATCHES", "install", "is_installed", "report_error", "uninstall"]

ARGUMENT_PATCHES = (
    Patch(
        target="megatron.training.arguments:add_megatron_arguments",
        factory=wrap_add_arguments,
        reason="adds the group of --real-* flags",
        parameters=("parser",),
    ),
    Patch(
        target="megatron.training.arguments:validate_args",
        factory=wrap_validate_args,
        reason="writes the plan's layout into the arguments before they are validated",
        parameters=("args", "defaults"),
    ),
)
_FIRST_IMPORTS = ("megatron.core", "megatron.training")


class _DeviceBeforeMegatron(importlib.abc.MetaPathFinder):
    """Finds nothing: it makes the CPU stand in for CUDA when Megatron is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _FIRST_IMPORTS and self in sys.meta_path:
            sys.meta_path.remove(self)  # before torch is imported, which may ask again
            _install_device()
        return None


_DEVICE_FINDER = _DeviceBeforeMegatron()
_installed = False


def install() -> None:
    """Make Megatron know the `--real-*` flags and follow `--real-plan`; idempotent, and cheap until Megatron is used.

    Raises:
        MegatronCompatError: Megatron is already imported, and a symbol is missing or has other parameters. If it is
            imported later, its import raises that.
    """
    global _installed
    if _installed:
        return
    patch_on_import(ARGUMENT_PATCHES)
    if any(name in sys.modules for name in _FIRST_IMPORTS):
        _install_device()
    else:
        sys.meta_path.insert(0, _DEVICE_FINDER)
    sys.excepthook = _excepthook
    _installed = True


def is_installed() -> bool:
    """Whether `install` ran in this process."""
    return _installed


def uninstall() -> None:
    """Undo `install`, for tests. A device that already stands in for CUDA stays: models may live on it."""
    global _installed
    cancel_on_import(ARGUMENT_PATCHES)
    if _DEVICE_FINDER in sys.meta_path:
        sys.meta_path.remove(_DEVICE_FINDER)
    if sys.excepthook is _excepthook:
        sys.excepthook = sys.__excepthook__
    _installed = False


def report_error(error: RealError) -> None:
    """Write an error that a user can act on to stderr, without a traceback, with the rank where there are several.

    Every rank writes it: a launcher may end the others before the first one gets to it.
    """
    rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    who = f"[rank {rank}] " if rank is not None else ""
    sys.stderr.write(f"{who}{type(error).__name__}: {error}\n")
    sys.stderr.flush()


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if isinstance(value, RealError):
        report_error(value)
    else:
        sys.__excepthook__(kind, value, trace)


def _install_device() -> None:
    from megatron_real.hooks.cpu_device import install_cpu_device

    install_cpu_device()
