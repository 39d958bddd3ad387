"""The program that rank 0 publishes, and that every rank compares with its own before it runs it.

Every rank compiles the program itself, from the same plan. Ranks that were started with different plans,
options, prompts or package versions would hang in the first collective that only some of them join, or train on
different things; this check names the difference instead. What has to agree beside the program is the caller's to say
(`agreement_text`).
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
from collections.abc import Mapping

import torch.distributed as dist

from megatron_real.errors import ConfigError, PeerError
from megatron_real.program import Program
from megatron_real.runtime.liveness.store_client import open_client

__all__ = ["agree_on_program", "agreement_text", "program_hash", "program_text"]

_KEY = "program"
_SHOWN_LINES = 6


def program_text(program: Program) -> str:
    """A program as text, equal on two ranks if and only if they would do the same; one line per instruction."""
    calls = (f"{name}: {placement!r}" for name, placement in program.plan.calls.items())
    graph = (f"{call!r}" for call in program.graph.calls)
    instructions = (f"{index} {step!r}" for index, step in enumerate(program.instructions))
    return "\n".join([f"world_size={program.world_size}", *calls, *graph, *instructions])


def agreement_text(program: Program, extra: Mapping[str, str]) -> str:
    """What all ranks have to agree on: `extra`, a line for each, then `program_text`.

    Args:
        program: this rank's.
        extra: values by name, such as options, versions and a hash of the data; nothing that is a machine's own, such
            as the path of a file.
    """
    lines = (f"{name}={json.dumps(value)}" for name, value in sorted(extra.items()))
    return "\n".join([*lines, program_text(program)])


def program_hash(text: str) -> str:
    """A short name of a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree_on_program(store: dist.Store, rank: int, text: str, *, timeout_s: float = 60.0) -> str:
    """Publish the program (rank 0), or compare with what rank 0 published (every other rank).

    Called again, with another program, after a switch of plan.

    Args:
        store: the default store of ``torch.distributed``.
        rank: this rank.
        text: `agreement_text` of this rank.
        timeout_s: how long rank 0 may take.

    Returns:
        The program's hash.

    Raises:
        ConfigError: this rank's program, or what was added to it, is another one; shows the first differences.
        PeerError: rank 0 did not publish in time.
    """
    client = open_client(store, purpose="program", who=f"rank {rank}", timeout_s=timeout_s)
    name = program_hash(text)
    if rank == 0:
        client.set(_KEY, json.dumps({"hash": name, "text": text}))
        return name
    try:
        client.wait([_KEY], datetime.timedelta(seconds=timeout_s))
        published = json.loads(client.get(_KEY))
    except RuntimeError as error:
        raise PeerError(
            f"program: rank 0 did not publish its program within {timeout_s:g} s (rank {rank} asked). "
            "Look at the output of rank 0."
        ) from error
    if published["hash"] != name:
        diff = difflib.unified_diff(published["text"].splitlines(), text.splitlines(), n=0, lineterm="")
        lines = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
        shown = "\n".join(lines[:_SHOWN_LINES])
        raise ConfigError(
            f"program: rank {rank} compiled {name}, rank 0 published {published['hash']}; expected the same. "
            "Start every rank with the same plan, options, prompts and versions. "
            f"Differences (- rank 0, + rank {rank}):\n{shown}"
        )
    return name
