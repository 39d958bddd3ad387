"""Every strategy on every case: how good a plan, how sure, how fast. One JSON line per case and strategy.

    python benchmarks/search.py                      # all cases (`make bench-search`)
    python benchmarks/search.py --case ppo-7b-7b-16 --mcmc-factor 1

The options are the same for all strategies of a case and are priced once (``pricing_s``). ``seconds`` of a strategy is
its own time; ``exact`` gets the case's time limit and stops at a gap of 1 %, ``exact, on`` goes on from there for as
long again, and ``mcmc`` gets ten times as long as both took together. Context, expert and virtual-stage parallelism,
micro-batches, recomputation and offload are on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cases import cluster, models

from megatron_real.algorithms.graphs import graph_of
from megatron_real.dataflow import Graph
from megatron_real.errors import CapacityError, PlanError
from megatron_real.plan_search import presets
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.problem import Limits, Solution
from megatron_real.plan_search.space import SpaceOptions
from megatron_real.plan_search.strategies import strategy as strategy_of
from megatron_real.plan_search.workload import LengthDistribution, Workload

GAP = 0.01


@dataclass(frozen=True, kw_only=True)
class Case:
    """One search problem."""

    name: str
    gpus: int
    graph: Callable[[], Graph]
    models: Callable[[], Mapping[str, ModelSpec]]
    batch_size: int
    limit_s: float
    aim: float
    """Gap to prove within the limit."""
    group_size: int = 1
    unit: int = 1
    num_minibatches: int = 4
    fixed_lengths: bool = False

    def planner(self) -> Planner:
        response = LengthDistribution.lognormal(640, 0.5, 1024)
        workload = Workload(
            batch_size=self.batch_size,
            prompt=LengthDistribution.constant(1024),
            response=LengthDistribution.constant(1024) if self.fixed_lengths else response,
            group_size=self.group_size,
            unit=self.unit,
            num_minibatches=self.num_minibatches,
        )
        return Planner(self.graph(), self.models(), cluster(self.gpus), workload)


def ppo(name: str, gpus: int, actor: str, critic: str, batch: int, limit_s: float = 10.0) -> Case:
    """PPO with a reward model."""
    return Case(
        name=f"ppo-{name}",
        gpus=gpus,
        graph=lambda: graph_of("ppo"),
        models=lambda: models(actor, critic),
        batch_size=batch,
        limit_s=limit_s,
        aim=GAP,
    )


def more_rewards(name: str, gpus: int, extra: int, limit_s: float, aim: float) -> Case:
    """PPO with `extra` more frozen reward models of 7B."""
    return Case(
        name=name,
        gpus=gpus,
        graph=lambda: graph_of("ppo", extra_rewards=extra),
        models=lambda: models("llama_34b", "llama_7b", extra),
        batch_size=512,
        limit_s=limit_s,
        aim=aim,
    )


CASES = (
    ppo("7b-7b-16", 16, "llama_7b", "llama_7b", 512),
    ppo("34b-34b-64", 64, "llama_34b", "llama_34b", 512),
    ppo("70b-7b-128", 128, "llama_70b", "llama_7b", 1024),
    ppo("70b-70b-128", 128, "llama_70b", "llama_70b", 1024),
    ppo("70b-70b-1024", 1024, "llama_70b", "llama_70b", 4096, limit_s=60.0),
    Case(
        name="grpo-7b-16", gpus=16, graph=lambda: graph_of("grpo"), models=lambda: models("llama_7b"),
        batch_size=128, group_size=8, limit_s=10.0, aim=GAP,
    ),
    Case(
        name="dpo-70b-64", gpus=64, graph=lambda: graph_of("dpo"), models=lambda: models("llama_70b"),
        batch_size=512, unit=2, limit_s=10.0, aim=GAP,
    ),
    Case(
        name="remax-70b-128", gpus=128, graph=lambda: graph_of("remax"), models=lambda: models("llama_70b"),
        batch_size=1024, num_minibatches=1, limit_s=10.0, aim=GAP,
    ),
    more_rewards("ppo-8-calls-64", 64, extra=2, limit_s=120.0, aim=0.05),
    more_rewards("ppo-12-calls-64", 64, extra=6, limit_s=120.0, aim=1.0),
)  # fmt: skip


def run(case: Case, mcmc_factor: float) -> None:
    """Print the lines of one case."""
    started = time.monotonic()
    planner = case.planner()
    space = planner.space(SpaceOptions(plan_only=True))
    pricing_s = time.monotonic() - started
    options = len({id(option) for found in space.problem.options.values() for option in found})
    exact = report(planner, case, "exact", Limits(time_s=case.limit_s, gap=GAP))
    emit(
        {"case": case.name, "pricing_s": round(pricing_s, 2), "priced": space.num_priced, "options": options}
    )
    report(planner, case, "beam", Limits(time_s=case.limit_s))
    spent = exact.seconds if exact is not None else case.limit_s
    if exact is not None and exact.assignment is not None:
        more = Limits(time_s=max(1.0, spent))
        on = report(planner, case, "exact", more, start=exact)
        spent += on.seconds if on is not None else 0.0
    if mcmc_factor > 0:
        report(planner, case, "mcmc", Limits(time_s=max(10.0, mcmc_factor * spent)))
    report(planner, case, "greedy", Limits(time_s=case.limit_s))
    for name in presets.PRESETS:
        report(planner, case, name, Limits(time_s=10.0))


def report(
    planner: Planner, case: Case, strategy: str, limits: Limits, start: Solution | None = None
) -> Solution | None:
    """Run a strategy, from the choice of an earlier one if there is one, and print its line."""
    problem = planner.space_for(strategy, SpaceOptions(plan_only=True)).problem
    shown = strategy if start is None else f"{strategy}, on"
    line: dict[str, object] = {"case": case.name, "gpus": case.gpus, "strategy": shown}
    try:
        if start is not None:
            solution = strategy_of(strategy)(problem, limits, start=start)
        else:
            solution = planner.solve(problem, strategy, limits)
    except (PlanError, CapacityError) as error:
        emit({**line, "error": str(error).splitlines()[0][:200]})
        return None
    fits = solution.assignment is not None
    line.update(
        seconds=round(solution.seconds, 3),
        period_s=round(solution.period_s, 4) if fits else None,
        lower_bound_s=round(solution.lower_bound_s, 4),
        gap=round(solution.gap, 5) if fits else None,
        evaluations=solution.evaluations,
    )
    if shown == "exact":
        line["aim_met"] = fits and solution.gap <= case.aim * (1 + 1e-6)
    emit(line)
    return solution


def emit(line: Mapping[str, object]) -> None:
    """One JSON line, at once."""
    print(json.dumps(line), flush=True)


def main() -> int:
    """All cases, or those asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--mcmc-factor", type=float, default=10.0, help="time of mcmc against exact's")
    args = parser.parse_args()
    for case in CASES:
        if args.case is None or case.name in args.case:
            run(case, args.mcmc_factor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
