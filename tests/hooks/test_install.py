"""`--real-plan` on scripts built on megatron.training: three ways to switch it on, the same numbers as with flags."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron_real.plan import ClusterSpec, LayoutSpec, Placement, Plan
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "show_arguments.py"
MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--normalization", "RMSNorm"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--make-vocab-size-divisible-by", "64"),
    *("--global-batch-size", "8", "--train-iters", "2", "--lr", "1e-2", "--lr-decay-style", "constant"),
    *(
        "--attention-dropout",
        "0",
        "--hidden-dropout",
        "0",
        "--eval-iters",
        "0",
        "--eval-interval",
        "1000",
        "--log-interval",
        "1",
    ),
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
)


def _plan(folder: Path, layout: LayoutSpec, num_microbatches: int, size: int = 2) -> str:
    path = folder / "plan.json"
    call = Placement(ranks=(0, size), layout=layout, num_microbatches=num_microbatches)
    Plan(algorithm="pretrain", cluster=ClusterSpec(devices_per_node=size), calls={"train": call}).dump(path)
    return str(path)


def _environment(rank: int = 0, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def _with_pth(folder: Path) -> dict[str, str]:
    """What makes Python read our start-up file where the package is not installed (as `make` installs it)."""
    if Path(sysconfig.get_path("purelib"), "megatron_real.pth").exists():
        return {}
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "megatron_real.pth").write_text((ROOT / "megatron_real.pth").read_text())
    (site / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=500)
    return process.returncode, out, error


@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_three_ways_to_follow_a_plan(tmp_path: Path) -> None:
    plan = _plan(tmp_path, LayoutSpec(tp=2, sp=True), 2)
    with_import = tmp_path / "with_import.py"
    with_import.write_text("import megatron_real.auto\n" + SCRIPT.read_text())
    arguments = [*MODEL, "--real-plan", plan]
    started = {
        "flag": _start([str(SCRIPT), *arguments], _environment(**_with_pth(tmp_path))),
        "-m": _start(["-m", "megatron_real", str(SCRIPT), *arguments], _environment()),
        "import": _start([str(with_import), *arguments], _environment()),
    }
    results = {way: _finish(process) for way, process in started.items()}
    for way, (code, out, error) in results.items():
        assert code == 0, f"{way}: {error[-3000:]}"
        (line,) = [line for line in out.splitlines() if line.startswith("ARGS ")]
        seen = json.loads(line.removeprefix("ARGS "))
        assert seen["tensor_model_parallel_size"] == 2, way
        assert seen["sequence_parallel"] is True
        assert (seen["data_parallel_size"], seen["micro_batch_size"], seen["world_size"]) == (1, 4, 2)


def test_the_startup_file_does_nothing_without_the_flag_and_little_with_it(tmp_path: Path) -> None:
    script = tmp_path / "modules.py"
    script.write_text(
        "import json, sys\n"
        "print(json.dumps([name in sys.modules for name in ('megatron_real', 'torch', 'megatron.core')]))\n"
    )
    environment = _environment(**_with_pth(tmp_path))
    for arguments, expected in ((["--real", "x"], [False] * 3), (["--real-plan=x"], [True, False, False])):
        code, out, error = _finish(_start([str(script), *arguments], environment))
        assert code == 0, error
        assert json.loads(out) == expected


@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_contradicting_flags_end_every_rank_with_one_clear_error(tmp_path: Path) -> None:
    plan = _plan(tmp_path, LayoutSpec(tp=2), 2)
    command = [
        "-m",
        "megatron_real",
        str(SCRIPT),
        *MODEL,
        "--real-plan",
        plan,
        "--tensor-model-parallel-size",
        "4",
    ]
    with_import = tmp_path / "with_import.py"
    with_import.write_text("import megatron_real.auto\n" + SCRIPT.read_text())
    ranks = [_start(command, _environment(0)), _start([str(with_import), *command[3:]], _environment(1))]
    for rank, process in enumerate(ranks):
        code, _, error = _finish(process)
        assert code not in (0, None)
        assert (
            f"[rank {rank}] ConfigError: command line: --tensor-model-parallel-size: found 4; expected"
            in error
        )
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ConfigError: python -m megatron_real: found nothing; expected a script"),
        (["nowhere.py"], "ConfigError: python -m megatron_real: nowhere.py: no such file"),
    ],
)
def test_the_launcher_refuses_what_it_cannot_run(arguments: list[str], message: str) -> None:
    code, _, error = _finish(_start(["-m", "megatron_real", *arguments], _environment(WORLD_SIZE="1")))
    assert code == 2
    assert error.startswith(message)
    assert "Traceback" not in error


def test_a_script_runs_as_if_python_had_been_given_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\nimport neighbour\n"
        "print(json.dumps([__name__, __file__, sys.argv, neighbour.NAME, sys.path[0]]))\nsys.exit(7)\n"
    )
    code, out, error = _finish(_start(["-m", "megatron_real", str(script), "a", "-b"], _environment()))
    assert code == 7, error
    assert json.loads(out) == ["__main__", str(script), [str(script), "a", "-b"], "neighbour", str(tmp_path)]


def _losses(script: str, argv: list[str], plan: bool, folder: str) -> list[str]:
    """Run a pretraining script on this rank; the loss and gradient norm of every iteration, as printed."""
    from megatron_real.hooks.cpu_device import install_cpu_device
    from megatron_real.hooks.install import install

    os.chdir(folder)
    install_cpu_device()
    if plan:
        install()
    sys.argv = [script, *argv]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    lines = [line for line in printed.getvalue().splitlines() if "lm loss:" in line]
    return [" ".join(re.findall(r"iteration +\d+/|lm loss: \S+|grad norm: \S+", line)) for line in lines]


@pytest.mark.megatron
@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "num_microbatches", "flags"),
    [
        (
            LayoutSpec(tp=2, sp=True),
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4",
        ),
        (
            LayoutSpec(pp=2, vpp=2),
            4,
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 2",
        ),
        (
            LayoutSpec(pp=2, layers=(1, 3)),
            2,
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --micro-batch-size 4",
        ),
    ],
    ids=["t2s", "p2v2", "p2l1.3"],
)
def test_training_under_a_plan_prints_what_megatrons_own_flags_print(
    layout: LayoutSpec, num_microbatches: int, flags: str, tmp_path: Path
) -> None:
    import megatron.training  # noqa: F401 (imported once, before the ranks are forked)
    import numpy

    tokens = tmp_path / "train.npy"
    numpy.save(tokens, numpy.random.default_rng(0).integers(0, 100, 4096, dtype=numpy.int32))
    script = str(ROOT / "examples" / "pretrain_docstrings.py")
    common = [*MODEL, "--train-tokens", str(tokens)]
    plan = _plan(tmp_path, layout, num_microbatches)

    def lines(argv: list[str], with_plan: bool) -> Any:
        return max(run_ranks(2, _losses, script, [*common, *argv], with_plan, str(tmp_path)), key=len)

    planned = lines(["--real-plan", plan], True)
    flagged = lines(flags.split(), False)
    assert len(planned) == 2
    assert all("lm loss" in line and "grad norm" in line for line in planned)
    assert planned == flagged


@pytest.mark.megatron
def test_an_unknown_version_of_megatron_is_named(tmp_path: Path) -> None:
    stub = tmp_path / "megatron" / "training" / "arguments.py"
    stub.parent.mkdir(parents=True)
    for folder in (stub.parent, stub.parent.parent):
        (folder / "__init__.py").touch()
    stub.write_text(
        "def add_megatron_arguments(parser): ...\ndef validate_args(args, defaults, strict): ...\n"
    )
    environment = _environment(WORLD_SIZE="1", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    exit_code, _, error = _finish(_start(["-m", "megatron_real", str(SCRIPT)], environment))
    assert exit_code == 2
    assert re.search(
        r"MegatronCompatError: megatron\.training\.arguments:validate_args: found parameters "
        r"\(args, defaults, strict\), expected \(args, defaults\) in megatron-core \d+\.\d+",
        error,
    )


@pytest.mark.megatron
def test_install_can_be_repeated_and_undone() -> None:
    import megatron.training.arguments as arguments

    from megatron_real.hooks.install import install, is_installed, uninstall

    if is_installed():
        uninstall()
    before = arguments.validate_args, arguments.add_megatron_arguments, sys.excepthook
    install()
    once = arguments.validate_args
    install()
    assert arguments.validate_args is once
    assert once is not before[0]
    uninstall()
    assert (arguments.validate_args, arguments.add_megatron_arguments, sys.excepthook) == before
