"""Brings a `MegatronBackend` from one program's copies to another's, between two iterations.

A part of the backend in a module of its own, and so at home in its attributes. Model by model: what goes is closed
before what comes is built, the home moves (a frozen one by a reallocation, a trained one by `move_training`), and at
the end every model rests where the new plan says. Layouts that no copy is in any more give their process groups back.

Invariants (tests/e2e/test_plan_change.py):
    - the run goes on with the numbers of a run under one plan;
    - the ledger holds what a backend built for the new program holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_real.hooks.replan import CopyChanges, check_change, copy_changes
from megatron_real.hooks.training_state import move_training
from megatron_real.plan import CopyKey
from megatron_real.process_groups import exchange
from megatron_real.program import Program
from megatron_real.realloc_ops.proof.versions import FROZEN_VERSION

if TYPE_CHECKING:
    from megatron_real.hooks.megatron_backend import MegatronBackend

__all__ = ["adopt"]


def adopt(backend: MegatronBackend, program: Program) -> None:
    """See `MegatronBackend.adopt`."""
    old = backend.program
    check_change(old.plan, program.plan, source="another plan for a run")
    changes = [copy_changes(model, old, program) for model in backend.roles]
    backend.program = program
    former = backend._parallel
    backend._parallel = {key: backend.layouts.build(key.mesh, key.layout) for key in program.copies()}
    backend.pairs.forget()  # other copies; and of pairs that stay, some may stream now
    for change in changes:
        rests = {_rests_on(old, change.model), _rests_on(program, change.model)}
        # Stores are filled anew: calls may be in other nodes.
        if change.moves or len(rests) > 1 or "node" in rests:
            _wake(backend, change)
        if program.graph.trained(change.model):
            _change_trained(backend, change)
        else:
            _change_frozen(backend, change)
        backend.rest(change.model)
    used = {key for change in changes for key in (*change.kept, *change.built)}
    for key in backend._tables.keys() - used:
        del backend._tables[key]
    for parallel in former.values():
        backend.layouts.destroy(parallel)


def _rests_on(program: Program, model: str) -> str:
    return program.plan.calls[program.graph.home_call(model).name].offload


def _wake(backend: MegatronBackend, change: CopyChanges) -> None:
    """Let a home be whole on its devices, wherever it rests under the old plan."""
    home = backend._copies.get(change.old_home)
    if home is None:
        return
    if home.trainable:
        home.reload_state()
    if change.model in backend.stores:
        backend.reload(change.old_home, "node", "weights")
    else:
        home.reload()


def _change_trained(backend: MegatronBackend, change: CopyChanges) -> None:
    for key in change.closed:
        _close(backend, key)
    built = list(change.built)
    if change.moves:
        source = backend._copies.pop(change.old_home, None)
        target = backend.add_copy(built.pop(0))
        move_training(
            source,
            target,
            backend._transport,
            group=backend._table_group,
            bucket_bytes=backend._bucket_bytes,
            ledger=backend.ledger,
        )
    for key in built:
        _add_empty(backend, key)


def _change_frozen(backend: MegatronBackend, change: CopyChanges) -> None:
    for key in change.closed:
        _close(backend, key)
    for key in change.built:
        _add_empty(backend, key)
    if not change.moves:
        return
    backend.realloc(change.old_home, change.new_home, _version(backend, change))
    backend.pairs.forget((change.old_home, change.new_home))
    if change.closes_old_home:
        _close(backend, change.old_home)
    elif change.old_home in backend._copies:
        backend.release(change.old_home)


def _version(backend: MegatronBackend, change: CopyChanges) -> int:
    """The version of an untrained model's weights, on all ranks. Collective over WORLD if it changes."""
    if not backend.program.graph.changes(change.model):
        return FROZEN_VERSION
    mine = backend.version(change.old_home) if change.old_home in backend._copies else None
    versions = exchange(mine, None, group=backend._table_group, what=f"version of {change.model}")
    return next(version for version in versions.values() if version is not None)


def _add_empty(backend: MegatronBackend, key: CopyKey) -> None:
    copy = backend.add_copy(key)
    if copy is not None:
        copy.free()


def _close(backend: MegatronBackend, key: CopyKey) -> None:
    copy = backend._copies.pop(key, None)
    if copy is not None:
        copy.close()
