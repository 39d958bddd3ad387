"""What a plan was predicted to do beside what it did: instruction by instruction, and the iteration as a whole.

A plan keeps the price of each of its instructions (`priced_instructions`, in ``predicted.instructions``), so that its
timeline can be drawn again without the models, the device or the profile that it was priced with
(`predicted_simulation`). Simulated and measured spans go through one function (`instruction_seconds`), so that both
sides of a row mean the same.

Invariants (tests/unit/plan_search/test_comparison.py):
    - the simulation of a plan's own prices is the one that it was priced with;
    - a run that is the simulation has a ratio of 1 in every row;
    - waits count in no row.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan import Plan, Predicted
from megatron_real.plan_search.simulator import InstructionPrices, Simulation, TransferTime, simulate
from megatron_real.program import Instruction, Program, Save, Transfer
from megatron_real.trace import EVALUATION_SPAN, Span, SpanKind, attribute_waits

__all__ = [
    "Comparison",
    "MemoryRow",
    "PredictedRun",
    "Row",
    "compare",
    "decisions_hash",
    "instruction_seconds",
    "iteration_seconds",
    "predicted_simulation",
    "priced_instructions",
]

_KINDS = (SpanKind.RUN, SpanKind.REALLOC, SpanKind.TRANSFER, SpanKind.OFFLOAD)
"""Rows, in this order."""


def priced_instructions(program: Program, prices: InstructionPrices) -> list[list[Any]]:
    """``[name, seconds]``, or ``[name, send_s, wire_s, receive_s]`` of a transfer, in the program's order."""
    result: list[list[Any]] = []
    for instruction in program.instructions:
        match instruction:
            case Save():
                continue
            case Transfer():
                result.append([instruction.name, *prices.transfer(instruction)])
            case _:
                result.append([instruction.name, prices.seconds(instruction)])
    return result


def decisions_hash(plan: Plan) -> str:
    """Of what a plan decides, without its estimate: tells whether an estimate is of this plan."""
    text = plan.model_copy(update={"predicted": None}).dumps()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _RecordedPrices:
    """The prices that a plan keeps (`simulator.InstructionPrices`)."""

    def __init__(self, program: Program, recorded: Sequence[Sequence[Any]]) -> None:
        priced = [item for item in program.instructions if not isinstance(item, Save)]
        if [item.name for item in priced] != [row[0] for row in recorded]:
            raise PlanError("plan: found prices of other instructions than it has. Price it anew.")
        self._rows = {
            id(item): tuple(map(float, row[1:])) for item, row in zip(priced, recorded, strict=True)
        }

    def seconds(self, instruction: Instruction) -> float:
        return self._rows[id(instruction)][0]

    def transfer(self, instruction: Transfer) -> TransferTime:
        return TransferTime(*self._rows[id(instruction)])


def predicted_simulation(program: Program, *, iterations: int = 4) -> Simulation | None:
    """The timeline that a plan was predicted to have; None where the plan has no prices of its instructions.

    Raises:
        PlanError: the plan was changed after it was priced.
    """
    predicted = program.plan.predicted
    extra = (predicted.model_extra or {}) if predicted is not None else {}
    recorded = extra.get("instructions")
    if not isinstance(recorded, list):
        return None
    if extra.get("decisions") != decisions_hash(program.plan):
        raise PlanError(
            "plan: found a prediction for other decisions than the plan's: it was edited after it was priced. Price it "
            "anew, or drop `predicted`."
        )
    return simulate(program, _RecordedPrices(program, recorded), iterations=iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """What a run was expected to be; written beside it."""

    iteration_s: float | None
    peak_memory_bytes: Mapping[str, int]
    """By rank."""
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, predicted: Predicted, simulation: Simulation | None) -> PredictedRun:
        """From a plan's estimate and its timeline."""
        return cls(
            iteration_s=predicted.iteration_s,
            peak_memory_bytes=dict(predicted.peak_memory_bytes),
            spans=simulation.spans if simulation is not None else (),
        )

    def dump(self, path: Path) -> None:
        """Write it; the spans are those of a trace, one a line."""
        spans = ",\n  ".join(json.dumps(asdict(span)) for span in self.spans)
        head = json.dumps(
            {"iteration_s": self.iteration_s, "peak_memory_bytes": dict(self.peak_memory_bytes)}
        )
        path.write_text(f'{head[:-1]},\n "spans": [\n  {spans}\n ]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PredictedRun | None:
        """What `dump` wrote; None where there is no file.

        Raises:
            ConfigError: it is malformed.
        """
        if not path.is_file():
            return None
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            spans = tuple(Span(**{**span, "kind": SpanKind(span["kind"])}) for span in raw["spans"])
            return cls(
                iteration_s=raw["iteration_s"], peak_memory_bytes=raw["peak_memory_bytes"], spans=spans
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}: found no prediction ({error!r}); expected what `megatron-real train` writes. Delete it to "
                "show the measured run alone."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of one instruction, predicted and measured; None is not known."""

    kind: SpanKind
    name: str
    """The call, or ``producer>consumer``; of an offload or a mix the model, with what is done."""
    predicted_s: float | None
    measured_s: float | None

    @property
    def ratio(self) -> float | None:
        """Measured / predicted."""
        return _ratio(self.predicted_s, self.measured_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Peak of a rank, in bytes."""

    rank: int
    predicted_bytes: int | None
    measured_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """Measured / predicted."""
        return _ratio(self.predicted_bytes, self.measured_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside its prediction."""

    iteration: Row
    rows: tuple[Row, ...]
    memory: tuple[MemoryRow, ...]
    between_s: float
    """Seconds per iteration that a rank spends in no instruction, mean over ranks: the runtime's own work, and what it
    waits for the receivers of earlier messages."""
    waits: Mapping[int, float]
    """By rank: seconds per iteration that it waits for others."""
    iterations: int
    """Measured ones, without warm-up."""


def compare(measured: Iterable[Span], predicted: PredictedRun | None, *, warmup: int = 1) -> Comparison:
    """Lay a run beside its prediction.

    Args:
        measured: spans of all ranks.
        predicted: None leaves its columns empty.
        warmup: iterations at the start that do not count; all but one may be left out.

    Raises:
        ConfigError: there are no spans.
    """
    spans = attribute_waits(measured)
    numbers = sorted({span.iteration for span in spans if span.name != EVALUATION_SPAN})
    if not numbers:
        raise ConfigError("compare: found no spans; expected those of a run with at least one iteration.")
    counted = set(numbers[min(warmup, len(numbers) - 1) :])
    periods = iteration_seconds(spans)
    found = instruction_seconds(spans, counted)
    expected: dict[tuple[SpanKind, str], float] = {}
    if predicted is not None:
        simulated = attribute_waits(_whole_receives(predicted.spans))
        expected = instruction_seconds(simulated, {max((span.iteration for span in simulated), default=0)})
    keys = sorted(
        {**expected, **found},
        key=lambda key: (_KINDS.index(key[0]), _first(spans, key[1], predicted), key[1]),
    )
    return Comparison(
        iteration=Row(
            kind=SpanKind.OTHER,
            name="iteration",
            predicted_s=predicted.iteration_s if predicted is not None else None,
            measured_s=statistics.median(periods[number] for number in counted),
        ),
        rows=tuple(
            Row(
                kind=kind,
                name=_shown(kind, name),
                predicted_s=expected.get((kind, name)),
                measured_s=found.get((kind, name)),
            )
            for kind, name in keys
        ),
        memory=_memory(spans, predicted),
        between_s=_between(spans, counted),
        waits=_waits(spans, counted),
        iterations=len(counted),
    )


def instruction_seconds(spans: Iterable[Span], iterations: set[int]) -> dict[tuple[SpanKind, str], float]:
    """By kind and name: the median over iterations of the rank that spent most on it, waits excluded.

    A transfer is the sum of the slowest sender and the slowest receiver. What ranks tell each other within a call
    (``gather``) is no instruction. Where a call waited for weights that were streamed to it, that is the realloc's.
    """
    spent: dict[tuple[SpanKind, str], dict[int, dict[tuple[int, object], float]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(float))
    )
    for span in spans:
        side = span.facts.get("side")
        if span.kind in _KINDS and span.iteration in iterations and side != "gather":
            waited_s = span.facts.get("stream_wait_s")
            seconds = span.duration_s
            if span.kind is SpanKind.RUN and isinstance(waited_s, int | float):
                seconds -= waited_s
                exposed = spent[SpanKind.REALLOC, f"realloc:{span.subject}"][span.iteration]
                exposed[span.rank, None] += waited_s
            spent[span.kind, span.name][span.iteration][span.rank, side] += seconds
    return {
        key: statistics.median(_slowest(by_rank) for by_rank in by_iteration.values())
        for key, by_iteration in spent.items()
    }


def _slowest(by_rank: Mapping[tuple[int, object], float]) -> float:
    sides: dict[object, float] = defaultdict(float)
    for (_, side), seconds in by_rank.items():
        sides[side] = max(sides[side], seconds)
    return sum(sides.values())


def iteration_seconds(spans: Iterable[Span]) -> dict[int, float]:
    """By iteration: from the end of the one before (of its last rank, its checkpoint included) to its own end.

    An evaluation before an iteration is not counted.
    """
    ends: dict[int, float] = {}
    saved: dict[int, float] = {}
    evaluated: dict[int, float] = {}
    starts: dict[int, float] = {}
    for span in spans:
        number = span.iteration
        if span.name == "save":
            saved[number] = max(saved.get(number, span.end_s), span.end_s)
            continue
        if span.name == EVALUATION_SPAN:
            evaluated[number] = max(evaluated.get(number, span.end_s), span.end_s)
            continue
        ends[number] = max(ends.get(number, span.end_s), span.end_s)
        starts[number] = min(starts.get(number, span.start_s), span.start_s)
    result = {}
    for number, end in ends.items():
        before = number - 1
        begin = max(ends[before], saved.get(before, ends[before])) if before in ends else starts[number]
        result[number] = end - max(begin, evaluated.get(number, begin))
    return result


def _whole_receives(spans: Sequence[Span]) -> list[Span]:
    """Simulated spans with each receive and the wait before it as one, as a run measures it."""
    result: list[Span] = []
    for span in spans:
        before = result[-1] if result else None
        waited = (
            before is not None
            and before.kind is SpanKind.WAIT
            and span.kind is SpanKind.TRANSFER
            and (before.rank, before.iteration, before.name) == (span.rank, span.iteration, span.name)
        )
        if before is not None and waited:
            result[-1] = replace(span, start_s=before.start_s)
        else:
            result.append(span)
    return result


def _first(spans: Sequence[Span], name: str, predicted: PredictedRun | None) -> float:
    """When an instruction first happened: rows are in the order of the run."""
    where = [span for span in spans if span.name == name] or [
        span for span in (predicted.spans if predicted is not None else ()) if span.name == name
    ]
    return min(span.start_s for span in where)


def _shown(kind: SpanKind, name: str) -> str:
    return name if kind is SpanKind.OFFLOAD or name.startswith("mix:") else name.partition(":")[2]


def _memory(spans: Sequence[Span], predicted: PredictedRun | None) -> tuple[MemoryRow, ...]:
    expected = {int(rank): peak for rank, peak in predicted.peak_memory_bytes.items()} if predicted else {}
    found: dict[int, int] = {}
    for span in spans:
        peak = span.facts.get("peak_bytes")
        if isinstance(peak, int | float):
            found[span.rank] = max(found.get(span.rank, 0), int(peak))
    return tuple(
        MemoryRow(rank=rank, predicted_bytes=expected.get(rank), measured_bytes=found.get(rank))
        for rank in sorted({*expected, *found})
    )


def _between(spans: Sequence[Span], iterations: set[int]) -> float:
    gaps: dict[tuple[int, int], float] = defaultdict(float)
    last: dict[int, Span] = {}
    for span in spans:
        before = last.get(span.rank)
        if before is not None and span.iteration in iterations:
            gaps[span.rank, span.iteration] += max(0.0, span.start_s - before.end_s)
        last[span.rank] = span
    ranks = {rank for rank, _ in gaps}
    per_rank = [
        statistics.median(value for (other, _), value in gaps.items() if other == rank) for rank in ranks
    ]
    return statistics.fmean(per_rank) if per_rank else 0.0


def _waits(spans: Sequence[Span], iterations: set[int]) -> dict[int, float]:
    waited: dict[int, float] = {span.rank: 0.0 for span in spans}
    for span in spans:
        if span.kind is SpanKind.WAIT and span.iteration in iterations and span.name != "save":
            waited[span.rank] += span.duration_s
    return {rank: seconds / len(iterations) for rank, seconds in sorted(waited.items())}


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted if predicted and measured is not None else None
