"""The price of going on under another plan (`--real-next-plan`), and after how many iterations it pays.

The homes of models move: trained ones with their optimizer state, frozen ones by a reallocation of their weights.
Models move one after the other.

Invariants (tests/unit/plan_search/test_training_moves.py):
    - a change to the same homes costs nothing;
    - what is faster by s seconds per iteration and costs c pays after ceil(c / s) iterations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_real.layout import format_placement
from megatron_real.plan import CopyKey
from megatron_real.plan_search.costs.moves import MovePricer
from megatron_real.plan_search.costs.training_moves import both_copies_bytes
from megatron_real.plan_search.report import bytes_text, seconds_text
from megatron_real.program import Program

__all__ = ["ChangeCost", "HomeMove", "change_cost", "change_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeMove:
    """One model moves."""

    model: str
    source: CopyKey
    target: CopyKey
    trained: bool
    seconds: float
    bytes_moved: int
    """Between ranks, all together; of a trained model a bound from above."""
    peak_bytes: int
    """On one rank, of both copies of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCost:
    """All that moves when one plan takes the place of another."""

    moves: tuple[HomeMove, ...]
    gain_s: float
    """Seconds that an iteration is shorter; negative if it is longer."""

    @property
    def seconds(self) -> float:
        return sum(move.seconds for move in self.moves)

    @property
    def pays_after(self) -> int | None:
        """Iterations until the change has cost nothing; None if never."""
        if self.gain_s <= 0:
            return None
        return math.ceil(self.seconds / self.gain_s)


def change_cost(old: Program, new: Program, moves: MovePricer, *, gain_s: float) -> ChangeCost:
    """Price the change from one program to another of the same graph.

    Raises:
        PlanError: a model cannot be cut into one of the layouts.
    """
    found = []
    for model in old.graph.models:
        source, target = old.home(model), new.home(model)
        trained = old.graph.trained(model)
        if source == target and (not trained or _recompute(old, model) == _recompute(new, model)):
            continue
        places = (source.mesh, source.layout), (target.mesh, target.layout)
        if trained:
            price = moves.move_training(model, *places)
            seconds, num_bytes, peak_bytes = price.seconds, price.bytes_moved, price.peak_bytes
        else:
            realloc = moves.realloc(model, *places)
            seconds, num_bytes = realloc.seconds, realloc.bytes_moved
            peak_bytes = both_copies_bytes(moves.models[model], *places, trained=False)
        found.append(
            HomeMove(
                model=model,
                source=source,
                target=target,
                trained=trained,
                seconds=seconds,
                bytes_moved=num_bytes,
                peak_bytes=peak_bytes,
            )
        )
    return ChangeCost(moves=tuple(found), gain_s=gain_s)


def change_lines(cost: ChangeCost) -> list[str]:
    """What a change costs, for people."""
    if not cost.moves:
        return ["change of plan in a run (--real-next-plan): no model moves"]
    lines = [
        f"change of plan in a run (--real-next-plan): about {seconds_text(cost.seconds)} for moving models"
    ]
    for move in cost.moves:
        bound = "at most " if move.trained else ""
        what = "training state" if move.trained else "weights"
        lines.append(
            f"  {move.model}: {what} from {format_placement(move.source.mesh, move.source.layout)} to "
            f"{format_placement(move.target.mesh, move.target.layout)}, {bound}{bytes_text(move.bytes_moved)}, "
            f"{seconds_text(move.seconds)}; both copies hold {bytes_text(move.peak_bytes)} on a rank"
        )
    if cost.pays_after is None:
        lines.append("  it never pays: the second plan's iteration is no shorter")
    else:
        lines.append(
            f"  it pays after {cost.pays_after} iterations, {seconds_text(cost.gain_s)} saved in each"
        )
    return lines


def _recompute(program: Program, model: str) -> str:
    return program.plan.calls[program.graph.home_call(model).name].recompute
