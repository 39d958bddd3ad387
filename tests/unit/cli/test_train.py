import json
import sys
from pathlib import Path

import pytest

from megatron_real.cli import ranks, train
from megatron_real.cli.main import main
from megatron_real.cli.ranks import RankExit, rank_environment
from megatron_real.config import RunOptions
from megatron_real.errors import ConfigError


def test_options_that_no_yaml_file_names_can_be_set() -> None:
    given = [
        "plan=a.json",
        "algorithm=ppo",
        "model.critic.load=x",
        "~data",
        "+new=1",
        "-m",
        "hydra.verbose=true",
    ]
    assert train.allow_new_keys(given) == [
        *(
            "++plan=a.json",
            "algorithm=ppo",
            "++model.critic.load=x",
            "~data",
            "+new=1",
            "-m",
            "hydra.verbose=true",
        )
    ]


def test_ranks_of_torchrun_and_srun_are_recognised() -> None:
    torchrun = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
        "LOCAL_RANK": "1",
        "X": "y",
    }
    assert rank_environment(torchrun) == {name: value for name, value in torchrun.items() if name != "X"}
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert rank_environment(batch_script) is None
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_ID": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",  # of the login node
        "SLURM_STEP_NODELIST": "node[03-04]",
        "SLURM_JOB_NODELIST": "node[01-04]",
    }
    found = rank_environment({**batch_script, **step, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    assert found is not None
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("2", "4", "0")
    assert found["MASTER_ADDR"] == "node03"
    other = rank_environment({**batch_script, **step, "SLURM_STEP_ID": "2"})
    assert other is not None
    assert other["MASTER_PORT"] != found["MASTER_PORT"]
    assert rank_environment({}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node01", "node01"),
        ("node[01-04,07]", "node01"),
        ("node[7,01-04],other", "node7"),
        ("gpu-a.site.org,gpu-b.site.org", "gpu-a.site.org"),
        ("rack[2-3]n[010-012]", "rack2n010"),
        ("node[1-2]-ib", "node1-ib"),
    ],
)
def test_the_first_node_of_a_step_is_where_ranks_meet(nodes: str, first: str) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": nodes}
    found = rank_environment(step)
    assert found is not None
    assert found["MASTER_ADDR"] == first
    assert rank_environment({**step, "MASTER_ADDR": "given"}) == {**found, "MASTER_ADDR": "given"}


@pytest.mark.parametrize("nodes", ["", "node[", "node[x]"])
def test_a_step_without_readable_nodes_needs_an_address(nodes: str) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    with pytest.raises(ConfigError, match="Set MASTER_ADDR to the host of rank 0"):
        rank_environment({**step, "SLURM_STEP_NODELIST": nodes})


class Launches:
    """Stands in for starting ranks: records options; the jobs of `failing` fail, the others leave a summary."""

    def __init__(self) -> None:
        self.options: list[RunOptions] = []
        self.failing: set[int] = set()

    def __call__(
        self, command: list[str], size: int, folder: Path, *, grace_s: float
    ) -> tuple[RankExit, ...]:
        assert command[1:3] == ["-m", "megatron_real.cli.rank"]
        number = len(self.options)
        self.options.append(RunOptions.loads(Path(command[3]).read_text()))
        if number in self.failing:
            return (RankExit(rank=1, code=-9), RankExit(rank=0, code=1))
        (folder / "summary.json").write_text(json.dumps({"goal_last": number + 0.5, "iteration_s": 2.0}))
        return ()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launches:
    recorded = Launches()
    monkeypatch.setattr(train, "launch_ranks", recorded)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return recorded


_SMOKE = ["train", "experiment=smoke", "cluster=cpu2", "data.prompts=prompts.jsonl"]


def test_one_job(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMOKE, "plan=symmetric", "algorithm.clip_ratio=0.1", "output=runs/x"]) == 0
    (options,) = launches.options
    assert options.output == Path("runs/x")
    assert options.algorithm.options["clip_ratio"] == 0.1
    assert options.iterations == 2
    assert "--num-layers" in options.megatron
    assert "jobs" not in capsys.readouterr().out
    assert sys.argv[0] != "megatron-real train"


def test_a_wrong_option_is_exit_code_2_and_starts_no_rank(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_SMOKE, "plan=symmetric", "algoritm.clip_ratio=0.1"]) == 2
    assert launches.options == []
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: train: algoritm: found an unknown option")
    assert "Traceback" not in error


def test_jobs_run_in_turn_with_a_folder_each_past_a_failed_one(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    launches.failing = {1}
    code = main([*_SMOKE, "plan=symmetric,split", "seed=1,2", "output=runs/sweep", "--multirun"])
    assert code == 2
    assert [options.output for options in launches.options] == [
        Path(f"runs/sweep/{number}") for number in range(4)
    ]
    assert [options.seed for options in launches.options] == [1, 2, 1, 2]
    assert [options.plan for options in launches.options] == [
        Path(f"runs/sweep/{n}/plan.json") for n in range(4)
    ]
    output = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if line.split("│")[-2:-1] and line.split("│")[-2].strip().startswith("runs/sweep/")
    ]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2].split(":")[0] for row in rows] == ["done", "failed", "done", "done"]
    assert [row[4] for row in rows] == ["0.5", "", "2.5", "3.5"]
    assert [row[1] for row in rows] == [
        f"plan={plan} seed={seed}" for plan in ("symmetric", "split") for seed in (1, 2)
    ]


def test_jobs_under_torchrun_are_refused(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main([*_SMOKE, "plan=symmetric,split", "-m"]) == 2
    assert "found --multirun under torchrun or srun" in capsys.readouterr().err
    assert launches.options == []


def test_how_a_rank_ended_in_words() -> None:
    assert str(RankExit(rank=3, code=1)) == "rank 3 ended with exit code 1"
    assert str(RankExit(rank=3, code=-9)) == "rank 3 was ended by SIGKILL"


def test_a_failed_job_says_what_its_rank_said(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("noise\n[rank 1] ConfigError: this is wrong.\n")
    (tmp_path / "rank-2.log").write_text("Traceback\n  ...\nValueError: that is wrong\n")
    refused_by_all = train._reason(tmp_path, RankExit(rank=0, code=2), num_failed=3)
    assert refused_by_all == "ConfigError: this is wrong."
    assert train._reason(tmp_path, RankExit(rank=2, code=1), num_failed=1) == "ValueError: that is wrong"
    killed = train._reason(tmp_path, RankExit(rank=0, code=-9), num_failed=3)
    assert killed == f"train: rank 0 was ended by SIGKILL; 3 ranks failed. Their output: {tmp_path}."


def test_ports_differ() -> None:
    assert len({ranks.free_port() for _ in range(4)}) > 1


def _files(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def _finished_run(folder: Path) -> dict[str, str]:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "checkpoints" / "run_state.json").write_text('{"iteration": 7}')
    for name in ("plan.json", "options.json", "logs/rank-1.log"):
        (folder / name).write_text(f"{name} of the finished run")
    (folder / "summary.json").write_text('{"goal_last": 77.0}')
    return _files(folder)


@pytest.mark.parametrize("plan", ["symmetric", "other.json"])
def test_a_finished_run_is_not_touched(
    launches: Launches, capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: str
) -> None:
    assert main(["plan", "symmetric", "--devices-per-node", "2", "--output", "other.json"]) == 0
    before = _finished_run(tmp_path / "runs/x")
    assert main([*_SMOKE, f"plan={plan}", "output=runs/x"]) == 2
    assert "output: found a run of 7 iterations in runs/x; expected a new folder" in capsys.readouterr().err
    assert _files(tmp_path / "runs/x") == before
    assert main([*_SMOKE, f"plan={plan}", "output=runs/x", "resume=true"]) == 0
    assert [options.resume for options in launches.options] == [True]


def test_nothing_to_go_on_with(
    launches: Launches, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*_SMOKE, "plan=symmetric", "output=runs/x", "resume=true"]) == 2
    assert "resume: found no finished checkpoint in runs/x/checkpoints" in capsys.readouterr().err
    assert _files(tmp_path / "runs/x") == {}


def test_wrong_options_leave_no_plan(launches: Launches, tmp_path: Path) -> None:
    assert main([*_SMOKE, "plan=symmetric", "output=runs/x", "iterations=0"]) == 2
    assert _files(tmp_path / "runs/x") == {}


def test_a_failed_job_has_no_numbers_of_an_earlier_run(
    launches: Launches, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _finished_run(tmp_path / "runs/sweep/0")  # refused
    (tmp_path / "runs/sweep/1").mkdir()
    (tmp_path / "runs/sweep/1/summary.json").write_text('{"goal_last": 88.0}')
    launches.failing = {0}
    assert main([*_SMOKE, "plan=symmetric", "seed=1,2", "output=runs/sweep", "-m"]) == 2
    assert len(launches.options) == 1
    output = capsys.readouterr().out
    assert output.count("failed:") == 2
    assert "77" not in output
    assert "88" not in output


def test_a_cluster_that_cannot_be_fails_its_job_alone(
    launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ["plan=symmetric", "cluster.devices_per_node=0,2", "output=runs/sweep", "-m"]
    assert main([*_SMOKE, *jobs]) == 2
    assert len(launches.options) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("ConfigError: train: cluster.devices_per_node: found 0; expected")
    assert "Traceback" not in captured.err
    assert "done" in captured.out
