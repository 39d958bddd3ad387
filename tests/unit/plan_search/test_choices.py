"""What a streamed reallocation adds to an iteration, against a pass that waits layer by layer."""

from __future__ import annotations

import pytest

from megatron_real.layout import Layout, Mesh
from megatron_real.plan_search.choices import Option


def _stall(layers: int, realloc_s: float, pass_s: float) -> float:
    """By how much later the pass ends than if all layers were there: layer after layer waits for its own."""
    clock = 0.0
    for layer in range(layers):
        clock = max(clock, (layer + 1) * realloc_s / layers) + pass_s / layers
    return clock - pass_s


@pytest.mark.parametrize("layers", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("realloc_s", "pass_s"), [(1.0, 0.0), (1.0, 0.3), (1.0, 1.0), (1.0, 5.0), (0.0, 1.0)]
)
def test_what_is_exposed_is_what_the_first_pass_waits(layers: int, realloc_s: float, pass_s: float) -> None:
    option = Option(layout=Layout(), seconds=9.0, stream=True, first_share=1 / layers, first_pass_s=pass_s)
    assert option.exposed_s(realloc_s) == pytest.approx(_stall(layers, realloc_s, pass_s))
    assert Option(layout=Layout(), seconds=9.0).exposed_s(realloc_s) == realloc_s


def test_a_placement_says_how_weights_come() -> None:
    placement = Option(layout=Layout(tp=2), seconds=1.0, offload="node", stream=True).placement(Mesh(2, 4))
    assert (placement.offload, placement.stream) == ("node", True)
