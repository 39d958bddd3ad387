"""Models in every layout: the layers they hold, their initial values, their losses and gradients, and refusals."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_real.errors import ConfigError, MegatronCompatError, PlanError
from megatron_real.hooks.model_builder import build_chunks, layout_config, sharded_tensors
from megatron_real.hooks.model_init import hash_elements, normal_from_hash
from megatron_real.hooks.scalar_head import VALUE_HEAD_KEY
from megatron_real.layout import Layout, stage_layers
from tests.harness import run_ranks
from tests.hooks.tiny import (
    cut,
    descent,
    layouts,
    local_boxes,
    make_copy,
    placement,
    tiny_role,
    train_step,
    whole_model,
)

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

ROLES = {
    "untied": {},
    "tied": {"tied_embeddings": True},
    "scalar": {"scalar_head": True, "tied_embeddings": True, "role": "critic"},
}
PLACEMENTS = (
    "d1t2p1@0-1",
    "d1t4p1@0-3",  # more ranks than key-value groups
    "d1t2p1s@2-3",
    "d2t1p1@1-2",
    "d1t1p2@0-1",
    "d1t1p4@0-3",
    "d1t1p2l1.3@0-1",
    "d1t1p2v2@2-3",
    "d1t2p2v2s@0-3",
    "d1t1p2v2l1.1.0.2@0-1",
    "d2t2p1@0-3",
    "d1t2p2s@0-3",
)


TRAINED = {
    "untied": PLACEMENTS,
    "tied": tuple(text for text in PLACEMENTS if "p1@" not in text and "p1s@" not in text),
    "scalar": ("d1t4p1@0-3", "d1t2p1s@2-3", "d2t1p1@1-2", "d1t1p2l1.3@0-1", "d1t2p2v2s@0-3"),
}


def _layers_of(chunk: torch.nn.Module) -> tuple[int, ...]:
    return tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)


def _check_layouts() -> None:
    with layouts() as made:
        for name, changes in ROLES.items():
            role = tiny_role(**changes)
            alone = whole_model(make_copy(placement(made, "d1t1p1@0-0"), role))
            assert (VALUE_HEAD_KEY in alone) == (name == "scalar")
            assert ("output_layer.weight" in alone) == (name == "untied")
            for text in PLACEMENTS:
                parallel = placement(made, text)
                copy = make_copy(parallel, role)
                if copy is not None:
                    wanted = stage_layers(4, parallel.layout)[parallel.pg_collection.pp.rank()]
                    assert tuple(map(_layers_of, copy.chunks)) == wanted, text
                for key, offset, shape, values in local_boxes(copy):
                    assert shape == alone[key].shape
                    assert torch.equal(values, cut(alone[key], offset, values.shape)), f"{name} {text} {key}"


def test_layers_and_initial_values_do_not_depend_on_the_layout() -> None:
    run_ranks(4, _check_layouts)


def _check_distribution() -> dict[str, torch.Tensor]:
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        narrow = whole_model(
            make_copy(parallel, tiny_role(init_method_std=0.02, hidden_size=64, ffn_hidden_size=256))
        )
        wide = whole_model(
            make_copy(
                parallel,
                tiny_role(init_method_std=0.02, hidden_size=64, ffn_hidden_size=256, padded_vocab_size=256),
            )
        )
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(narrow[key], wide[key][:128])
    return narrow


def test_initial_values_are_megatrons_in_distribution() -> None:
    [whole] = run_ranks(1, _check_distribution)
    small = 0.02 / math.sqrt(2 * 4)
    for key, values in whole.items():
        if "norm" in key:
            assert (values == 1).all(), key
            continue
        wanted = small if key.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
        count = values.numel()
        assert abs(values.mean()) < 5 * wanted / math.sqrt(count), key
        assert abs(values.std() / wanted - 1) < 5 / math.sqrt(2 * count), key
        assert values.unique().numel() > 0.99 * count, key
    flat = torch.cat([values.flatten() for key, values in whole.items() if "norm" not in key])
    assert flat.unique().numel() > 0.95 * flat.numel()  # no two tensors repeat each other


def test_hash_is_splitmix64_and_normal_numbers_are_normal() -> None:
    def splitmix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    digest = int.from_bytes(hashlib.blake2b(b"3/key", digest_size=8).digest(), "little")
    bits = hash_elements(3, "key", torch.arange(2**18))
    for i in (0, 1, 77, 2**18 - 1):
        assert int(bits[i]) % 2**64 == splitmix((digest + (i + 1) * 0x9E3779B97F4A7C15) % 2**64)
    assert not torch.equal(bits[:8], hash_elements(4, "key", torch.arange(8)))
    values = normal_from_hash(bits)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs((values**power).mean() - moment) < 0.1, power
    assert abs((values < 1).double().mean() - 0.8413447) < 0.004


def _mean(value: torch.Tensor | None) -> float:
    """Mean over the ranks that have a value. Collective over WORLD."""
    pair = torch.tensor([0.0, 0.0] if value is None else [float(value), 1.0], dtype=torch.float64)
    dist.all_reduce(pair)
    return float(pair[0] / pair[1])


def _check_training(name: str) -> None:
    tokens = torch.randint(120, (8, 17), generator=torch.Generator().manual_seed(1))
    with layouts() as made:
        role = tiny_role(**ROLES[name])
        alone = make_copy(placement(made, "d1t1p1@0-0"), role, training=descent())
        before = whole_model(alone)
        wanted = _mean(train_step(alone, tokens, 4) if alone is not None else None)
        after = whole_model(alone)
        gradients = {key: before[key] - after[key] for key in before}
        assert all(value.abs().max() > 1e-4 for value in gradients.values())
        for text in TRAINED[name]:
            copy = make_copy(placement(made, text), role, training=descent())
            # Data-parallel ranks see different sequences: the mean of their losses is that of the batch.
            loss = _mean(train_step(copy, tokens, 4) if copy is not None else None)
            assert abs(loss - wanted) < 1e-5, (text, loss, wanted)
            for key, offset, _, values in local_boxes(copy):
                gradient = cut(gradients[key], offset, values.shape)
                error = (cut(before[key], offset, values.shape) - values - gradient).norm() / gradient.norm()
                assert error < 1e-4, f"{name} {text}: the gradient of {key} is off by {error:.1e}"


@pytest.mark.parametrize("name", ROLES)
def test_losses_and_gradients_do_not_depend_on_the_layout(name: str) -> None:
    run_ranks(4, _check_training, name)


def _check_outside() -> None:
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        if not parallel.member:
            with pytest.raises(PlanError, match="outside the mesh"):
                build_chunks(tiny_role(), parallel)
        else:
            assert sharded_tensors(build_chunks(tiny_role(), parallel), parallel)


def test_ranks_outside_the_mesh_build_nothing() -> None:
    run_ranks(2, _check_outside)


@pytest.mark.parametrize(
    ("layout", "error", "text"),
    [
        (Layout(cp=2), PlanError, "cp=2 without TransformerEngine"),
        (Layout(tp=3), PlanError, "num_attention_heads=8"),
        (Layout(pp=3), PlanError, "4 layers do not divide"),
        (Layout(pp=2, layers=(1, 2)), PlanError, "sum to 3"),
        (Layout(dp=2, ep=2), PlanError, "found ep=2; expected 1: the model has no experts"),
    ],
)
def test_layouts_that_cannot_be_built_are_refused(layout: Layout, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        layout_config(tiny_role(), layout)


def test_missing_transformer_engine_is_one_clear_error() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    if gpt_layer_specs.HAVE_TE:
        pytest.skip("TransformerEngine is installed")
    with pytest.raises(MegatronCompatError, match="found no TransformerEngine"):
        layout_config(tiny_role(use_te=True), Layout())


def test_options_bound_to_one_layout_are_refused() -> None:
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        layout_config(tiny_role(mtp_num_layers=1), Layout())


def test_config_of_a_layout() -> None:
    role = tiny_role()
    interleaved = layout_config(role, Layout(tp=2, pp=2, vpp=2, sp=True))
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)
    assert interleaved.microbatch_group_size_per_vp_stage == 2
    assert (interleaved.sequence_parallel, interleaved.variable_seq_lengths) == (True, False)
    flat = layout_config(role, Layout(pp=4))
    assert (flat.virtual_pipeline_model_parallel_size, flat.variable_seq_lengths) == (None, True)
    assert (flat.overlap_p2p_comm, flat.batch_p2p_comm, flat.sequence_parallel) == (False, True, False)
    uneven = layout_config(role, Layout(pp=2, layers=(3, 1)))
    assert [[len(chunk) for chunk in stage] for stage in uneven.pipeline_model_parallel_layout.layout] == [
        [4],
        [2],
    ]


def test_shape() -> None:
    critic = tiny_role("critic", scalar_head=True, tied_embeddings=True).shape()
    assert (critic.num_query_groups, critic.padded_vocab_size) == (2, 128)
    assert (critic.scalar_head, critic.tied_embeddings) == (True, False)
