"""The steady-state period of events that repeat, on clocks of groups of ranks (*atoms*).

An iteration turns the clocks into new ones by additions and maxima: a max-plus linear map F. In the long run the clock
of the slowest rank grows by F's largest cycle mean per iteration; that is the period. Once all clocks grow alike, they
grow by it. Where they never do (a rank falls behind for ever, or clocks alternate), Karp's formula over as many
iterations as there are clocks gives it.

Invariant (tests/property/test_search_problem.py): the period is the growth per iteration after many iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_real.layout import Mesh

__all__ = ["TOLERANCE", "Timed", "atoms_of", "cycle_mean", "period"]

TOLERANCE = 1e-9
"""Relative difference at which clocks count as growing alike."""


class Timed(Protocol):
    """What `period` looks at of an event."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def needs(self) -> tuple[str, ...]: ...


def atoms_of(meshes: Sequence[Mesh]) -> tuple[dict[Mesh, tuple[int, ...]], int]:
    """The atoms of each window, and their number. An atom is all ranks that lie in the same of these windows."""
    windows = list(dict.fromkeys(meshes))
    borders = sorted({border for mesh in windows for border in (mesh.start, mesh.stop)})
    pieces = [tuple(mesh for mesh in windows if mesh.start <= start < mesh.stop) for start in borders[:-1]]
    atoms = [piece for piece in dict.fromkeys(pieces) if piece]
    covered = {mesh: tuple(i for i, atom in enumerate(atoms) if mesh in atom) for mesh in windows}
    return covered, len(atoms)


def cycle_mean(history: Sequence[Sequence[float]]) -> float:
    """The largest cycle mean of a max-plus map (R. Karp, 1978: max over clocks of min over k of (x_n - x_k) / (n - k)).

    Args:
        history: the clocks x_0 (all zero) to x_n, n iterations later; n is the number of clocks.
    """
    n = len(history) - 1
    last = history[n]
    return max(min((last[atom] - history[k][atom]) / (n - k) for k in range(n)) for atom in range(len(last)))


def period(events: Sequence[Timed], where: Sequence[tuple[int, ...]], num_atoms: int) -> float:
    """Seconds per iteration of `events`, in their global order, each on the atoms of `where`.

    A name ``run:x`` produces ``x``, which later events may need.
    """
    clocks = [0.0] * num_atoms
    history = [clocks[:]]
    done: dict[str, float] = {}
    for _ in range(num_atoms):
        for event, atoms in zip(events, where, strict=True):
            ready = [clocks[atom] for atom in atoms] + [done[name] for name in event.needs]
            end = max(ready) + event.seconds
            for atom in atoms:
                clocks[atom] = end
            if event.name.startswith("run:"):
                done[event.name[4:]] = end
        growth = [after - before for after, before in zip(clocks, history[-1], strict=True)]
        if max(growth) - min(growth) <= TOLERANCE * max(growth):
            return max(growth)
        history.append(clocks[:])
    return cycle_mean(history)
