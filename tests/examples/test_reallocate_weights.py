"""`examples/reallocate_weights.py`, run as it is: after each move both layouts compute the same."""

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

import megatron_real.realloc_ops.swap  # noqa: F401
from megatron_real.cli.ranks import free_port
from tests.harness import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.megatron]

EXAMPLE = Path(__file__).parents[2] / "examples" / "reallocate_weights.py"
LINE = re.compile(
    r"move (\d): rank (\d): ([\d,]+) bytes received of ([\d,]+) needed, ([\d,]+) kept, (\d+) messages, .*"
    r"logits ([\d.]+), differ by ([\d.e+-]+)"
)


def run_example(port: int) -> str:
    dist.destroy_process_group()  # the example joins its own, as under torchrun
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.mark.timeout(200)
def test_reallocate_weights() -> None:
    output = "".join(run_ranks(4, run_example, free_port(), timeout_s=150))
    rows = [[text.replace(",", "") for text in row] for row in LINE.findall(output)]
    assert {(int(move), int(rank)) for move, rank, *_ in rows} == {
        (m, r) for m in (1, 2, 3) for r in range(4)
    }
    for _, _, received, needed, kept, messages, _, difference in rows:
        assert received == needed
        assert int(kept) > 0
        assert 0 < int(messages) <= 6
        assert float(difference) < 1e-4
    logits = [{float(row[6]) for row in rows if row[0] == move} for move in "123"]
    assert all(len(values) == 1 for values in logits), "the ranks of the rollout model agree"
    assert len(set.union(*logits)) == 3, "the weights changed before each move"
