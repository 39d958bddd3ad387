"""Every algorithm under four plans: one process, t2p2, calls on disjoint halves of four ranks, and the searched plan.

    python benchmarks/algorithm_invariance.py grpo dpo     # make invariance ALGORITHM="grpo dpo"
    python benchmarks/algorithm_invariance.py all

One JSON line per plan and one table at the end; numbers and limits are those of benchmarks/invariance.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.invariance import compare, run_case  # noqa: E402  (installs the CPU device: before Megatron)
from benchmarks.invariance_cases import (  # noqa: E402
    DATA_ONLY,
    MEGATRON,
    ONE,
    OPTIONS,
    SPLIT,
    Case,
    place,
    reward,
)
from megatron_real.algorithms.registry import find_algorithm  # noqa: E402
from megatron_real.plan import Plan  # noqa: E402
from megatron_real.plan_search.inputs import PlanInputs  # noqa: E402
from megatron_real.plan_search.planner_inputs import planner_of  # noqa: E402
from megatron_real.plan_search.problem import Limits  # noqa: E402

SLOWER = {"lr": 1e-4}
"""With 1e-3, 24 steps make of rounding a difference by which one draw in some ten thousand gives another token."""


def algorithm_cases(algorithm: str) -> tuple[Case, ...]:
    """The plans of an algorithm beside the one of one process."""
    symmetric = {"*": place(0, 4, tp=2, pp=2), "rew_inf": reward(4), "greedy_rew_inf": reward(4)}
    return (
        Case(name="t2p2", num_ranks=4, algorithm=algorithm, calls=symmetric, megatron=SLOWER),
        Case(name="split", num_ranks=4, algorithm=algorithm, calls=SPLIT, megatron=SLOWER),
        Case(
            name="searched",
            num_ranks=4,
            algorithm=algorithm,
            calls=searched_calls(algorithm),
            megatron=SLOWER,
        ),
    )


def searched_calls(algorithm: str) -> dict[str, Any]:
    """What the search finds for four CPU ranks, priced with the constants of the machine kind ``cpu``.

    It is priced for a wider model, for which a second rank pays.
    """
    one = Case(name="searched", num_ranks=4, algorithm=algorithm, calls={})
    config = find_algorithm(algorithm).config(**one.options)
    samples = getattr(config, "samples_per_prompt", 1)
    tree = {
        "algorithm": {"name": algorithm},
        "cluster": {"devices_per_node": 4, "device": "cpu"},
        "megatron": {**MEGATRON, "hidden_size": 1024, "ffn_hidden_size": 4096},
        "workload": {
            "batch_size": 32 // samples,
            "group_size": samples,
            "num_minibatches": config.num_minibatches,
            "num_epochs": config.num_epochs,
            "prompt": {"length": 12},
            "response": {"length": getattr(config, "max_new_tokens", 12)},
            "function_s": {call.name: 1e-4 for call in one.graph.calls if call.model is None},
        },
    }
    planner = planner_of(PlanInputs.from_tree(tree, source="invariance"), one.graph)
    report = planner.search("exact", limits=Limits(time_s=20))
    return {name: call.model_dump(mode="json") for name, call in report.plan.calls.items()}


def algorithm_table(names: Sequence[str]) -> bool:
    """Every algorithm under every plan against one process; prints lines and a table, returns whether all are equal."""
    table = Table("algorithm", "plan", "tokens", "loss error", "gradient norm", "weights", "steps", "equal")
    good = True
    with tempfile.TemporaryDirectory() as name:
        for algorithm in names:
            one = Case(name="one process", num_ranks=1, algorithm=algorithm, calls=ONE, megatron=SLOWER)
            reference = run_case(one, Path(name) / algorithm)
            for case in algorithm_cases(algorithm):
                line = compare(case, reference, run_case(case, Path(name) / f"{algorithm}-{case.name}"))
                calls = Plan.loads(json.dumps(case.plan())).calls
                placed = {name: f"{call.parallel}@{call.mesh}" for name, call in calls.items()}
                print(json.dumps({"algorithm": algorithm, **line, "calls": placed}), flush=True)
                errors = ("max_err_loss", "max_rel_err_grad_norm", "max_rel_err_weights")
                table.add_row(
                    algorithm,
                    case.name,
                    "-" if algorithm in DATA_ONLY else "equal" if line["tokens_equal"] else "differ",
                    *(f"{line[error]:.1e}" for error in errors),
                    str(line["optimizer_steps"]),
                    "yes" if line["ok"] else "NO",
                )
                good &= line["ok"]
    Console(width=100).print(table)
    return good


def main() -> None:
    """The named algorithms; exit code 1 if one is outside its limits under a plan."""
    parser = argparse.ArgumentParser(description="Algorithms under four plans each.")
    parser.add_argument("algorithms", nargs="+", choices=[*OPTIONS, "all"])
    given = parser.parse_args().algorithms
    sys.exit(0 if algorithm_table(list(OPTIONS) if "all" in given else given) else 1)


if __name__ == "__main__":
    main()
