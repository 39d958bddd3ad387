"""From Megatron's arguments to the models of a run: every role has its own shape, overrides and checkpoint.

The actor is described by the launch script's own arguments. Another role starts from the same arguments, or,
when it has
a checkpoint, from the architecture stored there; overrides (``models.yaml``) come last.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.training import get_megatron_optimizer_config

from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.hooks.hybrid_pattern import bare_pattern, num_layers
from megatron_real.hooks.install import install
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.overrides import read_overrides
from megatron_real.model_shape import padded_vocab_size

__all__ = [
    "ARCHITECTURE",
    "architecture_of",
    "learning_schedule",
    "optimizer_config",
    "parse_arguments",
    "role_arguments",
    "role_model",
]

logger = logging.getLogger(__name__)

ARCHITECTURE: tuple[str, ...] = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "squared_relu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "max_position_embeddings",
    "untie_embeddings_and_output_weights",
    "vocab_size",
    "num_experts",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "hybrid_layer_pattern",
)
"""Megatron arguments that decide which parameters a model has and what it computes."""

_FLAT_LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "sequence_parallel": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "overlap_p2p_comm": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
"""What a placement decides: taken out of the arguments, to be put in again for each copy."""

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_BALANCING_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_BALANCING = ("none", *_BALANCING_LOSSES)
_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
_WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


def parse_arguments(arguments: Sequence[str], plan: Path) -> Namespace:
    """Parse and validate Megatron's arguments as a launch script does, under `plan`. No collective, no globals set.

    Raises:
        PlanError, ConfigError: the plan does not fit, or flags contradict it.
    """
    install()
    from megatron.training.arguments import parse_args, validate_args

    former = sys.argv
    sys.argv = [former[0], *arguments, "--real-plan", str(plan)]
    printed, complaints = io.StringIO(), io.StringIO()
    try:
        # Five hundred lines of arguments, which stand in the checkpoint too; and argparse's usage.
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
            args = parse_args()
            validate_args(args, {"tokenizer_type": "NullTokenizer"})
    except SystemExit as error:  # argparse
        if not error.code:
            sys.stdout.write(printed.getvalue())  # --help
            raise
        raise ConfigError(
            f"Megatron's arguments: {_last_line(complaints.getvalue()).partition('error: ')[2]}."
        ) from error
    except (AssertionError, ValueError) as error:  # how Megatron refuses what users write
        raise ConfigError(f"Megatron's arguments: {_reason(error)}.") from error
    finally:
        sys.argv = former
        logger.debug("%s", printed.getvalue())
    sys.stderr.write(complaints.getvalue())
    return args


def _reason(error: Exception) -> str:
    """What Megatron refused. Many of its assertions have no text: then the line says what was expected."""
    return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def architecture_of(args: Namespace) -> dict[str, Any]:
    """The architecture arguments that `args` has."""
    known = {name: getattr(args, name) for name in ARCHITECTURE if hasattr(args, name)}
    if known.get("vocab_size", 0) is None:
        # Megatron keeps only the padded size when a tokenizer decides: such a checkpoint does not say.
        del known["vocab_size"]
    if known.get("hybrid_layer_pattern"):
        known["hybrid_layer_pattern"] = bare_pattern(known["hybrid_layer_pattern"])
    return known


def role_arguments(
    base: Namespace, *, stored: Namespace | None = None, overrides: Mapping[str, Any] | None = None, role: str
) -> Namespace:
    """The Megatron arguments of one role.

    Args:
        base: validated arguments of the launch script.
        stored: arguments stored in the role's checkpoint; their architecture wins over `base`.
        overrides: Megatron argument names (with ``-`` or ``_``) to values; they win over both.

    Raises:
        ConfigError: an override that Megatron does not know, that the plan decides, or of another type; or sizes that
            make no model.
    """
    args = copy.copy(base)
    if stored is not None:
        vars(args).update(architecture_of(stored))
    changes = read_overrides(role, args, overrides or {}, decided_by_plan=_FLAT_LAYOUT.keys())
    vars(args).update(changes)
    raise_problems(_size_problems(args), subject=f"models.{role}", error=ConfigError)
    _derive(args, changes)
    if args.ffn_hidden_size < 1:
        raise ConfigError(
            f"models.{role}: found hidden_size={args.hidden_size} without ffn_hidden_size; Megatron's rule makes "
            "that 0. Give ffn_hidden_size too."
        )
    return args


def _size_problems(args: Namespace) -> Iterator[Problem]:
    for name in _SIZES:
        size = getattr(args, name)
        if size is None or size < 1:
            yield Problem(path=name, found=repr(size), expected="at least 1")
    if args.bf16 and args.fp16:
        yield Problem(
            path="bf16, fp16",
            found="both true",
            expected="one of them at most",
            fix="An override of one does not switch off the other, which the actor may have on.",
        )


def _derive(args: Namespace, changes: Mapping[str, Any]) -> None:
    """Redo what `validate_args` derives from the arguments that an override changed."""
    if args.hybrid_layer_pattern:
        args.hybrid_layer_pattern = bare_pattern(args.hybrid_layer_pattern)
        args.num_layers = num_layers(args.hybrid_layer_pattern)
    if changes.keys() & {"bf16", "fp16"}:
        args.params_dtype = torch.bfloat16 if args.bf16 else torch.half if args.fp16 else torch.float
    constant = args.weight_decay_incr_style == "constant"
    if constant and changes.keys() & {"weight_decay", "weight_decay_incr_style"}:
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    if args.ffn_hidden_size is None or (
        changes.keys() & {"hidden_size", "swiglu"} and "ffn_hidden_size" not in changes
    ):
        args.ffn_hidden_size = (
            int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
        )
    if args.kv_channels is None or (
        changes.keys() & {"hidden_size", "num_attention_heads"} and "kv_channels" not in changes
    ):
        args.kv_channels = args.hidden_size // args.num_attention_heads


def role_model(
    role: str, args: Namespace, *, scalar_head: bool, tp_sizes: Iterable[int], seed: int, use_te: bool
) -> RoleModel:
    """The layout-free description of a role's model.

    Args:
        args: from `role_arguments`.
        scalar_head: a critic or reward model.
        tp_sizes: every tp of the plan: one padded vocabulary must serve them all.
        seed: of the initial values.

    Raises:
        ConfigError: the vocabulary size is not known, or Megatron refuses the architecture.
    """
    if args.vocab_size is None:
        raise ConfigError(
            f"models.{role}: found no vocabulary size; give --vocab-size or a checkpoint that stores it."
        )
    flat = copy.copy(args)
    vars(flat).update({name: value for name, value in _FLAT_LAYOUT.items() if hasattr(flat, name)})
    # Ratios compare the same network at two times: dropout would make it two networks (as in verl and TRL).
    flat.hidden_dropout = flat.attention_dropout = 0.0
    # With it DDP sums gradients and leaves the division by all tokens to Megatron's training loop. Our objectives are
    # normalised already and count on DDP's average: without it gradients would be dp times too large.
    flat.calculate_per_token_loss = False
    if not use_te:
        flat.apply_rope_fusion = False  # TransformerEngine's kernel
    try:
        config = core_transformer_config_from_args(flat)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"models.{role}: Megatron refuses its arguments: {_reason(error)}.") from error
    raise_problems(_microbatch_problems(config), subject=f"models.{role}", error=ConfigError)
    return RoleModel(
        role=role,
        config=config,
        vocab_size=args.vocab_size,
        padded_vocab_size=padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, tuple(sorted(set(tp_sizes)))
        ),
        max_sequence_length=args.max_position_embeddings,
        scalar_head=scalar_head,
        tied_embeddings=not args.untie_embeddings_and_output_weights and not scalar_head,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        init_seed=seed,
        use_te=use_te,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
    )


def _microbatch_problems(config: TransformerConfig) -> Iterator[Problem]:
    """Options of experts by which a token's result depends on the tokens that share its micro-batch.

    A plan decides what shares a micro-batch, and no number may depend on the plan. What is left routes each token by
    itself; biases of the router are updated from the counts of a whole minibatch, without padding.
    """
    if config.num_moe_experts is None:
        return
    kinds = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    pairs = zip(
        kinds if isinstance(kinds, list) else [kinds],
        coefficients if isinstance(coefficients, list) else [coefficients],
        strict=False,
    )
    losses = [kind for kind, coefficient in pairs if kind in _BALANCING_LOSSES and coefficient]
    foreign = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in _BALANCING]
    checks = (
        (
            "--moe-aux-loss-coeff",
            losses and config.moe_aux_loss_coeff,
            "0: the loss is that of a micro-batch",
        ),
        ("--moe-router-load-balancing-type", foreign and kinds, f"one of {', '.join(_BALANCING)}"),
        ("--moe-z-loss-coeff", config.moe_z_loss_coeff, "none: the loss is that of a micro-batch"),
        ("--moe-expert-capacity-factor", config.moe_expert_capacity_factor, "none: no token may be dropped"),
        ("--moe-input-jitter-eps", config.moe_input_jitter_eps, "none: it is random"),
    )
    for flag, found, expected in checks:
        if found:
            yield Problem(path=flag, found=str(found), expected=expected)


def optimizer_config(role: str, args: Namespace) -> OptimizerConfig:
    """Megatron's optimizer options for one role.

    Raises:
        ConfigError: no learning rate, or an optimizer that cannot be sharded.
    """
    if args.lr is None:
        raise ConfigError(f"models.{role}: found no --lr; expected the learning rate of the optimizer.")
    if args.optimizer != "adam":
        raise ConfigError(
            f"models.{role}: --optimizer: found {args.optimizer!r}; expected 'adam', the only one that Megatron's "
            "distributed optimizer shards."
        )
    try:
        config, _ = get_megatron_optimizer_config(args)
    except (AssertionError, ValueError, RuntimeError) as error:  # how Megatron refuses options
        raise ConfigError(
            f"models.{role}: Megatron refuses the optimizer's options: {_reason(error)}."
        ) from error
    return config


def learning_schedule(role: str, args: Namespace, num_steps: int) -> dict[str, Any]:
    """Arguments of Megatron's `OptimizerParamScheduler`, counted in optimizer steps.

    Args:
        role: for error messages.
        args: of the role; ``--lr-decay-iters``, ``--lr-warmup-iters`` and ``--lr-wsd-decay-iters`` count optimizer
            steps here.
        num_steps: optimizer steps of the whole run, over which the rate decays if nothing else is said; where the
            warm-up is longer, the decay begins after it.

    Raises:
        ConfigError: listing every value that the scheduler would refuse.
    """
    warmup_steps, decay_steps = args.lr_warmup_iters or 0, args.lr_decay_iters
    if decay_steps is None:
        decay_steps = max(num_steps, warmup_steps + 1)
    if args.lr_warmup_fraction is not None:
        if warmup_steps:
            raise ConfigError(
                f"models.{role}: found --lr-warmup-fraction={args.lr_warmup_fraction} and "
                f"--lr-warmup-iters={warmup_steps}; expected one of them. Drop the other."
            )
        warmup_steps = args.lr_warmup_fraction * decay_steps
    schedule = {
        "init_lr": args.lr_warmup_init,
        "max_lr": args.lr,
        "min_lr": args.min_lr or 0.0,
        "lr_warmup_steps": warmup_steps,
        "lr_decay_steps": decay_steps,
        "lr_decay_style": args.lr_decay_style,
        "wsd_decay_steps": args.lr_wsd_decay_iters,
        "lr_wsd_decay_style": args.lr_wsd_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": num_steps,
        "wd_incr_style": args.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": True,
    }
    raise_problems(_schedule_problems(args, schedule), subject=f"models.{role}", error=ConfigError)
    return schedule


def _schedule_problems(args: Namespace, schedule: Mapping[str, Any]) -> Iterator[Problem]:
    """What `OptimizerParamScheduler` asserts, by the flags of the values."""
    lr, warmup_steps, decay_steps = args.lr, schedule["lr_warmup_steps"], schedule["lr_decay_steps"]
    by_fraction = args.lr_warmup_fraction is not None
    constant_decay = args.weight_decay_incr_style == "constant"
    wsd = args.lr_decay_style == "WSD"
    start, end = args.start_weight_decay, args.end_weight_decay
    weight_decay_fits = None not in (start, end) and (
        0 <= start == end if constant_decay else 0 <= start <= end
    )
    checks: tuple[tuple[str, Any, bool, str], ...] = (
        ("--min-lr", schedule["min_lr"], 0 <= schedule["min_lr"] <= lr, f"between 0 and --lr={lr}"),
        ("--lr-warmup-init", args.lr_warmup_init, args.lr_warmup_init <= lr, f"at most --lr={lr}"),
        ("--lr-decay-iters", decay_steps, decay_steps > 0, "at least 1"),
        (
            "--lr-warmup-fraction" if by_fraction else "--lr-warmup-iters",
            args.lr_warmup_fraction if by_fraction else warmup_steps,
            decay_steps <= 0 or 0 <= warmup_steps < decay_steps,
            "at least 0 and less than 1" if by_fraction else f"less than --lr-decay-iters={decay_steps}",
        ),
        _choice("--lr-decay-style", args.lr_decay_style, _DECAY_STYLES),
        (
            "--lr-wsd-decay-iters",
            args.lr_wsd_decay_iters,
            not wsd or (args.lr_wsd_decay_iters or 0) > 0,
            "at least 1 with --lr-decay-style WSD: the optimizer steps of its last phase",
        ),
        _choice("--lr-wsd-decay-style", args.lr_wsd_decay_style, _WSD_STYLES),
        (
            "--weight-decay" if constant_decay else "--start-weight-decay and --end-weight-decay",
            f"{start} to {end}",
            weight_decay_fits,
            "one value of at least 0" if constant_decay else "at least 0, and no fall",
        ),
        _choice("--weight-decay-incr-style", args.weight_decay_incr_style, _WEIGHT_DECAY_STYLES),
    )
    for flag, found, fits, expected in checks:
        if not fits:
            yield Problem(path=flag, found=str(found), expected=expected)


def _choice(flag: str, value: str, allowed: Sequence[str]) -> tuple[str, Any, bool, str]:
    return flag, repr(value), value in allowed, f"one of {', '.join(allowed)}"
