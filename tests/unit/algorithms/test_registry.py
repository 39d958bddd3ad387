"""Algorithms by name, and a user's own by ``module:ATTRIBUTE``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_real.algorithms.graphs import graph_of, rloo_graph
from megatron_real.algorithms.options import Options, option
from megatron_real.algorithms.registry import ALGORITHMS, find_algorithm, graph_of_plan
from megatron_real.backend import Algorithm, Head
from megatron_real.errors import ConfigError
from megatron_real.plan import ClusterSpec
from megatron_real.plan_search.presets import symmetric

OWN = """
from dataclasses import dataclass

from megatron_real.algorithms.graphs import rloo_graph
from megatron_real.algorithms.options import Options
from megatron_real.algorithms.registry import AlgorithmDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConfig(Options):
    reference: bool = False


class Own:
    def __init__(self, config, graph, end_token, scorer):
        self.made_of = (config, graph, end_token, scorer)


ALGORITHM = AlgorithmDefinition(name="own", graph=rloo_graph, config=OwnConfig, algorithm=Own)
NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_algorithm.py").write_text(OWN)
    (tmp_path / "broken_algorithm.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_algorithm", "broken_algorithm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "own_algorithm:ALGORITHM"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_built_by_its_defaults(name: str) -> None:
    definition = find_algorithm(name)
    config = definition.config()
    algorithm: Algorithm = definition.build(config, end_token=7)
    assert (
        algorithm.graph == definition.graph_for(config) == graph_of(name, **definition.graph_options(config))
    )
    assert algorithm.graph.name == name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_takes_what_the_graph_says_that_its_model_returns(name: str) -> None:
    algorithm = find_algorithm(name).build(find_algorithm(name).config(), end_token=7)
    trained = [call for call in algorithm.graph.calls if call.trains]
    assert trained
    for call in trained:
        scalar = algorithm.objective(call).head is not Head.LOGPROBS
        assert algorithm.graph.has_scalar_head(call.model or "") is scalar, call.name


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "reinforce_pp", "remax"])
def test_the_graph_follows_the_options(name: str) -> None:
    definition = find_algorithm(name)
    with_it = definition.graph_for(definition.config(reference=True), reward="function")
    without = definition.graph_for(definition.config(reference=False, kl_coefficient=0.0))
    assert "ref" in with_it.models
    assert "reward" not in with_it.models
    assert "ref" not in without.models
    assert "reward" in without.models


@pytest.mark.parametrize("name", ["dpo", "reward", "sft"])
def test_what_scores_nothing_takes_no_reward_function(name: str) -> None:
    definition = find_algorithm(name)
    with pytest.raises(ConfigError, match=f"found a reward function with algorithm {name}; expected none"):
        definition.graph_for(definition.config(), reward="function")


def test_an_own_algorithm_goes_by_the_name_it_is_found_under(own: str) -> None:
    definition = find_algorithm(own)
    assert definition.name == own
    config = definition.config()
    graph = definition.graph_for(config, reward="function")
    assert graph.name == own
    assert graph.calls == rloo_graph("function", reference=False).calls
    assert graph_of(own, reference=False, reward="function") == graph
    assert definition.build(config, end_token=7).made_of == (
        config,
        definition.graph_for(config),
        7,
        None,
    )
    plan = symmetric(graph, ClusterSpec(devices_per_node=1))
    assert plan.algorithm == own
    assert graph_of_plan(plan, {"reward": "function"}) == graph


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("trpo", "found 'trpo'; expected one of ppo, grpo, .*, or module:ATTRIBUTE of your own"),
        (":ALGORITHM", "expected module:ATTRIBUTE"),
        ("own_algorithm:", "expected module:ATTRIBUTE"),
        ("own_algorithm:A B", "expected module:ATTRIBUTE"),
        ("no_such_module:A", "'no_such_module' cannot be imported .ModuleNotFoundError: .* Put its folder on"),
        ("broken_algorithm:A", "cannot be imported .RuntimeError: no luck"),
        ("own_algorithm:NO", "found nothing under 'NO'; expected an AlgorithmDefinition. own_algorithm has ALGORITHM"),
        ("own_algorithm:NUMBER", "found a int under 'NUMBER'"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_one_error(own: str, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        find_algorithm(name)


def test_definitions_need_no_torch() -> None:
    script = (
        "import sys; from megatron_real.algorithms.registry import ALGORITHMS; "
        "[d.graph_for(d.config()) for d in ALGORITHMS.values()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Some(Options):
    share: float = option(0.5, at_least=0, at_most=1)
    count: int = option(3, above=0, other_than=5)
    limit: float | None = option(None, below=2)
    kind: str = option("a", choices=("a", "b"))
    plain: float = 0.0
    flag: bool = True


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"share": -0.1}, "share: found -0.1; expected 0 to 1."),
        ({"share": 1.1}, "share: found 1.1"),
        ({"share": float("nan")}, "share: found nan"),
        ({"count": 0}, "count: found 0; expected a number above 0 and other than 5."),
        ({"count": 5}, "count: found 5"),
        ({"limit": 2.0}, "limit: found 2.0; expected a number below 2, or none."),
        ({"kind": "c"}, "kind: found 'c'; expected one of a, b."),
        ({"plain": float("inf")}, "plain: found inf; expected a finite number."),
    ],
)
def test_an_option_out_of_its_range(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _Some(**given)
    assert str(caught.value).startswith(f"algorithm: {problem}")


def test_problems_of_options_are_reported_together() -> None:
    _Some(share=1.0, count=1, limit=1.5, kind="b", plain=-3.0, flag=False)
    with pytest.raises(ConfigError, match="3 problems") as caught:
        _Some(share=2.0, count=-1, kind="")
    assert [line.strip(" -").partition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "share",
        "count",
        "kind",
    ]
