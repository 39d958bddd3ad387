"""The estimate of activations against the numbers of the paper it comes from; none of it needs Megatron."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_real.hooks.activations import StageLoad, activation_bytes, passes_in_flight
from megatron_real.layout import Layout

# GPT-3 as in table 3 of Korthikanti et al. 2022; 5 a s / h is 80 there.
HIDDEN, HEADS, LENGTH = 12288, 96, 2048
SBH = LENGTH * HIDDEN
LOAD = StageLoad(
    num_sequences=1, length=LENGTH, num_layers_on_stage=12, microbatches_in_flight=8, training=True
)


def _config(**changes: Any) -> Any:
    values = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS,
        "ffn_hidden_size": 4 * HIDDEN,
        "gated_linear_unit": False,
        "num_moe_experts": None,
        "params_dtype": torch.bfloat16,
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("layout", "per_layer"),
    [
        (Layout(), 34 + 80),
        (Layout(tp=8), 10 + 24 / 8 + 80 / 8),
        (Layout(tp=8, sp=True), 34 / 8 + 80 / 8),
    ],
    ids=str,
)
def test_layers_keep_what_the_paper_says(layout: Layout, per_layer: float) -> None:
    count = 12 * 8
    scores = 80 / layout.tp
    layer_input = 2 / layout.tp if layout.sp else 2
    for recompute, wanted in (
        (None, count * per_layer),
        ("selective", count * (per_layer - scores) + scores),
        ("full", (count - 1) * layer_input + per_layer),
    ):
        config = _config(recompute_granularity=recompute)
        assert activation_bytes(config, layout, LOAD) == wanted * SBH, recompute
    assert activation_bytes(_config(), layout, replace(LOAD, fused_attention=True)) == (
        count * (per_layer - scores) * SBH
    )
    assert activation_bytes(_config(), layout, replace(LOAD, training=False)) == per_layer * SBH
    wide = _config(params_dtype=torch.float32)
    assert activation_bytes(wide, layout, LOAD) == 2 * count * per_layer * SBH


def test_the_head_counts_once_and_by_its_positions() -> None:
    layout, base = Layout(tp=8), activation_bytes(_config(), Layout(tp=8), LOAD)
    whole = activation_bytes(_config(), layout, replace(LOAD, vocab_shard=6400))
    some = activation_bytes(_config(), layout, replace(LOAD, vocab_shard=6400, logit_positions=100))
    assert whole - base == LENGTH * 6400 * 10
    assert some - base == 100 * 6400 * 10


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("name", ["num_sequences", "length", "num_layers_on_stage", "microbatches_in_flight"])
def test_more_work_needs_more(recompute: str | None, name: str) -> None:
    config, layout = _config(recompute_granularity=recompute), Layout(tp=2, sp=True)
    more = replace(LOAD, **{name: getattr(LOAD, name) + 2})
    assert activation_bytes(config, layout, more) > activation_bytes(config, layout, LOAD)


def test_more_recomputation_needs_less() -> None:
    def needed(recompute: str | None, load: StageLoad) -> int:
        return activation_bytes(_config(recompute_granularity=recompute), Layout(), load)

    assert needed("full", LOAD) < needed("selective", LOAD) < needed(None, LOAD)
    one = replace(LOAD, num_layers_on_stage=1, microbatches_in_flight=1)
    assert needed("full", one) == needed("selective", one) == needed(None, one)


def test_gated_and_expert_layers_follow_their_widths() -> None:
    load = replace(LOAD, num_layers_on_stage=1, microbatches_in_flight=1, fused_attention=True)
    plain = activation_bytes(_config(), Layout(), load)
    gated = activation_bytes(_config(gated_linear_unit=True), Layout(), load)
    assert gated - plain == 2 * 4 * SBH
    experts = _config(
        num_moe_experts=64,
        moe_router_topk=8,
        moe_ffn_hidden_size=HIDDEN // 2,
        moe_shared_expert_intermediate_size=None,
    )
    assert activation_bytes(experts, Layout(), load) == plain  # 8 experts of h/2 are as wide as one MLP of 4h


def test_passes_in_flight() -> None:
    assert [passes_in_flight(Layout(pp=4), stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [passes_in_flight(Layout(pp=4), stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert passes_in_flight(Layout(), 0, 8) == 1
