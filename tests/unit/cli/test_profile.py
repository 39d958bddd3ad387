"""Options of `megatron-real profile`: from the configuration, and from torchrun's environment."""

from typing import Any

import pytest

from megatron_real.cli.profile import options_from_tree
from megatron_real.errors import ConfigError


def tree(**changes: Any) -> dict[str, Any]:
    """A composed configuration."""
    return {
        "output": "p.json",
        "cluster": {"num_nodes": None, "devices_per_node": 2},
        "megatron": {"num_layers": 2, "swiglu": True, "tied": False},
        "model": {"critic": {"megatron": {"hidden_size": 32}}},
        **changes,
    }


def test_a_model_is_described_as_for_train() -> None:
    options = options_from_tree(tree(max_length=64, tp=[1, 2], device=None))
    assert options.megatron == ("--num-layers", "2", "--swiglu")
    assert options.overrides == {"critic": {"hidden_size": 32}}
    assert (options.num_ranks, options.max_length, options.tp, options.device) == (2, 64, (1, 2), None)


def test_torchrun_decides_the_ranks() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    options = options_from_tree(tree(cluster={"num_nodes": None, "devices_per_node": None}), environment)
    assert (options.num_nodes, options.devices_per_node) == (2, 4)


def test_ranks_of_other_machines_are_not_started_here() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes: found 2; expected 1.*torchrun"):
        options_from_tree(tree(cluster={"num_nodes": 2, "devices_per_node": 2}))
    with pytest.raises(ConfigError, match=r"cluster\.devices_per_node: found nothing"):
        options_from_tree(tree(cluster={}))


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="max_lenght: found an unknown option"):
        options_from_tree(tree(max_lenght=3))
