"""The options of a run, typed: what `examples/train.py` and ``megatron-real train`` hand to the runtime.

Both front doors end in one tree of options with the same dotted names. A Megatron-style command line
(`RunOptions.from_argv`) has a few `--real-*` flags, ``--real-set KEY=VALUE`` for the rest, and otherwise Megatron's own
arguments, which describe the actor; a Hydra configuration (`RunOptions.from_tree`) writes Megatron's arguments as the
mapping ``megatron``. All problems are collected and reported in one error. No torch, no Megatron.

Invariants (tests/unit/test_config.py):
    - the same run written for either front door is the same `RunOptions`;
    - `RunOptions.loads(options.dumps()) == options`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_real.algorithms.registry import find_algorithm
from megatron_real.errors import ConfigError, Problem, raise_problems
from megatron_real.hooks.arguments import add_real_arguments
from megatron_real.runtime.rewards.options import RewardOptions, WeightedFunction
from megatron_real.runtime.run_outputs import EvaluationOptions, SampleOptions, WandbOptions

__all__ = [
    "AlgorithmOptions",
    "DataOptions",
    "EvaluationOptions",
    "LivenessOptions",
    "MegatronValue",
    "ModelOptions",
    "NextPlan",
    "RewardOptions",
    "RunOptions",
    "SampleOptions",
    "WandbOptions",
    "conf_dir",
    "megatron_arguments",
]

MegatronValue = bool | int | float | str | list[int | float | str] | None
"""The value of a Megatron argument as YAML can write it."""

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]

_FLAG_OF = {
    "plan": "--real-plan",
    "output": "--real-output",
    "iterations": "--real-iterations",
    "reward": "--real-reward",
    "data.prompts": "--real-prompts",
    "data.batch_size": "--real-batch-size",
    "verify": "--real-verify",
    "next_plan": "--real-next-plan",
    "next_plan.iteration": "--real-next-plan",
    "next_plan.plan": "--real-next-plan",
}
"""The flag of an option, for error messages."""


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelOptions(_Options):
    """One role: where its weights come from, and how it differs from the actor."""

    load: Path | None = None
    """A Megatron dist checkpoint, in whatever layout it was written. Its architecture is read from it. None starts from
    new weights, or for ``ref`` from the actor's checkpoint."""
    megatron: dict[str, MegatronValue] = {}
    """Megatron arguments of this role that differ, by attribute name: ``num_layers``, ``lr``, ``clip_grad``, ..."""


class DataOptions(_Options):
    """The data of a run: prompts, prompts with answers, or preference pairs, as the algorithm asks."""

    prompts: str
    """A JSONL file, a folder of them, ``hf:NAME[@CONFIG][:SPLIT]``, or a folder that `datasets` saved. What the keys of
    a line mean stands in `megatron_real.runtime.data.records`; others are handed to the reward function."""
    batch_size: Count
    """Prompts, answers or pairs per iteration."""
    max_prompt_tokens: Count = 512
    max_answer_tokens: Count = 512
    """Of an answer in the data, the end token included."""
    truncate: bool = False
    """Cut what is longer: a prompt keeps its last tokens, an answer its first ones; otherwise it is an error."""
    append_end: bool = True
    """Whether the end token follows an answer in the data."""
    columns: dict[str, str] = {}
    """Our name of a key -> its name in the data, where it differs: ``prompt: question``."""
    chat_template: str | None = None
    """Jinja text, or its file, for prompts that are lists of messages; None takes the tokenizer's own."""
    eval_prompts: str | None = None
    """Held-out data of the same form; read in its order, by whole batches."""
    eval_batch_size: Count | None = None
    """None: as many sequences as a batch of training has, or all that there are."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the sources, as far as it shows without reading them."""
        for name, source in (("data.prompts", self.prompts), ("data.eval_prompts", self.eval_prompts)):
            if source is not None and not source.startswith("hf:") and not Path(source).exists():
                yield Problem(
                    path=_name(name),
                    found=f"{source}, which is no file",
                    expected="a JSONL file, a folder or hf:NAME",
                )


class LivenessOptions(_Options):
    """When a run that does not move is ended."""

    dead_after_s: Seconds = 12.0
    """A rank without a heartbeat for so long is dead or stopped."""
    stuck_after_s: Seconds = 600.0
    """An instruction may take so long."""


class NextPlan(_Options):
    """Another plan for the rest of a run."""

    iteration: Count
    """The first iteration under it, counted from 0 as in metrics.jsonl."""
    plan: Path
    """plan.json, of the same algorithm and number of devices."""


class AlgorithmOptions(BaseModel):
    """The algorithm's name; the other keys are its own options, as in `megatron_real.algorithms.configs`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "ppo"
    """A built-in one, or ``module:ATTRIBUTE`` of one's own; see `megatron_real.algorithms.registry`."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class RunOptions(_Options):
    """Everything that a training run needs to know.

    Raises:
        ConfigError: from the constructors below, listing every problem.
    """

    plan: Path
    """plan.json."""
    next_plan: NextPlan | None = None
    """Another plan, which the run goes on under from some iteration on; models move to it in memory."""
    output: Path = Path("runs/train")
    """Metrics, traces, checkpoints and the summary go here."""
    iterations: Count
    save_interval: Count | None = None
    """Iterations between checkpoints; the last one is always saved. None saves only that."""
    resume: bool = False
    """Go on from the last checkpoint in `output`."""
    verify: Literal["off", "checksum", "full"] = "off"
    """How reallocations prove what they delivered: see `realloc_ops.verify`."""
    seed: int = 1234
    reward: RewardOptions | None = None
    """Reward functions, or ``module:function`` for one of them; None asks the model ``reward``."""
    algorithm: AlgorithmOptions = AlgorithmOptions()
    model: dict[str, ModelOptions] = {}
    """By role. A role that is not here has no checkpoint and is like the actor."""
    data: DataOptions
    evaluation: EvaluationOptions = EvaluationOptions()
    samples: SampleOptions = SampleOptions()
    wandb: WandbOptions | None = None
    liveness: LivenessOptions = LivenessOptions()
    fault: tuple[str, ...] = ()
    """Injected faults, for tests; see `megatron_real.runtime.liveness.faults`."""
    megatron: tuple[str, ...] = ()
    """Megatron's arguments, which describe the actor; without ``--load`` and ``--seed``, which are options here."""

    def role(self, name: str) -> ModelOptions:
        """The options of a role, whether the user wrote any or not."""
        return self.model.get(name, ModelOptions())

    def algorithm_config(self) -> Any:
        """The algorithm's options as an object of its definition's `config` class.

        Raises:
            ConfigError: no such algorithm, or an option is unknown, of another type or out of range; lists all of them.
        """
        config = find_algorithm(self.algorithm.name).config
        known = [field.name for field in dataclasses.fields(config)]
        values = {**({"seed": self.seed} if "seed" in known else {}), **self.algorithm.options}
        raise_problems(
            (
                Problem(
                    path=f"algorithm.{name}",
                    found="an unknown option",
                    expected=f"one of {', '.join(known)}" if known else "none",
                )
                for name in values
                if name not in known
            ),
            subject="options",
            error=ConfigError,
        )
        try:
            return TypeAdapter(config).validate_python(values)
        except ValidationError as error:
            raise_problems(_problems(error, prefix="algorithm."), subject="options", error=ConfigError)
            raise AssertionError("a validation error without problems") from error

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], *, source: str = "options") -> RunOptions:
        """From plain nested data, such as a composed Hydra configuration.

        ``megatron`` may be a mapping from attribute names to values, or a list of command-line arguments.
        """
        tree = dict(tree)
        if isinstance(tree.get("megatron"), Mapping):
            tree["megatron"] = megatron_arguments(tree["megatron"])
        try:
            options = cls.model_validate(tree)
        except ValidationError as error:
            raise_problems(_problems(error), subject=source, error=ConfigError)
            raise AssertionError("a validation error without problems") from error
        raise_problems(options._file_problems(), subject=source, error=ConfigError)
        named = {role: model for role, model in options.model.items() if model != ModelOptions()}
        return options.model_copy(update={"model": named})

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> RunOptions:
        """From a Megatron-style command line, without the program's name."""
        parser = add_real_arguments(
            argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
        )
        parser.add_argument("--load")
        parser.add_argument("--seed", type=int)
        try:
            known, megatron = parser.parse_known_args(list(argv))
        except argparse.ArgumentError as error:
            raise ConfigError(f"command line: {error}.") from error
        tree: dict[str, Any] = {
            "megatron": tuple(megatron),
            "fault": tuple(known.real_fault),
            "data": _given(prompts=known.real_prompts, batch_size=known.real_batch_size),
            **_given(
                plan=known.real_plan,
                next_plan=_next_plan(known.real_next_plan),
                output=known.real_output,
                iterations=known.real_iterations,
                reward=known.real_reward and {"functions": [known.real_reward]},  # --real-set adds to it
                resume=known.real_resume or None,
                verify=known.real_verify,
                seed=known.seed,
            ),
        }
        roles = _roles(
            known.real_models, [*known.real_model, *([f"actor={known.load}"] if known.load else [])]
        )
        if roles:
            tree["model"] = roles
        return cls.from_tree(_with_settings(tree, known.real_set), source="command line")

    @classmethod
    def loads(cls, text: str) -> RunOptions:
        """Inverse of `dumps`."""
        return cls.from_tree(json.loads(text))

    def dumps(self) -> str:
        """JSON text: what a run leaves in its folder, and what a launcher hands to its ranks."""
        return self.model_dump_json(indent=1) + "\n"

    def _file_problems(self) -> Iterator[Problem]:
        if not self.plan.is_file():
            yield Problem(path=_name("plan"), found=f"{self.plan}, which is no file", expected="a plan.json")
        if self.next_plan is not None:
            yield from _next_plan_problems(self.next_plan, self.iterations)
        yield from self.data.problems()
        for role, model in self.model.items():
            if model.load is not None and not model.load.is_dir():
                yield Problem(
                    path=f"model.{role}.load",
                    found=f"{model.load}, which is no folder",
                    expected="the folder of a Megatron checkpoint",
                )
        if self.output.exists() and not self.output.is_dir():
            yield Problem(path=_name("output"), found=f"{self.output}, which is a file", expected="a folder")
        if self.reward is not None:
            yield from self.reward.problems(self.liveness.stuck_after_s)
        if self.data.eval_prompts is None and self.evaluation != EvaluationOptions():
            expected = "held-out data, on which evaluations are made"
            yield Problem(path="data.eval_prompts", found="nothing", expected=expected)


def megatron_arguments(values: Mapping[str, MegatronValue]) -> tuple[str, ...]:
    """Command-line arguments from attribute names.

    ``{"num_layers": 2, "swiglu": True}`` becomes ``--num-layers 2 --swiglu``. False and null leave the flag
    out: a flag that switches something off has a name of its own (``disable_bias_linear: true``).
    """
    arguments: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        arguments.append("--" + str(name).replace("_", "-"))
        if value is not True:
            arguments += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return tuple(arguments)


def conf_dir() -> Path:
    """The folder of the Hydra configuration: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def _name(path: str) -> str:
    flag = _FLAG_OF.get(path)
    return f"{path} ({flag})" if flag else path


def _problems(error: ValidationError, prefix: str = "") -> Iterator[Problem]:
    seen: set[str] = set()
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if "megatron" in where[:-1]:
            where = where[: where.index("megatron") + 2]  # not one problem per type that it might have been
        path = prefix + ".".join(where)
        if path in seen:
            continue
        seen.add(path)
        if item["type"] == "extra_forbidden":
            yield Problem(path=path, found="an unknown option", expected=f"one of {', '.join(_known(where))}")
        elif item["type"] == "missing":
            yield Problem(path=_name(path), found="nothing", expected="a value: it has no default")
        else:
            yield Problem(path=_name(path), found=repr(item["input"]), expected=item["msg"])


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _known(where: Sequence[str]) -> list[str]:
    """The options that there are at the place where `where` names one that there is not."""
    inner: dict[str, type[BaseModel]] = {
        "data": DataOptions,
        "evaluation": EvaluationOptions,
        "liveness": LivenessOptions,
        "model": ModelOptions,
        "reward": WeightedFunction if "functions" in where[:-1] else RewardOptions,
        "samples": SampleOptions,
        "wandb": WandbOptions,
    }
    owner: type[BaseModel] = inner.get(where[0], RunOptions) if len(where) > 1 else RunOptions
    return list(owner.model_fields)


def _roles(path: str | None, loads: Sequence[str]) -> dict[str, Any]:
    """``models.yaml`` overlaid with ``ROLE=DIR`` from the command line."""
    roles: dict[str, Any] = {}
    if path is not None:
        try:
            # OmegaConf, as Hydra and --real-set: plain YAML 1.1 takes 1e-5 for text.
            read: Any = OmegaConf.to_container(OmegaConf.load(path))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(
                f"--real-models: {path}: cannot be read ({error}). Give a YAML file of roles."
            ) from error
        if not isinstance(read, dict) or not all(isinstance(role, dict) for role in read.values()):
            raise ConfigError(
                f"--real-models: {path}: found {type(read).__name__}; expected ROLE: {{load: DIR, megatron: {{...}}}}."
            )
        roles = read
    given: dict[str, str] = {}
    for text in loads:
        role, separator, folder = text.partition("=")
        if not separator or not role or not folder:
            raise ConfigError(
                f"--real-model: found {text!r}; expected ROLE=DIR, for example critic=checkpoints/lm."
            )
        if given.setdefault(role, folder) != folder:
            flags = "--load and --real-model" if role == "actor" else "--real-model"
            raise ConfigError(
                f"{flags}: found two checkpoints of {role}, {given[role]} and {folder}; expected one. Drop the other."
            )
        roles[role] = {**roles.get(role, {}), "load": folder}
    return roles


def _next_plan(text: str | None) -> dict[str, Any] | None:
    """``20:other.json`` as options."""
    if text is None:
        return None
    iteration, _, plan = text.partition(":")
    if not iteration.isdigit() or not plan:
        raise ConfigError(
            f"--real-next-plan: found {text!r}; expected ITERATION:PLAN.JSON, such as 20:other.json."
        )
    return {"iteration": int(iteration), "plan": plan}


def _next_plan_problems(following: NextPlan, iterations: int) -> Iterator[Problem]:
    if not following.plan.is_file():
        yield Problem(
            path=_name("next_plan.plan"), found=f"{following.plan}, which is no file", expected="a plan.json"
        )
    if following.iteration >= iterations:
        yield Problem(
            path=_name("next_plan.iteration"),
            found=str(following.iteration),
            expected=f"one of 1 to {iterations - 1}: the run has {iterations} iterations, counted from 0",
        )


def _with_settings(tree: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`tree` with ``KEY=VALUE`` settings over it; values are YAML."""
    for text in settings:
        if "=" not in text.removeprefix("="):
            raise ConfigError(
                f"--real-set: found {text!r}; expected KEY=VALUE, for example algorithm.clip_ratio=0.1."
            )
    try:
        changes = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(
            f"--real-set: found {list(settings)}; expected KEY=VALUE with YAML values ({error})."
        ) from error
    assert isinstance(changes, dict), "a list of settings makes a mapping"
    return _merged(tree, changes)


def _merged(base: Mapping[Any, Any], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return result
