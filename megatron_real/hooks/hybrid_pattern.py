"""The layer pattern of a HybridModel: one symbol per layer, and ``|`` where a pipeline stage ends.

The symbols are the model's, the stages a layout's: a role keeps the bare pattern, and each layout gets its own ``|``.
Nothing here imports Megatron.

Invariants (tests/unit/hooks/test_hybrid_pattern.py):
    - `bare_pattern` undoes `stage_pattern`;
    - a stage's symbols are those of the layers that `layout.stage_layers` gives it.
"""

from __future__ import annotations

from megatron_real.layout import Layout, stage_layers

__all__ = ["bare_pattern", "num_layers", "stage_pattern"]

_STAGE = "|"
_PREDICTION = "/"
"""Before the layers of a multi-token prediction."""


def bare_pattern(pattern: str) -> str:
    """The pattern without pipeline stages, for example ``*-*-`` of ``*-|*-``."""
    return pattern.replace(_STAGE, "")


def num_layers(pattern: str) -> int:
    """Layers of the decoder, without those of a multi-token prediction."""
    return len(bare_pattern(pattern).partition(_PREDICTION)[0])


def stage_pattern(pattern: str, layout: Layout) -> str:
    """The pattern as Megatron wants it in `layout`: virtual stages in model order, with ``|`` between them.

    Raises:
        PlanError: the layers do not divide over the layout's stages.
    """
    main, slash, prediction = bare_pattern(pattern).partition(_PREDICTION)
    stages = stage_layers(len(main), layout)
    parts = [
        "".join(main[layer] for layer in stages[stage][chunk])
        for chunk in range(layout.vpp)
        for stage in range(layout.pp)
    ]
    return _STAGE.join(parts) + slash + prediction
