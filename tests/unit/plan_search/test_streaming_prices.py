"""Estimates of plans whose weights are streamed, stored or parked: what they say, and that they say it everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_real.plan import Plan
from megatron_real.plan_search import report
from megatron_real.plan_search.explain import problem_of
from megatron_real.plan_search.planner import Estimate
from megatron_real.plan_search.problem import Choice, Option
from tests.unit.plan_search.small_plan import planner, split_plan


def changed(plan: Plan, **calls: dict[str, Any]) -> Plan:
    """`plan` with other fields in some placements."""
    placements = {
        name: placement.model_copy(update=calls.get(name, {})) for name, placement in plan.calls.items()
    }
    return plan.model_copy(update={"calls": placements})


def estimate(**calls: dict[str, Any]) -> Estimate:
    found = planner()
    return found.estimate(changed(split_plan(found), **calls))


def test_a_streamed_realloc_is_exposed_in_part() -> None:
    plain, streamed = estimate(), estimate(actor_gen={"stream": True})
    before, after = plain.reallocs["actor_gen"], streamed.reallocs["actor_gen"]
    assert before.exposed_s == before.seconds == after.seconds
    option = planner().prices.with_seconds(
        planner().graph.call("actor_gen"),
        Option(
            layout=streamed.plan.calls["actor_gen"].parallel, num_microbatches=2, stream=True, seconds=0.0
        ),
        streamed.plan.calls["actor_gen"].mesh,
    )
    assert after.exposed_s == pytest.approx(option.exposed_s(after.seconds))
    assert 0 < after.exposed_s < after.seconds
    assert streamed.period_s < plain.period_s
    rows = dict(streamed.plan.predicted.model_extra["instructions"][0:1])  # type: ignore[union-attr]
    assert rows == {"realloc:actor_gen": after.exposed_s}
    lines = "\n".join(report.estimate_lines(planner(), streamed))
    assert f"{report.seconds_text(after.exposed_s)} of {report.seconds_text(after.seconds)} exposed" in lines
    assert report.notes_of(streamed.plan.calls["actor_gen"]) == "stream"
    # Its buffers are there beside the activations.
    held = [dict(owners) for name, owners in streamed.memory.of(0).history if name == "run:actor_gen"]
    assert all(owners["realloc:actor_gen staging"] > 0 for owners in held)


@pytest.mark.parametrize(
    "calls",
    [
        {"actor_gen": {"stream": True}, "critic_inf": {"stream": True}},
        {"ref_inf": {"offload": "node"}, "rew_inf": {"offload": "node"}},
        {
            "actor_train": {"offload": "host", "drop_trained_weights": True},
            "critic_train": {"offload": "host"},
        },
    ],
)
def test_the_search_and_the_report_agree(calls: dict[str, dict[str, Any]]) -> None:
    """The search counts the fullest rank of a window, and the set-up not at all."""
    found = planner()
    told = estimate(**calls)
    prices, problem = found.prices, problem_of(found)
    assignment = {}
    for call in found.graph.calls:
        placement = told.plan.calls[call.name]
        fields = ("num_microbatches", "recompute", "offload", "drop_trained_weights", "stream")
        bare = Option(
            layout=placement.parallel, seconds=0.0, **{name: getattr(placement, name) for name in fields}
        )
        option = prices.with_seconds(call, prices.with_bytes(call, bare), placement.mesh)
        assignment[call.name] = Choice(placement.mesh, option)
    evaluation = problem.evaluate(assignment, told.plan.order)
    peak = max(size for name, size in _timeline(told) if name != "set-up")
    assert peak <= evaluation.peak_bytes <= peak * 1.05
    # Data is folded into calls there.
    assert evaluation.period_s == pytest.approx(told.period_s, rel=0.02)


def _timeline(told: Estimate) -> list[tuple[str, int]]:
    return [entry for group in told.memory.groups for entry in group.timeline]


def test_a_model_in_the_store_costs_no_device_memory_between_calls() -> None:
    plain, stored = estimate(), estimate(ref_inf={"offload": "node"}, actor_train={"offload": "host"})
    spec = planner().prices.models["ref"]
    shard = spec.shape.num_layers * spec.shape.hidden_size
    less = plain.memory.of(0).static_bytes - stored.memory.of(0).static_bytes
    assert less > shard
    names = [name for name, _ in stored.memory.of(0).history]
    assert {"reload:ref", "reload:actor.state", "offload:actor.state", "save"} <= set(names)
    assert "offload:ref" not in names, "it is released"
    assert report.notes_of(stored.plan.calls["ref_inf"]) == "offload to node"
