from __future__ import annotations

import threading

import pytest

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError


def test_counts_by_owner_and_keeps_the_peak() -> None:
    ledger = MemoryLedger()
    ledger.reserve("actor", 100)
    ledger.reserve("actor", 20)
    ledger.reserve("ref", 30)
    assert ledger.held() == {"actor": 120, "ref": 30}
    assert ledger.free("actor") == 120
    assert ledger.free("actor") == 0
    assert (ledger.current_bytes, ledger.peak_bytes) == (30, 150)
    ledger.reset_peak()
    assert ledger.peak_bytes == 30


def test_a_refusal_names_everybody_and_changes_nothing() -> None:
    ledger = MemoryLedger(1000, name="rank 3")
    ledger.reserve("actor d2", 600)
    ledger.reserve("ref d4", 150)
    with pytest.raises(CapacityError) as caught:
        ledger.reserve("critic d2", 251)
    text = str(caught.value)
    for part in (
        "rank 3",
        "critic d2 asks for 251 bytes",
        "250 of 1,000 are free",
        "actor d2 600",
        "ref d4 150",
    ):
        assert part in text
    assert ledger.held() == {"actor d2": 600, "ref d4": 150}
    assert ledger.peak_bytes == 750
    ledger.reserve("critic d2", 250)


def test_threads_do_not_lose_bytes() -> None:
    ledger = MemoryLedger()

    def work(owner: str) -> None:
        for _ in range(500):
            ledger.reserve(owner, 3)
            ledger.free(owner)
            ledger.reserve("all", 1)

    threads = [threading.Thread(target=work, args=(f"owner {index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.held() == {"all": 4000}
    assert ledger.current_bytes == 4000
