"""``megatron-real explain PLAN``: what a plan waits for, and why its neighbours were not taken. Needs no torch."""

from __future__ import annotations

from rich.console import Console

from megatron_real.cli.planning import (
    LoadedPlan,
    change_lines,
    compose_options,
    console,
    load_plan,
    split_arguments,
)
from megatron_real.errors import ConfigError
from megatron_real.plan_search.explain import Explanation, explain
from megatron_real.plan_search.report import (
    calls_table,
    costs_table,
    estimate_lines,
    memory_table,
    neighbours_table,
    path_table,
    seconds_text,
)

__all__ = ["main"]

_USAGE = """usage: megatron-real explain PLAN.json [KEY=VALUE ...]

Takes the keys of search (see megatron-real simulate --help), and most=N: neighbours to show of each kind.
search.plan_only=true also looks at what the runtime cannot execute."""


def main(argv: list[str]) -> int:
    """Print tables and neighbours."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
        return 0
    (path,), overrides = split_arguments(argv, 1, "megatron-real explain PLAN.json [KEY=VALUE ...]")
    tree = compose_options("simulate", overrides)
    tree.pop("pictures", None)
    most = tree.pop("most", 3)
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"most: found {most!r}; expected a number of neighbours, at least 1.")
    loaded = load_plan(path, tree, "explain")
    explanation = _explained(loaded, most)
    shown = console()
    for line in change_lines(loaded):
        shown.print(line, markup=False)
    estimate = explanation.estimate
    shown.print(calls_table(estimate, title=path))
    shown.print(path_table(estimate))
    shown.print(costs_table(loaded.planner, estimate))
    shown.print(memory_table(loaded.planner, estimate))
    for call in loaded.planner.graph.calls:
        if explanation.of(call.name):
            shown.print(neighbours_table(explanation, call.name))
    for line in [*estimate_lines(loaded.planner, estimate), _conclusion(explanation)]:
        shown.print(line, markup=False)
    return 0


def _explained(loaded: LoadedPlan, most: int) -> Explanation:
    output = Console(stderr=True)
    options = loaded.inputs.search.space
    if not output.is_terminal:
        return explain(loaded.planner, loaded.plan, options=options, most=most)
    with output.status("pricing the plan") as status:
        return explain(
            loaded.planner,
            loaded.plan,
            options=options,
            most=most,
            progress=lambda call, done, count: status.update(f"neighbours of {call} ({done + 1} of {count})"),
        )


def _conclusion(explanation: Explanation) -> str:
    looked = f"{explanation.num_evaluated:,} neighbouring plans evaluated"
    if not explanation.better:
        return f"{looked}: none of them is better"
    best = explanation.better[0]
    return f"{looked}: {best.call} with {best.change} saves {seconds_text(-best.delta_s)} per iteration"
