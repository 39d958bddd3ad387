"""Tiny PPO runs of four ranks for the end-to-end tests, and ranks that no launcher watches.

`start` forks the ranks from this process, which imports Megatron once; each then does what
``python -m megatron_real.cli.rank OPTIONS.json`` does, with the environment that torchrun would give it. Rank 0 serves
the store, and nothing ends a rank but the rank itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron_real.cli.rank import main
from megatron_real.cli.ranks import free_port

__all__ = ["CALLS", "EXAMPLES", "MEGATRON", "Job", "place", "start", "wait", "write_run"]

EXAMPLES = Path(__file__).parents[2] / "examples"

MEGATRON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 257,
    "make_vocab_size_divisible_by": 64,
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "distributed_backend": "gloo",
}
"""The actor, as attribute names of Megatron's arguments."""


def place(start: int, stop: int, **layout: int) -> dict[str, Any]:
    """A placement as JSON."""
    return {"ranks": [start, stop], "layout": layout}


CALLS = {
    "actor_gen": place(0, 4, dp=4),
    "rew_inf": place(0, 4, dp=4),
    "ref_inf": place(2, 4, pp=2),
    "critic_inf": place(2, 4, tp=2),
    "actor_train": place(0, 2, tp=2),
    "critic_train": place(2, 4, tp=2),
}
"""Every call in a layout of its own; actor and critic train at the same time on disjoint pairs."""


def write_run(
    folder: Path, *, calls: Mapping[str, Any] = CALLS, ranks: int = 4, **changes: Any
) -> dict[str, Any]:
    """Write plan and prompts into `folder`; the options of a run of two iterations, as a tree, with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"algorithm": "ppo", "cluster": {"devices_per_node": ranks}, "calls": calls}
    (folder / "input-plan.json").write_text(json.dumps(plan))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}:"}) + "\n" for n in range(8))
    )
    return {
        "plan": str(folder / "input-plan.json"),
        "output": str(folder),
        "iterations": 2,
        "save_interval": 1,
        "reward": "rewards:vowel_share",
        "algorithm": {"max_new_tokens": 4, "num_minibatches": 2},
        "data": {"prompts": str(folder / "prompts.jsonl"), "batch_size": 8},
        "megatron": MEGATRON,
        **changes,
    }


@dataclass
class Job:
    """The ranks of one run, and what has become of them."""

    folder: Path
    pids: dict[int, int]
    tag: str
    codes: dict[int, int] = field(default_factory=dict)
    """By rank; the negative signal number of a killed one."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """When each rank was seen to have ended, on the monotonic clock."""
    fault_s: float | None = None
    """When a fault was seen to have been injected."""

    def poll(self) -> bool:
        """Whether all ranks have ended."""
        if self.fault_s is None and any("injecting" in self.log(rank) for rank in self.pids):
            self.fault_s = time.monotonic()
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    self.ended_s[rank] = time.monotonic()
        return len(self.codes) == len(self.pids)

    def kill(self) -> None:
        """End the ranks that still run; they have no exit code."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def log(self, rank: int) -> str:
        """What a rank wrote to stdout and stderr."""
        path = self.folder / f"log-{self.tag}-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """All of it, for a failed assertion."""
        return "\n".join(f"--- rank {rank}: {self.codes.get(rank)}\n{self.log(rank)}" for rank in self.pids)


def start(tree: Mapping[str, Any], *, size: int = 4, tag: str = "run") -> Job:
    """Start the ranks of a run without a launcher."""
    import megatron_real.hooks.launch  # noqa: F401  (here once, so that the forked ranks need not)

    folder = Path(tree["output"])
    options = folder / f"input-options-{tag}.json"
    options.write_text(json.dumps(tree))
    port = free_port()
    pids = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _rank(rank, size, port, options, folder / f"log-{tag}-{rank}")
        pids[rank] = pid
    return Job(folder=folder, pids=pids, tag=tag)


def _rank(rank: int, size: int, port: int, options: Path, log: Path) -> NoReturn:
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        logging.getLogger().handlers.clear()  # pytest's
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
        )
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.path.insert(0, str(EXAMPLES))  # where the reward function is
        code = main([str(options)])
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(jobs: list[Job], timeout_s: float) -> None:
    """Wait for all ranks of all jobs; those that still run after `timeout_s` are killed."""
    deadline = time.monotonic() + timeout_s
    while sum(not job.poll() for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.1)
    for job in jobs:
        job.kill()
