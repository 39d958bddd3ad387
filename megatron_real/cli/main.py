"""The command ``megatron-real``: picks the subcommand, and turns errors that a user can act on into a line of text."""

from __future__ import annotations

import importlib
import sys

import megatron_real
from megatron_real.errors import ConfigError, RealError
from megatron_real.hooks.install import report_error

__all__ = ["main"]

_COMMANDS = {
    "train": (
        "megatron_real.cli.train",
        "train under a plan, on ranks of its own or on torchrun's or srun's",
    ),
    "search": ("megatron_real.cli.search", "find the plan with the shortest iteration"),
    "simulate": ("megatron_real.cli.simulate", "estimate a plan: times, memory, timeline"),
    "explain": ("megatron_real.cli.explain", "why a plan is as it is, and what its neighbours cost"),
    "diff": ("megatron_real.cli.diff", "compare two plans: decisions and estimates"),
    "compare": ("megatron_real.cli.compare", "lay a run beside what its plan was predicted to do"),
    "show": ("megatron_real.cli.show", "show a plan as a table"),
    "profile": ("megatron_real.cli.profile", "measure this device, for the search to price plans with"),
    "plan": ("megatron_real.cli.presets", "write a plan without a search"),
}


def _usage() -> str:
    lines = [f"  {name:<8}{text}" for name, (_, text) in _COMMANDS.items()]
    return "usage: megatron-real COMMAND ... (each command has --help)\n\n" + "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run ``argv`` (default: this process's arguments); returns the exit code: 2 for an error of the user's input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv and argv[0] == "--version":
        print(megatron_real.__version__)
        return 0
    try:
        if not argv or argv[0] not in _COMMANDS:
            found = repr(argv[0]) if argv else "no command"
            raise ConfigError(
                f"megatron-real: found {found}; expected one of {', '.join(_COMMANDS)}.\n{_usage()}"
            )
        module = importlib.import_module(_COMMANDS[argv[0]][0])
        code: int = module.main(argv[1:])
    except RealError as error:
        report_error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
