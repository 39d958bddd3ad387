"""Reward functions for the tests of rewards. Imports nothing heavy: processes of a pool load it."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def length(prompts, responses, **columns):
    return [float(len(response)) for response in responses]


def twos(prompts, responses, **columns):
    return [2.0] * len(responses)


def goals(prompts, responses, goal):
    assert len(prompts) == len(responses) == len(goal)
    return goal


def returns(prompts, responses, value, **columns):
    """What the column `value` has for the first sequence, whatever that is."""
    return value[0]


def values(prompts, responses, value, **columns):
    return value


def alone(prompts, responses, **columns):
    if len(prompts) > 1:
        raise ValueError("one at a time")
    return [1.0]


def batch_size(prompts, responses, **columns):
    return [float(len(responses))] * len(responses)


def has_torch(prompts, responses, **columns):
    return [float("torch" in sys.modules)] * len(responses)


def act(prompts, responses, **columns):
    """Each response says what happens; a number is the reward."""
    return [_act(response) for response in responses]


def _act(what: str) -> Any:
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "sys.exit":
        sys.exit(3)
    if what == "raise":
        raise ZeroDivisionError("division by zero")
    if what == "hang":
        time.sleep(60)
    if what == "regex":  # takes years, and holds the interpreter's lock
        re.match("(a+)+b", "a" * 40)
    if what == "stubborn":
        for _ in range(2):
            with contextlib.suppress(BaseException):
                time.sleep(60)
        return 1.0
    if what.startswith("child "):  # start a process that writes its number there, and never return
        child = subprocess.Popen(["sleep", "60"])
        Path(what.removeprefix("child ")).write_text(str(child.pid))
        time.sleep(60)
    if what.startswith("slow "):
        time.sleep(float(what.removeprefix("slow ")))
        return 1.0
    return None if what == "none" else float(what)


GATE = asyncio.Semaphore(3)
"""Shared by all calls of a run, which a semaphore only can be in one event loop."""
OPEN = [0, 0]
"""Calls of `gated` that are open, and the most that ever were."""


async def gated(prompts, responses, **columns):
    async with GATE:
        OPEN[0] += 1
        OPEN[1] = max(OPEN)
        await asyncio.sleep(0.01)
        OPEN[0] -= 1
    return [float(len(response)) for response in responses]


async def act_async(prompts, responses, **columns):
    assert len(responses) == 1
    what = responses[0]
    if what == "hang":
        await asyncio.sleep(60)
    if what.startswith("slow "):
        await asyncio.sleep(float(what.removeprefix("slow ")))
        return [1.0]
    if what == "block":
        return [_act("hang")]
    if what == "cancel":
        raise asyncio.CancelledError
    return [_act(what)]


class Judge:
    """An object that is called and waits."""

    async def __call__(self, prompts, responses, **columns):
        await asyncio.sleep(0)
        return [5.0] * len(responses)


judge = Judge()
