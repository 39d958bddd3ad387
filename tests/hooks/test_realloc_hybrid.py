"""Reallocation beyond GPTModel's usual layers: HybridModel, Mamba, MTP, latent attention, cp, layout strings.

The chunks are Megatron's own, built here where a role cannot be run in several layouts (see
`model_builder.layout_config`): what a reallocation moves does not depend on that.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_real.backend import Sampling
from megatron_real.dataflow import Call, CallType
from megatron_real.errors import MegatronCompatError, PlanError
from megatron_real.hooks.generation import generate, kv_cache_bytes
from megatron_real.hooks.model_builder import RoleModel, build_chunks, layout_config
from megatron_real.hooks.parallel_state import ParallelLayout
from megatron_real.realloc_ops.storage.local_shards import local_table
from tests.harness import RankFailed, run_ranks
from tests.hooks.moving import Build, check_move, check_pairs, executor, hold, transport
from tests.hooks.sequences import make_batch
from tests.hooks.tiny import NoAttention, experts, latent_role, layouts, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

PATTERN = "*-*E*-*E"
PLACEMENTS = (
    "d1t1p1@3-3",
    "d1t2p1@0-1",
    "d2t1p2e2@0-3",
    "d1t2p2v2@0-3",
    "d1t1p4l3.1.0.4@0-3",
    "d1t4p1@0-3",
)
MAMBA = {
    "num_layers": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 4,
    "mamba_state_dim": 8,
    "is_hybrid_model": True,
}


def hybrid(pattern: str, **changes: Any) -> dict[str, Any]:
    """Changes for `tiny_role`."""
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "is_hybrid_model": True, **changes}


def _check_all(changes: dict[str, Any], placements: tuple[str, ...]) -> int:
    return check_pairs(tiny_role(**changes), placements)


@pytest.mark.parametrize("tied", [False, True])
def test_hybrid_models(tied: bool) -> None:
    run_ranks(4, _check_all, hybrid(PATTERN, **experts(tied_embeddings=tied)), PLACEMENTS)


# Mamba


class _GatedNorm(torch.nn.Module):
    """The parameters of mamba_ssm's gated norm, described as `mamba_mixer.ExtendedRMSNorm` describes them."""

    def __init__(self, size: int, *, device: Any = None, dtype: Any = None, **_others: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


@contextmanager
def _mamba_without_kernels() -> Iterator[None]:
    """Lets Mamba layers be built without mamba_ssm, whose kernels need CUDA; they cannot compute."""
    former = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm, mamba_mixer.HAVE_EINOPS
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm, mamba_mixer.HAVE_EINOPS = True, _GatedNorm, True
    try:
        yield
    finally:
        mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm, mamba_mixer.HAVE_EINOPS = former


def _mamba_chunks(role: RoleModel) -> Build:
    def build(parallel: ParallelLayout) -> Sequence[torch.nn.Module]:
        with _mamba_without_kernels():
            return build_chunks(role, parallel)

    return build


def _check_mamba() -> None:
    role = tiny_role(**hybrid("MM*-M-", **MAMBA))
    check_pairs(
        role, ("d1t1p1@3-3", "d1t2p1@0-1", "d2t1p2@0-3", "d1t4p1@0-3", "d1t2p2v3@0-3"), _mamba_chunks(role)
    )


def test_mamba_layers_move_though_they_cannot_compute_here() -> None:
    run_ranks(4, _check_mamba)


def _check_cache() -> None:
    """Mamba keeps what it needs of its decay rates while it decodes."""
    role = tiny_role(**hybrid("M*-M*-", **MAMBA))
    with layouts() as made, torch.no_grad():
        over = transport(made)
        src = hold(made, "d1t2p1@0-1", role, build=_mamba_chunks(role), salt=1)
        with _mamba_without_kernels():
            dst = hold(made, "d1t1p1@1-1", role, salt=2)
        mixers = [
            module
            for chunk in dst.chunks
            for module in chunk.modules()
            if isinstance(module, mamba_mixer.MambaMixer)
        ]
        former = [mixer._get_decode_A_neg_exp().clone() for mixer in mixers]
        executor(src, dst, over).run()
        if dst.copy is not None:
            dst.copy.weights_arrived(1)
        for mixer, old in zip(mixers, former, strict=True):
            found = mixer._get_decode_A_neg_exp()
            assert torch.equal(found[:, 0, 0], -mixer.A_log.float().exp())
            assert not torch.equal(found, old)
        made.groups.release(range(2), purpose="realloc")


def test_caches_of_modules_are_refreshed() -> None:
    run_ranks(2, _check_cache)


def _check_generation_refused() -> None:
    """The refusal, and the bytes of a mixer's states: convolution [channels, 4] and scan [heads, channels, states]."""
    role = tiny_role(**hybrid("M*-M*-", **MAMBA))
    prompts = make_batch(2, responses=False)
    with layouts() as made, _mamba_without_kernels():
        copy = hold(made, "d1t1p2@0-1", role).copy
        call = Call(name="actor_gen", model="actor", type=CallType.GENERATE)
        with pytest.raises(PlanError, match="found pp=2 in a generate call of a model with Mamba layers"):
            generate(copy, call, 0, prompts, [prompts.ids], Sampling(max_new_tokens=2, end_token=3))
        attention, mixer = 2 * 2 * 4 * 10, (64 + 2 * 4 * 8) * 4 + 8 * 8 * 8
        assert kv_cache_bytes(copy.chunks[0], 3, 10) == 4 * 3 * (attention + mixer)


def test_mamba_layers_do_not_generate_over_stages() -> None:
    run_ranks(2, _check_generation_refused)


def _check_mamba_refused() -> None:
    role = tiny_role(**hybrid("M*-M*-", **MAMBA))
    with layouts() as made, pytest.raises(MegatronCompatError, match="MambaSSM is not installed"):
        hold(made, "d1t1p1@0-0", role)


@pytest.mark.skipif(mamba_mixer.HAVE_MAMBA_SSM, reason="mamba_ssm is installed")
def test_mamba_without_its_kernels_is_refused() -> None:
    run_ranks(1, _check_mamba_refused)


def _check_gathered_copy() -> None:
    """Under weight rematerialisation Mamba describes a gathered copy of its projection: nothing to write to."""
    role = tiny_role(**hybrid("M*-M*-", **MAMBA))

    def build(parallel: ParallelLayout) -> Sequence[torch.nn.Module]:
        chunks = _mamba_chunks(role)(parallel)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, mamba_mixer.MambaMixer):
                    described = module.in_proj.sharded_state_dict

                    def gathered(*args: Any, described: Any = described, **kwargs: Any) -> Any:
                        state = described(*args, **kwargs)
                        for entry in state.values():
                            if isinstance(getattr(entry, "data", None), torch.Tensor):
                                entry.data = entry.data.clone()
                        return state

                    module.in_proj.sharded_state_dict = gathered
        return chunks

    with (
        layouts() as made,
        pytest.raises(PlanError, match=r"in_proj\.weight\.z: found a tensor that is no view"),
    ):
        hold(made, "d1t2p1@0-1", role, build=build)


def test_a_gathered_copy_is_refused_by_name() -> None:
    run_ranks(2, _check_gathered_copy)


# Multi-token prediction and layout strings


def _gpt(role: RoleModel, parallel: ParallelLayout, **changes: Any) -> list[MegatronModule]:
    """GPTModel's chunks with a configuration that a role may not have."""
    layout = parallel.layout
    config = dataclasses.replace(layout_config(role, layout), **changes)
    groups, chunks = parallel.pg_collection, []
    for index in range(layout.vpp):
        vp_stage = index if layout.vpp > 1 else None
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        mtp = (
            get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
            if config.mtp_num_layers
            else None
        )
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=role.padded_vocab_size,
                max_sequence_length=role.max_sequence_length,
                pre_process=groups.pp.rank() == 0 and index == 0,
                post_process=groups.pp.rank() == layout.pp - 1 and index == layout.vpp - 1,
                share_embeddings_and_output_weights=role.tied_embeddings,
                position_embedding_type="rope",
                mtp_block_spec=mtp,
                pg_collection=groups,
                vp_stage=vp_stage,
            )
        )
    return chunks


def _check_mtp(tied: bool, strings: dict[str, str | None]) -> None:
    """The predictor's layer goes along, and its copies of embedding and head, wherever a layout string puts them."""
    role = tiny_role(tied_embeddings=tied)
    with layouts() as made:
        held = {}
        for text, string in strings.items():

            def build(parallel: ParallelLayout, string: str | None = string) -> Sequence[torch.nn.Module]:
                return _gpt(role, parallel, mtp_num_layers=1, pipeline_model_parallel_layout=string)

            held[text] = hold(made, text, role, build=build)
        assert any("mtp.layers" in key for key in held["d1t1p1@3-3"].table.specs)
        over = transport(made)
        for source, src in held.items():
            for target, dst in held.items():
                if source != target:
                    check_move(src, dst, over, f"{source} -> {target}")
        made.groups.release(range(4), purpose="realloc")


STRINGS = {
    "d1t1p1@3-3": None,
    "d1t2p1@0-1": None,
    "d2t1p2@0-3": "Et|tttmL",
    "d1t2p2@0-3": None,
    "d1t1p2v2@0-1": "Et|tt|t|mL",
    "d1t1p4@0-3": "E|ttt|tm|L",
}


def test_multi_token_prediction_and_layout_strings() -> None:
    run_ranks(4, _check_mtp, False, STRINGS)


def test_multi_token_prediction_with_tied_embeddings() -> None:
    run_ranks(4, _check_mtp, True, {"d1t1p1@3-3": None, "d1t2p1@0-1": None, "d2t2p1@0-3": None})
    # Over several stages Megatron does not describe it: the predictor's stage has a head that it says it has not.
    with pytest.raises(RankFailed, match="assert output_layer_weight_key not in sharded_state_dict"):
        run_ranks(4, _check_mtp, True, {"d1t1p1@3-3": None, "d2t1p2@0-3": "Et|tttmL"})


# Latent attention


def _check_latent() -> None:
    placements = ("d1t1p1@3-3", "d1t2p1@0-1", "d2t1p2@0-3", "d1t4p1@0-3")
    for fused in (False, True):
        check_pairs(latent_role(fused=fused), placements)


def test_latent_attention() -> None:
    run_ranks(4, _check_latent)


def test_latent_attention_cannot_compute_here() -> None:
    """Why `latent_role` has no attention: a Megatron that builds it is found out here."""
    with pytest.raises(RankFailed, match="unexpected keyword argument 'k_channels'"):
        run_ranks(1, _build_latent)


def _build_latent() -> None:
    with layouts() as made:
        hold(made, "d1t1p1@0-0", dataclasses.replace(latent_role(), provider=None))


# Context parallelism


def _check_context_parallel() -> None:
    """Weights are replicated over cp, on either side."""
    role = tiny_role()

    def build(parallel: ParallelLayout) -> Sequence[torch.nn.Module]:
        spec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
        spec.submodules.self_attention.submodules.core_attention = NoAttention
        without = dataclasses.replace(parallel.layout, cp=1, dp=parallel.layout.dp * parallel.layout.cp)
        config = dataclasses.replace(layout_config(role, without), context_parallel_size=parallel.layout.cp)
        groups = parallel.pg_collection
        return [
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=role.padded_vocab_size,
                max_sequence_length=role.max_sequence_length,
                pre_process=groups.pp.rank() == 0,
                post_process=groups.pp.rank() == groups.pp.size() - 1,
                position_embedding_type="rope",
                pg_collection=groups,
            )
        ]

    check_pairs(
        role,
        ("d1t1p1@3-3", "d1t1p1c2@0-1", "d1t2p1c2@0-3", "d2t1p1c2@0-3", "d1t1p2c2@0-3", "d1t4p1@0-3"),
        build,
    )


def test_context_parallel_layouts() -> None:
    run_ranks(4, _check_context_parallel)


# Refusals


def _check_refusals() -> None:
    """By name, on all ranks, before anything moves."""
    role, other = tiny_role(), tiny_role(num_layers=2)
    with layouts() as made:
        over = transport(made)
        src, deeper = hold(made, "d1t2p1@0-1", other), hold(made, "d2t1p1@0-1", role)
        before = [filled.tensor.clone() for filled in deeper.filled]
        with pytest.raises(
            PlanError, match=r"linear_fc1\.weight: found global shape \[2, 128, 32\] on the source side"
        ):
            executor(src, deeper, over)
        tied = hold(made, "d1t2p1@0-1", tiny_role(tied_embeddings=True))
        with pytest.raises(PlanError, match=r"output_layer\.weight: found it on the destination side only"):
            executor(tied, deeper, over)
        hybrid_model = hold(made, "d1t2p1@0-1", tiny_role(**hybrid("*-*-*-*-")))
        with pytest.raises(PlanError, match=r"decoder\.final_norm\.weight: found it on the source side only"):
            executor(hybrid_model, deeper, over)
        wider = hold(made, "d1t2p1@0-1", tiny_role(padded_vocab_size=256))
        with pytest.raises(PlanError, match=r"word_embeddings\.weight: found global shape \[256, 32\]"):
            executor(wider, deeper, over)
        assert all(torch.equal(filled.tensor, old) for filled, old in zip(deeper.filled, before, strict=True))
        made.groups.release(range(2), purpose="realloc")


def test_models_that_differ_are_refused_by_name() -> None:
    run_ranks(2, _check_refusals)


class _Quantised(torch.Tensor):
    """Stands for TransformerEngine's fp8 parameters and for DTensor: a tensor with more to it than its bytes."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data.detach().clone().as_subclass(_Quantised), "the tensor type _Quantised"),
        (lambda data: data.detach().to(torch.float8_e4m3fn), "dtype float8_e4m3fn"),
        (lambda data: data.detach().clone(), "a tensor that is no view of a parameter"),
        (lambda data: torch.quantize_per_tensor(data.detach(), 0.1, 0, torch.qint8), "dtype qint8"),
    ],
    ids=["subclass", "fp8", "copy", "quantised"],
)
def test_what_cannot_be_moved_is_refused_by_name(spoil: Any, message: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    tensor = SimpleNamespace(
        key="decoder.layers.mlp.linear_fc1.weight",
        data=spoil(parameter),
        local_shape=(4, 8),
        global_shape=(4, 8),
        global_offset=(0, 0),
        prepend_axis_num=0,
    )
    with pytest.raises(PlanError, match=f"linear_fc1.weight: found {message}"):
        local_table([tensor], [("weight", parameter)])
