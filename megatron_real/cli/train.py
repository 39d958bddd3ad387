"""``megatron-real train``: compose the options of a run with Hydra, then train on ranks of its own.

Started by torchrun or srun, this process is one of the ranks and starts no others. With ``-m`` (``--multirun``) jobs
run in turn, each with its own rendezvous and folder; a job that fails does not keep the next from running, and one
table ends it all.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.cli.presets import PRESETS, cluster_spec, preset_plan
from megatron_real.cli.rank import USER_ERROR, run
from megatron_real.cli.ranks import RankExit, launch_ranks, rank_environment
from megatron_real.config import RunOptions, conf_dir
from megatron_real.errors import ConfigError, RealError
from megatron_real.hooks.install import report_error
from megatron_real.plan import ClusterSpec, Plan
from megatron_real.runtime.run_state import state_to_resume

__all__ = ["Job", "JobFailed", "allow_new_keys", "job_table", "main", "options_from_config"]

_SUMMARY = ("goal_first", "goal_last", "iteration_s")
"""Columns of the table of a multirun, from each job's summary.json."""

_ERROR = re.compile(r"(?:\[rank \d+\] )?(\w*(?:Error|Fault): .+)")
"""A line that `megatron_real.hooks.install.report_error` writes, or the last line of a traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job and how it went."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    error: str | None = None
    summary: Mapping[str, Any]


class JobFailed(RealError):
    """Ranks of a job failed; they said why themselves."""


def main(argv: list[str]) -> int:
    """Compose and run; returns 0, or 2 when the job or one of the jobs failed."""
    jobs: list[Job] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
    def job(config: DictConfig) -> None:
        settings = HydraConfig.get()
        multirun = settings.mode == RunMode.MULTIRUN
        folder = _relative(Path(settings.runtime.output_dir))
        error = None
        try:
            if multirun and rank_environment() is not None:
                raise ConfigError(
                    "train: found --multirun under torchrun or srun; expected one job there: jobs need a rendezvous "
                    "each. Start megatron-real train -m by itself."
                )
            _run_job(config, folder)
        except RealError as caught:  # the next job runs all the same
            error = str(caught)
            report_error(caught)
        jobs.append(
            Job(
                number=settings.job.num if multirun else 0,
                overrides=tuple(settings.overrides.task),
                folder=folder,
                error=error,
                summary=_summary(folder) if error is None else {},  # else that of an earlier run
            )
        )

    previous = sys.argv
    sys.argv = ["megatron-real train", *allow_new_keys(argv)]
    try:
        job()
    finally:
        sys.argv = previous
    if len(jobs) > 1:
        Console(width=None if sys.stdout.isatty() else 160).print(job_table(jobs))
    return 2 if any(job.error is not None for job in jobs) else 0


def allow_new_keys(argv: Sequence[str]) -> list[str]:
    """Let ``key=value`` also set options that no YAML file names: their defaults are in dataclasses.

    A misspelt option is refused by `RunOptions`, which knows them all.
    """
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    result = []
    for argument in argv:
        key, equals, _ = argument.partition("=")
        plain = equals and key[:1] not in ("+", "~", "-") and not key.startswith("hydra")
        result.append(f"++{argument}" if plain and key.partition("@")[0] not in groups else argument)
    return result


def options_from_config(config: DictConfig, folder: Path) -> RunOptions:
    """The options of a composed configuration; a preset plan is made and written to ``folder/plan.json``.

    Nothing is written unless the options are sound, and `folder` is free or its run is to go on.

    Raises:
        ConfigError: listing everything that is wrong with the options, or there is a run in `folder`.
        PlanError: the plan cannot be made.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        given = " ".join(f"{key}=..." for key in missing)
        raise ConfigError(f"train: found no value for {', '.join(missing)}; expected one each. Add {given}.")
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict), "a configuration is a mapping"
    tree = {str(key): value for key, value in container.items()}
    cluster = tree.pop("cluster")
    tree["output"] = folder
    wanted = _cluster(cluster)
    if tree["plan"] in PRESETS:
        if wanted is None:
            raise ConfigError(
                f"train: cluster.devices_per_node: found nothing; expected a number, for which plan={tree['plan']} is "
                "made. Add cluster=cpu4 or cluster.devices_per_node=N."
            )
        options = _checked_options(tree)
        graph = find_algorithm(options.algorithm.name).graph_for(
            options.algorithm_config(), reward="model" if options.reward is None else "function"
        )
        plan = preset_plan(tree["plan"], graph, wanted)
        state_to_resume(options.output, resume=options.resume)  # before files of a run are written over
        plan.dump(folder / "plan.json")
        return options.model_copy(update={"plan": folder / "plan.json"})
    options = RunOptions.from_tree(tree, source="train")
    state_to_resume(options.output, resume=options.resume)  # before files of a run are written over
    devices = Plan.load(options.plan).cluster.num_devices
    if wanted is not None and wanted.num_devices != devices:
        raise ConfigError(
            f"train: cluster: found {wanted.num_devices} devices; expected {devices}, the number in {options.plan}. "
            "Change the plan, or leave cluster=plan."
        )
    return options


def job_table(jobs: Sequence[Job]) -> Table:
    """One row per job, with the overrides that not all of them share."""
    table = Table(title="jobs", title_justify="left")
    table.add_column("job", justify="right")
    table.add_column("overrides")
    table.add_column("status")
    for name in _SUMMARY:
        table.add_column(name, justify="right")
    table.add_column("folder")
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        status = "done" if job.error is None else f"failed: {job.error.splitlines()[0][:120]}"
        shown = " ".join(text.removeprefix("++") for text in job.overrides if text not in shared)
        table.add_row(
            str(job.number),
            shown,
            status,
            *(_number(job.summary.get(name)) for name in _SUMMARY),
            str(job.folder),
        )
    return table


def _run_job(config: DictConfig, folder: Path) -> None:
    environment = rank_environment()
    if environment is not None:
        os.environ.update(environment)
        run(options_from_config(config, folder))
        return
    options = options_from_config(config, folder)
    (folder / "options.json").write_text(options.dumps())
    size = Plan.load(options.plan).cluster.num_devices
    command = [sys.executable, "-m", "megatron_real.cli.rank", str(folder / "options.json")]
    # The ranks notice a dead one by themselves; this only ends those that do not.
    grace_s = 2 * options.liveness.dead_after_s + 10.0
    failed = launch_ranks(command, size, folder, grace_s=grace_s)
    if failed:
        raise JobFailed(_reason(folder / "logs", failed[0], num_failed=len(failed)))


def _checked_options(tree: Mapping[str, Any]) -> RunOptions:
    """The options of a run whose plan follows from them: where its file must exist, an empty one stands in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.touch()
        return RunOptions.from_tree({**tree, "plan": path}, source="train")


def _reason(logs: Path, first: RankExit, *, num_failed: int) -> str:
    """Why ranks failed: the error that the first one wrote as its last word, where it did, else how it ended.

    Rank 0 writes to the terminal; what all ranks refuse, the others have written too.
    """
    number = first.rank or 1
    try:
        lines = (logs / f"rank-{number}.log").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    if errors and (first.rank == number or first.code == USER_ERROR):
        return errors[-1]
    return f"train: {first}; {num_failed} ranks failed. Their output: {logs}."


def _cluster(tree: Mapping[str, Any]) -> ClusterSpec | None:
    if tree.get("devices_per_node") is None:
        return None
    given = {name: value for name, value in tree.items() if value is not None}
    unknown = sorted(set(given) - set(ClusterSpec.model_fields))
    if unknown:
        raise ConfigError(
            f"train: cluster: found {', '.join(unknown)}; expected some of {', '.join(ClusterSpec.model_fields)}."
        )
    return cluster_spec(given, source="train")


def _summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _relative(path: Path) -> Path:
    working = Path.cwd()
    return path.relative_to(working) if path.is_relative_to(working) else path
