"""When the parts of a model should travel: in the order in which it uses its layers, or so that memory stays level.

Megatron names the layer of a tensor in one of two ways: by a number in the key (``decoder.layers.7.mlp...``), or by
the first axis of a stack of layers (``decoder.layers.mlp...``, box offset 7 along axis 0). Both are global numbers.

Invariants (tests/unit/realloc_ops/test_layer_order.py, tests/property/test_in_place_order.py):
    - embeddings come before every layer, layers ascend by their global number, the final norm follows, then the layers
      of multi-token prediction, then heads;
    - in the level order, what a rank still holds of the source and already holds of the destination stays close to a
      straight line between the two, so it exceeds the larger of them by about the largest parts that move;
    - in it, of the layers that the same ranks hold and want, one is half moved at a time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_real.realloc_ops.planning.shards import Box

__all__ = ["layer_of", "level_order"]

_LAYER = re.compile(r"(?:^|\.)layers\.(?:(\d+)\.)?")
_FINAL_NORM = re.compile(r"(?:^|\.)final_(?:layer)?norm\.")
_EMBEDDING = re.compile(r"(?:^|\.)embeddings?\.")
_MTP = re.compile(r"(?:^|\.)mtp\.")

_FIRST = 0
_AFTER_LAYERS = 1 << 20
_LAST = 1 << 21

Floats = np.ndarray[Any, np.dtype[np.float64]]


def layer_of(key: str, box: Box) -> int:
    """When a forward pass first uses a shard: a number that ascends in that order.

    0 for embeddings, 1 + n for layer n of the decoder (n counts from 0 over all stages), 2**20 for the final norm,
    2**20 + 1 + n for layer n of multi-token prediction, 2**21 for heads and for all whose name says nothing.
    """
    match = _LAYER.search(key)
    if match is not None:
        stacked = box.offset[0] if box.offset else 0
        number = 1 + (stacked if match[1] is None else int(match[1]))
        return _AFTER_LAYERS + number if _MTP.search(key) else number
    if _MTP.search(key):
        return _AFTER_LAYERS + 1
    if _EMBEDDING.search(key):
        return _FIRST
    return _AFTER_LAYERS if _FINAL_NORM.search(key) else _LAST


_LEVELS = 64
"""Steps per unit: everything is summed in whole numbers, so that all machines get the same order."""


def level_order(held: Floats, wanted: Floats, layers: Sequence[int]) -> list[int]:
    """Order the parts of a model so that every rank gives up the source about as fast as it receives the destination.

    Parts that the same ranks hold and the same ranks want are of one kind. Of each kind the layers keep their order: a
    layer is finished before the next one is begun, as what is half moved keeps its memory on both sides. Among the
    parts that this leaves, it takes the one that keeps all ranks closest to their lines between source and destination,
    where being above costs and being below does not.

    Args:
        held: bytes of the source by (part, rank), whole numbers; equal ranks may be given once.
        wanted: bytes of the destination by (part, rank).
        layers: of each part; ascending.

    Returns:
        Every part once, the first to travel first.
    """
    unit = np.maximum(np.maximum(held.max(axis=0, initial=0), wanted.max(axis=0, initial=0)), 1)
    total = max(float(held.sum() + wanted.sum()), 1.0)
    progress = (held.sum(axis=1) + wanted.sum(axis=1)) / total
    drift = (wanted.sum(axis=0) - held.sum(axis=0)) / unit
    steps = np.rint(((wanted - held) / unit - progress[:, None] * drift) * _LEVELS).astype(np.int64)
    above = np.zeros(held.shape[1], np.int64)
    left = _by_kind(held, wanted, layers)
    order: list[int] = []
    while left:
        begun = [(kind, part) for kind, parts in left.items() for part in parts[0]]
        after = np.clip(above + steps[[part for _, part in begun]], 0, _LEVELS * _LEVELS)
        kind, part = begun[int(np.argmin((after**4).sum(axis=1)))]
        above += steps[part]
        order.append(part)
        left[kind][0].remove(part)
        if not left[kind][0]:
            left[kind].popleft()
        if not left[kind]:
            del left[kind]
    return order


def _by_kind(held: Floats, wanted: Floats, layers: Sequence[int]) -> dict[bytes, deque[list[int]]]:
    """By holders and wanters, layer after layer, the parts."""
    kinds: dict[bytes, dict[int, list[int]]] = {}
    involved = np.packbits(np.concatenate((held > 0, wanted > 0), axis=1), axis=1)
    for part, (kind, layer) in enumerate(zip(involved, layers, strict=True)):
        kinds.setdefault(kind.tobytes(), {}).setdefault(layer, []).append(part)
    return {kind: deque(of_layers.values()) for kind, of_layers in kinds.items()}
