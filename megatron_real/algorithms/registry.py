"""Every algorithm by its name, and a user's own by ``module:ATTRIBUTE``. No torch until one is built.

A user's file defines an `AlgorithmDefinition` at its top level; ``algorithm.name=my_file:ALGORITHM`` runs it, and a
plan for it has that text as its ``algorithm``. examples/custom_algorithm.py is such a file.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megatron_real.algorithms import configs, graphs
from megatron_real.dataflow import Graph
from megatron_real.errors import ConfigError
from megatron_real.plan import Plan

if TYPE_CHECKING:
    from megatron_real.backend import Algorithm, Scorer

__all__ = ["ALGORITHMS", "AlgorithmDefinition", "Maker", "find_algorithm", "graph_of_plan"]


_EXTRA_REWARD = re.compile(r"^rew\d+_inf$")


class Maker(Protocol):
    """What makes an algorithm of its options; a class that has the methods of `backend.Algorithm` is one."""

    def __call__(self, config: Any, graph: Graph, end_token: int, scorer: Scorer | None) -> Algorithm:
        """Make it.

        Args:
            config: of the definition's class.
            graph: of the definition, with the options that follow from the config.
            end_token: closes a response.
            scorer: what computes calls without a model; None: all calls have models.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmDefinition:
    """An algorithm: what it is planned by, its options, and what makes it of them."""

    name: str
    """As in `algorithm.name` and in a plan."""
    graph: Callable[..., Graph]
    """``(**options) -> Graph``, all optional. ``reward`` is ``"model"`` or ``"function"`` where rewards are computed;
    an option that the config has too is taken from it. Imports no torch, if plans are to be made without."""
    config: type[Any]
    """A frozen dataclass that raises ConfigError; `megatron_real.algorithms.options.Options` helps. An option ``seed``
    is the run's where it is not given."""
    algorithm: Maker

    def build(self, config: Any, *, end_token: int, scorer: Scorer | None = None) -> Algorithm:
        """The algorithm of a run.

        Args:
            config: of this definition's class.
            end_token: closes a response.
            scorer: what computes the rewards in the place of a reward model.

        Raises:
            ConfigError: as `graph_for`.
        """
        graph = self.graph_for(config, reward="model" if scorer is None else "function")
        return self.algorithm(config, graph, end_token, scorer)

    def graph_options(self, config: Any) -> dict[str, Any]:
        """The options of the graph that follow from those of a run."""
        names = {field.name for field in dataclasses.fields(self.config)}
        return {name: getattr(config, name) for name in self.graph_parameters if name in names}

    def graph_of(self, **options: Any) -> Graph:
        """The graph with these options, under this definition's name.

        Args:
            options: of the graph. Options of the config that the graph does not have change nothing in it.

        Raises:
            ConfigError: neither has such an option.
            PlanError: an option is not one of its values.
        """
        known = self.graph_parameters
        others = {field.name for field in dataclasses.fields(self.config)}
        unknown = sorted(set(options) - set(known) - others)
        if unknown:
            raise ConfigError(
                f"algorithm {self.name}: found the options {', '.join(unknown)}; expected some of "
                f"{', '.join(dict.fromkeys([*known, *sorted(others)]))}."
            )
        graph = self.graph(**{name: value for name, value in options.items() if name in known})
        return graph if graph.name == self.name else dataclasses.replace(graph, name=self.name)

    def graph_for(self, config: Any, *, reward: str = "model") -> Graph:
        """The graph of a run with these options.

        Args:
            config: of this definition's class.
            reward: whether rewards come from a ``"model"`` or from a ``"function"``.

        Raises:
            ConfigError: there is a reward function, and the algorithm has nothing to reward.
        """
        options = self.graph_options(config)
        if "reward" in self.graph_parameters:
            options["reward"] = reward
        elif reward == "function":
            raise ConfigError(
                f"reward: found a reward function with algorithm {self.name}; expected none: it scores no responses."
            )
        return self.graph_of(**options)

    @property
    def graph_parameters(self) -> tuple[str, ...]:
        """The names of the graph's options."""
        return tuple(inspect.signature(self.graph).parameters)


def _built_in(
    name: str, graph: Callable[..., Graph], config: type[Any], class_path: str
) -> AlgorithmDefinition:
    module, _, class_name = class_path.partition(":")

    def make(config: Any, graph: Graph, end_token: int, scorer: Scorer | None) -> Algorithm:
        algorithm: Maker = getattr(importlib.import_module(f"megatron_real.algorithms.{module}"), class_name)
        return algorithm(config, graph, end_token, scorer)

    return AlgorithmDefinition(name=name, graph=graph, config=config, algorithm=make)


ALGORITHMS: Mapping[str, AlgorithmDefinition] = MappingProxyType(
    {
        definition.name: definition
        for definition in (
            _built_in("ppo", graphs.ppo_graph, configs.PPOConfig, "ppo:PPO"),
            _built_in("grpo", graphs.grpo_graph, configs.GRPOConfig, "grpo:GRPO"),
            _built_in("rloo", graphs.rloo_graph, configs.RLOOConfig, "reinforce:RLOO"),
            _built_in(
                "reinforce_pp", graphs.reinforce_pp_graph, configs.ReinforcePPConfig, "reinforce:ReinforcePP"
            ),
            _built_in("remax", graphs.remax_graph, configs.ReMaxConfig, "reinforce:ReMax"),
            _built_in("dpo", graphs.dpo_graph, configs.DPOConfig, "supervised:DPO"),
            _built_in("reward", graphs.reward_graph, configs.RewardConfig, "supervised:RewardModelling"),
            _built_in("sft", graphs.sft_graph, configs.SFTConfig, "supervised:SFT"),
        )
    }
)
"""The built-in ones."""


def find_algorithm(name: str) -> AlgorithmDefinition:
    """The algorithm of this name; its definition's `name` is the given one.

    Args:
        name: one of `ALGORITHMS`, or ``module:ATTRIBUTE`` of a definition that an importable module has.

    Raises:
        ConfigError: there is no such algorithm, the module cannot be imported, or the attribute is no definition.
    """
    if ":" not in name:
        if name not in ALGORITHMS:
            raise ConfigError(
                f"algorithm: found {name!r}; expected one of {', '.join(ALGORITHMS)}, or module:ATTRIBUTE of your own."
            )
        return ALGORITHMS[name]
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(
            f"algorithm: found {name!r}; expected module:ATTRIBUTE, such as my_algorithm:ALGORITHM."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user: importing it can raise anything
        raise ConfigError(
            f"algorithm {name}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}). Put its "
            "folder on PYTHONPATH, or mend the module."
        ) from error
    definition = getattr(module, attribute, None)
    if not isinstance(definition, AlgorithmDefinition):
        has = [key for key, value in vars(module).items() if isinstance(value, AlgorithmDefinition)]
        found = "nothing" if definition is None else f"a {type(definition).__name__}"
        raise ConfigError(
            f"algorithm {name}: found {found} under {attribute!r}; expected an AlgorithmDefinition. {module_name} has "
            f"{', '.join(has) or 'none'}."
        )
    return dataclasses.replace(definition, name=name)


def graph_of_plan(plan: Plan, given: Mapping[str, Any] | None = None) -> Graph | None:
    """The graph of a plan's algorithm, with the options that its calls show; None where it is no algorithm of ours.

    Args:
        plan: the plan.
        given: options of the algorithm that the user gives, such as ``{"reward": "function"}``: a plan that records no
            inputs does not show whether a call has a model.

    Raises:
        ConfigError: an option that the algorithm does not have, or `find_algorithm` does not find the user's.
    """
    if plan.algorithm not in ALGORITHMS and ":" not in plan.algorithm:
        return None
    definition = find_algorithm(plan.algorithm)
    recorded = (plan.predicted.model_extra or {}).get("inputs") if plan.predicted is not None else None
    inputs = recorded if isinstance(recorded, Mapping) else {}
    scored = "reward" in inputs.get("models", {"reward": None})
    moves = next(
        (one for one in inputs.get("updates", ()) if one["target"] == "ref"), {"mix": 0.0, "every": 1}
    )
    shown = {
        "reference": "ref_inf" in plan.calls,
        "reference_ema": moves["mix"],
        "reference_ema_every": moves["every"],
        "reward": "model" if scored else "function",
        "extra_rewards": sum(bool(_EXTRA_REWARD.match(name)) for name in plan.calls),
    }
    options = {name: value for name, value in shown.items() if name in definition.graph_parameters}
    return definition.graph_of(**{**options, **(given or {})})
