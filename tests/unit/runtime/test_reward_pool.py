"""Reward functions in processes: one that crashes or hangs costs its own sequences, and none outlives its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_real.errors import ConfigError
from megatron_real.reward_worker import Failure, FunctionCall
from megatron_real.runtime.rewards.pool import RewardPool
from tests.unit.runtime.test_rewards import FUNCTIONS, missing, samples, score


def wait_for[T](ask: Callable[[], T], limit_s: float = 10.0) -> T:
    """What `ask` answers as soon as that is true."""
    end = time.monotonic() + limit_s
    while not (answer := ask()) and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def calls(*responses: str, is_async: bool = False) -> list[FunctionCall]:
    return [
        FunctionCall(function=0, is_async=is_async, ids=(i,), prompts=("p",), responses=(text,), columns={})
        for i, text in enumerate(responses)
    ]


def test_a_crash_or_a_hang_costs_its_own_sequence() -> None:
    before = children(os.getpid())
    responses = ["slow 0.2", "exit", "2", "hang", "3", "segfault", "regex", "4", "raise", "sys.exit"]
    start = time.monotonic()
    result, counts = score("act", samples(responses), processes=2, timeout_s=0.8)
    assert time.monotonic() - start < 10
    assert result == [1.0, -1.0, 2.0, -1.0, 3.0, -1.0, -1.0, 4.0, -1.0, -1.0]
    assert missing(counts) == {"crashed": 2, "late": 2, "raised": 2}
    assert children(os.getpid()) == before


def test_calls_with_several_sequences_are_taken_apart() -> None:
    given = samples(["1", "2", "exit", "3", "4", "hang"])
    result, counts = score("act", given, processes=1, timeout_s=0.8, sequences_per_call=4)
    assert (result, missing(counts)) == ([1.0, 2.0, -1.0, 3.0, 4.0, -1.0], {"crashed": 1, "late": 1})
    assert score("batch_size", given, processes=1, sequences_per_call=4)[0] == [4, 4, 4, 4, 2, 2]


def test_stopping_says_how_the_process_ended() -> None:
    for response, how in (("exit", "ended with exit code 3"), ("segfault", "was killed by SIGSEGV")):
        with pytest.raises(
            ConfigError, match=f"act crashed: its process {how} for sequence 11. The response"
        ):
            score("act", samples(["1", response]), processes=1, stop=True)


def test_async_calls_run_at_once_in_each_process() -> None:
    start = time.monotonic()
    assert score("act_async", samples(["slow 0.3"] * 40), processes=2)[0] == [1.0] * 40
    assert time.monotonic() - start < 5  # 6 s one after the other


def test_async_calls_of_a_process_that_crashes_are_repeated_alone() -> None:
    given = samples(["1", "slow 0.1", "exit", "hang", "raise", "2"])
    result, counts = score("act_async", given, processes=2, timeout_s=0.8)
    assert result == [1.0, 1.0, -1.0, -1.0, -1.0, 2.0]
    assert missing(counts) == {"late": 1, "crashed": 1, "raised": 1}


def test_a_process_loads_no_torch_and_does_not_run_the_main_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import time\nfrom pathlib import Path\n"
        f"with Path({str(tmp_path / 'runs')!r}).open('a') as file: file.write('run')\n"
        "from megatron_real.reward_worker import FunctionCall\n"
        "from megatron_real.runtime.rewards.pool import RewardPool\n"
        f"pool = RewardPool([{FUNCTIONS + ':has_torch'!r}], 1)\n"
        "call = FunctionCall(function=0, is_async=False, ids=(0,), prompts=('',), responses=('',), columns={})\n"
        "print(pool.run([call], timeout_s=30, deadline=time.monotonic() + 30))\npool.close()\n"
    )
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.stdout == "[[0.0]]\n", done.stderr
    assert (tmp_path / "runs").read_text() == "run"


@pytest.mark.parametrize("response", ["hang", "regex"])
def test_processes_die_with_their_rank(response: str) -> None:
    """Also in an endless loop in C, which no thread of theirs could end."""
    rank = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import time, sys\nfrom megatron_real.reward_worker import FunctionCall\n"
            "from megatron_real.runtime.rewards.pool import RewardPool\n"
            f"pool = RewardPool([{FUNCTIONS + ':act'!r}], 1)\n"
            "call = [FunctionCall(function=0, is_async=False, ids=(0,), prompts=('',), responses=(r,), columns={})"
            f" for r in ('1', {response!r})]\n"
            "print(pool.run(call[:1], timeout_s=30, deadline=time.monotonic() + 30), flush=True)\n"
            "pool.run(call[1:], timeout_s=60, deadline=time.monotonic() + 60)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "[[1.0]]\n"
    (worker,) = children(rank.pid)
    time.sleep(0.2)  # it is in the second call now
    assert is_alive(worker)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert wait_for(lambda: not is_alive(worker))


def test_what_a_function_started_is_killed_with_its_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert missing(score("act", samples([f"child {note}"]), processes=1, timeout_s=1.0)[1]) == {"late": 1}
    assert wait_for(lambda: not is_alive(int(note.read_text())))


def test_what_has_no_turn_in_the_time_for_the_batch_is_late() -> None:
    start = time.monotonic()
    given = samples(["hang"] * 2 + ["1"] * 50)
    _, counts = score("act", given, processes=2, timeout_s=30.0, batch_timeout_s=1.0)
    assert time.monotonic() - start < 5
    assert missing(counts) == {"late": 52}


def test_an_interrupted_batch_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RewardPool([f"{FUNCTIONS}:act"], 2)
    limits = {"timeout_s": 10.0, "deadline": time.monotonic() + 60}
    assert pool.run(calls("1", "2"), **limits) == [[1.0], [2.0]]
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(RewardPool, "_take_in", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(calls("3", "4"), **limits)
    assert pool.run(calls("5", "6"), **limits) == [[5.0], [6.0]]
    pool.close()


def test_a_process_that_ends_while_it_has_nothing_to_do_costs_nothing() -> None:
    before = children(os.getpid())
    pool = RewardPool([f"{FUNCTIONS}:act"], 1)
    limits = {"timeout_s": 10.0, "deadline": time.monotonic() + 60}
    assert pool.run(calls("1"), **limits) == [[1.0]]
    (worker,) = {*children(os.getpid())} - {*before}
    os.kill(worker, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(worker))
    assert pool.run(calls("2"), **limits) == [[2.0]]
    pool.close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "raise OSError('not here')",
            r"in a process of its own, reward function fussy:f: module 'fussy' cannot",
        ),
        ("import os; os._exit(7)", r"a process that loads fussy:f ended with exit code 7, 3 times in a row"),
    ],
)
def test_a_function_that_a_process_cannot_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, text: str
) -> None:
    (tmp_path / "fussy.py").write_text(
        f"import sys\nif sys.argv[0] == '-c':\n    {code}\ndef f(*_): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = children(os.getpid())
    pool = RewardPool(["fussy:f"], 2)
    with pytest.raises(ConfigError, match=text):
        pool.run(calls("1", "2"), timeout_s=10.0, deadline=time.monotonic() + 60)
    assert children(os.getpid()) == before


def test_a_slow_start_does_not_count_as_the_function_being_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sluggish.py").write_text("import time\ntime.sleep(0.9)\ndef f(*_): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool = RewardPool(["sluggish:f"], 1)
    assert pool.run(calls("1"), timeout_s=0.7, deadline=time.monotonic() + 60) == [[1.0]]
    pool.close()
    (late,) = pool.run(calls("1"), timeout_s=0.3, deadline=time.monotonic() + 0.1)
    assert isinstance(late, Failure)
    assert "had no turn in the time for the batch (processes: 1) for sequence 0" in late.text
    pool.close()
