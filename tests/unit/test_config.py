import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from megatron_real.algorithms.configs import PPOConfig
from megatron_real.algorithms.registry import find_algorithm
from megatron_real.cli.planning import choices
from megatron_real.cli.train import options_from_config
from megatron_real.config import ModelOptions, RunOptions, conf_dir, megatron_arguments
from megatron_real.errors import ConfigError
from megatron_real.layout import Mesh
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    plan = tmp_path / "plan.json"
    Plan(
        algorithm="ppo",
        cluster=ClusterSpec(devices_per_node=2),
        calls={"actor_train": Placement(ranks=(0, 2), layout=LayoutSpec(dp=2))},
    ).dump(plan)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    return {"prompts": prompts, "plan": plan, "checkpoint": checkpoint, "output": tmp_path / "out"}


def _argv(files: dict[str, Path], *more: str) -> list[str]:
    return [
        *("--real-plan", str(files["plan"]), "--real-prompts", str(files["prompts"])),
        *("--real-iterations", "3", "--real-batch-size", "8", *more),
    ]


def _composed(files: dict[str, Path], *overrides: str) -> RunOptions:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(
            "train",
            [
                f"plan={files['plan']}",
                f"data.prompts={files['prompts']}",
                "iterations=3",
                "data.batch_size=8",
                *overrides,
            ],
        )
        return options_from_config(config, files["output"])


def test_both_front_doors_give_the_same_options(files: dict[str, Path]) -> None:
    described = ("--num-layers", "2", "--hidden-size", "32", "--swiglu", "--lr", "0.001")
    from_argv = RunOptions.from_argv(
        _argv(
            files,
            *described,
            *("--load", str(files["checkpoint"]), "--seed", "7", "--real-output", str(files["output"])),
            *("--real-model", f"critic={files['checkpoint']}", "--real-reward", "rewards:length"),
            *("--real-set", "algorithm.clip_ratio=0.1", "--real-set", "model.critic.megatron.lr=5e-4"),
            *("--real-set", "save_interval=5", "--real-fault", "kill@1:0:run:actor_gen"),
        )
    )
    composed = _composed(
        files,
        "~megatron",
        "+megatron={num_layers:2,hidden_size:32,swiglu:true,lr:0.001,tied:false}",
        f"++model.actor.load={files['checkpoint']}",
        f"++model.critic.load={files['checkpoint']}",
        "++model.critic.megatron.lr=5e-4",
        "++model.ref.load=null",
        "++seed=7",
        "++reward=rewards:length",
        "++algorithm.clip_ratio=0.1",
        "++save_interval=5",
        "++fault=[kill@1:0:run:actor_gen]",
    )
    assert from_argv.megatron == described
    assert from_argv == composed
    assert from_argv.role("critic").megatron == {"lr": 5e-4}
    assert from_argv.role("reward") == ModelOptions()


def test_options_survive_their_text(files: dict[str, Path]) -> None:
    options = RunOptions.from_argv(_argv(files, "--num-layers", "2", "--real-set", "algorithm.whiten=false"))
    assert RunOptions.loads(options.dumps()) == options
    assert options.algorithm.options == {"whiten": False}


def test_flags_with_an_equals_sign_and_unknown_words_reach_megatron_in_order(files: dict[str, Path]) -> None:
    options = RunOptions.from_argv(
        _argv(files, "--seed=3", "--data-path", "1", "a", "2", "b", "--split", "9,1,0")
    )
    assert options.seed == 3
    assert options.megatron == ("--data-path", "1", "a", "2", "b", "--split", "9,1,0")


def test_models_yaml_is_overlaid_by_the_command_line(files: dict[str, Path], tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text("critic: {load: /nowhere, megatron: {num_layers: 2, lr: 1e-3}}\nref: {}\n")
    options = RunOptions.from_argv(
        _argv(files, "--real-models", str(models), "--real-model", f"critic={files['checkpoint']}")
    )
    assert options.role("critic").load == files["checkpoint"]
    assert options.role("critic").megatron == {"num_layers": 2, "lr": 1e-3}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--real-model", "critic"), r"--real-model: found 'critic'; expected ROLE=DIR"),
        (("--real-model", "critic=/nowhere"), r"model\.critic\.load: found /nowhere, which is no folder"),
        (("--real-set", "algorithm"), r"--real-set: found 'algorithm'; expected KEY=VALUE"),
        (
            ("--real-set", "data.batchsize=1"),
            r"data\.batchsize: found an unknown option; expected one of prompts, ",
        ),
        (("--real-set", "itertions=1"), r"itertions: found an unknown option; expected one of plan, "),
        (
            ("--real-set", "model.critic.lode=x"),
            r"model\.critic\.lode: found an unknown option; expected one of load, ",
        ),
        (("--real-batch-size", "0"), r"data\.batch_size \(--real-batch-size\): found 0"),
        (
            ("--real-iterations", "many"),
            r"command line: argument --real-iterations: invalid int value: 'many'",
        ),
        (("--real-reward", "length"), r"reward \(--real-reward\): found 'length'; expected module:function"),
        (
            ("--real-reward", "a:f", "--real-set", "reward.timeout_s=600"),
            r"reward\.timeout_s: found 600; expected less than liveness\.stuck_after_s=600",
        ),
        (
            ("--real-reward", "a:f", "--real-set", "reward.timeout=5"),
            r"reward\.timeout: found an unknown option; expected one of functions, processes, ",
        ),
        (
            ("--real-set", "reward.functions=[{function: a:f, wait: 1}]"),
            r"reward\.functions\.0\.wait: found an unknown option; expected one of function, weight",
        ),
        (("--real-set", "reward.processes=2"), r"reward\.functions: found nothing; expected a value"),
        (
            ("--real-set", "evaluation.every=5"),
            r"data\.eval_prompts: found nothing; expected held-out data, on which evaluations are made",
        ),
        (
            ("--real-set", "evaluation.evry=5"),
            r"evaluation\.evry: found an unknown option; expected one of every, greedy, keep_best",
        ),
        (("--real-set", "samples.count=-1"), r"samples\.count: found -1"),
        (("--real-set", "wandb.entity=me"), r"wandb\.project: found nothing; expected a value"),
        (("--real-prompts", "/nowhere.jsonl"), r"data\.prompts \(--real-prompts\): found /nowhere\.jsonl"),
        (("--real-plan", "/nowhere.json"), r"plan \(--real-plan\): found /nowhere\.json, which is no file"),
        (("--real-models", "/nowhere.yaml"), r"--real-models: /nowhere\.yaml: cannot be read"),
        (("--real-next-plan", "b.json"), r"--real-next-plan: found 'b.json'; expected ITERATION:PLAN\.JSON"),
        (("--real-next-plan", "2:/b"), r"next_plan\.plan \(--real-next-plan\): found /b, which is no file"),
        (
            ("--real-next-plan", "3:/b"),
            r"next_plan\.iteration \(--real-next-plan\): found 3; expected one of 1 to 2",
        ),
        (("--real-next-plan", "0:/b"), r"next_plan\.iteration \(--real-next-plan\): found 0"),
        (("--real-output", "/dev/null"), r"output \(--real-output\): found /dev/null, which is a file"),
    ],
)
def test_a_wrong_option_is_one_clear_error(
    files: dict[str, Path], more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunOptions.from_argv(_argv(files, *more))


def test_a_next_plan_is_the_same_from_either_front_door(files: dict[str, Path]) -> None:
    plan = files["plan"]
    one = RunOptions.from_argv(_argv(files, "--real-next-plan", f"2:{plan}"))
    other = _composed(files, "++next_plan.iteration=2", f"++next_plan.plan={plan}")
    assert one.next_plan == other.next_plan
    assert one.next_plan is not None
    assert (one.next_plan.iteration, one.next_plan.plan) == (2, plan)
    assert RunOptions.loads(one.dumps()) == one


def test_reward_functions_are_the_same_from_either_front_door(files: dict[str, Path]) -> None:
    one = RunOptions.from_argv(
        _argv(
            files,
            "--real-reward",
            "a:f",
            "--real-set",
            "reward.processes=2",
            "--real-set",
            "reward.timeout_s=5",
        )
    )
    other = _composed(files, "++reward.functions=[a:f]", "++reward.processes=2", "++reward.timeout_s=5")
    assert one.reward == other.reward
    assert one.reward is not None
    assert (one.reward.functions[0].function, one.reward.processes, one.reward.timeout_s) == ("a:f", 2, 5.0)
    weighted = _composed(files, "++reward.functions=[a:f, {function: b:g, weight: 0.1}]")
    assert weighted.reward is not None
    assert [each.weight for each in weighted.reward.functions] == [1.0, 0.1]
    for options in (one, weighted):
        assert RunOptions.loads(options.dumps()) == options


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        RunOptions.from_argv(["--real-batch-size", "-1", "--real-set", "liveness.stuck_after_s=0"])
    text = str(caught.value)
    for path in ("plan", "iterations", "data.prompts", "data.batch_size", "liveness.stuck_after_s"):
        assert f"- {path}" in text
    assert "5 problems" in text


def test_two_checkpoints_of_the_actor_contradict(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found two checkpoints of actor"):
        RunOptions.from_argv(
            _argv(files, "--load", str(tmp_path), "--real-model", f"actor={files['checkpoint']}")
        )


def test_algorithm_options_are_checked_by_name_type_and_range(files: dict[str, Path]) -> None:
    good = RunOptions.from_argv(_argv(files, "--seed", "5", "--real-set", "algorithm.clip_ratio=0.1"))
    assert good.algorithm_config() == PPOConfig(clip_ratio=0.1, seed=5)
    for settings, message in (
        (
            ["clip_rati=0.1"],
            r"algorithm\.clip_rati: found an unknown option; expected one of num_minibatches",
        ),
        (["gamma=high"], r"algorithm\.gamma: found 'high'"),
        (["gamma=2.0"], r"gamma: found 2.0; expected 0 to 1"),
        (["name=trpo"], r"algorithm: found 'trpo'; expected one of ppo, grpo"),
        (["name=sft", "seed=1"], r"algorithm\.seed: found an unknown option"),
    ):
        given = [part for text in settings for part in ("--real-set", f"algorithm.{text}")]
        options = RunOptions.from_argv(_argv(files, *given))
        with pytest.raises(ConfigError, match=message):
            options.algorithm_config()


@pytest.mark.parametrize("choice", choices("algorithm"))
def test_every_choice_of_an_algorithm_has_sound_options(files: dict[str, Path], choice: str) -> None:
    options = _composed(files, f"algorithm={choice}", "++seed=9")
    config = options.algorithm_config()
    assert type(config) is find_algorithm(options.algorithm.name).config
    assert getattr(config, "seed", 9) == 9
    for name, value in options.algorithm.options.items():
        assert getattr(config, name) == value


def test_presets_of_grpo(files: dict[str, Path]) -> None:
    """What the papers change of GRPO: DAPO, section 3 and 4.1; Dr. GRPO, section 3.2."""
    dapo = _composed(files, "algorithm=dapo").algorithm_config()
    assert (dapo.average, dapo.clip_ratio, dapo.clip_ratio_high) == ("tokens", 0.2, 0.28)
    assert (dapo.dynamic_sampling, dapo.reference, dapo.kl_coefficient) == (True, False, 0.0)
    dr_grpo = _composed(files, "algorithm=dr_grpo").algorithm_config()
    assert (dr_grpo.average, dr_grpo.scale_rewards, dr_grpo.reference) == ("constant", False, False)
    assert dapo.scale_rewards


def test_megatron_arguments_from_a_mapping() -> None:
    values = {"num_layers": 2, "swiglu": True, "tied": False, "spec": None, "split_sizes": [1, 2], "lr": 1e-4}
    assert megatron_arguments(values) == (
        *("--num-layers", "2", "--swiglu", "--split-sizes", "1", "2", "--lr", "0.0001"),
    )


def test_the_plan_of_a_preset_is_written_and_fits_the_cluster(files: dict[str, Path]) -> None:
    files["output"].mkdir()
    files = {**files, "plan": Path("split")}
    options = _composed(files, "cluster=cpu4")
    plan = Plan.load(options.plan)
    assert plan.cluster.num_devices == 4
    assert plan.calls["actor_train"].mesh == Mesh(0, 2)
    assert options.plan.parent == files["output"]


@pytest.mark.parametrize("choice", choices("algorithm"))
def test_the_plan_of_a_preset_has_the_calls_of_the_algorithm(files: dict[str, Path], choice: str) -> None:
    files["output"].mkdir()
    options = _composed({**files, "plan": Path("symmetric")}, "cluster=cpu2", f"algorithm={choice}")
    plan = Plan.load(options.plan)
    graph = find_algorithm(options.algorithm.name).graph_for(options.algorithm_config())
    assert set(plan.calls) == {call.name for call in graph.calls}
    plan.check(graph)


def test_a_reward_function_of_an_algorithm_without_rewards_is_refused(files: dict[str, Path]) -> None:
    files["output"].mkdir()
    with pytest.raises(ConfigError, match="found a reward function with algorithm sft; expected none"):
        _composed(
            {**files, "plan": Path("symmetric")}, "cluster=cpu2", "algorithm=sft", "++reward=rewards:length"
        )


def test_a_cluster_of_another_size_than_the_plan_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster: found 4 devices; expected 2, the number in .*plan\.json"
    ):
        _composed(files, "cluster=cpu4")


def test_missing_values_are_named_together(files: dict[str, Path]) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("train", ["iterations=1"])
        with pytest.raises(ConfigError, match=r"found no value for data\.prompts, plan"):
            options_from_config(config, files["output"])


def test_the_text_of_options_is_json(files: dict[str, Path]) -> None:
    assert json.loads(RunOptions.from_argv(_argv(files)).dumps())["data"]["batch_size"] == 8


def test_data_may_be_a_folder_or_on_the_hub_and_what_is_missing_is_named(files: dict[str, Path]) -> None:
    folder, more = str(files["checkpoint"]), ("--real-set", "data.eval_prompts=hf:org/name@main:test")
    options = RunOptions.from_argv(_argv(files, "--real-prompts", folder, *more))
    assert (options.data.prompts, options.data.eval_prompts) == (folder, "hf:org/name@main:test")
    with pytest.raises(
        ConfigError, match=r"data\.eval_prompts: found nowhere, which is no file; expected a JSONL file"
    ):
        RunOptions.from_argv(_argv(files, "--real-set", "data.eval_prompts=nowhere"))
