"""Process groups: made once, shared, counted, really destroyed; and meetings that name who did not come.

A group is identified by its ranks, backend and *purpose*. Users that work one after the other may share a
group; a purpose of its own keeps apart what runs at the same time (a layout's collectives, a realloc, a
transfer), because messages of one group match by order alone.

Making and destroying groups is collective over WORLD: every rank, member or not, makes the same calls in the
same order (torch names groups by a counter, so ranks that disagree would never find each other).

Invariants (tests/distributed/test_process_groups.py):
    - equal requests give the same object; it is destroyed when the last holder releases it;
    - a rank joins one group of its own (all groups of one rank are that one), however many are asked for;
    - a rank that does not come is named within the timeout.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_real.errors import PeerError, PlanError, RealError

__all__ = ["ProcessGroups", "default_store", "exchange", "rendezvous"]


def default_store() -> dist.Store:
    """The store that `torch.distributed` was initialised with.

    Calls on one store client block each other: a thread that must not wait needs a client of its own.
    """
    # torch has no public accessor.
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def _ranks_text(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def rendezvous(store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
    """Wait until all `ranks` have called with the same `name`, which may be used once per store.

    Collective over `ranks`.

    Raises:
        PeerError: some did not come within `timeout_s` seconds; the text names them.
    """
    keys = {other: f"megatron_real/rendezvous/{name}/{other}" for other in ranks}
    store.set(keys[rank], "here")
    began_s = time.monotonic()
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch raises DistStoreError, or plain RuntimeError from some stores
        waited_s = time.monotonic() - began_s
        absent = [other for other, key in keys.items() if not store.check([key])]
        if not absent:
            return  # the last one came between the timeout and the check
        raise PeerError(
            f"{name}: {_ranks_text(absent)} of {len(keys)} did not come within {waited_s:.0f} s "
            f"(rank {rank} waited; the limit is {timeout_s:g} s). All ranks "
            "must get here, in one order: look at the log of "
            f"{_ranks_text(absent)} first."
        ) from error


def exchange[T](mine: T, problem: Exception | None, *, group: dist.ProcessGroup, what: str) -> dict[int, T]:
    """One value of every rank, by global rank; where one has a problem instead, all ranks fail together.

    Collective over `group`, which may be of any backend that can gather objects.

    Args:
        mine: what this rank has to say; without meaning where there is a problem.
        problem: what it met on the way here, so that no rank waits for it in vain.
        group: who takes part.
        what: is being exchanged, for messages.

    Raises:
        PeerError: another rank has a problem or did not come; a rank that has one raises its own.
    """
    ranks = dist.get_process_group_ranks(group)
    gathered: list[Any] = [None] * len(ranks)
    text = None
    if problem is not None:
        text = str(problem) if isinstance(problem, RealError) else f"{type(problem).__name__}: {problem}"
    try:
        dist.all_gather_object(gathered, (text, None if text is not None else mine), group=group)
    except RuntimeError as error:
        if problem is not None:
            raise problem from error
        raise PeerError(
            f"{what}: ranks {ranks} could not meet ({error}). Look first at a rank that died or stopped."
        ) from error
    if problem is not None:
        raise problem
    failed = {rank: told for rank, (told, _) in zip(ranks, gathered, strict=True) if told is not None}
    if failed:
        rank = min(failed)
        raise PeerError(f"{what}: ranks {sorted(failed)} failed. Rank {rank}: {failed[rank]}")
    return {rank: found for rank, (_, found) in zip(ranks, gathered, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    ranks: tuple[int, ...]
    backend: str | None
    purpose: str


@dataclass(slots=True, kw_only=True)
class _Entry:
    group: dist.ProcessGroup
    holders: int


class ProcessGroups:
    """The process groups of this process beside WORLD.

    Args:
        timeout_s: limit for making a group, in seconds; the ranks that did not come are named.
        operation_timeout_s: limit for every collective on a group; None takes `timeout_s`.
    """

    def __init__(self, *, timeout_s: float = 600.0, operation_timeout_s: float | None = None) -> None:
        if not dist.is_initialized():
            raise PlanError(
                "process groups: torch.distributed is not initialised; call init_process_group before "
                "layouts are made."
            )
        self.timeout_s = timeout_s
        self.operation_timeout_s = timeout_s if operation_timeout_s is None else operation_timeout_s
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self._entries: dict[_Key, _Entry] = {}
        self._own: dict[str | None, dist.ProcessGroup] = {}
        self._meetings = 0

    def __len__(self) -> int:
        """How many groups of two or more ranks exist, counting those that this rank is no member of."""
        return len(self._entries)

    def rendezvous(self, name: str) -> None:
        """Wait until every rank of the world is here.

        Collective over WORLD.

        Raises:
            PeerError: naming the ranks that did not come within `timeout_s`, or came to another meeting.
        """
        self._meetings += 1
        rendezvous(
            default_store(),
            f"{name} (meeting {self._meetings})",
            range(self.world_size),
            self.rank,
            self.timeout_s,
        )

    def acquire(
        self, ranks: Iterable[int], *, purpose: str, backend: str | None = None, meet: bool = True
    ) -> dist.ProcessGroup:
        """The group of `ranks` for `purpose`, made if nobody holds it yet; give it back with `release`.

        Collective over WORLD: all ranks call with the same arguments in the same order.

        Args:
            ranks: global ranks, in any order.
            purpose: what the group is for; requests for other purposes get other groups.
            backend: as for `new_group`; None is the default group's.
            meet: rendezvous before a group is made. False when the caller has just done so.

        Returns:
            The group; ``GroupMember.NON_GROUP_MEMBER`` on ranks outside it, as `new_group` does (never None,
            which torch takes for WORLD).

        Raises:
            PeerError: a rank did not come in time.
            PlanError: the ranks are no set of ranks of this world.
        """
        key = self._key(ranks, backend, purpose)
        if len(key.ranks) == 1:
            return self._own_group(key)
        entry = self._entries.get(key)
        if entry is None:
            if meet:
                self.rendezvous(f"group {purpose} of {_ranks_text(key.ranks)}")
            entry = self._entries[key] = _Entry(group=self._new(key, local=False), holders=0)
        entry.holders += 1
        return entry.group

    def release(self, ranks: Iterable[int], *, purpose: str, backend: str | None = None) -> None:
        """Give back what `acquire` with the same arguments gave; the last holder destroys the group.

        Collective over WORLD. Whoever still has the group object keeps its sockets open until it drops it.
        """
        key = self._key(ranks, backend, purpose)
        if len(key.ranks) == 1:
            return
        entry = self._entries.get(key)
        if entry is None:
            raise PlanError(
                f"process groups: {purpose} group of {_ranks_text(key.ranks)} released more often than "
                "acquired."
            )
        entry.holders -= 1
        if entry.holders == 0:
            del self._entries[key]
            self._destroy(entry.group)

    def close(self) -> None:
        """Destroy every group, whoever holds it. Collective over WORLD."""
        for entry in reversed(self._entries.values()):
            self._destroy(entry.group)
        self._entries.clear()
        for group in self._own.values():
            self._destroy(group)
        self._own.clear()

    def _key(self, ranks: Iterable[int], backend: str | None, purpose: str) -> _Key:
        found = tuple(sorted(ranks))
        if not found or len(set(found)) != len(found) or found[0] < 0 or found[-1] >= self.world_size:
            raise PlanError(
                f"process groups: found ranks {list(found)} for {purpose}; expected distinct ranks of 0 to "
                f"{self.world_size - 1}."
            )
        return _Key(ranks=found, backend=backend, purpose=purpose)

    def _own_group(self, key: _Key) -> dist.ProcessGroup:
        """The group of one rank. Every rank makes its own at the first request, for whichever rank that is.

        So the counter by which torch names groups stays equal on all ranks. It is kept for good: of the
        singletons that a layout asks for (half of its groups) all are this one.
        """
        if key.backend not in self._own:
            own = _Key(ranks=(self.rank,), backend=key.backend, purpose="own")
            self._own[key.backend] = self._new(own, local=True)
        if key.ranks == (self.rank,):
            return self._own[key.backend]
        return dist.GroupMember.NON_GROUP_MEMBER

    def _new(self, key: _Key, *, local: bool) -> dist.ProcessGroup:
        return dist.new_group(
            ranks=list(key.ranks),
            timeout=datetime.timedelta(seconds=self.operation_timeout_s),
            backend=key.backend,
            use_local_synchronization=local,
            group_desc=f"megatron_real:{key.purpose}",
        )

    @staticmethod
    def _destroy(group: dist.ProcessGroup) -> None:
        if group != dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
            dist.destroy_process_group(group)
