"""Why a plan is as it is: what its period waits for, and what each neighbouring choice would change.

A neighbour differs from the plan in one call: its layout on the same window, its window in the same kind of layout, or
how it works there (micro-batches, recomputation, what happens to its weights). All are evaluated as the search does it;
those that are reported are simulated too, so that their seconds stand beside the plan's.

Invariants (tests/unit/plan_search/test_explain.py):
    - a reported neighbour's period is that of the estimate of its plan;
    - of each kind those are reported that no other one of it beats (brute force on a small cluster);
    - a neighbour that does not fit says how many bytes it has too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_real.capabilities import placement_problems
from megatron_real.dataflow import Call
from megatron_real.errors import PlanError
from megatron_real.layout import Mesh
from megatron_real.plan import Placement, Plan
from megatron_real.plan_search.memory_report import memory_report
from megatron_real.plan_search.planner import Estimate, Planner
from megatron_real.plan_search.problem import Choice, Evaluation, Option, SearchProblem
from megatron_real.plan_search.simulator import PathStep, simulate
from megatron_real.plan_search.space import SpaceOptions, candidates
from megatron_real.program import compile_program
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES

__all__ = ["SLACK", "Explanation", "Kind", "Neighbour", "explain", "problem_of", "ranks_text"]

SLACK = 1e-6
"""Periods that differ by less than this part are equal."""


class Kind(StrEnum):
    """In what a neighbour differs."""

    LAYOUT = "layout"
    WINDOW = "window"
    WORK = "work"
    """Micro-batches, recomputation, offload, dropped weights, streaming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A plan that differs in one call."""

    call: str
    kind: Kind
    change: str
    """From what to what."""
    plan: Plan
    period_s: float
    delta_s: float
    """Period minus that of the plan; negative is better."""
    excess_bytes: int
    """By how much its fullest rank exceeds the capacity; 0 or less fits."""

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan is as it is."""

    estimate: Estimate
    neighbours: tuple[Neighbour, ...]
    """By call in the graph's order, by kind, fitting ones first, best first."""
    num_evaluated: int

    @property
    def critical_path(self) -> tuple[PathStep, ...]:
        return self.estimate.simulation.critical_path

    def of(self, call: str) -> tuple[Neighbour, ...]:
        """The neighbours that differ in `call`."""
        return tuple(neighbour for neighbour in self.neighbours if neighbour.call == call)

    @property
    def better(self) -> tuple[Neighbour, ...]:
        """Neighbours that fit and are faster, best first; none for a plan that is optimal among what was looked at."""
        slack = SLACK * self.estimate.period_s
        found = [one for one in self.neighbours if one.fits and one.delta_s < -slack]
        return tuple(sorted(found, key=lambda one: one.delta_s))


def problem_of(planner: Planner) -> SearchProblem:
    """A problem without a table of options: to evaluate choices that are priced elsewhere."""
    prices = planner.prices
    return SearchProblem(
        graph=planner.graph,
        cluster=planner.cluster.spec,
        meshes=planner.cluster.meshes(),
        capacity_bytes=planner.cluster.capacity_bytes - prices.memory.reserve_bytes,
        options={},
        realloc_s=prices.realloc_s,
        mix_s=prices.mix_s,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
    )


def explain(
    planner: Planner,
    plan: Plan,
    *,
    options: SpaceOptions | None = None,
    most: int = 3,
    progress: Callable[[str, int, int], None] | None = None,
) -> Explanation:
    """Explain a plan.

    Args:
        planner: of the plan's algorithm.
        plan: searched or written by hand; it need not fit.
        options: what neighbours may be.
        most: neighbours to report of each call and kind, of those that fit and of those that do not.
        progress: called with the name of a call, how many are done, and how many there are.

    Raises:
        PlanError: the plan cannot be priced.
    """
    estimate = planner.estimate(plan)
    search = _Neighbours(planner, plan, options or SpaceOptions())
    found: list[Neighbour] = []
    for index, call in enumerate(planner.graph.calls):
        if progress is not None:
            progress(call.name, index, len(planner.graph.calls))
        for kind in Kind:
            for placement, change in search.best(call, kind, most):
                found.append(_simulated(planner, estimate, (call.name, kind, change), placement))
    return Explanation(estimate=estimate, neighbours=tuple(found), num_evaluated=search.num_evaluated)


class _Neighbours:
    def __init__(self, planner: Planner, plan: Plan, options: SpaceOptions) -> None:
        self._planner = planner
        self._plan = plan
        self._problem = problem_of(planner)
        self._options = options
        self._now = {call.name: self._choice(call, plan.calls[call.name]) for call in planner.graph.calls}
        self.num_evaluated = 0

    def best(self, call: Call, kind: Kind, most: int) -> list[tuple[Placement, str]]:
        """The best placements of a kind with what they change: up to `most` that fit, and as many that do not."""
        scored: dict[object, tuple[Evaluation, Choice]] = {}
        for group, choice in self._of_kind(call, kind):
            try:
                priced = self._choice(call, choice.option.placement(choice.mesh))
                evaluation = self._problem.evaluate({**self._now, call.name: priced}, self._plan.order)
            except PlanError:  # it has no price
                continue
            self.num_evaluated += 1
            known = scored.get(group)
            if known is None or _rank(evaluation) < _rank(known[0]):
                scored[group] = (evaluation, priced)
        ordered = sorted(scored.values(), key=lambda entry: _rank(entry[0]))
        fitting = [choice for evaluation, choice in ordered if evaluation.fits][:most]
        others = sorted(
            ((e.period_s, choice) for e, choice in ordered if not e.fits), key=lambda entry: entry[0]
        )
        chosen = [*fitting, *(choice for _, choice in others[:most])]
        now = self._plan.calls[call.name]
        return [
            (placement, _change(now, placement, kind))
            for placement in (choice.option.placement(choice.mesh) for choice in chosen)
        ]

    def _choice(self, call: Call, placement: Placement) -> Choice:
        prices = self._planner.prices
        option = Option(
            layout=placement.parallel,
            num_microbatches=placement.num_microbatches,
            recompute=placement.recompute,
            offload=placement.offload,
            drop_trained_weights=placement.drop_trained_weights,
            stream=placement.stream,
            seconds=0.0,
        )
        priced = prices.with_seconds(call, prices.with_bytes(call, option), placement.mesh)
        return Choice(placement.mesh, priced)

    def _of_kind(self, call: Call, kind: Kind) -> Iterator[tuple[object, Choice]]:
        """Unpriced choices; those with one group stand for one neighbour, the best of them."""
        mesh, now = self._now[call.name]
        if kind is Kind.WINDOW:
            yield from self._windows(call)
            return
        for option in self._candidates(call, mesh.size):
            if kind is Kind.LAYOUT and option.layout != now.layout and _residence(option) == _residence(now):
                yield option.layout, Choice(mesh, option)
            elif kind is Kind.WORK and option.layout == now.layout and not _same_work(option, now):
                yield _work(option), Choice(mesh, option)

    def _windows(self, call: Call) -> Iterator[tuple[object, Choice]]:
        mesh, now = self._now[call.name]
        split = now.layout.size // now.layout.dp
        by_size: dict[int, list[Option]] = {}
        for window in self._distinct_windows(call.name):
            if window.size == mesh.size:
                yield window, Choice(window, now)
            elif window.size % split == 0:
                if window.size not in by_size:
                    layout = replace(now.layout, dp=window.size // split)
                    by_size[window.size] = [
                        option
                        for option in self._candidates(call, window.size)
                        if option.layout == layout and _residence(option) == _residence(now)
                    ]
                for option in by_size[window.size]:
                    yield window, Choice(window, option)

    def _distinct_windows(self, name: str) -> Iterable[Mesh]:
        """Windows but the call's own; of those that lie alike to all other calls' windows, the first."""
        others = [choice.mesh for other, choice in self._now.items() if other != name]
        mine = self._now[name].mesh
        seen: dict[object, Mesh] = {}
        for window in self._planner.cluster.meshes():
            if window != mine:
                nodes = len(self._planner.cluster.nodes_of(window))
                where = tuple(_relation(window, other) for other in others)
                seen.setdefault((window.size, nodes, where), window)
        return seen.values()

    def _candidates(self, call: Call, size: int) -> Iterator[Option]:
        for option in candidates(self._planner.prices, call, size, self._options):
            placement = option.placement(Mesh(0, option.size))
            if self._options.plan_only or not any(placement_problems(call, placement)):
                yield option


def _simulated(
    planner: Planner, estimate: Estimate, what: tuple[str, Kind, str], placement: Placement
) -> Neighbour:
    name, kind, change = what
    calls = {**estimate.plan.calls, name: placement}
    plan = estimate.plan.model_copy(update={"calls": calls, "predicted": None})
    program = compile_program(planner.graph, plan)
    period_s = simulate(program, planner.prices_of(program)[0], iterations=1).period_s
    report = memory_report(planner.prices.memory, program)
    peak = max(group.peak_bytes for group in report.groups)
    return Neighbour(
        call=name,
        kind=kind,
        change=change,
        plan=plan,
        period_s=period_s,
        delta_s=period_s - estimate.period_s,
        excess_bytes=peak - planner.cluster.capacity_bytes,
    )


def _rank(evaluation: Evaluation) -> tuple[bool, float, float]:
    """Fitting ones first, by period; others by what they lack."""
    if evaluation.fits:
        return False, evaluation.period_s, 0.0
    return True, evaluation.overflow_bytes, evaluation.period_s


def _relation(window: Mesh, other: Mesh) -> str:
    if not window.overlaps(other):
        return "apart"
    if window == other:
        return "equal"
    if window.start >= other.start and window.stop <= other.stop:
        return "inside"
    return "around" if window.start <= other.start and window.stop >= other.stop else "across"


def _residence(option: Option) -> tuple[str, bool, bool]:
    return option.offload, option.drop_trained_weights, option.stream


def _work(option: Option) -> tuple[object, ...]:
    return option.num_microbatches, option.recompute, *_residence(option)


def _same_work(one: Option, other: Option) -> bool:
    return _work(one) == _work(other)


def _change(now: Placement, then: Placement, kind: Kind) -> str:
    """What is other, such as ``d4t2p1 -> d2t4p1, 4 micro-batches``."""
    parts: list[str] = []
    if kind is Kind.WINDOW:
        parts.append(f"ranks {ranks_text(now.mesh)} -> {ranks_text(then.mesh)}")
    if now.parallel != then.parallel:
        parts.append(f"{now.parallel} -> {then.parallel}")
    values: Mapping[str, Sequence[object]] = {
        "micro-batches": (now.num_microbatches, then.num_microbatches),
        "recompute": (now.recompute, then.recompute),
        "offload": (now.offload, then.offload),
        "drop trained weights": (now.drop_trained_weights, then.drop_trained_weights),
        "stream": (now.stream, then.stream),
    }
    parts += [f"{name} {_word(old)} -> {_word(new)}" for name, (old, new) in values.items() if old != new]
    return ", ".join(parts)


def ranks_text(mesh: Mesh) -> str:
    """``0-7``, or ``3`` for a single rank."""
    return str(mesh) if mesh.size > 1 else str(mesh.start)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
