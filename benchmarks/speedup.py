"""Presets and the searched plan, priced from a profile of this machine and run for real on 2 and on 4 CPU ranks.

    python benchmarks/speedup.py              # make bench-speedup; about 20 minutes on two cores
    python benchmarks/speedup.py --ranks 2 --workloads long --memory ample

PPO with four models. Two ranks have a core each; four ranks share two. All plans of a workload, under either device
memory, run in the same processes: in turn, several times, in a rotated order, some iterations at a time of which the
first one is discarded. `tight` memory is half-way between what the leanest plan needs and what the leanest one needs
that replicates both trainings over all ranks, so training must be sharded.

One JSON line per plan:
    measured_s, ci95_s: mean seconds per iteration, and half the width of its 95 % interval;
    idle_share: of all ranks' time, waiting for others; communication_share: batch data in transfers;
    call_communication_share: predicted, of collectives and pipeline messages inside calls;
    realloc_share: moving weights. Predicted and measured peak of device memory are those of the fullest rank.
Presets whose plan is the same as another's share its run (`same_as`), as does a plan that is the same under `tight`
memory (`run_of`), which then is the limit of its run. What does not fit has no times.

Then lines that sum up, with the aims. Profiles, plans and traces stay in runs/speedup: `megatron-real compare` shows
each of the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.speedup_results import SEARCHED, Result, Turns, measure, sum_up  # noqa: E402
from megatron_real.algorithms.graphs import ppo_graph  # noqa: E402
from megatron_real.cli.ranks import launch_ranks  # noqa: E402
from megatron_real.config import RunOptions, megatron_arguments  # noqa: E402
from megatron_real.errors import CapacityError  # noqa: E402
from megatron_real.plan_search.comparison import PredictedRun, decisions_hash  # noqa: E402
from megatron_real.plan_search.inputs import PlanInputs  # noqa: E402
from megatron_real.plan_search.planner import Planner  # noqa: E402
from megatron_real.plan_search.planner_inputs import planner_of  # noqa: E402
from megatron_real.plan_search.presets import PRESETS, least_memory  # noqa: E402
from megatron_real.plan_search.problem import Limits  # noqa: E402
from megatron_real.plan_search.profile_db import ProfileDatabase  # noqa: E402
from megatron_real.plan_search.space import Pin, SpaceOptions  # noqa: E402

OUTPUT = ROOT / "runs" / "speedup"
VOCABULARY = 257
MEGATRON: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 768,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY,
    "micro_batch_size": 1,
    "lr": 1e-6,
    "lr_decay_style": "constant",
    "train_iters": 1,
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
}
"""Actor and reference. New weights sample almost uniformly, and so slow a learning rate keeps it so."""
SEARCH_GAP = 0.01
"""Of a search's answer at most; predictions err by more."""
SHORT_S = 1.0
"""Plans of shorter iterations run more of them."""
OPTIONS = SpaceOptions(sequence_parallel=False)
"""Sequence parallelism would double the time of the profile, and saves activations only, which are small here."""
SMALL = {"num_layers": 2}
"""Critic and reward model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An iteration's work."""

    batch_size: int
    prompt: int
    """Tokens of every prompt."""
    cap: int
    """Longest response."""
    num_minibatches: int

    def inputs(self) -> dict[str, Any]:
        """As `PlanInputs.workload`: responses end with the end token, one in `VOCABULARY`, or at the cap."""
        go_on = 1 - 1 / VOCABULARY
        weights = [go_on ** (n - 1) / VOCABULARY for n in range(1, self.cap)]
        return {
            "batch_size": self.batch_size,
            "num_minibatches": self.num_minibatches,
            "prompt": {"length": self.prompt},
            "response": {"lengths": list(range(1, self.cap + 1)), "weights": [*weights, 1 - sum(weights)]},
            "memory_quantile": 1.0,
        }


WORKLOADS = {
    "short": Work(batch_size=32, prompt=32, cap=8, num_minibatches=2),
    "long": Work(batch_size=16, prompt=16, cap=64, num_minibatches=2),
    "tiny": Work(batch_size=4, prompt=8, cap=4, num_minibatches=1),
}
"""Short responses, where training and inference count; long ones, where generation does; calls of milliseconds."""


# Plans


def profile_of(ranks: int) -> Path:
    """This machine's profile for `ranks` ranks, measured where it is not there yet."""
    path = OUTPUT / f"profile-{ranks}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    works = WORKLOADS.values()
    settings = {
        "output": path,
        "cluster.devices_per_node": ranks,
        "max_sequences": max(work.batch_size for work in works),
        "max_length": max(work.prompt + work.cap for work in works),
        "max_tokens": max(work.batch_size * (work.prompt + work.cap) for work in works),
        "seconds": 0.4 if ranks <= 2 else 0.2,
        "repetitions": "[2,15]" if ranks <= 2 else "[2,8]",
        "step": 8.0,
        "sequence_parallel": "false",
        **{f"megatron.{name}": json.dumps(value) for name, value in MEGATRON.items()},
        **{f"model.critic.megatron.{name}": value for name, value in SMALL.items()},
    }
    command = [sys.executable, "-m", "megatron_real.cli", "profile"]
    command += [f"{name}={value}" for name, value in settings.items()]
    log = OUTPUT / f"profile-{ranks}.log"
    with log.open("w") as file:
        if subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode:
            sys.exit(f"the profile failed:\n{log.read_text()[-3000:]}")
    layers = [entry for entry in ProfileDatabase.load(path).entries if entry.operation == "layer"]
    spread = statistics.median(entry.spread_s / max(entry.median_s, 1e-9) for entry in layers)
    # More than about 0.3 says that the machine was busy: then errors are those of the profile. Delete it, start anew.
    show({"profile": str(path.relative_to(ROOT)), "ranks": ranks, "spread_of_layers": round(spread, 3)})
    return path


def planner(ranks: int, work: Work, profile: Path, device_memory: int | None) -> Planner:
    """Of PPO with four models on `ranks` ranks."""
    cluster = {"devices_per_node": ranks, "device": "cpu", "device_memory": device_memory}
    tree = {
        "cluster": cluster,
        "megatron": MEGATRON,
        "model": {"critic": {"megatron": SMALL}, "reward": {"megatron": SMALL}},
        "workload": work.inputs(),
        "profile": profile,
    }
    return planner_of(PlanInputs.from_tree(tree, source="bench-speedup"), ppo_graph())


def tight_memory(ample: Planner) -> int | None:
    """Bytes with which training must be sharded; None where that needs no less."""
    whole = Pin(layout={"tp": 1, "pp": 1}, ranks=(0, ample.cluster.num_devices))
    pins = {"actor_train": whole, "critic_train": whole}
    (_, least), (_, replicated) = (
        least_memory(space.problem, 0) for space in (ample.space(OPTIONS), ample.space(OPTIONS, pins))
    )
    return round(math.sqrt(least * replicated)) if replicated > 1.05 * least else None


def plans(planner: Planner, folder: Path, search_s: float) -> list[Result]:
    """Every preset's plan and the searched one."""
    results: list[Result] = []
    seen: dict[str, str] = {}
    for name in (*PRESETS, SEARCHED):
        strategy = "exact" if name == SEARCHED else name
        result = Result(name=name, estimate=None, folder=folder / name)
        results.append(result)
        try:
            found = planner.search(strategy, limits=Limits(time_s=search_s, gap=SEARCH_GAP), options=OPTIONS)
            result.estimate = found.estimate
        except CapacityError:
            continue
        key = decisions_hash(result.estimate.plan)
        result.same_as = seen.get(key)
        seen.setdefault(key, name)
    return results


# Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Plans of one workload and device memory on so many ranks."""

    ranks: int
    workload: str
    memory: str
    device_memory: int | None
    """Bytes."""
    results: list[Result]

    @property
    def distinct(self) -> list[Result]:
        """Of those that fit, one of each."""
        return [result for result in self.results if result.estimate is not None and result.same_as is None]

    @property
    def run_here(self) -> list[Result]:
        """Of these, those whose run is their own, after `share_runs`."""
        return [result for result in self.distinct if result.run_of is None]


def plan_setting(ranks: int, workload: str, memory: str, profile: Path, search_s: float) -> Setting | None:
    """Find the plans of one setting; None where there is no tight memory."""
    ample = planner(ranks, WORKLOADS[workload], profile, None)
    device_memory = tight_memory(ample) if memory == "tight" else None
    if memory == "tight" and device_memory is None:
        return None
    chosen = ample if device_memory is None else planner(ranks, WORKLOADS[workload], profile, device_memory)
    results = plans(chosen, OUTPUT / f"{ranks}-{workload}-{memory}", search_s)
    for result in results:
        if result.estimate is not None:
            result.turns = turns_of(result.estimate.period_s)
    return Setting(
        ranks=ranks, workload=workload, memory=memory, device_memory=device_memory, results=results
    )


def share_runs(settings: Sequence[Setting]) -> None:
    """Let plans of `ample` memory that are plans of `tight` memory too be run only there."""

    def key(workload: str, result: Result) -> tuple[str, str]:
        assert result.estimate is not None, "distinct plans fit"
        plan = result.estimate.plan
        cluster = plan.cluster.model_copy(update={"device_memory": None})
        return workload, decisions_hash(plan.model_copy(update={"cluster": cluster}))

    tight = {
        key(setting.workload, result): result
        for setting in settings
        if setting.device_memory is not None
        for result in setting.distinct
    }
    for setting in settings:
        for result in setting.distinct if setting.device_memory is None else ():
            result.run_of = tight.get(key(setting.workload, result))


def turns_of(predicted_s: float) -> Turns:
    """How often a plan runs, by how long its iterations are thought to take."""
    return Turns(number=3, iterations=3) if predicted_s < SHORT_S else Turns(number=2, iterations=2)


def options_of(result: Result, work: Work) -> RunOptions:
    """The options of a run of this plan; writes plan, prediction and prompts into its folder."""
    assert result.estimate is not None, "only plans that fit are run"
    folder, plan = result.folder, result.estimate.plan
    folder.mkdir(parents=True, exist_ok=True)
    plan.dump(folder / "plan.json")
    assert plan.predicted is not None, "an estimate fills it in"
    PredictedRun.of(plan.predicted, result.estimate.simulation).dump(folder / "predicted.json")
    prompts = folder / "prompts.jsonl"
    letters = "etaoinshrdlu "
    texts = ("".join(letters[(i * 7 + j) % 13] for j in range(work.prompt)) for i in range(64))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return RunOptions.from_tree(
        {
            "plan": str(folder / "plan.json"),
            "output": str(folder),
            "iterations": len(result.turns.by_iteration()),
            "data": {"prompts": str(prompts), "batch_size": work.batch_size},
            "algorithm": {
                "max_new_tokens": work.cap,
                "num_minibatches": work.num_minibatches,
                "num_epochs": 1,
            },
            "megatron": megatron_arguments(MEGATRON),
            "model": {"critic": {"megatron": SMALL}, "reward": {"megatron": SMALL}},
        }
    )


def run(ranks: int, settings: Sequence[Setting]) -> None:
    """Run the plans of each workload in turn, one workload after the other, on the same processes."""
    folder = OUTPUT / f"{ranks}-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    content: dict[str, list[Any]] = {}
    for setting in settings:
        content.setdefault(setting.workload, []).extend(
            {
                "options": json.loads(options_of(result, WORKLOADS[setting.workload]).dumps()),
                "turns": result.turns.by_iteration(),
            }
            for result in setting.run_here
        )
    job.write_text(json.dumps(list(content.values())))
    failed = launch_ranks([sys.executable, __file__, "--rank", str(job)], ranks, folder)
    if failed:
        sys.exit(f"bench-speedup: {failed[0]}; see {folder / 'logs'}")


def rank_main(path: Path) -> None:
    """One rank: builds every plan's models, then runs the plans in turn."""
    from megatron_real.hooks.install import install

    install()
    from megatron_real.hooks.pinning import pin_rank

    pin_rank()
    import torch.distributed as dist

    from megatron_real.hooks import cpu_device
    from megatron_real.hooks.launch import build_executor, configure_logging, initialize_distributed, prepare
    from megatron_real.process_groups import ProcessGroups
    from megatron_real.runtime.execution.observers import Observers
    from megatron_real.trace import Tracer

    cpu_device.install_cpu_device()
    job = json.loads(path.read_text())
    configure_logging(int(os.environ["RANK"]))
    initialize_distributed()
    groups = ProcessGroups()
    for together in job:
        built = []
        for tree in together:
            prepared = prepare(RunOptions.from_tree(tree["options"]))
            tracer = Tracer(prepared.options.output / "trace", dist.get_rank())
            executor, _ = build_executor(prepared, groups, Observers(tracer=tracer))
            built.append((executor, prepared.data, tree["turns"]))
        for turn in range(max(max(turns) for *_, turns in built) + 1):
            first = turn % len(built)
            for executor, prompts, turns in built[first:] + built[:first]:
                dist.barrier()
                for iteration in (number for number, its_turn in enumerate(turns) if its_turn == turn):
                    executor.run_iteration(iteration, prompts.batch(iteration))
                executor.transfers.fence()
    dist.barrier()
    dist.destroy_process_group()


# Lines


def show_setting(setting: Setting) -> None:
    """Print what its plans did, after `measure`."""
    by_name = {result.name: result for result in setting.results}
    for result in setting.results:
        if result.run_of is not None:
            result.take(result.run_of)
        elif result.same_as is not None:
            result.take(by_name[result.same_as])
    base = by_name["heuristic"]
    for result in setting.results:
        head = {
            "ranks": setting.ranks,
            "device_memory": setting.memory,
            "workload": setting.workload,
            "plan": result.name,
        }
        if result.estimate is None:
            show({**head, "fits": False})
            continue
        speedup = base.measured_s / result.measured_s if base.periods else None
        show(
            {
                **head,
                "measured_s": round(result.measured_s, 4),
                "ci95_s": round(result.ci95_s, 4),
                "iterations": len(result.periods),
                "predicted_s": round(result.estimate.period_s, 4),
                "speedup_over_heuristic": round(speedup, 3) if speedup is not None else None,
                **result.line,
                **({"same_as": result.same_as} if result.same_as else {}),
                **({"run_of": f"tight {result.run_of.name}"} if result.run_of else {}),
                "device_memory_bytes": setting.device_memory,
            }
        )


def show(line: Mapping[str, Any]) -> None:
    """Print a JSON line."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """All settings, or the chosen ones."""
    parser = argparse.ArgumentParser(description="Presets and the searched plan, run for real.")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--memory", nargs="*", default=["ample", "tight"], choices=["ample", "tight"])
    parser.add_argument("--search-s", type=float, default=10.0)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank)
        return
    settings = {}
    for ranks in args.ranks:
        profile = profile_of(ranks)
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
            chosen = [(workload, memory) for workload in args.workloads for memory in args.memory]
            jobs = {
                one: pool.submit(plan_setting, ranks, *one, profile, args.search_s)
                for one in sorted(chosen, key=lambda one: one[1] != "tight")  # the longest ones first
            }
            planned = [setting for one in chosen if (setting := jobs[one].result()) is not None]
        share_runs(planned)
        run(ranks, planned)
        for setting in planned:
            for result in setting.run_here:
                measure(result)
        for setting in planned:
            show_setting(setting)
            settings[ranks, setting.workload, setting.memory] = setting.results
    for line in sum_up(settings):
        show(line)


if __name__ == "__main__":
    main()
