"""The summary of a hand-worked run of two iterations on four ranks, and of rewards."""

from __future__ import annotations

import math

import pytest

from megatron_real.backend import Goal
from megatron_real.runtime.reports.summary import concurrent_s, summarize
from megatron_real.trace import Span, SpanKind


def span(rank: int, name: str, start_s: float, end_s: float, **facts: object) -> Span:
    kinds = {
        "run": "run",
        "realloc": "realloc",
        "transfer": "transfer",
        "save": "save",
        "evaluation": "other",
    }
    kind = kinds[name.partition(":")[0]]
    return Span(
        rank=rank, iteration=0, name=name, kind=SpanKind(kind), start_s=start_s, end_s=end_s, facts=facts
    )


def one_iteration() -> list[Span]:
    """Ranks 0-1 train the actor from 6 to 10, ranks 2-3 the critic from 7 to 9, after a generation on all four.

    | second | 0   1   2   3   4   5   6   7   8   9   10 |
    | rank 0 | generation......|rr|  .  |actor train......|
    | rank 1 | generation..........|rr..|actor train......|
    | rank 2 | generation......|transfer   |critic|
    | rank 3 | generation......|transfer|critic...|
    """
    train = {"type": "train"}
    return [
        *(span(rank, "run:actor_gen", 0, end, type="generate") for rank, end in enumerate([4, 5, 4, 4])),
        span(0, "realloc:actor_train", 4, 5.5),  # waits for rank 1 until 5
        span(1, "realloc:actor_train", 5, 6),
        # Rank 0 is in nothing from 5.5 to 6.
        *(span(rank, "run:actor_train", 6, 10, **train) for rank in (0, 1)),
        span(0, "transfer:actor_gen>critic_train", 10, 10.25, side="send"),
        span(2, "transfer:other>critic_train", 4, 7, side="receive"),
        span(3, "transfer:other>critic_train", 4, 6.5, side="receive"),
        span(1, "transfer:other>critic_train", 10, 10.25, side="send"),
        span(2, "run:critic_train", 7, 9, **train),
        span(3, "run:critic_train", 6.5, 9.5, **train),
    ]


def test_times_of_one_iteration() -> None:
    summary = summarize(one_iteration(), [{"iteration": 0, "reward": 1.0}])
    # Ranks live for 10.25, 10.25, 9 and 9.5 seconds.
    total = 39.0
    assert summary["ranks"] == 4
    assert summary["iteration_s"] == 10.25
    assert (
        summary["concurrent_s_per_iteration"] == 2.0
    )  # 7 to 9: before, rank 2 still waited; after, it was done
    assert summary["shorter_train_s"] == 3.0
    assert summary["wait_share"] == pytest.approx(1.0 / total)  # rank 0 from 4 to 5
    assert summary["realloc_s_per_iteration"] == 1.0  # rank 1; rank 0 only half a second
    assert summary["transfer_s_per_iteration"] == 3.0  # rank 2
    assert summary["runtime_share"] == pytest.approx(0.5 / total)
    assert summary["run_share"] == pytest.approx((17 + 8 + 5) / total)
    assert summary["calls"]["actor_gen"] == {
        "s_per_iteration": 5.0,
        "share": pytest.approx(17 / total),
        "ranks": [0, 1, 2, 3],
    }
    assert summary["calls"]["critic_train"]["s_per_iteration"] == 3.0
    assert list(summary["calls"]) == ["actor_gen", "actor_train", "critic_train"]
    shares = ("run_share", "realloc_share", "transfer_share", "wait_share", "offload_share", "runtime_share")
    assert sum(summary[name] for name in shares) == pytest.approx(1.0)


def test_two_iterations_and_a_save() -> None:
    spans = one_iteration()
    shifted = [
        Span(
            rank=item.rank,
            iteration=1,
            name=item.name,
            kind=item.kind,
            start_s=item.start_s + 12,
            end_s=item.end_s + 12,
            facts=item.facts,
        )
        for item in spans
    ]
    saves = [span(rank, "save", 10.25, 12) for rank in range(4)]  # ranks 2 and 3 were done before
    summary = summarize([*spans, *saves, *shifted], [])
    assert summary["save_s"] == 1.75
    assert summary["iteration_s"] == pytest.approx(10.25)  # (22.25 - 1.75) / 2
    assert summary["concurrent_s_per_iteration"] == pytest.approx(2.0)
    # Twice half a second on rank 0, and what ranks 2 and 3 idled before the save.
    assert summary["runtime_share"] == pytest.approx((1.0 + 1.25 + 0.75) / (20.5 + 20.5 + 19.25 + 19.75))


def test_rewards() -> None:
    rewards = [1, 2, 3, 4, 5, 100, 11, 12, 13, 14, 15]
    metrics = [{"iteration": i, "reward": r, "explained_variance": 0.1 * i} for i, r in enumerate(rewards)]
    summary = summarize([], metrics)
    assert (summary["goal_first"], summary["goal_last"]) == (3.0, 13.0)
    assert summary["goal_standard_error"] == pytest.approx(math.sqrt(2.5 / 5 + 2.5 / 5))
    assert summary["explained_variance"] == pytest.approx(0.8)
    assert "iteration_s" not in summary


@pytest.mark.parametrize(
    ("rewards", "first", "last", "has_error"),
    [([], None, None, False), ([4.0], 4.0, 4.0, False), ([1.0, 3.0, 5.0, 9.0], 2.0, 7.0, True)],
)
def test_rewards_of_short_runs(rewards: list[float], first: float, last: float, has_error: bool) -> None:
    summary = summarize([], [{"reward": reward} for reward in rewards])
    assert (summary["goal_first"], summary["goal_last"]) == (first, last)
    assert (summary["goal_standard_error"] is not None) == has_error
    assert summary["explained_variance"] is None


def test_a_goal_of_a_call_and_its_evaluations() -> None:
    metrics = [
        {"iteration": i, "eval/accuracy": 0.5 + 0.1 * i, "eval/accuracy_error": 0.01 * (i + 1)}
        for i in range(3)
    ]
    for row, accuracy in zip(metrics[:2], (0.4, 0.6), strict=True):
        row["actor_train/accuracy"] = accuracy
    summary = summarize([], metrics, Goal(metric="accuracy"))
    assert (summary["goal"], summary["goal_first"], summary["goal_last"]) == ("accuracy", 0.4, 0.6)
    assert summary["iterations"] == 2, "the last row is of the evaluation after them"
    assert (summary["eval_first"], summary["eval_last"], summary["eval_best"]) == pytest.approx(
        (0.5, 0.7, 0.7)
    )
    assert (summary["eval_first_error"], summary["eval_last_error"]) == pytest.approx((0.01, 0.03))
    summary = summarize([], metrics, Goal(metric="accuracy", higher_is_better=False))
    assert summary["eval_best"] == 0.5
    assert "eval_first" not in summarize([], metrics)


def test_evaluations_count_in_no_share() -> None:
    spans = one_iteration()
    start = min(one.start_s for one in spans)
    for rank in {one.rank for one in spans}:
        spans.append(span(rank, "evaluation", start - 4.0, start))
    summary, without = summarize(spans, []), summarize(one_iteration(), [])
    assert summary["evaluation_s"] == 4.0
    assert summary.pop("evaluation_s") != without.pop("evaluation_s")
    assert summary == without


def test_concurrency() -> None:
    assert concurrent_s([[(0, 4), (10, 12)], [(3, 11)]]) == 2.0
    assert concurrent_s([[(0, 4)], [(4, 8)]]) == 0.0
    assert concurrent_s([[(0, 4)], [(1, 3)], [(2, 9)]]) == 3.0
    assert concurrent_s([]) == 0.0


def test_a_late_rank_of_a_training_makes_the_others_wait() -> None:
    facts = {"type": "train", "joint": "0-1"}
    spans = [
        span(0, "run:actor_train", 0, 10, **facts),
        span(1, "run:actor_inf", 0, 9, type="inference"),
        span(1, "run:actor_train", 9, 10, **facts),
    ]
    summary = summarize(spans, [])
    assert summary["wait_share"] == pytest.approx(9 / 20)
    assert summary["run_share"] == pytest.approx(11 / 20)
    assert summary["shorter_train_s"] == 1.0
    assert summary["calls"]["actor_train"]["share"] == pytest.approx(2 / 20)
