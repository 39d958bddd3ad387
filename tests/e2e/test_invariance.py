"""The short form of `make invariance`: two optimizer steps, two plans against one process, and bf16 bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.invariance_cases import EXPERTS, ONE, Case, demo_calls, place
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

SMALL = {"num_layers": 2, "vocab_size": 257}
SHORT = {
    "data": {"batch_size": 16},
    "algorithm": {"num_minibatches": 2, "num_epochs": 1, "max_new_tokens": 6},
}


def run(name: str, num_ranks: int, calls: dict[str, Any], folder: Path, **megatron: Any) -> tuple[Any, Any]:
    from benchmarks import invariance
    from tests.e2e.cases import tree_of

    case = Case(name=name, num_ranks=num_ranks, calls=calls, megatron={**SMALL, **megatron})
    tree = tree_of(case, folder, **SHORT)
    return case, run_ranks(num_ranks, invariance.run_tree, tree, 1, timeout_s=240)


@pytest.fixture(scope="module")
def reference(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("reference", 1, ONE, tmp_path_factory.mktemp("reference"))[1]


def plans() -> dict[str, tuple[int, dict[str, Any]]]:
    many = {
        "actor_gen": place(0, 8, dp=4, tp=2, micro=1),
        "ref_inf": place(4, 8, pp=2, tp=2),
        "critic_inf": place(0, 4, dp=2, pp=2),
        "actor_train": place(0, 4, tp=2, pp=2),
        "critic_train": place(3, 7, dp=2, tp=2, sp=True),
        "rew_inf": place(7, 8, micro=1),
    }
    return {"demo": (4, demo_calls()), "8 ranks, overlapping windows": (8, many)}


@pytest.mark.parametrize("name", ["demo", "8 ranks, overlapping windows"])
def test_plan_does_not_change_numbers(reference: Any, tmp_path: Path, name: str) -> None:
    from benchmarks import invariance

    num_ranks, calls = plans()[name]
    case, results = run(name, num_ranks, calls, tmp_path)
    line = invariance.compare(case, reference, results)
    assert line["optimizer_steps"] == 2
    assert line["ok"], line
    assert line["max_rel_err_update"] > 0, "compared with itself"


def other_models() -> dict[str, tuple[int, dict[str, Any], dict[str, Any]]]:
    """Ranks, calls and Megatron's arguments of actors beyond dense GPTs; the other roles are of the same kind."""
    experts = {
        "actor_gen": place(0, 4, dp=4, ep=4, micro=1),
        "ref_inf": place(0, 2, dp=2, ep=2),
        "critic_inf": place(2, 4, tp=2, ep=2, etp=1),
        "actor_train": place(0, 4, dp=2, tp=2, ep=2, etp=1, sp=True),
        "critic_train": place(1, 3, pp=2),
        "rew_inf": place(0, 1, micro=1),
    }
    hybrid = {
        "actor_gen": place(0, 4, dp=2, tp=2),
        "ref_inf": place(0, 4, pp=2, tp=2),
        "critic_inf": place(2, 4, pp=2, layers=[3, 1]),
        "actor_train": place(0, 4, tp=2, pp=2, layers=[1, 3], sp=True),
        "critic_train": place(0, 4, dp=2, pp=2),
        "rew_inf": place(0, 1, micro=1),
    }
    pattern = {"hybrid_layer_pattern": "*-E*", "num_layers": 4}
    return {
        "experts": (4, experts, dict(EXPERTS)),
        "hybrid": (4, hybrid, {**EXPERTS, **pattern}),
    }


@pytest.mark.parametrize("name", ["experts", "hybrid"])
def test_experts_and_hybrid_models(cpu_device: None, tmp_path: Path, name: str) -> None:
    from benchmarks import invariance

    num_ranks, calls, megatron = other_models()[name]
    reference = run("reference", 1, ONE, tmp_path / "reference", **megatron)[1]
    case, results = run(name, num_ranks, calls, tmp_path / "plan", **megatron)
    line = invariance.compare(case, reference, results)
    assert line["optimizer_steps"] == 2
    assert line["ok"], line
    assert line["max_rel_err_update"] > 0, "compared with itself"


def test_bf16_is_bit_equal_without_resident_weights(cpu_device: None, tmp_path: Path) -> None:
    from benchmarks import invariance

    runs = [
        run("bf16", 4, demo_calls(drop=drop), tmp_path / str(drop), bf16=True)[1] for drop in (False, True)
    ]
    line = invariance.compare_bits(*runs)
    assert line["ok"], line
    before, after = (invariance.assemble(runs[1], when) for when in ("before", "after"))
    assert any(not before[name].equal(after[name]) for name in before), "the steps moved nothing"
