"""Who is alive, who is not, and who is to blame: the rules of liveness, without threads, stores or clocks.

Rank 0 hears the heartbeats of all ranks; every other rank hears those of rank 0. Every rank looks at the
processes of its host. Times are seconds on the caller's clock.

Invariants (tests/unit/runtime/test_watch.py):
    - no rank leaves before rank 0 has said that all are done; after that nobody is blamed;
    - a process that is gone is blamed only when rank 0 has been heard once more since: all may have been done;
    - a rank that waits for an instruction that still makes progress is not stuck, nor is one whose heartbeat tells
      of its progress a little later than that of the rank that it waited for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self

from megatron_real.runtime.liveness.processes import ProcessState
from megatron_real.runtime.liveness.progress import Position

__all__ = ["Beat", "Failure", "FailureKind", "Limits", "Watch"]


_STUCK_BEATS = 4
"""Heartbeats for which ranks must look stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """After how long something is wrong, in seconds."""

    beat_s: float = 1.0
    """Between two heartbeats."""
    dead_after_s: float = 12.0
    """A rank that gave no heartbeat for this long, or a store that gave no answer, is dead or stopped."""
    stuck_after_s: float = 600.0
    """An instruction without progress for this long is stuck."""
    join_s: float = 180.0
    """A rank that has not come after this long is missing."""
    linger_s: float = 3.0
    """How long a failing rank waits for the others to learn of the failure."""


class FailureKind(StrEnum):
    """What went wrong."""

    DEAD = "dead"
    """The process ended without finishing."""
    SILENT = "silent"
    """No heartbeat: stopped, or its host is unreachable."""
    STUCK = "stuck"
    """No progress in one instruction."""
    RAISED = "raised"
    """An exception."""
    MISSING = "missing"
    """It never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the job ends."""

    kind: FailureKind
    ranks: tuple[int, ...]
    """The culprits."""
    iteration: int
    """Of the first culprit's instruction; -1 before the first."""
    instruction: str
    """That the first culprit was in; empty between instructions."""
    reason: str
    detected_by: int

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        where = "before the first instruction" if self.iteration < 0 else f"in iteration {self.iteration}"
        if self.iteration >= 0:
            where += f", {self.instruction or 'between two instructions'}"
        return f"{who} {where}: {self.reason}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        values = json.loads(text)
        return cls(**{**values, "kind": FailureKind(values["kind"]), "ranks": tuple(values["ranks"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat of a rank."""

    count: int
    position: Position
    done: bool = False
    """The rank has finished its work."""
    all_done: bool = False
    """Of rank 0: every rank has finished its work."""

    def to_json(self) -> str:
        values = {
            "count": self.count,
            "position": self.position.to_json(),
            "done": self.done,
            "all_done": self.all_done,
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        values = json.loads(text)
        return cls(**{**values, "position": Position.from_json(values["position"])})


@dataclass(slots=True)
class _Peer:
    beat: Beat | None = None
    beat_at: float = 0.0
    progress_at: float = 0.0
    state: ProcessState = ProcessState.ALIVE
    position: Position | None = None
    """Read from the process itself, which is fresher than the heartbeat."""
    heard_since_gone: bool = False

    @property
    def done(self) -> bool:
        return self.beat is not None and self.beat.done

    @property
    def last_position(self) -> Position:
        if self.position is not None:
            return self.position
        return self.beat.position if self.beat is not None else Position()


class Watch:
    """What one rank knows of the others. Not thread-safe."""

    def __init__(
        self, rank: int, world_size: int, limits: Limits, *, launcher_serves_store: bool = False
    ) -> None:
        self._rank = rank
        self._limits = limits
        self._launcher_serves_store = launcher_serves_store
        self._peers = {other: _Peer() for other in range(world_size)}
        self._answered_at = 0.0
        self._store_error = ""
        self._stuck_at: tuple[tuple[int, int], ...] = ()
        self._stuck_since = 0.0

    def store_answered(self, now: float) -> None:
        """The store answered at `now`."""
        self._answered_at = now

    def store_failed(self, error: str) -> None:
        """The connection to the store broke."""
        self._store_error = error

    def store_gone(self, now: float) -> bool:
        """Whether the store is out of reach."""
        return bool(self._store_error) or now - self._answered_at > self._limits.dead_after_s

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """Take in the heartbeat of `rank` that was in the store at `now`."""
        peer = self._peers[rank]
        if peer.beat is None or beat.count != peer.beat.count:
            peer.beat_at = now
        if peer.beat is None or beat.position.serial != peer.beat.position.serial:
            peer.progress_at = now
        peer.beat = beat

    def see(self, rank: int, state: ProcessState, position: Position | None) -> None:
        """Take in a look at the process of `rank`, of this host."""
        self._peers[rank].state = state
        self._peers[rank].position = position or self._peers[rank].position

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks whose process is gone; rank 0 has not been heard since."""
        return tuple(
            rank
            for rank, peer in self._peers.items()
            if peer.state is ProcessState.GONE and not peer.heard_since_gone
        )

    def confirm(self, suspects: tuple[int, ...]) -> None:
        """Rank 0 has been heard since these `suspects` were found gone."""
        for rank in suspects:
            self._peers[rank].heard_since_gone = True

    @property
    def watched(self) -> tuple[int, ...]:
        """Ranks whose heartbeats this rank reads."""
        return tuple(rank for rank in self._peers if rank != 0) if self._rank == 0 else (0,)

    @property
    def ready(self) -> bool:
        """Whether every rank, this one included, has said that it is done. Only rank 0 knows."""
        return self._rank == 0 and all(peer.done for peer in self._peers.values())

    @property
    def all_done(self) -> bool:
        """Whether rank 0 has said that every rank is done."""
        beat = self._peers[0].beat
        return beat is not None and beat.all_done

    def positions(self) -> dict[int, Position]:
        """The last known position of every rank that has been heard."""
        return {rank: peer.last_position for rank, peer in self._peers.items() if peer.beat is not None}

    def failure(self, kind: FailureKind, ranks: tuple[int, ...], reason: str) -> Failure:
        """A failure of `ranks` where they are now."""
        position = self._peers[ranks[0]].last_position
        return Failure(
            kind=kind,
            ranks=ranks,
            iteration=position.iteration,
            instruction=position.name,
            reason=reason,
            detected_by=self._rank,
        )

    def verdict(self, now: float) -> Failure | None:
        """What is wrong at `now`, the most certain finding first; None while all is well."""
        if self.all_done:
            return None
        return self._store(now) or self._gone() or self._silent(now) or self._stuck(now)

    def _store(self, now: float) -> Failure | None:
        if not self.store_gone(now):
            return None
        silence_s = self._limits.dead_after_s
        what = self._store_error or f"no answer for {silence_s:g} s"
        if self._launcher_serves_store and self._peers[0].state is ProcessState.ALIVE:
            reason = f"the store that the launcher of rank 0 serves is out of reach ({what})"
        else:
            reason = f"dead or stopped: the store that it serves is out of reach ({what})"
        return self.failure(FailureKind.SILENT, (0,), reason)

    def _gone(self) -> Failure | None:
        gone = tuple(rank for rank, peer in self._peers.items() if peer.heard_since_gone)
        return self.failure(FailureKind.DEAD, gone, "its process ended without finishing") if gone else None

    def _silent(self, now: float) -> Failure | None:
        watched = [(rank, self._peers[rank]) for rank in self.watched]
        absent = tuple(rank for rank, peer in watched if peer.beat is None)
        if absent and now > self._limits.join_s:
            reason = f"has not come within {self._limits.join_s:g} s"
            return self.failure(FailureKind.MISSING, absent, reason)
        silent = tuple(
            rank
            for rank, peer in watched
            if peer.beat is not None and now - peer.beat_at > self._limits.dead_after_s
        )
        if not silent:
            return None
        stopped = self._peers[silent[0]].state is ProcessState.STOPPED
        state = (
            "its process is stopped"
            if stopped
            else "its process is dead or stopped, or its host out of reach"
        )
        return self.failure(
            FailureKind.SILENT, silent, f"no heartbeat for {self._limits.dead_after_s:g} s: {state}"
        )

    def _stuck(self, now: float) -> Failure | None:
        """The earliest instruction in the global order can always go on: nobody in it waits for a later one."""
        working = {
            rank: peer for rank, peer in self._peers.items() if peer.beat is not None and not peer.done
        }
        if self._rank != 0 or not working:
            return None
        earliest = min(peer.beat.position.order for peer in working.values() if peer.beat is not None)
        culprits = {
            rank: peer
            for rank, peer in working.items()
            if peer.beat is not None and peer.beat.position.order == earliest
        }
        limit_s = self._limits.stuck_after_s
        if any(now - peer.progress_at <= limit_s for peer in culprits.values()):
            self._stuck_at = ()
            return None
        # Heartbeats are up to a second old and not of one moment: what they say together must stay for a while.
        at = tuple((rank, peer.last_position.serial) for rank, peer in sorted(culprits.items()))
        if at != self._stuck_at:
            self._stuck_at, self._stuck_since = at, now
        if now - self._stuck_since < _STUCK_BEATS * self._limits.beat_s:
            return None
        reason = f"stuck: no progress for {limit_s:g} s. If it is only slow, raise the limit."
        return self.failure(FailureKind.STUCK, tuple(sorted(culprits)), reason)
