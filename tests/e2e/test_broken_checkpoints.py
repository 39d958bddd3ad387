"""What can be wrong with a checkpoint, or with loading it, is refused by name before any collective."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.invariance_cases import ONE
from tests.e2e.checkpoint_runs import RUN, case
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]


def _without_tracker(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").unlink()


def _without_iteration(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("9")


def _without_number(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("soon")


def _legacy(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000004")
    (folder / "iter_0000004/mp_rank_00").mkdir(parents=True)
    torch.save({}, folder / "iter_0000004/mp_rank_00/model_optim_rng.pt")


def _unfinished(folder: Path) -> None:
    (folder / "iter_0000004/metadata.json").unlink()


def _without_tensors(folder: Path) -> None:
    (folder / "iter_0000004/.metadata").unlink()


def _lying_arguments(folder: Path) -> None:
    """Arguments of three layers beside tensors of two, as where someone edited the one and not the other."""
    from megatron.core import dist_checkpointing

    found = folder / "iter_0000004"
    common = dist_checkpointing.load_common_state_dict(str(found))
    common["args"].num_layers = 3
    torch.save(common, found / "common.pt")  # takes precedence


BROKEN: dict[str, tuple[Callable[[Path], None] | None, dict[str, Any], tuple[str, ...]]] = {
    "no tracker": (_without_tracker, {}, ("latest_checkpointed_iteration.txt", "cannot be read")),
    "tracker of a missing folder": (_without_iteration, {}, ("iter_0000009", "incomplete")),
    "tracker without a number": (_without_number, {}, ("'soon'",)),
    "legacy format": (_legacy, {}, ("legacy format", "--ckpt-convert-format torch_dist")),
    "no metadata.json": (_unfinished, {}, ("metadata.json",)),
    "no .metadata": (_without_tensors, {}, (".metadata",)),
    "other arguments": (
        None,
        {"num_layers": 4, "ffn_hidden_size": 96},
        ("actor: checkpoint", "another shape", "--num-layers: found 4; expected 2", "--ffn-hidden-size"),
    ),
    "other tensors than its arguments say": (
        _lying_arguments,
        {"num_layers": 3},
        ("actor: checkpoint", "another shape", "linear_qkv.weight: found 2 x 64 x 32; expected 3 x 64 x 32"),
    ),
}


def refused(trees: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """On a process without peers: the error of preparing each run, its type and text."""
    from megatron_real.config import RunOptions
    from megatron_real.hooks.launch import prepare

    torch.distributed.destroy_process_group()  # a collective would fail
    errors = {}
    for name, tree in trees.items():
        try:
            prepare(RunOptions.from_tree(tree))
        except Exception as error:  # the test looks at its type
            errors[name] = (type(error).__name__, str(error))
    return errors


def test_bad_models_are_refused_before_any_collective(whole: Any, tmp_path: Path) -> None:
    from tests.e2e.cases import tree_of

    trees, words = {}, {}
    for index, (name, (break_it, megatron, expected)) in enumerate(BROKEN.items()):
        folder = tmp_path / str(index)
        shutil.copytree(whole[0] / "checkpoints/actor", folder / "actor")
        if break_it is not None:
            break_it(folder / "actor")
        load_it = {"actor": {"load": str(folder / "actor")}}
        trees[name] = tree_of(case(name, 1, ONE, **megatron), folder, model=load_it, **RUN)
        words[name] = expected
    # The critic's folder as a language model; resuming what was never saved, and what has lost a model.
    critic = {"actor": {"load": str(whole[0] / "checkpoints/critic")}}
    trees["a critic as actor"] = tree_of(case("critic", 1, ONE), tmp_path / "critic", model=critic, **RUN)
    words["a critic as actor"] = ("actor: checkpoint", "output_layer.weight: found no such parameter")
    trees["nothing to resume"] = tree_of(case("new", 1, ONE), tmp_path / "new", resume=True, **RUN)
    words["nothing to resume"] = ("no finished checkpoint", "--real-resume")
    lost = tmp_path / "lost"
    shutil.copytree(whole[0] / "checkpoints", lost / "checkpoints")
    shutil.rmtree(lost / "checkpoints/critic/iter_0000004")
    trees["half a checkpoint"] = tree_of(case("lost", 1, ONE), lost, iterations=5, resume=True, **RUN)
    words["half a checkpoint"] = ("critic", "iter_0000004")
    other = tmp_path / "other"
    shutil.copytree(whole[0] / "checkpoints", other / "checkpoints")
    trees["resumed as another shape"] = tree_of(
        case("other", 1, ONE, hidden_size=64), other, iterations=5, resume=True, **RUN
    )
    words["resumed as another shape"] = ("another shape", "linear_qkv.weight")

    # Not a checkpoint, but a model too narrow for Megatron's rule of the feed-forward width.
    narrow = {"critic": {"megatron": {"hidden_size": 16}}}
    trees["narrow critic"] = tree_of(case("narrow", 1, ONE), tmp_path / "narrow", model=narrow, **RUN)
    words["narrow critic"] = ("critic", "ffn_hidden_size")

    (errors,) = run_ranks(1, refused, trees, timeout_s=120)
    for name, expected in words.items():
        kind, text = errors.get(name, ("nothing", ""))
        assert kind == "ConfigError", f"{name}: {kind}: {text}"
        assert all(word in text for word in expected), f"{name}: {text}"
