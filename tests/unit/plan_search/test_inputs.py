"""What a user asks of the planner: checks, defaults of roles, workloads, and the way back from a plan's record."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_real.algorithms.graphs import (
    dpo_graph,
    grpo_graph,
    ppo_graph,
    remax_graph,
    reward_graph,
    sft_graph,
)
from megatron_real.errors import ConfigError
from megatron_real.plan import Plan
from megatron_real.plan_search.inputs import LengthInputs, PlanInputs, SearchInputs
from megatron_real.plan_search.planner_inputs import (
    changed_inputs,
    planner_from_predicted,
    planner_of,
    recorded_inputs,
    with_changes,
)
from megatron_real.plan_search.presets import symmetric
from megatron_real.plan_search.problem import Limits
from megatron_real.plan_search.space import SpaceOptions

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 257,
    "position_embedding_type": "rope",
    "bf16": True,
}
OTHER = {**TINY, "num_layers": 3}
WORKLOAD: dict[str, Any] = {"batch_size": 16, "prompt": {"length": 32}, "response": {"length": 16}}


def _tree(**changes: Any) -> dict[str, Any]:
    base = {
        "cluster": {"devices_per_node": 2, "device": "h100"},
        "workload": WORKLOAD,
        "model": {"actor": {"name": "tiny", "megatron": TINY}},
    }
    return {**base, **changes}


def _layers(tree: dict[str, Any]) -> dict[str, int]:
    models = planner_of(PlanInputs.from_tree(tree), ppo_graph()).prices.models
    return {role: spec.shape.num_layers for role, spec in models.items()}


def _refused(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        planner_of(PlanInputs.from_tree(tree), ppo_graph())
    return str(caught.value)


def test_all_problems_come_in_one_error_with_their_names() -> None:
    workload = {**WORKLOAD, "batch_size": 0, "batchsize": 3, "response": {"spread": 0.5}}
    text = _refused(
        _tree(
            workload=workload,
            search={"strategi": "exact"},
            pins={"actor_gen": {"layouts": {}, "recompute": "all"}},
        )
    )
    assert "5 problems" in text
    for path in (
        "workload.batch_size: found 0",
        "workload.batchsize: found an unknown option; expected one of batch_size, prompt",
        "search.strategi: found an unknown option; expected one of strategy, time_s",
        "pins.actor_gen.layouts: found an unknown option; expected one of ranks, layout",
        "pins.actor_gen.recompute: found 'all'",
    ):
        assert path in text
    assert "workload.response: found no lengths; expected one of length, mean, file" in _refused(
        _tree(workload={**WORKLOAD, "response": {"spread": 0.5}})
    )


def test_problems_of_models_name_the_option() -> None:
    text = _refused(
        _tree(model={"actor": {"name": "x", "megatron": {**TINY, "num_layers": 0, "vocab_size": None}}})
    )
    assert "2 problems" in text
    assert "model.actor.megatron.num_layers: found 0" in text
    assert "model.actor.megatron.vocab_size: found nothing" in text
    assert "model.actor: found no model" in _refused(_tree(model={}))
    assert "model.critc: found a role" in _refused(
        _tree(model={**_tree()["model"], "critc": {"megatron": {"lr": 1}}})
    )
    assert "cluster.device: found 'v100'" in _refused(
        _tree(cluster={"devices_per_node": 2, "device": "v100"})
    )


def test_roles_that_are_not_given_are_like_others() -> None:
    assert _layers(_tree()) == {"actor": 2, "reward": 2, "ref": 2, "critic": 2}
    named = {"actor": {"name": "a", "megatron": TINY}, "critic": {"name": "b", "megatron": OTHER}}
    assert _layers(_tree(model=named)) == {"actor": 2, "reward": 3, "ref": 2, "critic": 3}
    # As a training has it: other roles are like the actor, but for their own arguments.
    trained = {"critic": {"megatron": {"num_layers": 5}}}
    assert _layers(_tree(model=trained, megatron=TINY)) == {"actor": 2, "reward": 2, "ref": 2, "critic": 5}
    line = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "9",
            "--position-embedding-type", "rope"]  # fmt: skip
    assert _layers(_tree(model={}, megatron=line))["ref"] == 4
    assert "megatron: found arguments of the actor" in _refused(_tree(megatron=TINY))


def test_critic_and_reward_have_a_scalar_head() -> None:
    models = planner_of(PlanInputs.from_tree(_tree()), ppo_graph(extra_rewards=1)).prices.models
    heads = {role: spec.shape.scalar_head for role, spec in models.items()}
    assert heads == {"actor": False, "ref": False, "critic": True, "reward": True, "reward2": True}
    # Of a model of one's own what it makes tells: here a number per sequence. Its name tells nothing.
    base, names = grpo_graph(), {"reward": "judge", "ref": "critic"}
    judged = replace(
        base, calls=tuple(replace(call, model=names.get(call.model or "", call.model)) for call in base.calls)
    )
    models = planner_of(PlanInputs.from_tree(_tree()), judged).prices.models
    assert {role: spec.shape.scalar_head for role, spec in models.items()} == {
        "actor": False,
        "judge": True,
        "critic": False,
    }
    own = replace(sft_graph(), scalar_heads=("actor",))
    (model,) = planner_of(PlanInputs.from_tree(_tree()), own).prices.models.values()
    assert model.shape.scalar_head


def test_lengths(tmp_path: Path) -> None:
    def mean(**values: Any) -> float:
        return LengthInputs(**values).distribution("workload.response").mean

    assert mean(length=7, mean=3) == 7
    assert mean(mean=3.4) == 3
    assert mean(mean=30, cap=20) == 20
    spread = LengthInputs(mean=100, spread=0.5, cap=400).distribution("workload.response")
    assert spread.cap == 400
    assert spread.mean == pytest.approx(100, rel=0.02)
    assert mean(lengths=[10, 20], weights=[3, 1]) == 12.5
    path = tmp_path / "lengths.txt"
    path.write_text("10\n30\n30\n90\n")
    assert mean(file=path, length=7) == 40
    assert mean(file=path, cap=30) == 25
    path.write_text("[10, 20]")
    assert mean(file=path) == 15
    for text in ("", "[]", "ten", "0\n3", '["a"]'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"workload\.response\.file"):
            mean(file=path)


def test_a_call_works_on_as_many_sequences_as_its_algorithm_says() -> None:
    inputs = PlanInputs.from_tree(_tree(workload={**WORKLOAD, "group_size": 4}))
    assert planner_of(inputs, grpo_graph()).workload.num_sequences == 64
    for graph, pairs in (
        (dpo_graph(), True),
        (reward_graph(), True),
        (sft_graph(), False),
        (remax_graph(), False),
    ):
        found = planner_of(PlanInputs.from_tree(_tree()), graph).workload
        assert (found.unit, found.num_sequences) == ((2, 32) if pairs else (1, 16)), graph.name
    options = {"name": "grpo", "samples_per_prompt": 8, "num_minibatches": 2, "num_epochs": 3}
    same = planner_of(PlanInputs.from_tree(_tree(algorithm=options)), grpo_graph()).workload
    assert (same.group_size, same.num_minibatches, same.num_epochs) == (8, 2, 3), "as a training has them"
    with pytest.raises(ConfigError, match=r"algorithm.num_epochs: found 0; expected a whole number"):
        planner_of(PlanInputs.from_tree(_tree(algorithm={"name": "grpo", "num_epochs": 0})), grpo_graph())
    for pairs in (True, False):
        own = replace(sft_graph(), name="mine:ALGORITHM", pairs=pairs)
        assert planner_of(PlanInputs.from_tree(_tree()), own).workload.num_sequences == (32 if pairs else 16)
    assert "workload.unit: found an unknown option" in _refused(_tree(workload={**WORKLOAD, "unit": 2}))
    assert "workload.function_s.rew: found no such call" in _refused(
        _tree(workload={**WORKLOAD, "function_s": {"rew": 0.1}})
    )


def test_options_of_the_search_are_those_of_the_search() -> None:
    mine = SearchInputs()
    names = {"strategy"} | {field.name for field in (*fields(Limits), *fields(SpaceOptions))}
    assert names - set(SearchInputs.model_fields) == {"keep_layouts"}  # presets set it themselves
    assert set(SearchInputs.model_fields) <= names
    for field in (*fields(Limits), *fields(SpaceOptions)):
        if field.name in SearchInputs.model_fields and field.default is not MISSING:
            assert getattr(mine, field.name) == field.default, field.name
    assert SearchInputs(time_s=5, max_tp=2).limits.time_s == 5
    assert SearchInputs(time_s=5, max_tp=2).space.max_tp == 2


def _planned(tree: dict[str, Any]) -> tuple[Plan, Any]:
    planner = planner_of(PlanInputs.from_tree(tree), ppo_graph())
    estimate = planner.estimate(symmetric(ppo_graph(), planner.cluster.spec, num_microbatches=4))
    return Plan.loads(estimate.plan.dumps()), planner


@pytest.mark.parametrize(
    "response", [{"length": 16}, {"mean": 40, "spread": 0.7, "cap": 128}], ids=["one length", "spread"]
)
def test_a_plan_records_enough_to_make_its_planner_again(response: dict[str, Any]) -> None:
    plan, planner = _planned(_tree(workload={**WORKLOAD, "response": response, "num_minibatches": 2}))
    again = planner_from_predicted(plan, ppo_graph())
    assert json.loads(json.dumps(again.inputs())) == json.loads(json.dumps(planner.inputs()))
    assert again.inputs_hash() == planner.inputs_hash() == (plan.predicted.model_extra or {})["inputs_hash"]  # type: ignore[union-attr]
    assert again.estimate(plan).period_s == pytest.approx(plan.predicted.iteration_s, rel=1e-6)  # type: ignore[union-attr]
    assert changed_inputs(plan, again) == ()


def test_a_model_that_follows_another_one_is_priced_and_recorded() -> None:
    plan, plain = _planned(_tree())
    assert plan.predicted is not None
    planner = planner_of(PlanInputs.from_tree(_tree()), ppo_graph(reference_ema=0.1, reference_ema_every=2))
    found = planner.estimate(plan.model_copy(update={"predicted": None}))
    assert "mix:ref" in {span.name for span in found.simulation.spans}
    assert found.period_s > plain.estimate(plan).period_s
    assert planner.inputs()["updates"] == [{"target": "ref", "source": "actor", "mix": 0.1, "every": 2}]
    (change,) = changed_inputs(plan, planner)
    assert change.startswith("updates: nothing -> [{'target': 'ref'")


def test_other_inputs_are_named() -> None:
    plan, _ = _planned(_tree())
    base = recorded_inputs(plan)
    assert base is not None
    tree = with_changes(
        base,
        {
            "workload": {"batch_size": 32, "response": {"mean": 99}, "prompt": None},
            "cluster": {"device": "h200"},
            "model": {"critic": {"name": "other", "megatron": OTHER}, "ref": None},
        },
    )
    planner = planner_of(PlanInputs.from_tree(tree), ppo_graph())
    changes = changed_inputs(plan, planner)
    assert "cluster.device: h100 -> h200" in changes
    assert "workload.batch_size: 16 -> 32" in changes
    assert "workload.response: 16 tokens -> 99 tokens" in changes
    assert "models.critic.shape.num_layers: 2 -> 3" in changes
    assert not any(change.startswith(("workload.prompt", "models.actor", "models.ref")) for change in changes)


def test_a_plan_without_a_record_cannot_be_priced_from_it() -> None:
    plan = _planned(_tree())[0].model_copy(update={"predicted": None})
    assert changed_inputs(plan, _planned(_tree())[1]) == ()
    with pytest.raises(ConfigError, match="found no inputs in predicted"):
        planner_from_predicted(plan, ppo_graph())


def test_a_profile_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    assert "profile" in _refused(_tree(profile=path))
