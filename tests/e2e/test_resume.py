"""A run goes on from its checkpoints: under the same and another plan, in bf16, with tied embeddings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.invariance_cases import ONE, demo_calls, place
from tests.e2e.checkpoint_runs import (
    RUN,
    STEPS_PER_ITERATION,
    VOCAB_SIZE,
    built,
    case,
    load,
    relative,
    two_ranks,
)
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]


def killed_before_run_state(folder: Path, target: Path) -> Path:
    """A copy of the run as if it had died in its save at four: models are there, the run's state names two."""
    shutil.copytree(folder / "checkpoints", target / "checkpoints")
    shutil.copy(target / "checkpoints/run_state-2.json", target / "checkpoints/run_state.json")
    (target / "checkpoints/critic/iter_0000004/.metadata").unlink()  # it did not come to this
    return target


@pytest.mark.parametrize("plan", ["the same", "another"])
def test_resume_continues_the_run(whole: Any, tmp_path: Path, plan: str) -> None:
    from benchmarks import invariance
    from tests.e2e.cases import run

    folder = killed_before_run_state(whole[0], tmp_path)
    one = case("resumed", *((4, demo_calls()) if plan == "the same" else (2, two_ranks())))
    results = run(one, folder, iterations=4, resume=True, **RUN)

    assert invariance.sampled_tokens(results) == invariance.sampled_tokens(whole[1])[2:]
    for call in ("actor_train", "critic_train"):
        for name in ("loss", "grad_norm"):
            found = invariance.steps(results, call, name)
            expected = invariance.steps(whole[1], call, name)[2 * STEPS_PER_ITERATION :]
            if plan == "the same":
                assert found == expected
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5 if name == "loss" else 0)
    coefficients, expected_coefficients = (kl_coefficients(each) for each in (results, whole[1]))
    assert coefficients == pytest.approx(expected_coefficients[2:], rel=1e-5)
    assert len(set(expected_coefficients)) == 4, "the coefficient adapts"
    before, after = (invariance.assemble(results, when) for when in ("before", "after"))
    end = invariance.assemble(whole[1], "after")
    for name, weight in after.items():
        assert relative(weight, end[name]) <= 1e-4, name
        assert relative(weight - before[name], end[name] - before[name]) <= 1e-2, name
    assert json.loads((folder / "checkpoints/run_state.json").read_text())["iteration"] == 4
    again = load(folder / "checkpoints/critic/iter_0000004")
    assert relative(again["output_layer.weight"], end["critic.value_head.weight"]) <= 1e-4


def test_resume_with_another_learning_rate(whole: Any, tmp_path: Path) -> None:
    """The options of the run win: nothing moves at learning rate 0."""
    from benchmarks import invariance
    from tests.e2e.cases import run

    folder = killed_before_run_state(whole[0], tmp_path)
    one = case("still", 1, ONE, lr=0.0, min_lr=0.0)
    results = run(one, folder, iterations=3, resume=True, **RUN)
    assert invariance.sampled_tokens(results) == invariance.sampled_tokens(whole[1])[2:3]
    expected = invariance.steps(whole[1], "actor_train", "loss")[2 * STEPS_PER_ITERATION]
    assert invariance.steps(results, "actor_train", "loss")[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    before, after = (invariance.assemble(results, when) for when in ("before", "after"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_resume_in_bf16_without_resident_weights(cpu_device: None, tmp_path: Path) -> None:
    """The main parameters come back with all their bits, not from the bf16 weights."""
    from benchmarks import invariance
    from tests.e2e.cases import run

    calls = two_ranks()
    for name in ("actor_train", "critic_train"):
        calls[name] = {**calls[name], "drop_trained_weights": True}
    one = case("bf16", 2, calls, bf16=True)
    expected = run(one, tmp_path / "whole", iterations=2, save_interval=1, **RUN)
    shutil.copytree(tmp_path / "whole/checkpoints", tmp_path / "rest/checkpoints")
    shutil.copy(tmp_path / "whole/checkpoints/run_state-1.json", tmp_path / "rest/checkpoints/run_state.json")
    found = run(one, tmp_path / "rest", iterations=2, resume=True, **RUN)
    assert invariance.sampled_tokens(found) == invariance.sampled_tokens(expected)[1:]
    for call in ("actor_train", "critic_train"):
        for name in ("loss", "grad_norm"):
            rest = invariance.steps(expected, call, name)[STEPS_PER_ITERATION:]
            assert invariance.steps(found, call, name) == rest
    end = invariance.assemble(expected, "after")
    for name, weight in invariance.assemble(found, "after").items():
        assert torch.equal(weight, end[name]), name


def kl_coefficients(results: list[dict[str, Any]]) -> list[float]:
    merged: dict[int, float] = {}
    for result in results:
        for iteration, values in enumerate(result["batch"]):
            if "kl_coefficient" in values:
                merged[iteration] = values["kl_coefficient"]
    return [merged[iteration] for iteration in sorted(merged)]


def test_tied_embeddings_over_stages(cpu_device: None, tmp_path: Path) -> None:
    """One iteration and a save under pp=2, then a resume under tp=2, against two iterations in one process."""
    from benchmarks import invariance
    from tests.e2e.cases import by_layer, run, tree_of

    # The runs have different lengths, over which a learning rate would decay.
    tied = {"untie_embeddings_and_output_weights": False, "lr_decay_style": "constant"}
    plan = two_ranks()
    reference = run(case("one process", 1, ONE, **tied), tmp_path / "one", iterations=2, **RUN)
    first = run(case("stages", 2, plan, **tied), tmp_path / "two", iterations=1, **RUN)
    plan = {**plan, "actor_train": place(0, 2, tp=2, sp=True), "actor_gen": place(0, 2, pp=2)}
    second = run(case("resumed", 2, plan, **tied), tmp_path / "two", iterations=2, resume=True, **RUN)
    tokens = [invariance.sampled_tokens(each) for each in (reference, first, second)]
    assert tokens[0] == tokens[1] + tokens[2]
    for name in ("loss", "grad_norm"):
        losses = [invariance.steps(each, "actor_train", name) for each in (reference, first, second)]
        assert losses[1] + losses[2] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    expected, found = (invariance.assemble(each, "after") for each in (reference, second))
    assert "actor.output_layer.weight" not in found
    for key, weight in found.items():
        assert relative(weight, expected[key]) <= 1e-4, key

    # Start from it: the actor stays tied; a critic gets a head of its own and leaves the embedding alone.
    model = {role: {"load": str(tmp_path / "two/checkpoints/actor")} for role in ("actor", "critic")}
    one = case("from tied", 2, two_ranks(), **tied)
    results = run_ranks(2, built, tree_of(one, tmp_path / "three", model=model, **RUN), timeout_s=120)
    weights = invariance.assemble(results, "before")
    stored = load(tmp_path / "two/checkpoints/actor/iter_0000002")
    for role in ("actor", "critic"):
        loaded = by_layer(weights, role)
        head = loaded.pop("output_layer.weight", None)
        assert (head is None) == (role == "actor")
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(weight, stored[name][:VOCAB_SIZE]) for name, weight in loaded.items())
    assert weights["critic.value_head.weight"].shape == (1, 32)
