"""Wrong inputs, each with one thing wrong, and what their errors must say: plans, options and files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from tests.e2e.tiny_run import CALLS, MEGATRON, place, write_run

__all__ = ["CASES", "RANKS", "Case", "prompts", "write_case"]

RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An input with one thing wrong."""

    kind: str
    says: tuple[str, ...]
    """Texts that the error has: where it is, what was found, what is allowed."""
    calls: dict[str, Any] | None = None
    megatron: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    spoil: Callable[[Path], None] | None = None
    """Changes files in the run's folder."""
    world_size: int = RANKS


def calls(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**CALLS, **changes}.items() if value is not None}


def algorithm(**changes: Any) -> dict[str, Any]:
    return {"algorithm": {"max_new_tokens": 4, "num_minibatches": 2, **changes}}


def critic(**overrides: Any) -> dict[str, Any]:
    return {"model": {"critic": {"megatron": overrides}}}


def prompts(*lines: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "prompts.jsonl").write_text("\n".join(lines))  # type: ignore[return-value]


def checkpoint(**changes: Any) -> Callable[[Path], None]:
    """A Megatron checkpoint in ``folder/stored`` whose stored arguments differ from the run's."""

    def write(folder: Path) -> None:
        target = folder / "stored" / "iter_0000001"
        target.mkdir(parents=True)
        args = Namespace(**{**MEGATRON, "add_bias_linear": False, **changes})
        dist_checkpointing.save({"args": args, "iteration": 1}, str(target))
        (folder / "stored" / "latest_checkpointed_iteration.txt").write_text("1")

    return write


def legacy_checkpoint(folder: Path) -> None:
    (folder / "stored" / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    (folder / "stored" / "latest_checkpointed_iteration.txt").write_text("1")


def incomplete_checkpoint(folder: Path) -> None:
    (folder / "stored").mkdir()
    (folder / "stored" / "latest_checkpointed_iteration.txt").write_text("20")


def finished_run(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "run_state.json").write_text('{"iteration": 2, "algorithm": {}}')


STORED = {"model": {"actor": {"load": "stored"}}}
CASES = {
    # The plan.
    "unknown key": Case(
        kind="PlanError",
        calls=calls(actor_gen={**place(0, 4, dp=4), "microbatches": 2}),
        says=("calls.actor_gen.microbatches: found an unknown key",),
    ),
    "missing call": Case(
        kind="PlanError", calls=calls(critic_inf=None), says=("calls.critic_inf: found no placement",)
    ),
    "unknown call": Case(
        kind="PlanError", calls=calls(actor_inf=place(0, 1)), says=("calls.actor_inf: found a call that",)
    ),
    "degrees do not fit the window": Case(
        kind="PlanError",
        calls=calls(critic_inf=place(2, 4, tp=4)),
        says=("calls.critic_inf.layout: found dp*tp*pp*cp = 1*4*1*1 = 4 ranks", "[2, 4]"),
    ),
    "window outside the cluster": Case(
        kind="PlanError",
        calls=calls(critic_inf=place(2, 6, tp=4)),
        says=("calls.critic_inf.ranks: found [2, 6]", "4 ranks"),
    ),
    "several problems": Case(
        kind="PlanError",
        calls=calls(critic_inf=place(2, 6, tp=2), ref_inf=place(3, 3)),
        says=("3 problems", "calls.critic_inf.ranks", "calls.critic_inf.layout", "calls.ref_inf.ranks"),
    ),
    "layers not divisible": Case(
        kind="PlanError", megatron={"num_layers": 3}, says=("calls.ref_inf.layout.pp: found pp=2", "3 layers")
    ),
    "layers of the critic not divisible": Case(
        kind="PlanError",
        calls=calls(critic_inf=place(2, 4, pp=2)),
        options={"model": {"critic": {"megatron": {"num_layers": 3}}}},
        says=("calls.critic_inf.layout.pp: found pp=2", "3 layers"),
    ),
    "heads not divisible": Case(
        kind="PlanError",
        calls=calls(actor_train=place(0, 3, tp=3)),
        says=("calls.actor_train.layout.tp: found tp=3",),
    ),
    "interleaving where there is none": Case(
        kind="PlanError",
        calls=calls(ref_inf=place(2, 4, pp=2, vpp=2)),
        says=("calls.ref_inf.layout.vpp: found vpp=2",),
    ),
    "world size unlike the cluster": Case(
        kind="PlanError", world_size=3, says=("cluster: found 1 x 4 = 4 devices", "expected 3")
    ),
    "no JSON": Case(
        kind="PlanError",
        spoil=lambda folder: (folder / "input-plan.json").write_text('{"algorithm": "ppo",\n}') and None,
        says=("line 2",),
    ),
    # The options.
    "conflicting flag": Case(
        kind="ConfigError",
        megatron={"tensor_model_parallel_size": 4},
        says=("--tensor-model-parallel-size: found 4", "calls.actor_train"),
    ),
    "unknown Megatron flag": Case(kind="ConfigError", megatron={"num_layer": 2}, says=("--num-layer",)),
    "Megatron flag of another type": Case(
        kind="ConfigError", megatron={"hidden_size": "wide"}, says=("--hidden-size", "wide")
    ),
    "sizes that Megatron refuses": Case(
        kind="ConfigError", megatron={"hidden_size": 34}, says=("Megatron's arguments", "num_attention_heads")
    ),
    "no learning rate": Case(kind="ConfigError", megatron={"lr": None}, says=("--lr",)),
    "unknown option": Case(
        kind="ConfigError", options={"iteration": 3}, says=("iteration: found an unknown option",)
    ),
    "unknown option of PPO": Case(
        kind="ConfigError", options=algorithm(clip=0.1), says=("algorithm.clip: found an unknown option",)
    ),
    "unknown role": Case(
        kind="ConfigError", options={"model": {"teacher": {"megatron": {"lr": 1.0}}}}, says=("model.teacher",)
    ),
    "unknown override of a role": Case(
        kind="ConfigError",
        options={"model": {"critic": {"megatron": {"layers": 1}}}},
        says=("critic.layers: found an unknown Megatron argument",),
    ),
    "overrides that the plan decides, or of another type": Case(
        kind="ConfigError",
        options=critic(tensor_model_parallel_size=2, num_layers="two", swiglu=1, params_dtype="bf16"),
        says=(
            "4 problems",
            "models.critic.tensor_model_parallel_size: found 2; expected nothing here: the plan decides",
            "models.critic.num_layers: found 'two'; expected a value of type int, like 2",
            "models.critic.swiglu: found 1; expected a value of type bool",
            "models.critic.params_dtype",
        ),
    ),
    "sizes that Megatron refuses in a role": Case(
        kind="ConfigError",
        options=critic(squared_relu=True),
        says=("models.critic: Megatron refuses its arguments", "swiglu"),
    ),
    "a rate below the lowest": Case(
        kind="ConfigError",
        megatron={"min_lr": 5e-4},
        options=critic(lr=1e-4),
        says=("models.critic: --min-lr: found 0.0005; expected between 0 and --lr=0.0001",),
    ),
    "a warm-up as long as the decay": Case(
        kind="ConfigError",
        options=critic(lr_decay_iters=3, lr_warmup_iters=3, lr_decay_style="WSD"),
        says=(
            "2 problems",
            "--lr-warmup-iters: found 3; expected less than",
            "--lr-wsd-decay-iters: found None",
        ),
    ),
    "an optimizer that cannot be sharded": Case(
        kind="ConfigError",
        options=critic(optimizer="sgd"),
        says=("models.critic: --optimizer: found 'sgd'; expected 'adam'",),
    ),
    "an option that layouts do not go with": Case(
        kind="ConfigError",
        options={"model": {"ref": {"megatron": {"mtp_num_layers": 1}}}},
        says=("ref: found mtp_num_layers=1; expected it to be off",),
    ),
    "too long for the model": Case(
        kind="ConfigError",
        options=algorithm(max_new_tokens=60),
        says=("66 tokens", "--max-position-embeddings=64"),
    ),
    "a batch that cannot be cut": Case(
        kind="PlanError",
        calls=calls(actor_train={**place(0, 2, dp=2), "num_microbatches": 4}),
        says=("calls.actor_train: 8 sequences cannot be cut", "2 minibatches"),
    ),
    "a fault that cannot be": Case(
        kind="ConfigError", options={"fault": ["kill@1:0:actor_sleep"]}, says=("run:actor_sleep",)
    ),
    "a fault of no rank": Case(
        kind="ConfigError", options={"fault": ["kill@7:0:actor_gen"]}, says=("rank 7",)
    ),
    "nothing to resume": Case(
        kind="ConfigError", options={"resume": True}, says=("resume: found no finished checkpoint",)
    ),
    "output of a finished run": Case(
        kind="ConfigError", spoil=finished_run, says=("output: found a run of 2 iterations", "--real-resume")
    ),
    # Files.
    "prompts empty": Case(
        kind="ConfigError", spoil=prompts("", " "), says=("prompts.jsonl: found no prompts",)
    ),
    "prompts malformed": Case(
        kind="ConfigError",
        spoil=prompts('{"prompt": "a"}', '{"prompt": "b"', '{"prompt": "c"}', '{"text": "d"}'),
        says=(
            "prompts.jsonl: 2 problems",
            'line 2: found \'{"prompt": "b"\'',
            'line 4: found no key "prompt"',
        ),
    ),
    "no prompts": Case(
        kind="ConfigError",
        spoil=lambda folder: (folder / "prompts.jsonl").unlink(),
        says=("data.prompts", "which is no file"),
    ),
    "reward not importable": Case(
        kind="ConfigError",
        options={"reward": "no_such_rewards:f"},
        says=("'no_such_rewards' cannot be imported",),
    ),
    "no such reward": Case(
        kind="ConfigError", options={"reward": "rewards:beauty"}, says=("rewards has no 'beauty'",)
    ),
    "checkpoint of another shape": Case(
        kind="ConfigError",
        options=STORED,
        spoil=checkpoint(num_layers=4, ffn_hidden_size=128),
        says=(
            "actor: checkpoint",
            "2 problems",
            "--num-layers: found 2; expected 4",
            "--ffn-hidden-size: found 64",
        ),
    ),
    "override unlike the checkpoint": Case(
        kind="ConfigError",
        options={"model": {"critic": {"load": "stored", "megatron": {"hidden_size": 64}}}},
        spoil=checkpoint(),
        says=("critic: checkpoint", "--hidden-size: found 64; expected 32"),
    ),
    "legacy checkpoint": Case(
        kind="ConfigError",
        options=STORED,
        spoil=legacy_checkpoint,
        says=("legacy format", "--ckpt-convert-format"),
    ),
    "incomplete checkpoint": Case(
        kind="ConfigError",
        options=STORED,
        spoil=incomplete_checkpoint,
        says=("found no folder iter_0000020",),
    ),
    "no checkpoint": Case(
        kind="ConfigError",
        options=STORED,
        spoil=lambda folder: (folder / "stored").mkdir(),
        says=("latest_checkpointed_iteration.txt",),
    ),
}


def write_case(case: Case, folder: Path) -> dict[str, Any]:
    """Files and options of a case; paths of checkpoints are below the folder."""
    changes = dict(case.options or {})
    roles = changes.pop("model", {})
    tree = write_run(folder, calls=case.calls or CALLS, **changes)
    tree["megatron"] = {**MEGATRON, **(case.megatron or {})}
    if roles:
        tree["model"] = {
            name: {**role, "load": str(folder / role["load"])} if "load" in role else role
            for name, role in roles.items()
        }
    if case.spoil is not None:
        case.spoil(folder)
    return tree
