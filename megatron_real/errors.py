"""The errors that a user can cause, by what the user has to change.

Every message names its subject, says what was found and what was expected, and what to do. A command line prints it
without a traceback and exits non-zero on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "CapacityError",
    "ConfigError",
    "MegatronCompatError",
    "PeerError",
    "PlanError",
    "Problem",
    "RealError",
    "VerificationError",
    "raise_problems",
]


class RealError(Exception):
    """Base of every error that megatron_real raises on purpose."""


class PlanError(RealError):
    """A plan, a layout or a graph is wrong: edit the plan."""


class ConfigError(RealError):
    """An option or an input file is wrong: edit the options."""


class MegatronCompatError(RealError):
    """A symbol of Megatron is missing or has another signature: change the version."""


class CapacityError(RealError):
    """It does not fit into the device memory: a larger cluster, or another layout."""


class PeerError(RealError):
    """Another rank died, stopped, failed or did not come: look at that rank first."""

    def __init__(self, text: str, *, peers: Sequence[int] = (), late: bool = False) -> None:
        """Say what happened.

        Args:
            text: the message.
            peers: the ranks that it is about, where they are known.
            late: they did not come in time, as opposed to a connection that broke.
        """
        super().__init__(text)
        self.peers = tuple(peers)
        self.late = late


class VerificationError(RealError):
    """A reallocation delivered other bits than its source has, or replicas of the source differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong in an input."""

    path: str
    """Where: a JSON path such as ``calls.actor_train.layout.tp``, an option, or ``file:line``."""
    found: str
    """What was found there."""
    expected: str
    """What is allowed."""
    fix: str = ""
    """What to do, when that is more than writing what is allowed."""

    def __str__(self) -> str:
        tail = f" {self.fix}" if self.fix else ""
        return f"{self.path}: found {self.found}; expected {self.expected}.{tail}"


def raise_problems(problems: Iterable[Problem], *, subject: str, error: type[RealError] = PlanError) -> None:
    """Raise one `error` that lists all `problems`; do nothing when there are none."""
    found: Sequence[Problem] = tuple(problems)
    if not found:
        return
    if len(found) == 1:
        raise error(f"{subject}: {found[0]}")
    lines = "\n".join(f"  - {problem}" for problem in found)
    raise error(f"{subject}: {len(found)} problems\n{lines}")
