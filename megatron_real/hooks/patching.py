"""Replace symbols of other packages, one by one, with a reason each, and put them back.

A `Patch` names one symbol, what stands in for it, why, and (where it is a function whose arguments we
forward) the parameters that we know. `apply_patches` checks all of that before it touches anything that it
cannot undo. `patch_on_import` does the same for modules that may not be imported yet, without importing them.

Invariants (tests/hooks/test_cpu_device.py):
    - a symbol that is missing or has other parameters stops with its dotted path and the installed versions;
    - when one patch of a list fails, those before it are undone;
    - applying a patch that is applied does nothing; undoing puts the very object back that was found.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_real.errors import MegatronCompatError

__all__ = [
    "Patch",
    "applied",
    "apply_patches",
    "cancel_on_import",
    "installed_versions",
    "is_applied",
    "patch_on_import",
    "require_parameters",
    "resolve",
    "undo_patches",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """One replaced symbol. Give `replacement`, or `factory` to build it from the original."""

    target: str
    """``dotted.module:attribute`` or ``dotted.module:Class.attribute``."""
    reason: str
    """Why the original does not do here."""
    replacement: Any = None
    factory: Callable[[Any], Any] | None = None
    """Called with what was found at `target`; returns the replacement."""
    parameters: tuple[str, ...] | None = None
    """Names of the original's parameters, where the replacement relies on them; None does not check."""
    optional: bool = False
    """A version without the symbol needs no patch."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


@dataclass(slots=True, kw_only=True)
class _Applied:
    owner: Any
    name: str
    original: Any
    """What the owner itself held (a descriptor for methods); meaningless when it inherited the symbol."""
    inherited: bool
    replacement: Any


_APPLIED: dict[Patch, _Applied] = {}


def installed_versions() -> str:
    """The versions that decide whether a symbol is there, for error texts."""
    found = []
    for name in ("megatron-core", "torch"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return ", ".join(found)


def resolve(target: str) -> tuple[Any, str]:
    """The object that holds `target` (a module or a class) and the attribute's name; imports the module.

    Raises:
        MegatronCompatError: the module or the symbol does not exist.
    """
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise MegatronCompatError(
            f"{target}: module {module_name} cannot be imported ({error}); expected to find it in "
            f"{installed_versions()}. Install a supported version (megatron-core 0.19)."
        ) from error
    *parents, name = path.split(".")
    for part in parents:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, name):
        raise MegatronCompatError(
            f"{target}: not found in {installed_versions()}. Install a supported version "
            "(megatron-core 0.19)."
        )
    return owner, name


def _check_parameters(patch: Patch, found: Any) -> None:
    if patch.parameters is None:
        return
    names = tuple(inspect.signature(found).parameters)
    if names != patch.parameters:
        raise MegatronCompatError(
            f"{patch.target}: found parameters ({', '.join(names)}), expected "
            f"({', '.join(patch.parameters)}) in {installed_versions()}. "
            "Install a supported version (megatron-core 0.19)."
        )


def _original_behind(found: Any) -> Any:
    """`found`, or what it stands in for when a module imported an already replaced symbol by name."""
    if callable(found):  # constants such as True are equal to many replacements
        for record in _APPLIED.values():
            if record.replacement is found and not record.inherited:
                return record.original
    return found


def _apply(patch: Patch) -> bool:
    """Apply one patch; False when there was nothing to do."""
    if patch in _APPLIED:
        return False
    try:
        owner, name = resolve(patch.target)
    except MegatronCompatError:
        if patch.optional:
            return False
        raise
    inherited = isinstance(owner, type) and name not in owner.__dict__
    raw = getattr(owner, name) if inherited or not isinstance(owner, type) else owner.__dict__[name]
    original = _original_behind(raw)
    same_target = [other for other, done in _APPLIED.items() if done.owner is owner and done.name == name]
    if same_target:
        original = raw  # patches on one symbol stack: the lower one is what this one has to put back
    _check_parameters(patch, getattr(original, "__func__", original))
    replacement = patch.factory(original) if patch.factory is not None else patch.replacement
    setattr(owner, name, replacement)
    _APPLIED[patch] = _Applied(
        owner=owner, name=name, original=original, inherited=inherited, replacement=replacement
    )
    return True


def _undo(patch: Patch) -> None:
    record = _APPLIED.pop(patch, None)
    if record is None:
        return
    if record.inherited:
        delattr(record.owner, record.name)
    else:
        setattr(record.owner, record.name, record.original)


def is_applied(patch: Patch) -> bool:
    """Whether `patch` is in force."""
    return patch in _APPLIED


def apply_patches(patches: Iterable[Patch]) -> tuple[Patch, ...]:
    """Apply `patches` in order; return those that were not in force before.

    Raises:
        MegatronCompatError: a symbol is missing or has other parameters; nothing of this call stays applied.
    """
    fresh: list[Patch] = []
    try:
        for patch in patches:
            if _apply(patch):
                fresh.append(patch)  # noqa: PERF401  # what was done so far is undone when one fails
    except BaseException:
        undo_patches(fresh)
        raise
    return tuple(fresh)


def undo_patches(patches: Sequence[Patch]) -> None:
    """Put the originals back, last patch first; patches that are not in force are passed over."""
    for patch in reversed(patches):
        _undo(patch)


@contextlib.contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[tuple[Patch, ...]]:
    """Apply `patches` for a block; those that were in force before stay in force after it."""
    fresh = apply_patches(patches)
    try:
        yield fresh
    finally:
        undo_patches(fresh)


class _PatchingLoader(importlib.abc.Loader):
    """Runs the module's own loader, then the patches that wait for the module."""

    def __init__(self, loader: Any, waiting: Callable[[], None]) -> None:
        self._loader = loader
        self._waiting = waiting

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # The module shall look as if this loader had never been there (inspect.getsource, pickling).
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._waiting()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module that patches wait for through the other finders, and wraps its loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Patch]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchingLoader(spec.loader, lambda: self._imported(fullname))
                return spec
        return None

    def _imported(self, fullname: str) -> None:
        apply_patches(self.waiting.pop(fullname, ()))


_FINDER = _Finder()


def patch_on_import(patches: Iterable[Patch]) -> tuple[Patch, ...]:
    """Apply the patches of modules that are imported now, the others when theirs is imported.

    Returns the patches that were applied at once and were not in force before.
    """
    now = []
    for patch in patches:
        if patch.module in sys.modules:
            now.append(patch)
        elif patch not in _FINDER.waiting.setdefault(patch.module, []):
            _FINDER.waiting[patch.module].append(patch)
    if _FINDER.waiting and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return apply_patches(now)


def cancel_on_import(patches: Sequence[Patch]) -> None:
    """Forget the patches that still wait for their module, and undo those that are in force."""
    for patch in patches:
        waiting = _FINDER.waiting.get(patch.module, [])
        if patch in waiting:
            waiting.remove(patch)
            if not waiting:
                del _FINDER.waiting[patch.module]
    if not _FINDER.waiting and _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    undo_patches(patches)


def require_parameters(target: str, names: Iterable[str]) -> None:
    """Check that the callable at `target` takes parameters of these `names`.

    Raises:
        MegatronCompatError: it does not exist or lacks some of them.
    """
    owner, name = resolve(target)
    found = tuple(inspect.signature(getattr(owner, name)).parameters)
    missing = [wanted for wanted in names if wanted not in found]
    if missing:
        raise MegatronCompatError(
            f"{target}: parameters {', '.join(missing)} are missing in {installed_versions()}; found "
            f"({', '.join(found)}). Install a supported version (megatron-core 0.19)."
        )
