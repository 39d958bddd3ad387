"""What a change of plan does to the copies of each model: which stay, which go, which are built. No processes.

A copy stays where both plans have it and its modules would be built alike. A trained model's home is built anew when
its window, layout or recomputation changes, since DDP and the optimizer belong to a layout for life; its training then
moves (`training_state`). A frozen model's home moves by a reallocation.

Invariants (tests/unit/hooks/test_replan.py):
    - afterwards exactly the copies of the new program are there;
    - no key is built while a copy of that key is there, except the moving home itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_real.errors import Problem, raise_problems
from megatron_real.plan import CopyKey, Plan
from megatron_real.program import Program

__all__ = ["CopyChanges", "check_change", "copy_changes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyChanges:
    """Of one model. The order is: close, build the new home, move, close the old home, build the rest."""

    model: str
    old_home: CopyKey
    new_home: CopyKey
    moves: bool
    """Whether the home is another copy afterwards."""
    kept: frozenset[CopyKey]
    closed: tuple[CopyKey, ...]
    """Before anything is built; the old home is not among them."""
    built: tuple[CopyKey, ...]
    """The new home is the first of them if it is one."""

    @property
    def closes_old_home(self) -> bool:
        """After the move."""
        return self.moves and self.old_home not in self.kept


def copy_changes(model: str, old: Program, new: Program) -> CopyChanges:
    """How the copies of `model` under one program become those under another."""
    old_home, new_home = old.home(model), new.home(model)
    before = [key for key in old.copies() if key.model == model]
    after = [key for key in new.copies() if key.model == model]
    moves = old_home != new_home
    kept = {key for key in before if key in after}
    if new.graph.trained(model):
        moves = moves or _recompute(old, model) != _recompute(new, model)
        if moves:
            kept -= {old_home, new_home}
    built = sorted((key for key in after if key not in kept), key=lambda key: key != new_home)
    return CopyChanges(
        model=model,
        old_home=old_home,
        new_home=new_home,
        moves=moves,
        kept=frozenset(kept),
        closed=tuple(key for key in before if key not in kept and key != old_home),
        built=tuple(built),
    )


def _recompute(program: Program, model: str) -> str:
    return program.plan.calls[program.graph.home_call(model).name].recompute


def check_change(old: Plan, new: Plan, *, source: str) -> None:
    """Refuse a plan that cannot follow on another.

    Args:
        source: how the error names the new plan.

    Raises:
        PlanError: it is for another algorithm, other calls or another number of devices.
    """
    problems = [
        Problem(path=path, found=found, expected=f"{expected}, as in the plan before it")
        for path, found, expected in (
            ("algorithm", new.algorithm, old.algorithm),
            ("calls", ", ".join(sorted(new.calls)), ", ".join(sorted(old.calls))),
            ("cluster", f"{new.cluster.num_devices} devices", f"{old.cluster.num_devices} devices"),
        )
        if found != expected
    ]
    raise_problems(problems, subject=source)
