"""`plan_search.model_arguments` against Megatron: the same arguments give the same shape, without Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_real.config import conf_dir, megatron_arguments
from megatron_real.hooks import roles
from megatron_real.hooks.cpu_device import install_cpu_device
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.model_arguments import model_spec, with_overrides
from tests.e2e.tiny_run import MEGATRON, place, write_run
from tests.harness import run_ranks

pytestmark = pytest.mark.megatron

CALLS = {
    name: place(0, 1)
    for name in ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
}
CPU = {
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "moe_grouped_gemm": False,
}
"""What lets Megatron take arguments of a GPU's model where there is none; no dimension depends on it."""
MODELS = {
    path.stem: yaml.safe_load(path.read_text())["megatron"]
    for path in sorted((conf_dir() / "model").glob("*.yaml"))
}
EXPERTS = {"num_experts": 8, "moe_router_topk": 3, "vocab_size": 1000}
BASE = {name: value for name, value in MEGATRON.items() if name not in ("swiglu", "ffn_hidden_size")}
OTHERS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    # arguments of the actor, overrides of the role
    "Megatron's defaults": (
        {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 100,
            "seq_length": 64,
            "max_position_embeddings": 64,
            "micro_batch_size": 1,
            "lr": 1e-4,
            "tokenizer_type": "NullTokenizer",
            "train_iters": 1,
        },
        {},
    ),
    "a wider critic": (BASE, {"hidden_size": 96, "swiglu": True}),
    "other heads": ({**BASE, "kv_channels": 16}, {"num_attention_heads": 8, "num_query_groups": 4}),
    "tied, biased": (
        {**MODELS["tiny"], "untie_embeddings_and_output_weights": False, "add_qkv_bias": True},
        {},
    ),
    "experts": ({**MODELS["tiny"], **EXPERTS}, {}),
    "experts of their own width": (
        {**MODELS["tiny"], **EXPERTS, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 80},
        {},
    ),
}


def _shapes(folder: Path) -> dict[str, ModelShape]:
    install_cpu_device()
    plan = Path(write_run(folder, calls=CALLS, ranks=1)["plan"])
    cases = {**{name: (arguments, {}) for name, arguments in MODELS.items()}, **OTHERS}
    found = {}
    for name, (arguments, overrides) in cases.items():
        args = roles.parse_arguments(megatron_arguments({**arguments, **CPU}), plan)
        args = roles.role_arguments(args, overrides=overrides, role="actor")
        for head in (False, True):
            role = roles.role_model("actor", args, scalar_head=head, tp_sizes=(1, 2, 4), seed=0, use_te=False)
            found[f"{name}, {head}"] = role.shape()
    return found


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    """By Megatron, in a process of its own, where it is patched."""
    (found,) = run_ranks(1, _shapes, tmp_path_factory.mktemp("shapes"))
    return found


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """What a shape says, without the values that mean nothing in it."""
    names = list(ModelShape.__dataclass_fields__)
    values = {
        name: getattr(shape, name) for name in names if name not in ("head_size", "expert_ffn_hidden_size")
    }
    values["head_width"] = shape.head_width
    if shape.num_experts:
        values["expert_width"] = shape.expert_width
    else:
        del values["experts_per_token"]
    return values


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@pytest.mark.parametrize("head", [False, True])
def test_a_shape_is_that_which_megatron_builds(name: str, head: bool, shapes: dict[str, ModelShape]) -> None:
    arguments, overrides = OTHERS.get(name, (MODELS.get(name, {}), {}))
    merged = with_overrides({**arguments, **CPU}, overrides)
    ours = model_spec(merged, scalar_head=head, max_tp=4, sizes=(4,), device="cpu").shape
    assert _sizes(ours) == _sizes(shapes[f"{name}, {head}"])
