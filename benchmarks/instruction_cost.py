"""What the runtime itself costs: time per instruction when calls do nothing, on four gloo ranks, with tracing on.

    python benchmarks/instruction_cost.py      # make bench-instruction

One JSON line per case, ``{"case", "us_per_instruction", "cpu_us_per_instruction"}`` and what it was measured over:
the mean over the ranks of an iteration's time (median over iterations) or CPU time (mean), by the instructions of the
rank. On a machine with fewer cores than ranks, or with other work, look at the CPU time.

    calls: inference calls without inputs, all on one mesh: cutting the batch, tracing, progress, the version check.
    ppo:   the six calls of PPO on four meshes, with their transfers; here most of the time is gloo's.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # four ranks share few cores

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron_real.algorithms.graphs import ppo_graph  # noqa: E402
from megatron_real.backend import Head, Minibatch, Minibatching, Objective, Sampling  # noqa: E402
from megatron_real.batch import Batch  # noqa: E402
from megatron_real.dataflow import Call, CallType, Graph, KeySpec, Per  # noqa: E402
from megatron_real.plan import CopyKey, Plan  # noqa: E402
from megatron_real.process_groups import ProcessGroups  # noqa: E402
from megatron_real.program import Program, compile_program  # noqa: E402
from megatron_real.runtime.data.dataset import ByteTokenizer, DataBatch, Record  # noqa: E402
from megatron_real.runtime.execution.executor import RankExecutor, RunParts  # noqa: E402
from megatron_real.runtime.execution.observers import Observers  # noqa: E402
from megatron_real.runtime.execution.transfer import DataTransfers, acquire_groups  # noqa: E402
from megatron_real.runtime.liveness.progress import Progress  # noqa: E402
from megatron_real.trace import Tracer  # noqa: E402
from tests.harness import run_ranks  # noqa: E402

RANKS = 4
SEQUENCES = 32
RESPONSE = 32
WARMUP, ITERATIONS = 3, 20
NULL_CALLS = 100


class NullBackend:
    """Computes nothing; every copy has the version that is asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.versions = dict.fromkeys(graph.models, 0)

    def generate(
        self, copy: CopyKey, call: Call, iteration: int, prompts: Batch, microbatches: Any, sampling: Sampling
    ) -> Batch:
        result = Batch(
            ids=prompts.ids,
            prompt_lengths=prompts.prompt_lengths,
            response_lengths=(RESPONSE,) * len(prompts.ids),
        )
        for key in call.outputs:
            spec = self._graph.key(key)
            result.put(spec, torch.zeros(sum(result.lengths(spec.per)), dtype=getattr(torch, spec.dtype)))
        return result

    def infer(
        self, copy: CopyKey, batch: Batch, microbatches: Any, head: Head, temperature: float
    ) -> torch.Tensor:
        return torch.zeros(len(batch.ids) if head is Head.SCORES else sum(batch.response_lengths))

    def train(
        self,
        copy: CopyKey,
        batch: Batch,
        minibatches: Sequence[Minibatch],
        objective: Objective,
        temperature: float,
    ) -> dict[str, float]:
        self.versions[copy.model] += 1
        return {}

    def realloc(self, source: CopyKey, target: CopyKey, version: int) -> dict[str, float]:
        self.versions[source.model] = version
        return {}

    def release(self, copy: CopyKey) -> None:
        pass

    def offload(self, copy: CopyKey, to: str) -> None:
        pass

    def reload(self, copy: CopyKey) -> None:
        pass

    def version(self, copy: CopyKey) -> int:
        return self.versions[copy.model]

    def save(self, folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        pass


class NullAlgorithm:
    """Prepares nothing."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def sampling(self, call: Call) -> Sampling:
        return Sampling(max_new_tokens=RESPONSE, end_token=0)

    def head(self, call: Call) -> Head:
        return Head.SCORES if self.graph.key(call.outputs[0]).per is Per.SEQUENCE else Head.VALUES

    def function(self, call: Call) -> Any:
        raise NotImplementedError

    def minibatching(self, call: Call) -> Minibatching:
        return Minibatching(num_minibatches=4)

    def prepare(self, call: Call, iteration: int, scalars: Batch) -> tuple[Batch, dict[str, float]]:
        return scalars, {}

    def objective(self, call: Call) -> Any:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def calls_program() -> Program:
    """A generation, then many inference calls without inputs on the same copy."""
    names = [f"inf{index}" for index in range(NULL_CALLS)]
    graph = Graph(
        name="calls",
        calls=(
            Call(name="gen", model="m", type=CallType.GENERATE, outputs=("tokens",)),
            *(
                Call(name=name, model="m", type=CallType.INFERENCE, outputs=(f"{name}_out",))
                for name in names
            ),
        ),
        keys=(
            KeySpec(name="tokens", per=Per.TOKEN, dtype="int64"),
            *(KeySpec(name=f"{name}_out", per=Per.SEQUENCE, dtype="float32") for name in names),
        ),
    )
    return _compile(graph, {call.name: ((0, 4), {"dp": 4}) for call in graph.calls})


def ppo_program() -> Program:
    """PPO on four meshes: generation on all ranks, trainings on disjoint pairs."""
    return _compile(
        ppo_graph("model"),
        {
            "actor_gen": ((0, 4), {"dp": 4}),
            "rew_inf": ((3, 4), {}),
            "ref_inf": ((0, 2), {"pp": 2}),
            "critic_inf": ((2, 4), {"dp": 2}),
            "actor_train": ((0, 2), {"tp": 2}),
            "critic_train": ((2, 4), {"dp": 2}),
        },
    )


def _compile(graph: Graph, placements: Mapping[str, tuple[tuple[int, int], dict[str, int]]]) -> Program:
    raw = {
        "algorithm": graph.name,
        "cluster": {"devices_per_node": RANKS},
        "calls": {name: {"ranks": ranks, "layout": layout} for name, (ranks, layout) in placements.items()},
    }
    return compile_program(graph, Plan.loads(json.dumps(raw)))


def measure(program: Program, folder: Path) -> tuple[float, float, int]:
    """Seconds and CPU seconds per iteration, and this rank's instructions."""
    rank = dist.get_rank()
    backend = NullBackend(program.graph)
    transfers = DataTransfers(program, rank, acquire_groups(ProcessGroups(), program))
    transfers.connect()
    tracer = Tracer(folder, rank)
    executor = RankExecutor(
        RunParts(
            program=program,
            rank=rank,
            backend=backend,
            algorithm=NullAlgorithm(program.graph),
            transfers=transfers,
            tokenizer=ByteTokenizer(),
            observers=Observers(tracer=tracer, progress=Progress()),
        )
    )
    record = Record(text="prompt", tokens=(1,) * 16, columns={})
    prompts = DataBatch(records=(record,) * SEQUENCES)
    times = []
    cpu_s = 0.0
    for iteration in range(WARMUP + ITERATIONS):
        if iteration == WARMUP:
            cpu_s = -time.process_time()
        began_s = time.perf_counter()
        executor.run_iteration(iteration, prompts)
        times.append(time.perf_counter() - began_s)
    cpu_s += time.process_time()
    transfers.fence()
    dist.barrier()
    tracer.close()
    num_instructions = len(program.steps(rank)) - 1  # all but Save
    return statistics.median(times[WARMUP:]), cpu_s / ITERATIONS, num_instructions


def main() -> None:
    """Measure both cases."""
    for case, program in (("calls", calls_program()), ("ppo", ppo_program())):
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(RANKS, measure, program, Path(folder))
        row = {
            "case": case,
            "us_per_instruction": round(1e6 * statistics.mean(wall / count for wall, _, count in results), 1),
            "cpu_us_per_instruction": round(
                1e6 * statistics.mean(cpu / count for _, cpu, count in results), 1
            ),
            "ranks": RANKS,
            "instructions": [count for _, _, count in results],
            "sequences": SEQUENCES,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
