"""What a change of plan does to copies, against what the two programs have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.errors import PlanError
from megatron_real.hooks.replan import check_change, copy_changes
from megatron_real.plan import Plan
from megatron_real.program import Program, compile_program

GRAPH = ppo_graph("model")
PLACES = [
    {"ranks": [0, 4], "layout": {"dp": 4}},
    {"ranks": [0, 4], "layout": {"tp": 4}},
    {"ranks": [0, 2], "layout": {"pp": 2}},
    {"ranks": [2, 4], "layout": {"tp": 2}},
]


def _program(places: list[int], recompute: str = "none") -> Program:
    calls: dict[str, Any] = {
        call.name: dict(PLACES[place]) for call, place in zip(GRAPH.calls, places, strict=True)
    }
    calls["actor_train"]["recompute"] = recompute
    plan = Plan.model_validate({"algorithm": "ppo", "cluster": {"devices_per_node": 4}, "calls": calls})
    return compile_program(GRAPH, plan)


places = st.lists(st.integers(0, len(PLACES) - 1), min_size=len(GRAPH.calls), max_size=len(GRAPH.calls))


@given(places, places, st.sampled_from(["none", "full"]))
def test_the_copies_of_the_new_program_are_there_afterwards(
    before: list[int], after: list[int], recompute: str
) -> None:
    old, new = _program(before), _program(after, recompute)
    for model in GRAPH.models:
        change = copy_changes(model, old, new)
        copies = {key for key in old.copies() if key.model == model}
        for key in change.closed:
            copies.remove(key)
        trained = GRAPH.trained(model)
        if change.moves and trained:
            copies.remove(change.old_home)
            assert change.built[0] == change.new_home
        for key in change.built:
            assert key not in copies
            copies.add(key)
        if change.moves and not trained and change.closes_old_home:
            copies.remove(change.old_home)
        assert copies == {key for key in new.copies() if key.model == model}
        assert change.moves == (
            change.old_home != change.new_home or (model == "actor" and recompute == "full")
        )
        assert change.kept == copies.difference(change.built)
        if not change.moves:
            assert change.old_home in change.kept


def test_another_algorithm_or_cluster_is_refused() -> None:
    plan = _program([0] * len(GRAPH.calls)).plan
    check_change(plan, plan, source="b.json")
    other = plan.model_copy(update={"algorithm": "grpo"})
    with pytest.raises(PlanError, match=r"b.json: algorithm: found grpo.*ppo, as in the plan before it"):
        check_change(plan, other, source="b.json")
    larger = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"devices_per_node": 8})})
    with pytest.raises(PlanError, match=r"cluster: found 8 devices.*4 devices"):
        check_change(plan, larger, source="b.json")
    fewer = plan.model_copy(update={"calls": {"actor_train": plan.calls["actor_train"]}})
    with pytest.raises(PlanError, match=r"calls: found actor_train; expected"):
        check_change(plan, fewer, source="b.json")
