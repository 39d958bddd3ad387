"""Roles out of Megatron's arguments: overrides come after Megatron's validation, and mean what flags would mean."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.config import megatron_arguments
from megatron_real.errors import ConfigError
from megatron_real.hooks import job, roles
from megatron_real.hooks.checkpoint import check_architecture
from megatron_real.hooks.cpu_device import install_cpu_device
from tests.e2e.tiny_run import MEGATRON, place, write_run
from tests.harness import run_ranks

pytestmark = pytest.mark.megatron

CALLS = {
    name: place(0, 1)
    for name in ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
}


def _parsed(folder: Path) -> list[Namespace]:
    install_cpu_device()
    plan = Path(write_run(folder, calls=CALLS, ranks=1)["plan"])
    flags = ({}, {"weight_decay": 0.3, "bf16": True, "hidden_size": 64, "ffn_hidden_size": None})
    return [roles.parse_arguments(megatron_arguments({**MEGATRON, **more}), plan) for more in flags]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> list[Namespace]:
    """The tiny actor, and the same with other flags; parsed in a process of its own, where Megatron is patched."""
    (found,) = run_ranks(1, _parsed, tmp_path_factory.mktemp("parsed"))
    return found


def _critic(base: Namespace, **overrides: Any) -> Namespace:
    return roles.role_arguments(base, overrides=overrides, role="critic")


def _rates(args: Namespace, num_steps: int) -> list[float]:
    """The learning rate after each step, by Megatron's scheduler."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "max_lr": args.lr, "min_lr": args.min_lr}])
    scheduler = OptimizerParamScheduler(optimizer, **roles.learning_schedule("critic", args, num_steps))
    rates = []
    for _ in range(num_steps):
        scheduler.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_overrides_give_what_the_same_flags_give(parsed: list[Namespace]) -> None:
    base, expected = parsed
    args = _critic(base, weight_decay=0.3, bf16=True, **{"hidden-size": 64}, ffn_hidden_size=None)
    assert args.params_dtype is torch.bfloat16
    for name in ("weight_decay", "start_weight_decay", "end_weight_decay", "params_dtype"):
        assert getattr(args, name) == getattr(expected, name), name
    for name in roles.ARCHITECTURE:
        assert getattr(args, name, None) == getattr(expected, name, None), name


def test_numbers_in_text_become_numbers(parsed: list[Namespace]) -> None:
    args = _critic(parsed[0], lr="1e-5", num_layers="3", rotary_base=1e6, lr_warmup_fraction="0.5")
    assert (args.lr, args.num_layers, args.rotary_base, args.lr_warmup_fraction) == (1e-5, 3, 1000000, 0.5)
    assert type(args.rotary_base) is int


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lr": "fast"}, r"models\.critic\.lr: found 'fast'; expected a value of type float, like 0\.001"),
        ({"lr": True}, r"models\.critic\.lr: found True"),
        ({"lr_warmup_fraction": "some"}, r"lr_warmup_fraction: found 'some'; expected a value of type float"),
        ({"num_layers": 2.5}, r"num_layers: found 2\.5; expected a value of type int"),
        ({"num_layers": 0}, r"models\.critic: num_layers: found 0; expected at least 1"),
        ({"weight_decay": None}, r"weight_decay: found None"),
        ({"recompute-granularity": "full"}, r"recompute_granularity: .* the plan decides"),
        ({"bf16": True, "fp16": True}, r"bf16, fp16: found both true"),
    ],
)
def test_overrides_that_megatron_would_not_take(
    parsed: list[Namespace], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _critic(parsed[0], **overrides)


def test_a_checkpoint_that_stores_no_vocabulary_fits_and_leaves_the_known_one(
    parsed: list[Namespace],
) -> None:
    stored = Namespace(**{**vars(parsed[0]), "vocab_size": None, "num_layers": 4})
    args = roles.role_arguments(parsed[0], stored=stored, role="critic")
    assert (args.vocab_size, args.num_layers) == (257, 4)
    check_architecture("critic", args, stored, Path("stored"))
    stored.vocab_size = 300
    with pytest.raises(ConfigError, match="--vocab-size: found 257; expected 300"):
        check_architecture("critic", args, stored, Path("stored"))


def test_gradients_are_averaged_whatever_the_flag_says(parsed: list[Namespace]) -> None:
    args = Namespace(**{**vars(parsed[0]), "calculate_per_token_loss": True})
    model = roles.role_model("actor", args, scalar_head=False, tp_sizes=[1], seed=1, use_te=False)
    assert model.config.calculate_per_token_loss is False


EXPERTS = {
    "num_experts": 4,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
            r"--moe-aux-loss-coeff: found 0\.01; expected 0: the loss is that of a micro-batch",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            r"balancing-type: found sinkhorn; expected one of none, ",
        ),
        ({"moe_z_loss_coeff": 1e-3}, r"--moe-z-loss-coeff: found 0\.001"),
        (
            {"moe_expert_capacity_factor": 1.0},
            r"capacity-factor: found 1\.0; expected none: no token may be dropped",
        ),
        ({"moe_input_jitter_eps": 1e-2}, r"--moe-input-jitter-eps: found 0\.01"),
    ],
)
def test_what_depends_on_the_tokens_of_a_microbatch_is_refused(
    parsed: list[Namespace], changes: dict[str, Any], message: str
) -> None:
    def model(**more: Any) -> Any:
        args = Namespace(**{**vars(parsed[0]), **EXPERTS, **more})
        return roles.role_model("actor", args, scalar_head=False, tp_sizes=[1], seed=1, use_te=False)

    assert model(moe_router_load_balancing_type="aux_loss").config.num_moe_experts == 4
    with pytest.raises(ConfigError, match=message):
        model(**changes)


def test_a_call_for_another_head_than_the_graphs_is_refused() -> None:
    definition = find_algorithm("ppo")
    algorithm = definition.build(definition.config(), end_token=7)
    job._check_heads(algorithm)
    algorithm.graph = replace(algorithm.graph, scalar_heads=("critic", "actor"))
    with pytest.raises(
        ConfigError, match=r"actor_gen: found a call for logprobs of actor, .* gives a scalar head"
    ):
        job._check_heads(algorithm)
    algorithm.graph = replace(algorithm.graph, scalar_heads=())
    with pytest.raises(
        ConfigError, match=r"critic_train: found a call for values of critic, .* a language-model"
    ):
        job._check_heads(algorithm)


def test_a_hybrid_pattern_decides_the_number_of_layers(parsed: list[Namespace]) -> None:
    base = Namespace(**{**vars(parsed[0]), "hybrid_layer_pattern": "*-|*-*-"})
    args = roles.role_arguments(base, role="actor")
    model = roles.role_model("actor", args, scalar_head=False, tp_sizes=[1], seed=1, use_te=False)
    assert (model.hybrid_layer_pattern, model.config.num_layers, model.config.is_hybrid_model) == (
        "*-*-*-",
        6,
        True,
    )
    args = _critic(base, hybrid_layer_pattern="*-")
    assert (args.hybrid_layer_pattern, args.num_layers) == ("*-", 2)
    stored = Namespace(**{**vars(base), "hybrid_layer_pattern": "*-*-|*-", "num_layers": 6})
    check_architecture("actor", roles.role_arguments(base, role="actor"), stored, Path("stored"))


def test_warm_up_by_fraction(parsed: list[Namespace]) -> None:
    args = _critic(parsed[0], lr=1.0, lr_warmup_fraction=0.5)
    assert _rates(args, 8) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_warmup_stable_decay(parsed: list[Namespace]) -> None:
    args = _critic(parsed[0], lr=1.0, lr_decay_style="WSD", lr_wsd_decay_iters=4, lr_wsd_decay_style="linear")
    assert _rates(args, 8) == [1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"min_lr": 1.0}, r"models\.critic: --min-lr: found 1\.0; expected between 0 and --lr=0\.001"),
        ({"lr_warmup_init": 1.0}, r"--lr-warmup-init: found 1\.0"),
        ({"lr_decay_iters": 0}, r"--lr-decay-iters: found 0"),
        ({"lr_decay_iters": 4, "lr_warmup_iters": 4}, r"--lr-warmup-iters: found 4"),
        ({"lr_warmup_fraction": 1.0}, r"--lr-warmup-fraction: found 1\.0"),
        ({"lr_warmup_fraction": 0.5, "lr_warmup_iters": 1}, r"expected one of them"),
        ({"lr_decay_style": "steep"}, r"--lr-decay-style: found 'steep'; expected one of constant, "),
        ({"lr_decay_style": "WSD"}, r"--lr-wsd-decay-iters: found None"),
        ({"weight_decay": -0.1}, r"--weight-decay: found -0\.1"),
        ({"weight_decay_incr_style": "linear", "end_weight_decay": 0.001}, r"--end-weight-decay: found"),
    ],
)
def test_schedules_that_the_scheduler_would_refuse(
    parsed: list[Namespace], overrides: dict[str, Any], message: str
) -> None:
    args = _critic(parsed[0], **overrides)
    with pytest.raises(ConfigError, match=message):
        roles.learning_schedule("critic", args, 8)
