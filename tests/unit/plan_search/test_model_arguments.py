"""Megatron's arguments as a model to price: dtypes, engines, vocabulary, and what is refused. Shapes: tests/hooks."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_real.config import megatron_arguments
from megatron_real.plan_search.model_arguments import (
    MegatronModel,
    argument_mapping,
    model_problems,
    model_spec,
)

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 257,
    "position_embedding_type": "rope",
}


def _spec(device: str = "h100", max_tp: int = 8, sizes: tuple[int, ...] = (8,), **changes: Any) -> Any:
    return model_spec({**SMALL, **changes}, scalar_head=False, max_tp=max_tp, sizes=sizes, device=device)


def _found(**changes: Any) -> list[str]:
    return [problem.path for problem in model_problems({**SMALL, **changes}, "model.actor.megatron")]


def test_dtypes_and_kernels_are_those_of_the_runtime() -> None:
    assert _spec().param_dtype == "float32"
    assert not _spec().has_main_params
    assert _spec(bf16=True).param_dtype == "bfloat16"
    assert _spec(fp16=True).param_dtype == "float16"
    assert _spec(bf16=True).grad_dtype == "float32"
    assert _spec().fused_attention
    assert not _spec(transformer_impl="local").fused_attention
    assert not _spec(attention_backend="unfused").fused_attention
    assert not _spec(device="cpu").fused_attention  # there is no TransformerEngine


def test_the_vocabulary_is_padded_for_every_degree_that_the_search_may_choose() -> None:
    def rows(**how: Any) -> int:
        return int(_spec(**how).shape.padded_vocab_size)

    assert rows(max_tp=1) == 384  # 3 * 128
    assert rows(max_tp=2) == 512  # 2 * 256
    assert rows(max_tp=8) == 512  # four heads cannot be split over eight ranks
    assert rows(max_tp=8, sizes=(6, 3, 1)) == 512  # three ranks cannot share four heads
    assert rows(max_tp=2, make_vocab_size_divisible_by=1) == 258


def test_the_width_of_the_mlp_follows_megatrons_rule() -> None:
    assert _spec(swiglu=True).shape.ffn_hidden_size == 128  # int(4 * 64 * 2 / 3 / 64) * 64
    assert _spec(hidden_size=4096).shape.ffn_hidden_size == 16384


def test_experts_after_dense_layers() -> None:
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 32}
    assert _spec(**experts, moe_layer_freq="([0]*3+[1]*1)").shape.num_dense_layers == 3
    assert _spec(**experts, moe_layer_freq=[0, 1, 1, 1]).shape.num_dense_layers == 1
    assert _spec(**experts).shape.num_dense_layers == 0
    for pattern in (2, "([1]*3+[0]*1)", [0, 1], "([0]+[1]*9)"):
        assert _found(**experts, moe_layer_freq=pattern) == ["model.actor.megatron.moe_layer_freq"], pattern


def test_a_command_line_is_the_mapping_that_it_was_made_of() -> None:
    written = {**SMALL, "bf16": True, "lr": 1e-5, "moe_layer_freq": None}
    read = argument_mapping(megatron_arguments(written))
    assert MegatronModel.model_validate(read) == MegatronModel.model_validate(
        {name: value for name, value in written.items() if value is not None}
    )
    assert argument_mapping(["--blend=x", "--split", "1", "2"]) == {"blend": "x", "split": ["1", "2"]}


def test_all_problems_of_a_model_come_together() -> None:
    assert _found() == []
    assert _found(num_layers=None, hidden_size="wide") == [
        "model.actor.megatron.num_layers",
        "model.actor.megatron.hidden_size",
    ]
    assert _found(bf16=True, fp16=True, num_attention_heads=5) == [
        "model.actor.megatron.bf16, fp16",
        "model.actor.megatron.num_attention_heads",
    ]
    assert _found(hidden_size=20, swiglu=True) == ["model.actor.megatron.ffn_hidden_size"]
    assert _found(position_embedding_type=None) == ["model.actor.megatron.max_position_embeddings"]
    assert _found(group_query_attention=True, num_query_groups=3) == ["model.actor.megatron.num_query_groups"]


@pytest.mark.parametrize("name", ["multi_latent_attention", "mtp_num_layers", "fp8"])
def test_what_has_no_price_is_refused(name: str) -> None:
    assert _found(**{name: True}) == [f"model.actor.megatron.{name}"]
    assert _found(**{name: None}) == []
