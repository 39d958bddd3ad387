"""The planner's shapes and bytes against Megatron's own models: the table of parameters, the ledger, activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_real.backend import Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.device_memory import MemoryLedger
from megatron_real.hooks import generation
from megatron_real.hooks.activations import pass_bytes
from megatron_real.hooks.model_copy import ModelCopy
from megatron_real.plan import ClusterSpec, CopyKey, LayoutSpec, Placement
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.memory import MemoryModel, copy_memory
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.parameters import rank_entries
from megatron_real.plan_search.workload import LengthDistribution, Workload
from tests.harness import run_ranks
from tests.hooks.sequences import TOKENS
from tests.hooks.tiny import descent, layouts, make_copy, placement, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

DENSE = (
    "d1t1p1@0-0",
    "d1t2p1s@0-1",
    "d1t1p2l1.3@1-2",
    "d1t4p1@0-3",  # more tensor-parallel ranks than key-value groups
    "d1t2p2v2@0-3",
    "d2t2p1@0-3",
    "d1t1p4@0-3",
)
EXPERTS = (
    "d2t1p1e2@0-1",
    "d1t2p1@0-1",
    "d1t2p1e2x1@0-1",
    "d2t2p1e4x1@0-3",
    "d2t1p2e2@0-3",
    "d1t2p2e1x1@0-3",
    "d2t2p1e1x4@0-3",
)
GPT2 = {
    "tied_embeddings": True,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False,
}
VALUE = {"role": "critic", "scalar_head": True, "add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 8}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
}
MODELS = [
    pytest.param({}, DENSE, id="gated, RMSNorm"),
    pytest.param(GPT2, DENSE, id="tied, LayerNorm, biases, learned positions"),
    pytest.param(VALUE, DENSE, id="scalar head, q/k norm"),
    pytest.param({**MOE, "moe_shared_expert_intermediate_size": 24}, EXPERTS, id="experts"),
    pytest.param({**MOE, "add_bias_linear": True}, EXPERTS[:1], id="experts with biases"),
]


def _spec(copy: ModelCopy) -> ModelSpec:
    dtype = str(copy.config.params_dtype).removeprefix("torch.")
    return ModelSpec(shape=copy.role.shape(), param_dtype=dtype, fused_attention=False)


def _compare(changes: dict[str, Any], texts: tuple[str, ...]) -> int:
    compared = 0
    with layouts() as made:
        for number, text in enumerate(texts):
            parallel = placement(made, text)
            dtype = torch.bfloat16 if number % 2 else torch.float32
            role, rank = tiny_role(**{"dtype": dtype, **changes}), dist.get_rank()
            if not parallel.member:
                continue
            key = CopyKey(model=role.role, mesh=parallel.mesh, layout=parallel.layout)
            stage = parallel.pg_collection.pp.rank()
            for training in (None, descent()):
                ledger = MemoryLedger()
                copy = ModelCopy(key, role, parallel, training=training, ledger=ledger)
                found = rank_entries(
                    role.shape(), parallel.layout, parallel.mesh, rank, str(dtype).removeprefix("torch.")
                )
                assert len(found) == len(set(found)), text
                assert set(found) == set(copy.shards.entries), text
                predicted = copy_memory(_spec(copy), parallel.layout, training is not None)
                held = ledger.held()
                assert predicted.weights_bytes[stage] == held.pop(copy.parameters_owner), (text, training)
                assert predicted.state_bytes[stage] == sum(held.values()), (text, training)
                compared += 1
    return compared


@pytest.mark.parametrize(("changes", "texts"), MODELS)
def test_entries_and_bytes_are_those_of_the_built_model(
    changes: dict[str, Any], texts: tuple[str, ...]
) -> None:
    size = 4 if len(texts) > 1 else 2
    compared = run_ranks(size, _compare, changes, texts)
    assert compared[0] >= 2


def _memory(spec: ModelSpec, call: Call, workload: Workload) -> MemoryModel:
    cluster = Cluster(
        spec=ClusterSpec(devices_per_node=2), device=Device(name="cpu", memory_bytes=1 << 30, constants={})
    )
    return MemoryModel(Graph(name="g", calls=(call,), keys=()), {"actor": spec}, cluster, workload)


def _batch(count: int, prompt: int, response: int) -> Batch:
    batch = Batch(
        ids=tuple(range(count)), prompt_lengths=(prompt,) * count, response_lengths=(response,) * count
    )
    batch.put(TOKENS, torch.arange(batch.num_tokens) % 100)
    return batch


def _activations() -> None:
    """A batch of equal lengths: the prediction is what the runtime declares."""
    prompt, response = 5, 7
    batch = _batch(8, prompt, response)
    workload = Workload(
        batch_size=8,
        prompt=LengthDistribution.constant(prompt),
        response=LengthDistribution.constant(response),
    )
    parts = ((0, 1, 2, 3), (4, 5, 6, 7))
    with layouts() as made:
        for text in ("d1t1p1@0-0", "d1t2p1s@0-1", "d1t1p2@0-1", "d1t1p2v2@0-1"):
            parallel = placement(made, text)
            for recompute in ("none", "selective", "full"):
                options: dict[str, Any] = {"num_layers": 4}
                if recompute != "none":
                    options["recompute_granularity"] = recompute
                if recompute == "full":
                    options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
                copy = make_copy(parallel, tiny_role(**options))
                if copy is None:
                    continue
                stage = parallel.pg_collection.pp.rank()
                for type_ in (CallType.TRAIN, CallType.INFERENCE):
                    call = Call(name="c", model="actor", type=type_)
                    degrees = {name: getattr(parallel.layout, name) for name in LayoutSpec.model_fields}
                    planned = Placement(
                        ranks=(0, parallel.mesh.size),
                        layout=LayoutSpec(**degrees),
                        num_microbatches=2,
                        recompute=recompute,
                    )
                    found = _memory(_spec(copy), call, workload).call_memory(call, planned)
                    declared = pass_bytes(copy, batch, [parts], training=call.trains)
                    assert found.active_bytes[stage] == declared, (text, recompute, type_)


def test_predicted_activations_are_the_declared_ones() -> None:
    run_ranks(2, _activations)


def _generation() -> None:
    prompt, response = 5, 7
    workload = Workload(
        batch_size=8,
        prompt=LengthDistribution.constant(prompt),
        response=LengthDistribution.constant(response),
    )
    call = Call(name="gen", model="actor", type=CallType.GENERATE)
    prompts = _batch(8, prompt, 0)
    sampling = Sampling(max_new_tokens=response, end_token=-1)
    with layouts() as made:
        for text in ("d1t1p1@0-0", "d1t2p1@0-1", "d1t1p2@0-1", "d1t4p1@0-3"):
            parallel, ledger = placement(made, text), MemoryLedger()
            copy = make_copy(parallel, tiny_role(), ledger=ledger)
            if copy is None:
                continue
            layout, stage = parallel.layout, parallel.pg_collection.pp.rank()
            planned = Placement(
                ranks=(0, layout.size), layout=LayoutSpec(tp=layout.tp, pp=layout.pp), num_microbatches=2
            )
            found = _memory(_spec(copy), call, workload).call_memory(call, planned)
            held = ledger.current_bytes
            ledger.reset_peak()
            generation.generate(copy, call, 0, prompts, ((0, 1, 2, 3), (4, 5, 6, 7)), sampling)
            assert held == found.weights_bytes[stage]
            assert ledger.peak_bytes - held == found.active_bytes[stage], text


def test_predicted_generation_is_what_the_ledger_counted() -> None:
    run_ranks(4, _generation)
