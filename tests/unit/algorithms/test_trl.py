"""Losses and advantages equal those of TRL's trainers on the same random tensors, to 1e-5.

TRL's own methods run: a trainer is made without its constructor, gets the attributes that the method reads, and a model
that returns given log-probabilities. `make cross-check` installs TRL and runs this file; without TRL it is skipped.

Where conventions differ, in TRL 1.16:
    - TRL takes means over a micro-batch, we take sums that the backend divides by the minibatch's tokens or sequences.
      With one micro-batch they are the same. With more, TRL's ``grpo``, ``bnpo`` and ``dr_grpo`` average over
      micro-batches, and its ``dapo`` divides by the tokens of the generated batch, shared out evenly over its steps.
    - TRL's entropy bonus is a mean over tokens under every loss type; ours weighs tokens as the loss does. They agree
      for the mean over tokens.
    - TRL's DPO loss ``sigmoid`` takes no label smoothing. Its ``aot`` applies the same formula to margins that it sorts
      over the micro-batch first: over a single pair that is cDPO.
    - TRL's IPO divides log-ratios by the tokens of a response, and so do we; the rewards that TRL *reports* with it are
      of sums, ours of means.
    - Where a reward is missing TRL sets the advantage to 0 but still counts the tokens; we mask the sequence, so that
      it is not counted either. The same for a group with a single reward.
    - TRL adds 1e-4 to a group's deviation; our `epsilon` is an argument.
    - TRL pads and puts the chosen half of a batch before the rejected one; we pack and put a pair side by side.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_real.algorithms.groups import group_advantages, leave_one_out_advantages
from megatron_real.algorithms.kl import KLEstimator
from megatron_real.algorithms.losses import Average, PolicyObjective, SFTObjective
from megatron_real.algorithms.preference_losses import (
    DPOObjective,
    PreferenceLoss,
    RewardObjective,
)
from megatron_real.backend import MARGIN, Objective
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per

trl = pytest.importorskip("trl", reason="TRL is not installed: make cross-check")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PROMPT = 3
LENGTHS = (5, 9, 1, 7, 4, 4, 12, 2)
LONGEST = max(LENGTHS)
GROUP = 4
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 3.0, 0.25, 0.5])
MISSING = torch.tensor([1.0, math.nan, 0.5, 2.0, math.nan, 3.0, math.nan, math.nan])


def _random(count: int, *scales: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    return [scale * torch.randn(count, generator=generator) for scale in scales]


def _padded(flat: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """[R] -> [S, longest], zeros behind."""
    return pad_sequence(list(flat.split(list(lengths))), batch_first=True)


def _batch(**data: torch.Tensor) -> Batch:
    batch = Batch(
        ids=tuple(range(len(LENGTHS))), prompt_lengths=(PROMPT,) * len(LENGTHS), response_lengths=LENGTHS
    )
    for name, value in data.items():
        batch.put(KeySpec(name=name, per=Per.RESPONSE, dtype="float32"), value)
    return batch


def _mean(objective: Objective, outputs: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, dict]:
    """The loss and the statistics as the backend divides them."""
    loss, found = objective.loss(outputs, batch)
    count = sum(LENGTHS) if objective.per is Per.RESPONSE else len(LENGTHS)
    return loss / count, {name: value.item() / count for name, value in found.items()}


def _trainer(kind: str, **attributes: Any) -> Any:
    """One of TRL's trainers with what every one of its loss methods reads."""
    cls = getattr(trl, kind)
    trainer = cls.__new__(cls)
    one_process = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        process_index=0,
        num_processes=1,
        sync_gradients=True,
        parallelism_config=None,
    )
    common = {
        "accelerator": one_process,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    trainer.__dict__.update(common | attributes)
    return trainer


def _same_gradient(ours: torch.Tensor, theirs: torch.Tensor, leaf: torch.Tensor) -> None:
    first = torch.autograd.grad(ours, leaf, retain_graph=True)[0]
    second = torch.autograd.grad(theirs, leaf)[0]
    assert first.abs().max() > 1e-3
    torch.testing.assert_close(first, second, **CLOSE)


def _halves(values: torch.Tensor) -> torch.Tensor:
    """Sequences side by side in pairs -> the chosen ones, then the rejected ones."""
    return torch.cat([values[::2], values[1::2]])


def _trl_dpo(
    loss_type: str,
    beta: float,
    smoothing: float,
    new: torch.Tensor,
    ref: torch.Tensor,
    lengths: tuple[int, ...],
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """`DPOTrainer._compute_loss` of the pairs with these padded log-probabilities, chosen ones first."""
    trainer = _trainer(
        "DPOTrainer",
        beta=beta,
        label_smoothing=smoothing,
        loss_types=[loss_type],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=True,
    )
    counts, width = torch.tensor(lengths), new.shape[1]
    shifted = torch.zeros(len(lengths), PROMPT - 1)  # the log-probability of the first token is not there
    responses = torch.arange(width) < counts.unsqueeze(1)
    mask = torch.cat([torch.zeros(len(lengths), PROMPT), responses], dim=1).long()
    ref_chosen, ref_rejected = ref.sum(dim=1).chunk(2)
    outputs = SimpleNamespace(
        log_probs=torch.cat([shifted, new], dim=1),
        entropy=torch.zeros(len(lengths), PROMPT - 1 + width),
        mean_logits=torch.zeros(len(lengths), PROMPT - 1 + width),
        is_top1=torch.zeros(len(lengths), PROMPT - 1 + width, dtype=torch.bool),
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = trainer._compute_loss(lambda **kwargs: outputs, inputs, return_outputs=False)
    return loss, trainer._metrics["train"]


@pytest.mark.parametrize("kind", list(PreferenceLoss))
def test_dpo_and_ipo(kind: PreferenceLoss) -> None:
    new, ref = _random(sum(LENGTHS), 1.0, 1.0)
    new.requires_grad_()
    objective = DPOObjective(beta=0.3, kind=kind)
    ours, found = _mean(objective, {"logprobs": new}, _batch(ref_logprobs=ref))
    lengths = tuple(_halves(torch.tensor(LENGTHS)).tolist())
    theirs, metrics = _trl_dpo(kind.value, 0.3, 0.0, _halves(_padded(new)), _halves(_padded(ref)), lengths)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _same_gradient(ours, theirs, new)
    if kind is PreferenceLoss.SIGMOID:
        for name, reported in (
            ("accuracy", "accuracies"),
            ("margin", "margins"),
            ("chosen_reward", "chosen"),
            ("rejected_reward", "rejected"),
        ):
            assert found[name] == pytest.approx(metrics[f"rewards/{reported}"][0], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_dpo_with_label_smoothing(smoothing: float) -> None:
    new, ref = _random(sum(LENGTHS), 1.0, 1.0)
    new.requires_grad_()
    objective = DPOObjective(beta=0.3, label_smoothing=smoothing)
    ours, _ = _mean(objective, {"logprobs": new}, _batch(ref_logprobs=ref))
    policy, reference = _padded(new), _padded(ref)
    pairs = [slice(start, start + 2) for start in range(0, len(LENGTHS), 2)]
    losses = [_trl_dpo("aot", 0.3, smoothing, policy[p], reference[p], LENGTHS[p])[0] for p in pairs]
    theirs = torch.stack(losses).mean()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _same_gradient(ours, theirs, new)


@pytest.mark.parametrize("centering", [None, 0.05])
@pytest.mark.parametrize("with_margins", [False, True])
def test_reward(with_margins: bool, centering: float | None) -> None:
    scores, margins = _random(len(LENGTHS), 1.0, 1.0)
    scores.requires_grad_()
    batch = _batch()
    if with_margins:
        batch.put(MARGIN, margins)
    ours, found = _mean(RewardObjective(centering=centering or 0.0), {"scores": scores}, batch)
    trainer = _trainer("RewardTrainer", args=SimpleNamespace(center_rewards_coefficient=centering))
    inputs = {"attention_mask": torch.ones(len(LENGTHS), 2)}
    if with_margins:
        inputs["margin"] = margins[::2]
    outputs = SimpleNamespace(logits=_halves(scores).unsqueeze(-1))
    theirs = trainer.compute_loss(lambda **kwargs: outputs, inputs)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _same_gradient(ours, theirs, scores)
    for name in ("accuracy", "margin"):
        assert found[name] == pytest.approx(trainer._metrics["train"][name][0], rel=1e-5, abs=1e-5)


def _trl_grpo_loss(
    loss_type: str, objective: PolicyObjective, new: torch.Tensor, entropy: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    trainer = _trainer(
        "GRPOTrainer",
        args=SimpleNamespace(delta=objective.dual_clip, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=objective.clip_low,
        epsilon_high=objective.clip_high,
        beta=objective.kl_coefficient,
        entropy_coef=objective.entropy_coefficient,
        _entropy_bonus_enabled=objective.entropy_coefficient > 0,
        use_adaptive_entropy=False,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=objective.constant,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (_padded(new), _padded(entropy), None),
    )
    mask = _padded(torch.ones(sum(LENGTHS))).long()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), PROMPT, dtype=torch.long),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": torch.stack([part[0] for part in batch.split("advantages")]),
        "old_per_token_logps": _padded(batch.data["logprobs"]),
        "ref_per_token_logps": _padded(batch.data["ref_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(None, inputs), trainer._metrics["train"]


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.2])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize(
    ("loss_type", "average"),
    [("grpo", "sequences"), ("dr_grpo", "constant"), ("bnpo", "tokens"), ("dapo", "tokens")],
)
def test_grpo_losses(loss_type: str, average: str, dual_clip: float | None, kl_coefficient: float) -> None:
    new, old, ref, entropy = _random(sum(LENGTHS), 0.3, 0.3, 0.3, 1.0)
    new.requires_grad_()
    (advantages,) = _random(len(LENGTHS), 1.0)
    objective = PolicyObjective(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
        kl_coefficient=kl_coefficient,
        kl_estimator=KLEstimator.K3,
        entropy_coefficient=0.1 if average == "tokens" else 0.0,
        average=Average(average),
        constant=LONGEST if average == "constant" else None,
    )
    per_token = advantages.repeat_interleave(torch.tensor(LENGTHS))
    batch = _batch(logprobs=old, ref_logprobs=ref, advantages=per_token)
    ours, found = _mean(objective, {"logprobs": new, "entropy": entropy}, batch)
    theirs, metrics = _trl_grpo_loss(loss_type, objective, new, entropy, batch)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _same_gradient(ours, theirs, new)
    if average == "tokens":
        assert found["entropy"] == pytest.approx(metrics["entropy"][0], rel=1e-5, abs=1e-5)
        if kl_coefficient:
            assert found["reference_kl"] == pytest.approx(metrics["kl"][0], rel=1e-5)
        if dual_clip is None:  # TRL counts what the plain clip cuts off
            assert found["clip_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"][0], rel=1e-5)


def _trl_advantages(kind: str, rewards: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """The advantages of `_generate_and_score_completions`, with generation and reward functions replaced."""
    count = rewards.numel()
    ids = [[1, 2]] * count
    generated = (ids, ids, ["x"] * count)
    if kind == "GRPOTrainer":
        generated = (ids, ids, None, ["x"] * count, None, {}, None, None)
    trainer = _trainer(
        kind,
        args=SimpleNamespace(
            per_device_train_batch_size=count,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        num_generations=GROUP,
        num_iterations=1,
        beta=0.0,
        use_vllm=False,
        environment_factories=None,
        environments=None,
        tools=None,
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *args: rewards.unsqueeze(1).clone(),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (torch.zeros(count, 2), None, None),
        reward_weights=torch.ones(1),
        reward_funcs=[None],
        reward_func_names=["reward"],
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        **attributes,
    )
    prompts = [{"prompt": "x"} for _ in range(count)]
    return trainer._generate_and_score_completions(prompts)["advantages"]


@pytest.mark.parametrize("rewards", [REWARDS, MISSING], ids=["all", "missing"])
@pytest.mark.parametrize("scale", [True, False])
def test_grpo_advantages(scale: bool, rewards: torch.Tensor) -> None:
    ours, kept = group_advantages(rewards, GROUP, scale=scale, epsilon=1e-4)
    theirs = _trl_advantages(
        "GRPOTrainer",
        rewards,
        scale_rewards="group" if scale else "none",
        multi_objective_aggregation="sum_then_normalize",
    )
    torch.testing.assert_close(ours.float(), theirs, **CLOSE)
    assert ours[kept].abs().min() > 1e-3


@pytest.mark.parametrize("rewards", [REWARDS, MISSING], ids=["all", "missing"])
def test_rloo_advantages(rewards: torch.Tensor) -> None:
    ours, kept = leave_one_out_advantages(rewards, GROUP)
    theirs = _trl_advantages("RLOOTrainer", rewards, reward_clip_range=None, normalize_advantages=False)
    torch.testing.assert_close(ours.float(), theirs, **CLOSE)
    assert ours[kept].abs().min() > 1e-3


def test_sft() -> None:
    (logprobs,) = _random(sum(LENGTHS), 1.0)
    logprobs.requires_grad_()
    ours, _ = _mean(SFTObjective(), {"logprobs": logprobs, "entropy": logprobs}, _batch())
    trainer = _trainer(
        "SFTTrainer",
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
    )
    mask = _padded(torch.ones(sum(LENGTHS))).bool()
    outputs = SimpleNamespace(
        log_probs=_padded(logprobs),
        label_mask=mask,
        entropy=torch.zeros(mask.shape),
        is_top1=torch.zeros(mask.shape, dtype=torch.bool),
    )
    inputs = {"labels": mask.long(), "attention_mask": mask.long()}
    theirs = trainer.compute_loss(lambda **kwargs: outputs, inputs)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _same_gradient(ours, theirs, logprobs)
