"""Stages of a plan for one's own trainer: weights arrive, versions advance, ranks outside see nothing."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import ConfigError, PeerError, PlanError, RealError
from megatron_real.hooks import realloc_pairs
from megatron_real.hooks.parallel_state import active_layout
from megatron_real.hooks.session import Session, graph_of_plan
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.plan_search.presets import symmetric
from tests.harness import run_ranks
from tests.hooks.tiny import tiny_role

pytestmark = pytest.mark.megatron

PLAN = """{"algorithm": "own", "cluster": {"devices_per_node": 3}, "calls": {
  "actor_gen":   {"ranks": [0, 3], "layout": {"dp": 3}},
  "actor_inf":   {"ranks": [1, 3], "layout": {"tp": 2}},
  "actor_train": {"ranks": [0, 2], "layout": {"pp": 2}}}}"""


def provider(**arguments):
    """A model of the user's own making: untied, learned positions, no rotary."""
    return GPTModel(
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=16,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
        **arguments,
    )


def _logits(stage):
    tokens = torch.arange(8).expand(1, -1)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = stage.model[0](tokens, tokens, mask)
    if stage.layout.tp > 1:
        parts = [torch.empty_like(logits) for _ in range(stage.layout.tp)]
        dist.all_gather(parts, logits.contiguous(), group=stage.pg_collection.tp)
        logits = torch.cat(parts, dim=-1)
    return logits


def _session_main():
    real = Session(Plan.loads(PLAN))
    role = tiny_role(provider=provider, padded_vocab_size=128, vocab_size=128)
    real.add_model("actor", role, optimizer=OptimizerConfig(optimizer="adam", lr=1e-3))
    rank = dist.get_rank()
    seen, planned, refreshed = [], [], []
    monkeypatch = pytest.MonkeyPatch()
    plan = realloc_pairs.build_realloc_plan
    monkeypatch.setattr(
        realloc_pairs,
        "build_realloc_plan",
        lambda *tables, **given: planned.append(0) or plan(*tables, **given),
    )
    copy = real.backend.copy(stage_key(real, "actor_gen"))
    weight = copy.chunks[0].embedding.word_embeddings.weight
    copy.chunks[0].refresh_cache = lambda: refreshed.append(weight[0, 0].item())
    for step in range(2):
        with real.call("actor_inf") as stage:
            assert (stage.model is None) == (rank == 0)
            assert (active_layout() is None) == (rank == 0)
            if stage.model is not None:
                seen.append(_logits(stage))
        with real.call("actor_gen") as stage:
            seen.append(_logits(stage))
            copy = real.backend.copy(stage_key(real, "actor_gen"))
        assert active_layout() is None
        assert copy.segments.allocated_bytes == 0
        with real.call("actor_train") as stage:  # a "training": every weight grows by a known factor
            if stage.model is not None:
                for parameter in stage.model[0].parameters():
                    parameter.data.mul_(1.01)
        if rank in (0, 1):
            assert real.backend.home("actor").stamp.version == step + 1
    assert len(planned) == 2, "one plan for each pair of copies"
    assert len(set(refreshed)) == 2, "caches are made again from the weights of each arrival"
    monkeypatch.undo()
    with pytest.raises(RealError, match="no call 'actor_score'"), real.call("actor_score"):
        pass
    real.close()
    return seen


def stage_key(real, name):
    return real.program.plan.copy_of(real.program.graph.call(name))


def test_weights_arrive_in_every_layout_and_versions_advance():
    seen = run_ranks(3, _session_main)
    before, after = seen[0]
    assert not torch.allclose(before, after)
    for rank in (1, 2):  # actor_inf, actor_gen, then both again after the training
        for found, expected in zip(seen[rank], (before, before, after, after), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_graph_of_names():
    graph = graph_of_plan(Plan.loads(PLAN))
    assert [(call.model, str(call.type)) for call in graph.calls] == [
        ("actor", "generate"),
        ("actor", "inference"),
        ("actor", "train"),
    ]
    with pytest.raises(PlanError, match=r"calls\.actor_score: found a name without a kind"):
        graph_of_plan(Plan.loads(PLAN.replace("actor_inf", "actor_score")))


@pytest.mark.parametrize("reference", [True, False])
def test_graph_of_ppo_with_and_without_a_reference(reference):
    graph = ppo_graph(reference=reference)
    plan = symmetric(graph, ClusterSpec(devices_per_node=2))
    assert graph_of_plan(plan) == graph
    plan.check(graph_of_plan(plan))


APART = """{"algorithm": "own", "cluster": {"devices_per_node": 2}, "calls": {
  "actor_train": {"ranks": [1, 2], "layout": {"dp": 1}}}}"""


def _refused_on_rank_1():
    real = Session(Plan.loads(APART))
    try:
        real.add_model("actor", tiny_role(), optimizer=OptimizerConfig(optimizer="sgd", lr=1e-3))
    except RealError as error:
        return type(error), str(error)
    return None


def test_a_copy_that_one_rank_cannot_build_is_an_error_of_all_ranks() -> None:
    elsewhere, here = run_ranks(2, _refused_on_rank_1)
    assert here[0] is ConfigError
    assert elsewhere[0] is PeerError
    assert "Rank 1" in elsewhere[1]
    assert here[1] in elsewhere[1]
