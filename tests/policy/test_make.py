"""`make` finds a Python by itself, or says in one message what is missing."""

import os
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _find(**environment: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(ROOT / ".ci" / "find-python")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _python(folder: Path, name: str, version: tuple[int, int]) -> Path:
    """A stand-in that answers the version check as Python `version` would, and prints its own path as that does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    usable = int(not (3, 12) <= version <= (3, 13))
    path.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit {usable};; *) echo {path};; esac\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_python_on_the_path_comes_first(tmp_path: Path) -> None:
    _python(tmp_path / "bin", "python3.12", (3, 11))  # a shim without the version behind it
    right = _python(tmp_path / "bin", "python3.13", (3, 13))
    _python(tmp_path / "home/.pyenv/versions/3.12.1/bin", "python", (3, 12))
    found = _find(PATH=str(tmp_path / "bin"), HOME=str(tmp_path / "home"))
    assert found.stdout.strip() == str(right)


def test_pyenv_is_searched(tmp_path: Path) -> None:
    _python(tmp_path / "bin", "python3", (3, 11))
    right = _python(tmp_path / "home/.pyenv/versions/3.13.0/bin", "python", (3, 13))
    found = _find(PATH=str(tmp_path / "bin"), HOME=str(tmp_path / "home"))
    assert found.stdout.strip() == str(right)


def test_none_is_one_clear_message(tmp_path: Path) -> None:
    _python(tmp_path / "bin", "python3", (3, 14))
    found = _find(PATH=str(tmp_path / "bin"), HOME=str(tmp_path))
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("make: found no Python 3.12 or 3.13")


def test_a_named_python_is_taken_or_refused(tmp_path: Path) -> None:
    path = os.environ["PATH"]
    assert _find(PATH=path, HOME=str(tmp_path), PYTHON=sys.executable).stdout.strip() == sys.executable
    wrong = _python(tmp_path, "python", (3, 11))
    refused = _find(PATH=path, HOME=str(tmp_path), PYTHON=str(wrong))
    assert refused.returncode == 1
    assert f"PYTHON={wrong} is not Python 3.12 or 3.13" in refused.stderr
