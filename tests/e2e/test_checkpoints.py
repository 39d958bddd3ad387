"""Checkpoints: resume under the same and another plan, to Megatron and back, and what can be wrong with one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.plain_ppo import PlainAdamW, PlainConfig, PlainShape, logits
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 257
SMALL = {"num_layers": 2, "vocab_size": VOCAB_SIZE}
PADDED = 272
"""The vocabulary in the runs of Megatron's trainer: its loss counts the padding too."""
SHAPE = PlainShape(num_layers=2, num_attention_heads=4, num_query_groups=2, vocab_size=PADDED)
RUN: dict[str, Any] = {
    "data": {"batch_size": 16},
    "algorithm": {
        "num_minibatches": 2,
        "num_epochs": 1,
        "max_new_tokens": 6,
        "kl_adaptive": True,
        "kl_target": 0.05,
        "kl_horizon": 200,
    },
}
STEPS_PER_ITERATION = 2


def case(name: str, num_ranks: int, calls: Mapping[str, Any], **megatron: Any) -> Any:
    from benchmarks import invariance

    decaying = {"lr_decay_style": "linear", "min_lr": 1e-4}  # a run that goes on must know its step
    return invariance.Case(
        name=name, num_ranks=num_ranks, calls=calls, megatron={**SMALL, **decaying, **megatron}
    )


def two_ranks() -> dict[str, Any]:
    """Another plan than the demo's: other windows, layouts and home copies."""
    from benchmarks.invariance import place

    return {
        "*": place(0, 2, dp=2, micro=1),
        "actor_gen": place(0, 2, tp=2),
        "actor_train": place(0, 2, pp=2),
        "critic_train": place(1, 2),
        "critic_inf": place(1, 2),
    }


@pytest.fixture(scope="module")
def whole(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Four iterations under the demo's plan, saved at two and four: the folder, and what every rank saw."""
    from benchmarks.invariance import demo_calls
    from tests.e2e.cases import run

    folder = tmp_path_factory.mktemp("whole")
    return folder, run(case("whole", 4, demo_calls()), folder, iterations=4, save_interval=2, **RUN)


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
    one = case("resumed", *((4, invariance.demo_calls()) if plan == "the same" else (2, two_ranks())))
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
    one = case("still", 1, invariance.ONE, lr=0.0, min_lr=0.0)
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


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def load(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """A checkpoint as torch alone reads it, by names of parameters."""
    from tests.e2e.cases import by_parameter, load_tensors

    return by_parameter(load_tensors(folder), prefix)


# --- Megatron itself -------------------------------------------------------------------------------------------------

WINDOW = [int(x) for x in np.random.default_rng(0).integers(0, 256, 33)]


def script_arguments(tokens: Path, *extra: str, **changes: Any) -> list[str]:
    """The command line of `examples/pretrain_docstrings.py` for the small model, without a plan."""
    from benchmarks.invariance import MEGATRON
    from megatron_real.config import megatron_arguments

    values = {
        **MEGATRON,
        **SMALL,
        "seq_length": 32,
        "min_lr": 1e-4,  # by which Megatron finds parameter groups
        "global_batch_size": 1,
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_workers": 0,
        "eval_iters": 0,
        "eval_interval": 1_000_000,
        "log_interval": 1,
        "rerun_mode": "disabled",
        "no_rope_fusion": True,
        "no_bias_swiglu_fusion": True,
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        **changes,
    }
    return [*megatron_arguments(values), "--train-tokens", str(tokens), *extra]


def run_script(arguments: list[str]) -> tuple[list[float], str]:
    """On a rank: run the script as torchrun would; the loss of every micro-batch, and what it printed."""
    found = importlib.util.spec_from_file_location(
        "pretrain_docstrings", ROOT / "examples/pretrain_docstrings.py"
    )
    assert found is not None
    assert found.loader is not None
    sys.argv = ["pretrain_docstrings.py", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        script: Any = importlib.util.module_from_spec(found)
        found.loader.exec_module(script)
        losses = []
        loss_function = script.loss_function

        def noting_loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
            total, num_tokens, logged = loss_function(mask, output)
            losses.append(float(total.detach()) / int(num_tokens))
            return total, num_tokens, logged

        script.loss_function = noting_loss
        arguments = script.parse_and_validate_args(
            extra_args_provider=script.add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
        )
        config = script.pretrain_cfg_container_from_args(arguments, script.gpt_config_from_args(arguments))
        script.pretrain(
            config, script.datasets_provider, script.ModelType.encoder_or_decoder, script.forward_step
        )
    return losses, printed.getvalue()


def plain_language_model(
    found: Path, num_steps_taken: int, num_steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of training on `WINDOW` from a checkpoint, Adam's state included, in plain PyTorch."""
    weights = {name: w.double().requires_grad_() for name, w in load(found).items()}
    optimizer = PlainAdamW(weights, 1e-3, PlainConfig(weight_decay=0.0, clip_grad=1.0))
    optimizer._steps = num_steps_taken
    for moments, name in ((optimizer._first, "exp_avg"), (optimizer._second, "exp_avg_sq")):
        stored = load(found, f"optimizer.state.{name}.")
        assert stored.keys() == weights.keys()
        moments.update({key: value.double() for key, value in stored.items()})
    assert any(value.abs().max() > 0 for value in optimizer._second.values())
    losses = []
    for _ in range(num_steps):
        distribution = torch.log_softmax(logits(WINDOW[:-1], weights, SHAPE), dim=-1)
        loss = -distribution.gather(1, torch.tensor(WINDOW[1:])[:, None]).mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        optimizer.step(dict(zip(weights, gradients, strict=True)))
    return losses, {name: weight.detach() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def megatron_run(whole: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Megatron's trainer takes three steps from our actor, under another layout and padding, and saves."""
    folder = tmp_path_factory.mktemp("megatron")
    np.save(folder / "tokens.npy", np.array([*WINDOW, 0], dtype=np.int32))  # one window only
    arguments = script_arguments(
        folder / "tokens.npy",
        *("--load", str(whole[0] / "checkpoints/actor"), "--save", str(folder / "saved")),
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--override-opt-param-scheduler"),
        train_iters=7,
        save_interval=7,
        make_vocab_size_divisible_by=8,
    )
    return folder / "saved", run_ranks(2, run_script, arguments, timeout_s=240)


def test_megatron_goes_on_from_our_actor(whole: Any, megatron_run: Any) -> None:
    saved, results = megatron_run
    start = whole[0] / "checkpoints/actor/iter_0000004"
    expected, weights = plain_language_model(start, 4 * STEPS_PER_ITERATION, 3)
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[0] - expected[2] > 1e-3, "the steps change the loss"
    assert "successfully loaded checkpoint" in results[0][1]
    end = load(saved / "iter_0000007")
    for name, weight in end.items():
        rows = min(PADDED, len(weight))
        assert relative(weight[:rows], weights[name][:rows]) <= 1e-4, name


def built(tree: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: a run that was built and not started."""
    from tests.e2e.cases import run_tree

    return run_tree(tree, train=False)


def test_megatrons_checkpoint_under_another_layout(megatron_run: Any, tmp_path: Path) -> None:
    from benchmarks.invariance import assemble
    from tests.e2e.cases import by_layer, tree_of

    saved, _ = megatron_run
    one = case("from Megatron", 2, two_ranks(), num_layers=2)
    model = {"actor": {"load": str(saved)}, "critic": {"load": str(saved)}}
    results = run_ranks(2, built, tree_of(one, tmp_path, model=model, **RUN), timeout_s=120)
    stored = load(saved / "iter_0000007")
    weights = assemble(results, "before")
    for role in ("actor", "critic"):
        found = by_layer(weights, role)
        assert found.keys() == stored.keys()
        head = found.pop("output_layer.weight")
        for name, weight in found.items():
            assert torch.equal(weight, stored[name][:VOCAB_SIZE]), name
        if role == "actor":
            assert torch.equal(head, stored["output_layer.weight"][:VOCAB_SIZE])
        else:
            assert head.shape == (1, 32)
            assert 0.1 < head.std() < 0.3, "fresh values, as --init-method-std says"
    messages = [message for result in results for message in result["log"]]
    assert [
        message for message in messages if "value_head.weight" in message and message.startswith("critic:")
    ]
    assert not [message for message in messages if "fresh" in message and not message.startswith("critic:")]


def load_critic(arguments: list[str]) -> dict[str, Any]:
    """On a rank: Megatron's `load_checkpoint` of a critic, model and optimizer; its parameters."""
    sys.argv = ["critic", *arguments]
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args, initialize
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.training import setup_model_and_optimizer

    from megatron_real.hooks.scalar_head import ScalarHead

    def provider(pre_process: bool = True, post_process: bool = True, **_others: Any) -> GPTModel:
        args = get_args()
        config = core_transformer_config_from_args(args)
        model = GPTModel(
            config,
            gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=64,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
        )
        if post_process:
            model.output_layer = ScalarHead(config, ProcessGroupCollection.use_mpu_process_groups())
        return model

    with contextlib.redirect_stdout(io.StringIO()):
        parse_and_validate_args(
            extra_args_provider=lambda parser: parser, args_defaults={"tokenizer_type": "NullTokenizer"}
        )
        initialize.initialize_megatron()
        model, _, scheduler = setup_model_and_optimizer(
            ModelType.encoder_or_decoder, provider, checkpointing_context={}
        )
    (chunk,) = model
    return {
        "iteration": get_args().iteration,
        "steps": scheduler.num_steps,
        "weights": {name.removeprefix("module."): p.detach().clone() for name, p in chunk.named_parameters()},
    }


def test_our_critic_in_megatron(whole: Any, tmp_path: Path) -> None:
    arguments = script_arguments(
        tmp_path,
        *("--load", str(whole[0] / "checkpoints/critic"), "--override-opt-param-scheduler"),
        *("--pipeline-model-parallel-size", "2"),
        train_iters=7,
    )
    at = arguments.index("--train-tokens")
    results = run_ranks(2, load_critic, arguments[:at] + arguments[at + 2 :], timeout_s=120)
    stored = load(whole[0] / "checkpoints/critic/iter_0000004")
    seen = 0
    for stage, result in enumerate(results):
        assert result["iteration"] == 4
        for name, weight in result["weights"].items():
            name = name.replace("decoder.layers.0.", f"decoder.layers.{stage}.")
            expected = stored[name]
            rows = 1 if name == "output_layer.weight" else min(VOCAB_SIZE, len(weight))
            assert torch.equal(weight[:rows], expected[:rows]), name
            seen += 1
    assert seen == len(stored)


# --- tied embeddings over pipeline stages ----------------------------------------------------------------------------


def test_tied_embeddings_over_stages(cpu_device: None, tmp_path: Path) -> None:
    """One iteration and a save under pp=2, then a resume under tp=2, against two iterations in one process."""
    from benchmarks import invariance
    from tests.e2e.cases import by_layer, run, tree_of

    place = invariance.place
    # The runs have different lengths, over which a learning rate would decay.
    tied = {"untie_embeddings_and_output_weights": False, "lr_decay_style": "constant"}
    plan = two_ranks()
    reference = run(case("one process", 1, invariance.ONE, **tied), tmp_path / "one", iterations=2, **RUN)
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


# --- what can be wrong -----------------------------------------------------------------------------------------------


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
    from benchmarks.invariance import ONE
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
