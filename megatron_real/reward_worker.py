"""Calls the user's reward functions and says what came of it: in a rank, or as the main program of a process.

A process of `megatron_real.runtime.rewards.pool` runs `main`. It starts in a fraction of a second, since nothing is
imported here but the standard library and the errors.

Invariants (tests/unit/runtime/test_rewards.py, tests/unit/runtime/test_reward_pool.py):
    - whatever a function does, short of ending its process or never returning, becomes a value or a `Failure`;
    - a process ends with the one that started it, also inside a function that never returns (Linux; elsewhere as
      soon as the function returns).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import math
import numbers
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from megatron_real.errors import ConfigError

__all__ = [
    "LARGEST",
    "Caller",
    "Failure",
    "FunctionCall",
    "Late",
    "Reason",
    "Result",
    "ids_text",
    "limited",
    "load_function",
    "main",
]

LARGEST = 3.4028234663852886e38
"""The largest float32, which rewards are kept in."""

_CLEAN_UP_S = 1.0
"""How long an async call may take to end after it was cancelled."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Reason(StrEnum):
    """Why a reward did not come."""

    RAISED = "raised"
    LATE = "late"
    CRASHED = "crashed"
    """The function's process ended."""
    NOT_FINITE = "not_finite"
    """NaN, infinite, or too large for float32."""
    NO_NUMBER = "no_number"
    """None or another type in the place of a number."""
    NO_LIST = "no_list"
    """Something else than a list with one value per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reward that did not come."""

    reason: Reason
    text: str
    """What the function did and for which sequences: a sentence that begins with the function's name, without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One call of a reward function, with some of a batch's sequences."""

    function: int
    """Its position in the list of functions."""
    is_async: bool
    ids: tuple[int, ...]
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    columns: dict[str, tuple[Any, ...]]

    def singles(self) -> list[FunctionCall]:
        """The same, one sequence at a time."""
        return [
            FunctionCall(
                function=self.function,
                is_async=self.is_async,
                ids=(self.ids[i],),
                prompts=(self.prompts[i],),
                responses=(self.responses[i],),
                columns={name: (values[i],) for name, values in self.columns.items()},
            )
            for i in range(len(self.ids))
        ]

    def failure(self, reason: Reason, what: str) -> Failure:
        """The failure of the whole call: `what` the function did."""
        text = f"{what} for sequence{'s' if len(self.ids) > 1 else ''} {ids_text(self.ids)}"
        if len(self.ids) == 1:
            text += f". The response was {self.responses[0][:80]!r}"
        return Failure(reason=reason, text=text)


Result = list[float | Failure] | Failure
"""What came of a call: one entry per sequence, or the failure of the call as a whole."""


class Late(BaseException):
    """Raised inside a function whose time is over; no Exception, which the function might catch."""


def load_function(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, has no such function, or it is
            not callable.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"reward function: found {name!r}; expected module:function, for example rewards:short_answers."
        )
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # a module of the user: importing it can raise anything
        raise ConfigError(
            f"reward function {name}: module {module_name!r} cannot be imported ({type(error).__name__}: "
            f"{error}). Put its folder on PYTHONPATH, or mend the module."
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            known = [
                key for key, value in vars(target).items() if callable(value) and not key.startswith("_")
            ]
            raise ConfigError(
                f"reward function {name}: {module_name} has no {attribute!r}; it has "
                f"{', '.join(sorted(known)) or 'none'}."
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(
            f"reward function {name}: found {type(target).__name__}; expected a function of prompts and "
            "responses."
        )
    function: Callable[..., Any] = target
    return function


class Caller:
    """Calls the functions of a list. Async ones share one event loop until `close`, so they may share connections.

    Raises:
        ConfigError: from `load_function`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = [load_function(name) for name in names]
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_async(self, function: int) -> bool:
        """Whether it is an ``async def``, or an object with an async ``__call__``."""
        target = self._functions[function]
        return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)

    def call(self, call: FunctionCall) -> Result:
        """Call a function that is not async."""
        try:
            return _checked(call, self._invoke(call))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code can raise anything
            return self._raised(call, error)

    def gather(self, calls: Sequence[FunctionCall], timeout_s: float) -> list[Result]:
        """Call async functions, all at once; calls that have not returned after `timeout_s` seconds are cancelled.

        Raises:
            Late: from `limited`, if a function held up the others; functions that it interrupts are late themselves.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(self._gather(calls, timeout_s))
        except Late:  # raised in the loop, not in a function: it cannot be used any more
            self._loop = None
            raise

    def close(self) -> None:
        """End the event loop."""
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._loop = None

    async def _gather(self, calls: Sequence[FunctionCall], timeout_s: float) -> list[Result]:
        tasks = [asyncio.ensure_future(self._await(call, timeout_s)) for call in calls]
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:  # let them close what they have open
            await asyncio.wait(late, timeout=_CLEAN_UP_S)
        return [
            _late(call, timeout_s) if task in late else task.result()
            for call, task in zip(calls, tasks, strict=True)
        ]

    async def _await(self, call: FunctionCall, timeout_s: float) -> Result:
        try:
            return _checked(call, await self._invoke(call))
        except Late:
            return _late(call, timeout_s)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - as in `call`
            return self._raised(call, error)

    def _invoke(self, call: FunctionCall) -> Any:
        columns = {name: list(values) for name, values in call.columns.items()}
        return self._functions[call.function](list(call.prompts), list(call.responses), **columns)

    def _raised(self, call: FunctionCall, error: BaseException) -> Failure:
        code = getattr(inspect.unwrap(self._functions[call.function]), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        place = (own or frames)[-1]
        what = f"raised {type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"
        return call.failure(Reason.RAISED, what)


def limited[T](function: Callable[[], T], seconds: float) -> T:
    """Call a function that is interrupted when the time is over.

    Only the main thread can be interrupted, and only between two steps of Python or in a system call; in another thread
    there is no limit. A timer that runs already is held up and goes on afterwards.

    Raises:
        Late: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()

    def ring(signum: int, frame: object) -> None:
        raise Late

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if rest > 0:
            signal.setitimer(signal.ITIMER_REAL, max(rest - (time.monotonic() - start), 1e-3), interval)

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    # It rings again every second, for functions that catch everything.
    rest, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            return function()
        finally:
            stop()
    except Late:
        stop()  # it may have rung in the `finally`
        raise


def ids_text(ids: Sequence[int]) -> str:
    """The first few of `ids`, for a message."""
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def _late(call: FunctionCall, timeout_s: float) -> Failure:
    return call.failure(Reason.LATE, f"did not return within {timeout_s:.3g} s")


def _checked(call: FunctionCall, values: Any) -> Result:
    """What a function returned, as numbers."""
    count = len(call.ids)
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        text = f"returned {type(values).__name__}; expected a list of {count} floats"
        return Failure(reason=Reason.NO_LIST, text=text)
    if len(values) != count:
        text = f"returned {len(values)} values; expected {count}, one for each of the sequences {ids_text(call.ids)}"
        return Failure(reason=Reason.NO_LIST, text=text)
    return [
        _number(value, sequence, response)
        for value, sequence, response in zip(values, call.ids, call.responses, strict=True)
    ]


def _number(value: Any, sequence: int, response: str) -> float | Failure:
    reason, expected = Reason.NO_NUMBER, "a finite number"
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= LARGEST:
            return number
        reason = Reason.NOT_FINITE
        if not isinstance(value, float) or math.isfinite(value):
            expected = "a number in the range of float32"
    text = f"returned {repr(value)[:80]} for sequence {sequence}; expected {expected}"
    return Failure(reason=reason, text=f"{text}. The response was {response[:80]!r}")


def main() -> None:
    """Serve calls until the other end of the connection is closed.

    Command line: a connection's descriptor, the parent's process id, and the functions' names as a JSON list. Sends
    None, or the text of a ConfigError if the functions cannot be loaded; then takes ``(calls, timeout_s)``, calls that
    are all async or one that is not, and sends the list of their results.
    """
    descriptor, parent, names = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    _end_with(parent)
    # A connection that breaks: the parent is gone, or ends this process.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        try:
            caller = Caller(names)
        except ConfigError as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            calls, timeout_s = connection.recv()
            connection.send(caller.gather(calls, timeout_s) if calls[0].is_async else [caller.call(calls[0])])


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends; prctl(2)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
