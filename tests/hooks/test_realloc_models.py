"""Reallocation of dense models between all pairs of layouts, checked element by element (see `moving`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_real.errors import RealError
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.realloc_ops.execution.executor import ReallocExecutor
from megatron_real.realloc_ops.planning.plan import build_realloc_plan
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from tests.harness import run_ranks
from tests.hooks.moving import (
    Holding,
    check_arrived,
    check_move,
    check_pairs,
    executor,
    hold,
    losses_after_moves,
    mean_losses,
    poison,
    transport,
)
from tests.hooks.tiny import descent, layouts, make_copy, placement, tiny_role, train_step, whole_model

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

WORLD_SIZE = 8
PLACEMENTS = (
    "d1t1p1@0-0",
    "d1t2p1s@0-1",
    "d2t1p1@2-3",
    "d1t1p2l1.3@1-2",  # uneven stages, overlapping the others' windows
    "d1t1p2v2@4-5",
    "d1t4p1@2-5",  # more tp ranks than key-value groups
    "d1t2p2@0-3",
    "d1t2p2v2s@4-7",
    "d1t1p4@0-3",
    "d1t8p1@0-7",
    "d2t2p2l3.1@0-7",
    "d8t1p1@0-7",
)
ODD = (
    "d3t1p1@1-3",  # windows of three and five ranks, beside and over each other
    "d1t1p3l0.4.0@0-2",  # E|tttt|L: embedding and loss on stages of their own
    "d1t2p1@3-4",
    "d1t1p5l1.1.0.2.0@0-4",
    "d1t1p2v2l0.1.1.2@3-4",
    "d1t1p1@4-4",
)
"""Sizes that do not divide each other, and stages as Megatron's layout strings have them."""
FEATURES = {
    "biases, norms of q and k": {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "gated_linear_unit": False,
    },
    "reward model": {"role": "reward", "scalar_head": True, "dtype": torch.bfloat16},
}


def _check_all(changes: dict[str, object], placements: tuple[str, ...]) -> int:
    return check_pairs(tiny_role(**changes), placements)


@pytest.mark.parametrize(
    ("changes", "placements"),
    [
        pytest.param({}, PLACEMENTS, id="untied"),
        pytest.param({"tied_embeddings": True}, PLACEMENTS, id="tied"),
        pytest.param({"role": "critic", "scalar_head": True}, PLACEMENTS[3:9], id="scalar head"),
        pytest.param({"tied_embeddings": True}, ODD, id="odd windows and stages"),
    ],
)
def test_all_pairs_of_layouts(changes: dict[str, object], placements: tuple[str, ...]) -> None:
    counts = run_ranks(WORLD_SIZE, _check_all, changes, placements)
    assert set(counts) == {len(placements) * (len(placements) - 1)}


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_dense_models(name: str) -> None:
    placements = ("d1t1p1@1-1", "d1t2p1@2-3", "d2t2p1@0-3", "d1t1p2v2@0-1", "d1t4p1@0-3", "d1t2p2l3.1@0-3")
    run_ranks(4, _check_all, FEATURES[name], placements)


def _losses(changes: dict[str, object]) -> dict[str, list[float]]:
    placements = ("d1t4p1@0-3", "d1t1p1@3-3", "d2t1p2@0-3", "d1t1p2v2@0-1", "d1t1p4l2.0.1.1@0-3")
    return losses_after_moves(tiny_role(**changes), "d1t2p2@0-3", placements)


@pytest.mark.parametrize("tied", [False, True])
def test_models_compute_the_same_after_they_moved(tied: bool) -> None:
    """Heads, gates, layers and tied rows are where the modules look for them, not only where the metadata says."""
    means = mean_losses(run_ranks(4, _losses, {"tied_embeddings": tied}))
    assert len(means) == 6
    assert means == pytest.approx(dict.fromkeys(means, means["d1t2p2@0-3"]), rel=1e-6)


def _check_tied_copies() -> None:
    """Both ends of a pipeline train their copy of the embedding: `whole_model` compares all replicas, bit for bit."""
    role = tiny_role(tied_embeddings=True)
    with layouts() as made:
        copy = make_copy(placement(made, "d1t2p2@0-3"), role, training=descent(lr=1e7))
        before = whole_model(copy)
        for step in range(3):
            train_step(copy, (torch.arange(48).reshape(4, 12) * (step + 3)) % 120)
        after = whole_model(copy)
        key = "embedding.word_embeddings.weight"
        assert not torch.equal(after[key], before[key])
        over = transport(made)
        group = dist.group.WORLD
        target = make_copy(placement(made, "d2t1p2@0-3"), role)
        rank = dist.get_rank()
        tables = [gather_tables(one.shards.entries, group) for one in (copy, target)]
        plan = build_realloc_plan(*tables, rank=rank).of(rank)
        ReallocExecutor(plan, src=copy.shards, dst=target.shards, transport=over).run()
        moved = whole_model(target)
        assert all(torch.equal(moved[name], value) for name, value in after.items())
        made.groups.release(range(4), purpose="realloc")


def test_tied_copies_are_equal_after_training_and_after_a_move() -> None:
    run_ranks(4, _check_tied_copies)


def _check_trained() -> None:
    """Out of DDP's buffers and back, twice over one executor; a second model with the same layouts beside it."""
    with layouts() as made:
        over = transport(made)
        held: dict[tuple[str, str], Holding] = {}
        for salt, role in enumerate((tiny_role(), tiny_role("critic"))):
            held[role.role, "train"] = hold(made, "d1t2p2v2@0-3", role, salt=salt, training=descent())
            held[role.role, "generate"] = hold(made, "d4t1p1@0-3", role, salt=salt)
        executors = {
            name: executor(held[name, "train"], held[name, "generate"], over) for name in ("actor", "critic")
        }
        for _ in range(2):
            for name, mover in executors.items():
                generate = held[name, "generate"]
                generate.copy.free()
                generate.copy.allocate()
                poison(generate)
                mover.run()
                check_arrived(generate, name)
                assert mover.num_builds == 1
        for name in executors:
            train = held[name, "train"]
            poison(train)
            executor(held[name, "generate"], train, over).run()
            train.copy.weights_arrived(3)
            check_arrived(train, name)
            assert train.copy.stamp.version == 3
        made.groups.release(range(4), purpose="realloc")


def test_trained_copies_and_two_models_with_equal_layouts() -> None:
    run_ranks(4, _check_trained)


def _check_freed() -> None:
    with layouts() as made:
        copy = hold(made, "d1t2p2@0-3", tiny_role()).copy
        assert copy.ledger.held() == {copy.parameters_owner: copy.segments.nbytes}
        copy.free()
        for chunk in copy.chunks:
            for parameter in chunk.parameters():
                assert parameter.untyped_storage().nbytes() == 0
        assert copy.segments.allocated_bytes == copy.ledger.current_bytes == 0
        with pytest.raises(RealError, match="freed"):
            copy.shards.resolve()


def test_freed_copies_hold_nothing_and_are_refused() -> None:
    run_ranks(4, _check_freed)


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _padded(rows: int, **changes: object) -> RoleModel:
    return tiny_role(padded_vocab_size=rows, **changes)


def _check_padding() -> None:
    """Real rows move whatever the padding; what is behind them is zero."""
    real_rows = dict.fromkeys(VOCABULARY, 120)
    with layouts() as made:
        over = transport(made)
        for changes in ({}, {"tied_embeddings": True}):
            held = {
                rows: [hold(made, text, _padded(rows, **changes), real_rows=real_rows) for text in texts]
                for rows, texts in {
                    120: ("d1t1p1@3-3", "d2t2p1@0-3"),
                    128: ("d1t2p2@0-3", "d1t4p1@0-3"),
                    256: ("d1t2p1@1-2", "d1t1p2@0-1"),  # the second half of the rows is padding
                }.items()
            }
            for rows, others in ((120, 256), (128, 256), (256, 128), (256, 120), (128, 120)):
                for src in held[rows]:
                    for dst in held[others]:
                        check_move(src, dst, over, f"{changes}: {rows} rows -> {others}")
        made.groups.release(range(4), purpose="realloc")


def test_different_padded_vocabularies() -> None:
    run_ranks(4, _check_padding)


def _check_dtypes() -> None:
    with layouts() as made:
        over = transport(made)
        held = {
            (dtype, text): hold(made, text, tiny_role(dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
            for text in ("d1t2p2@0-3", "d4t1p1@0-3", "d1t1p1@2-2")
        }
        for (dtype, source), src in held.items():
            for (other, target), dst in held.items():
                if dtype != other:
                    check_move(src, dst, over, f"{dtype} {source} -> {other} {target}")
        made.groups.release(range(4), purpose="realloc")


def test_dtypes_change_on_the_way() -> None:
    run_ranks(4, _check_dtypes)
