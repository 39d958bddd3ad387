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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.training import get_megatron_optimizer_config

from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.hooks.install import install
from megatron_real.hooks.model_builder import RoleModel
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
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "multi_latent_attention",
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
        # Many of its assertions have no text: then the line says what was expected.
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(f"Megatron's arguments: {reason}.") from error
    finally:
        sys.argv = former
        logger.debug("%s", printed.getvalue())
    sys.stderr.write(complaints.getvalue())
    return args


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def architecture_of(args: Namespace) -> dict[str, Any]:
    """The architecture arguments that `args` has."""
    return {name: getattr(args, name) for name in ARCHITECTURE if hasattr(args, name)}


def role_arguments(
    base: Namespace, *, stored: Namespace | None = None, overrides: Mapping[str, Any] | None = None, role: str
) -> Namespace:
    """The Megatron arguments of one role.

    Args:
        base: validated arguments of the launch script.
        stored: arguments stored in the role's checkpoint; their architecture wins over `base`.
        overrides: Megatron argument names (with ``-`` or ``_``) to values; they win over both.

    Raises:
        ConfigError: an override that Megatron does not know, or sizes that leave no feed-forward layer.
    """
    args = copy.copy(base)
    if stored is not None:
        vars(args).update(architecture_of(stored))
    changes = {name.replace("-", "_"): value for name, value in (overrides or {}).items()}
    raise_problems(
        (
            Problem(
                path=f"models.{role}.{name}",
                found="an unknown Megatron argument",
                expected="one of Megatron's",
            )
            for name in changes
            if not hasattr(args, name)
        ),
        subject="models",
        error=ConfigError,
    )
    vars(args).update(changes)
    _derive(args, changes)
    if args.ffn_hidden_size < 1:
        raise ConfigError(
            f"models.{role}: found hidden_size={args.hidden_size} without ffn_hidden_size; Megatron's rule makes "
            "that 0. Give ffn_hidden_size too."
        )
    return args


def _derive(args: Namespace, changes: Mapping[str, Any]) -> None:
    """Redo what `validate_args` derives from the sizes that an override changed."""
    if changes.keys() & {"hidden_size", "swiglu"} and "ffn_hidden_size" not in changes:
        args.ffn_hidden_size = (
            int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
        )
    if changes.keys() & {"hidden_size", "num_attention_heads"} and "kv_channels" not in changes:
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
        ConfigError: the vocabulary size is not known.
    """
    if args.vocab_size is None:
        raise ConfigError(
            f"models.{role}: found no vocabulary size; give --vocab-size or a checkpoint that stores it."
        )
    flat = copy.copy(args)
    vars(flat).update({name: value for name, value in _FLAT_LAYOUT.items() if hasattr(flat, name)})
    # Ratios compare the same network at two times: dropout would make it two networks (as in verl and TRL).
    flat.hidden_dropout = flat.attention_dropout = 0.0
    if not use_te:
        flat.apply_rope_fusion = False  # TransformerEngine's kernel
    config = core_transformer_config_from_args(flat)
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
    )


def optimizer_config(args: Namespace) -> OptimizerConfig:
    """Megatron's optimizer options for one role.

    Raises:
        ConfigError: no learning rate.
    """
    if args.lr is None:
        raise ConfigError("command line: found no --lr; expected the learning rate of the optimizer.")
    config, _ = get_megatron_optimizer_config(args)
    return config


def learning_schedule(args: Namespace, num_steps: int) -> dict[str, Any]:
    """Arguments of Megatron's `OptimizerParamScheduler`, counted in optimizer steps.

    Args:
        args: of the role; ``--lr-decay-iters`` and ``--lr-warmup-iters`` count optimizer steps here.
        num_steps: optimizer steps of the whole run, over which the rate decays if nothing else is said.
    """
    return {
        "init_lr": args.lr_warmup_init,
        "max_lr": args.lr,
        "min_lr": args.min_lr or 0.0,
        "lr_warmup_steps": args.lr_warmup_iters or 0,
        "lr_decay_steps": max(args.lr_decay_iters or num_steps, (args.lr_warmup_iters or 0) + 1),
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": num_steps,
        "wd_incr_style": args.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": True,
    }
