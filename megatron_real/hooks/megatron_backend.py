"""Megatron-Core as the runtime's `ModelBackend`: the copies of all models on this rank, and what is computed on them.

Building is collective and happens once: layouts in the program's order, then for each model its copies and
one exchange of
their tables. After that a realloc builds its plan the first time a pair is used, from tables alone, and reuses it.
"""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.backend import Head, Minibatch, Objective, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import ConfigError, PlanError, RealError
from megatron_real.hooks import checkpoint, forward, generation
from megatron_real.hooks.model_builder import RoleModel, layout_config
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.parallel_state import ParallelLayout, ParallelLayouts
from megatron_real.layout import Layout
from megatron_real.plan import CopyKey
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import Program
from megatron_real.realloc_ops import ParamTable, build_realloc_plan
from megatron_real.realloc_ops.executor import ReallocExecutor, ReallocReport
from megatron_real.realloc_ops.local_shards import gather_tables
from megatron_real.realloc_ops.plan import DEFAULT_BUCKET_BYTES
from megatron_real.realloc_ops.shards import TensorSpec
from megatron_real.realloc_ops.transports import TorchTransport
from megatron_real.runtime.run_state import write_run_state

__all__ = ["MegatronBackend", "RoleSetup", "check_copies"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSetup:
    """Everything that a role brings to a run."""

    model: RoleModel
    args: Namespace
    """Its Megatron arguments: stored in its checkpoints."""
    optimizer: OptimizerConfig | None = None
    """None for a frozen role."""
    schedule: Mapping[str, Any] | None = None
    """Arguments of Megatron's `OptimizerParamScheduler`, in optimizer steps; None keeps the learning rate constant."""


class MegatronBackend:
    """Holds this rank's copies; see `ModelBackend` for what each method promises."""

    def __init__(
        self,
        program: Program,
        *,
        groups: ProcessGroups,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 600.0,
    ) -> None:
        """Build the process groups of every layout of the program. Collective over WORLD.

        Args:
            groups: the process's groups.
            bucket_bytes: the largest message of a realloc.
            timeout_s: after which a realloc names the rank that did not come.

        Raises:
            PeerError: a rank did not come.
        """
        self.program = program
        self.roles: dict[str, RoleSetup] = {}
        self.rank = dist.get_rank()
        self.ledger = MemoryLedger(program.plan.cluster.device_memory, name=f"rank {self.rank}")
        self.layouts = ParallelLayouts(groups, seed=1234)
        self._bucket_bytes = bucket_bytes
        self._copies: dict[CopyKey, ModelCopy] = {}
        self._tables: dict[CopyKey, ParamTable] = {}
        self._executors: dict[tuple[CopyKey, CopyKey], ReallocExecutor] = {}
        world = tuple(range(program.world_size))
        self._table_group = groups.acquire(world, purpose="tables")
        self._transport = TorchTransport.connect(
            groups.acquire(world, purpose="realloc"), timeout_s=timeout_s
        )
        self._parallel = {key: self.layouts.build(key.mesh, key.layout) for key in program.copies()}

    def add_model(self, model: str, setup: RoleSetup) -> None:
        """Build all copies of a model and give its home copy fresh values. Collective over WORLD.

        Raises:
            ConfigError: the program has no such model, or a trained one comes without optimizer options.
            PlanError: a copy cannot be built in its layout.
            CapacityError: this rank's copies do not fit into ``cluster.device_memory``.
            PeerError: another rank met one of these.
        """
        if model not in self.program.graph.models:
            raise ConfigError(
                f"models: found {model!r}; the algorithm has {list(self.program.graph.models)}."
            )
        self.roles[model] = setup
        home = self.program.home(model)
        for key in (key for key in self.program.copies() if key.model == model):
            parallel = self._parallel[key]
            copy, entries = None, ()
            if parallel.member:
                try:
                    copy = self._copies[key] = self._build_copy(key, parallel, home=key == home)
                    entries = copy.shards.entries
                except RealError as error:
                    entries = error  # the other ranks hear of it in the exchange, and wait for nobody
            self._tables[key] = gather_tables(entries, self._table_group)
            if copy is not None:
                if key == home:
                    copy.initialize()
                else:
                    copy.free()

    def _build_copy(self, key: CopyKey, parallel: ParallelLayout, *, home: bool) -> ModelCopy:
        setup = self.roles[key.model]
        graph = self.program.graph
        model = _model_of(self.program, key, setup)
        if not (home and graph.trained(key.model)):
            return ModelCopy(key, model, parallel, ledger=self.ledger)
        if setup.optimizer is None:
            raise ConfigError(
                f"models.{key.model}: found no optimizer options; expected some for a trained model."
            )
        copy = ModelCopy(
            key,
            model,
            parallel,
            training=Training(optimizer=setup.optimizer),
            ledger=self.ledger,
        )
        if setup.schedule is not None:
            copy.scheduler = OptimizerParamScheduler(copy.optimizer, **setup.schedule)
        return copy

    def copy(self, key: CopyKey) -> ModelCopy:
        """This rank's part of a copy.

        Raises:
            RealError: the rank is outside the copy's mesh.
        """
        if key not in self._copies:
            raise RealError(
                f"copy {key}: rank {self.rank} is outside its mesh; expected a rank of {key.mesh}."
            )
        return self._copies[key]

    def home(self, model: str) -> ModelCopy | None:
        """The copy in which `model` lives between calls; None on ranks outside its mesh."""
        return self._copies.get(self.program.home(model))

    # -- what the runtime calls ---------------------------------------------------------------------------------------

    def generate(
        self,
        copy: CopyKey,
        call: Call,
        iteration: int,
        prompts: Batch,
        microbatches: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> Batch:
        """See `ModelBackend.generate`."""
        return generation.generate(self.copy(copy), call, iteration, prompts, microbatches, sampling)

    def infer(
        self,
        copy: CopyKey,
        batch: Batch,
        microbatches: Sequence[Sequence[int]],
        head: Head,
        temperature: float,
    ) -> torch.Tensor | None:
        """See `ModelBackend.infer`."""
        return forward.infer(self.copy(copy), batch, microbatches, head, temperature)

    def train(
        self,
        copy: CopyKey,
        batch: Batch,
        minibatches: Sequence[Minibatch],
        objective: Objective,
        temperature: float,
    ) -> dict[str, Any]:
        """See `ModelBackend.train`; the copy's version advances by one per call, whatever the optimizer steps."""
        trained = self.copy(copy)
        version = self.version(copy)
        with trained.stamp.updating(version + 1):
            return forward.train(trained, batch, minibatches, objective, temperature)

    def realloc(self, source: CopyKey, target: CopyKey, version: int) -> dict[str, float]:
        """See `ModelBackend.realloc`."""
        executor = self._executor(source, target)
        mine, theirs = self._copies.get(target), self._copies.get(source)
        if theirs is not None:
            theirs.stamp.require(version)
        if mine is None:
            return _facts(executor.run())
        mine.allocate()
        with mine.stamp.updating(version):
            return _facts(executor.run())

    def _executor(self, source: CopyKey, target: CopyKey) -> ReallocExecutor:
        pair = (source, target)
        if pair not in self._executors:
            plan = build_realloc_plan(
                self._tables[source], self._tables[target], bucket_bytes=self._bucket_bytes, rank=self.rank
            )
            ends = [self._copies.get(key) for key in pair]
            self._executors[pair] = ReallocExecutor(
                plan.of(self.rank),
                src=ends[0].shards if ends[0] is not None else None,
                dst=ends[1].shards if ends[1] is not None else None,
                transport=self._transport,
                ledger=self.ledger,
                name=f"{source} -> {target}",
            )
        return self._executors[pair]

    def release(self, copy: CopyKey) -> None:
        """See `ModelBackend.release`."""
        self.copy(copy).free()

    def offload(self, copy: CopyKey, to: str) -> None:
        """See `ModelBackend.offload`."""
        self.copy(copy).offload(to)

    def reload(self, copy: CopyKey) -> None:
        """See `ModelBackend.reload`."""
        self.copy(copy).reload()

    def rest(self, model: str) -> None:
        """Put a filled model where it waits for its first call: to the host, if that is where it lives between calls.

        The first iteration then needs no more memory than later ones.
        """
        copy = self.home(model)
        placement = self.program.plan.calls[self.program.graph.home_call(model).name]
        if copy is not None and placement.offload == "host" and not self.program.graph.trained(model):
            copy.offload("host")

    def version(self, copy: CopyKey) -> int:
        """See `ModelBackend.version`."""
        version = self.copy(copy).stamp.version
        return -1 if version is None else version

    def close(self) -> None:
        """Free every copy and layout. Collective over WORLD."""
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()
        self._executors.clear()
        self.layouts.close()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def load(self, model: str, found: Path) -> list[str]:
        """Fill a model's home copy from a checkpoint's iteration folder. Collective over WORLD.

        A head that the checkpoint does not have is logged.

        Returns:
            The parameters that the checkpoint did not have (a critic's head); they keep their fresh values.

        Raises:
            ConfigError: the checkpoint has another shape.
        """
        fresh = checkpoint.load_copy(self.home(model), model, found, specs=self._specs(model))
        if fresh and self.rank == 0:
            logger.warning("%s: %s has no %s; it starts from fresh values", model, found, ", ".join(fresh))
        return fresh

    def _specs(self, model: str) -> Mapping[str, TensorSpec]:
        return self._tables[self.program.home(model)].specs

    def resume(self, folder: Path, iteration: int) -> None:
        """Fill the trained models, optimizers included, from a save of this or another plan. Collective over WORLD."""
        for model in self._trained():
            copy = self.home(model)
            found = checkpoint.find_checkpoint(folder / model, iteration)
            checkpoint.load_copy(
                copy, model, found, specs=self._specs(model), version=iteration, optimizer=True
            )

    def save(self, folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        """Write every trained model, then the run's state, which names the iteration. Collective over WORLD."""
        for model in self._trained():
            key = self.program.home(model)
            checkpoint.save_copy(
                self.home(model),
                folder / model,
                iteration,
                self._saved_args(model, key.layout),
                owner=key.mesh.start,
            )
        if self.rank == 0:
            write_run_state(folder, {"iteration": iteration, "algorithm": dict(state)})

    def _trained(self) -> list[str]:
        return [model for model in self.program.graph.models if self.program.graph.trained(model)]

    def _saved_args(self, model: str, layout: Layout) -> Namespace:
        args = Namespace(**vars(self.roles[model].args))
        args.tensor_model_parallel_size = layout.tp
        args.pipeline_model_parallel_size = layout.pp
        args.data_parallel_size = layout.dp
        args.world_size = layout.size
        args.use_distributed_optimizer = True
        args.dist_ckpt_optim_fully_reshardable = True
        args.padded_vocab_size = self.roles[model].model.padded_vocab_size
        return args


def check_copies(program: Program, setups: Mapping[str, RoleSetup]) -> None:
    """Refuse copies that could not be built, before anything is. No collective.

    Raises:
        RealError: see `layout_config`.
    """
    for key in program.copies():
        layout_config(_model_of(program, key, setups[key.model]), key.layout)


def _model_of(program: Program, key: CopyKey, setup: RoleSetup) -> RoleModel:
    """What a copy is made of: the role's model, in its train call with what the plan says of recomputation."""
    if key != program.home(key.model) or not program.graph.trained(key.model):
        return setup.model
    recompute = program.plan.calls[program.graph.home_call(key.model).name].recompute
    try:
        config = _with_recomputation(setup.model.config, recompute)
    except (AssertionError, ValueError) as error:
        raise PlanError(f"copy {key}: Megatron refuses recompute={recompute!r}: {error}.") from error
    return dataclasses.replace(setup.model, config=config)


def _with_recomputation(config: TransformerConfig, recompute: str) -> TransformerConfig:
    """The configuration of a training copy; ``full`` keeps each layer's input only."""
    if recompute == "none":
        return config
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    return dataclasses.replace(config, recompute_granularity=recompute, **full)


def _facts(report: ReallocReport) -> dict[str, float]:
    return {
        "bytes_moved": float(report.bytes_moved),
        "bytes_bound": float(report.bytes_bound),
        "messages": float(report.messages),
        "staging_peak_bytes": float(report.staging_peak_bytes),
    }
