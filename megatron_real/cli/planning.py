"""What the planning commands share: options from Hydra, graphs of plans, planners, errors. Needs no torch.

Every file of ``conf/model`` is a choice of ``model`` (for all roles, as `train` has it) and of ``model/ROLE``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from megatron_real.algorithms.registry import ALGORITHMS, find_algorithm, graph_of_plan
from megatron_real.config import conf_dir
from megatron_real.errors import ConfigError, Problem, RealError, raise_problems
from megatron_real.plan import Plan
from megatron_real.plan_search.inputs import PlanInputs
from megatron_real.plan_search.planner import Planner
from megatron_real.plan_search.planner_inputs import (
    changed_inputs,
    planner_of,
    recorded_inputs,
    with_changes,
)
from megatron_real.plan_search.report import seconds_text

__all__ = [
    "ROLES",
    "LoadedPlan",
    "change_lines",
    "choices",
    "compose_options",
    "console",
    "hydra_overrides",
    "inputs_of_tree",
    "load_plan",
    "run_jobs",
    "split_arguments",
    "tree_of",
]

ROLES = ("actor", "critic", "ref", "reward")
"""Roles for which ``model/ROLE=NAME`` chooses a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlan:
    """A plan with the planner that prices it."""

    plan: Plan
    inputs: PlanInputs
    planner: Planner
    changes: tuple[str, ...]
    """What is other than where its own estimate was made."""


def console() -> Console:
    """Standard output; wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def choices(group: str) -> tuple[str, ...]:
    """Names of the files of a group of the configuration."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def split_arguments(argv: Sequence[str], count: int, usage: str) -> tuple[list[str], list[str]]:
    """`count` files, and the overrides ``KEY=VALUE`` beside them.

    Raises:
        ConfigError: there are other numbers of files.
    """
    files = [argument for argument in argv if "=" not in argument and not argument.startswith("-")]
    rest = [argument for argument in argv if argument not in files]
    flags = [argument for argument in rest if argument.startswith("-") and argument != "--plan-only"]
    if len(files) != count or flags:
        found = " ".join([*files, *flags]) or "nothing"
        raise ConfigError(f"{usage.split(' ')[1]}: found {found}; expected: {usage}")
    return files, rest


def hydra_overrides(argv: Sequence[str]) -> list[str]:
    """Let ``key=value`` also set options that no YAML file names: `PlanInputs` knows them all."""
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    groups |= {f"model/{role}" for role in ROLES} - {"search"}
    result = []
    for given in argv:
        argument = "search.plan_only=true" if given == "--plan-only" else given
        key, equals, _ = argument.partition("=")
        plain = equals and key[:1] not in ("+", "~", "-") and not key.startswith("hydra")
        result.append(f"++{argument}" if plain and key.partition("@")[0] not in groups else argument)
    return result


def compose_options(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The tree of a primary file under overrides.

    Raises:
        ConfigError: a choice or a key that there is not.
    """
    _register_models()
    with (
        _config_errors(name),
        hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"),
    ):
        return tree_of(hydra.compose(name, hydra_overrides(overrides)))


def run_jobs(
    name: str, argv: Sequence[str], task: Callable[[DictConfig, int | None, tuple[str, ...]], None]
) -> None:
    """Run `task` once, or with ``-m`` once per job of the sweep.

    Args:
        name: of the primary file.
        argv: the command line.
        task: gets the composed options, the number of the job (None without ``-m``) and its overrides.

    Raises:
        ConfigError: the options cannot be composed.
    """
    _register_models()

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)
    def job(config: DictConfig) -> None:
        settings = HydraConfig.get()
        number = settings.job.num if settings.mode == RunMode.MULTIRUN else None
        try:
            task(config, number, tuple(text.removeprefix("++") for text in settings.overrides.task))
        except RealError as error:  # raised below: Hydra would print a line of its own
            failed.append(error)

    failed: list[RealError] = []
    former = sys.argv
    sweeps = [argument for argument in argv if argument in ("-m", "--multirun")]
    rest = [argument for argument in argv if argument not in sweeps]
    with tempfile.TemporaryDirectory() as folder, _config_errors(name):  # Hydra wants to leave files
        sys.argv = [
            f"megatron-real {name}",
            f"hydra.run.dir={folder}",
            f"hydra.sweep.dir={folder}",
            *hydra_overrides(rest),
            *sweeps,  # Hydra takes no options between overrides
        ]
        try:
            job()
        finally:
            sys.argv = former
    if failed:
        raise failed[0]


def tree_of(config: DictConfig) -> dict[str, Any]:
    """A configuration as plain data.

    Raises:
        ConfigError: a value is missing or cannot be resolved.
    """
    try:
        container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"options: {_one_line(error)}") from error
    assert isinstance(container, dict), "a configuration is a mapping"
    return {str(key): value for key, value in container.items() if key != "hydra"}


def inputs_of_tree(tree: Mapping[str, Any], source: str) -> PlanInputs:
    """Checked inputs; responses to a prompt, if the workload does not say, are as the algorithm has it by default.

    Raises:
        ConfigError: listing every problem; where a model or a cluster is missing, the known ones.
    """
    raise_problems(_missing(tree), subject=source, error=ConfigError)
    inputs = PlanInputs.from_tree(tree, source=source)
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(find_algorithm(inputs.algorithm.name).config)
    }
    samples = defaults.get("samples_per_prompt")
    if "group_size" in inputs.workload.model_fields_set or not isinstance(samples, int):
        return inputs
    return inputs.model_copy(update={"workload": inputs.workload.model_copy(update={"group_size": samples})})


def load_plan(path: str, tree: Mapping[str, Any], source: str) -> LoadedPlan:
    """A plan and its planner: what the plan records, under the changes of `tree`.

    Args:
        path: of the plan.
        tree: composed options; what is None or not there is not changed.
        source: the command, for errors.

    Raises:
        ConfigError: the plan does not record its inputs, and `tree` does not give them.
        PlanError: no such plan, or of an algorithm that has no graph here.
    """
    plan = Plan.load(path)
    given = {name: value for name, value in (tree.get("algorithm") or {}).items() if name != "name"}
    graph = graph_of_plan(plan, given)
    if graph is None:
        raise ConfigError(
            f"{path}: found algorithm {plan.algorithm!r}; expected one of {', '.join(ALGORITHMS)}."
        )
    base = recorded_inputs(plan)
    if base is None:
        known = plan.algorithm if plan.algorithm in choices("workload") else "ppo"
        workload = compose_options("simulate", [f"workload={known}"])["workload"]
        base = {"algorithm": {"name": plan.algorithm}, "workload": workload}
    base["cluster"] = plan.cluster.model_dump()
    base["model"] = {
        role: model
        for role, model in base.get("model", {}).items()
        if not _follows(role, base["model"], tree)
    }
    inputs = inputs_of_tree(with_changes(base, tree), f"{source}: {path}")
    planner = planner_of(inputs, graph)
    plan.check(graph, source=path)
    return LoadedPlan(plan=plan, inputs=inputs, planner=planner, changes=changed_inputs(plan, planner))


def change_lines(loaded: LoadedPlan) -> Iterator[str]:
    """That an estimate is made anew, where the plan records one for other inputs."""
    if not loaded.changes or loaded.plan.predicted is None:
        return
    former = loaded.plan.predicted.iteration_s
    recorded = f" (the plan records a period of {seconds_text(former)})" if former is not None else ""
    yield f"estimated anew, for other inputs than the plan was made for{recorded}:"
    for change in loaded.changes:
        yield f"  {change}"


def _follows(role: str, recorded: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Whether a recorded model is like another one, which is chosen anew."""
    given = {name for name, model in (tree.get("model") or {}).items() if model}
    if tree.get("megatron"):
        return role not in given
    like = {"ref": "actor", "reward": "critic"}.get(role, "")
    return like in given and role not in given and recorded[role] == recorded.get(like)


def _missing(tree: Mapping[str, Any]) -> Iterator[Problem]:
    cluster = tree.get("cluster") or {}
    if not cluster.get("devices_per_node"):
        known = [name for name in choices("cluster") if name != "plan"]
        yield Problem(
            path="cluster",
            found="nothing",
            expected="one",
            fix=f"Add cluster=NAME ({', '.join(known)}), or cluster.devices_per_node=N cluster.device=NAME.",
        )
    model = tree.get("model") or {}
    if not tree.get("megatron") and not any(model.values()):
        yield Problem(
            path="model",
            found="nothing",
            expected="the actor's",
            fix=f"Add model/actor=NAME ({', '.join(choices('model'))}), or model=NAME for all roles.",
        )


def _register_models() -> None:
    store = ConfigStore.instance()
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        arguments = yaml.safe_load(path.read_text(encoding="utf-8"))["megatron"]
        for role in ROLES:
            node = {"name": path.stem, "megatron": arguments}
            store.store(group=f"model/{role}", name=path.stem, node=node, provider="megatron-real")


@contextmanager
def _config_errors(source: str) -> Iterator[None]:
    """Hydra's errors as one line each."""
    former = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise them instead of printing and leaving
    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        known = error.options or choices(group)
        raise ConfigError(
            f"{source}: {group}: found {name!r}; expected one of {', '.join(known)}."
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: {_one_line(error)}") from error
    finally:
        if former is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = former


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
