"""A trained model moves to another layout or window in memory: main parameters, Adam's moments, steps, schedule.

The optimizer's tensors are entries of an ordinary realloc table (`training_tensors`), and plan and executor of
`realloc_ops` move them. Weights do not travel: the target makes them from its main parameters, as after every
optimizer step. What is not a tensor goes in one exchange of objects.

Parameter groups are matched by what tells them apart in Megatron, except that experts lie in a group of their own only
where expert parallelism is on.

Invariants (tests/hooks/test_training_state.py):
    - main parameters and moments arrive bit for bit, as Megatron's own model-space state has them on either side;
    - training goes on with the losses of a run that did not move;
    - afterwards the source holds no memory, and the target has the source's version;
    - what cannot be moved is refused by name on every rank, before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import PlanError, RealError
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.training_tensors import optimizer_parts, training_shards
from megatron_real.process_groups import exchange
from megatron_real.realloc_ops.execution.executor import ReallocExecutor, ReallocReport
from megatron_real.realloc_ops.execution.transports import Transport
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES, build_realloc_plan
from megatron_real.realloc_ops.storage.local_shards import LocalShards, gather_tables

__all__ = ["move_training"]

_UNMATCHED = "is_expert_parallel"
"""Of what tells parameter groups apart, the one that depends on the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What a training state is beside tensors."""

    subject: str
    version: int
    groups: Mapping[tuple[Any, ...], Mapping[str, Any]]
    """Values of the parameter groups, by what tells them apart; groups without parameters here are among them."""
    step: int | None
    """Steps that Adam has counted; None on a rank that owns no parameter, or before the first step."""
    grad_scaler: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None


def move_training(
    source: ModelCopy | None,
    target: ModelCopy | None,
    transport: Transport,
    *,
    group: dist.ProcessGroup,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ledger: MemoryLedger | None = None,
) -> ReallocReport:
    """Bring a freshly built trained copy to the training state of another of the same model, and close that one.

    Collective over `group`, which has every rank of both meshes; ranks of neither pass None twice. Both copies hold
    their memory at the same time.

    Args:
        source: the copy that was trained so far, on this rank; its weights and state may be offloaded.
        target: the copy that is trained from now on, resident, with or without a learning rate schedule as the source.
        transport: over a group that serves reallocations only.
        group: any backend that can gather objects.
        bucket_bytes: the most bytes of a message.
        ledger: books the staging buffers.

    Raises:
        PlanError: the state of this optimizer cannot be moved, or the copies are of different models.
        PeerError: another rank failed, or did not come.
        CapacityError: no room for staging.
    """
    facts = _exchange_facts(source, group)
    tables, shards = [], []
    for copy, sends in ((source, True), (target, False)):
        mine: LocalShards | None = None
        entries: Any = ()
        try:
            if copy is not None:
                if not sends:
                    _take_facts(copy, facts)
                mine = training_shards(copy, moments=facts.step is not None, sends=sends)
                entries = mine.entries
        except RealError as error:
            entries = error
        tables.append(gather_tables(entries, group))
        shards.append(mine)
    plan = build_realloc_plan(tables[0], tables[1], bucket_bytes=bucket_bytes, rank=dist.get_rank())
    executor = ReallocExecutor(
        plan.of(dist.get_rank()),
        src=shards[0],
        dst=shards[1],
        transport=transport,
        ledger=ledger,
        name=f"training of {facts.subject}",
    )
    report = executor.run()
    if target is not None:
        _weights_from_main_parameters(target)
        target.stamp.set(facts.version)
    if source is not None:
        source.close()
    return report


# -- what is not a tensor ---------------------------------------------------------------------------------------------


def _exchange_facts(source: ModelCopy | None, group: dist.ProcessGroup) -> _Facts:
    mine: _Facts | None = None
    failure: RealError | None = None
    if source is not None:
        try:
            optimizer_parts(source)
            source.reload_state()
            source.require_state("moving it")
            source.reload()
            mine = _facts_of(source)
        except RealError as error:
            failure = error
    gathered = exchange(mine, failure, group=group, what="training state")
    found = [facts for facts in gathered.values() if facts is not None]
    if not found:
        raise PlanError(
            "training state: found no rank with a source; expected the ranks of the source's mesh."
        )
    return _together(found)


def _together(parts: Sequence[_Facts]) -> _Facts:
    steps = {facts.step for facts in parts if facts.step is not None}
    if len(steps) > 1:
        raise PlanError(
            f"training state: found parameters after {sorted(steps)} optimizer steps; expected one number for all."
        )
    groups: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for facts in parts:
        for identity, values in facts.groups.items():
            groups.setdefault(identity, values)
    return _Facts(
        subject=parts[0].subject,
        version=parts[0].version,
        groups=groups,
        step=next(iter(steps), None),
        grad_scaler=next((facts.grad_scaler for facts in parts if facts.grad_scaler is not None), None),
        scheduler=parts[0].scheduler,
    )


def _facts_of(copy: ModelCopy) -> _Facts:
    version = copy.stamp.version
    if version is None:
        raise RealError(f"copy {copy.key}: found no weights of any version; expected a trained copy.")
    parts = optimizer_parts(copy)
    scaler = next((part.grad_scaler for part in parts if part.grad_scaler is not None), None)
    return _Facts(
        subject=str(copy.key),
        version=version,
        groups={
            _identity(group): {name: value for name, value in group.items() if name != "params"}
            for part in parts
            for group in part.optimizer.param_groups
        },
        step=_step(copy, parts),
        grad_scaler=scaler.state_dict() if scaler is not None else None,
        scheduler=copy.scheduler.state_dict() if copy.scheduler is not None else None,
    )


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a parameter group from the others of its model, in whatever layout."""
    return tuple(
        group.get(name, group.get(f"pre_{name}"))
        for name in param_group_identifier_keys
        if name != _UNMATCHED
    )


def _step(copy: ModelCopy, parts: Iterable[Any]) -> int | None:
    """How many steps Adam has counted: torch's by parameter, TransformerEngine's and Apex's by group."""
    steps: set[int] = set()
    for part in parts:
        steps |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        steps |= {
            int(group["step"]) for group in part.optimizer.param_groups if group["params"] and "step" in group
        }
    if len(steps) > 1:
        raise PlanError(
            f"copy {copy.key}: found parameters after {sorted(steps)} optimizer steps; expected one number for all."
        )
    return next(iter(steps), None)


def _take_facts(copy: ModelCopy, facts: _Facts) -> None:
    """Give a fresh copy everything but tensors, and its optimizer room for the moments."""
    for part in optimizer_parts(copy):
        groups = []
        for group in part.optimizer.param_groups:
            values = facts.groups.get(_identity(group))
            if values is None:
                raise PlanError(
                    f"copy {copy.key}: found a parameter group {_identity(group)} that the source does not have; "
                    "expected the same optimizer options on both sides."
                )
            groups.append({**values, _UNMATCHED: group.get(_UNMATCHED), "step": facts.step})
        if facts.step is None:
            for group, values in zip(part.optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in values.items() if name != "step"})
        else:
            part.load_state_dict({"optimizer": {"param_groups": groups}, **_scaler(facts)})
    if (copy.scheduler is None) != (facts.scheduler is None):
        raise PlanError(
            f"copy {copy.key}: found {'no' if copy.scheduler is None else 'a'} learning rate schedule; expected it as "
            "on the source."
        )
    if copy.scheduler is not None:
        copy.scheduler.load_state_dict(dict(facts.scheduler or {}))


def _scaler(facts: _Facts) -> dict[str, Any]:
    return {} if facts.grad_scaler is None else {"grad_scaler": dict(facts.grad_scaler)}


@torch.no_grad()
def _weights_from_main_parameters(copy: ModelCopy) -> None:
    with copy.parallel.active():
        for part in optimizer_parts(copy):
            part._copy_main_params_to_model_params()
        for ddp in copy.wrapped:
            ddp.start_param_sync(force_sync=True)
