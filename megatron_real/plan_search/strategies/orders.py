"""Orders of the calls that differ in what happens: one of each kind.

Calls that share no rank and no data can change places without effect, so only the orders of the others matter (traces,
A. Mazurkiewicz 1977). Of each kind the lexicographically least order is made, by a ranking that puts the promising one
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["distinct_orders"]


def distinct_orders(
    before: Sequence[int], dependent: Sequence[int], ranking: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Orders of the calls 0..n-1.

    Args:
        before: bit set of the calls that each call must follow.
        dependent: bit set of the calls with which each call cannot change places without effect (symmetric).
        ranking: the calls, those that should come early first.
    """
    rank = {call: position for position, call in enumerate(ranking)}
    tied = [
        dependent[call] | before[call] | sum(1 << other for other in rank if before[other] >> call & 1)
        for call in range(len(before))
    ]
    everything = (1 << len(before)) - 1

    def extend(prefix: tuple[int, ...], done: int) -> Iterator[tuple[int, ...]]:
        if done == everything:
            yield prefix
            return
        for call in ranking:
            if not done >> call & 1 and before[call] & ~done == 0 and _is_least(prefix, call):
                yield from extend((*prefix, call), done | 1 << call)

    def _is_least(prefix: tuple[int, ...], call: int) -> bool:
        """Whether `call` could not have come before a later-ranked call with the same effect."""
        for earlier in reversed(prefix):
            if tied[call] >> earlier & 1:
                return True
            if rank[earlier] > rank[call]:
                return False
        return True

    yield from extend((), 0)
