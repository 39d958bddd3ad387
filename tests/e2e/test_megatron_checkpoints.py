"""Checkpoints between us and Megatron: its trainer goes on from our models, and we from its own."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.invariance_cases import MEGATRON
from megatron_real.config import megatron_arguments
from tests.e2e.checkpoint_runs import (
    RUN,
    SMALL,
    STEPS_PER_ITERATION,
    VOCAB_SIZE,
    built,
    case,
    load,
    relative,
    two_ranks,
)
from tests.e2e.plain_ppo import PlainAdamW, PlainConfig, PlainShape, logits
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
PADDED = 272
"""The vocabulary in the runs of Megatron's trainer: its loss counts the padding too."""
SHAPE = PlainShape(num_layers=2, num_attention_heads=4, num_query_groups=2, vocab_size=PADDED)
WINDOW = [int(x) for x in np.random.default_rng(0).integers(0, 256, 33)]


def script_arguments(tokens: Path, *extra: str, **changes: Any) -> list[str]:
    """The command line of `examples/pretrain_docstrings.py` for the small model, without a plan."""
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
