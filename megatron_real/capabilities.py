"""What the runtime can execute of what a plan can say. The list grows with the runtime.

The search offers nothing else for execution, and the runtime refuses the rest before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import Problem
from megatron_real.plan import Placement, Plan

__all__ = ["EXECUTABLE_ALGORITHMS", "capability_problems", "placement_problems"]

EXECUTABLE_ALGORITHMS = ("ppo",)
"""Graphs that the runtime has the mathematics of; others can be priced."""


def capability_problems(graph: Graph, plan: Plan) -> Iterator[Problem]:
    """What in a plan this backend cannot run, each with what it can.

    Args:
        graph: the algorithm's.
        plan: checked against the graph.
    """
    for call in graph.calls:
        if call.model is not None:
            yield from placement_problems(call, plan.calls[call.name])


def placement_problems(call: Call, placement: Placement) -> Iterator[Problem]:
    """What in one placement cannot be run."""
    layout = placement.parallel
    path = f"calls.{call.name}"
    generates = call.type is CallType.GENERATE
    if generates and layout.sp:
        yield Problem(
            path=f"{path}.layout.sp",
            found="true in a generate call",
            expected="false: Megatron's static inference has no sequence parallelism",
        )
    if layout.cp > 1:
        yield Problem(
            path=f"{path}.layout.cp",
            found=f"cp={layout.cp}",
            expected="1: sequences are not split over ranks yet",
        )
    if layout.vpp > 1 and placement.num_microbatches % layout.pp:
        yield Problem(
            path=f"{path}.num_microbatches",
            found=str(placement.num_microbatches),
            expected=f"a multiple of pp={layout.pp}: the interleaved schedule (vpp={layout.vpp}) takes no other",
        )
    if placement.recompute != "none" and not call.trains:
        yield Problem(
            path=f"{path}.recompute",
            found=f"{placement.recompute} in a call of type {call.type}",
            expected="none: nothing is kept for a backward pass",
        )
