"""A profile of two ranks: what it holds, that the search can price with it, and that it goes on where it stopped."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.config import megatron_arguments
from megatron_real.dataflow import CallType
from megatron_real.errors import ConfigError, PlanError
from megatron_real.hooks import pinning
from megatron_real.hooks.profiling.calls import DECODE_STEPS, Shape, generate_call, infer_call, train_call
from megatron_real.hooks.profiling.clock import Marks, median, probed, quartile_range
from megatron_real.hooks.profiling.models import Copies, describe_roles
from megatron_real.hooks.profiling.profiler import run_profile
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement
from megatron_real.plan_search.cluster import Cluster, Device
from megatron_real.plan_search.costs.calls import CallPricer
from megatron_real.plan_search.costs.operations import Grid, MicroBatch, Pass
from megatron_real.plan_search.costs.profiled import ProfiledCost
from megatron_real.plan_search.profile_db import Operation, ProfileDatabase
from megatron_real.plan_search.profile_options import ProfileOptions
from megatron_real.plan_search.workload import LengthDistribution, Workload
from megatron_real.process_groups import ProcessGroups
from tests.e2e.tiny_run import MEGATRON
from tests.harness import RankFailed, run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron, pytest.mark.dist]

DEVICE = Device(name="cpu", memory_bytes=1 << 34, constants={"cores_per_node": 2})


def options(output: Path, **changes: Any) -> ProfileOptions:
    """The smallest profile that has everything."""
    fields: dict[str, Any] = {
        "output": output,
        "devices_per_node": 2,
        "megatron": megatron_arguments(MEGATRON),
        "max_sequences": 2,
        "max_length": 16,
        "layers": (1, 2),
        "max_bytes": 4096,
        "repetitions": (1, 2),
        "seconds": 0.01,
    }
    return ProfileOptions(**{**fields, **changes})


def _profile(text: str) -> str:
    return run_profile(ProfileOptions.loads(text)).dumps()


def profile(chosen: ProfileOptions) -> ProfileDatabase:
    """Run it on two ranks; they must end with the same database as the file."""
    first, second = run_ranks(2, _profile, chosen.dumps(), timeout_s=240)
    assert first == second
    assert ProfileDatabase.load(chosen.output) == ProfileDatabase.loads(first)
    return ProfileDatabase.loads(first)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> ProfileOptions:
    """Options whose file is there."""
    made = options(tmp_path_factory.mktemp("profile") / "profile.json")
    profile(made)
    return made


def specs(chosen: ProfileOptions) -> dict[str, Any]:
    """What `describe_roles` says of the models, from a process of its own: it installs the CPU device."""
    (found,) = run_ranks(1, _specs, chosen.model_copy(update={"devices_per_node": 1}).dumps())
    return dict(found)


def _specs(text: str) -> list[Any]:
    return [(role.model.role, role.spec) for role in describe_roles(ProfileOptions.loads(text))[0]]


def test_every_call_of_every_measured_layout_has_a_price(chosen: ProfileOptions) -> None:
    database = ProfileDatabase.load(chosen.output)
    assert database.provenance.device == "cpu"
    assert (database.provenance.num_ranks, database.provenance.ranks_per_node) == (2, 2)
    measured = {entry.operation for entry in database.entries}
    assert (Operation.CONTENTION in measured) == database.provenance.shares_cores
    found = specs(chosen)
    models = {
        "actor": found["actor"],
        "ref": found["actor"],
        "critic": found["critic"],
        "reward": found["critic"],
    }
    workload = Workload(
        batch_size=8,
        prompt=LengthDistribution.constant(6),
        response=LengthDistribution.constant(8),
        num_minibatches=2,
    )
    graph = ppo_graph()
    cluster = Cluster(spec=ClusterSpec(devices_per_node=2), device=DEVICE)
    pricer = CallPricer(graph, models, cluster, workload, ProfiledCost(database, DEVICE))
    for layout in ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"tp": 2, "sp": True}):
        for call in graph.calls:
            if layout.get("sp") and call.type is CallType.GENERATE:
                continue
            placement = Placement(ranks=(0, 2), layout=LayoutSpec(**layout), num_microbatches=2)
            price = pricer.price(call, placement)
            assert 0 < price.seconds < 60
            assert math.isfinite(price.seconds)
    with pytest.raises(PlanError, match="tp=4"):
        ProfiledCost(database).layer(models["actor"], 0, Pass.FORWARD, MicroBatch(1, 8, 8, 1), Grid(tp=4))


def test_layers_of_roles_of_one_shape_are_measured_once(chosen: ProfileOptions) -> None:
    database = ProfileDatabase.load(chosen.output)
    layers = {entry.shape for entry in database.entries if entry.operation is Operation.LAYER}
    heads = {entry.shape for entry in database.entries if entry.operation is Operation.REST}
    assert len(layers) == 1
    assert {shape.split()[1] for shape in heads} == {"lm", "scalar"}
    generated = [
        entry
        for entry in database.entries
        if entry.kind in (Pass.PREFILL, Pass.DECODE) and "scalar" in entry.shape
    ]
    assert generated == []


def test_what_is_there_is_not_measured_again(chosen: ProfileOptions, tmp_path: Path) -> None:
    whole = ProfileDatabase.load(chosen.output)
    marked = [
        entry.model_copy(update={"median_s": 7.0})
        for entry in whole.entries
        if entry.operation is Operation.LAYER
    ]
    gone = [entry for entry in whole.entries if entry.operation in (Operation.CALL, Operation.HOST_COPY)]
    path = tmp_path / "profile.json"
    rest = tuple(entry for entry in whole.merged(marked).entries if entry not in gone)
    whole.model_copy(update={"entries": rest}).dump(path)
    after = profile(chosen.model_copy(update={"output": path}))
    assert after.known() == whole.known()
    times = {entry.key: entry.median_s for entry in after.entries}
    assert all(times[entry.key] == entry.median_s for entry in rest)
    assert all(0 < times[entry.key] < 7.0 for entry in gone if entry.operation is Operation.HOST_COPY)


def _on_one_core(text: str) -> str:
    pinning._CORES[:] = pinning._CORES[:1]
    return _profile(text)


def test_ranks_that_share_cores_are_measured_beside_fewer_of_them(tmp_path: Path) -> None:
    chosen = options(tmp_path / "profile.json", roles=("actor",), tp=(1, 2), max_bytes=64)
    database = ProfileDatabase.loads(run_ranks(2, _on_one_core, chosen.dumps(), timeout_s=240)[0])
    assert database.provenance.shares_cores
    found = [entry for entry in database.entries if entry.operation is Operation.CONTENTION]
    kinds = {Pass.PREFILL, Pass.DECODE, Pass.TRAIN_FORWARD, Pass.BACKWARD, Operation.OPTIMIZER}
    assert {(entry.kind, entry.at["tp"], entry.at["busy"]) for entry in found} == {
        (kind, 1, busy) for kind in kinds for busy in (1, 2)
    }
    assert len({(entry.at["sequences"], entry.at["length"]) for entry in found}) == 2
    assert all(0 < entry.median_s < 10 for entry in found)
    model = specs(chosen)["actor"]
    layers = [  # a difference of two noisy times may be 0
        entry.model_copy(update={"median_s": 0.01})
        for entry in database.entries
        if entry.operation is Operation.LAYER
    ]
    cost = ProfiledCost(database.merged(layers))
    for pass_ in Pass:
        batch = MicroBatch(1, 1 if pass_ is Pass.DECODE else 8, 8, 1)
        alone, both = (cost.layer(model, 0, pass_, batch, Grid(busy_ranks=busy)).total_s for busy in (1, 2))
        assert 0 < alone <= both


def test_a_file_of_another_set_up_is_left_alone(chosen: ProfileOptions, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    raw = json.loads(chosen.output.read_text())
    raw["provenance"]["versions"]["torch"] = "0.1"
    path.write_text(json.dumps(raw))
    before = path.read_bytes()
    with pytest.raises(RankFailed, match=r"another set-up; here it is versions\.torch=.*\(not 0\.1\)"):
        run_ranks(2, _profile, chosen.model_copy(update={"output": path}).dumps())
    assert path.read_bytes() == before


def _parts(text: str) -> dict[str, Any]:
    chosen = ProfileOptions.loads(text)
    (actor, *_), _ = describe_roles(chosen)
    copies = Copies(ProcessGroups())
    with copies.pair(actor, 1, False, (1, 3)) as (few, many):
        shape = Shape(2, 16, 8)
        step = few.optimizer.step if few.optimizer is not None else None
        found = {
            "infer": infer_call(few, shape),
            "train": train_call(few, shape),
            "generate": generate_call(few, shape),
            "layers": [
                sum(hasattr(m, "self_attention") for m in copy.chunks[0].modules()) for copy in (few, many)
            ],
            "restored": few.optimizer is not None and few.optimizer.step == step,
            "finite": all(bool(torch.isfinite(p).all()) for p in few.chunks[0].parameters()),
        }
    copies.close()
    return found


def test_calls_are_taken_apart_completely(tmp_path: Path) -> None:
    made = options(tmp_path / "x.json", devices_per_node=1)
    (found,) = run_ranks(1, _parts, made.dumps())
    assert found["layers"] == [1, 3]
    assert found["restored"]
    assert found["finite"]
    assert set(found["train"]) == {"forward", "backward", "zero", "step", "call"}
    for call in ("infer", "train", "generate"):
        assert all(seconds > 0 for name, seconds in found[call].items() if name != "call"), found[call]


def test_probes_mark_and_vanish() -> None:
    class Owner:
        def work(self) -> int:
            return 5

    owner, marks = Owner(), Marks()
    with probed(owner, "work", marks, "w"):
        assert owner.work() + owner.work() == 10
    assert owner.work() == 5
    assert (marks.count("w begin"), marks.count("w end")) == (2, 2)
    assert marks.seconds("w begin", 0, "w end", 1) > 0
    assert "work" not in vars(owner)


def test_a_role_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="roles: found judge; expected some of actor, reward, ref, critic"):
        describe_roles(options(tmp_path / "profile.json", roles=("actor", "judge")))


def test_statistics() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert quartile_range([5.0]) == 0.0
    assert quartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert DECODE_STEPS >= 3


def test_the_command_starts_its_ranks(tmp_path: Path) -> None:
    small = [
        *(
            "max_sequences=1",
            "max_length=8",
            "roles=[actor]",
            "tp=[2]",
            "max_bytes=1024",
            "repetitions=[1,1]",
        ),
        *("sequence_parallel=false", "megatron.num_layers=2", "megatron.hidden_size=32"),
    ]
    command = [sys.executable, "-m", "megatron_real.cli", "profile", "model=tiny"]
    arguments = ["cluster.devices_per_node=2", f"output={tmp_path / 'p.json'}", *small]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    database = ProfileDatabase.load(tmp_path / "p.json")
    assert database.hash in done.stdout
    assert {entry.at.get("tp") for entry in database.entries if entry.operation is Operation.LAYER} == {2}
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    wrong = subprocess.run(
        [*command, "max_sequences=0"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "cluster.devices_per_node: found nothing" in wrong.stderr
