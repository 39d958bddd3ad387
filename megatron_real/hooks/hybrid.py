"""Megatron's HybridModel in the place of GPTModel: built from a layer pattern, with the outputs that passes ask for.

Two things are missing in megatron-core 0.19: a stack of Megatron's own layers (its spec is TransformerEngine's), and
the hook that gives the hidden states of the last stage to a function (`GPTModel.forward(output_processor=...)`).

Invariants (tests/hooks/test_hybrid.py):
    - the pattern ``*-`` per layer computes what GPTModel computes with the same values, in every layout;
    - with an output processor the model computes what it would have computed without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

__all__ = ["LOCAL_SYMBOLS", "ProcessedHybridModel", "hybrid_spec"]

LOCAL_SYMBOLS = "*-EM+"
"""Layers that exist in Megatron's own modules: attention, MLP, experts, Mamba, latent attention."""


class ProcessedHybridModel(HybridModel):
    """`HybridModel` that takes an output processor, as `GPTModel` does."""

    def forward(self, *args: Any, output_processor: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """As `HybridModel.forward`.

        Args:
            args: of `HybridModel.forward`.
            output_processor: on the last stage called with ``hidden_states`` [s, b, h], ``output_layer`` and
                ``output_weight`` in place of the logits; None leaves the model as it is.
            kwargs: of `HybridModel.forward`.
        """
        if output_processor is None or not self.post_process:
            return super().forward(*args, **kwargs)
        self.post_process = (
            False  # the model then returns hidden states; its last norm does not depend on this
        )
        try:
            hidden_states = super().forward(*args, **kwargs)
        finally:
            self.post_process = True
        weight = (
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        )
        return output_processor(
            hidden_states=hidden_states, output_layer=self.output_layer, output_weight=weight
        )


def hybrid_spec(config: TransformerConfig, *, use_te: bool) -> ModuleSpec:
    """The layers that a pattern's symbols stand for.

    Args:
        config: decides about experts, norms and latent attention.
        use_te: TransformerEngine's layers instead of Megatron's own.
    """
    if use_te:
        return hybrid_layer_specs.hybrid_stack_spec
    options = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization}
    dense = get_gpt_layer_local_submodules(qk_l2_norm=config.qk_l2_norm, **options)
    experts = get_gpt_layer_local_submodules(num_experts=config.num_moe_experts or 1, **options)
    latent = get_gpt_layer_local_submodules(multi_latent_attention=True, **options)
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=mixer,
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=_attention_only(dense)),
            mla_layer=ModuleSpec(module=TransformerLayer, submodules=_attention_only(latent)),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=_mlp_only(dense)),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_mlp_only(experts)),
        ),
    )


def _attention_only(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return dataclasses.replace(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)


def _mlp_only(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return dataclasses.replace(
        layer, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
