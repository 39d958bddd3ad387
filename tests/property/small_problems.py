"""Search problems that are small enough to try every choice, with numbers drawn from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from megatron_real.algorithms.graphs import graph_of
from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.layout import Layout, Mesh
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.problem import Choice, Option, SearchProblem

LAYOUTS = {
    1: ("d1t1p1",),
    2: ("d2t1p1", "d1t2p1", "d1t1p2"),
    3: ("d3t1p1", "d1t1p3"),
    4: ("d4t1p1", "d2t2p1", "d1t4p1", "d2t1p2", "d1t2p2"),
    6: ("d6t1p1", "d3t2p1", "d1t2p3"),
}
WORK = {CallType.GENERATE: 10.0, CallType.INFERENCE: 2.0, CallType.TRAIN: 6.0}
ALIGNED = (Mesh(0, 4), Mesh(0, 2), Mesh(2, 4))


def small_problem(
    seed: int,
    graph: Graph | None = None,
    *,
    meshes: tuple[Mesh, ...] = ALIGNED,
    capacity: int = 260,
    keep: float = 0.5,
    laminar: bool = True,
) -> SearchProblem:
    """A problem over the windows `meshes`; of each call's options on a size, about the part `keep` is there."""
    draw = random.Random(seed)
    graph = graph if graph is not None else graph_of("ppo")
    sizes = sorted({mesh.size for mesh in meshes})
    scale = {call.name: draw.uniform(0.5, 1.5) for call in graph.calls}
    options = {}
    for call, size in itertools.product(graph.calls, sizes):
        found = list(options_of(call, graph, size, scale[call.name], draw))
        kept = [option for option in found if draw.random() < keep] or found[:1]
        options[call.name, size] = tuple(sorted(kept, key=lambda option: option.seconds))
    prices: dict[tuple[object, ...], float] = {}

    def realloc_s(model: str, home: Choice, other: Choice) -> float:
        # Equal windows may change places, as on a cluster of equal nodes.
        apart = not home.mesh.overlaps(other.mesh)
        key = (model, home.mesh.size, home.option.layout, other.mesh.size, other.option.layout, apart)
        return prices.setdefault(key, random.Random(f"{seed}{key}").uniform(0.05, 0.8))

    return SearchProblem(
        graph=graph,
        cluster=ClusterSpec(devices_per_node=max(mesh.stop for mesh in meshes)),
        meshes=tuple(sorted(meshes, key=lambda mesh: (-mesh.size, mesh.start))),
        capacity_bytes=capacity,
        options=options,
        realloc_s=realloc_s,
        bucket_bytes=2,
        laminar=laminar,
    )


def options_of(call: Call, graph: Graph, size: int, scale: float, draw: random.Random) -> Iterator[Option]:
    if call.model is None:
        yield Option(layout=Layout(dp=size), seconds=0.3 / size)
        return
    home = graph.home_call(call.model).name == call.name
    for text in LAYOUTS[size]:
        layout = Layout.parse(text)
        weights = round(80 / (layout.tp * layout.pp))
        seconds = WORK[call.type] * scale / size**0.8 * draw.uniform(0.9, 1.3)
        for microbatches in (1, 2):
            for away in (False, True) if home else (False,):
                offload, drop = "none", False
                if away and call.trains:
                    offload, drop = draw.choice([("none", True), ("host", False), ("host", True)])
                elif away:
                    offload = draw.choice(["host", "node"])
                yield Option(
                    layout=layout,
                    num_microbatches=microbatches * layout.pp,
                    seconds=seconds * (1 + 0.1 * microbatches),
                    weights_bytes=weights,
                    state_bytes=round(240 / size) if call.trains else 0,
                    active_bytes=round(draw.uniform(60, 120) / layout.dp / microbatches),
                    offload=offload,
                    drop_trained_weights=drop,
                    stream=not home and draw.random() < 0.5,
                    leave_s=0.1 if away else 0.0,
                    return_s=0.2 if away or not home else 0.0,
                    state_leave_s=0.15,
                    state_return_s=0.25,
                    first_share=0.25,
                    first_pass_s=draw.uniform(0.0, 0.4),
                )


def every_choice(problem: SearchProblem) -> Iterator[dict[str, Choice]]:
    """All assignments."""
    calls = [call.name for call in problem.graph.calls]
    lists = [
        [
            Choice(mesh, option)
            for mesh in problem.meshes_of(call)
            for option in problem.options_on(call, mesh)
        ]
        for call in calls
    ]
    for choices in itertools.product(*lists):
        yield dict(zip(calls, choices, strict=True))
