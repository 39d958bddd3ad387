"""Specifications of faults, and what an injector does; killing is tested in tests/distributed/test_liveness.py."""

from __future__ import annotations

import time

import pytest

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import ConfigError
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.presets import split
from megatron_real.program import compile_program
from megatron_real.runtime.liveness.faults import (
    Action,
    Fault,
    FaultInjector,
    InjectedFault,
    parse_fault,
    parse_faults,
    ranks_by_instruction,
)

NAMES = dict.fromkeys(("realloc:actor_gen", "run:actor_gen", "transfer:actor_gen>ref_inf", "save"), range(4))


@pytest.mark.parametrize(
    ("text", "action", "instruction", "sleep_s"),
    [
        ("kill@1:2:realloc:actor_gen", Action.KILL, "realloc:actor_gen", 0),
        ("stop@1:2:run:actor_gen", Action.STOP, "run:actor_gen", 0),
        ("raise@1:2:actor_gen", Action.RAISE, "run:actor_gen", 0),
        ("raise@1:2:transfer:actor_gen>ref_inf", Action.RAISE, "transfer:actor_gen>ref_inf", 0),
        ("kill@1:2:save", Action.KILL, "save", 0),
        ("sleep@1:2:actor_gen:0.5", Action.SLEEP, "run:actor_gen", 0.5),
    ],
)
def test_specifications(text: str, action: Action, instruction: str, sleep_s: float) -> None:
    fault = parse_fault(text)
    assert fault == Fault(action=action, rank=1, iteration=2, instruction=instruction, sleep_s=sleep_s)
    assert parse_fault(str(fault)) == fault
    assert parse_faults([text], names=NAMES, world_size=2) == (fault,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "kill@1:2",
        "kill@1:2:",
        "kill@-1:2:actor_gen",
        "kill@a:2:actor_gen",
        "kill@1:x:actor_gen",
        "hang@1:2:actor_gen",
        "sleep@1:2:actor_gen",
        "sleep@1:2:actor_gen:-1",
        "sleep@1:2:actor_gen:soon",
    ],
)
def test_malformed(text: str) -> None:
    with pytest.raises(ConfigError, match="expected kill") as error:
        parse_fault(text)
    assert repr(text) in str(error.value)


def test_all_faults_that_do_not_fit_the_program_are_named() -> None:
    with pytest.raises(ConfigError, match="2 problems") as error:
        parse_faults(["kill@0:1:realloc:critic_inf", "stop@4:1:save"], names=NAMES, world_size=4)
    assert "one of realloc:actor_gen, run:actor_gen" in str(error.value)
    assert "rank 4; expected a rank below 4" in str(error.value)


def test_injector() -> None:
    faults = parse_faults(["raise@1:2:actor_gen", "sleep@1:0:save:0.05"])
    other = FaultInjector(faults, rank=0)
    other.before(2, "run:actor_gen", 0)
    injector = FaultInjector(faults, rank=1)
    injector.before(1, "run:actor_gen", 0)
    injector.before(2, "realloc:actor_gen", 0)
    with pytest.raises(InjectedFault, match="rank 1: injected fault raise@1:2:run:actor_gen"):
        injector.before(2, "run:actor_gen", 1)
    injector.before(2, "run:actor_gen", 1)  # once is enough
    start = time.monotonic()
    injector.before(0, "save", 5)
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            ["kill@2:1:actor_gen"],
            "found rank 2, which does not take part in run:actor_gen; expected one of the ranks 0, 1",
        ),
        (["kill@1:3:actor_gen"], "found iteration 3; expected one below 3"),
        (
            ["kill@1:2:actor_gen", "stop@1:2:run:actor_gen"],
            "stop@1:2:run:actor_gen: found a second fault where kill@1:2:run:actor_gen is due",
        ),
    ],
)
def test_a_fault_that_would_never_happen(specs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_faults(specs, names={"run:actor_gen": (0, 1)}, world_size=4, num_iterations=3)
    assert message in str(error.value)


def test_who_takes_part_in_a_program() -> None:
    plan = split(ppo_graph(), ClusterSpec(devices_per_node=4))
    program = compile_program(ppo_graph(), plan)
    ranks = ranks_by_instruction(program)
    assert list(ranks) == list(dict.fromkeys(instruction.name for instruction in program.instructions))
    assert ranks["run:actor_gen"] == [0, 1]
    assert ranks["run:critic_train"] == [2, 3]
    assert ranks["save"] == [0, 1, 2, 3]
    assert len(parse_faults(["kill@3:0:critic_inf"], names=ranks, world_size=4, num_iterations=1)) == 1
