"""A plan written into Megatron's arguments; none of it needs Megatron."""

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from megatron_real.errors import ConfigError, PlanError, RealError
from megatron_real.hooks.arguments import (
    add_real_arguments,
    apply_plan,
    wrap_add_arguments,
    wrap_validate_args,
)
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan


def _args(**changes: Any) -> Namespace:
    values: dict[str, Any] = {
        "world_size": 4,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "group_query_attention": False,
        "num_query_groups": 1,
        "ffn_hidden_size": None,
        "swiglu": False,
        "num_experts": None,
        "micro_batch_size": None,
        "global_batch_size": 16,
        "rampup_batch_size": None,
    }
    return Namespace(**{**values, **changes})


def _plan(layout: dict[str, Any], *, ranks: tuple[int, int] = (0, 4), **placement: Any) -> Plan:
    call = Placement(ranks=ranks, layout=LayoutSpec(**layout), **placement)
    return Plan(algorithm="pretrain", cluster=ClusterSpec(devices_per_node=4), calls={"train": call})


def test_degrees_and_batch_sizes_are_set() -> None:
    args = _args()
    apply_plan(args, _plan({"dp": 2, "tp": 2, "sp": True}, num_microbatches=4), [])
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 1)
    assert args.context_parallel_size == args.expert_model_parallel_size == 1
    assert args.sequence_parallel is True
    assert (args.micro_batch_size, args.global_batch_size) == (2, 16)
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.pipeline_model_parallel_layout is None


def test_the_global_batch_follows_from_the_micro_batch() -> None:
    args = _args(global_batch_size=None, micro_batch_size=3)
    apply_plan(args, _plan({"dp": 2, "pp": 2}, num_microbatches=4), ["--micro-batch-size", "3"])
    assert args.global_batch_size == 24


def test_interleaved_and_uneven_stages() -> None:
    args = _args()
    apply_plan(args, _plan({"dp": 2, "pp": 2, "vpp": 2}, num_microbatches=2), [])
    assert args.num_virtual_stages_per_pipeline_rank == 2
    assert args.num_layers_per_virtual_pipeline_stage is None
    args = _args()
    apply_plan(args, _plan({"dp": 2, "pp": 2, "layers": (1, 3)}, num_microbatches=2), [])
    assert args.pipeline_model_parallel_layout == "Et|tttL"
    args = _args()
    apply_plan(args, _plan({"dp": 2, "pp": 2, "vpp": 2, "layers": (1, 2, 1, 0)}, num_microbatches=2), [])
    assert args.pipeline_model_parallel_layout == "Et|tt|t|L"
    assert args.num_virtual_stages_per_pipeline_rank is None


def test_hybrid_patterns_say_their_stages_themselves() -> None:
    for layout, staged in (
        ({"dp": 2, "pp": 2}, "*-|*-"),
        ({"dp": 2, "pp": 2, "vpp": 2}, "*|-|*|-"),
        ({"dp": 2, "pp": 2, "layers": (1, 3)}, "*|-*-"),
        ({"dp": 4}, "*-*-"),
    ):
        for pattern in ("*-*-", staged):
            args = _args(hybrid_layer_pattern=pattern, num_layers=None)
            apply_plan(args, _plan(layout, num_microbatches=2), ["--hybrid-layer-pattern", pattern])
            assert args.hybrid_layer_pattern == staged
            assert args.pipeline_model_parallel_layout is None
            assert args.num_virtual_stages_per_pipeline_rank is None
            assert args.num_layers_per_virtual_pipeline_stage is None
    with pytest.raises(ConfigError, match=r"found '\*\|-\*-'; expected '\*-\*-', or '\*-\|\*-'"):
        apply_plan(_args(hybrid_layer_pattern="*|-*-"), _plan({"dp": 2, "pp": 2}), [])


def test_experts_are_spread_over_the_ranks_of_a_stage() -> None:
    args = _args(num_experts=4)
    apply_plan(args, _plan({"dp": 4, "ep": 2}), [])
    assert args.expert_model_parallel_size == 2
    with pytest.raises(PlanError, match=r"ep=3; expected a divisor of num_experts=4"):
        apply_plan(_args(num_experts=4), _plan({"dp": 4, "ep": 3}), [])


def test_recomputation() -> None:
    args = _args()
    apply_plan(args, _plan({"dp": 4}, recompute="full"), [])
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    args = _args()
    apply_plan(args, _plan({"dp": 4}, recompute="selective"), [])
    assert args.recompute_granularity == "selective"
    assert args.recompute_method is None


@pytest.mark.parametrize(
    ("layout", "argv"),
    [
        ({"dp": 2, "tp": 2}, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=1"]),
        ({"dp": 2, "tp": 2}, ["--expert-tensor-parallel-size", "2"]),
        ({"dp": 2, "tp": 2, "sp": True}, ["--sequence-parallel"]),
        ({"dp": 2, "pp": 2, "vpp": 2}, ["--num-layers-per-virtual-pipeline-stage", "1"]),
        ({"dp": 2, "pp": 2, "vpp": 2}, ["--num-virtual-stages-per-pipeline-rank", "2"]),
        ({"dp": 4}, ["--num-virtual-stages-per-pipeline-rank", "1"]),
        ({"dp": 2, "pp": 2, "layers": (1, 3)}, ["--pipeline-model-parallel-layout", "Et|tttL"]),
    ],
)
def test_flags_that_say_the_same_are_welcome(layout: dict[str, Any], argv: list[str]) -> None:
    apply_plan(_args(), _plan(layout, num_microbatches=2), argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--tensor-model-parallel-size", "4"],
            "--tensor-model-parallel-size: found 4; expected no flag, or 2",
        ),
        (["--tensor-model-parallel-size=1"], "--tensor-model-parallel-size: found 1; expected no flag, or 2"),
        (
            ["--sequence-parallel"],
            "--sequence-parallel: found the flag; expected no flag: plan.json: calls.train has",
        ),
        (
            ["--decoder-first-pipeline-num-layers", "1"],
            "--decoder-first-pipeline-num-layers: found 1; expected no fl",
        ),
        (["--recompute-granularity", "full"], "--recompute-granularity: found full; expected no flag"),
        (
            ["--num-layers-per-virtual-pipeline-stage", "2"],
            "--num-layers-per-virtual-pipeline-stage: found 2; exp",
        ),
    ],
)
def test_flags_that_contradict_the_plan(argv: list[str], message: str) -> None:
    args = _args()
    with pytest.raises(ConfigError) as caught:
        apply_plan(args, _plan({"dp": 2, "tp": 2}), argv)
    assert f"command line: {message}" in str(caught.value)
    assert not hasattr(args, "tensor_model_parallel_size")


def test_contradictions_are_reported_together() -> None:
    argv = ["--tensor-model-parallel-size", "4", "--lr", "1", "--pipeline-model-parallel-size", "2"]
    with pytest.raises(ConfigError, match="2 problems"):
        apply_plan(_args(), _plan({"dp": 4}), argv)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"micro_batch_size": 3},
            "--global-batch-size: found 16 with --micro-batch-size 3; expected 12, since",
        ),
        ({"global_batch_size": 6}, "--global-batch-size: found 6; expected a multiple of 4, since"),
        ({"global_batch_size": None}, "found neither --global-batch-size nor --micro-batch-size"),
        ({"rampup_batch_size": [2, 2, 10]}, "--rampup-batch-size"),
    ],
)
def test_batch_sizes_that_do_not_fit(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_plan(_args(**args), _plan({"dp": 2, "tp": 2}, num_microbatches=2), [])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "args", "message"),
    [
        (
            _plan({"dp": 4}),
            {"world_size": 2},
            "cluster: found 1 x 4 = 4 devices; expected 2, the number of ranks",
        ),
        (
            _plan({"dp": 2}, ranks=(0, 2)),
            {},
            "calls.train.ranks: found [0, 2]; expected [0, 4], the whole cluster",
        ),
        (_plan({"dp": 1, "pp": 4}), {"num_layers": 6}, "calls.train.layout.pp: found pp=4 vpp=1; expected"),
        (
            _plan({"dp": 1, "tp": 4}),
            {"ffn_hidden_size": 126},
            "calls.train.layout.tp: found tp=4; expected a div",
        ),
        (
            _plan({"dp": 2, "pp": 2, "vpp": 2}),
            {},
            "calls.train.num_microbatches: found 1; expected a multiple of pp=2",
        ),
        (
            _plan({"dp": 4, "ep": 2}),
            {},
            "calls.train.layout.ep: found ep=2; expected 1: the model has no experts",
        ),
        (_plan({"dp": 4}, offload="host"), {}, "calls.train.offload: found host; expected none"),
        (_plan({"dp": 4}, drop_trained_weights=True), {}, "calls.train.drop_trained_weights: found true"),
    ],
)
def test_a_plan_that_does_not_fit(plan: Plan, args: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        apply_plan(_args(**args), plan, [], source="p.json")
    assert str(caught.value).startswith(f"p.json: {message}")


def test_context_parallelism_is_refused_without_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA may have TransformerEngine")
    with pytest.raises(PlanError, match=r"calls\.train\.layout\.cp: found cp=2; expected 1 on this machine"):
        apply_plan(_args(), _plan({"dp": 2, "cp": 2}), [])


def test_a_plan_of_several_calls_describes_the_actor_at_its_training(tmp_path: Any) -> None:
    calls = {
        "actor_gen": Placement(ranks=(0, 4), layout=LayoutSpec(dp=4)),
        "actor_train": Placement(ranks=(0, 2), layout=LayoutSpec(tp=2)),
    }
    path = tmp_path / "plan.json"
    Plan(algorithm="ppo", cluster=ClusterSpec(devices_per_node=4), calls=calls).dump(path)
    seen = []
    args = _args(real_plan=str(path))
    wrap_validate_args(
        lambda args, defaults: seen.append((args.world_size, args.tensor_model_parallel_size))
    )(args)
    assert seen == [(2, 2)]
    assert args.world_size == 4
    assert args.micro_batch_size == 1


def test_without_a_plan_nothing_changes() -> None:
    args = _args(real_plan=None)
    before = dict(vars(args))
    assert wrap_validate_args(lambda args, defaults: (args, defaults))(args, {"a": 1}) == (args, {"a": 1})
    assert vars(args) == before


def test_plans_that_megatrons_arguments_cannot_follow() -> None:
    two = Plan(
        algorithm="pretrain",
        cluster=ClusterSpec(devices_per_node=4),
        calls={name: Placement(ranks=(0, 4), layout=LayoutSpec(dp=4)) for name in ("a", "b")},
    )
    with pytest.raises(PlanError, match="found \\['a', 'b'\\]; expected one train call"):
        apply_plan(_args(), two, [])
    with pytest.raises(PlanError, match="found no placement for 'actor_train'"):
        apply_plan(_args(), two.model_copy(update={"algorithm": "ppo"}), [])


def test_arguments_from_yaml_are_refused_beside_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    add_arguments = wrap_add_arguments(lambda parser: parser)
    monkeypatch.setattr("sys.argv", ["script", "--yaml-cfg", "c"])
    add_arguments(ArgumentParser())
    monkeypatch.setattr("sys.argv", ["script", "--real-plan", "p", "--yaml-cfg=c"])
    with pytest.raises(ConfigError, match="found --yaml-cfg beside --real-plan"):
        add_arguments(ArgumentParser())


def test_the_group_of_flags() -> None:
    parser = add_real_arguments(ArgumentParser())
    args = parser.parse_args(["--real-plan", "p", "--real-model", "critic=a", "--real-model", "ref=b"])
    assert args.real_plan == "p"
    assert args.real_model == ["critic=a", "ref=b"]
    assert issubclass(ConfigError, RealError)
