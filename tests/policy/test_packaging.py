"""What a wheel holds: the package, the configuration, the plan schema and the start-up file."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    build = (
        "import os, setuptools.build_meta as backend\n"
        f"print(backend.build_wheel({str(folder)!r}, config_settings=None))"
    )
    source = folder / "source"  # building leaves files beside setup.py
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "megatron_real.pth", "megatron_real", "conf", "README.md"):
        if (ROOT / name).exists():
            (source / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_a_wheel_has_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "megatron_real.pth",
        "megatron_real/plan_schema.json",
        "megatron_real/py.typed",
        "megatron_real/conf/train.yaml",
        "megatron_real/conf/algorithm/ppo.yaml",
        "megatron_real/hooks/install.py",
    } <= names
    assert not any(name.startswith("tests/") for name in names)


def test_planning_is_installed_without_torch(wheel: Path) -> None:
    metadata = next(
        name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")
    )
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    always = [line for line in required if "extra ==" not in line]
    assert always
    assert not any("torch" in line or "megatron" in line for line in always)
    assert any("megatron-core" in line and 'extra == "megatron"' in line for line in required)


def test_the_configuration_is_found_inside_an_installed_package(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import megatron_real.config as c; print(c.__file__); print(c.conf_dir())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [
        str(tmp_path / "megatron_real" / "config.py"),
        str(tmp_path / "megatron_real" / "conf"),
    ]
