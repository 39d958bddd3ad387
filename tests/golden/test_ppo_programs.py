"""The compiled program of PPO under four plans, line by line.

After a wanted change, write the files anew with ``python -m tests.golden.test_ppo_programs`` and read the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.layout import parse_placement
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from megatron_real.plan_search.presets import split, symmetric
from megatron_real.program import Program, Realloc, Run, compile_program

DATA = Path(__file__).parent / "data"
FOUR = ClusterSpec(devices_per_node=4)


def _symmetric() -> Program:
    graph = ppo_graph()
    return compile_program(graph, symmetric(graph, FOUR, layout="d2t2p1"))


def _split() -> Program:
    graph = ppo_graph("function")
    return compile_program(graph, split(graph, FOUR, layouts={"actor": "d1t2p1", "actor_gen": "d2t1p1"}))


def _asymmetric() -> Program:
    """Every call of the actor and of the critic in a layout of its own; actor weights dropped, reference offloaded."""
    texts = {
        "actor_gen": "d4t1p1@0-3",
        "rew_inf": "d4t1p1@0-3",
        "ref_inf": "d1t1p2@0-1",
        "critic_inf": "d2t1p1@2-3",
        "actor_train": "d1t2p1@0-1",
        "critic_train": "d1t1p2@2-3",
    }
    calls = {}
    for name, text in texts.items():
        mesh, layout = parse_placement(text)
        calls[name] = Placement(
            ranks=(mesh.start, mesh.stop),
            layout=LayoutSpec(dp=layout.dp, tp=layout.tp, pp=layout.pp),
            offload="host" if name == "ref_inf" else "none",
            drop_trained_weights=name == "actor_train",
        )
    return compile_program(ppo_graph("function"), Plan(algorithm="ppo", cluster=FOUR, calls=calls))


def _mechanisms() -> Program:
    """As the asymmetric one, with weights streamed, the reference in the node's store, optimizer state on the host."""
    plan = _asymmetric().plan
    changes: dict[str, dict[str, object]] = {
        "actor_gen": {"stream": True},
        "critic_inf": {"stream": True, "ranks": (1, 3)},
        "ref_inf": {"offload": "node"},
        "actor_train": {"offload": "host"},
        "critic_train": {"offload": "host"},
    }
    calls = {name: call.model_copy(update=changes.get(name, {})) for name, call in plan.calls.items()}
    return compile_program(ppo_graph("function"), plan.model_copy(update={"calls": calls}))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "symmetric": _symmetric,
    "split": _split,
    "asymmetric": _asymmetric,
    "mechanisms": _mechanisms,
}


def _text(program: Program) -> str:
    lines = ["# instructions: index, name, ranks, facts"]
    for index, instruction in enumerate(program.instructions):
        facts = [
            f"{name}={getattr(instruction, name)}"
            for name in ("source", "target", "copy")
            if hasattr(instruction, name)
        ]
        if isinstance(instruction, Realloc) and instruction.stream:
            facts.append("stream")
        if isinstance(instruction, Run):
            facts += [f"version_offset={instruction.version_offset}", f"release={instruction.release}"]
        lines.append(f"{index:2} {instruction.name} {list(instruction.ranks)} {' '.join(facts)}".rstrip())
    for rank in range(program.world_size):
        lines.append(f"# rank {rank}")
        lines += [
            " ".join(
                [f"{step.index:2} {step.name} {step.side}", *(f"after {one.name}" for one in step.finish)]
            )
            for step in program.steps(rank)
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    assert _text(PROGRAMS[name]()) == (DATA / f"ppo_program_{name}.txt").read_text()


if __name__ == "__main__":
    for name, build in PROGRAMS.items():
        (DATA / f"ppo_program_{name}.txt").write_text(_text(build()))
