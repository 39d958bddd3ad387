"""The runs of `make invariance`: models, algorithms, plans and data, as options of a run. No torch, no Megatron."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.dataflow import Graph

ROOT = Path(__file__).parent.parent
ITERATIONS = 3
VOCABULARY = 257
MEGATRON = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.2,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 64,
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "distributed_backend": "gloo",
}
"""The actor. Weights start large, so that wrong ones show in the loss."""

EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
"""Every role with experts. What a token computes depends on no other token; the router's biases follow the counts of a
minibatch. Losses and limits that are those of a micro-batch are refused (`roles.role_model`)."""

HYBRID = {"hybrid_layer_pattern": "*-**--*-", "num_layers": 8}
"""Every role a HybridModel of attention and MLP layers."""

GENERATION = {"max_new_tokens": 8, "temperature": 0.8, "top_k": 50, "num_minibatches": 4, "num_epochs": 2}
GROUPS = {**GENERATION, "samples_per_prompt": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": GENERATION,
    "grpo": GROUPS,
    "rloo": GROUPS,
    "reinforce_pp": GENERATION,
    "remax": GENERATION,
    "dpo": {"num_minibatches": 2},
    "reward": {"num_minibatches": 2},
    "sft": {"num_minibatches": 2},
}
"""By algorithm."""

REWARDS, SPREAD = "rewards:vowel_share", "benchmarks.invariance_cases:mean_letter"

DATA_ONLY = ("dpo", "reward", "sft")
"""Algorithms that generate nothing."""

PROMPTS = ("The ", "Return ", "A list of", "If not", "Use this function to", "Open", "See also: ", "x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and what else differs from the reference."""

    name: str
    num_ranks: int
    algorithm: str = "ppo"
    calls: Mapping[str, Any]
    """Placement of each call; ``*`` is for those that are not named."""
    critic: Mapping[str, Any] = field(default_factory=dict)
    """Megatron arguments of a critic of another shape."""
    reward_model: bool = False
    """Rewards from a model instead of a function."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    reference: str = "function"
    """Which run of one process it must equal."""

    @property
    def options(self) -> dict[str, Any]:
        """Of the algorithm."""
        return OPTIONS[self.algorithm]

    @property
    def scored(self) -> bool:
        """Whether a function scores responses."""
        return not self.reward_model and self.algorithm not in DATA_ONLY

    @property
    def graph(self) -> Graph:
        """What a plan must place."""
        definition = find_algorithm(self.algorithm)
        return definition.graph_for(
            definition.config(**self.options), reward="function" if self.scored else "model"
        )

    def plan(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": 1,
            "algorithm": self.algorithm,
            "cluster": {"devices_per_node": self.num_ranks},
            "calls": {call.name: self.calls.get(call.name, self.calls.get("*")) for call in self.graph.calls},
        }


def place(start: int, stop: int, *, micro: int = 2, drop: bool = False, **layout: Any) -> dict[str, Any]:
    """A placement as JSON."""
    placement = {"ranks": [start, stop], "layout": layout, "num_microbatches": micro}
    return placement | ({"drop_trained_weights": True} if drop else {})


SMALL_CRITIC = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "ffn_hidden_size": 32,
}


def reward(num_ranks: int) -> dict[str, Any]:
    """The reward function's placement."""
    return place(0, num_ranks, micro=1, dp=num_ranks)


def demo_calls(*, drop: bool = False) -> dict[str, Any]:
    """The demo's plan."""
    calls = json.loads((ROOT / "examples/plans/ppo.json").read_text())["calls"]
    if drop:
        for name in ("actor_train", "critic_train"):
            calls[name]["drop_trained_weights"] = True
    return calls


ONE = {"*": place(0, 1, micro=1)}
SPLIT = {
    "actor_gen": place(0, 2, dp=2),
    "greedy_gen": place(2, 4, tp=2),
    "rew_inf": place(0, 2, micro=1, dp=2),
    "greedy_rew_inf": place(2, 4, micro=1, dp=2),
    "ref_inf": place(2, 4, pp=2),
    "critic_inf": place(2, 4, dp=2),
    "critic_train": place(2, 4, tp=2, sp=True),
    "actor_train": place(0, 2, dp=2, micro=1),
    "reward_train": place(1, 3, pp=2),
}
"""Calls of all algorithms on disjoint halves of four ranks where they can be."""

CASES = (
    Case(name="t4", num_ranks=4, calls={"*": place(0, 4, tp=4), "rew_inf": reward(4)}),
    Case(name="p4", num_ranks=4, calls={"*": place(0, 4, pp=4), "rew_inf": reward(4)}),
    Case(name="d4", num_ranks=4, calls={"*": place(0, 4, dp=4, micro=1), "rew_inf": reward(4)}),
    Case(
        name="t2p2, vpp 2 in training",
        num_ranks=4,
        calls={
            "*": place(0, 4, tp=2, pp=2),
            "rew_inf": reward(4),
            "actor_train": place(0, 4, tp=2, pp=2, vpp=2, sp=True),
            "critic_train": place(0, 4, tp=2, pp=2, vpp=2, sp=True),
        },
    ),
    Case(name="demo", num_ranks=4, calls=demo_calls()),
    Case(
        name="split",
        num_ranks=4,
        calls={
            "actor_gen": place(0, 2, dp=2),
            "ref_inf": place(0, 2, tp=2) | {"offload": "host"},
            "actor_train": place(0, 2, dp=2, micro=1),
            "critic_inf": place(2, 4, pp=2),
            "critic_train": place(2, 4, tp=2, sp=True),
            "rew_inf": place(2, 4, micro=1, dp=2),
        },
    ),
    Case(
        name="8 ranks",
        num_ranks=8,
        calls={
            "actor_gen": place(0, 8, dp=4, tp=2, micro=1),
            "ref_inf": place(4, 8, pp=2, tp=2),
            "critic_inf": place(0, 4, dp=2, pp=2),
            "actor_train": place(0, 4, tp=2, pp=2, layers=[1, 3]) | {"recompute": "full"},
            "critic_train": place(4, 8, dp=2, tp=2),
            "rew_inf": reward(8),
        },
    ),
    Case(
        name="small critic",
        num_ranks=4,
        calls={**demo_calls(), "critic_train": place(2, 4, tp=2), "critic_inf": place(0, 4, dp=4, micro=1)},
        critic=SMALL_CRITIC,
        reference="small critic",
    ),
    Case(
        name="reward model",
        num_ranks=4,
        calls={**demo_calls(), "rew_inf": place(1, 3, tp=2)},
        reward_model=True,
        reference="reward model",
    ),
    Case(
        name="overlapping windows",
        num_ranks=4,
        calls={
            "actor_gen": place(1, 4, dp=3, micro=1),
            "ref_inf": place(3, 4),
            "critic_inf": place(0, 3, dp=3, micro=1),
            "actor_train": place(0, 2, pp=2),
            "critic_train": place(1, 3, tp=2),
            "rew_inf": place(0, 1, micro=1),
        },
    ),
    Case(
        name="experts, another ep in every call",
        num_ranks=4,
        calls={
            "actor_gen": place(0, 4, dp=4, ep=4, micro=1),
            "ref_inf": place(0, 2, dp=2, ep=2),
            "critic_inf": place(2, 4, tp=2, ep=2, etp=1),
            "actor_train": place(0, 4, dp=2, tp=2, ep=2, etp=1, sp=True),
            "critic_train": place(0, 4, dp=2, pp=2, ep=2),
            "rew_inf": reward(4),
        },
        megatron=EXPERTS,
        reference="experts",
    ),
    Case(
        name="experts, ep 1 in generation",
        num_ranks=4,
        calls={
            "actor_gen": place(0, 4, dp=2, tp=2, micro=1),
            "ref_inf": place(0, 4, pp=2, tp=2),
            "critic_inf": place(1, 4, dp=3, micro=1),
            "actor_train": place(0, 4, dp=4, ep=4, micro=1),
            "critic_train": place(0, 2, tp=2, sp=True),
            "rew_inf": reward(4),
        },
        megatron=EXPERTS,
        reference="experts",
    ),
    Case(
        name="hybrid",
        num_ranks=4,
        calls={
            "actor_gen": place(0, 4, dp=2, tp=2),
            "ref_inf": place(0, 4, pp=2, tp=2),
            "critic_inf": place(2, 4, pp=2, layers=[5, 3]),
            "actor_train": place(0, 4, tp=2, pp=2, layers=[3, 5], sp=True),
            "critic_train": place(0, 4, dp=2, pp=2),
            "rew_inf": reward(4),
        },
        megatron=HYBRID,
        reference="hybrid",
    ),
)

REFERENCES: Mapping[str, Mapping[str, Any]] = {
    "function": {},
    "small critic": {"critic": SMALL_CRITIC},
    "reward model": {"reward_model": True},
    "experts": {"megatron": EXPERTS},
    "hybrid": {"megatron": HYBRID},
}
"""What the runs of one process differ in."""


def case_tree(case: Case, folder: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    """The options of a case's run, as `RunOptions.from_tree` takes them; writes its plan and prompts into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps(case.plan()))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in data_lines(case.algorithm)))
    return {
        "plan": str(plan),
        "output": str(folder),
        "iterations": iterations,
        "reward": (REWARDS if case.algorithm == "ppo" else SPREAD) if case.scored else None,
        "data": {"prompts": str(prompts), "batch_size": 32 // case.options.get("samples_per_prompt", 1)},
        "algorithm": {"name": case.algorithm, **case.options},
        "megatron": {**MEGATRON, **case.megatron},
        "model": {"critic": {"megatron": dict(case.critic)}} if case.critic else {},
    }


def mean_letter(prompts: list[str], responses: list[str], **columns: list[Any]) -> list[float]:
    """A reward in [0, 1) that differs within a group: without spread, GRPO's gradient is nothing but rounding."""
    return [sum(ord(letter) % 128 for letter in text) / max(len(text), 1) / 128 for text in responses]


def data_lines(algorithm: str) -> list[dict[str, str]]:
    """The data set of an algorithm: prompts, answered prompts or pairs, of unequal lengths."""
    lines = [{"prompt": text} for text in PROMPTS]
    if algorithm == "sft":
        return [line | {"answer": text[::-1] * 2} for line, text in zip(lines, PROMPTS, strict=True)]
    if algorithm in DATA_ONLY:
        return [
            line | {"chosen": text[::-1], "rejected": text[: 1 + len(text) // 2] + "?"}
            for line, text in zip(lines, PROMPTS, strict=True)
        ]
    return lines
