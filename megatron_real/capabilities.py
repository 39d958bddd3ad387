"""What the runtime can execute of what a plan can say. The list grows with the runtime.

The search offers nothing else for execution, and the runtime refuses the rest before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_real.dataflow import Call, CallType, Graph, Per, Scope
from megatron_real.errors import Problem
from megatron_real.plan import Placement, Plan

__all__ = ["capability_problems", "graph_problems", "placement_problems"]


def capability_problems(graph: Graph, plan: Plan) -> Iterator[Problem]:
    """What in a plan this backend cannot run, each with what it can.

    Args:
        graph: the algorithm's.
        plan: checked against the graph.
    """
    yield from graph_problems(graph)
    for call in graph.calls:
        if call.model is not None:
            yield from placement_problems(call, plan.calls[call.name])


def graph_problems(graph: Graph) -> Iterator[Problem]:
    """What in an algorithm's calls the runtime cannot execute, under no plan.

    It generates responses to the data set's prompts, scores sequences with a model or a Python function, one number for
    each of their response tokens or for each of them, and trains. What works on generated sequences takes their tokens.
    """
    for call in graph.calls:
        if call.model is None and call.type is not CallType.INFERENCE:
            yield Problem(
                path=f"calls.{call.name}.model",
                found=f"none in a call of type {call.type}",
                expected="a model",
            )
        yield from _output_problems(graph, call)
        if call.type is CallType.GENERATE:
            if call.inputs:
                found = ", ".join(entry.key for entry in call.inputs)
                yield Problem(
                    path=f"calls.{call.name}.inputs",
                    found=found,
                    expected="none: responses are generated to the prompts of the data set",
                )
            continue
        source = graph.generation(call.sequences)
        taken = {entry.key for entry in call.inputs if entry.scope is Scope.SHARD}
        if source is not None and not taken & set(_tokens_of(graph, source)):
            yield Problem(
                path=f"calls.{call.name}.inputs",
                found=f"none of the tokens of the sequences {call.sequences!r}",
                expected=f"those that {source.name} generates, with scope shard",
            )


def _output_problems(graph: Graph, call: Call) -> Iterator[Problem]:
    kinds = [graph.key(key).per for key in call.outputs]
    path, found = f"calls.{call.name}.outputs", ", ".join(call.outputs) or "none"
    match call.type:
        case CallType.GENERATE:
            if kinds.count(Per.TOKEN) != 1 or Per.SEQUENCE in kinds or len(kinds) > 2:
                yield Problem(
                    path=path,
                    found=found,
                    expected="its tokens, and at most one key beside them: their log-probabilities (per response)",
                )
        case CallType.INFERENCE:
            wanted = "sequence" if call.model is None else "response token or sequence"
            allowed = (Per.SEQUENCE,) if call.model is None else (Per.SEQUENCE, Per.RESPONSE)
            if len(kinds) != 1 or kinds[0] not in allowed:
                yield Problem(path=path, found=found, expected=f"exactly one key, a number per {wanted}")
        case CallType.TRAIN:
            if kinds:
                yield Problem(path=path, found=found, expected="none of a training")


def _tokens_of(graph: Graph, generation: Call) -> Iterator[str]:
    return (key for key in generation.outputs if graph.key(key).per is Per.TOKEN)


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
