"""Measurements of the machine: collectives, messages, copies, and ranks that share the cores of their node.

Invariants (tests/e2e/test_profile.py):
    - how ranks slow each other down is measured only where they share cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.hooks.profiling import communication
from megatron_real.hooks.profiling.blocks import At, Block, Target, Unit, Work
from megatron_real.hooks.profiling.calls import Shape, generate_call, train_call
from megatron_real.hooks.profiling.clock import timed
from megatron_real.hooks.profiling.models import Copies, ProfiledRole
from megatron_real.plan_search.costs.operations import Collective, Pass
from megatron_real.plan_search.profile_db import Operation
from megatron_real.plan_search.profile_options import ProfileOptions
from megatron_real.process_groups import ProcessGroups

__all__ = ["collectives", "contention", "memory_copies", "messages"]


def _repeated(work: Callable[[], Any], num_bytes: int) -> Work:
    """Short ones several times in a row."""
    times = 20 if num_bytes <= 1 << 16 else 5 if num_bytes <= 1 << 20 else 1
    return lambda: {"one": timed(work, times)}


def _first(works: Sequence[Mapping[str, float]]) -> float:
    return works[0]["one"]


def collectives(options: ProfileOptions, groups: ProcessGroups, size: int) -> Block:
    """Of groups of `size` neighbours."""
    nodes = max(1, size // options.devices_per_node)

    def unit(kind: Collective, num_bytes: int) -> Unit:
        at: At = {"group": size, "num_nodes": nodes, "bytes": num_bytes}
        return Unit(
            name=f"{kind} of {num_bytes} bytes",
            targets=(Target(operation=Operation.COLLECTIVE, kind=kind, at=at, value=_first),),
            works=lambda member: [_repeated(communication.collective(kind, num_bytes, member), num_bytes)],
        )

    units = tuple(unit(kind, num_bytes) for kind in Collective for num_bytes in options.byte_grid())
    return Block(name=f"{size} ranks", units=units, built=lambda: _member(groups, size))


def messages(options: ProfileOptions, groups: ProcessGroups) -> Iterator[Block]:
    """Between neighbours of a node, and between nodes."""
    works = {
        Operation.POINT_TO_POINT: (communication.ping_pong, 0.5),
        Operation.EXCHANGE: (communication.exchange, 1.0),
    }

    def unit(operation: Operation, num_bytes: int, within: bool) -> Unit:
        make, share = works[operation]
        at: At = {"within_node": int(within), "bytes": num_bytes}
        return Unit(
            name=f"{operation} of {num_bytes} bytes",
            targets=(Target(operation=operation, at=at, value=lambda works: share * works[0]["one"]),),
            works=lambda member: [_repeated(make(num_bytes, member, groups.rank), num_bytes)],
        )

    places = []
    if options.devices_per_node > 1:
        places.append((True, 2 if options.devices_per_node % 2 == 0 else options.devices_per_node))
    if options.num_nodes > 1:
        places.append((False, options.num_ranks))
    for within, size in places:
        units = tuple(
            unit(operation, num_bytes, within) for operation in works for num_bytes in options.byte_grid()
        )
        name = "messages in a node" if within else "messages between nodes"
        yield Block(name=name, units=units, built=partial(_member, groups, size))


@contextlib.contextmanager
def _member(groups: ProcessGroups, size: int) -> Iterator[communication.GroupOfRank]:
    yield communication.join(groups, size)


def memory_copies(options: ProfileOptions) -> Block:
    """Within a device, and between device and host."""

    def unit(operation: Operation, num_bytes: int) -> Unit:
        which = 0 if operation is Operation.LOCAL_COPY else 1
        return Unit(
            name=f"{operation} of {num_bytes} bytes",
            targets=(Target(operation=operation, at={"bytes": float(num_bytes)}, value=_first),),
            works=lambda _: [_repeated(communication.copies(num_bytes)[which], num_bytes)],
        )

    operations = (Operation.LOCAL_COPY, Operation.HOST_COPY)
    units = tuple(unit(operation, num_bytes) for operation in operations for num_bytes in options.byte_grid())
    return Block(name="copies", units=units, built=contextlib.nullcontext)


# -- ranks that share a node --------------------------------------------------------------------------------------


def contention(options: ProfileOptions, role: ProfiledRole, tp: int, copies: Copies) -> Block:
    """Passes, and optimizer steps, on some ranks of each node while the others wait: a group, two, four, ... and all.

    Of the shortest and of a middle micro-batch: short passes mostly wait for others, and leave cores to them.
    """
    per_node = options.devices_per_node
    counts = sorted({*(tp * 2**power for power in range(20) if tp * 2**power <= per_node), per_node})
    layers = options.layers[1]
    rank = copies.rank % per_node

    def unit(call: Callable[[ModelCopy, Shape], dict[str, float]], shape: Shape, busy: int) -> Unit:
        def target(kind: str, name: str, number: int) -> Target:
            at = {"tp": tp, "sequences": shape.sequences, "length": shape.length, "busy": float(busy)}
            return Target(
                operation=Operation.CONTENTION,
                kind=kind,
                at=at,
                value=lambda works: works[0][name] / number,
            )

        if call is generate_call:
            targets = [target(Pass.PREFILL, "prefill", layers), target(Pass.DECODE, "decode", layers)]
        else:
            targets = [
                target(Pass.TRAIN_FORWARD, "forward", layers),
                target(Pass.BACKWARD, "backward", layers),
                target(Operation.OPTIMIZER, "step", 1),
            ]
        return Unit(
            name=f"{call.__name__.removesuffix('_call')} {shape.sequences} x {shape.length} on {busy} ranks of a node",
            targets=tuple(targets),
            works=lambda pair: [lambda: call(pair[1], shape) if rank < busy else {}],
        )

    units = [
        unit(call, shape, busy)
        for shape in (Shape(1, options.length_grid()[0]), Shape(*options.middle_shape()))
        for call in (generate_call, train_call)
        for busy in counts
    ]
    built = partial(copies.pair, role, tp, False, options.layers)
    return Block(name=f"contention tp={tp}", units=tuple(units), built=built)
