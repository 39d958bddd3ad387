from __future__ import annotations

import numpy as np
import pytest

from megatron_real.realloc_ops.planning.layer_order import layer_of, level_order
from megatron_real.realloc_ops.planning.shards import Box


@pytest.mark.parametrize("prefix", ["", "module."])
def test_keys_come_in_the_order_of_a_forward_pass(prefix: str) -> None:
    uses = [
        [("embedding.word_embeddings.weight", 5), ("embedding.position_embeddings.weight", 0)],
        [("decoder.layers.self_attention.linear_qkv.weight", 0), ("decoder.layers.0.mlp.router.weight", 7)],
        [
            ("decoder.layers.mlp.experts.experts.linear_fc1.weight", 1),
            ("decoder.layers.1.mixer.norm.weight", 0),
        ],
        [("decoder.layers.mlp.linear_fc2.weight", 10), ("decoder.layers.10.mlp.linear_fc2.weight", 3)],
        [("decoder.final_layernorm.weight", 0), ("decoder.final_norm.weight", 9)],
        [("mtp.layers.0.eh_proj.weight", 4), ("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight", 2)],
        [("mtp.layers.1.mtp_model_layer.layers.0.mlp.linear_fc1.weight", 2)],
        [("output_layer.weight", 0), ("value_head.weight", 8)],
    ]
    waves = [{layer_of(prefix + key, Box((at, 0), (1, 4))) for key, at in group} for group in uses]
    assert all(len(found) == 1 for found in waves)
    flat = [found.pop() for found in waves]
    assert flat == sorted(set(flat))


def test_a_scalar_has_a_place() -> None:
    assert layer_of("decoder.layers.scale", Box((), ())) == layer_of("decoder.layers.0.w", Box((3,), (1,)))


def test_two_halves_that_change_places_alternate() -> None:
    """Rank 0 holds layers 0 and 1 and wants 2 and 3, rank 1 the other way round."""
    held = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], float)
    order = level_order(held, held[:, ::-1], range(4))
    assert sorted(order) == [0, 1, 2, 3]
    assert {order[0], order[1]} in ({0, 2}, {0, 3}, {1, 2}, {1, 3})


def test_one_layer_is_finished_before_the_next_of_its_kind_is_begun() -> None:
    """Two stages become two tensor-parallel ranks; of every layer one tensor is large and one small."""
    held = np.array([[size, 0] for _ in range(5) for size in (100, 2)] + [[0, 100], [0, 2]] * 5, float)
    wanted = np.repeat(held.sum(axis=1, keepdims=True) / 2, 2, axis=1)
    layers = [part // 2 for part in range(20)]
    order = level_order(held, wanted, layers)
    assert sorted(order) == list(range(20))
    for stage in (range(5), range(5, 10)):
        of_stage = [layers[part] for part in order if layers[part] in stage]
        assert of_stage == sorted(of_stage)
    done = np.cumsum((held - wanted)[order], axis=0)
    assert np.abs(done).max() <= 102, "no rank is ahead by more than a layer"


def test_nothing_is_ordered() -> None:
    assert level_order(np.zeros((0, 3)), np.zeros((0, 3)), ()) == []
