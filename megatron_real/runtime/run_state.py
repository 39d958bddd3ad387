"""What a run's last complete save left besides the models, and whether a run may start or go on from it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_real.errors import ConfigError

__all__ = ["read_run_state", "state_to_resume", "take_options", "write_atomically", "write_run_state"]

_RUN_STATE = "run_state.json"
_WITHOUT_EFFECT = (
    *("evaluation", "fault", "liveness", "next_plan", "output", "plan", "resume", "samples", "save_interval"),
    *("verify", "wandb"),
)
"""Options that change no loss."""


def write_run_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what a resumed run needs besides the models; it names the iteration that all model folders have. Rank 0."""
    write_atomically(folder / _RUN_STATE, json.dumps(state, indent=1, sort_keys=True))


def read_run_state(folder: Path) -> dict[str, Any] | None:
    """The last complete save of a run's `folder`; None when there is none.

    Raises:
        ConfigError: it is not JSON.
    """
    path = folder / _RUN_STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error.msg}). Remove it to start anew.") from error
    return state


def state_to_resume(output: Path, *, resume: bool) -> dict[str, Any] | None:
    """The state to go on from, or None for a new run.

    Args:
        output: the run's folder, with its saves under ``checkpoints``.
        resume: whether the user asked to go on.

    Raises:
        ConfigError: there is nothing to go on from, or a new run would write over another.
    """
    folder = output / "checkpoints"
    state = read_run_state(folder)
    if state is None and resume:
        raise ConfigError(f"resume: found no finished checkpoint in {folder}. Start without --real-resume.")
    if state is not None and not resume:
        raise ConfigError(
            f"output: found a run of {state['iteration']} iterations in {output}; expected a new folder. Give "
            "--real-resume to go on with it, or another --real-output."
        )
    return state


def take_options(folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Keep the options of a start beside its saves; what is other than at the last start, of what losses depend on.

    Args:
        folder: of the saves, which is made.
        options: of this start.

    Returns:
        A line for each option that has changed; none at the first start.
    """
    path = folder / "options.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        before = options
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(options, indent=1) + "\n")
    old, new = dict(_leaves(before)), dict(_leaves(options))
    return [
        f"{name} was {old.get(name)}, is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name.partition(".")[0] not in _WITHOUT_EFFECT
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is never seen half written. One writer at a time."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
