"""Reward functions of the user: called in the rank or in processes, their results checked, failures counted.

A reward function is ``(prompts: list[str], responses: list[str], **columns: list) -> list[float]``, where the columns
are those of the data; sync or ``async def``. It is named ``module:function``. What it is called with:

============================  ==========================================  =========================================
function                      in the rank (``processes: 0``)              in processes (``processes: n``)
============================  ==========================================  =========================================
``def``                       all sequences of the rank in one call       one sequence per call, n calls at a time
``async def``                 one sequence per call, all calls at a time  the same, the sequences dealt to n processes
============================  ==========================================  =========================================

``sequences_per_call`` sets another number of sequences. An async function that should not have all calls open at once
holds a semaphore of its own: its calls share one event loop for the whole run.

A reward did not come (is NaN) if its function raised, returned no finite number for it, returned something else than a
list of one value per sequence, was late, or crashed its process. A call with several sequences that fails as a whole is
repeated with one sequence at a time, so that only those are lost that fail alone. In the rank a late function is
interrupted as `reward_worker.limited` says: Python code and system calls can be, an endless loop in C cannot. One that
holds the interpreter's lock for ``liveness.dead_after_s``, as a regular expression may, stops the rank's heartbeat and
so ends the run: such functions belong into processes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from megatron_real.backend import Samples
from megatron_real.errors import ConfigError
from megatron_real.reward_worker import (
    LARGEST,
    Caller,
    Failure,
    FunctionCall,
    Late,
    Reason,
    Result,
    ids_text,
    limited,
    load_function,
)
from megatron_real.runtime.rewards.options import RewardOptions
from megatron_real.runtime.rewards.pool import RewardPool

__all__ = ["RewardFunctions", "RewardLimits", "load_function", "reward_metrics"]

logger = logging.getLogger(__name__)

_ASYNC_GRACE_S = 2.0
"""Async calls are cancelled at their time, and interrupted only if that has not ended them after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLimits:
    """How reward functions are called; see `RewardOptions`."""

    timeout_s: float = 60.0
    """Of a call of a function."""
    batch_timeout_s: float = 300.0
    """Of `RewardFunctions.score`; what has not come then is late."""
    processes: int = 0
    sequences_per_call: int | None = None
    stop: bool = False
    """A reward that does not come is an error."""


class _Runner(Protocol):
    def run(self, calls: Sequence[FunctionCall], *, timeout_s: float, deadline: float) -> list[Result]: ...

    def close(self) -> None: ...


class RewardFunctions:
    """The weighted sum of reward functions; implements `backend.Scorer`. For the main thread of a rank.

    Nothing is collective: every rank has its own, for its own sequences. Use it in a ``with`` block, or call `close`.

    Args:
        weights: ``module:function`` -> weight.
        limits: how they are called.

    Raises:
        ConfigError: a function cannot be found; from `load_function`.
    """

    def __init__(self, weights: Mapping[str, float], limits: RewardLimits | None = None) -> None:
        self._names, self._weights = tuple(weights), tuple(weights.values())
        self._limits = limits or RewardLimits()
        self._caller = Caller(self._names)
        self._runner: _Runner = (
            RewardPool(self._names, self._limits.processes)
            if self._limits.processes
            else _InRank(self._caller)
        )
        self._counts: defaultdict[str, float] = defaultdict(float)

    @classmethod
    def of(cls, options: RewardOptions, *, stuck_after_s: float = 600.0) -> Self:
        """The functions that a run's options name. Their processes start when the first batch is scored.

        Args:
            options: the key ``reward``.
            stuck_after_s: the run's ``liveness.stuck_after_s``.
        """
        timeout_s = stuck_after_s / 10 if options.timeout_s is None else options.timeout_s
        return cls(
            {each.function: each.weight for each in options.functions},
            RewardLimits(
                timeout_s=timeout_s,
                batch_timeout_s=max(timeout_s, stuck_after_s / 2),
                processes=options.processes,
                sequences_per_call=options.sequences_per_call,
                stop=options.on_failure == "stop",
            ),
        )

    def score(self, call: str, samples: Samples) -> list[float]:
        """One reward per sequence, in their order; NaN for a reward that did not come.

        Those are counted, and logged once with an example.

        Raises:
            ConfigError: a reward did not come and this is to stop the run; names function, call and sequence. Or
                processes cannot load the functions.
        """
        outcomes = self._outcomes(call, samples)
        rewards: list[float] = []
        reasons: Counter[str] = Counter()
        example = ""
        for sequence in samples.ids:
            values = [outcomes[function, sequence] for function in range(len(self._names))]
            reward = self._weighted_sum(values)
            if isinstance(reward, Failure):
                example = example or self._say(values, reward)
                reasons[reward.reason] += 1
                reward = math.nan
            rewards.append(reward)
            for name, value in zip(self._names, values, strict=True):
                if not isinstance(value, Failure):
                    self._counts[f"sum/{name}"] += value
                    self._counts[f"values/{name}"] += 1
        self._counts["sequences"] += len(rewards)
        for reason, count in reasons.items():
            self._counts[f"missing/{reason}"] += count
        if reasons:
            if self._limits.stop:
                raise ConfigError(f"calls.{call}: {example}. Mend the function.")
            logger.warning(
                "calls.%s: %d of %d rewards did not come (%s); their sequences are masked. For example: %s.",
                *(call, reasons.total(), len(rewards)),
                ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
                example,
            )
        return rewards

    def take_counts(self) -> dict[str, float]:
        """What happened since the last time, as numbers that add up over ranks; for `reward_metrics`.

        ``sequences``; ``missing/REASON`` (a `Reason`, the first of a sequence's); for each function the number of
        values that came and their sum.
        """
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def close(self) -> None:
        """End the processes. Calling it again does nothing."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outcomes(self, call: str, samples: Samples) -> dict[tuple[int, int], float | Failure]:
        """By function and sequence."""
        deadline = time.monotonic() + self._limits.batch_timeout_s
        outcomes: dict[tuple[int, int], float | Failure] = {}
        calls = self._calls(samples)
        failed: list[tuple[FunctionCall, Failure]] = []
        for each, result in zip(calls, self._run(calls, deadline), strict=True):
            if isinstance(result, Failure):
                failed.append((each, result))
            else:
                outcomes.update(
                    {(each.function, i): value for i, value in zip(each.ids, result, strict=True)}
                )
        if failed and self._limits.stop:
            raise ConfigError(f"calls.{call}: {self._explain(*failed[0], deadline)}. Mend the function.")
        outcomes.update(
            {(each.function, each.ids[0]): failure for each, failure in failed if len(each.ids) == 1}
        )
        again = [single for each, _ in failed if len(each.ids) > 1 for single in each.singles()]
        for each, result in zip(again, self._run(again, deadline), strict=True):
            outcomes[each.function, each.ids[0]] = result if isinstance(result, Failure) else result[0]
        return outcomes

    def _run(self, calls: Sequence[FunctionCall], deadline: float) -> list[Result]:
        return self._runner.run(calls, timeout_s=self._limits.timeout_s, deadline=deadline) if calls else []

    def _calls(self, samples: Samples) -> list[FunctionCall]:
        count = max(1, len(samples.ids))
        calls = []
        for function in range(len(self._names)):
            is_async = self._caller.is_async(function)
            size = self._limits.sequences_per_call or (1 if is_async or self._limits.processes else count)
            for start in range(0, count, size):
                part = slice(start, start + size)
                calls.append(
                    FunctionCall(
                        function=function,
                        is_async=is_async,
                        ids=samples.ids[part],
                        prompts=samples.prompts[part],
                        responses=samples.responses[part],
                        columns={name: values[part] for name, values in samples.columns.items()},
                    )
                )
        return calls

    def _weighted_sum(self, values: Sequence[float | Failure]) -> float | Failure:
        total = 0.0
        for weight, value in zip(self._weights, values, strict=True):
            if isinstance(value, Failure):
                return value
            total += weight * value
        if abs(total) <= LARGEST:
            return total
        return Failure(reason=Reason.NOT_FINITE, text="")

    def _say(self, values: Sequence[float | Failure], failure: Failure) -> str:
        if failure in values:
            return f"reward function {self._names[values.index(failure)]} {failure.text}"
        return f"the weighted sum of {list(values)} is outside the range of float32"

    def _explain(self, call: FunctionCall, failure: Failure, deadline: float) -> str:
        """Why a call failed; where it raised, which of its sequences makes it raise."""
        text = f"reward function {self._names[call.function]} {failure.text}"
        if failure.reason is not Reason.RAISED or len(call.ids) == 1:
            return text
        for each, result in zip(call.singles(), self._run(call.singles(), deadline), strict=True):
            if isinstance(result, Failure) and result.reason is Reason.RAISED:
                return f"{text}; sequence {each.ids[0]} alone makes it raise (its response: {each.responses[0][:80]!r})"
        return f"{text}; only together do sequences {ids_text(call.ids)} make it raise"


def reward_metrics(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What the `take_counts` of all ranks tell together.

    Returns:
        ``missing/REASON`` -> number of sequences whose reward did not come, only where there are some; and each
        function's name -> mean of what it returned, without its weight.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for each in counts:
        for name, number in each.items():
            total[name] += number
    metrics = {name: value for name, value in total.items() if name.startswith("missing/")}
    for name, number in total.items():
        kind, _, function = name.partition("/")
        if kind == "values":
            metrics[function] = total[f"sum/{function}"] / number
    return metrics


class _InRank:
    """Calls the functions in this process: async ones at once, then the others one after the other."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def run(self, calls: Sequence[FunctionCall], *, timeout_s: float, deadline: float) -> list[Result]:
        results: dict[int, Result] = {}
        together = {i: call for i, call in enumerate(calls) if call.is_async}
        if together:
            limit_s = max(0.0, min(timeout_s, deadline - time.monotonic()))
            results.update(zip(together, self._at_once([*together.values()], limit_s), strict=True))
        for i, call in enumerate(calls):
            if not call.is_async:
                results[i] = self._one(call, min(timeout_s, deadline - time.monotonic()))
        return [results[i] for i in range(len(calls))]

    def _at_once(self, calls: Sequence[FunctionCall], limit_s: float) -> list[Result]:
        try:
            return limited(lambda: self._caller.gather(calls, limit_s), limit_s + _ASYNC_GRACE_S)
        except Late:
            what = f"or another async function did not return within {limit_s:.3g} s"
            return [call.failure(Reason.LATE, what) for call in calls]

    def _one(self, call: FunctionCall, limit_s: float) -> Result:
        if limit_s <= 0:
            return call.failure(Reason.LATE, "had no turn in the time for the batch")
        try:
            return limited(lambda: self._caller.call(call), limit_s)
        except Late:
            return call.failure(Reason.LATE, f"did not return within {limit_s:.3g} s")

    def close(self) -> None:
        self._caller.close()
