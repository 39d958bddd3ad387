"""The front door of the search: from an algorithm, models, a cluster and a workload to a plan with its proof.

    planner = Planner(ppo_graph(), models, cluster, workload)
    report = planner.search()
    report.plan.dump("plan.json")

No torch, no processes. `search` in `megatron_real.plan_search` is this in one call.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_real import __version__
from megatron_real.capabilities import capability_problems, graph_problems
from megatron_real.dataflow import Graph
from megatron_real.errors import CapacityError, ConfigError, PlanError, Problem, raise_problems
from megatron_real.plan import ClusterSpec, Plan, Predicted
from megatron_real.plan_search import presets
from megatron_real.plan_search.cluster import Cluster
from megatron_real.plan_search.comparison import decisions_hash, priced_instructions
from megatron_real.plan_search.contention import Refinement, refine
from megatron_real.plan_search.costs.analytic import AnalyticCost
from megatron_real.plan_search.costs.calls import CallCost
from megatron_real.plan_search.costs.moves import ReallocCost
from megatron_real.plan_search.costs.operations import OperationCosts
from megatron_real.plan_search.memory_report import MemoryReport, memory_report
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.pricing import Prices, ProgramPrices
from megatron_real.plan_search.problem import Limits, Progress, SearchProblem, Solution
from megatron_real.plan_search.refined_search import Refined, refined_search
from megatron_real.plan_search.simulator import Simulation, simulate
from megatron_real.plan_search.space import Pin, Space, SpaceOptions, build_space
from megatron_real.plan_search.strategies import STRATEGIES
from megatron_real.plan_search.strategies import strategy as strategy_of
from megatron_real.plan_search.workload import LengthDistribution, Workload
from megatron_real.program import Program, Realloc, compile_program

__all__ = ["Estimate", "PinPrice", "Planner", "SearchReport", "search"]

_PLAN_ONLY = "To price it all the same, add --plan-only (search.plan_only=true)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan is predicted to do."""

    plan: Plan
    """With `predicted` filled in."""
    program: Program
    simulation: Simulation
    calls: Mapping[str, CallCost]
    reallocs: Mapping[str, ReallocCost]
    """By the call that needs it."""
    memory: MemoryReport
    problems: tuple[Problem, ...]
    """Why it does not fit; empty if it does."""
    refinement: Refinement | None = None
    """Of its prices, where ranks share the cores of their node."""

    @property
    def period_s(self) -> float:
        return self.simulation.period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PinPrice:
    """What one pin costs: the best period without it against the best with it."""

    call: str
    pin: Pin
    period_without_s: float
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """A plan, how good it is, and what it was chosen from."""

    estimate: Estimate
    solution: Solution
    """What the strategy found and proved. With `refined` that is about prices before they were refined, and the plan
    may be another one."""
    space: Space
    pin_prices: tuple[PinPrice, ...] = ()
    refined: Refined | None = None
    """Where ranks share the cores of their node."""

    @property
    def plan(self) -> Plan:
        return self.estimate.plan

    @property
    def proof(self) -> Solution | Refined:
        """What holds of the plan: the period that it was chosen by, the lower bound and the gap."""
        return self.refined if self.refined is not None else self.solution


class Planner:
    """Prices and searches plans of one algorithm under one workload.

    Args:
        graph: the algorithm's calls.
        models: by role.
        cluster: devices; `ClusterSpec.device` names the constants.
        workload: of an iteration.
        operations: measured or analytic prices of operations; None takes the device's constants.

    Raises:
        PlanError: a role has no model. ConfigError: the device is unknown.
    """

    def __init__(
        self,
        graph: Graph,
        models: Mapping[str, ModelSpec],
        cluster: ClusterSpec,
        workload: Workload,
        operations: OperationCosts | None = None,
    ) -> None:
        self.graph = graph
        self.cluster = Cluster.of(cluster)
        self.workload = workload
        self.operations = operations if operations is not None else AnalyticCost(self.cluster.device)
        self.prices = Prices(graph, models, self.cluster, workload, self.operations)
        self._spaces: dict[str, Space] = {}

    def space(self, options: SpaceOptions | None = None, pins: Mapping[str, Pin] | None = None) -> Space:
        """The choices, priced; kept for the next search with the same options and pins.

        Raises:
            PlanError: the runtime cannot execute the algorithm's calls, and the options ask for what it can; or as
                `build_space`.
        """
        options, pins = options or SpaceOptions(), dict(pins or {})
        if not options.plan_only:
            raise_problems(
                (replace(problem, fix=_PLAN_ONLY) for problem in graph_problems(self.graph)),
                subject=f"search: the runtime cannot execute {self.graph.name}",
            )
        key = repr((options, sorted((name, repr(pin)) for name, pin in pins.items())))
        if key not in self._spaces:
            self._spaces[key] = build_space(
                self.graph, self.prices.models, self.cluster, self.prices, options=options, pins=pins
            )
        return self._spaces[key]

    def space_for(
        self, strategy: str, options: SpaceOptions | None = None, pins: Mapping[str, Pin] | None = None
    ) -> Space:
        """The choices of a strategy: a preset chooses among layouts that a search would not look at."""
        options = options or SpaceOptions()
        if strategy in presets.PRESETS:
            options = replace(options, keep_layouts=True)
        return self.space(options, pins)

    def search(
        self,
        strategy: str = "exact",
        *,
        limits: Limits | None = None,
        options: SpaceOptions | None = None,
        pins: Mapping[str, Pin] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> SearchReport:
        """Find a plan. Where ranks share the cores of their node it takes half as long again (`refined_search`).

        Args:
            strategy: ``exact``, ``beam``, ``mcmc``, ``greedy``, ``cpsat``, ``brute``, or a preset: ``heuristic``,
                ``symmetric``, ``split``, ``hybrid``, ``colocated``.
            limits: when to stop.
            options: what to choose from.
            pins: what is fixed, by call.
            progress: called now and then with the best so far.

        Raises:
            ConfigError: no such strategy.
            PlanError: a pin or an option of the input cannot be.
            CapacityError: nothing fits, with what is missing.
        """
        limits = limits or Limits()
        started = time.monotonic()
        space = self.space_for(strategy, options, pins)
        solution = self.solve(space.problem, strategy, limits, progress=progress)
        if solution.assignment is None:
            raise self._nothing_fits(space, solution, strategy)
        refined = self._refined(strategy, solution, limits, options, pins)
        proof = refined if refined is not None else solution
        seconds = time.monotonic() - started
        estimate = self.estimate(
            refined.plan if refined else space.problem.to_plan(solution.assignment, solution.order),
            extra={
                "strategy": strategy,
                "search_s": round(seconds, 3),
                "evaluations": solution.evaluations,
                "search_period_s": proof.period_s,
                "gap": proof.gap,
            },
            lower_bound_s=proof.lower_bound_s,
        )
        return SearchReport(
            estimate=estimate,
            solution=solution,
            space=space,
            pin_prices=self._pin_prices(strategy, limits, options, pins or {}, proof.period_s),
            refined=refined,
        )

    def _refined(
        self,
        strategy: str,
        solution: Solution,
        limits: Limits,
        options: SpaceOptions | None,
        pins: Mapping[str, Pin] | None,
    ) -> Refined | None:
        """The choice at refined prices; None where ranks have cores of their own, or nothing was found."""
        if not self.prices.calls.shares_cores or solution.assignment is None:
            return None
        return refined_search(self, strategy, solution, limits, options, pins)

    def solve(
        self,
        problem: SearchProblem,
        strategy: str,
        limits: Limits,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """Run a strategy or a preset on a problem.

        Raises:
            ConfigError: no such strategy.
        """
        if strategy in presets.PRESETS:
            return presets.solve_preset(strategy, problem, limits, progress=progress)
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"search.strategy: found {strategy!r}; expected one of {', '.join((*STRATEGIES, *presets.PRESETS))}."
            )
        return strategy_of(strategy)(problem, limits, progress=progress)

    def estimate(
        self,
        plan: Plan,
        *,
        iterations: int = 4,
        extra: Mapping[str, Any] | None = None,
        lower_bound_s: float | None = None,
    ) -> Estimate:
        """Price and simulate any plan of this algorithm, searched or written by hand.

        Raises:
            PlanError: the plan does not fit the graph, a model or the cluster, or something in it has no price.
        """
        if plan.cluster.num_devices != self.cluster.num_devices:
            raise PlanError(
                f"plan: found a cluster of {plan.cluster.num_devices} devices; expected {self.cluster.num_devices}, "
                "the number that it is to be priced for."
            )
        plan.check(self.graph, {name: spec.shape for name, spec in self.prices.models.items()})
        program = compile_program(self.graph, plan)
        prices, refinement = self.prices_of(program)
        simulation = simulate(program, prices, iterations=iterations)
        calls = {call.name: prices.call(call.name) for call in self.graph.calls}
        reallocs = {
            instruction.call: prices.realloc(instruction)
            for instruction in program.instructions
            if isinstance(instruction, Realloc)
        }
        memory = memory_report(self.prices.memory, program)
        predicted = Predicted(
            iteration_s=simulation.period_s,
            lower_bound_s=lower_bound_s,
            peak_memory_bytes=memory.by_rank(),
            calls={name: cost.seconds for name, cost in calls.items()},
            **{
                "reallocs": {name: cost.exposed_s for name, cost in reallocs.items()},
                "instructions": priced_instructions(program, prices),
                "decisions": decisions_hash(plan),
                "planner": __version__,
                "costs": self.operations.provenance,
                "inputs": self.inputs(),
                "inputs_hash": self.inputs_hash(),
                **({"refined": refinement.summary()} if refinement is not None else {}),
                **(extra or {}),
            },
        )
        return Estimate(
            plan=plan.model_copy(update={"predicted": predicted}),
            program=program,
            simulation=simulation,
            calls=calls,
            reallocs=reallocs,
            memory=memory,
            problems=(
                *memory.problems(self.cluster.capacity_bytes),
                *memory.host_problems(self.cluster.spec.host_memory),
            ),
            refinement=refinement,
        )

    def prices_of(self, program: Program) -> tuple[ProgramPrices, Refinement | None]:
        """Prices of a program's instructions; refined, where ranks share the cores of their node."""
        if self.prices.calls.shares_cores:
            return refine(self.prices, program)
        return self.prices.of_program(program), None

    def inputs(self) -> dict[str, Any]:
        """What the estimates depend on beside the plan: workload, models, cluster."""
        workload = asdict(self.workload)
        for name in ("prompt", "response"):
            workload[name] = _lengths(getattr(self.workload, name))
        return {
            "algorithm": self.graph.name,
            "cluster": self.cluster.spec.model_dump(exclude_defaults=True),
            "workload": workload,
            "models": {name: asdict(self.prices.models[name]) for name in self.graph.models},
            **({"updates": [asdict(update) for update in self.graph.updates]} if self.graph.updates else {}),
        }

    def inputs_hash(self) -> str:
        """Of the inputs and the prices' provenance: equal for equal estimates."""
        text = json.dumps([self.inputs(), self.operations.provenance], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def executable(self, plan: Plan) -> tuple[Problem, ...]:
        """What keeps the runtime from executing a plan."""
        return tuple(capability_problems(self.graph, plan))

    def _pin_prices(
        self,
        strategy: str,
        limits: Limits,
        options: SpaceOptions | None,
        pins: Mapping[str, Pin],
        period_s: float,
    ) -> tuple[PinPrice, ...]:
        result = []
        for name, pin in pins.items():
            others = {other: kept for other, kept in pins.items() if other != name}
            free = self.solve(self.space_for(strategy, options, others).problem, strategy, limits)
            free_s = (self._refined(strategy, free, limits, options, others) or free).period_s
            result.append(
                PinPrice(
                    call=name,
                    pin=pin,
                    period_without_s=free_s,
                    cost_s=max(0.0, period_s - free_s),
                )
            )
        return tuple(result)

    def _nothing_fits(self, space: Space, solution: Solution, strategy: str) -> CapacityError:
        """The error of a search that ends without a plan: how much is missing where."""
        relaxed = replace(space.problem, capacity_bytes=1 << 62)
        if not solution.proven_infeasible and strategy not in presets.PRESETS:
            other = "" if strategy == "exact" else ", or use strategy=exact"
            return CapacityError(
                f"search: {strategy} found no plan that fits in {solution.seconds:.0f} s and did not prove that there "
                f"is none. Give it more time (search.time_s){other}."
            )
        assignment, missing = presets.least_memory(relaxed, space.problem.capacity_bytes)
        if missing <= 0:
            return CapacityError(
                f"search: found no {strategy} plan that fits, though other plans do. Use strategy=exact, more or "
                "larger devices, or a smaller batch."
            )
        where = self.estimate(relaxed.to_plan(assignment)) if assignment is not None else None
        reasons = [str(problem) for problem in where.problems[:4]] if where is not None else []
        detail = "".join(f"\n  {reason}" for reason in reasons)
        return CapacityError(
            f"search: found no {strategy} plan that fits; each call by itself does. The plan that needs least is "
            f"{missing / 2**30:.2f} GiB per device too large (capacity {self.cluster.capacity_bytes / 2**30:.2f} GiB). "
            f"Take more or larger devices, or a smaller batch.{detail}"
        )


def search(
    graph: Graph,
    models: Mapping[str, ModelSpec],
    cluster: ClusterSpec,
    workload: Workload,
    *,
    operations: OperationCosts | None = None,
    strategy: str = "exact",
    **how: Any,
) -> SearchReport:
    """Find a plan: `Planner(...).search(...)` in one call. `how`: see `Planner.search`."""
    return Planner(graph, models, cluster, workload, operations).search(strategy, **how)


def _lengths(distribution: LengthDistribution) -> dict[str, Any]:
    if len(distribution.lengths) == 1:
        return {"length": distribution.lengths[0]}
    return {"lengths": list(distribution.lengths), "weights": [round(w, 8) for w in distribution.weights]}
