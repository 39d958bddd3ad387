"""One iteration of PPO on Megatron, one process, against plain PyTorch that shares no code with ours.

Given are the initial weights, the sampled tokens and the rewards. Everything else is computed twice: log-probs of the
sampled tokens, reference log-probs, values, advantages, returns, and for each optimizer step the loss, the norm of the
gradients and, for the first, the gradients; at the end the weights and their changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from benchmarks.invariance_cases import MEGATRON, Case, place
from tests.e2e.plain_ppo import PlainShape, reference_iteration
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

VOCAB_SIZE, END = 257, 256
CASES: dict[str, dict[str, Any]] = {
    "grouped queries, untied": {
        "megatron": {"num_layers": 2, "weight_decay": 0.1},
        "algorithm": {"entropy_coefficient": 0.01, "temperature": 0.8, "top_k": 50},
        "critic": {"lr": 3e-3},
    },
    "one group, tied, small critic": {
        "megatron": {
            "num_layers": 3,
            "num_query_groups": 1,
            "untie_embeddings_and_output_weights": False,
            "rotary_percent": 0.5,
            "clip_grad": 0.05,
        },
        "algorithm": {
            "gamma": 0.95,
            "lam": 0.8,
            "clip_ratio": 0.05,
            "value_clip": 0.02,
            "value_coefficient": 0.5,
            "kl_coefficient": 0.3,
            "reward_bias": 0.2,
            "reward_scale": 2.0,
            "reward_clip": 0.5,
        },
        "critic": {
            "num_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_query_groups": 2,
            "ffn_hidden_size": 24,
            "lr": 1e-2,
        },
    },
}


class Notes:
    """What the one rank notes down while it runs."""

    def __init__(self) -> None:
        self.batch: dict[str, Any] = {}
        self.gradients: dict[str, dict[str, torch.Tensor]] = {}
        self.ratio_deviation: list[float] = []
        """Largest of each micro-batch of the actor's training, in order."""

    def watch_algorithm(self, algorithm: Any) -> None:
        prepare, objective = algorithm.prepare, algorithm.objective

        def noting_prepare(call: Any, iteration: int, scalars: Any) -> Any:
            prepared, metrics = prepare(call, iteration, scalars)
            self.batch = {name: [part.tolist() for part in prepared.split(name)] for name in prepared.data}
            return prepared, metrics

        def noting_objective(call: Any) -> Any:
            found = objective(call)
            return found if call.model == "critic" else _NotingObjective(found, self.ratio_deviation)

        algorithm.prepare, algorithm.objective = noting_prepare, noting_objective

    def watch_gradients(self, copy: Any) -> None:
        step = copy.optimizer.step

        def noting_step() -> Any:
            (chunk,) = copy.chunks
            found = {name: p.main_grad.clone() for name, p in chunk.named_parameters()}
            self.gradients.setdefault(copy.key.model, found)
            return step()

        copy.optimizer.step = noting_step


class _NotingObjective:
    def __init__(self, objective: Any, notes: list[float]) -> None:
        self._objective, self._notes = objective, notes
        self.head, self.per, self.stop_above = objective.head, objective.per, objective.stop_above

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any) -> Any:
        ratios = (outputs["logprobs"].detach() - batch.data["logprobs"]).exp()
        self._notes.append((ratios - 1.0).abs().max().item())
        return self._objective.loss(outputs, batch)


def _perturb(copy: Any, seed: int) -> None:
    """Move the weights away from any symmetry and from the reference's, and make the end of a text likely."""
    generator = torch.Generator().manual_seed(seed)
    (chunk,) = copy.chunks
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            if parameter.shape[0] > END and (
                name.startswith("output") or chunk.share_embeddings_and_output_weights
            ):
                parameter[END] *= 5.0
    copy.weights_arrived(0)


def _run(trees: Mapping[str, Any]) -> dict[str, Any]:
    from megatron_real.config import RunOptions
    from megatron_real.hooks.launch import build_executor, prepare
    from megatron_real.process_groups import ProcessGroups
    from tests.e2e.cases import copy_weights

    results = {}
    for name, tree in trees.items():
        job = prepare(RunOptions.from_tree(tree))
        executor, backend = build_executor(job, ProcessGroups())
        notes = Notes()
        notes.watch_algorithm(job.algorithm)
        copies = {model: backend.home(model) for model in ("actor", "critic", "ref")}
        for seed, model in enumerate(("actor", "critic")):
            _perturb(copies[model], seed)
            notes.watch_gradients(copies[model])
        before = {model: copy_weights(copy) for model, copy in copies.items()}
        generated = []
        generate = backend.generate

        def noting_generate(
            *args: Any, generate: Any = generate, generated: list[Any] = generated, **kwargs: Any
        ) -> Any:
            generated.append(generate(*args, **kwargs))
            return generated[-1]

        backend.generate = noting_generate  # type: ignore[method-assign]
        calls = executor.run_iteration(0, job.data.batch(0)).calls
        (batch,) = generated
        tokens = dict(
            zip(batch.ids, zip(batch.split("tokens"), batch.prompt_lengths, strict=True), strict=True)
        )
        results[name] = {
            "samples": [(t[:p].tolist(), t[p:].tolist()) for t, p in (tokens[i] for i in sorted(tokens))],
            "batch": notes.batch,
            "gradients": notes.gradients,
            "ratio_deviation": notes.ratio_deviation,
            "calls": calls,
            "before": before,
            "after": {model: copy_weights(copies[model]) for model in ("actor", "critic")},
        }
        backend.close()
    return results


@pytest.fixture(scope="module")
def runs(cpu_device: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.e2e.cases import tree_of

    trees = {}
    for index, (name, case) in enumerate(CASES.items()):
        one = Case(
            name=name,
            num_ranks=1,
            calls={"*": place(0, 1, micro=2), "rew_inf": place(0, 1, micro=1)},
            critic=case["critic"],
            megatron=case["megatron"],
        )
        trees[name] = tree_of(
            one,
            tmp_path_factory.mktemp(f"case{index}"),
            data={"batch_size": 14},
            algorithm={"num_minibatches": 3, "num_epochs": 2, "max_new_tokens": 12, **case["algorithm"]},
        )
    (found,) = run_ranks(1, _run, trees)
    return {name: {**found[name], "tree": trees[name]} for name in found}


def _shape(megatron: Mapping[str, Any]) -> PlainShape:
    return PlainShape(
        num_layers=megatron["num_layers"],
        num_attention_heads=megatron["num_attention_heads"],
        num_query_groups=megatron["num_query_groups"],
        vocab_size=VOCAB_SIZE,
        rotary_percent=megatron.get("rotary_percent", 1.0),
    )


@pytest.fixture(scope="module")
def expected(runs: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, run in runs.items():
        actor = {**MEGATRON, **CASES[name]["megatron"]}
        critic = {**actor, **CASES[name]["critic"]}
        algorithm = {
            k: v for k, v in run["tree"]["algorithm"].items() if k not in ("name", "max_new_tokens", "top_k")
        }
        results[name] = reference_iteration(
            run["before"]["actor"],
            run["before"]["critic"],
            run["before"]["ref"],
            _shape(actor),
            run["samples"],
            [reward for (reward,) in run["batch"]["rewards"]],
            {
                **algorithm,
                "actor_learning_rate": actor["lr"],
                "critic_learning_rate": critic["lr"],
                "weight_decay": actor["weight_decay"],
                "clip_grad": actor["clip_grad"],
            },
            critic_shape=dataclasses.replace(_shape(critic)),
        )
    return results


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_lengths_vary(runs: dict[str, Any], name: str) -> None:
    samples = runs[name]["samples"]
    assert len({len(prompt) for prompt, _ in samples}) > 3
    assert len({len(response) for _, response in samples}) > 3
    ended = [response for _, response in samples if response[-1] == END]
    assert ended
    assert all(END not in response[:-1] for _, response in samples)
    assert all(len(response) == 12 for _, response in samples if response[-1] != END)


@each_case
def test_inference_and_advantages(runs: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    found = runs[name]["batch"]
    for key in ("logprobs", "ref_logprobs", "values", "advantages", "returns"):
        for mine, plain in zip(found[key], expected[name][key], strict=True):
            assert mine == pytest.approx(plain, rel=1e-4, abs=2e-5), key
    assert found["logprobs"] != found["ref_logprobs"], "the reference is another model"


@each_case
def test_ratio_is_one_before_the_first_step(runs: dict[str, Any], name: str) -> None:
    num_microbatches = 2
    assert len(runs[name]["ratio_deviation"]) == 6 * num_microbatches
    assert max(runs[name]["ratio_deviation"][:num_microbatches]) <= 1e-4
    assert max(runs[name]["ratio_deviation"][num_microbatches:]) > 1e-3, "the steps move the policy"
    assert runs[name]["calls"]["actor_train"]["steps"]["ratio_deviation"][0] <= 1e-4


@each_case
@pytest.mark.parametrize("model", ["actor", "critic"])
def test_losses_and_gradients(runs: dict[str, Any], expected: dict[str, Any], name: str, model: str) -> None:
    steps, plain = runs[name]["calls"][f"{model}_train"]["steps"], expected[name][model]
    assert len(plain["losses"]) == 6
    assert steps["loss"] == pytest.approx(plain["losses"], rel=1e-4, abs=1e-5)
    assert steps["grad_norm"] == pytest.approx(plain["grad_norms"], rel=1e-4)
    gradients = runs[name]["gradients"][model]
    assert gradients.keys() == plain["gradients"].keys()
    for key, gradient in gradients.items():
        assert _relative(gradient, plain["gradients"][key]) <= 1e-4, key


@each_case
@pytest.mark.parametrize("model", ["actor", "critic"])
def test_weights(runs: dict[str, Any], expected: dict[str, Any], name: str, model: str) -> None:
    before, after = runs[name]["before"][model], runs[name]["after"][model]
    plain = expected[name][model]["weights"]
    assert after.keys() == plain.keys()
    for key, weight in after.items():
        assert _relative(weight, plain[key]) <= 1e-4, key
        update, plain_update = weight.double() - before[key].double(), plain[key] - before[key].double()
        assert plain_update.norm() > 0, key
        assert _relative(update, plain_update) <= 1e-2, key
