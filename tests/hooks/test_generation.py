"""Generation with a key-value cache against a loop of full forward passes, one sequence at a time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_real.backend import Head, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call, CallType
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, ConfigError, PlanError, RealError
from megatron_real.hooks import forward, generation
from megatron_real.hooks.activations import decode_bytes
from megatron_real.hooks.sampling import DrawKey, sample, uniforms
from tests.harness import run_ranks
from tests.hooks.sequences import make_batch, microbatches_of, seen_by
from tests.hooks.tiny import layouts, make_copy, placement, tiny_role

pytestmark = [pytest.mark.megatron, pytest.mark.dist]

COUNT, VOCAB, ITERATION = 9, 13, 4
PIECES = ("a", "b", "ab", "", "c", "ca", "x", "y", "z", "bc", "d", "e", "f")
"""The text of each token: stop strings may begin and end within one, and span several."""


def _text(ids) -> str:
    return "".join(PIECES[token] for token in ids)


CALL = Call(name="actor_gen", model="actor", type=CallType.GENERATE)
SAMPLINGS = (
    Sampling(max_new_tokens=12, end_token=3, greedy=True),
    Sampling(max_new_tokens=9, end_token=5, temperature=3.0, seed=11),
    Sampling(max_new_tokens=7, end_token=-1, top_k=6, top_p=0.9, temperature=1.2, seed=2),
    Sampling(max_new_tokens=1, end_token=0),
    Sampling(max_new_tokens=12, end_token=3, temperature=3.0, seed=5, stop=("bca", "d", "aa"), decode=_text),
)
EVERY, ONE = (0, 1, 2, 3, 4), (1,)
LAYOUTS = (
    # (layout, micro-batches per data-parallel rank, which samplings)
    ("d1t1p1@0-0", 1, ONE),
    ("d1t1p1@3-3", 4, EVERY),
    ("d1t2p1@1-2", 2, (0, 1)),
    ("d2t1p1@0-1", 2, ONE),
    ("d1t1p2@2-3", 1, ONE),
    ("d1t1p2@0-1", 3, (1, 2, 4)),
    ("d1t2p2@0-3", 2, EVERY),
    ("d2t1p2@0-3", 3, ONE),
    ("d1t1p4@0-3", 5, ONE),
)


def _role(**changes):
    return tiny_role(vocab_size=VOCAB, padded_vocab_size=16, **changes)


def _prompts() -> Batch:
    return make_batch(COUNT, vocab_size=VOCAB, responses=False)


def _naive(model: torch.nn.Module, prompts: Batch, sampling: Sampling) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of each response."""
    draws = DrawKey(seed=sampling.seed, call=CALL.name, iteration=ITERATION)
    results = []
    for sequence, prompt in zip(prompts.ids, prompts.split("tokens"), strict=True):
        tokens, logprobs = prompt.tolist(), []
        for _ in range(sampling.max_new_tokens):
            inputs = torch.tensor([tokens])
            logits = model(inputs, torch.arange(len(tokens)).unsqueeze(0), None)[0, -1:, :VOCAB]
            uniform = uniforms(draws, torch.tensor([sequence]), torch.tensor([len(tokens)]))
            token = sample(logits, uniform, sampling).item()
            tokens.append(token)
            logprobs.append(torch.log_softmax(logits[0] / sampling.temperature, dim=-1)[token].item())
            if token == sampling.end_token or any(
                stop in _text(tokens[len(prompt) :]) for stop in sampling.stop
            ):
                break
        results.append((tokens[len(prompt) :], logprobs))
    return results


def _reference(samplings=SAMPLINGS, **changes) -> list[list[tuple[list[int], list[float]]]]:
    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        copy = make_copy(parallel, _role(**changes))
        with parallel.active(), torch.no_grad():
            return [_naive(copy.chunks[0], _prompts(), sampling) for sampling in samplings]


@pytest.fixture(scope="module")
def reference() -> list[list[tuple[list[int], list[float]]]]:
    return run_ranks(1, _reference)[0]


def _generate_and_compare(copy, sampling: Sampling, count: int, wanted) -> None:
    parallel, prompts = copy.parallel, _prompts()
    parts = microbatches_of(prompts.ids, parallel, count)
    ids = tuple(i for part in parts for i in part)
    what = f"{sampling} under {parallel.name}"
    found = generation.generate(copy, CALL, ITERATION, seen_by(parallel, prompts, ids), parts, sampling)
    assert found.ids == ids
    assert found.response_lengths == tuple(len(wanted[i][0]) for i in ids), what
    if parallel.pg_collection.pp.rank() < parallel.layout.pp - 1:
        return
    for i, prompt, tokens, logprobs in zip(
        ids, prompts.select(ids).split("tokens"), found.split("tokens"), found.split("logprobs"), strict=True
    ):
        assert tokens.tolist() == [*prompt.tolist(), *wanted[i][0]], what
        torch.testing.assert_close(logprobs, torch.tensor(wanted[i][1]), rtol=1e-5, atol=1e-5)
    if parallel.layout.pp == 1:  # elsewhere the stages before would have to be given the tokens first
        again = forward.infer(copy, found, parts, Head.LOGPROBS, sampling.temperature)
        torch.testing.assert_close(found.data["logprobs"], again, rtol=1e-5, atol=1e-5)


def _generate_everywhere(reference) -> None:
    with layouts() as made:
        for text, count, which in LAYOUTS:
            copy = make_copy(placement(made, text), _role())
            if copy is not None:
                for index in which:
                    _generate_and_compare(copy, SAMPLINGS[index], count, reference[index])


def test_tokens_are_those_of_full_forward_passes_under_every_layout(reference) -> None:
    lengths = {len(tokens) for tokens, _ in reference[1]}
    assert len(lengths) > 2, "the case must have early ends"
    assert max(lengths) == 9, "the case must have late ends"
    ends = {_why(tokens, SAMPLINGS[4]) for tokens, _ in reference[4]}
    assert ends >= {"stop", "end token"}, "the case must have both"
    run_ranks(4, _generate_everywhere, reference)


def _why(tokens: list[int], sampling: Sampling) -> str:
    """What ended a response."""
    if tokens[-1] == sampling.end_token:
        return "end token"
    return "limit" if len(tokens) == sampling.max_new_tokens else "stop"


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


def _generate_with_experts(reference) -> None:
    with layouts() as made:
        for text, count in (("d2t1p1e2@1-2", 2), ("d2t1p2e2@0-3", 2)):
            copy = make_copy(placement(made, text), _role(**MOE))
            if copy is not None:
                _generate_and_compare(copy, SAMPLINGS[1], count, reference[0])


def test_replicas_that_share_experts_keep_step() -> None:
    run_ranks(4, _generate_with_experts, run_ranks(1, _reference_with_experts)[0])


def _reference_with_experts():
    return _reference(SAMPLINGS[1:2], **MOE)


def _memory_and_refusals(reference) -> None:
    prompts = _prompts()
    with layouts() as made:
        parallel = placement(made, "d1t2p1@0-1")
        for role in (_role(), _role(num_query_groups=8)):
            copy = make_copy(parallel, role)
            held = _observed_cache_bytes(copy, prompts)
            copy.ledger = MemoryLedger()
            generation.generate(copy, CALL, ITERATION, prompts, [prompts.ids], SAMPLINGS[1])
            longest = max(prompts.prompt_lengths) + SAMPLINGS[1].max_new_tokens
            working = decode_bytes(copy, [(COUNT, min(prompts.prompt_lengths), longest)])
            assert copy.ledger.peak_bytes - working == held > 0
            assert copy.ledger.current_bytes == 0
        copy.ledger = MemoryLedger(held - 1)
        with pytest.raises(CapacityError, match="key-value cache"):
            generation.generate(copy, CALL, ITERATION, prompts, [prompts.ids], SAMPLINGS[1])
        wrong = [(make_copy(parallel, _role(scalar_head=True)), "scalar head")]
        wrong += [
            (make_copy(placement(made, text), _role()), "generate call")
            for text in ("d1t2p1s@0-1", "d1t1p2v2@0-1")
        ]
        for one, match in wrong:
            with pytest.raises(PlanError, match=match):
                generation.generate(one, CALL, ITERATION, prompts, [prompts.ids], SAMPLINGS[0])
        bad = Sampling(max_new_tokens=1, end_token=0, temperature=0)
        with pytest.raises(ConfigError, match="temperature"):
            generation.generate(copy, CALL, ITERATION, prompts, [prompts.ids], bad)
        with pytest.raises(RealError, match="micro-batches"):
            generation.generate(copy, CALL, ITERATION, prompts, [prompts.ids[1:]], SAMPLINGS[0])


def _observed_cache_bytes(copy, prompts: Batch) -> int:
    """Bytes of the tensors that Megatron put into the context."""
    seen: list[int] = []
    original = generation._decode_all

    def spy(copy, links, decodes, sampling) -> None:
        original(copy, links, decodes, sampling)
        pairs = [pair for one in decodes for pair in one.context.key_value_memory_dict.values()]
        seen.append(sum(tensor.nbytes for pair in pairs for tensor in pair))

    generation._decode_all = spy
    try:
        generation.generate(copy, CALL, ITERATION, prompts, [prompts.ids], SAMPLINGS[1])
    finally:
        generation._decode_all = original
    return seen[0]


def test_cache_is_booked_and_bad_calls_are_refused(reference) -> None:
    run_ranks(2, _memory_and_refusals, reference)


def _half_precision() -> None:
    prompts = _prompts()
    with layouts() as made:
        copy = make_copy(placement(made, "d1t2p1@0-1"), _role(dtype=torch.bfloat16, init_method_std=0.1))
        found = generation.generate(copy, CALL, ITERATION, prompts, [prompts.ids], SAMPLINGS[1])
        again = forward.infer(copy, found, [prompts.ids], Head.LOGPROBS, SAMPLINGS[1].temperature)
        assert found.data["logprobs"].dtype == again.dtype == torch.float32
        torch.testing.assert_close(found.data["logprobs"], again, rtol=0, atol=0.02)


def test_half_precision_gives_fp32_logprobs() -> None:
    run_ranks(2, _half_precision)
