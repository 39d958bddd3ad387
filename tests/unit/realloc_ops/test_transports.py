"""Turns over one transport, and exchanges that complete one direction at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_real.realloc_ops.execution.regions import Regions
from megatron_real.realloc_ops.execution.transports import LocalNetwork, Parcel, Turns

_WAIT_S = 5.0


def test_turns_are_entered_in_the_order_in_which_they_were_taken() -> None:
    turns, order, running = Turns(), [], threading.Lock()
    taken = [turns.take() for _ in range(8)]

    def use(number: int) -> None:
        with taken[number]:
            assert running.acquire(blocking=False), "two turns at once"
            order.append(number)
            running.release()

    threads = [threading.Thread(target=use, args=(number,)) for number in reversed(range(8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
    assert order == list(range(8))


def test_a_turn_inside_a_turn_is_of_the_same_run() -> None:
    turns = Turns()
    with turns.take():
        later = turns.take  # of another thread: behind the outer turn
        found: list[str] = []

        def other() -> None:
            with later():
                found.append("other")

        thread = threading.Thread(target=other)
        thread.start()
        with turns.take():
            found.append("inner")
    thread.join(_WAIT_S)
    assert found == ["inner", "other"]


def test_an_error_inside_a_turn_lets_the_next_one_in() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.take():
        raise KeyError
    with turns.take():
        pass


def test_what_is_received_can_be_waited_for_alone() -> None:
    network = LocalNetwork()

    def parcel(peer: int) -> Parcel:
        return Parcel(peer=peer, memory=Regions(torch.zeros(4, dtype=torch.uint8)), label=f"with {peer}")

    sent, received = network.transport(0).exchange(parcel(1), parcel(2))
    assert sent is not None
    assert received is not None
    assert (sent.delivered, received.delivered) == (False, False)
    network.transport(2).exchange(parcel(0), None)
    assert (sent.delivered, received.delivered) == (False, True)
    network.transport(1).exchange(None, parcel(0))
    assert (sent.delivered, received.delivered) == (True, True)
