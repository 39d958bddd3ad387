"""PPO under many plans and with every kind of model: tokens, losses, gradient norms and weights against one process.

    python benchmarks/invariance.py            # make invariance; every case, or those whose names are given

One JSON line per plan. fp32, dropout off, learning rate 1e-3, three iterations. Other algorithms:
benchmarks/algorithm_invariance.py.

Limits: tokens equal, |loss error| <= 1e-5 + 1e-4 |loss|, gradient norms (before clipping) 1e-4 relative, weights 1e-4
and their change 1e-2 (relative L2 of each tensor). The last line compares bf16 with and without `drop_trained_weights`,
bit for bit.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from megatron_real.hooks.cpu_device import install_cpu_device  # noqa: E402  (before Megatron is imported)

logging.getLogger("megatron.core").setLevel(logging.WARNING)
install_cpu_device()

import torch  # noqa: E402

from megatron_real.algorithms.registry import find_algorithm  # noqa: E402
from megatron_real.config import RunOptions  # noqa: E402
from megatron_real.dataflow import Graph  # noqa: E402
from megatron_real.hooks.launch import build_executor, prepare  # noqa: E402
from megatron_real.process_groups import ProcessGroups  # noqa: E402
from tests.harness import run_ranks  # noqa: E402

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

REWARDS, SPREAD = "rewards:vowel_share", "benchmarks.invariance:mean_letter"

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


def run_case(case: Case, folder: Path, iterations: int = ITERATIONS) -> list[dict[str, Any]]:
    """Run a case; what every rank saw."""
    return run_ranks(case.num_ranks, run_tree, case_tree(case, folder, iterations), iterations, timeout_s=600)


def run_tree(tree: dict[str, Any], iterations: int) -> dict[str, Any]:
    """On a rank: run what `tree` describes; its tokens and statistics by iteration, its weights before and after."""
    job = prepare(RunOptions.from_tree(tree))
    executor, backend = build_executor(job, ProcessGroups())
    tokens = record_tokens(backend)
    before = owned_weights(backend)
    calls = [
        executor.run_iteration(iteration, job.data.batch(iteration)).calls for iteration in range(iterations)
    ]
    executor.transfers.fence()
    return {"tokens": tokens, "calls": calls, "before": before, "after": owned_weights(backend)}


Tokens = dict[tuple[str, int], list[int]]
"""By generate call and sequence id."""


def record_tokens(backend: Any) -> list[Tokens]:
    """The list into which the backend's generations go from now on, one entry per iteration."""
    tokens: list[Tokens] = []
    last = -1
    generate = backend.generate

    def recording_generate(copy: Any, call: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        batch = generate(copy, call, iteration, *args, **kwargs)
        if "tokens" in batch.data:
            if iteration != last:
                tokens.append({})
                last = iteration
            for i, part in zip(batch.ids, batch.split("tokens"), strict=True):
                tokens[-1][call.name, i] = part.tolist()
        return batch

    backend.generate = recording_generate
    return tokens


def owned_weights(backend: Any) -> dict[str, list[tuple[Any, tuple[int, ...], torch.Tensor]]]:
    """The boxes of the trained models that this rank owns."""
    found = {}
    for model in backend.program.graph.models:
        copy = backend.home(model)
        if copy is not None and backend.program.graph.trained(model):
            copy.reload()
            found[model] = [
                (shard.key, shard.box, view.detach().float().clone())
                for shard, view in copy.shards.resolve().items()
            ]
    return found


def assemble(results: list[dict[str, Any]], when: str) -> dict[str, torch.Tensor]:
    """Whole tensors by name, one per layer, without padding rows of the vocabulary."""
    whole: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    pieces = [
        (f"{model}.{key}", box, value)
        for result in results
        for model, boxes in result[when].items()
        for key, box, value in boxes
    ]
    for name, box, value in pieces:
        ends = [offset + size for offset, size in zip(box.offset, value.shape, strict=True)]
        shapes[name] = [max(old, end) for old, end in zip(shapes.get(name, ends), ends, strict=True)]
    for name, box, value in pieces:
        tensor = whole.setdefault(name, torch.full(shapes[name], torch.nan))
        tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, value.shape, strict=True))] = value
    named: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        if ".layers." in name and not re.search(r"\.layers\.\d+\.", name):
            named |= {f"{name}[{layer}]": part for layer, part in enumerate(tensor)}
        elif name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")):
            named[name] = tensor[:VOCABULARY]
        else:
            named[name] = tensor
    return named


def sampled_tokens(results: list[dict[str, Any]]) -> list[Tokens]:
    """Tokens of every sequence, by iteration; ranks that hold the same sequence must agree."""
    iterations = max(len(result["tokens"]) for result in results)
    merged: list[Tokens] = [{} for _ in range(iterations)]
    for result in results:
        for iteration, sequences in enumerate(result["tokens"]):
            for sequence, tokens in sequences.items():
                if merged[iteration].setdefault(sequence, tokens) != tokens:
                    raise AssertionError(f"ranks disagree on sequence {sequence} of iteration {iteration}")
    return merged


def steps(results: list[dict[str, Any]], call: str, name: str) -> list[float]:
    """A statistic of every optimizer step of a train call."""
    found: list[float] = []
    for iteration in range(len(results[0]["calls"])):
        reporting = [
            result["calls"][iteration][call] for result in results if call in result["calls"][iteration]
        ]
        assert len(reporting) == 1, f"one rank reports {call}, not {len(reporting)}"
        found += reporting[0]["steps"][name]
    return found


def compare(case: Case, reference: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of output."""
    line: dict[str, Any] = {
        "plan": case.name,
        "tokens_equal": sampled_tokens(reference) == sampled_tokens(results),
    }
    loss, loss_ok, norm = 0.0, True, 0.0
    trained = [call.name for call in case.graph.calls if call.trains]
    for call in trained:
        for expected, found in zip(steps(reference, call, "loss"), steps(results, call, "loss"), strict=True):
            loss = max(loss, abs(found - expected))
            loss_ok &= abs(found - expected) <= 1e-5 + 1e-4 * abs(expected)
        for expected, found in zip(
            steps(reference, call, "grad_norm"), steps(results, call, "grad_norm"), strict=True
        ):
            norm = max(norm, abs(found - expected) / max(abs(expected), 1e-12))
    before, after = assemble(reference, "before"), assemble(reference, "after")
    mine_before, mine = assemble(results, "before"), assemble(results, "after")
    if not all(torch.equal(before[name], mine_before[name]) for name in before):
        raise AssertionError(f"{case.name}: initial weights depend on the plan")
    weights = max(_relative(mine[name], after[name]) for name in after)
    update = max(_relative(mine[name] - before[name], after[name] - before[name]) for name in after)
    line |= {
        "max_err_loss": loss,
        "max_rel_err_grad_norm": norm,
        "max_rel_err_weights": weights,
        "max_rel_err_update": update,
        "optimizer_steps": len(steps(results, trained[0], "loss")),
        "ok": bool(line["tokens_equal"] and loss_ok and norm <= 1e-4 and weights <= 1e-4 and update <= 1e-2),
    }
    return line


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def compare_bits(plain: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> dict[str, Any]:
    """bf16 with weights dropped and rebuilt against the same plan without."""
    first, second = assemble(plain, "after"), assemble(dropped, "after")
    same = {
        "tokens_equal": sampled_tokens(plain) == sampled_tokens(dropped),
        "losses_equal": all(
            steps(plain, call, name) == steps(dropped, call, name)
            for call in ("actor_train", "critic_train")
            for name in ("loss", "grad_norm")
        ),
        "weights_equal": first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first),
    }
    return {"plan": "demo, bf16, drop_trained_weights against without", **same, "ok": all(same.values())}


def main() -> None:
    """Every case, or those whose names are given; exit code 1 if one is outside its limits."""
    wanted = sys.argv[1:]
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [case for case in CASES if not wanted or case.name in wanted]
        references = {
            kind: run_case(
                Case(name="reference", num_ranks=1, calls=ONE, **REFERENCES[kind]),
                folder / f"reference-{kind}",
            )
            for kind in sorted({case.reference for case in cases})
        }
        lines = []
        for index, case in enumerate(cases):
            lines.append(compare(case, references[case.reference], run_case(case, folder / str(index))))
            print(json.dumps(lines[-1]), flush=True)
        bf16 = (
            []
            if wanted and "bf16" not in wanted
            else [
                run_case(
                    Case(name="bf16", num_ranks=4, calls=demo_calls(drop=drop), megatron={"bf16": True}),
                    folder / f"bf16-{drop}",
                )
                for drop in (False, True)
            ]
        )
        if bf16:
            lines.append(compare_bits(*bf16))
            print(json.dumps(lines[-1]), flush=True)
        good = all(line["ok"] for line in lines)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
