"""`examples/own_trainer.py`, run as it is: the loss falls, and every layout computes with the same weights."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import megatron.core.models.gpt.gpt_model  # noqa: F401  (imported here once, so that the forked ranks need not)
import pytest
import torch.distributed as dist

import megatron_real.hooks.session  # noqa: F401
from megatron_real.cli.ranks import free_port
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_trainer.py"


def run_example(port: int) -> str:
    dist.destroy_process_group()  # the example joins its own, as under torchrun
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.mark.timeout(200)
def test_own_trainer() -> None:
    output = run_ranks(4, run_example, free_port(), timeout_s=150)
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output[0])]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    logits = {
        (int(step), call, int(rank)): float(value)
        for step, call, rank, value in re.findall(
            r"step (\d): (\w+) on rank (\d): logits ([\d.]+)", "".join(output)
        )
    }
    per_step = [
        ("actor_train", 0),
        ("actor_train", 1),
        ("actor_inf", 3),
        *(("actor_gen", rank) for rank in range(4)),
    ]
    assert set(logits) == {(step, *where) for step in range(3) for where in per_step}
    for step in range(3):
        values = [logits[step, *where] for where in per_step]
        assert values == pytest.approx([values[0]] * 7, abs=2e-4), f"step {step}: layouts disagree"
    assert len({round(logits[step, "actor_inf", 3], 2) for step in range(3)}) == 3, "the weights change"
