"""Which calls an evaluation has, and when one is due."""

from __future__ import annotations

import pytest

from megatron_real.algorithms import graphs
from megatron_real.backend import Goal
from megatron_real.dataflow import Graph
from megatron_real.errors import PlanError
from megatron_real.runtime.evaluation.evaluator import EvaluationConfig, evaluated_calls

REWARD = Goal(metric="reward")


@pytest.mark.parametrize(
    ("graph", "goal", "calls"),
    [
        (graphs.ppo_graph(), REWARD, ("actor_gen", "rew_inf")),
        (graphs.ppo_graph("function"), REWARD, ("actor_gen", "rew_inf")),
        (graphs.remax_graph(), REWARD, ("actor_gen", "rew_inf")),
        (
            graphs.remax_graph(),
            Goal(metric="greedy_reward", key="greedy_rewards"),
            ("greedy_gen", "greedy_rew_inf"),
        ),
        (graphs.dpo_graph(), Goal(metric="accuracy"), ("ref_inf", "actor_train")),
        (graphs.sft_graph(), Goal(metric="loss", higher_is_better=False), ("actor_train",)),
    ],
)
def test_what_makes_the_goal_and_what_that_needs(graph: Graph, goal: Goal, calls: tuple[str, ...]) -> None:
    assert evaluated_calls(graph, goal) == calls


def test_a_goal_that_nothing_makes_is_refused() -> None:
    with pytest.raises(PlanError, match="no call that makes 'marks', the key of the algorithm's goal"):
        evaluated_calls(graphs.grpo_graph(), Goal(metric="mark", key="marks"))


@pytest.mark.parametrize(
    ("every", "due"), [(0, [0, 7]), (1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6, 7]), (20, [0, 7])]
)
def test_one_before_and_one_after_and_every_so_often(every: int, due: list[int]) -> None:
    config = EvaluationConfig(num_iterations=7, every=every)
    assert [iteration for iteration in range(8) if config.due(iteration)] == due
