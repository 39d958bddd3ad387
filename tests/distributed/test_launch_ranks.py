"""Ranks that `megatron-real train` starts: their environment, what is shown, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_real.cli.ranks import launch_ranks

pytestmark = pytest.mark.dist

_REPORT = """
import os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
print("hello from", os.environ["RANK"], flush=True)
"""


def _command(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_ranks_meet_at_one_port_of_this_launch(tmp_path: Path) -> None:
    ports = []
    for launch in range(2):
        folder = tmp_path / str(launch)
        folder.mkdir()
        assert launch_ranks(_command(_REPORT, folder), 3, folder) == ()
        seen = [(folder / str(rank)).read_text().split() for rank in range(3)]
        assert [words[:5] for words in seen] == [
            [str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)
        ]
        (port,) = {words[5] for words in seen}
        ports.append(port)
        assert (folder / "logs" / "rank-2.log").read_text() == "hello from 2\n"
    assert ports[0] != ports[1]


def test_the_others_get_a_grace_period_and_are_then_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
pathlib.Path(sys.argv[1], f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1:
    print("why rank 1 fails", flush=True)
    sys.exit(3)
if rank == 2:
    time.sleep(0.5)
    sys.exit(4)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
time.sleep(60)
"""
    started = time.monotonic()
    failed = launch_ranks(_command(code, tmp_path), 3, tmp_path, grace_s=2.0)
    assert time.monotonic() - started < 20
    assert [(end.rank, end.code) for end in failed] == [(1, 3), (2, 4), (0, -signal.SIGTERM)]
    error = capfd.readouterr().err
    assert "rank 1 ended with exit code 3; the end of" in error
    assert "  why rank 1 fails" in error
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid-0").read_text()), 0)


def test_ending_the_launcher_ends_its_ranks(tmp_path: Path) -> None:
    sleeper = (
        "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); time.sleep(60)"
    )
    launcher = f"""
import pathlib, sys
from megatron_real.cli.ranks import launch_ranks
launch_ranks([sys.executable, "-c", {sleeper!r}, {str(tmp_path)!r}], 2, pathlib.Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", launcher])
    deadline = time.monotonic() + 30
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    for pid in children:
        assert not Path(f"/proc/{pid}").exists()
