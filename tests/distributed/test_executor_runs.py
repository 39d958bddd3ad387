"""The rank executor's surroundings over gloo: reward functions, late and dead peers, the loop over iterations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_real.errors import ConfigError, PeerError
from megatron_real.process_groups import ProcessGroups
from megatron_real.runtime.data.dataset import ByteTokenizer, Dataset
from megatron_real.runtime.trainer import TrainConfig, train
from tests.distributed.fake_backend import (
    expected,
    prompt_length,
    prompts_of,
    response_length,
)
from tests.distributed.fake_run import CALLS, PLANS, SEQUENCES, make_executor, make_plan
from tests.harness import run_ranks

pytestmark = pytest.mark.dist


def _reward_by_length(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    assert prompts == [f"prompt {n}" for n in number], "columns and prompts are of the same sequences"
    return [float(len(response)) for response in responses]


def _nan_for_seven(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    return [float("nan") if n == 7 else 1.0 for n in number]


def _fail_for_nine(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    if 9 in number:
        raise KeyError("no answer")
    return [1.0] * len(number)


def _run_function(case: int) -> Any:
    function = (_reward_by_length, _nan_for_seven, _fail_for_nine)[case]
    name = f"{__name__}:{function.__name__}"
    plan = make_plan(2, {"rew_inf": "d1t1p1@1-1"}, "d2t1p1@0-1")
    executor, backend, _ = make_executor(plan, ProcessGroups(timeout_s=20), function=name)
    lengths = []
    if case == 0:
        executor.algorithm.prepare = lambda call, iteration, scalars: (
            lengths.append(scalars.data["rewards"].tolist()) or (scalars, {})
        )
        backend.train = lambda copy, *rest: backend.versions.update({copy: 1}) or {}
    try:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    except ConfigError as error:
        return str(error)
    except PeerError:
        return "peer"  # rank 1 has failed and left; rank 0 was waiting for its rewards
    executor.transfers.fence()
    return lengths


def test_reward_functions() -> None:
    right = [len(_decoded(i)) for i in range(SEQUENCES)]
    for lengths in run_ranks(2, _run_function, 0):
        assert lengths == [right, right], "both train calls of both ranks"
    text = run_ranks(2, _run_function, 1)[1]
    assert "calls.rew_inf: reward function" in text
    assert "returned nan for sequence 7; expected a finite number" in text
    text = run_ranks(2, _run_function, 2)[1]
    assert "raised KeyError: 'no answer'" in text
    assert "sequence 9 alone makes it raise" in text


def _decoded(sequence: int) -> str:
    prompt, response = prompt_length(0, sequence), response_length(0, sequence)
    return ByteTokenizer().decode(expected("tokens", 0, sequence, prompt + response).tolist()[prompt:])


def _late_peer() -> tuple[str, float]:
    plan = make_plan(2, {"actor_gen": "d1t1p1@0-0"}, "d1t1p1@1-1")
    executor, _, _ = make_executor(plan, ProcessGroups(timeout_s=20), timeout_s=1.0)
    if dist.get_rank() == 0:
        time.sleep(2.5)  # alive, but stuck before its generation
        return "", 0.0
    began_s = time.monotonic()
    with pytest.raises(PeerError) as caught:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    return str(caught.value), time.monotonic() - began_s


def test_a_late_peer_is_named() -> None:
    text, waited_s = run_ranks(2, _late_peer)[1]
    assert "transfer:actor_gen>lengths (iteration 0): rank 1 waited for rank 0 in vain (limit 1 s)" in text
    assert waited_s < 2.4


def _dead_peer() -> str:
    plan = make_plan(2, {"actor_gen": "d1t1p1@0-0"}, "d1t1p1@1-1")
    executor, _, _ = make_executor(plan, ProcessGroups(timeout_s=20), timeout_s=30.0)
    if dist.get_rank() == 0:
        return ""  # its sockets close
    with pytest.raises(PeerError) as caught:
        executor.run_iteration(0, prompts_of(0, SEQUENCES))
    return str(caught.value)


def test_a_dead_peer_is_named_before_the_timeout() -> None:
    began_s = time.monotonic()
    text = run_ranks(2, _dead_peer)[1]
    assert "rank 1 waited for rank 0 in vain" in text
    assert time.monotonic() - began_s < 15


class _Sink:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def publish(self, iteration: int, call: str | None, values: Mapping[str, Any]) -> None:
        self.rows.append((iteration, call, sorted(values)))

    def end_iteration(self, iteration: int) -> None:
        self.rows.append((iteration, "end"))

    def wait_written(self, iteration: int) -> None:
        self.rows.append((iteration, "waited"))


def _train(first: int, limit: int | None) -> dict[str, Any]:
    executor, backend, _ = make_executor(PLANS["mixed"], ProcessGroups(timeout_s=20))
    executor.transfers.connect()
    for copy in backend.versions:
        backend.versions[copy] = first if copy.model in ("actor", "critic") else 0
    ticks = iter(range(1000))
    config = TrainConfig(
        num_iterations=5,
        first_iteration=first,
        save_folder=Path("/nowhere"),
        save_every=2,
        time_limit_s=limit,
        state={"batches": first} if first else None,
    )
    sink = _Sink()
    save = backend.save
    backend.save = lambda folder, iteration, state: (
        sink.rows.append((iteration - 1, "saved")),
        save(folder, iteration, state),
    )
    result = train(
        config,
        executor,
        _FakePrompts(),
        sink,
        clock=lambda: float(next(ticks)) if dist.get_rank() == 0 else 0.0,
    )
    saves = [entry[2:] for entry in backend.log if entry[0] == "save"]
    return {"saves": saves, "result": result, "rows": sink.rows}


class _FakePrompts(Dataset):
    def __init__(self) -> None:
        pass

    def batch(self, iteration: int) -> Any:
        return prompts_of(iteration, SEQUENCES)


def test_train_saves_resumes_and_stops() -> None:
    whole = run_ranks(4, _train, 0, None)
    for rank in whole:
        assert rank["saves"] == [(2, {"batches": 2}), (4, {"batches": 4}), (5, {"batches": 5})]
        assert (rank["result"].next_iteration, rank["result"].stopped_by_time) == (5, False)
        assert [row[0] for row in rank["rows"] if row[1] == "end"] == list(range(5))
    # All of an iteration is reported before its checkpoint is written, and rank 0 sees to it that it arrives.
    for rank, result in enumerate(whole):
        order = [row for row in result["rows"] if row[0] == 3]
        assert order[-1] == (3, "saved")
        after_calls = [word for _, word, *_ in order if word in ("end", "waited", "saved")]
        assert after_calls == (["end", "saved"] if rank else ["end", "waited", "saved"])
    words, placements = ("end", "waited", "saved"), PLANS["mixed"].calls
    told = [row for rank in whole for row in rank["rows"] if row[0] == 3 and row[1] not in words]
    assert sorted(map(str, told)) == sorted(
        map(
            str,
            [
                (3, None, ["reward"]),
                (3, None, ["reward"]),
                (3, "actor_train", ["loss"]),
                (3, "critic_train", ["loss"]),
                (3, "iteration", ["duration_s", "tokens"]),
                (3, "response", ["lengths"]),  # by the first generating rank alone
                *(
                    (
                        3,
                        "seconds",
                        [f"{call}/{rank}" for call in sorted(CALLS) if rank in placements[call].mesh],
                    )
                    for rank in range(4)
                ),
            ],
        )
    )
    resumed = run_ranks(4, _train, 2, None)
    assert resumed[0]["saves"] == [(4, {"batches": 4}), (5, {"batches": 5})]
    # Only rank 0's clock runs: all ranks stop where it says, at a checkpoint.
    stopped = run_ranks(4, _train, 0, 5)
    assert {rank["result"].next_iteration for rank in stopped} == {2}
    assert all(rank["result"].stopped_by_time for rank in stopped)
