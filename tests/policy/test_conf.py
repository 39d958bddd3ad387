"""Every file of the Hydra configuration composes, and installs with the package."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from megatron_real.config import RunOptions, conf_dir

CONF = conf_dir()
CHOICES = sorted(
    (path.parent.name, path.stem)
    for path in CONF.rglob("*.yaml")
    if path.parent != CONF and path.parent.parent == CONF
)


TRAINED = [(group, choice) for group, choice in CHOICES if group != "workload"]
"""tests/unit/cli/test_search.py composes the workloads."""


@pytest.mark.parametrize(("group", "choice"), TRAINED, ids=["/".join(pair) for pair in TRAINED])
def test_every_choice_composes_to_options(group: str, choice: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    given = [f"plan={prompts}", f"data.prompts={prompts}", "iterations=1"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"{group}={choice}", *given])
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    tree.pop("cluster")
    options = RunOptions.from_tree({str(key): value for key, value in tree.items()})
    assert options.megatron[0].startswith("--")


def test_every_file_of_the_configuration_is_a_choice_or_a_primary_file() -> None:
    known = {CONF / group / f"{choice}.yaml" for group, choice in CHOICES} | set(CONF.glob("*.yaml"))
    assert {path for path in CONF.rglob("*") if path.is_file()} == known
