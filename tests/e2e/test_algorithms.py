"""The short form of `make invariance ALGORITHM=all`: one iteration, calls on disjoint meshes, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.invariance_cases import DATA_ONLY, ONE, SPLIT, Case, case_tree
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "remax", "dpo", "reward", "sft")
SMALL = {"num_layers": 2}


def _run_all(trees: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a rank: one run after the other."""
    from benchmarks import invariance

    return [invariance.run_tree(tree, 1) for tree in trees]


def test_no_plan_changes_the_numbers_of_any_algorithm(cpu_device: None, tmp_path: Path) -> None:
    from benchmarks import invariance

    cases, results = {}, {}
    for name, ranks, calls in (("one", 1, ONE), ("split", 4, SPLIT)):
        cases[name] = [
            Case(name=name, num_ranks=ranks, algorithm=algorithm, calls=calls, megatron=SMALL)
            for algorithm in ALGORITHMS
        ]
        trees = [case_tree(case, tmp_path / name / case.algorithm, iterations=1) for case in cases[name]]
        results[name] = run_ranks(ranks, _run_all, trees, timeout_s=300)
    for index, case in enumerate(cases["split"]):
        one, split = ([rank[index] for rank in results[name]] for name in ("one", "split"))
        line = invariance.compare(case, one, split)
        assert line["ok"], (case.algorithm, line)
        assert line["max_rel_err_update"] > 0, f"{case.algorithm}: compared with itself"
        assert bool(invariance.sampled_tokens(split)) == (case.algorithm not in DATA_ONLY)
