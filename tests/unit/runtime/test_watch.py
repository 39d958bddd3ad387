"""The rules of liveness, moment by moment, without processes."""

from __future__ import annotations

from megatron_real.runtime.liveness.processes import ProcessState
from megatron_real.runtime.liveness.progress import Position
from megatron_real.runtime.liveness.watch import Beat, Failure, FailureKind, Limits, Watch

LIMITS = Limits(dead_after_s=10, stuck_after_s=100, join_s=50)


class Ranks:
    """Heartbeats of a small job, as one rank's watch hears them."""

    def __init__(self, rank: int = 0, size: int = 3) -> None:
        self.watch = Watch(rank, size, LIMITS)
        self.count = 0

    def beat(
        self, now: float, *, done: tuple[int, ...] = (), all_done: bool = False, **at: tuple[int, int, str]
    ) -> None:
        """One heartbeat of the ranks ``r0=(iteration, index, name)``, with an answer of the store."""
        self.count += 1
        self.watch.store_answered(now)
        for key, (iteration, index, name) in at.items():
            rank = int(key[1:])
            serial = 2 * (100 * iteration + index) + (not name)
            position = Position(serial=serial, iteration=iteration, index=index, name=name)
            beat = Beat(count=self.count, position=position, done=rank in done, all_done=all_done)
            self.watch.hear(rank, Beat.from_json(beat.to_json()), now)


GEN = (2, 0, "run:actor_gen")
REALLOC = (2, 1, "realloc:actor_train")
TRAIN = (2, 2, "run:actor_train")


def test_all_is_well() -> None:
    ranks = Ranks()
    for now in range(0, 400, 5):
        ranks.beat(now, r0=(now, 0, "run:a"), r1=(now, 0, "run:a"), r2=(now, 0, "run:a"))
        assert ranks.watch.verdict(now + 4) is None


def test_silence() -> None:
    ranks = Ranks()
    ranks.beat(0, r0=GEN, r1=GEN, r2=REALLOC)
    for now in (5, 10):
        ranks.beat(now, r0=GEN, r1=GEN)
        assert ranks.watch.verdict(now) is None
    ranks.beat(11, r0=GEN, r1=GEN)
    failure = ranks.watch.verdict(11)
    assert failure is not None
    assert (failure.kind, failure.ranks, failure.iteration) == (FailureKind.SILENT, (2,), 2)
    assert failure.instruction == "realloc:actor_train"
    assert str(failure).startswith("rank 2 in iteration 2, realloc:actor_train: no heartbeat for 10 s")
    assert Failure.from_json(failure.to_json()) == failure
    ranks.watch.see(2, ProcessState.STOPPED, None)
    stopped = ranks.watch.verdict(11)
    assert stopped is not None
    assert stopped.reason.endswith("its process is stopped")


def test_the_process_tells_a_fresher_position_than_the_heartbeat() -> None:
    ranks = Ranks(rank=2)
    ranks.beat(0, r0=GEN)
    ranks.watch.see(
        0, ProcessState.ALIVE, Position(serial=9, iteration=3, index=1, name="realloc:actor_train")
    )
    ranks.watch.store_failed("Connection reset by peer")
    failure = ranks.watch.verdict(0.5)
    assert failure is not None
    assert (failure.kind, failure.ranks) == (FailureKind.SILENT, (0,))
    assert (failure.iteration, failure.instruction) == (3, "realloc:actor_train")
    assert "Connection reset by peer" in failure.reason


def test_a_store_that_does_not_answer_is_rank_0() -> None:
    ranks = Ranks(rank=1)
    ranks.beat(3, r0=GEN)
    assert ranks.watch.verdict(12) is None
    failure = ranks.watch.verdict(14)
    assert failure is not None
    assert failure.ranks == (0,)
    assert "no answer for 10 s" in failure.reason


def test_a_gone_process_is_blamed_once_rank_0_was_heard_again() -> None:
    ranks = Ranks(rank=1)
    ranks.beat(0, r0=GEN)
    ranks.watch.see(2, ProcessState.GONE, Position(serial=5, iteration=2, index=0, name="run:actor_gen"))
    assert ranks.watch.suspects == (2,)
    assert ranks.watch.verdict(1) is None, "it may have left because all are done"
    ranks.beat(1, r0=GEN)
    ranks.watch.confirm((2,))
    failure = ranks.watch.verdict(1)
    assert failure is not None
    assert (failure.kind, failure.ranks, failure.instruction) == (FailureKind.DEAD, (2,), "run:actor_gen")
    assert ranks.watch.suspects == ()


def test_ranks_leave_when_all_are_done() -> None:
    ranks = Ranks(rank=1)
    ranks.watch.see(2, ProcessState.GONE, None)
    ranks.beat(1, all_done=True, r0=TRAIN)
    ranks.watch.confirm((2,))
    ranks.watch.store_failed("rank 0 has left")
    assert ranks.watch.verdict(1) is None


def test_rank_0_knows_when_all_are_done() -> None:
    ranks = Ranks()
    ranks.beat(0, done=(0, 1), r0=TRAIN, r1=TRAIN, r2=TRAIN)
    assert not ranks.watch.ready
    ranks.beat(1, done=(0, 1, 2), r0=TRAIN, r1=TRAIN, r2=TRAIN)
    assert ranks.watch.ready
    assert not Ranks(rank=1).watch.ready


def test_a_rank_that_never_comes() -> None:
    ranks = Ranks()
    for now in range(0, 56, 5):
        ranks.beat(now, r0=GEN, r1=GEN)
        failure = ranks.watch.verdict(now)
        assert (failure is not None) == (now > 50)
    assert failure is not None
    assert (failure.kind, failure.ranks) == (FailureKind.MISSING, (2,))
    assert str(failure) == "rank 2 before the first instruction: has not come within 50 s"


def test_stuck_is_the_earliest_instruction() -> None:
    """Ranks 0 and 1 wait in a realloc for rank 2, which hangs in its generation."""
    ranks = Ranks()
    for now in range(120):
        ranks.beat(now, r0=REALLOC, r1=REALLOC, r2=GEN)
        failure = ranks.watch.verdict(now)
        assert (failure is not None) == (now >= 105), now
    assert failure is not None
    assert (failure.kind, failure.ranks, failure.instruction) == (FailureKind.STUCK, (2,), "run:actor_gen")


def test_waiting_for_progress_is_not_stuck() -> None:
    """Rank 2 is slow, but it goes on; the others wait longer than the limit. Then they hang together."""
    ranks = Ranks()
    for now in range(140):
        position = (1, 7, "run:critic_train") if now < 70 else GEN
        ranks.beat(now, r0=REALLOC, r1=REALLOC, r2=position)
        assert ranks.watch.verdict(now) is None, now
    for now in range(140, 250):
        ranks.beat(now, r0=REALLOC, r1=REALLOC, r2=REALLOC)
        failure = ranks.watch.verdict(now)
        assert (failure is not None) == (now >= 245), now
    assert failure is not None
    assert failure.ranks == (0, 1, 2)
    where = "ranks 0, 1, 2 in iteration 2, realloc:actor_train"
    assert str(failure).startswith(f"{where}: stuck: no progress for 100 s.")


def test_a_late_heartbeat_is_not_stuck() -> None:
    """After a long wait all go on, but those who waited tell it two heartbeats after the one they waited for."""
    ranks = Ranks()
    for now in range(200):
        ranks.beat(now, r0=REALLOC, r1=REALLOC, r2=(1, now, "run:critic_train"))
        assert ranks.watch.verdict(now) is None, now
    for now in range(200, 202):
        ranks.beat(now, r0=REALLOC, r1=REALLOC, r2=TRAIN)
        assert ranks.watch.verdict(now) is None, now
    for now in range(202, 300):
        ranks.beat(now, r0=TRAIN, r1=TRAIN, r2=TRAIN)
        assert ranks.watch.verdict(now) is None, now


def test_stuck_between_instructions_comes_after_the_one_that_was_left() -> None:
    ranks = Ranks()
    for now in range(110):
        ranks.beat(now, r0=TRAIN, r1=(2, 1, ""), r2=(3, 0, "run:actor_gen"))
        failure = ranks.watch.verdict(now)
    assert failure is not None
    assert failure.ranks == (1,)
    assert str(failure).startswith("rank 1 in iteration 2, between two instructions: stuck")


def test_a_done_rank_is_not_stuck() -> None:
    ranks = Ranks()
    for now in range(0, 300, 5):
        ranks.beat(now, done=(1,), r0=(2, now, "run:a"), r1=GEN, r2=(2, now, "run:a"))
        assert ranks.watch.verdict(now) is None
