"""Objectives over any lengths: cuts add up, order and masked sequences do not matter, for the gradient as for the loss.

Sequences come in pairs, of which some are masked, so that one strategy serves every objective.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_real.algorithms.kl import KLEstimator
from megatron_real.algorithms.losses import Average, PolicyObjective, SFTObjective, ValueObjective
from megatron_real.algorithms.preference_losses import (
    DPOObjective,
    PreferenceLoss,
    RewardObjective,
)
from megatron_real.backend import KEPT, MARGIN, Head, Objective
from megatron_real.batch import Batch
from megatron_real.dataflow import KeySpec, Per

POLICY = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5}
OBJECTIVES: dict[str, Objective] = {
    "policy": PolicyObjective(**POLICY, entropy_coefficient=0.1),
    "policy-sequences": PolicyObjective(**POLICY, average=Average.SEQUENCES, kl_coefficient=0.2),
    "policy-constant": PolicyObjective(
        **POLICY, average=Average.CONSTANT, constant=9, kl_coefficient=0.2, kl_estimator=KLEstimator.K2
    ),
    "value": ValueObjective(clip=0.2, coefficient=0.5),
    "sft": SFTObjective(),
    "dpo": DPOObjective(beta=0.3, label_smoothing=0.1),
    "ipo": DPOObjective(beta=0.3, kind=PreferenceLoss.IPO),
    "reward": RewardObjective(centering=0.05),
}
OUTPUTS = {
    Head.LOGPROBS: ("logprobs", "entropy"),
    Head.VALUES: ("values",),
    Head.SCORES: ("scores",),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
quickly = settings(deadline=None, max_examples=25)
PAIRS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()).filter(lambda pair: pair[0] + pair[1]),
    min_size=1,
    max_size=6,
)
"""Response tokens of the two sequences, and whether the pair is kept."""
SEED = st.integers(0, 2**31)


def _whole(pairs: list[tuple[int, int, bool]], seed: int) -> Batch:
    """All keys and, as ``out_...``, all outputs of a minibatch."""
    lengths = [length for first, second, _ in pairs for length in (first, second)]
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(
        ids=tuple(range(len(lengths))), prompt_lengths=(1,) * len(lengths), response_lengths=tuple(lengths)
    )
    for name in (
        *("logprobs", "ref_logprobs", "advantages", "values", "returns"),
        *("out_logprobs", "out_entropy", "out_values"),
    ):
        value = 0.5 * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
        batch.put(KeySpec(name=name, per=Per.RESPONSE, dtype="float64"), value)
    for name in (MARGIN.name, "out_scores"):
        value = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        batch.put(KeySpec(name=name, per=Per.SEQUENCE, dtype="float64"), value)
    batch.put(KEPT, torch.tensor([float(kept) for *_, kept in pairs for _ in range(2)]))
    return batch


def _evaluate(objective: Objective, batch: Batch) -> tuple[dict[str, float], dict[int, torch.Tensor]]:
    """Loss and statistics, and the gradient with respect to each sequence's outputs."""
    names = OUTPUTS[objective.head]
    outputs = {name: batch.data[f"out_{name}"].clone().requires_grad_() for name in names}
    loss, statistics = objective.loss(outputs, batch)
    gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
    by_sequence: dict[int, torch.Tensor] = {}
    lengths = list(batch.lengths(Per.SEQUENCE if objective.head is Head.SCORES else Per.RESPONSE))
    for output, gradient in zip(outputs.values(), gradients, strict=True):
        parts = (torch.zeros_like(output) if gradient is None else gradient).split(lengths)
        for index, part in zip(batch.ids, parts, strict=True):
            by_sequence[index] = torch.cat([by_sequence.get(index, part[:0]), part])
    return {"loss": loss.item(), **{n: v.item() for n, v in statistics.items()}}, by_sequence


def _ids(pairs: list[int]) -> list[int]:
    return [index for pair in pairs for index in (2 * pair, 2 * pair + 1)]


@every_objective
@quickly
@given(pairs=PAIRS, seed=SEED, data=st.data())
def test_any_cut_in_any_order_adds_up(
    objective: Objective, pairs: list[tuple[int, int, bool]], seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(pairs))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=3)))
    whole = _whole(pairs, seed)
    wanted, gradients = _evaluate(objective, whole)
    found = dict.fromkeys(wanted, 0.0)
    for start, stop in zip([0, *cuts], [*cuts, len(pairs)], strict=True):
        sums, parts = _evaluate(objective, whole.select(_ids(sorted(order[start:stop]))))
        for name, value in sums.items():
            found[name] += value
        for index, part in parts.items():
            torch.testing.assert_close(part, gradients[index], rtol=1e-12, atol=0)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    permuted, parts = _evaluate(objective, whole.select(_ids(list(order))))
    assert permuted == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    for index, part in parts.items():
        torch.testing.assert_close(part, gradients[index], rtol=1e-12, atol=0)


@every_objective
@quickly
@given(pairs=PAIRS, seed=SEED)
def test_masked_sequences_change_nothing(
    objective: Objective, pairs: list[tuple[int, int, bool]], seed: int
) -> None:
    """Their own data does not matter, and without them everything is the same."""
    whole, other = _whole(pairs, seed), _whole(pairs, seed + 1)
    kept = [pair for pair, (*_, keep) in enumerate(pairs) if keep]
    masked = [pair for pair, (*_, keep) in enumerate(pairs) if not keep]
    wanted, gradients = _evaluate(objective, whole)
    mixed = Batch.merge([whole.select(_ids(kept)), other.select(_ids(masked))])
    found, theirs = _evaluate(objective, mixed)
    alone, _ = _evaluate(objective, whole.select(_ids(kept), [k for k in whole.data if k != KEPT.name]))
    assert found == wanted
    assert alone == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    for index, gradient in gradients.items():
        assert torch.equal(gradient, theirs[index])
        if index // 2 in masked:
            assert not gradient.any()
