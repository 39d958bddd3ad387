"""``python -m megatron_real.cli.rank OPTIONS.json``: one rank of a run, started by ``megatron-real train``."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_real.config import RunOptions
from megatron_real.errors import RealError
from megatron_real.hooks.install import install, report_error

__all__ = ["USER_ERROR", "main", "run"]

USER_ERROR = 2
"""Exit code for an error that says what to do about it."""


def run(options: RunOptions) -> None:
    """Train, as the rank that the environment names."""
    install()
    from megatron_real.hooks import launch  # imports torch and Megatron
    from megatron_real.hooks.pinning import pin_rank

    pin_rank()
    launch.run(options)


def main(argv: list[str]) -> int:
    """Run the options of the file ``argv[0]``; returns the exit code."""
    try:
        run(RunOptions.loads(Path(argv[0]).read_text()))
    except RealError as error:
        report_error(error)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
