"""``megatron-real diff A B``: what two plans decide differently, and what that does to estimates. Needs no torch.

Also what it costs to change from A to B in the middle of a run.
"""

from __future__ import annotations

from pathlib import Path

from megatron_real.cli.planning import compose_options, console, load_plan, split_arguments
from megatron_real.errors import PlanError
from megatron_real.plan import Plan
from megatron_real.plan_search.plan_change import change_cost, change_lines
from megatron_real.plan_search.report import decisions_table, differences_table

__all__ = ["main"]

_USAGE = """usage: megatron-real diff A.json B.json [KEY=VALUE ...]

Both plans are priced under the same inputs: those that A records (else those that B records), changed by the keys of
search."""


def main(argv: list[str]) -> int:
    """Print both tables; returns 0 whether the plans are equal or not."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
        return 0
    (first, second), overrides = split_arguments(argv, 2, "megatron-real diff A.json B.json [KEY=VALUE ...]")
    plans = {path: Plan.load(path) for path in (first, second)}
    for what, found in (
        ("algorithms", [plan.algorithm for plan in plans.values()]),
        ("devices", [plan.cluster.num_devices for plan in plans.values()]),
        ("calls", [sorted(plan.calls) for plan in plans.values()]),
    ):
        if found[0] != found[-1]:
            raise PlanError(
                f"diff: found plans of different {what}: {found[0]} and {found[-1]}; expected the same. Compare plans "
                "that answer one question."
            )
    tree = compose_options("simulate", overrides)
    tree.pop("pictures", None)
    recorded = [
        path for path, plan in plans.items() if plan.predicted is not None and plan.predicted.model_extra
    ]
    base = recorded[0] if recorded else first
    loaded = load_plan(base, tree, "diff")
    estimates = [loaded.planner.estimate(Plan.load(path)) for path in (first, second)]
    shown = console()
    if recorded:
        shown.print(
            f"both are priced for what {base} records{', but for:' if loaded.changes else ''}", markup=False
        )
    for change in loaded.changes:
        shown.print(f"  {change}", markup=False)
    names = (Path(first).name, Path(second).name)  # leaves the columns their room
    if names[0] == names[1]:
        names = (first, second) if first != second else (first, f"{second} (again)")
    decisions = decisions_table(estimates[0], estimates[1], names)
    shown.print(decisions if decisions is not None else "decisions: no difference")
    shown.print(differences_table(estimates[0], estimates[1], names))
    gain_s = estimates[0].period_s - estimates[1].period_s
    programs = [estimate.program for estimate in estimates]
    cost = change_cost(programs[0], programs[1], loaded.planner.prices.moves, gain_s=gain_s)
    for line in change_lines(cost):
        shown.print(line, markup=False)
    return 0
