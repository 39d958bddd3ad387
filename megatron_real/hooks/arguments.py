"""Megatron's command line: one group of `--real-*` flags, and a plan's layout written into Megatron's own arguments.

Megatron computes everything about its layout from its arguments, so a plan of one train call (algorithm ``pretrain``)
is applied by setting them before Megatron validates them. A plan of several calls (``ppo``) sets the arguments to the
placement at which the actor trains; the other layouts are ours to build.

Nothing here imports Megatron; `megatron_real.hooks.install` puts these functions where Megatron calls them.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_real.errors import ConfigError, PlanError, Problem, raise_problems
from megatron_real.hooks.hybrid_pattern import bare_pattern, stage_pattern
from megatron_real.layout import Layout
from megatron_real.model_shape import ModelShape
from megatron_real.plan import Placement, Plan

__all__ = ["add_real_arguments", "apply_plan", "layout_arguments", "wrap_add_arguments", "wrap_validate_args"]

_ACTOR_TRAINING = "actor_train"
"""Whose placement a plan gives to Megatron's arguments; without an actor, that of the first training."""


def add_real_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the group ``real``. What it says is read by `megatron_real.config`, except ``--real-plan``, which acts here.

    Args:
        parser: Megatron's parser, or one of your own.
    """
    group = parser.add_argument_group(title="real")
    group.add_argument(
        "--real-plan", metavar="PLAN.JSON", help="layouts come from this plan, not from the flags"
    )
    group.add_argument(
        "--real-next-plan",
        metavar="ITERATION:PLAN.JSON",
        help="go on under this plan from that iteration on, counted from 0",
    )
    group.add_argument(
        "--real-models", metavar="FILE", help="models.yaml: checkpoint and overrides of each role"
    )
    group.add_argument(
        "--real-model",
        metavar="ROLE=DIR",
        action="append",
        default=[],
        help="a role's checkpoint, for example critic=DIR; may be given once per role",
    )
    group.add_argument(
        "--real-prompts",
        metavar="DATA",
        help="prompts, answers or pairs: a JSONL file, a folder, or hf:NAME[@CONFIG][:SPLIT]",
    )
    group.add_argument(
        "--real-reward", metavar="MODULE:FUNCTION", help="a Python reward instead of a reward model"
    )
    group.add_argument(
        "--real-output", metavar="DIR", help="metrics, traces, checkpoints and the summary go here"
    )
    group.add_argument("--real-iterations", metavar="N", type=int, help="iterations of the algorithm")
    group.add_argument(
        "--real-batch-size", metavar="N", type=int, help="prompts, answers or pairs per iteration"
    )
    group.add_argument(
        "--real-verify",
        metavar="MODE",
        help="prove what reallocations deliver: checksum or full; off is the default",
    )
    group.add_argument(
        "--real-resume", action="store_true", help="go on from the last checkpoint in --real-output"
    )
    group.add_argument(
        "--real-fault",
        metavar="KIND@RANK:ITERATION:INSTRUCTION",
        action="append",
        default=[],
        help="for tests: kill, stop or raise at that point",
    )
    group.add_argument(
        "--real-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other option of a run by its dotted name, for example algorithm.clip_ratio=0.1",
    )
    return parser


def layout_arguments(placement: Placement, num_layers: int | None = None) -> dict[str, Any]:
    """Megatron's arguments for a placement; None where Megatron's own default says it.

    Args:
        placement: a placement of a train call.
        num_layers: of the model, for explicit ``--num-layers-per-virtual-pipeline-stage``; unknown is None.
    """
    layout = placement.parallel
    full = placement.recompute == "full"
    chunk_layers = None
    if num_layers is not None and layout.vpp > 1 and layout.layers is None:
        chunk_layers = num_layers // (layout.pp * layout.vpp)
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "num_virtual_stages_per_pipeline_rank": layout.vpp
        if layout.vpp > 1 and layout.layers is None
        else None,
        "num_layers_per_virtual_pipeline_stage": chunk_layers,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": _stage_text(layout),
        "recompute_activations": placement.recompute == "selective",
        "recompute_granularity": None if placement.recompute == "none" else placement.recompute,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
    }


def apply_plan(args: Namespace, plan: Plan, argv: Sequence[str], *, source: str = "plan.json") -> None:
    """Write a plan's placement into Megatron's arguments, which must not be validated yet.

    Args:
        args: parsed Megatron arguments; changed in place.
        plan: the plan.
        argv: the command line without the program's name: a flag given there must not contradict the plan.
        source: how error messages name the plan.

    Raises:
        PlanError: the plan does not fit the world, the model or the machine.
        ConfigError: flags contradict the plan.
    """
    name, placement = _train_placement(plan, source)
    given = _given_flags(argv)
    settings = layout_arguments(placement, args.num_layers)
    if getattr(
        args, "hybrid_layer_pattern", None
    ):  # says itself where stages end, and takes none of the flags that would
        settings |= dict.fromkeys(_STAGE_FLAGS)
        settings["hybrid_layer_pattern"] = _stages_of_pattern(
            args.hybrid_layer_pattern, placement.parallel, source
        )
    raise_problems(_plan_problems(args, plan, name, placement), subject=source)
    raise_problems(
        _flag_problems(given, settings, f"{source}: calls.{name}"), subject="command line", error=ConfigError
    )
    for dest, value in settings.items():
        setattr(args, dest, value)
    if args.num_virtual_stages_per_pipeline_rank is not None:
        args.num_layers_per_virtual_pipeline_stage = None  # Megatron takes one of the two
    if plan.algorithm == "pretrain":
        _set_batch_sizes(args, placement, f"{source}: calls.{name}")
    elif args.micro_batch_size is None:
        args.micro_batch_size = 1  # the runtime cuts micro-batches by tokens


def _stages_of_pattern(pattern: str, layout: Layout, source: str) -> str:
    wanted = stage_pattern(pattern, layout)
    if pattern not in (wanted, bare_pattern(pattern)):
        raise ConfigError(
            f"command line: --hybrid-layer-pattern: found {pattern!r}; expected {bare_pattern(pattern)!r}, or "
            f"{wanted!r}, which is what {source} makes of it with the layout {layout}. Leave out the |."
        )
    return wanted


def wrap_add_arguments(original: Callable[[ArgumentParser], ArgumentParser]) -> Callable[..., ArgumentParser]:
    """`megatron.training.arguments.add_megatron_arguments` with our group.

    What it returns raises a ConfigError when the command line has `--yaml-cfg` beside `--real-plan`.
    """

    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        _refuse_yaml(sys.argv[1:])
        return add_real_arguments(original(parser))

    add_megatron_arguments.__wrapped__ = original  # type: ignore[attr-defined]
    return add_megatron_arguments


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """`megatron.training.arguments.validate_args`, which sees the plan's layout."""

    def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Any:
        path = getattr(args, "real_plan", None)
        if path is None:
            return original(args, dict(defaults or {}))
        plan = Plan.load(path)
        if plan.algorithm == "pretrain" and getattr(args, "real_next_plan", None) is not None:
            raise ConfigError(
                f"command line: --real-next-plan: found {args.real_next_plan} with {path} of algorithm pretrain; "
                "expected none: Megatron's own training loop keeps its layout. Resume from a checkpoint instead."
            )
        apply_plan(args, plan, sys.argv[1:], source=str(path))
        world_size = args.world_size
        args.world_size = _train_placement(plan, str(path))[1].mesh.size
        try:
            return original(args, dict(defaults or {}))
        finally:
            args.world_size = world_size

    validate_args.__wrapped__ = original  # type: ignore[attr-defined]
    return validate_args


def _refuse_yaml(argv: Sequence[str]) -> None:
    flags = {argument.partition("=")[0] for argument in argv}
    if {"--yaml-cfg", "--real-plan"} <= flags:
        raise ConfigError(
            "command line: found --yaml-cfg beside --real-plan; expected one of them: Megatron does not validate "
            "arguments from YAML where a plan could be applied. Give the arguments as flags."
        )


def _train_placement(plan: Plan, source: str) -> tuple[str, Placement]:
    if plan.algorithm == "pretrain":
        if len(plan.calls) != 1:
            raise PlanError(
                f"{source}: calls: found {sorted(plan.calls)}; expected one train call, which is all that "
                "algorithm pretrain has."
            )
        return next(iter(plan.calls.items()))
    trainings = [name for name in plan.calls if name.endswith("_train")]
    for name in (_ACTOR_TRAINING, *trainings):
        if name in plan.calls:
            return name, plan.calls[name]
    raise PlanError(
        f"{source}: calls: found no placement for {_ACTOR_TRAINING!r} or another call named MODEL_train, at which "
        f"Megatron's arguments describe the model. Calls placed: {', '.join(sorted(plan.calls))}."
    )


def _plan_problems(args: Namespace, plan: Plan, name: str, placement: Placement) -> Iterator[Problem]:
    layout = placement.parallel
    path = f"calls.{name}"
    devices = plan.cluster.num_devices
    if args.world_size != devices:
        yield Problem(
            path="cluster",
            found=f"{plan.cluster.num_nodes} x {plan.cluster.devices_per_node} = {devices} devices",
            expected=f"{args.world_size}, the number of ranks that were started (WORLD_SIZE)",
        )
    if plan.algorithm == "pretrain":
        yield from _pretrain_problems(placement, path, devices)
    if layout.vpp > 1 and placement.num_microbatches % layout.pp:
        yield Problem(
            path=f"{path}.num_microbatches",
            found=str(placement.num_microbatches),
            expected=f"a multiple of pp={layout.pp}: Megatron's interleaved schedule (vpp={layout.vpp}) takes no other",
        )
    if layout.cp > 1 and not _has_transformer_engine():
        yield Problem(
            path=f"{path}.layout.cp",
            found=f"cp={layout.cp}",
            expected="1 on this machine: context parallelism needs TransformerEngine's attention, which needs CUDA",
        )
    shape = _shape(args, layout)
    if shape is not None:
        yield from shape.layout_problems(layout, f"{path}.layout")


def _pretrain_problems(placement: Placement, path: str, devices: int) -> Iterator[Problem]:
    if placement.ranks != (0, devices):
        yield Problem(
            path=f"{path}.ranks",
            found=str(list(placement.ranks)),
            expected=f"[0, {devices}], the whole cluster",
        )
    if placement.offload != "none":
        yield Problem(
            path=f"{path}.offload", found=placement.offload, expected="none: the model is always in use"
        )
    if placement.drop_trained_weights:
        yield Problem(
            path=f"{path}.drop_trained_weights", found="true", expected="false: the model is always in use"
        )


def _has_transformer_engine() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _shape(args: Namespace, layout: Layout) -> ModelShape | None:
    """The model that Megatron's arguments describe; None where they do not (hybrid patterns, layer files)."""
    if not (args.num_layers and args.hidden_size and args.num_attention_heads):
        return None
    if args.ffn_hidden_size is not None:
        ffn_hidden_size = args.ffn_hidden_size
    elif args.swiglu:  # Megatron's rule
        ffn_hidden_size = int(4 * args.hidden_size * 2 / 3 / 64) * 64
    else:
        ffn_hidden_size = 4 * args.hidden_size
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        ffn_hidden_size=ffn_hidden_size,
        padded_vocab_size=layout.tp,  # Megatron pads the vocabulary to whatever tp needs
        num_experts=getattr(args, "num_experts", None) or 0,
        expert_ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None),
    )


def _stage_text(layout: Layout) -> str | None:
    """``--pipeline-model-parallel-layout`` for uneven stages: E embedding, t layer, L loss, | between stages."""
    if layout.layers is None:
        return None
    return "E" + "|".join("t" * count for count in layout.layers) + "L"


_STAGE_FLAGS = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
_FLAGS: dict[str, dict[str, Any]] = {
    **{
        dest: {"type": int}
        for dest in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "recompute_num_layers",
        )
    },
    **{dest: {"action": "store_true"} for dest in ("sequence_parallel", "recompute_activations")},
    **{dest: {} for dest in ("pipeline_model_parallel_layout", "recompute_granularity", "recompute_method")},
}
"""The flags that a plan decides, by the attribute that Megatron stores them in."""


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _given_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The flags of a plan that stand on the command line; defaults are not in it."""
    parser = ArgumentParser(
        allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for dest, options in _FLAGS.items():
        parser.add_argument(_flag(dest), **options)
    known, _ = parser.parse_known_args(list(argv))
    return vars(known)


def _flag_problems(given: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for dest, value in given.items():
        wanted = settings[dest]
        if dest == "expert_tensor_parallel_size" and wanted is None:
            wanted = settings["tensor_model_parallel_size"]
        if (
            dest == "num_virtual_stages_per_pipeline_rank"
            and wanted is None
            and not settings["pipeline_model_parallel_layout"]
        ):
            wanted = 1
        if value == wanted:
            continue
        yield Problem(
            path=_flag(dest),
            found=str(value) if value is not True else "the flag",
            expected=f"no flag, or {wanted}, which is what {where} says"
            if wanted
            else f"no flag: {where} has none",
            fix="Drop the flag, or change the plan.",
        )


def _set_batch_sizes(args: Namespace, placement: Placement, where: str) -> None:
    """Micro-batch and global batch size from the plan's micro-batches and whichever of the two is given."""
    dp, count = placement.parallel.dp, placement.num_microbatches
    if args.rampup_batch_size is not None:
        raise ConfigError(
            f"command line: --rampup-batch-size: found {args.rampup_batch_size}; expected none, since "
            f"{where}.num_microbatches fixes the number of micro-batches. Drop the flag."
        )
    if args.global_batch_size is None:
        if args.micro_batch_size is None:
            raise ConfigError(
                "command line: found neither --global-batch-size nor --micro-batch-size; expected one of them. "
                f"The other follows from {where} (dp={dp}, num_microbatches={count})."
            )
        args.global_batch_size = args.micro_batch_size * dp * count
        return
    size, rest = divmod(args.global_batch_size, dp * count)
    if rest or size == 0 or args.micro_batch_size not in (None, size):
        raise ConfigError(
            f"command line: --global-batch-size: found {args.global_batch_size}"
            + (
                f" with --micro-batch-size {args.micro_batch_size}"
                if args.micro_batch_size is not None
                else ""
            )
            + "; expected "
            + (
                f"{args.micro_batch_size * dp * count}"
                if args.micro_batch_size
                else f"a multiple of {dp * count}"
            )
            + f", since {where} has dp={dp} and num_microbatches={count}. Change the flags or the plan."
        )
    args.micro_batch_size = size
