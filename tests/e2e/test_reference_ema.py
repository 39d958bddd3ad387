"""A reference that moves toward the actor: the formula bit for bit, against one process, and after a resume.

Updates after iterations 1 and 3 of 0 to 3. On two ranks the reference rests on the host, in another layout than the
actor's training, and both move between them: the plan changes after the first update.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.invariance_cases import ONE, Case, place
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ITERATIONS, EVERY, MIX, CHANGE = 4, 2, 0.3, 2
Weights = dict[str, torch.Tensor]
"""Whole tensors by ``model.key``."""


def one_rank(folder: Path, **changes: Any) -> dict[str, Any]:
    return tree_of(folder, 1, ONE, **changes)


def two_ranks(folder: Path, **changes: Any) -> dict[str, Any]:
    calls = {"ref_inf": place(0, 2, tp=2) | {"offload": "host"}, "actor_train": place(0, 2, pp=2)}
    tree = tree_of(folder, 2, calls, **changes)
    plan = json.loads(Path(tree["plan"]).read_text())
    plan["calls"] = {"ref_inf": place(1, 2) | {"offload": "host"}, "actor_train": place(0, 2, tp=2)}
    (folder / "next.json").write_text(json.dumps(plan))
    return {**tree, "next_plan": {"iteration": CHANGE, "plan": str(folder / "next.json")}}


def tree_of(folder: Path, num_ranks: int, calls: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    from tests.e2e.cases import tree_of

    case = Case(name="ema", num_ranks=num_ranks, algorithm="dpo", calls=calls, megatron={"num_layers": 2})
    options = {"reference_ema": MIX, "reference_ema_every": EVERY}
    return tree_of(case, folder, iterations=ITERATIONS, save_interval=1, algorithm=options, **changes)


def run_rank(tree: dict[str, Any]) -> dict[str, Any]:
    """On a rank: the run, with its shards of actor and reference before it and after every iteration."""
    from megatron_real.config import RunOptions
    from megatron_real.hooks import launch
    from megatron_real.process_groups import ProcessGroups
    from tests.e2e.cases import Recorder

    job = launch.prepare(RunOptions.from_tree(tree))
    executor, backend = launch.build_executor(job, ProcessGroups())
    weights, save, metrics = [shards(backend)], backend.save, Recorder(job.first_iteration)

    def recording_save(folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        save(folder, iteration, state)
        weights.append(shards(backend))
        if backend.rank == 0:
            shutil.copy(folder / "run_state.json", folder / f"run_state-{iteration}.json")

    backend.save = recording_save  # type: ignore[method-assign]
    launch._train(job, executor, metrics)  # type: ignore[arg-type]
    reference = backend.home("ref")
    return {
        "steps": [calls.get("actor_train", {}).get("steps") for calls in metrics.calls],
        "weights": weights,
        "resident": reference is not None and reference.resident,
        "held": backend.ledger.held(),
    }


def shards(backend: Any) -> list[tuple[str, Any, torch.Tensor]]:
    from megatron_real.hooks.checkpoint import at_hand

    found = []
    for model in ("actor", "ref"):
        copy = backend.home(model)
        with at_hand(copy):
            for shard, view in copy.shards.resolve().items() if copy is not None else ():
                found.append((f"{model}.{shard.key}", shard.box, view.detach().clone()))
    return found


def whole(results: list[dict[str, Any]], moment: int) -> Weights:
    """Whole tensors; ranks that hold the same element must agree on it."""
    pieces = [piece for result in results for piece in result["weights"][moment]]
    tensors: Weights = {}
    for name, box, value in pieces:
        ends = [offset + size for offset, size in zip(box.offset, value.shape, strict=True)]
        shape = [max(pair) for pair in zip(tensors.get(name, torch.empty(ends)).shape, ends, strict=True)]
        tensors[name] = torch.full(shape, torch.nan)
    for name, box, value in pieces:
        place = tensors[name][tuple(slice(o, o + n) for o, n in zip(box.offset, value.shape, strict=True))]
        assert torch.equal(place[~place.isnan()], value[~place.isnan()]), f"replicas of {name}"
        place.copy_(value)
    assert not any(value.isnan().any() for value in tensors.values())
    return tensors


def losses(results: list[dict[str, Any]]) -> list[list[float]]:
    """Of every optimizer step, by iteration; from the rank that reports it."""
    told = zip(*(result["steps"] for result in results), strict=True)
    return [next(steps["loss"] for steps in each if steps is not None) for each in told]


def of_model(weights: Weights, model: str) -> Weights:
    return {
        name.removeprefix(f"{model}."): value
        for name, value in weights.items()
        if name.startswith(f"{model}.")
    }


@pytest.fixture(scope="module")
def runs(
    cpu_device: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """The run on one rank and on two, with its folder."""
    found = {}
    for size, tree in ((1, one_rank), (2, two_ranks)):
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        found[size] = folder, run_ranks(size, run_rank, tree(folder), timeout_s=300)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_the_reference_takes_its_share(runs: Any, size: int) -> None:
    """In numpy's fp32, after the iterations in which it is due, and not a bit in between."""
    moments = [whole(runs[size][1], moment) for moment in range(ITERATIONS + 1)]
    for moment in range(1, ITERATIONS + 1):
        former, actor, found = (
            of_model(moments[moment - 1], "ref"),
            of_model(moments[moment], "actor"),
            of_model(moments[moment], "ref"),
        )
        assert found.keys() == actor.keys()
        for name, value in found.items():
            expected = former[name].numpy()
            if moment % EVERY == 0:
                expected = expected * np.float32(1 - MIX) + actor[name].numpy() * np.float32(MIX)
                assert not np.array_equal(expected, former[name].numpy()), f"{name} has moved"
            assert np.array_equal(value.numpy(), expected), f"{name} after {moment} iterations"


def test_it_does_not_matter_where(runs: Any) -> None:
    one, two = runs[1][1], runs[2][1]
    for found, expected in zip(losses(two), losses(one), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    references = [of_model(whole(results, ITERATIONS), "ref") for results in (one, two)]
    for name, value in references[0].items():
        assert torch.allclose(references[1][name][: len(value)], value, rtol=1e-4, atol=1e-5), name
    assert [result["resident"] for result in (*one, *two)] == [True, False, False]
    assert not any("staging" in owner and size for result in two for owner, size in result["held"].items())


def test_a_resumed_run_goes_on_with_its_reference(runs: Any, tmp_path: Path) -> None:
    """Resumed between two updates: neither the first reference nor the actor is what it needs."""
    (folder, expected), done = runs[2], 3
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    shutil.copy(tmp_path / f"checkpoints/run_state-{done}.json", tmp_path / "checkpoints/run_state.json")
    found = run_ranks(2, run_rank, two_ranks(tmp_path, resume=True), timeout_s=300)
    for moment in range(done, ITERATIONS + 1):
        resumed, straight = whole(found, moment - done), whole(expected, moment)
        assert all(torch.equal(resumed[name], value) for name, value in straight.items()), moment
    assert losses(found) == losses(expected)[done:]


def test_the_saved_reference_is_a_checkpoint_for_megatron(runs: Any) -> None:
    """Read by torch alone; its arguments say that it has no optimizer."""
    from megatron_real.hooks.checkpoint import find_checkpoint, read_common
    from tests.e2e.cases import load_tensors

    found = find_checkpoint(runs[2][0] / "checkpoints/ref")
    stored, reference = load_tensors(found), of_model(whole(runs[2][1], ITERATIONS), "ref")
    assert all(torch.equal(stored[name], value) for name, value in reference.items())
    assert not any(name.startswith("optimizer") for name in stored)
    assert read_common(found)["args"].no_save_optim
    assert not read_common(find_checkpoint(runs[2][0] / "checkpoints/actor"))["args"].no_save_optim
