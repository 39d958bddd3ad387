"""Models under several layouts at once: losses and gradients are those of one process."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from megatron_real.layout import parse_placement
from megatron_real.process_groups import ProcessGroups
from tests.harness import run_ranks

pytest.importorskip("megatron.core")

from megatron_real.hooks.parallel_state import ParallelLayout, ParallelLayouts

pytestmark = [pytest.mark.megatron, pytest.mark.dist]


@pytest.fixture(autouse=True)
def _device(cpu_device: None) -> None:
    """The device, also after tests that took it away."""


def _gpt(made: ParallelLayout) -> Any:
    """A small GPT under the shown layout, with weights that depend on names and global positions only."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    layout = made.layout
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        sequence_parallel=layout.sp,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=16,
        pre_process=made.pg_collection.pp.rank() == 0,
        post_process=made.pg_collection.pp.rank() == layout.pp - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=made.pg_collection,
    )
    with torch.no_grad():
        for shard in nested_values(model.sharded_state_dict()):
            if not isinstance(getattr(shard, "data", None), torch.Tensor) or not hasattr(
                shard, "global_shape"
            ):
                continue
            seed = int.from_bytes(hashlib.sha256(shard.key.encode()).digest()[:4], "big")
            full = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(seed)) * 0.2
            shard.data.copy_(full[shard.global_slice()].reshape(shard.data.shape))
    return model


def _loss_and_gradient(made: ParallelLayout) -> tuple[float | None, float | None]:
    """Mean loss (last stage) and the norm of the final norm's gradient, through Megatron's schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = torch.arange(32, device="cuda").reshape(2, 16) * 7 % 64
    positions = torch.arange(16, device="cuda").expand(2, -1)
    mask = torch.ones(1, 1, 16, 16, device="cuda").tril() < 0.5

    def forward_step(data: Any, model: Any) -> Any:
        return model(tokens, positions, mask, labels=tokens), lambda output: (
            output.mean(),
            {"loss": output.mean()},
        )

    with made.active():
        model = _gpt(made)
        communicator = made.p2p_communicator(model.config)
        losses = get_forward_backward_func(pp_size=made.layout.pp, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=2,
            seq_length=16,
            micro_batch_size=2,
            forward_only=False,
            p2p_communicator=communicator,
            pg_collection=made.pg_collection,
        )
    if not model.post_process:
        return None, None
    return float(losses[0]["loss"]), float(model.decoder.final_layernorm.weight.grad.norm())


def _train_under_several_layouts() -> dict[str, tuple[float | None, float | None]]:
    layouts = ParallelLayouts(ProcessGroups(timeout_s=30))
    texts = ("d4t1p1@0-3", "d1t4p1@0-3", "d1t2p2@0-3", "d1t2p1@0-1", "d1t1p2@2-3")
    made = {text: layouts.build(*parse_placement(text)) for text in texts}
    # The last two run at the same time, on disjoint windows.
    got = {text: _loss_and_gradient(layout) for text, layout in made.items() if layout.member}
    layouts.close()
    return got


def test_models_under_several_layouts_agree_with_one_process() -> None:
    (reference,) = run_ranks(1, _train_alone)
    assert reference[0] > 1.0
    assert reference[1] > 0.0
    seen: dict[str, list[tuple[float, float]]] = {}
    for results in run_ranks(4, _train_under_several_layouts):
        for text, (loss, norm) in results.items():
            if loss is not None and norm is not None:
                seen.setdefault(text, []).append((loss, norm))
    assert {text: len(values) for text, values in seen.items()} == {
        "d4t1p1@0-3": 4,
        "d1t4p1@0-3": 4,
        "d1t2p2@0-3": 2,
        "d1t2p1@0-1": 2,
        "d1t1p2@2-3": 1,
    }
    for text, values in seen.items():
        for value in values:
            assert value == pytest.approx(reference, rel=1e-5), text


def _train_alone() -> tuple[float | None, float | None]:
    return _loss_and_gradient(
        ParallelLayouts(ProcessGroups(timeout_s=30)).build(*parse_placement("d1t1p1@0-0"))
    )
