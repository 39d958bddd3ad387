"""Inference and training passes under many layouts against sequence-by-sequence plain PyTorch on one rank."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer import OptimizerConfig

from megatron_real.backend import Head, Minibatch
from megatron_real.batch import Batch
from megatron_real.dataflow import Per
from megatron_real.errors import PlanError, RealError
from megatron_real.hooks import forward
from megatron_real.hooks.model_copy import Training
from megatron_real.hooks.padding import pad_tokens
from tests.harness import run_ranks
from tests.hooks.sequences import make_batch, microbatches_of, seen_by
from tests.hooks.tiny import layouts, make_copy, placement, tiny_role, whole_model

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

COUNT, TEMPERATURE = 16, 0.7
STEP_SIZE = 0.1
DESCENT = Training(
    optimizer=OptimizerConfig(
        optimizer="adam",
        lr=STEP_SIZE * 1e6,
        adam_eps=1e6,  # dwarfs the second moment: Adam becomes plain gradient descent
        adam_beta1=0.0,
        weight_decay=0.0,
        clip_grad=0.0,
    )
)
STEPS = ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15))
LAYOUTS = (
    # (layout, micro-batches per data-parallel rank and step)
    ("d1t1p1@0-0", 1),
    ("d1t1p1@2-2", 3),
    ("d2t1p1@0-1", 2),
    ("d1t2p1@1-2", 2),
    ("d1t1p2@0-1", 3),
    ("d1t1p2v2@2-3", 4),
    ("d2t1p2v2@0-3", 2),
    ("d1t2p2@0-3", 4),
    ("d1t2p2v2s@0-3", 4),
    ("d2t2p1s@0-3", 2),
    ("d1t1p4@0-3", 5),
    ("d1t1p2l1.3@1-2", 2),
)


class WeightedSum:
    """Weights times outputs, and a little entropy where there is some."""

    per = Per.RESPONSE
    stop_above: Mapping[str, float] = {}

    def __init__(self, head: Head) -> None:
        self.head = head

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights = batch.data["weights"]
        loss = (weights * outputs[self.head.value]).sum()
        if self.head is Head.LOGPROBS:
            loss = loss + 0.1 * (weights * outputs["entropy"]).sum()
        return loss, {
            "squares": (outputs[self.head.value] ** 2).sum(),
            "count": weights.new_ones(weights.shape).sum(),
        }


def _plain(model: torch.nn.Module, batch: Batch, head: Head, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Sequence by sequence, without padding or masks of ours; whole logits, torch's own log-softmax."""
    outputs: dict[str, list[torch.Tensor]] = {head.value: [], "entropy": []}
    chosen = batch.select(ids)
    for tokens, prompt in zip(chosen.split("tokens"), chosen.prompt_lengths, strict=True):
        tokens = tokens.unsqueeze(0)
        raw = model(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)[0]
        if head is Head.SCORES:
            outputs["scores"].append(raw[-1])
        elif head is Head.VALUES:
            outputs["values"].append(raw[prompt - 1 : -1, 0])
        else:
            log_softmax = torch.log_softmax(raw[prompt - 1 : -1, :120] / TEMPERATURE, dim=-1)
            outputs["logprobs"].append(log_softmax.gather(-1, tokens[0, prompt:, None]).squeeze(-1))
            outputs["entropy"].append(-(log_softmax.exp() * log_softmax).sum(-1))
    return {name: torch.cat(parts) for name, parts in outputs.items() if parts}


def _reference() -> dict[str, object]:
    """Outputs, then the two training steps by plain autograd and w -= grad, on one rank."""
    batch, found = make_batch(COUNT), {}
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        for head in Head:
            copy = make_copy(parallel, tiny_role(scalar_head=head is not Head.LOGPROBS))
            (model,) = copy.chunks
            with parallel.active():
                found[head.value] = _plain(model, batch, head, batch.ids)[head.value].detach()
                if head is Head.SCORES:
                    continue
                model.requires_grad_(True)
                losses, norms, squares = [], [], []
                for ids in STEPS:
                    chosen = batch.select(ids)
                    count = sum(chosen.response_lengths)
                    loss, statistics = WeightedSum(head).loss(_plain(model, batch, head, ids), chosen)
                    model.zero_grad()
                    (loss / count).backward()
                    losses.append(loss.item() / count)
                    squares.append(statistics["squares"].item() / count)
                    norms.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm().item())
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= STEP_SIZE * parameter.grad
            found[head.value + " steps"] = {
                "loss": losses,
                "grad_norm": norms,
                "squares": squares,
                "count": [1.0, 1.0],
            }
            found[head.value + " weights"] = whole_model(copy)
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, object]:
    return run_ranks(1, _reference)[0]


def _close(found: object, wanted: object, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def _infer_everywhere(reference: dict[str, object]) -> None:
    batch = make_batch(COUNT)
    with layouts() as made:
        for text, count in LAYOUTS:
            parallel = placement(made, text)
            if not parallel.member:
                continue
            last = parallel.pg_collection.pp.rank() == parallel.layout.pp - 1
            parts = microbatches_of(batch.ids, parallel, count)
            ids = tuple(sorted(i for part in parts for i in part))
            actor, critic = (make_copy(parallel, tiny_role(scalar_head=scalar)) for scalar in (False, True))
            for head in Head:
                copy = actor if head is Head.LOGPROBS else critic
                found = forward.infer(copy, seen_by(parallel, batch, ids), parts, head, TEMPERATURE)
                assert (found is not None) == last
                if found is None:
                    continue
                assert found.dtype == torch.float32
                lengths = (1,) * COUNT if head is Head.SCORES else batch.response_lengths
                pieces = reference[head.value].split(lengths)
                _close(found, torch.cat([pieces[i] for i in ids]), f"{head} under {text}")


def test_infer_is_the_same_under_every_layout(reference: dict[str, object]) -> None:
    run_ranks(4, _infer_everywhere, reference)


def _train_everywhere(reference: dict[str, object]) -> None:
    batch = make_batch(COUNT)
    with layouts() as made:
        for text, count in LAYOUTS:
            parallel = placement(made, text)
            for head in (Head.LOGPROBS, Head.VALUES):
                copy = make_copy(parallel, tiny_role(scalar_head=head is Head.VALUES), training=DESCENT)
                if copy is not None:
                    _train_and_compare(
                        copy, batch, head, count, reference[head.value + " steps"], f"{head} {text}"
                    )
                whole = whole_model(copy)
                for key, wanted in reference[head.value + " weights"].items():
                    _close(whole[key], wanted, f"{key} after {head} under {text}")


def _train_and_compare(copy, batch, head, count, wanted, what) -> None:
    parallel = copy.parallel
    minibatches = [
        Minibatch(
            microbatches=microbatches_of(ids, parallel, count),
            num_tokens=sum(batch.select(ids).response_lengths),
            num_sequences=len(ids),
        )
        for ids in STEPS
    ]
    mine = tuple(sorted(i for one in minibatches for part in one.microbatches for i in part))
    seen, objective = seen_by(parallel, batch, mine), WeightedSum(head)
    before = forward.evaluate(copy, seen, minibatches[0], objective, TEMPERATURE)
    found = forward.train(copy, seen, minibatches, objective, TEMPERATURE)
    if parallel.pg_collection.pp.rank() < parallel.layout.pp - 1:
        assert found == before == {}
        return
    # An evaluation is the first step's loss, and leaves the training as it is.
    _close(before, {name: wanted[name][0] for name in ("loss", "squares", "count")}, f"evaluation of {what}")
    assert found.pop("skipped_steps") == 0
    assert found["steps"].keys() == wanted.keys()
    for name, values in wanted.items():
        _close(found["steps"][name], values, f"{name} of {what}")
        _close(found[name], sum(values) / len(values), f"mean {name} of {what}")


def test_training_is_the_same_under_every_layout(reference: dict[str, object]) -> None:
    run_ranks(4, _train_everywhere, reference)


def _refusals() -> None:
    batch = make_batch(6)
    with layouts() as made:
        flat, interleaved = placement(made, "d1t1p1@0-0"), placement(made, "d1t1p2v2@0-1")
        copy = make_copy(interleaved, tiny_role(), training=DESCENT)
        step = Minibatch(microbatches=((0, 1), (2, 3), (4, 5)), num_tokens=1, num_sequences=6)
        with pytest.raises(PlanError, match="multiple of pp=2"):
            forward.train(copy, batch, [step], WeightedSum(Head.LOGPROBS), 1.0)
        if not flat.member:
            return
        actor, critic = make_copy(flat, tiny_role()), make_copy(flat, tiny_role("critic", scalar_head=True))
        for one, head in ((actor, Head.VALUES), (critic, Head.LOGPROBS)):
            with pytest.raises(PlanError, match="head"):
                forward.infer(one, batch, [batch.ids], head, 1.0)
        with pytest.raises(PlanError, match="no optimizer"):
            forward.train(actor, batch, [step], WeightedSum(Head.LOGPROBS), 1.0)
        with pytest.raises(RealError, match="micro-batches"):
            forward.infer(actor, batch, [(0, 1)], Head.LOGPROBS, 1.0)
        empty = Batch(ids=(0,), prompt_lengths=(0,), response_lengths=(2,))
        with pytest.raises(RealError, match="no prompt"):
            forward.infer(actor, empty, [(0,)], Head.LOGPROBS, 1.0)
        learned = tiny_role(position_embedding_type="learned_absolute", max_sequence_length=4)
        with pytest.raises(RealError, match="positions"):
            forward.infer(make_copy(flat, learned), batch, [batch.ids], Head.LOGPROBS, 1.0)


def test_what_cannot_run_is_refused() -> None:
    run_ranks(2, _refusals)


def test_pad_tokens() -> None:
    padded = pad_tokens(torch.tensor([1, 2, 3, 4, 5]), (2, 0, 3), 4)
    assert padded.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]]
