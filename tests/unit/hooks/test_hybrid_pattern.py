"""A pattern's stages against the layers that a layout gives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.errors import PlanError
from megatron_real.hooks.hybrid_pattern import bare_pattern, num_layers, stage_pattern
from megatron_real.layout import Layout, stage_layers


def test_stages_stand_in_model_order() -> None:
    assert stage_pattern("*-*-M-E-", Layout(pp=2)) == "*-*-|M-E-"
    assert stage_pattern("*-*-M-E-", Layout(pp=2, vpp=2)) == "*-|*-|M-|E-"
    assert stage_pattern("*-|*-M-E-", Layout()) == "*-*-M-E-"
    assert stage_pattern("*-*-/*-", Layout(pp=2, layers=(3, 1))) == "*-*|-/*-"


@given(st.text("*-EM", min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_segments_hold_the_layers_of_their_stages(pattern: str, pp: int, vpp: int) -> None:
    layout = Layout(pp=pp, vpp=vpp if pp > 1 else 1)
    if len(pattern) % (layout.pp * layout.vpp):
        with pytest.raises(PlanError, match="do not divide"):
            stage_pattern(pattern, layout)
        return
    staged = stage_pattern(pattern, layout)
    assert bare_pattern(staged) == pattern
    assert num_layers(staged) == len(pattern)
    stages = stage_layers(len(pattern), layout)
    for index, segment in enumerate(staged.split("|")):
        layers = stages[index % layout.pp][index // layout.pp]
        assert segment == "".join(pattern[layer] for layer in layers)
