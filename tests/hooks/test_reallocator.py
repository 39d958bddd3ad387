"""The library on two Megatron models without our layouts: models with process groups of their own, and no globals.

Every element is a function of its key and its *global* coordinates, and few enough bits that bfloat16 holds it.
"""

from __future__ import annotations

import gc
import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.inference.shards import build_inference_pg_collection
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real import realloc_ops
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import RealError
from megatron_real.hooks.cpu_device import install_cpu_device
from megatron_real.realloc_ops import (
    InPlace,
    Reallocator,
    ReallocOptions,
    models,
    swap,
    swap_model_weights,
)
from tests.harness import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

WORLD_SIZE = 4


class Side(NamedTuple):
    """A layout on `size` ranks from `start`."""

    size: int = 4
    start: int = 0
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    bf16: bool = False
    """With Megatron's `Float16Module` around each chunk."""


def build(side: Side, *, num_layers: int = 4, vocab_size: int = 64) -> list[torch.nn.Module] | None:
    """The chunks of this rank; None outside the window. Collective over WORLD."""
    install_cpu_device()
    groups = build_inference_pg_collection(
        side.size,
        tp_size=side.tp,
        pp_size=side.pp,
        cp_size=1,
        ep_size=1,
        expt_tp_size=1,
        rank_offset=side.start,
    )
    if not side.start <= dist.get_rank() < side.start + side.size:
        return None
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=64,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=side.tp,
        pipeline_model_parallel_size=side.pp,
        virtual_pipeline_model_parallel_size=side.vpp if side.vpp > 1 else None,
        pipeline_dtype=torch.float32,
        perform_initialization=False,
        bf16=side.bf16,
    )
    chunks: list[torch.nn.Module] = []
    for index in range(side.vpp):
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=vocab_size,
            max_sequence_length=16,
            pre_process=groups.pp.rank() == 0 and index == 0,
            post_process=groups.pp.rank() == side.pp - 1 and index == side.vpp - 1,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=index if side.vpp > 1 else None,
        )
        chunks.append(Float16Module(config, chunk) if side.bf16 else chunk)
    return chunks


def coordinates(chunks: list[torch.nn.Module] | None, salt: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor of the model, what it must hold), by Megatron's own description of the model."""
    found = []
    for chunk in chunks or ():
        module = chunk.module if isinstance(chunk, Float16Module) else chunk
        state = module.sharded_state_dict(metadata={"dp_cp_group": module.pg_collection.dp_cp})
        apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor):
                box = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
                grid = np.meshgrid(
                    *(np.arange(o, o + n) for o, n in zip(shard.global_offset, box, strict=True)),
                    indexing="ij",
                )
                position = np.ravel_multi_index(tuple(grid), shard.global_shape)
                mixed = (position * 2654435761 + zlib.crc32(f"{salt}/{shard.key}".encode())) // 7 % 2**7
                values = torch.from_numpy((mixed / 2**7 - 0.5).astype(np.float32)).reshape(shard.data.shape)
                found.append((shard.data.detach(), values.to(shard.data.dtype)))
    return found


def fill(chunks: list[torch.nn.Module] | None, salt: int) -> None:
    for tensor, values in coordinates(chunks, salt):
        tensor.copy_(values)


def poison(chunks: list[torch.nn.Module] | None) -> None:
    for tensor, _ in coordinates(chunks, 0):
        tensor.fill_(float("nan"))


def check(chunks: list[torch.nn.Module] | None, salt: int, where: object) -> None:
    for tensor, values in coordinates(chunks, salt):
        assert torch.equal(tensor, values), where


def refuse_objects(*_: object, **__: object) -> None:
    raise AssertionError("an object collective after the first time")


def run_pair(here: Side, there: Side, options: ReallocOptions) -> None:
    """Twice over one plan, with other weights in between."""
    src, dst = build(here), build(there)
    gather = dist.all_gather_object
    try:
        for salt in (1, 2):
            fill(src, salt)
            poison(dst)
            report = swap_model_weights(src, dst, "gloo", options=options)
            assert report.bytes_moved == report.bytes_bound
            assert report.staging_peak_bytes <= 4 * options.bucket_bytes
            check(dst, salt, (here, there))
            check(src, salt, ("source of", here, there))
            dist.all_gather_object = refuse_objects
    finally:
        dist.all_gather_object = gather


@st.composite
def sides(draw: st.DrawFn) -> Side:
    size = draw(st.sampled_from((1, 2, 4)))
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= size]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if n * tp <= size]))
    return Side(
        size=size,
        start=draw(st.integers(0, WORLD_SIZE - size)),
        tp=tp,
        pp=pp,
        vpp=2 if pp == 2 and draw(st.booleans()) else 1,
        bf16=draw(st.booleans()),
    )


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pairs=st.lists(st.tuples(sides(), sides()), min_size=4, max_size=4),
    bucket_bytes=st.sampled_from((1 << 12, 1 << 25)),
    verify=st.sampled_from(("off", "checksum", "full")),
)
def test_weights_arrive_at_their_coordinates(
    pairs: list[tuple[Side, Side]], bucket_bytes: int, verify: Any
) -> None:
    run_ranks(WORLD_SIZE, run_pairs, pairs, ReallocOptions(bucket_bytes=bucket_bytes, verify=verify))


def run_pairs(pairs: list[tuple[Side, Side]], options: ReallocOptions) -> None:
    for here, there in pairs:
        run_pair(here, there, options)


def swap_many() -> None:
    """One source and two targets in one window: the source's ranks see the same arguments for both."""
    src = build(Side(size=2, tp=2))
    targets = [build(Side(size=2, start=2, pp=2)) for _ in range(2)]
    critic = build(Side(size=2, tp=2), num_layers=2), build(Side(size=2, start=2, pp=2), num_layers=2)
    builds = models.build_realloc_plan
    for salt in (1, 2):
        fill(src, salt)
        fill(critic[0], 10 + salt)
        for number, target in enumerate((*targets, critic[1], *reversed(targets))):
            source = critic[0] if number == 2 else src
            poison(target)
            swap_model_weights(source, target)
            check(target, 10 + salt if number == 2 else salt, number)
        models.build_realloc_plan = refuse_objects  # all pairs are known after the first round
    models.build_realloc_plan = builds
    (pairs,) = swap._PAIRS.values()
    assert [pair.reallocator is not None for pair in pairs] == [True] * 3
    target = targets = None  # the models go, and their plans with them
    gc.collect()
    alive = [pair.reallocator is not None for pair in pairs]
    assert alive == ([True] * 3 if dist.get_rank() < 2 else [False, False, True])
    again = build(Side(size=2, start=2, pp=2))  # perhaps where the old one was
    swap_model_weights(src, again)
    check(again, 2, "a model built later")


def test_pairs_are_told_apart_by_ranks_that_hold_one_side() -> None:
    run_ranks(WORLD_SIZE, swap_many)


def refusal(case: str) -> str:
    src, dst = build(Side(tp=2)), build(Side(pp=2))
    assert src is not None
    assert dst is not None
    options, last = ReallocOptions(), dist.get_rank() == WORLD_SIZE - 1
    if case == "hidden parameter" and last:
        dst[0].register_parameter("hidden", torch.nn.Parameter(torch.zeros(3)))
        describe = type(dst[0]).sharded_state_dict
        dst[0].sharded_state_dict = lambda **options: {
            key: value for key, value in describe(dst[0], **options).items() if key != "hidden"
        }
    elif case == "not Megatron's" and last:
        src = [torch.nn.Linear(2, 2)]
    elif case == "options" and last:
        options = ReallocOptions(bucket_bytes=4096)
    elif case == "other model":
        dst = build(Side(pp=2), num_layers=2)
    elif case == "no source":
        src = None
    with pytest.raises(RealError) as caught:
        Reallocator(src, dst, options=options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("case", "words", "everywhere"),
    [
        ("hidden parameter", "chunk 0: hidden", False),
        ("not Megatron's", "sharded_state_dict", False),
        ("options", "4096", True),
        ("other model", "decoder.layers", True),
        ("no source", "no source model", True),
    ],
)
def test_all_ranks_refuse_together(case: str, words: str, everywhere: bool) -> None:
    texts = run_ranks(WORLD_SIZE, refusal, case)
    for rank, text in enumerate(texts):
        assert words in text
        assert text.startswith("PlanError" if everywhere or rank == WORLD_SIZE - 1 else "PeerError"), text


def replaced() -> None:
    src, dst = build(Side(tp=2)), build(Side(tp=4))
    realloc = Reallocator(src, dst)
    fill(src, 1)
    realloc.run(version=5)
    assert realloc.stamp.version == 5
    assert dst is not None
    dst[0].decoder.layers[1].mlp.linear_fc2.weight = torch.nn.Parameter(torch.zeros(32, 16))
    with pytest.raises(
        RealError, match=r"destination: .*layers\.1\.mlp\.linear_fc2\.weight.*Make a new Reallocator"
    ):
        realloc.run(version=6)
    realloc = Reallocator(src, dst)
    poison(dst)
    realloc.run()
    check(dst, 1, "after making a new one")
    src = None
    gc.collect()
    with pytest.raises(RealError, match="source: the model is gone"):
        realloc.run()


def test_models_that_changed_are_refused() -> None:
    run_ranks(WORLD_SIZE, replaced)


def swap_after_a_failure() -> None:
    src, dst = build(Side(tp=2)), build(Side(tp=4))
    fill(src, 1)
    swap_model_weights(src, dst)
    assert dst is not None
    if dist.get_rank() == 1:
        dst[0].decoder.final_layernorm.weight = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(RealError, match=r"final_layernorm\.weight"):
        swap_model_weights(src, dst)
    poison(dst)
    swap_model_weights(src, dst)  # plans anew, over a process group of its own
    check(dst, 1, "after a failure")


def test_swap_goes_on_after_a_failure() -> None:
    run_ranks(WORLD_SIZE, swap_after_a_failure)


def with_caches() -> None:
    src, dst = build(Side(tp=2)), build(Side(tp=4))
    assert dst is not None
    refreshed: list[str] = []
    dst[0].decoder.refresh_cache = lambda: refreshed.append("decoder")
    dst[0].decoder.layers[0]._A_neg_exp_cache_stale = False
    swap_model_weights(src, dst)
    assert refreshed == ["decoder"]
    assert dst[0].decoder.layers[0]._A_neg_exp_cache_stale


def test_caches_are_refreshed() -> None:
    run_ranks(WORLD_SIZE, with_caches)


def mixed() -> None:
    src, dst = build(Side(tp=2)), build(Side(tp=4))
    fill(src, 1)
    fill(dst, 2)
    expected = [
        0.25 * new + 0.75 * old
        for (_, new), (_, old) in zip(coordinates(dst, 1), coordinates(dst, 2), strict=True)
    ]
    Reallocator(src, dst, options=ReallocOptions(mix=0.25)).run()
    for (tensor, _), values in zip(coordinates(dst, 0), expected, strict=True):
        assert torch.allclose(tensor, values, rtol=0, atol=1e-7)


def test_mix() -> None:
    run_ranks(WORLD_SIZE, mixed)


def streamed() -> None:
    src, dst = build(Side(tp=2)), build(Side(pp=2, tp=2))
    realloc = Reallocator(src, dst, options=ReallocOptions(order="layers", bucket_bytes=1 << 12))
    for version in (1, 2):
        fill(src, version)
        poison(dst)
        stream = realloc.stream(version)
        assert realloc.stamp.version is None
        report = stream.finish()
        assert report.bytes_moved == report.bytes_bound
        check(dst, version, "streamed")
        assert realloc.stamp.version == version


def test_stream() -> None:
    run_ranks(WORLD_SIZE, streamed)


def in_place() -> None:
    src, dst = build(Side(tp=2)), build(Side(tp=4))
    assert src is not None
    assert dst is not None
    bucket_bytes, ledger = 16 * 1024, MemoryLedger()
    segments = InPlace.adopt(src, dst, bucket_bytes=bucket_bytes, ledger=ledger)
    assert segments.src is not None
    assert segments.dst is not None
    fill(src, 1)
    there = coordinates(dst, 1)  # torch cannot split freed tensors
    options = ReallocOptions(order="in_place", in_place=segments, bucket_bytes=bucket_bytes, ledger=ledger)
    realloc = Reallocator(src, dst, options=options)
    assert realloc.plan.bucket_bytes == bucket_bytes // 4
    segments.dst.free()
    ledger.reset_peak()
    realloc.run()
    sides = segments.src, segments.dst
    largest = [max(segment.num_bytes for segment in side.segments) for side in sides]
    assert ledger.peak_bytes <= max(side.nbytes for side in sides) + 4 * bucket_bytes + sum(largest)
    assert segments.src.allocated_bytes == 0
    for tensor, values in there:
        assert torch.equal(tensor, values)


def test_in_place() -> None:
    run_ranks(WORLD_SIZE, in_place)


def vocabularies() -> None:
    """128 rows against 96, of which 90 are real."""
    src, dst = build(Side(tp=4), vocab_size=128), build(Side(tp=2), vocab_size=96)
    rows = dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), 90)
    for chunk in (*(src or ()), *(dst or ())):
        for parameter in chunk.parameters():
            parameter.data.fill_(7.0)
    assert src is not None
    assert dst is not None
    embedding = src[0].embedding.word_embeddings.weight
    first = 32 * dist.get_rank()
    embedding.data.copy_(torch.arange(first, first + 32)[:, None].expand(32, 32))
    swap_model_weights(src, dst, options=ReallocOptions(real_rows=rows))
    first = 48 * (dist.get_rank() % 2)
    expected = torch.arange(first, first + 48).float()
    expected[expected >= 90] = 0.0
    assert torch.equal(dst[0].embedding.word_embeddings.weight, expected[:, None].expand(48, 32))


def test_vocabularies_of_different_padding() -> None:
    run_ranks(WORLD_SIZE, vocabularies)


def test_every_public_name_is_there() -> None:
    assert all(getattr(realloc_ops, name) is not None for name in realloc_ops.__all__)
    with pytest.raises(AttributeError, match="no attribute 'swap_weights'"):
        _ = realloc_ops.swap_weights
