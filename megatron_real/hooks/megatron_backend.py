"""Megatron-Core as the runtime's `ModelBackend`: the copies of all models on this rank, and what is computed on them.

Building is collective and happens once: layouts in the program's order, then for each model its copies and one exchange
of their tables. After that a realloc builds its plan the first time a pair is used, from tables alone, and reuses it.
"""

from __future__ import annotations

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

from megatron_real.backend import Head, Minibatch, Objective, Sampling
from megatron_real.batch import Batch
from megatron_real.dataflow import Call
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import ConfigError, RealError
from megatron_real.hooks import adoption, checkpoint, forward, generation
from megatron_real.hooks.copy_model import copy_model, rounding_warning
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.parallel_state import ParallelLayout, ParallelLayouts
from megatron_real.hooks.realloc_pairs import ReallocPairs, Wire
from megatron_real.hooks.streamed_realloc import StreamedRealloc, accounting
from megatron_real.layout import Layout
from megatron_real.plan import CopyKey
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import Program
from megatron_real.realloc_ops import ParamTable
from megatron_real.realloc_ops.execution.transports import TorchTransport
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES
from megatron_real.realloc_ops.planning.shards import ShardEntry, TensorSpec
from megatron_real.realloc_ops.planning.store_layout import nodes_of
from megatron_real.realloc_ops.proof.verify import VerifyMode
from megatron_real.realloc_ops.proof.versions import FROZEN_VERSION
from megatron_real.realloc_ops.storage.host_store import NodeStore, StoreGroup
from megatron_real.realloc_ops.storage.local_shards import gather_tables
from megatron_real.runtime.run_state import write_run_state

__all__ = ["MegatronBackend", "RoleSetup"]

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
        verify: VerifyMode = "off",
    ) -> None:
        """Build the process groups of every layout of the program. Collective over WORLD.

        Args:
            groups: the process's groups.
            bucket_bytes: the largest message of a realloc.
            timeout_s: after which a realloc names the rank that did not come.
            verify: how a realloc proves what it delivered; streamed ones, whose weights are in use by then, and mixing
                do not.

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
        self.stores: dict[str, NodeStore] = {}
        """Host stores of the node, by frozen model."""
        self.host_ledger = MemoryLedger(name=f"host memory of rank {self.rank}")
        world = tuple(range(program.world_size))
        self._table_group = groups.acquire(world, purpose="tables")
        group = groups.acquire(world, purpose="realloc")
        self._transport = TorchTransport.connect(group, timeout_s=timeout_s)
        wire = Wire(
            group=group,
            transport=self._transport,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            verify=verify,
        )
        self.pairs = ReallocPairs(wire, copies=self._copies, tables=self._tables, ledger=self.ledger)
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
        warning = rounding_warning(self.program.graph, setup.model)
        if warning is not None and self.rank == 0:
            logger.warning("%s", warning)
        home = self.program.home(model)
        keys = [key for key in self.program.copies() if key.model == model]
        # The home comes last, so that no other copy is built beside its optimizer state.
        for key in sorted(keys, key=home.__eq__):
            copy = self.add_copy(key)
            if copy is not None:
                if key == home:
                    copy.initialize()
                else:
                    copy.free()

    def add_copy(self, key: CopyKey) -> ModelCopy | None:
        """Build one copy of the program, resident and without values; None outside its mesh. Collective over WORLD.

        Raises:
            PlanError: it cannot be built in its layout.
            CapacityError: it does not fit into ``cluster.device_memory``.
            PeerError: another rank met one of these.
        """
        parallel = self._parallel[key]
        copy: ModelCopy | None = None
        entries: Sequence[ShardEntry] | RealError = ()
        if parallel.member:
            try:
                copy = self._build_copy(key, parallel, home=key == self.program.home(key.model))
                self._copies[key] = copy
                entries = copy.shards.entries
            except RealError as error:
                entries = error  # the other ranks hear of it in the exchange, and wait for nobody
        self._tables[key] = gather_tables(entries, self._table_group)
        return copy

    def adopt(self, program: Program) -> None:
        """Go on under another program of the same graph, between two iterations. Collective over WORLD.

        Every model has the weights that it had, trained ones their optimizer's state; copies and layouts of the old
        program that the new one does not have are gone. While a trained model moves, both its homes are in memory.

        Raises:
            PlanError: the program is of another graph or world; a copy cannot be built; or a trained model's state
                cannot be moved.
            CapacityError: there is not enough memory on the way.
            PeerError: another rank met one of these.
        """
        adoption.adopt(self, program)

    def _build_copy(self, key: CopyKey, parallel: ParallelLayout, *, home: bool) -> ModelCopy:
        setup = self.roles[key.model]
        graph = self.program.graph
        model = copy_model(self.program, key, setup.model)
        if not (home and graph.trained(key.model)):
            return ModelCopy(key, model, parallel, ledger=self.ledger, host_ledger=self.host_ledger)
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
            host_ledger=self.host_ledger,
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

    def evaluate(
        self, copy: CopyKey, batch: Batch, minibatch: Minibatch, objective: Objective, temperature: float
    ) -> dict[str, float]:
        """See `ModelBackend.evaluate`."""
        return forward.evaluate(self.copy(copy), batch, minibatch, objective, temperature)

    def realloc(self, source: CopyKey, target: CopyKey, version: int) -> dict[str, float]:
        """See `ModelBackend.realloc`."""
        mine = self._prepare(source, target, version)
        if mine is None:
            return accounting(self.pairs.run((source, target), self.program))
        with mine.stamp.updating(version):
            report = self.pairs.run((source, target), self.program)
        mine.weights_arrived(version)
        return accounting(report)

    def stream(self, source: CopyKey, target: CopyKey, version: int) -> StreamedRealloc:
        """See `ModelBackend.stream`."""
        mine = self._prepare(source, target, version)
        return StreamedRealloc(self.pairs.start((source, target), self.program), mine, version)

    def mix(self, source: CopyKey, target: CopyKey, mix: float, *, old: int, new: int) -> dict[str, float]:
        """See `ModelBackend.mix`; there is never a second copy of either model."""
        mine, theirs = self._copies.get(target), self._copies.get(source)
        if theirs is not None:
            theirs.stamp.require(new)
        if mine is None:
            return accounting(self.pairs.run((source, target), self.program, mix=mix))
        mine.stamp.require(old)
        with mine.stamp.updating(new):
            report = self.pairs.run((source, target), self.program, mix=mix)
        mine.weights_arrived(new)
        return accounting(report)

    def _prepare(self, source: CopyKey, target: CopyKey, version: int) -> ModelCopy | None:
        """The target on this rank, allocated; the source's version is checked."""
        mine, theirs = self._copies.get(target), self._copies.get(source)
        if theirs is not None:
            theirs.stamp.require(version)
        if mine is not None:
            mine.allocate()
        return mine

    def release(self, copy: CopyKey) -> None:
        """See `ModelBackend.release`."""
        self.copy(copy).free()

    def offload(self, copy: CopyKey, to: str, what: str) -> None:
        """See `ModelBackend.offload`."""
        if what == "state":
            self.copy(copy).offload_state()
        else:
            self.copy(copy).offload(to)

    def reload(self, copy: CopyKey, source: str, what: str) -> None:
        """See `ModelBackend.reload`."""
        if what == "state":
            self.copy(copy).reload_state()
        elif source == "node":
            self.copy(copy).load_from_store(self.stores[copy.model], FROZEN_VERSION)
        else:
            self.copy(copy).reload()

    def rest(self, model: str) -> None:
        """Put a filled model where it waits for its first call, as its plan says. Collective over WORLD.

        The first iteration then needs no more memory than later ones.

        Raises:
            CapacityError: there is not enough host memory.
            PeerError: another rank met that, or did not come.
        """
        copy = self.home(model)
        if model in self.stores:  # of an earlier program, perhaps on other nodes
            self.stores.pop(model).close()
        placement = self.program.plan.calls[self.program.graph.home_call(model).name]
        if placement.offload == "node":
            self._store(model, copy)
        elif placement.offload == "host" and copy is not None:
            if copy.trainable:
                copy.offload_state()
            else:
                copy.offload("host")

    def _store(self, model: str, copy: ModelCopy | None) -> None:
        """Take a frozen model into the host store of every node that its calls run in, and free its copy."""
        ranks = {rank for key in self.program.copies() if key.model == model for rank in key.mesh.ranks}
        members = StoreGroup(
            group=self._table_group,
            transport=self._transport,
            nodes=nodes_of(ranks, self.program.plan.cluster.devices_per_node),
        )
        table = self._tables[self.program.home(model)]
        store = NodeStore.create(table, members, name=f"store of {model}", ledger=self.host_ledger)
        self.stores[model] = store
        shards = copy.shards if copy is not None else None
        store.fill(shards, table=table, version=FROZEN_VERSION, ledger=self.ledger)
        if copy is not None:
            copy.free()

    def version(self, copy: CopyKey) -> int:
        """See `ModelBackend.version`."""
        version = self.copy(copy).stamp.version
        return -1 if version is None else version

    def close(self) -> None:
        """Free every copy and layout. Collective over WORLD."""
        for copy in self._copies.values():
            copy.close()
        for store in self.stores.values():
            store.close()
        self._copies.clear()
        self.pairs.forget()
        self.stores.clear()
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
        """Fill the models that change, and their optimizers, from a save of this or another plan.

        Collective over WORLD.
        """
        graph = self.program.graph
        for model in filter(graph.changes, graph.models):
            copy = self.home(model)
            with checkpoint.at_hand(copy):
                checkpoint.load_copy(
                    copy,
                    model,
                    checkpoint.find_checkpoint(folder / model, iteration),
                    specs=self._specs(model),
                    version=graph.version(model, iteration),
                    optimizer=graph.trained(model),
                )

    def save(self, folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
        """Write every model that changes, then the run's state, which names the iteration. Collective over WORLD."""
        graph = self.program.graph
        for model in filter(graph.changes, graph.models):
            key = self.program.home(model)
            checkpoint.save_copy(
                self.home(model),
                folder / model,
                iteration,
                self._saved_args(model, key.layout),
                owner=key.mesh.start,
                optimizer=graph.trained(model),
            )
        if self.rank == 0:
            write_run_state(folder, {"iteration": iteration, "algorithm": dict(state)})

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
