"""From Megatron's arguments to a `ModelSpec`, without torch or Megatron: what a training runs can be searched for.

Arguments are read by attribute name; those that have no effect on prices (rates, tokenizers, ...) are passed over,
those that change the model in a way that has no price are refused.

Invariants (tests/unit/plan_search/test_model_arguments.py):
    - the shape is that of `hooks.roles.role_model`, which asks Megatron, for dense models and models with experts;
    - all problems of a role come in one list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_real.errors import Problem
from megatron_real.model_shape import ModelShape, padded_vocab_size
from megatron_real.plan_search.models import ModelSpec

__all__ = ["MegatronModel", "argument_mapping", "model_problems", "model_spec", "with_overrides"]

Count = Annotated[int, Field(ge=1)]

_WITHOUT_PRICE = (
    "multi_latent_attention",
    "mtp_num_layers",
    "fp8",
    "fp4",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "window_size",
    "moe_latent_size",
)
"""Arguments of models whose layers are others than those that are priced."""

_DERIVED = {
    "ffn_hidden_size": ("hidden_size", "swiglu"),
    "kv_channels": ("hidden_size", "num_attention_heads"),
}

_FREQUENCY = re.compile(r"^\(?\[0\](?:\*(?P<dense>\d+))?\+\[1\](?:\*(?P<experts>\d+))?\)?$")


class MegatronModel(BaseModel):
    """The arguments that a model's prices depend on; defaults are Megatron's (`megatron.training.arguments`)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    vocab_size: Count
    ffn_hidden_size: Count | None = None
    group_query_attention: bool = False
    num_query_groups: Count = 1
    kv_channels: Count | None = None
    swiglu: bool = False
    quick_geglu: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    disable_bias_linear: bool = False
    add_bias_linear: bool = True
    """As checkpoints store it: the opposite of the flag."""
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    max_position_embeddings: Count | None = None
    untie_embeddings_and_output_weights: bool = False
    make_vocab_size_divisible_by: Count = 128
    num_experts: Annotated[int, Field(ge=0)] = 0
    moe_router_topk: Count = 2
    moe_ffn_hidden_size: Count | None = None
    moe_shared_expert_intermediate_size: Annotated[int, Field(ge=0)] = 0
    moe_layer_freq: int | list[int] | str = 1
    bf16: bool = False
    fp16: bool = False
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "auto"
    cuda_graph_impl: str = "none"

    @property
    def has_linear_bias(self) -> bool:
        return self.add_bias_linear and not self.disable_bias_linear

    @property
    def gated(self) -> bool:
        return self.swiglu or self.quick_geglu

    @property
    def ffn(self) -> int:
        """Width of the MLP, by Megatron's rule where it is not given."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    def dense_layers(self) -> int | None:
        """Leading layers without experts; None where dense layers come later too."""
        frequency = self.moe_layer_freq
        if isinstance(frequency, str):
            frequency = _expanded(frequency)
        if isinstance(frequency, int):
            frequency = [int(layer % frequency == 0) for layer in range(self.num_layers)]
        leading = next((index for index, value in enumerate(frequency) if value), len(frequency))
        sound = len(frequency) == self.num_layers and all(value == 1 for value in frequency[leading:])
        return leading if sound else None


def argument_mapping(arguments: Sequence[str]) -> dict[str, Any]:
    """A command line of Megatron by attribute names.

    ``--num-layers 2 --swiglu`` becomes ``{"num_layers": "2", "swiglu": True}``. Several values make a list; numbers
    stay text, which is read by the field's type.
    """
    found: dict[str, Any] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else True
        elif name:
            former = found[name]
            found[name] = argument if former is True else [*_listed(former), argument]
    return found


def with_overrides(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A role's arguments from those that it starts from, by the rule of `hooks.roles.role_arguments`.

    A width that follows from a size that is overridden follows again.
    """
    merged = {**base, **overrides}
    for name, sources in _DERIVED.items():
        if name not in overrides and not overrides.keys().isdisjoint(sources):
            merged.pop(name, None)
    return merged


def model_problems(arguments: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """What keeps `arguments` (by attribute name) from being a model that can be priced; `path` is the role's."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in _WITHOUT_PRICE:
        if given.get(name):
            yield Problem(
                path=f"{path}.{name}",
                found=repr(given[name]),
                expected="nothing: such layers have no price yet",
            )
    try:
        model = MegatronModel.model_validate(given)
    except ValidationError as error:
        yield from _problems(error, path)
        return
    if model.bf16 and model.fp16:
        yield Problem(path=f"{path}.bf16, fp16", found="both true", expected="one of them at most")
    if model.ffn < 1:
        yield Problem(
            path=f"{path}.ffn_hidden_size",
            found="nothing",
            expected=f"a width: Megatron's rule makes hidden_size={model.hidden_size} to 0",
        )
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield Problem(
            path=f"{path}.num_attention_heads",
            found=str(model.num_attention_heads),
            expected=f"a divisor of hidden_size={model.hidden_size}, or kv_channels too",
        )
    if model.group_query_attention and model.num_attention_heads % model.num_query_groups:
        yield Problem(
            path=f"{path}.num_query_groups",
            found=str(model.num_query_groups),
            expected=f"a divisor of num_attention_heads={model.num_attention_heads}",
        )
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings is None:
        yield Problem(
            path=f"{path}.max_position_embeddings",
            found="nothing",
            expected="the rows of the learned positions (position_embedding_type is learned_absolute by default)",
        )
    if model.num_experts and model.dense_layers() is None:
        yield Problem(
            path=f"{path}.moe_layer_freq",
            found=repr(model.moe_layer_freq),
            expected="1, or a pattern whose dense layers all come first",
        )


def model_spec(
    arguments: Mapping[str, Any], *, scalar_head: bool, max_tp: int, sizes: Iterable[int], device: str
) -> ModelSpec:
    """The model that Megatron's arguments describe, as this package's runtime keeps it.

    Gradients are fp32, the optimizer is the distributed one, and neither reduction overlaps
    (`hooks.model_copy.Training`). The vocabulary is padded for every tensor-parallel degree that the search may choose.

    Args:
        arguments: by attribute name, without `model_problems`.
        scalar_head: a critic or reward model.
        max_tp: largest tensor-parallel degree.
        sizes: of the windows that calls may take.
        device: name of the device; on ``cpu`` there is no TransformerEngine.
    """
    model = MegatronModel.model_validate(
        {name: value for name, value in arguments.items() if value is not None}
    )
    degrees = _tensor_parallel_degrees(model, max_tp, sizes)
    shape = ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else model.num_attention_heads,
        ffn_hidden_size=model.ffn,
        padded_vocab_size=padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, degrees),
        tied_embeddings=not model.untie_embeddings_and_output_weights and not scalar_head,
        scalar_head=scalar_head,
        head_size=model.kv_channels or model.hidden_size // model.num_attention_heads,
        gated_mlp=model.gated,
        linear_bias=model.has_linear_bias,
        qkv_bias=model.add_qkv_bias or model.has_linear_bias,
        norm_bias=model.normalization == "LayerNorm",
        qk_norm=model.qk_layernorm,
        learned_positions=(model.max_position_embeddings or 0)
        if model.position_embedding_type == "learned_absolute"
        else 0,
        num_experts=model.num_experts,
        experts_per_token=model.moe_router_topk if model.num_experts else 1,
        expert_ffn_hidden_size=(model.moe_ffn_hidden_size or model.ffn) if model.num_experts else None,
        shared_expert_ffn_hidden_size=model.moe_shared_expert_intermediate_size,
        num_dense_layers=(model.dense_layers() or 0) if model.num_experts else 0,
    )
    engine = model.transformer_impl != "local" and device != "cpu"
    return ModelSpec(
        shape=shape,
        param_dtype="bfloat16" if model.bf16 else "float16" if model.fp16 else "float32",
        fused_attention=engine and model.attention_backend not in ("unfused", "local"),
        cuda_graph=model.cuda_graph_impl != "none",
    )


def _tensor_parallel_degrees(model: MegatronModel, max_tp: int, sizes: Iterable[int]) -> tuple[int, ...]:
    sizes = set(sizes)
    return tuple(
        tp
        for tp in range(1, max_tp + 1)
        if any(size % tp == 0 for size in sizes)
        and model.num_attention_heads % tp == 0
        and model.ffn % tp == 0
    )


def _expanded(text: str) -> int | list[int]:
    """Megatron's text forms: ``2``, ``([0]*3+[1]*58)``; empty where it is another one."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    found = _FREQUENCY.match(text.replace(" ", ""))
    return [0] * int(found["dense"] or 1) + [1] * int(found["experts"] or 1) if found else []


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _problems(error: ValidationError, path: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for item in error.errors():
        name = str(item["loc"][0])
        if name in seen:
            continue
        seen.add(name)
        if item["type"] == "missing":
            yield Problem(path=f"{path}.{name}", found="nothing", expected="a value: it has no default")
        else:
            yield Problem(path=f"{path}.{name}", found=repr(item["input"]), expected=item["msg"])
