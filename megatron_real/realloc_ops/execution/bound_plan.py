"""A rank's plan bound to tensors: for each step what is sent and received, and which local copies are made meanwhile.

Local copies of a wave are spread over the steps of that wave by bytes, so that they happen while messages travel and a
wave's copies are not late for its messages. What is forwarded may have been copied, so no copy is left for hop 1.

Invariants (tests/unit/realloc_ops/test_bound_plan.py, tests/property/test_realloc_execution.py):
    - every slice of the plan is in one leg or in one group of copies;
    - binding touches no contents and allocates only staging; views of freed storages are made too;
    - shards that this rank does not have are refused before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_real.errors import PlanError
from megatron_real.realloc_ops.execution.packing import Direction, Leg, Staging
from megatron_real.realloc_ops.execution.transports import Transport
from megatron_real.realloc_ops.planning.buckets import Message, Slice
from megatron_real.realloc_ops.planning.plan import STAGING_SLOTS, RankPlan, Step
from megatron_real.realloc_ops.planning.shards import Box, Shard
from megatron_real.realloc_ops.storage.local_shards import LocalShards, with_memory

__all__ = ["Binder", "BoundPlan", "BoundStep", "Copies", "shard_waves"]

Views = Mapping[Shard, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Local copies of one wave that are made together."""

    wave: int
    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStep:
    """One step of the plan."""

    hop: int
    send: Leg | None
    receive: Leg | None
    copies: tuple[Copies, ...]
    """Made after the step was posted."""
    after: int
    """How many steps must be finished before its places in the staging buffers are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPlan:
    """Every tensor that a run touches; made once per generation of views."""

    generations: tuple[int, int]
    steps: tuple[BoundStep, ...]
    rest: tuple[Copies, ...]
    """Copies that no step of hop 0 is left for."""
    staging: tuple[Staging, Staging]
    waves: tuple[int, ...]
    """Of every message received and every group of copies, with repetitions."""
    duplicates: tuple[tuple[int, torch.Tensor, torch.Tensor], ...]
    """Wave, first tensor of a shard, other tensor that holds it; ascending."""

    def reads(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors that are read together, once for each time."""
        for step in self.steps:
            if step.send is not None:
                yield step.send.direct
                if step.send.packed:
                    yield step.send.parts
            yield from (copies.sources for copies in step.copies)
        yield from (copies.sources for copies in self.rest)


def shard_waves(plan: RankPlan) -> dict[Shard, int]:
    """The last wave in which each destination shard of the rank is written to."""
    waves: dict[Shard, int] = {}
    pieces = [*plan.copies, *(piece for message in plan.receives for piece in message.slices)]
    for piece in pieces:
        shard = Shard(piece.key, piece.dst_box)
        waves[shard] = max(piece.wave, waves.get(shard, piece.wave))
    return waves


class Binder:
    """Binds one plan, again whenever parameters lie elsewhere."""

    def __init__(
        self,
        name: str,
        plan: RankPlan,
        *,
        transport: Transport,
        direct_receives: bool = True,
        lean: bool = False,
    ) -> None:
        """Read the plan.

        Args:
            name: for error messages.
            plan: this rank's part.
            transport: says where it wants payloads, and in how many pieces.
            direct_receives: False receives nothing straight into a parameter: its old value is needed.
            lean: stage no more than two messages per direction, however small.
        """
        self._name = name
        self._plan = plan
        self._transport = transport
        self._direct_receives = direct_receives
        self._lean = lean
        self._wire = {key: getattr(torch, dtype) for key, dtype in plan.wire_dtypes.items()}
        self._relay = {key: getattr(torch, dtype) for key, dtype in plan.relay_dtypes.items()}

    def bind(
        self,
        src: LocalShards | None,
        dst: LocalShards | None,
        src_views: Views,
        dst_views: Views,
        *,
        allocate: Callable[[tuple[Staging, Staging]], None],
    ) -> BoundPlan:
        """Find all tensors.

        Args:
            src: the source copy on this rank, resolved.
            dst: the destination copy, resolved.
            src_views: its views.
            dst_views: its views.
            allocate: allocates the staging buffers, which are left so.

        Raises:
            PlanError: the plan uses a shard that is not there.
        """
        plan = self._plan

        def source(piece: Slice) -> torch.Tensor:
            return self._part(src_views, piece, piece.src_box, "source")

        def target(piece: Slice) -> torch.Tensor:
            return self._part(dst_views, piece, piece.dst_box, "destination")

        def sent(message: Message, piece: Slice) -> torch.Tensor:
            return (
                self._part(dst_views, piece, piece.src_box, "destination")
                if message.relayed
                else source(piece)
            )

        outgoing = self._direction([step.send for step in plan.steps], sent, sends=True)
        incoming = self._direction(
            [step.receive for step in plan.steps], lambda _, piece: target(piece), sends=False
        )
        groups: dict[int, list[Copies]] = {}
        for (place, wave), pieces in _place_copies(plan.steps, plan.copies).items():
            copies = Copies(wave=wave, sources=tuple(map(source, pieces)), targets=tuple(map(target, pieces)))
            groups.setdefault(place, []).append(copies)
        staging = (outgoing.staging, incoming.staging)
        allocate(staging)
        sends, receives = outgoing.legs(), incoming.legs()
        columns = zip(plan.steps, sends, receives, _steps_before(sends), _steps_before(receives), strict=True)
        steps = tuple(
            BoundStep(
                hop=step.order[0],
                send=send,
                receive=receive,
                copies=tuple(groups.get(index, ())),
                after=max(free),
            )
            for index, (step, send, receive, *free) in enumerate(columns)
        )
        return BoundPlan(
            generations=(src.generation if src is not None else 0, dst.generation if dst is not None else 0),
            steps=steps,
            rest=tuple(groups.get(len(steps), ())),
            staging=staging,
            waves=tuple(
                [step.receive.wave for step in steps if step.receive is not None]
                + [copies.wave for placed in groups.values() for copies in placed]
            ),
            duplicates=self._duplicates(dst),
        )

    def _direction(
        self,
        messages: Sequence[Message | None],
        part_of: Callable[[Message, Slice], torch.Tensor],
        *,
        sends: bool,
    ) -> Direction:
        def bound_part(message: Message, piece: Slice) -> tuple[torch.Tensor, torch.dtype]:
            return part_of(message, piece), (self._relay if message.relayed else self._wire)[piece.key]

        return Direction(
            messages,
            part_of=bound_part,
            staging=Staging(
                self._transport.staging_device(), STAGING_SLOTS * self._plan.bucket_bytes, lean=self._lean
            ),
            sends=sends,
            direct=sends or self._direct_receives,
            gathers=self._transport.gathers,
        )

    def _duplicates(self, dst: LocalShards | None) -> tuple[tuple[int, torch.Tensor, torch.Tensor], ...]:
        if dst is None:
            return ()
        waves = shard_waves(self._plan)
        found = [(waves.get(shard, 0), first, other) for shard, first, other in dst.duplicates]
        return tuple(sorted(found, key=lambda item: item[0]))

    def _part(self, views: Views, piece: Slice, box: Box, side: str) -> torch.Tensor:
        view = views.get(Shard(piece.key, box))
        if view is None:
            raise PlanError(
                f"{self._name}: the plan uses {piece.key} {box} of the {side} on rank {self._plan.rank}; expected one "
                f"of the {len(views)} shards found there. Build the plan from the tables of these two copies."
            )
        with with_memory(view):
            return view[piece.box.slices_in(box)]


def _steps_before(legs: Sequence[Leg | None]) -> list[int]:
    """By step, how many steps use what lies in the staging buffer at its place, up to the last one."""
    users: list[tuple[range, int]] = []
    """Places that hold something, and the last step that needs it."""
    found: list[int] = []
    for index, leg in enumerate(legs):
        place = leg.place if leg is not None else None
        if leg is None or place is None:
            found.append(0)
            continue
        here = [user for user in users if user[0].start < place.stop and place.start < user[0].stop]
        found.append(max((last + 1 for _, last in here), default=0) if leg.packed else 0)
        users = [user for user in users if user not in here]
        users.append((place, index))
    return found


def _place_copies(steps: Sequence[Step], copies: Sequence[Slice]) -> dict[tuple[int, int], list[Slice]]:
    """Copies by (index of the step that they follow, wave), ascending; ``len(steps)`` is behind the last of hop 0."""
    by_wave: dict[int, list[Slice]] = {}
    for piece in copies:
        by_wave.setdefault(piece.wave, []).append(piece)
    first_hop = [(index, step.order[1]) for index, step in enumerate(steps) if step.order[0] == 0]
    placed: dict[tuple[int, int], list[Slice]] = {}
    for wave, pieces in sorted(by_wave.items()):
        places = [index for index, step_wave in first_hop if step_wave == wave]
        if not places:
            places = [next((index for index, step_wave in first_hop if step_wave > wave), len(steps))]
        total_bytes = sum(piece.num_bytes for piece in pieces)
        done_bytes = 0
        for piece in pieces:
            place = places[done_bytes * len(places) // total_bytes]
            placed.setdefault((place, wave), []).append(piece)
            done_bytes += piece.num_bytes
    return dict(sorted(placed.items()))
