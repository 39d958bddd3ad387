"""What a failed rank writes; the rest of `install` is tested with Megatron, in tests/hooks/test_install.py."""

import pytest

from megatron_real.errors import ConfigError
from megatron_real.hooks.install import report_error


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, "ConfigError: wrong.\n"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "ConfigError: wrong.\n"),
        ({"WORLD_SIZE": "4", "RANK": "3"}, "[rank 3] ConfigError: wrong.\n"),
        ({"WORLD_SIZE": "4"}, "ConfigError: wrong.\n"),
        ({"WORLD_SIZE": "four", "RANK": "3"}, "[rank 3] ConfigError: wrong.\n"),
    ],
)
def test_an_error_is_written_whatever_the_environment_says(
    environment: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report_error(ConfigError("wrong."))
    assert capsys.readouterr().err == line
