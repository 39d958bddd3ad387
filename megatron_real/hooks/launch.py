"""Put a run together: from options to models under a plan, and through the runtime.

Everything that can be wrong with the input is checked by `job.prepare`, on every rank alike and before the first
collective. `run` then does what is collective.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
import torch.distributed as dist

import megatron_real
from megatron_real.backend import Goal
from megatron_real.dataflow import CallType
from megatron_real.errors import ConfigError, PlanError
from megatron_real.hooks import cpu_device
from megatron_real.hooks.job import Job, evaluation_of, prepare
from megatron_real.hooks.megatron_backend import MegatronBackend
from megatron_real.plan_search.comparison import PredictedRun, predicted_simulation
from megatron_real.process_groups import ProcessGroups, default_store
from megatron_real.program import Program
from megatron_real.runtime.evaluation.best import BestCheckpoint, recover
from megatron_real.runtime.evaluation.evaluator import EvaluationConfig, Evaluator, observed
from megatron_real.runtime.execution.executor import RankExecutor, RunParts
from megatron_real.runtime.execution.observers import Observers
from megatron_real.runtime.execution.plan_change import PlanChange
from megatron_real.runtime.execution.transfer import DataTransfers, acquire_groups
from megatron_real.runtime.liveness.faults import FaultInjector
from megatron_real.runtime.liveness.heartbeats import Limits, Liveness
from megatron_real.runtime.liveness.meeting import meet
from megatron_real.runtime.liveness.progress import Progress
from megatron_real.runtime.liveness.publication import agree_on_program, agreement_text, program_text
from megatron_real.runtime.liveness.store_client import served_by_launcher
from megatron_real.runtime.reports.display import Display
from megatron_real.runtime.reports.drift import other_workload
from megatron_real.runtime.reports.master import Master
from megatron_real.runtime.reports.metrics import IterationRecorder, MetricsWriter, read_metrics
from megatron_real.runtime.reports.reports import MetricsPublisher
from megatron_real.runtime.reports.samples import SampleWriter
from megatron_real.runtime.reports.summary import summarize
from megatron_real.runtime.reports.wandb_tracker import open_wandb
from megatron_real.runtime.run_state import take_options
from megatron_real.runtime.trainer import TrainConfig, TrainResult, train
from megatron_real.timeline import write_timeline
from megatron_real.trace import Tracer, attribute_waits, read_spans, write_chrome_trace

if TYPE_CHECKING:
    from megatron_real.config import RunOptions

__all__ = [
    "Job",
    "build_executor",
    "configure_logging",
    "initialize_distributed",
    "prepare",
    "run",
    "write_reports",
]

logger = logging.getLogger(__name__)

_BACKSTOP_S = 86_400.0
"""Limit of a single wait on the data path. A rank may rightly wait while others run several long instructions; the
liveness threads end a job that does not move."""


def run(options: RunOptions) -> dict[str, Any] | None:
    """Run an algorithm. Collective over WORLD: every rank calls it with equal options.

    ``torch.distributed`` need not be initialised.

    Returns:
        The run's summary on rank 0, None elsewhere.

    Raises:
        RealError: from `prepare`, on every rank. Later failures of any rank end all of them.
    """
    cpu_device.install_cpu_device()
    configure_logging(int(os.environ.get("RANK", "0")))
    job = prepare(options)
    limits = Limits(dead_after_s=options.liveness.dead_after_s, stuck_after_s=options.liveness.stuck_after_s)
    initialize_distributed()
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(
            options.output / "trace", ignore_errors=True
        )  # of an earlier run, perhaps of more ranks
    options.output.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    liveness = Liveness(store, rank, world_size, folder=options.output, progress=progress, limits=limits)
    with liveness, contextlib.nullcontext() if job.rewards is None else job.rewards:
        progress.enter(job.first_iteration, 0, "set-up")
        agree_on_program(store, rank, agreement_text(job.program, _agreement(job)))
        if rank == 0:
            (options.output / "options.json").write_text(options.dumps())
            changes = take_options(job.save_folder, json.loads(options.dumps()))
            for change in changes if job.resume is not None else ():
                logger.warning("resume: %s", change)
            _write_plan(job)
            recover(job.best_folder)
        tracer = Tracer(options.output / "trace", rank)
        publisher = MetricsPublisher(store, rank)
        master, recorder = _start_master(job, liveness) if rank == 0 else (None, None)
        groups = ProcessGroups(timeout_s=limits.stuck_after_s, operation_timeout_s=_BACKSTOP_S)
        observers = Observers(tracer=tracer, progress=progress, faults=FaultInjector(job.faults, rank))
        executor, _ = build_executor(job, groups, observers, timeout_s=_BACKSTOP_S)
        progress.leave()
        _train(job, executor, publisher)
        publisher.close()
        tracer.close()
        if master is not None and recorder is not None:
            master.close()
            recorder.close()
    dist.barrier()
    summary = write_reports(options.output, job.algorithm.goal) if rank == 0 else None
    dist.destroy_process_group()
    return summary


def _agreement(job: Job) -> dict[str, str]:
    """What all ranks must have alike beside the program; paths may differ from machine to machine."""
    paths = {
        "plan": True,
        "next_plan": {"plan"},
        "output": True,
        "data": {"prompts", "eval_prompts"},
        "model": {"__all__": {"load"}},
    }
    options = job.options.model_dump(mode="json", exclude=paths)
    return {
        **{f"options.{name}": json.dumps(value, sort_keys=True) for name, value in options.items()},
        **{f"load.{name}": folder.name for name, folder in job.loads.items()},
        **{f"program.{first}": program_text(program) for first, program in job.later.items()},
        "data": job.data.digest(),
        "held_out": job.held_out.digest() if job.held_out is not None else "",
        "best": str(job.best),
        "first_iteration": str(job.first_iteration),
        "version.torch": torch.__version__,
        "version.megatron-core": megatron.core.__version__,
        "version.megatron-real": megatron_real.__version__,
    }


def configure_logging(rank: int) -> None:
    """Plain lines of rank 0, warnings of every rank with its name; Megatron's set-up messages stay out."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    ours = logging.getLogger("megatron_real")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("megatron.core").setLevel(logging.WARNING)


def initialize_distributed() -> None:
    """Bring up ``torch.distributed`` as the environment says: NCCL with CUDA, else gloo; nothing if it is up."""
    if dist.is_initialized():
        return
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_devices:
            raise ConfigError(
                f"LOCAL_RANK: found {local_rank} on a machine with {num_devices} GPUs; expected one rank per GPU. "
                "Start fewer ranks here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU."
            )
        torch.cuda.set_device(local_rank)
    backend, timeout = "cpu:gloo,cuda:nccl" if on_cuda else "gloo", datetime.timedelta(seconds=_BACKSTOP_S)
    if served_by_launcher():  # which ends the other ranks when one does not come
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = meet(rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _write_plan(job: Job) -> None:
    """The plan into the run's folder, with what it was predicted to do (`megatron-real compare` reads both)."""
    plan, folder = job.program.plan, job.options.output
    plan.dump(folder / "plan.json")
    for first, program in job.later.items():
        program.plan.dump(folder / f"plan-{first}.json")
    path = folder / "predicted.json"
    path.unlink(missing_ok=True)  # of an earlier run
    if plan.predicted is None:
        return
    simulation = None
    try:
        simulation = predicted_simulation(job.program)
    except PlanError as error:
        logger.warning("%s", error)
    PredictedRun.of(plan.predicted, simulation).dump(path)
    other = other_workload(plan.predicted, {"batch_size": job.options.data.batch_size, **_workload(job)})
    if other is not None:
        logger.warning("%s", other)


def _workload(job: Job) -> dict[str, int]:
    """What of the run the plan was priced for, where the algorithm has it."""
    found: dict[str, int] = {}
    for call in job.program.graph.calls:
        if call.trains:
            cut = job.algorithm.minibatching(call)
            found |= {"num_minibatches": cut.num_minibatches, "num_epochs": cut.num_epochs}
        elif call.type is CallType.GENERATE:
            found["max_new_tokens"] = job.algorithm.sampling(call).max_new_tokens
    return found


def _start_master(job: Job, liveness: Liveness) -> tuple[Master, IterationRecorder]:
    options, first = job.options, job.first_iteration
    wandb = None
    if options.wandb is not None:
        given = options.wandb.model_dump(exclude_none=True)
        config = options.model_dump(mode="json")
        wandb = open_wandb(given, options.output, resume=job.resume is not None, config=config)
    trackers = [wandb] if wandb is not None else []
    writer = MetricsWriter(options.output, first_iteration=first, trackers=trackers)
    samples = SampleWriter(options.output, first_iteration=first)
    recorder = IterationRecorder(writer, job.program, later=job.later, samples=samples)
    master = Master(
        default_store(),
        dist.get_world_size(),
        sink=recorder.take,
        positions=liveness.positions,
        display=Display(options.iterations, goal=job.algorithm.goal.metric),
    )
    master.start()
    return master, recorder


def build_executor(
    job: Job, groups: ProcessGroups, observers: Observers | None = None, *, timeout_s: float = 600.0
) -> tuple[RankExecutor, MegatronBackend]:
    """Build models, fill them and connect the transfers. Collective over WORLD.

    Raises:
        RealError: a copy cannot be built or loaded, or a rank did not come.
    """
    backend = MegatronBackend(job.program, groups=groups, timeout_s=timeout_s, verify=job.options.verify)
    for name, setup in job.roles.items():
        backend.add_model(name, setup)
        if name in job.loads and (job.resume is None or not job.program.graph.changes(name)):
            backend.load(name, job.loads[name])
        backend.rest(name)
    if job.resume is not None:
        backend.resume(job.save_folder, job.first_iteration)
    parts = _Parts(groups=groups, backend=backend, observers=observers or Observers(), timeout_s=timeout_s)
    return _executor(job, job.program, parts), backend


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What executors of one run share."""

    groups: ProcessGroups
    backend: MegatronBackend
    observers: Observers
    timeout_s: float


def _executor(job: Job, program: Program, parts: _Parts, first: int = 0) -> RankExecutor:
    """The executor of `program`, which runs from iteration `first` on. Collective over WORLD."""
    transfers = _transfers(program, parts)
    transfers.connect()
    shared = RunParts(
        program=program,
        rank=parts.backend.rank,
        backend=parts.backend,
        algorithm=job.algorithm,
        transfers=transfers,
        tokenizer=job.tokenizer,
        observers=parts.observers,
        memory=parts.backend.ledger,
    )
    evaluation = None
    if job.held_out is not None:
        inside = evaluation_of(program, job.algorithm)
        watched = observed(parts.observers)
        evaluation = RankExecutor(
            replace(shared, program=inside, transfers=_transfers(inside, parts), observers=watched)
        )
    return RankExecutor(replace(shared, change=_change_after(job, first, parts), evaluation=evaluation))


def _transfers(program: Program, parts: _Parts) -> DataTransfers:
    """Collective over WORLD."""
    device = cpu_device.device()
    return DataTransfers(
        program,
        parts.backend.rank,
        acquire_groups(parts.groups, program),
        device=device,
        payload_device=device if "nccl" in dist.get_backend() else torch.device("cpu"),
        timeout_s=parts.timeout_s,
    )


def _change_after(job: Job, first: int, parts: _Parts) -> PlanChange | None:
    iteration = min((start for start in job.later if start > first), default=None)
    if iteration is None:
        return None

    def make() -> RankExecutor:
        if parts.backend.rank == 0:
            logger.info("iteration %d: the next plan begins", iteration + 1)
        parts.backend.adopt(job.later[iteration])
        return _executor(job, job.later[iteration], parts, iteration)

    return PlanChange(iteration=iteration, make=make)


def _train(job: Job, executor: RankExecutor, publisher: MetricsPublisher) -> TrainResult:
    options = job.options
    config = TrainConfig(
        num_iterations=options.iterations,
        first_iteration=job.first_iteration,
        state=job.resume["algorithm"] if job.resume is not None else None,
        save_folder=job.save_folder,
        save_every=options.save_interval or 0,
        samples_every=options.samples.every or 0,
        num_samples=options.samples.count,
    )
    return train(config, executor, job.data, publisher, evaluator=_evaluator(job))


def _evaluator(job: Job) -> Evaluator | None:
    if job.held_out is None:
        return None
    options, goal = job.options, job.algorithm.goal
    config = EvaluationConfig(
        num_iterations=options.iterations,
        every=options.evaluation.every or 0,
        greedy=options.evaluation.greedy,
        num_samples=options.samples.count,
    )
    best = BestCheckpoint(job.best_folder, goal, job.best) if options.evaluation.keep_best else None
    return Evaluator(config, goal, job.batches, best)


def write_reports(output: Path, goal: Goal) -> dict[str, Any]:
    """Merge the ranks' traces into a Chrome trace, draw the timeline and write ``summary.json``. One process."""
    spans = attribute_waits(read_spans(output / "trace"))
    metrics = read_metrics(output / "metrics.jsonl")
    summary = summarize(spans, metrics, goal)
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_chrome_trace(spans, output / "trace.json")
    write_timeline(spans, output / "timeline.svg")
    return summary
