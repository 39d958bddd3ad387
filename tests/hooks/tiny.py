"""Tiny models and layouts for the tests of the Megatron hooks; imports Megatron."""

from __future__ import annotations

import copy as copying
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_real.hooks.cpu_device import install_cpu_device
from megatron_real.hooks.model_builder import RoleModel, sharded_tensors
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.parallel_state import ParallelLayout, ParallelLayouts
from megatron_real.layout import parse_placement
from megatron_real.plan import CopyKey

__all__ = [
    "NoAttention",
    "cut",
    "descent",
    "experts",
    "latent_role",
    "layouts",
    "local_boxes",
    "make_copy",
    "placement",
    "tiny_role",
    "train_step",
    "whole_model",
]


def tiny_role(role: str = "actor", *, dtype: torch.dtype = torch.float32, **changes: Any) -> RoleModel:
    """4 layers, hidden 32, 8 heads in 2 groups, SwiGLU, RMSNorm, RoPE; `changes` go to the role or to its config."""
    fields = {field.name for field in dataclasses.fields(RoleModel)}
    options: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    options.update({name: value for name, value in changes.items() if name not in fields})
    own = {name: value for name, value in changes.items() if name in fields}
    config_type = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    return RoleModel(
        **{
            "role": role,
            "config": config_type(**options),
            "vocab_size": 120,
            "padded_vocab_size": 128,
            "max_sequence_length": 64,
            "init_seed": 7,
            **own,
        }
    )


def experts(**changes: Any) -> dict[str, Any]:
    """Changes for `tiny_role`: four experts in every layer, two for each token, none of them dropping any."""
    return {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        **changes,
    }


class NoAttention(torch.nn.Module):
    """In place of TransformerEngine's attention, where Megatron's own cannot be built; it has no parameters either.

    Megatron's `DotProductAttention` refuses cp > 1, and the arguments of latent attention:
    "DotProductAttention.__init__() got an unexpected keyword argument 'k_channels'".
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def latent_role(*, fused: bool = False, **changes: Any) -> RoleModel:
    """Latent attention that can be built and moved here, but not computed; `fused` joins its down projections."""
    role = tiny_role(
        **{
            "multi_latent_attention": True,
            "num_query_groups": 8,
            "rope_type": "rope",
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 8,
            "qk_layernorm": True,
            "mla_down_proj_fusion": fused,
            **changes,
        }
    )

    def provider(*, config: TransformerConfig, **common: Any) -> GPTModel:
        spec = copying.deepcopy(
            get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
        )
        attention = spec.submodules.self_attention
        attention.submodules.core_attention = NoAttention
        if fused:
            attention.module = FusedMLASelfAttention
            attention.submodules.linear_qkv_down_proj = attention.submodules.linear_q_down_proj
            attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = None
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=role.padded_vocab_size,
            max_sequence_length=role.max_sequence_length,
            position_embedding_type="rope",
            **common,
        )

    return dataclasses.replace(role, provider=provider)


@contextmanager
def layouts(seed: int = 1234) -> Iterator[ParallelLayouts]:
    """The CPU device and an empty set of layouts, closed at the end. Collective over WORLD."""
    install_cpu_device()
    made = ParallelLayouts(seed=seed)
    yield made
    made.close()


def placement(made: ParallelLayouts, text: str) -> ParallelLayout:
    """The layout ``d1t2p2@0-3``, built. Collective over WORLD."""
    mesh, layout = parse_placement(text)
    return made.build(mesh, layout)


def local_boxes(copy: ModelCopy | None) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """(key, offset, global shape, values of box shape) of every tensor that this rank holds; none for None."""
    if copy is None:
        return []
    found = []
    for shard in sharded_tensors(copy.chunks, copy.parallel):
        assert shard.data is not None
        values = shard.data.detach().clone().reshape((1,) * shard.prepend_axis_num + tuple(shard.data.shape))
        found.append((shard.key, tuple(shard.global_offset), tuple(shard.global_shape), values))
    return found


def cut(whole: torch.Tensor, offset: tuple[int, ...], shape: torch.Size) -> torch.Tensor:
    """The box of `shape` at `offset`."""
    return whole[tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))]


def whole_model(copy: ModelCopy | None) -> dict[str, torch.Tensor]:
    """The global tensors of a copy, put together from all ranks' boxes. Collective over WORLD.

    Replicas must agree bit for bit, and the boxes must cover each tensor.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local_boxes(copy))
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for key, offset, shape, values in (box for boxes in everyone for box in boxes):
        target = whole.setdefault(key, torch.empty(shape, dtype=values.dtype))
        done = written.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        if done[place].all():
            assert torch.equal(target[place], values), f"replicas of {key} at {offset} differ"
        target[place], done[place] = values, True
    assert all(done.all() for done in written.values()), "some elements are on no rank"
    return whole


def make_copy(parallel: ParallelLayout, role: RoleModel, **options: Any) -> ModelCopy | None:
    """A copy with initial values on the ranks of the mesh; None elsewhere. Collective over the mesh."""
    if not parallel.member:
        return None
    key = CopyKey(model=role.role, mesh=parallel.mesh, layout=parallel.layout)
    copy = ModelCopy(key, role, parallel, **options)
    copy.initialize()
    return copy


def descent(**changes: Any) -> Training:
    """Adam that acts as plain gradient descent (epsilon dwarfs the gradients): a step moves by minus 100 gradients."""
    options = {
        "optimizer": "adam",
        "lr": 1e8,
        "adam_eps": 1e6,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        **changes,
    }
    return Training(optimizer=OptimizerConfig(**options))


def train_step(copy: ModelCopy, tokens: torch.Tensor, num_microbatches: int = 2) -> torch.Tensor | None:
    """One optimizer step on Megatron's schedule, on this data-parallel rank's part of `tokens` [batch, sequence].

    The loss is the mean cross entropy of the next token, or for a scalar head a mean of weighted squares of the values.

    Returns:
        The loss on the last stage, None elsewhere.
    """
    groups, config = copy.parallel.pg_collection, copy.config
    assert groups is not None
    assert copy.optimizer is not None
    dp, layout = groups.dp.rank(), copy.parallel.layout
    mine = tokens.chunk(layout.dp)[dp].chunk(num_microbatches)
    length = tokens.shape[1] - 1
    position = torch.arange(length).unsqueeze(0)
    mask = (torch.ones(1, 1, length, length).tril() < 0.5).to(torch.bool)

    def forward_step(iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
        batch = next(iterator)
        inputs, labels = batch[:, :-1], batch[:, 1:]
        positions = position.expand_as(inputs)
        if copy.role.scalar_head:
            output = model(inputs, positions, mask)
        else:
            output = model(inputs, positions, mask, labels=labels)

        def loss_of(found: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if copy.role.scalar_head:
                assert found.shape == (*inputs.shape, 1)
                assert found.dtype == torch.float32
                found = (found.squeeze(-1) ** 2) * (1 + labels % 3)
            return found.float().mean(), {"loss": found.detach().float().mean()}

        return output, loss_of

    for ddp in copy.wrapped:
        ddp.train()
        ddp.zero_grad_buffer()
    copy.optimizer.zero_grad()
    config.finalize_model_grads_func = finalize_model_grads
    with copy.parallel.active():
        run = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp if layout.vpp > 1 else None)
        kwargs = {"p2p_communicator": copy.parallel.p2p_communicator(config), "pg_collection": groups}
        losses = run(
            forward_step_func=forward_step,
            data_iterator=[iter(mine) for _ in copy.wrapped],
            model=copy.wrapped,
            num_microbatches=num_microbatches,
            seq_length=length,
            micro_batch_size=mine[0].shape[0],
            forward_only=False,
            **(kwargs if layout.pp > 1 else {"pg_collection": groups}),
        )
        updated, _, _ = copy.optimizer.step()
    assert updated
    return torch.stack([entry["loss"] for entry in losses]).mean() if losses else None
