"""Build a role's Megatron model in one parallel layout.

A `RoleModel` describes a model without any layout; `layout_config` puts a layout into its `TransformerConfig` and
`build_chunks` makes the modules, with explicit process groups and with the layout shown to Megatron, since parts of
Megatron read the one and parts the other. Values are not set here: see `model_init`.

Invariants (tests/hooks/test_model_builder.py):
    - every chunk holds the layers that `layout.stage_layers` gives it;
    - a model computes the same logits and gradients in every layout;
    - what cannot be built is refused before the first collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.errors import ConfigError, MegatronCompatError, PlanError, raise_problems
from megatron_real.hooks.hybrid import LOCAL_SYMBOLS, ProcessedHybridModel, hybrid_spec
from megatron_real.hooks.hybrid_pattern import stage_pattern
from megatron_real.hooks.parallel_state import ParallelLayout
from megatron_real.hooks.scalar_head import ScalarHead
from megatron_real.layout import Layout
from megatron_real.model_shape import ModelShape
from megatron_real.realloc_ops import model_shards
from megatron_real.realloc_ops.storage.local_shards import ShardedTensorLike

__all__ = ["RoleModel", "build_chunks", "layout_config", "quiet", "require_trainable", "sharded_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModel:
    """A role's model, without any layout."""

    role: str
    config: TransformerConfig
    """For one rank; layouts are put in by `layout_config`."""
    vocab_size: int
    """Real tokens; logits beyond are padding."""
    padded_vocab_size: int
    """Rows of embedding and LM head, the same in all layouts."""
    max_sequence_length: int
    scalar_head: bool = False
    """A critic or reward model."""
    tied_embeddings: bool = False
    """Embedding and LM head share their weight; without effect beside a scalar head, which has no LM head."""
    position_embedding_type: str = "rope"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    init_seed: int = 1234
    use_te: bool = False
    """Layers of TransformerEngine instead of Megatron's own."""
    hybrid_layer_pattern: str | None = None
    """Builds `HybridModel` in place of `GPTModel`: a symbol for each layer, without ``|``, which a layout puts in."""
    provider: Callable[..., MegatronModule] | None = None
    """Builds a chunk in place of `GPTModel`, as a launch script's ``model_provider`` does: called with ``config``,
    ``pg_collection``, ``pre_process``, ``post_process`` and ``vp_stage``, under the chunk's layout."""

    @property
    def ties(self) -> bool:
        """Whether the built model shares the embedding's weight with its LM head."""
        return self.tied_embeddings and not self.scalar_head

    def shape(self) -> ModelShape:
        """The dimensions that plans and prices depend on."""
        config = self.config
        return ModelShape(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups or config.num_attention_heads,
            ffn_hidden_size=config.ffn_hidden_size,
            padded_vocab_size=self.padded_vocab_size,
            tied_embeddings=self.ties,
            scalar_head=self.scalar_head,
            head_size=config.kv_channels,
            gated_mlp=config.gated_linear_unit,
            linear_bias=config.add_bias_linear,
            qkv_bias=config.add_qkv_bias,
            norm_bias=config.normalization == "LayerNorm",
            qk_norm=config.qk_layernorm,
            learned_positions=(
                self.max_sequence_length if self.position_embedding_type == "learned_absolute" else 0
            ),
            num_experts=config.num_moe_experts or 0,
            experts_per_token=config.moe_router_topk,
            expert_ffn_hidden_size=config.moe_ffn_hidden_size,
            shared_expert_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
            num_dense_layers=_leading_dense_layers(config),
        )


def _leading_dense_layers(config: TransformerConfig) -> int:
    """Layers before the first with experts; a period of every n-th layer counts as none."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None or isinstance(frequency, int):
        return 0
    return next((layer for layer, experts in enumerate(frequency) if experts), len(frequency))


def layout_config(role: RoleModel, layout: Layout) -> TransformerConfig:
    """The role's Megatron configuration in `layout`.

    Raises:
        PlanError: the model cannot be built in this layout.
        ConfigError: an option of the model cannot be had in several layouts.
        MegatronCompatError: TransformerEngine is asked for and is not installed.
    """
    _check(role, layout)
    config = role.config
    stages = _stage_list(layout) if layout.layers is not None else None
    interleaved = layout.vpp > 1
    # Stages exchange shapes before tensors, so that micro-batches may differ. Not under interleaving, where Megatron
    # confuses the shapes of a pair of stages that are each other's both neighbours.
    variable = config.variable_seq_lengths or (layout.pp > 1 and not interleaved)
    changes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "tensor_parallel_num_weight_shards": None,  # derived from tp and ep
        "expert_tensor_parallel_num_weight_shards": None,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if layout.etp is not None else layout.tp,
        "pipeline_model_parallel_layout": stages if role.hybrid_layer_pattern is None else None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_dtype": config.params_dtype,
        "variable_seq_lengths": variable and config.num_moe_experts is None,
        "microbatch_group_size_per_vp_stage": None,  # derived from pp
        # With two stages, batched point-to-point pairs up the wrong messages of an interleaved schedule.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm_warmup_flush": False,
        "perform_initialization": False,  # `model_init` sets all values
        "use_cpu_initialization": False,
    }
    if config.num_moe_experts is None:
        # Unused without experts, but the default does not go with variable lengths.
        changes["moe_token_dispatcher_type"] = "alltoall"
    try:
        return dataclasses.replace(config, **changes)
    except (ValueError, AssertionError) as error:
        raise PlanError(f"layout {layout} of {role.role}: Megatron refuses it: {error}") from error


def _check(role: RoleModel, layout: Layout) -> None:
    """Refuse what cannot be built, before anything collective."""
    raise_problems(role.shape().layout_problems(layout, "layout"), subject=f"layout {layout} of {role.role}")
    if role.use_te and not gpt_layer_specs.HAVE_TE:
        raise MegatronCompatError(
            f"{role.role}: found no TransformerEngine; the model's layers ask for it. Install megatron-real[te] on a "
            "machine with CUDA, or use Megatron's own layers (--transformer-impl local)."
        )
    if layout.cp > 1 and not role.use_te:
        raise PlanError(
            f"layout {layout} of {role.role}: found cp={layout.cp} without TransformerEngine; expected cp=1. Only its "
            "attention does context parallelism: set cp to 1, or use TransformerEngine's layers."
        )
    _check_pattern(role)
    for option in ("tp_comm_overlap", "use_mup", "mtp_num_layers", "init_model_with_meta_device"):
        if getattr(role.config, option, None):
            raise ConfigError(
                f"{role.role}: found {option}={getattr(role.config, option)}; expected it to be off: it is not "
                "supported in models that live in several layouts."
            )


def require_trainable(role: RoleModel, layout: Layout) -> None:
    """Refuse a layout in which Megatron runs the model but does not train it.

    Raises:
        PlanError: experts over several tensor-parallel ranks without sequence parallelism.
    """
    if role.config.num_moe_experts is not None and layout.tp > 1 and not layout.sp:
        raise PlanError(
            f"layout {layout} of {role.role}: found tp={layout.tp} without sp; expected sp in a train call of a model "
            "with experts: Megatron refuses to train them otherwise. Set sp to true, or tp to 1."
        )


def _check_pattern(role: RoleModel) -> None:
    pattern = role.hybrid_layer_pattern
    if pattern is None:
        return
    if len(pattern) != role.config.num_layers:
        raise ConfigError(
            f"{role.role}: found the layer pattern {pattern!r} with num_layers={role.config.num_layers}; expected a "
            "symbol for each layer, and no | or /."
        )
    foreign = sorted(set(pattern) - set(LOCAL_SYMBOLS))
    if foreign and not role.use_te:
        raise ConfigError(
            f"{role.role}: found the layers {', '.join(foreign)} in the pattern {pattern!r}; expected some of "
            f"{', '.join(LOCAL_SYMBOLS)}: the others need TransformerEngine."
        )


def _stage_list(layout: Layout) -> list[list[str]]:
    """Megatron's list of what each virtual stage holds, in model order."""
    assert layout.layers is not None
    stages = [["decoder"] * count for count in layout.layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def build_chunks(
    role: RoleModel, parallel: ParallelLayout, config: TransformerConfig | None = None
) -> list[MegatronModule]:
    """The model chunks of this rank, one per virtual pipeline stage, with values not set yet.

    Collective over the embedding group when embeddings are tied over a pipeline.

    Args:
        config: from `layout_config`; None makes it.

    Raises:
        PlanError: this rank is not in the layout's mesh, or see `layout_config`.
    """
    config = config if config is not None else layout_config(role, parallel.layout)
    if parallel.pg_collection is None:
        raise PlanError(
            f"layout {parallel.name} of {role.role}: this rank is outside the mesh and builds nothing."
        )
    with parallel.active(), quiet("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"):
        return [_build_chunk(role, config, parallel, index) for index in range(parallel.layout.vpp)]


def _build_chunk(
    role: RoleModel, config: TransformerConfig, parallel: ParallelLayout, index: int
) -> MegatronModule:
    groups, layout = parallel.pg_collection, parallel.layout
    assert groups is not None
    stage = groups.pp.rank()
    last = stage == layout.pp - 1 and index == layout.vpp - 1
    common = {
        "config": config,
        "pg_collection": groups,
        "pre_process": stage == 0 and index == 0,
        "post_process": last,
        "vp_stage": index if layout.vpp > 1 else None,
    }
    build = (
        _gpt_model if role.hybrid_layer_pattern is None else functools.partial(_hybrid_model, layout=layout)
    )
    chunk = role.provider(**common) if role.provider is not None else build(role, **common)
    if last and role.scalar_head:
        chunk.output_layer = ScalarHead(config, groups)
    chunk.to(dtype=config.params_dtype)  # norms are made in fp32
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            # At its first pass the router would put its fp32 biases into new storage, of another dtype than is known.
            module._maintain_float32_expert_bias()
    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk


def _gpt_model(role: RoleModel, *, config: TransformerConfig, **common: Any) -> MegatronModule:
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(role, config, common["vp_stage"]),
        vocab_size=role.padded_vocab_size,
        max_sequence_length=role.max_sequence_length,
        parallel_output=True,
        share_embeddings_and_output_weights=role.ties,
        position_embedding_type=role.position_embedding_type,
        rotary_base=role.rotary_base,
        rotary_percent=role.rotary_percent,
        rope_scaling=role.rope_scaling,
        rope_scaling_factor=role.rope_scaling_factor,
        **common,
    )


def _hybrid_model(
    role: RoleModel, *, config: TransformerConfig, layout: Layout, **common: Any
) -> MegatronModule:
    assert role.hybrid_layer_pattern is not None
    try:
        return ProcessedHybridModel(
            config=config,
            hybrid_stack_spec=hybrid_spec(config, use_te=role.use_te),
            vocab_size=role.padded_vocab_size,
            max_sequence_length=role.max_sequence_length,
            hybrid_layer_pattern=stage_pattern(role.hybrid_layer_pattern, layout),
            parallel_output=True,
            share_embeddings_and_output_weights=role.ties,
            position_embedding_type=role.position_embedding_type,
            rotary_base=role.rotary_base,
            rotary_percent=role.rotary_percent,
            **common,
        )
    except ImportError as error:  # Mamba's kernels
        raise MegatronCompatError(f"{role.role}: its layers cannot be built here: {error}") from error


def _layer_spec(role: RoleModel, config: TransformerConfig, vp_stage: int | None) -> Any:
    if config.moe_layer_freq != 1:  # layers differ: Megatron picks those of the active layout's stage
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=role.use_te,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "qk_l2_norm": config.qk_l2_norm,
    }
    if role.use_te:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
    return gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization, **options)


def sharded_tensors(chunks: Iterable[MegatronModule], parallel: ParallelLayout) -> list[ShardedTensorLike]:
    """What this rank holds of a model's unwrapped chunks, as Megatron describes it (`model_shards`)."""
    with parallel.active():
        return [tensor for chunk in chunks for tensor in model_shards.sharded_tensors("model", chunk)]


@contextlib.contextmanager
def quiet(logger_name: str, phrase: str) -> Iterator[None]:
    """Drop log records of `logger_name` that contain `phrase`, for a block."""

    def keep(record: logging.LogRecord) -> bool:
        return phrase not in record.getMessage()

    logger = logging.getLogger(logger_name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
