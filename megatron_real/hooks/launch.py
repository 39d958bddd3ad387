"""Put a run together: from options to models under a plan, and through the runtime.

Everything that can be wrong with the input (plan, arguments, checkpoints, prompts, reward function, batch
sizes) is checked
by `prepare`, on every rank alike and before the first collective. `run_ppo` then does what is collective.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
import torch.distributed as dist

import megatron_real
from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.algorithms.ppo import PPO
from megatron_real.capabilities import capability_problems
from megatron_real.data_plan import Lengths, assign
from megatron_real.errors import ConfigError, PlanError, raise_problems
from megatron_real.hooks import checkpoint, cpu_device, roles
from megatron_real.hooks.megatron_backend import MegatronBackend, RoleSetup, check_copies
from megatron_real.hooks.model_copy import Training, require_droppable
from megatron_real.hooks.tokenizer import build_tokenizer
from megatron_real.plan import Plan
from megatron_real.plan_search.comparison import PredictedRun, predicted_simulation
from megatron_real.process_groups import ProcessGroups, default_store
from megatron_real.program import Program, compile_program
from megatron_real.runtime.display import Display
from megatron_real.runtime.drift import other_workload
from megatron_real.runtime.executor import RankExecutor, RunParts
from megatron_real.runtime.faults import Fault, FaultInjector, parse_faults, ranks_by_instruction
from megatron_real.runtime.liveness import Limits, Liveness
from megatron_real.runtime.master import Master
from megatron_real.runtime.meeting import meet
from megatron_real.runtime.metrics import IterationRecorder, MetricsWriter, read_metrics
from megatron_real.runtime.observers import Observers
from megatron_real.runtime.progress import Progress
from megatron_real.runtime.prompts import PromptOptions, Prompts, Tokenizer
from megatron_real.runtime.publication import agree_on_program, agreement_text
from megatron_real.runtime.reports import MetricsPublisher
from megatron_real.runtime.rewards import load_function
from megatron_real.runtime.run_state import state_to_resume
from megatron_real.runtime.store_client import served_by_launcher
from megatron_real.runtime.summary import summarize
from megatron_real.runtime.trainer import TrainConfig, TrainResult, train
from megatron_real.runtime.transfer import DataTransfers, acquire_groups
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
    "run_ppo",
    "write_reports",
]

logger = logging.getLogger(__name__)

_BACKSTOP_S = 86_400.0
"""Limit of a single wait on the data path. A rank may rightly wait while others run several long instructions; the
liveness threads end a job that does not move."""
_SCALAR_HEADS = ("critic", "reward")
_INIT_SEED_OFFSET = {"critic": 1, "reward": 2}
"""Fresh critics and reward models differ from the actor; the reference equals it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run whose input was checked; nothing collective has happened."""

    options: RunOptions
    program: Program
    algorithm: PPO
    tokenizer: Tokenizer
    prompts: Prompts
    roles: Mapping[str, RoleSetup]
    loads: Mapping[str, Path]
    """Iteration folders of the roles' checkpoints."""
    faults: tuple[Fault, ...]
    resume: Mapping[str, Any] | None
    """The run's state at its last save."""

    @property
    def save_folder(self) -> Path:
        return self.options.output / "checkpoints"

    @property
    def first_iteration(self) -> int:
        return int(self.resume["iteration"]) if self.resume is not None else 0


def prepare(options: RunOptions) -> Job:
    """Read and check everything that a run needs. No collective; the same on every rank.

    Raises:
        RealError: the plan, an option or a file is wrong.
    """
    function = load_function(options.reward) if options.reward is not None else None
    config = options.ppo_config()
    graph = ppo_graph("function" if function is not None else "model", reference=config.reference)
    plan = Plan.load(options.plan)
    program = compile_program(graph, plan)
    base = roles.parse_arguments(options.megatron, options.plan)
    tokenizer = build_tokenizer(base)
    algorithm = PPO(config, tokenizer.end_token, function)
    setups, loads = _roles(options, program, base, algorithm)
    plan.check(graph, {name: setup.model.shape() for name, setup in setups.items()}, source=str(options.plan))
    raise_problems(capability_problems(graph, plan), subject=str(options.plan))
    check_copies(program, setups)
    prompts = Prompts.load(
        options.data.prompts,
        tokenizer,
        PromptOptions(
            batch_size=options.data.batch_size,
            max_prompt_tokens=options.data.max_prompt_tokens,
            truncate=options.data.truncate,
            seed=options.seed,
        ),
    )
    _check_batch(program, algorithm, options.data.batch_size)
    _check_lengths(setups, prompts, config.max_new_tokens)
    return Job(
        options=options,
        program=program,
        algorithm=algorithm,
        tokenizer=tokenizer,
        prompts=prompts,
        roles=setups,
        loads=loads,
        faults=parse_faults(
            options.fault,
            names=ranks_by_instruction(program),
            world_size=program.world_size,
            num_iterations=options.iterations,
        ),
        resume=_resume_state(options, program, setups),
    )


def _roles(
    options: RunOptions, program: Program, base: Namespace, algorithm: PPO
) -> tuple[dict[str, RoleSetup], dict[str, Path]]:
    setups: dict[str, RoleSetup] = {}
    loads: dict[str, Path] = {}
    for name in options.model:
        if name not in program.graph.models:
            raise ConfigError(
                f"model.{name}: found a role that the algorithm does not have; it has {list(program.graph.models)}."
            )
    num_steps = options.iterations * algorithm.config.num_minibatches * algorithm.config.num_epochs
    for name in program.graph.models:
        role = options.role(name)
        folder = role.load if role.load is not None or name != "ref" else options.role("actor").load
        stored = None
        if folder is not None:
            loads[name] = checkpoint.find_checkpoint(folder)
            stored = checkpoint.read_common(loads[name]).get("args")
        own_shape = name != "actor" and role.load is not None  # the command line describes the actor
        args = roles.role_arguments(
            base, stored=stored if own_shape else None, overrides=role.megatron, role=name
        )
        if stored is not None:
            checkpoint.check_architecture(name, args, stored, loads[name])
        model = roles.role_model(
            name,
            args,
            scalar_head=name in _SCALAR_HEADS,
            tp_sizes=[placement.layout.tp for placement in program.plan.calls.values()],
            seed=options.seed + _INIT_SEED_OFFSET.get(name, 0),
            use_te=args.transformer_impl == "transformer_engine" and not cpu_device.is_active(),
        )
        if name in loads:
            checkpoint.check_tensors(model, loads[name])
        trained = program.graph.trained(name)
        optimizer = roles.optimizer_config(name, args) if trained else None
        if (
            optimizer is not None
            and program.plan.calls[program.graph.home_call(name).name].drop_trained_weights
        ):
            require_droppable(model, Training(optimizer=optimizer))
        setups[name] = RoleSetup(
            model=model,
            args=args,
            optimizer=optimizer,
            schedule=roles.learning_schedule(name, args, num_steps) if trained else None,
        )
    return setups, loads


def _check_batch(program: Program, algorithm: PPO, batch_size: int) -> None:
    """Whether every call can cut the batch, whatever the lengths will be."""
    lengths = Lengths(prompt=(1,) * batch_size, response=(1,) * batch_size)
    for call in program.graph.calls:
        num_minibatches = algorithm.minibatching(call).num_minibatches if call.trains else 1
        assign(call, program.plan.calls[call.name], lengths, num_minibatches)


def _check_lengths(setups: Mapping[str, RoleSetup], prompts: Prompts, max_new_tokens: int) -> None:
    longest = max(len(record.tokens) for record in prompts.records) + max_new_tokens
    for name, setup in setups.items():
        limit = setup.model.max_sequence_length
        if longest > limit:
            raise ConfigError(
                f"{name}: found sequences of up to {longest} tokens (longest prompt and "
                f"max_new_tokens={max_new_tokens}); expected at most --max-position-embeddings={limit}."
            )


def _resume_state(
    options: RunOptions, program: Program, setups: Mapping[str, RoleSetup]
) -> dict[str, Any] | None:
    state = state_to_resume(options.output, resume=options.resume)
    if state is None:
        return None
    folder = options.output / "checkpoints"
    for model in program.graph.models:
        if program.graph.trained(model):
            found = checkpoint.find_checkpoint(folder / model, int(state["iteration"]))
            checkpoint.check_tensors(setups[model].model, found)
    return state


def run_ppo(options: RunOptions) -> dict[str, Any] | None:
    """Run PPO. Collective over WORLD: every rank calls it with equal options, ``torch.distributed`` not initialised.

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
    with liveness:
        progress.enter(job.first_iteration, 0, "set-up")
        agree_on_program(store, rank, agreement_text(job.program, _agreement(job)))
        if rank == 0:
            (options.output / "options.json").write_text(options.dumps())
            _write_plan(job)
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
    summary = write_reports(options.output) if rank == 0 else None
    dist.destroy_process_group()
    return summary


def _agreement(job: Job) -> dict[str, str]:
    """What all ranks must have alike beside the program; paths may differ from machine to machine."""
    paths = {"plan": True, "output": True, "data": {"prompts"}, "model": {"__all__": {"load"}}}
    options = job.options.model_dump(mode="json", exclude=paths)
    return {
        **{f"options.{name}": json.dumps(value, sort_keys=True) for name, value in options.items()},
        **{f"load.{name}": folder.name for name, folder in job.loads.items()},
        "prompts": job.prompts.digest(),
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
    config = job.algorithm.config
    run = {name: getattr(config, name) for name in ("num_minibatches", "num_epochs", "max_new_tokens")}
    other = other_workload(plan.predicted, {"batch_size": job.options.data.batch_size, **run})
    if other is not None:
        logger.warning("%s", other)


def _start_master(job: Job, liveness: Liveness) -> tuple[Master, IterationRecorder]:
    writer = MetricsWriter(job.options.output, first_iteration=job.first_iteration)
    recorder = IterationRecorder(writer, job.program)
    master = Master(
        default_store(),
        dist.get_world_size(),
        sink=recorder.take,
        positions=liveness.positions,
        display=Display(job.options.iterations),
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
    backend = MegatronBackend(job.program, groups=groups, timeout_s=timeout_s)
    for name, setup in job.roles.items():
        backend.add_model(name, setup)
        if name in job.loads and (job.resume is None or setup.optimizer is None):
            backend.load(name, job.loads[name])
        backend.rest(name)
    if job.resume is not None:
        backend.resume(job.save_folder, job.first_iteration)
    device = cpu_device.device()
    transfers = DataTransfers(
        job.program,
        backend.rank,
        acquire_groups(groups, job.program),
        device=device,
        payload_device=device if "nccl" in dist.get_backend() else torch.device("cpu"),
        timeout_s=timeout_s,
    )
    transfers.connect()
    executor = RankExecutor(
        RunParts(
            program=job.program,
            rank=backend.rank,
            backend=backend,
            algorithm=job.algorithm,
            transfers=transfers,
            tokenizer=job.tokenizer,
            observers=observers or Observers(),
            memory=backend.ledger,
        )
    )
    return executor, backend


def _train(job: Job, executor: RankExecutor, publisher: MetricsPublisher) -> TrainResult:
    config = TrainConfig(
        num_iterations=job.options.iterations,
        first_iteration=job.first_iteration,
        save_folder=job.save_folder,
        save_every=job.options.save_interval or 0,
    )
    return train(
        config, executor, job.prompts, publisher, state=job.resume["algorithm"] if job.resume else None
    )


def write_reports(output: Path) -> dict[str, Any]:
    """Merge the ranks' traces into a Chrome trace, draw the timeline and write ``summary.json``. One process."""
    spans = attribute_waits(read_spans(output / "trace"))
    metrics = read_metrics(output / "metrics.jsonl")
    summary = summarize(spans, metrics)
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_chrome_trace(spans, output / "trace.json")
    write_timeline(spans, output / "timeline.svg")
    return summary
