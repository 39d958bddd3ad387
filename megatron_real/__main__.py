"""Run a Megatron script that then knows `--real-plan`.

``python -m megatron_real script.py ...``, also ``torchrun ... -m megatron_real script.py ...``. The script runs as
``__main__`` with its own folder first on the path and its own `sys.argv`, as if Python had been given it directly.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_real.errors import ConfigError, RealError
from megatron_real.hooks.install import install, report_error

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Install the hooks and run ``argv[0]`` with the rest as its arguments; returns the exit code."""
    try:
        if not argv or argv[0].startswith("-"):
            raise ConfigError(
                f"python -m megatron_real: found {argv[0] if argv else 'nothing'}; "
                "expected a script, then its arguments."
            )
        script = Path(argv[0])
        if not script.is_file():
            raise ConfigError(f"python -m megatron_real: {script}: no such file. Give the path of a script.")
        sys.argv = list(argv)
        if sys.path[:1] in ([""], [str(Path.cwd())]):
            del sys.path[0]  # Python puts the working directory there for -m, and not for a script
        sys.path.insert(0, str(script.resolve().parent))
        install()
        runpy.run_path(str(script), run_name="__main__")
    except RealError as error:
        if os.environ.get("MEGATRON_REAL_FULL_ERROR"):
            raise
        report_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
