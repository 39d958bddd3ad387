"""Megatron's models on a CUDA device: host copies, two ranks on one card, TransformerEngine's layers, a whole run.

Every test starts processes of its own, since CUDA does not survive a fork and Megatron's globals are one per process.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_real.cli.ranks import free_port
from megatron_real.runtime.reports.metrics import read_metrics
from tests.e2e.tiny_run import EXAMPLES, MEGATRON, write_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device: tests Megatron's models in device memory, over NCCL",
    ),
]
ROOT = Path(__file__).parents[2]


def _rank_main(rank: int, size: int, folder: str, backend: str, body: Callable[[], None]) -> None:
    try:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        body()
    except BaseException:  # the parent shows it
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # not through the destructors of a group whose other ranks may wait
    dist.destroy_process_group()


def _launch(size: int, backend: str, body: Callable[[], None], *, timeout_s: float = 120.0) -> None:
    """Run `body` on `size` ranks of this card."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank_main, args=(rank, size, folder, backend, body))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=timeout_s)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        errors = "\n".join(path.read_text() for path in sorted(Path(folder).glob("error-*")))
        assert codes == [0] * size, f"exit codes {codes}\n{errors}"


def _bits(copy: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in copy.chunks for parameter in chunk.parameters()]


def _assert_bits(copy: Any, expected: list[torch.Tensor]) -> None:
    for found, before in zip(_bits(copy), expected, strict=True):
        assert torch.equal(found, before)


def _logits(copy: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of this tensor-parallel rank's part of the vocabulary."""
    (chunk,) = copy.chunks
    positions = torch.arange(tokens.shape[1], device="cuda").expand_as(tokens)
    with torch.no_grad(), copy.parallel.active():
        chunk.eval()
        return chunk(tokens, positions, None).float()


def _tokens() -> torch.Tensor:
    return torch.randint(120, (2, 24), generator=torch.Generator().manual_seed(0)).cuda()


def _realloc(src: Any, dst: Any) -> None:
    """Move the weights of `src` to `dst`, whose own are overwritten with NaN before."""
    from megatron_real.realloc_ops.execution.executor import ReallocExecutor
    from megatron_real.realloc_ops.execution.transports import TorchTransport
    from megatron_real.realloc_ops.planning.plan import build_realloc_plan
    from megatron_real.realloc_ops.storage.local_shards import gather_tables

    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    tables = [gather_tables(copy.shards.entries, group) for copy in (src, dst)]
    for segment in dst.segments.segments:
        segment.flat.fill_(float("nan"))
    ReallocExecutor(
        build_realloc_plan(*tables, bucket_bytes=1 << 16, rank=rank).of(rank),
        src=src.shards,
        dst=dst.shards,
        transport=TorchTransport.connect(group, timeout_s=60.0),
    ).run()


def _host_copies() -> None:
    from tests.hooks.tiny import descent, layouts, make_copy, placement, tiny_role

    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        sizes = {
            "hidden_size": 512,
            "ffn_hidden_size": 2048,
        }  # some megabytes, well above the allocator's grain
        frozen = make_copy(parallel, tiny_role("ref", **sizes))
        bits, logits = _bits(frozen), _logits(frozen, _tokens())
        for _ in range(2):  # the second time nothing is copied out
            before_bytes = torch.cuda.memory_allocated()
            frozen.offload("host")
            assert not frozen.resident
            assert before_bytes - torch.cuda.memory_allocated() >= 0.9 * frozen.segments.nbytes
            assert all(segment._host.is_pinned() for segment in frozen.segments.segments)
            frozen.reload()
            _assert_bits(frozen, bits)
            assert torch.equal(_logits(frozen, _tokens()), logits)
        trained = make_copy(parallel, tiny_role("actor", dtype=torch.bfloat16, **sizes), training=descent())
        bits = _bits(trained)
        for place in ("main_params", "host"):
            before_bytes = torch.cuda.memory_allocated()
            trained.offload(place)
            assert before_bytes - torch.cuda.memory_allocated() >= 0.9 * trained.segments.nbytes, place
            trained.reload()
            _assert_bits(trained, bits)


def test_offload_to_pinned_memory_and_back() -> None:
    _launch(1, "nccl", _host_copies)


def _two_layouts() -> None:
    from tests.hooks.tiny import layouts, make_copy, placement, tiny_role

    with layouts() as made:
        split = make_copy(placement(made, "d1t2p1@0-1"), tiny_role())
        whole = make_copy(placement(made, "d2t1p1@0-1"), tiny_role())
        bits = _bits(whole)  # initial values depend on the seed alone, so both copies have the same
        _realloc(split, whole)
        _assert_bits(whole, bits)
        bits = _bits(split)
        _realloc(whole, split)
        _assert_bits(split, bits)
        half = _logits(whole, _tokens()).chunk(2, dim=-1)[dist.get_rank()]
        torch.testing.assert_close(_logits(split, _tokens()), half, rtol=1e-4, atol=1e-4)


def test_two_ranks_on_one_card_over_gloo() -> None:
    _launch(2, "gloo", _two_layouts)


def _te_and_local() -> None:
    from tests.hooks.tiny import layouts, make_copy, placement, tiny_role

    with layouts() as made:
        parallel = placement(made, "d1t1p1@0-0")
        sizes = {"hidden_size": 256, "ffn_hidden_size": 512}  # a head size that its kernels take
        local = make_copy(parallel, tiny_role(**sizes))
        te = make_copy(parallel, tiny_role(use_te=True, init_seed=8, **sizes))
        names = [{type(module).__name__ for module in copy.chunks[0].modules()} for copy in (local, te)]
        assert "TELayerNormColumnParallelLinear" in names[1] - names[0]
        expected = _logits(local, _tokens())
        assert _error(_logits(te, _tokens()), expected) > 0.1, "they start from other weights"
        _realloc(local, te)
        assert _error(_logits(te, _tokens()), expected) < 5e-3  # TransformerEngine multiplies fp32 in TF32


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs TransformerEngine: its layer spec is compared with Megatron's own",
)
def test_transformer_engine_layers_get_the_weights_of_local_ones() -> None:
    _launch(1, "nccl", _te_and_local)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ppo_on_one_device(tmp_path: Path, precision: str) -> None:
    """Every call on one rank over NCCL; in bf16 the trained weights are dropped, the reference waits on the host."""
    one: dict[str, Any] = {"ranks": [0, 1], "num_microbatches": 2}
    function = {"ranks": [0, 1]}
    drop = {**one, "drop_trained_weights": precision == "bf16"}
    calls = {
        "actor_gen": one,
        "rew_inf": function,
        "ref_inf": {**one, "offload": "host"},
        "critic_inf": one,
        "actor_train": drop,
        "critic_train": drop,
    }
    megatron = {name: value for name, value in MEGATRON.items() if name != "distributed_backend"}
    megatron |= {"bf16": precision == "bf16", "init_method_std": 0.2}
    tree = write_run(tmp_path / "run", calls=calls, ranks=1, iterations=1, megatron=megatron)
    (tmp_path / "options.json").write_text(json.dumps(tree))
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "megatron_real.cli.rank", str(tmp_path / "options.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    numbers = {name: value for name, value in row.items() if isinstance(value, float)}
    assert all(map(math.isfinite, numbers.values())), numbers
    assert row["actor_train/grad_norm"] > 0
    assert row["critic_train/grad_norm"] > 0
    # Log-probs of generation (with a cache, token by token) equal those of training (whole sequences).
    assert row["actor_train/steps/ratio_deviation"][0] <= (1e-4 if precision == "fp32" else 0.1)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run" / "checkpoints" / "run_state.json").is_file()
