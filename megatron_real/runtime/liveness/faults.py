"""Faults injected into a run, to test that it ends well: ``kill@1:2:run:actor_gen`` kills rank 1 in iteration 2.

A specification is ``ACTION@RANK:ITERATION:INSTRUCTION``. The action is ``kill`` (SIGKILL to itself), ``stop``
(SIGSTOP to itself), ``raise`` (an exception) or ``sleep`` (``sleep@RANK:ITERATION:INSTRUCTION:SECONDS``). The
instruction is a name of the program, such as ``realloc:actor_gen``, or a call's name alone, which means its
run. A fault happens once, right before the instruction.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_real.errors import ConfigError, Problem, RealError, raise_problems
from megatron_real.program import Program

__all__ = [
    "Action",
    "Fault",
    "FaultInjector",
    "InjectedFault",
    "parse_fault",
    "parse_faults",
    "ranks_by_instruction",
]

logger = logging.getLogger(__name__)

_FORM = "kill|stop|raise@RANK:ITERATION:INSTRUCTION or sleep@RANK:ITERATION:INSTRUCTION:SECONDS"


class InjectedFault(RealError):
    """The exception of a ``raise`` fault."""


class Action(StrEnum):
    """What a fault does to its rank."""

    KILL = "kill"
    STOP = "stop"
    RAISE = "raise"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    action: Action
    rank: int
    iteration: int
    instruction: str
    """An instruction's full name."""
    sleep_s: float = 0.0

    def __str__(self) -> str:
        tail = f":{self.sleep_s:g}" if self.action is Action.SLEEP else ""
        return f"{self.action}@{self.rank}:{self.iteration}:{self.instruction}{tail}"


def parse_fault(text: str) -> Fault:
    """Parse one specification.

    Raises:
        ConfigError: it is malformed.
    """
    word, at, rest = text.partition("@")
    rank, _, rest = rest.partition(":")
    iteration, _, instruction = rest.partition(":")
    seconds = "0"
    if word == Action.SLEEP:
        instruction, _, seconds = instruction.rpartition(":")
    try:
        sleep_s = float(seconds)
        if (
            not (at and word in set(Action) and rank.isdecimal() and iteration.isdecimal() and instruction)
            or sleep_s < 0
        ):
            raise ValueError(text)
    except ValueError:
        raise ConfigError(
            f"fault: found {text!r}; expected {_FORM}, such as kill@1:2:run:actor_gen."
        ) from None
    name = instruction if ":" in instruction or instruction == "save" else f"run:{instruction}"
    return Fault(
        action=Action(word), rank=int(rank), iteration=int(iteration), instruction=name, sleep_s=sleep_s
    )


def parse_faults(
    specs: Iterable[str],
    *,
    names: Mapping[str, Collection[int]] | None = None,
    world_size: int | None = None,
    num_iterations: int | None = None,
) -> tuple[Fault, ...]:
    """Parse specifications and check them against a program.

    Args:
        specs: the specifications.
        names: the program's instructions and the ranks that take part in each, as of `ranks_by_instruction`; None
            checks nothing.
        world_size: number of ranks; None checks nothing.
        num_iterations: of the run; None checks nothing.

    Raises:
        ConfigError: a specification is malformed, or would never happen: there is no such instruction, rank or
            iteration, the rank does not take part, or another fault is due at the same place. Lists all of them.
    """
    faults: list[Fault] = []
    problems: list[Problem] = []
    for spec in specs:
        fault = parse_fault(spec)
        faults.append(fault)
        if world_size is not None and fault.rank >= world_size:
            problems.append(
                Problem(path=spec, found=f"rank {fault.rank}", expected=f"a rank below {world_size}")
            )
        elif names is not None:
            problems += _instruction_problems(spec, fault, names)
        if num_iterations is not None and fault.iteration >= num_iterations:
            problems.append(
                Problem(
                    path=spec,
                    found=f"iteration {fault.iteration}",
                    expected=f"one below {num_iterations}, the number of iterations",
                )
            )
    problems += _collisions(faults)
    raise_problems(problems, subject="faults", error=ConfigError)
    return tuple(faults)


def ranks_by_instruction(program: Program) -> dict[str, list[int]]:
    """Instruction names, in the program's order, and the ranks that take part; where several share a name, in any."""
    ranks: dict[str, list[int]] = {instruction.name: [] for instruction in program.instructions}
    for rank in range(program.world_size):
        for name in {step.name for step in program.steps(rank)}:
            ranks[name].append(rank)
    return ranks


def _instruction_problems(spec: str, fault: Fault, names: Mapping[str, Collection[int]]) -> Iterator[Problem]:
    if fault.instruction not in names:
        expected = f"one of {', '.join(names)}"
        yield Problem(path=spec, found=f"instruction {fault.instruction!r}", expected=expected)
    elif fault.rank not in names[fault.instruction]:
        ranks = ", ".join(map(str, sorted(names[fault.instruction])))
        yield Problem(
            path=spec,
            found=f"rank {fault.rank}, which does not take part in {fault.instruction}",
            expected=f"one of the ranks {ranks}",
        )


def _collisions(faults: Iterable[Fault]) -> Iterator[Problem]:
    """A fault at the place of an earlier one: each happens right before the instruction, and once."""
    first: dict[tuple[int, int, str], Fault] = {}
    for fault in faults:
        earlier = first.setdefault((fault.rank, fault.iteration, fault.instruction), fault)
        if earlier is not fault:
            yield Problem(
                path=str(fault),
                found=f"a second fault where {earlier} is due",
                expected="one per rank, iteration and instruction",
            )


class FaultInjector:
    """Carries out the faults of one rank."""

    def __init__(self, faults: Iterable[Fault], rank: int) -> None:
        self._pending = {
            (fault.iteration, fault.instruction): fault for fault in faults if fault.rank == rank
        }

    def before(self, iteration: int, name: str, index: int) -> None:
        """Called right before instruction `name`, at `index` in the global order, of `iteration`.

        Raises:
            InjectedFault: a ``raise`` fault is due.
        """
        if not self._pending:
            return
        fault = self._pending.pop((iteration, name), None)
        if fault is None:
            return
        logger.warning("injecting %s before instruction %d", fault, index)
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.RAISE:
                raise InjectedFault(f"rank {fault.rank}: injected fault {fault}. Remove the fault option.")
            case Action.SLEEP:
                time.sleep(fault.sleep_s)
