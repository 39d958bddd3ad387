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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from megatron_real.hooks.cpu_device import install_cpu_device  # noqa: E402  (before Megatron is imported)

logging.getLogger("megatron.core").setLevel(logging.WARNING)
install_cpu_device()

import torch  # noqa: E402

from benchmarks.invariance_cases import (  # noqa: E402
    CASES,
    ITERATIONS,
    ONE,
    REFERENCES,
    VOCABULARY,
    Case,
    case_tree,
    demo_calls,
)
from megatron_real.config import RunOptions  # noqa: E402
from megatron_real.hooks.launch import build_executor, prepare  # noqa: E402
from megatron_real.process_groups import ProcessGroups  # noqa: E402
from tests.harness import run_ranks  # noqa: E402


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
