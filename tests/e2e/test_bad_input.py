"""Wrong input is one clear error on every rank, before any collective, and what an earlier run left stays as it is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_real.cli.rank import main
from megatron_real.cli.ranks import free_port
from megatron_real.config import megatron_arguments
from megatron_real.hooks import launch
from megatron_real.hooks.cpu_device import install_cpu_device
from tests.e2e.tiny_run import CALLS, EXAMPLES, MEGATRON, place, write_run
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
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


def leave_earlier_run(folder: Path) -> None:
    """What an earlier run left in the output folder."""
    for name in (
        "metrics.jsonl",
        "summary.json",
        "options.json",
        "plan.json",
        "trace/rank0.jsonl",
        "failure-rank0.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"earlier {name}\n")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def run_rank(options: Path, rank: int, size: int) -> tuple[int, str]:
    """Exit code and error output of a rank that runs in this process, without a group to join."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stderr):
        try:
            code = main([str(options)])
        except SystemExit as error:
            code = int(error.code or 0)
    return code, stderr.getvalue()


def try_cases(folder: Path) -> list[str]:
    """Everything that is wrong with how the cases end."""

    def collective() -> NoReturn:
        raise AssertionError("a collective: the input was taken for good")

    install_cpu_device()
    launch._initialize_distributed = collective
    sys.path.insert(0, str(EXAMPLES))
    wrong = []
    trees = {name: write_case(case, folder / name.replace(" ", "-")) for name, case in CASES.items()}
    dist.destroy_process_group()  # it served to write checkpoints
    for name, case in CASES.items():
        output = folder / name.replace(" ", "-")
        leave_earlier_run(output)
        (output / "input-options.json").write_text(json.dumps(trees[name]))
        before = contents(output)
        texts = set()
        for rank in (0, case.world_size - 1):
            try:
                code, text = run_rank(output / "input-options.json", rank, case.world_size)
            except Exception as error:  # a test reports it, whatever it is
                wrong.append(f"{name}: rank {rank} raised {type(error).__name__}: {error}")
                continue
            lines = [
                line for line in text.splitlines() if "Warning" not in line and "warnings.warn" not in line
            ]
            start = f"[rank {rank}] {case.kind}: "
            if code != 2 or not lines or not lines[0].startswith(start) or "Traceback" in text:
                wrong.append(f"{name}: rank {rank} ended with {code}, {text[-2000:]}")
            missing = [part for part in case.says if part not in text]
            if missing:
                wrong.append(f"{name}: rank {rank} does not say {missing}: {text[-2000:]}")
            texts.add("\n".join(lines).removeprefix(start))
        if len(texts) > 1:
            wrong.append(f"{name}: ranks disagree: {texts}")
        if contents(output) != before:
            wrong.append(f"{name}: changed what an earlier run left")
    return wrong


@pytest.mark.timeout(400)
def test_each_is_one_error_on_every_rank_before_any_collective(tmp_path: Path) -> None:
    (wrong,) = run_ranks(1, try_cases, tmp_path, timeout_s=300)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.timeout(300)
def test_processes_end_by_themselves(tmp_path: Path) -> None:
    """Two ranks of a Megatron-style command line, and one rank of four whose others never start."""
    tree = write_run(tmp_path / "ranks")
    prompts('{"prompt": "a"}', "oops")(tmp_path / "ranks")
    script = [
        *("-m", "megatron_real", str(EXAMPLES / "train.py"), *megatron_arguments(MEGATRON)),
        *(
            "--real-plan",
            tree["plan"],
            "--real-prompts",
            tree["data"]["prompts"],
            "--real-output",
            tree["output"],
        ),
        *("--real-batch-size", "8", "--real-iterations", "1", "--real-reward", "rewards:vowel_share"),
    ]
    alone = write_run(tmp_path / "alone", reward="no_such_rewards:f")
    (tmp_path / "alone.json").write_text(json.dumps(alone))
    before = contents(tmp_path)
    port = free_port()
    commands = [
        (script, 0, port),
        (script, 3, port),
        (["-m", "megatron_real.cli.rank", str(tmp_path / "alone.json")], 1, free_port()),
    ]
    processes = []
    for arguments, rank, rendezvous in commands:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(rendezvous),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    started_s = time.monotonic()
    says = ["line 2: found 'oops'", "line 2: found 'oops'", "'no_such_rewards' cannot be imported"]
    try:
        for process, (_, rank, _), part in zip(processes, commands, says, strict=True):
            output, error = process.communicate(timeout=200)
            assert process.returncode == 2, error
            last = [line for line in error.splitlines() if line.startswith("[rank ")]
            assert len(last) == 1, error
            assert last[0].startswith(f"[rank {rank}] ConfigError: ")
            assert part in last[0]
            assert "Traceback" not in error + output
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - started_s < 200
    assert contents(tmp_path) == before
