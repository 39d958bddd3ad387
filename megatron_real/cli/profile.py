"""``megatron-real profile``: measure layers, calls and collectives on the device at hand, for the search to price with.

Started by torchrun or srun, this process is one of the ranks; else it starts them, as ``megatron-real train`` does.
``python -m megatron_real.cli.profile OPTIONS.json`` is one rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_real.cli.rank import USER_ERROR
from megatron_real.cli.ranks import launch_ranks, rank_environment
from megatron_real.cli.train import allow_new_keys
from megatron_real.config import conf_dir, megatron_arguments
from megatron_real.errors import ConfigError, RealError
from megatron_real.hooks.install import install, report_error
from megatron_real.plan_search.profile_db import ProfileDatabase
from megatron_real.plan_search.profile_options import ProfileOptions

__all__ = ["main", "options_from_tree", "rank_main", "summary"]

_LINE_EVERY = 20
"""Measurements between lines where there is no terminal."""


def main(argv: list[str]) -> int:
    """Compose the options and measure; returns 0, or 2 when it failed."""
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="profile")
    def job(config: DictConfig) -> None:
        tree = OmegaConf.to_container(config, resolve=True)
        assert isinstance(tree, dict)
        try:
            codes.append(_run({str(name): value for name, value in tree.items()}))
        except RealError as error:
            report_error(error)
            codes.append(USER_ERROR)

    previous = sys.argv
    sys.argv = ["megatron-real profile", *allow_new_keys(argv)]
    try:
        job()
    finally:
        sys.argv = previous
    return codes[-1] if codes else 0  # --help


def options_from_tree(
    tree: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> ProfileOptions:
    """The options of a composed configuration.

    Args:
        tree: the configuration; ``cluster`` gives the ranks, ``megatron`` and ``model`` the models.
        environment: torchrun's, which decides the ranks; None outside it.

    Raises:
        ConfigError: listing what is wrong.
    """
    tree = {name: value for name, value in tree.items() if name not in ("cluster", "megatron", "model")} | {
        "megatron": megatron_arguments(tree.get("megatron") or {}),
        "overrides": {
            role: dict(one.get("megatron") or {}) for role, one in (tree.get("model") or {}).items()
        },
        **_cluster(tree.get("cluster") or {}, environment),
    }
    return ProfileOptions.from_tree({name: value for name, value in tree.items() if value is not None})


def _cluster(cluster: Mapping[str, Any], environment: Mapping[str, str] | None) -> dict[str, Any]:
    given = {name: value for name, value in cluster.items() if value is not None and name != "device_memory"}
    if environment is not None:
        size = int(environment["WORLD_SIZE"])
        per_node = int(environment.get("LOCAL_WORLD_SIZE", size))
        given |= {"num_nodes": max(1, size // per_node), "devices_per_node": per_node}
    elif given.get("num_nodes", 1) != 1:
        raise ConfigError(
            f"profile: cluster.num_nodes: found {given['num_nodes']}; expected 1: only ranks of this machine are "
            "started here. Start megatron-real profile with torchrun or srun on all nodes."
        )
    if "devices_per_node" not in given:
        raise ConfigError(
            "profile: cluster.devices_per_node: found nothing; expected the number of ranks. Add cluster=cpu2 or "
            "cluster.devices_per_node=N."
        )
    return given


def _run(tree: Mapping[str, Any]) -> int:
    environment = rank_environment()
    options = options_from_tree(tree, environment)
    if environment is not None:
        os.environ.update(environment)
        _measure(options)
    else:
        with tempfile.TemporaryDirectory(prefix="profile-") as name:
            folder = Path(name)
            (folder / "options.json").write_text(options.dumps())
            command = [sys.executable, "-m", "megatron_real.cli.profile", str(folder / "options.json")]
            failed = launch_ranks(command, options.num_ranks, folder)
            if failed:
                return USER_ERROR
    if environment is None or environment["RANK"] == "0":
        Console(width=None if sys.stdout.isatty() else 160).print(
            summary(ProfileDatabase.load(options.output), options)
        )
    return 0


def _measure(options: ProfileOptions) -> None:
    install()
    from megatron_real.hooks.pinning import pin_rank  # imports torch

    pin_rank()
    from megatron_real.hooks.profiling.profiler import run_profile

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal or os.environ.get("RANK", "0") != "0"
    ) as bar:
        task = bar.add_task("profile", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and (done % _LINE_EVERY == 0 or done == total):
                console.print(f"{done}/{total} {what}")

        run_profile(options, show)


def summary(database: ProfileDatabase, options: ProfileOptions) -> Table:
    """What a profile has, by operation."""
    table = Table(title=f"{options.output}: profile {database.hash}", title_justify="left")
    for column in ("operation", "kind", "entries", "median spread"):
        table.add_column(column, justify="left" if column in ("operation", "kind") else "right")
    rows: dict[tuple[str, str], list[float]] = {}
    for entry in database.entries:
        rows.setdefault((entry.operation, entry.kind), []).append(entry.spread_s / max(entry.median_s, 1e-9))
    for (operation, kind), spreads in rows.items():
        table.add_row(operation, kind, str(len(spreads)), f"{sorted(spreads)[len(spreads) // 2]:.0%}")
    return table


def rank_main(argv: list[str]) -> int:
    """One rank, with the options of the file ``argv[0]``; returns the exit code."""
    try:
        _measure(ProfileOptions.loads(Path(argv[0]).read_text()))
    except RealError as error:
        report_error(error)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1:]))
