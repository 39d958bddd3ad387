"""A model's weights on one window in one layout: modules, owned storage, realloc table, and for training an optimizer.

Modules are built once and never again; only the storage of their parameters comes and goes. A frozen copy's parameters
lie in segments of our own; a trainable copy's lie in the flat buffers of Megatron's DistributedDataParallel, which are
segments too, freed whole. Weights of a trainable copy may be dropped and rebuilt from the distributed optimizer's main
parameters, so that optimizer state never moves. The optimizer's state may rest on the host, by itself or while the
weights are dropped too; then it comes back first. A frozen copy may be filled from the host store of its node.

Invariants (tests/hooks/test_model_copy.py, tests/hooks/test_offload.py):
    - without residence the storages are zero bytes and the ledger holds none for the parameters;
    - `reload` gives back the bits that `offload` found, from the host, the node's store and the main parameters;
    - an optimizer step after weights arrived starts from those weights;
    - weights that are in the node's store are not kept on the host a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import CapacityError, ConfigError, PlanError, RealError
from megatron_real.hooks import model_init
from megatron_real.hooks.model_builder import RoleModel, build_chunks, layout_config, quiet, sharded_tensors
from megatron_real.hooks.parallel_state import ParallelLayout
from megatron_real.hooks.state_offload import StateOffload
from megatron_real.hooks.training_options import Training
from megatron_real.hooks.weight_rebuild import WeightRebuild
from megatron_real.plan import CopyKey
from megatron_real.realloc_ops.module_caches import refresh_caches
from megatron_real.realloc_ops.proof.versions import VersionStamp
from megatron_real.realloc_ops.storage.host_store import NodeStore, StoreReport
from megatron_real.realloc_ops.storage.local_shards import LocalShards, local_table
from megatron_real.realloc_ops.storage.segments import BufferSegments, SegmentSet

__all__ = ["ModelCopy", "Training"]

_DDP_LOGGER = "megatron.core.distributed.distributed_data_parallel"


class ModelCopy:
    """One copy of one role's model, as this rank of the copy's mesh holds it."""

    def __init__(
        self,
        key: CopyKey,
        role: RoleModel,
        parallel: ParallelLayout,
        *,
        training: Training | None = None,
        ledger: MemoryLedger | None = None,
        host_ledger: MemoryLedger | None = None,
    ) -> None:
        """Build the modules, and DDP and the optimizer if trained; the copy is resident, its values are not set.

        Collective over the mesh. Not called on ranks outside it. `ledger` is of device memory, `host_ledger` of what
        this rank keeps for itself on the host.

        Raises:
            PlanError: the model cannot be built in this layout.
            ConfigError: an optimizer that cannot be sharded.
            CapacityError: it does not fit into the ledger's device memory.
        """
        self.key = key
        self.role = role
        self.parallel = parallel
        self.config = layout_config(role, parallel.layout)
        self.ledger = ledger
        self._host_ledger = host_ledger
        self._training = training
        self.stamp = VersionStamp(str(key))
        self.chunks: list[MegatronModule] = build_chunks(role, parallel, self.config)
        """Unwrapped modules, one per virtual pipeline stage."""
        self.wrapped: list[Any] = self.chunks
        """What a schedule runs: the chunks, or DDP around each."""
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        """Learning rate and weight decay over optimizer steps; None keeps them constant."""
        self.segments: SegmentSet | BufferSegments
        self._declared: list[str] = []
        self._state: StateOffload | None = None
        self._store: NodeStore | None = None
        self._offloaded_to: str | None = None
        self._host_version: int | None = None
        self._rebuild: WeightRebuild | None = None
        try:
            if training is None:
                self._freeze()
            else:
                self._make_trainable(training)
            self.shards: LocalShards = local_table(
                sharded_tensors(self.chunks, parallel), self._owned_tensors()
            )
        except BaseException:
            self.close()
            raise

    @property
    def trainable(self) -> bool:
        return self.optimizer is not None

    @property
    def resident(self) -> bool:
        """Whether the parameters have storage."""
        return self.segments.allocated_bytes == self.segments.nbytes

    @property
    def parameters_owner(self) -> str:
        """Name of the parameters in the ledger."""
        return f"{self.key} parameters"

    # Values

    def initialize(self, *, version: int = 0, only: Callable[[str], bool] | None = None) -> None:
        """Give the parameters their initial values, which depend on the role's seed only.

        Args:
            version: what the weights are afterwards.
            only: keys to touch; None is all.
        """
        model_init.initialize(
            sharded_tensors(self.chunks, self.parallel), self.config, self.role.init_seed, only
        )
        self.weights_arrived(version)

    def weights_arrived(self, version: int) -> None:
        """Say that the parameters were overwritten from outside, by a load or a reallocation, with `version`.

        A trainable copy's main parameters take their values.

        Raises:
            RealError: the optimizer's state is on the host.
        """
        if self.optimizer is not None:
            self.require_state("taking new weights")
            with self.parallel.active():
                self.optimizer.reload_model_params()
        refresh_caches(self.chunks)
        self._offloaded_to = self._host_version = None
        self.stamp.set(version)

    def load_from_store(self, store: NodeStore, version: int) -> StoreReport:
        """Fill a frozen copy from its node's store; allocates it first. Not collective.

        From then on `offload("host")` keeps nothing, as long as the store has the weights.

        Raises:
            PlanError: the copy is trained, or has other tensors than the store.
            RealError: the store does not have `version`; the copy is left as it was.
            CapacityError: the copy does not fit.
        """
        if self.trainable:
            raise PlanError(
                f"copy {self.key}: found a trained copy to be filled from a host store; expected a frozen one. Set "
                "offload to 'none' or 'host' for its train call."
            )
        store.stamp.require(version)
        self.segments.allocate()
        with self.stamp.updating(version):
            report = store.load(self.shards, version=version)
        self.weights_arrived(version)
        self._store = store
        self.segments.drop_host()
        return report

    # Residence

    def allocate(self) -> None:
        """Give the parameters storage, contents undefined; nothing to do when they have it.

        Raises:
            CapacityError: they do not fit.
        """
        if not self.resident:
            self.stamp.invalidate("its storage was allocated again and nothing arrived since")
            self._offloaded_to = None
            self.segments.allocate()

    def free(self) -> None:
        """Free the parameters of a frozen copy; their values are lost.

        Raises:
            PlanError: the copy is trained: its weights would be gone for good.
        """
        if self.trainable:
            raise PlanError(
                f"copy {self.key}: found a release of a trained copy; expected `offload`, which keeps its values."
            )
        self.stamp.invalidate("its storage was freed")
        self._offloaded_to = None
        self.segments.free()

    def offload(self, to: str) -> None:
        """Free the parameters' storage, keeping their values; nothing to do when they are offloaded.

        Args:
            to: ``host``; ``node``: the node's store, which has them (``host`` means that too if it has); or
                ``main_params``: of the optimizer, which has them anyway.

        Raises:
            PlanError: `to` is none of these, or the values cannot be rebuilt from the main parameters.
            RealError: there are no weights, or the node's store does not have them.
            CapacityError: there is not enough host memory.
        """
        if to not in ("host", "node", "main_params"):
            raise PlanError(f"copy {self.key}: found offload to {to!r}; expected 'host' or 'main_params'.")
        if to == "main_params":
            self._rebuildable()
        if self._offloaded_to is not None:
            return
        if not self.resident:
            raise RealError(f"copy {self.key}: found no weights to offload; reallocate or load them first.")
        version = self.stamp.version
        if to == "host" and self._store is not None and self._store.version == version is not None:
            to = "node"
        if to == "node":
            if self._store is None or version is None:
                raise RealError(
                    f"copy {self.key}: found weights that are not of a host store; load them from it."
                )
            self._store.stamp.require(version)
            self.segments.free()
        elif to == "host":
            self.segments.to_host(unchanged=version is not None and version == self._host_version)
            self._host_version = version
        else:
            self._rebuildable().drop(self.segments)
        self._offloaded_to = to

    def reload(self) -> None:
        """Undo `offload`; nothing to do when the copy is resident.

        Collective over the data-parallel group after an offload to the main parameters.

        Raises:
            RealError: the copy was freed and not offloaded; the main parameters are on the host, or the node's store
                has other weights by now; or the rebuilt weights are not what they were.
            CapacityError: they do not fit.
        """
        if self.resident:
            return
        if self._offloaded_to is None:
            raise RealError(
                f"copy {self.key}: found nothing to reload; it was freed, so its weights must be reallocated."
            )
        if self._offloaded_to == "host":
            self.segments.from_host()
        elif self._offloaded_to == "node":
            assert self._store is not None
            assert self.stamp.version is not None
            self.load_from_store(self._store, self.stamp.version)
        else:
            self.require_state("rebuilding its weights from the main parameters")
            try:
                with self.parallel.active():
                    self._rebuildable().rebuild(self.segments)
            except RealError as error:
                if not isinstance(error, CapacityError):
                    self.stamp.invalidate("rebuilding it from the main parameters gave other weights")
                raise
        self._offloaded_to = None

    # Optimizer state

    def offload_state(self) -> None:
        """Bring main parameters and moments to the host and free them and the gradients; nothing to do when they are.

        Not collective. Between optimizer steps; weights may be resident, offloaded or dropped.

        Raises:
            PlanError: the copy is not trained, or its optimizer's state cannot leave the device.
            CapacityError: there is not enough host memory.
        """
        self._trained_state().offload()

    def reload_state(self) -> None:
        """Undo `offload_state`; nothing to do when the state is on the device.

        Not collective. Weights that were dropped to the main parameters are rebuilt by `reload` after this, not before.

        Raises:
            PlanError: the copy is not trained.
            CapacityError: it does not fit.
        """
        self._trained_state().reload()

    def require_state(self, what: str) -> None:
        """Refuse `what` while the optimizer's state is on the host; wait for it if it is on its way back.

        Whatever reads or writes main parameters, moments or gradients calls this first.

        Raises:
            RealError: it is on the host.
        """
        self._trained_state().require(what)

    @contextmanager
    def with_state(self) -> Iterator[None]:
        """The optimizer's state on the device for a block, and then back to where it was. Not collective."""
        away = self._state is not None and self._state.away
        if away:
            self.reload_state()
        if self._state is not None:
            self._state.wait()
        try:
            yield
        finally:
            if away and self._state is not None:  # not closed in the block
                self.offload_state()

    def _trained_state(self) -> StateOffload:
        if self._state is None:
            raise PlanError(
                f"copy {self.key}: found no optimizer; expected the trained copy of {self.key.model}."
            )
        return self._state

    def close(self) -> None:
        """Give everything back to the ledger and drop the modules."""
        if hasattr(self, "segments"):
            self.segments.free()
            self.segments.drop_host()
        if self._state is not None:
            self._state.close()
        self._state, self._store, self._rebuild = None, None, None
        if self.ledger is not None:
            for owner in self._declared:
                self.ledger.free(owner)
        self.chunks, self.wrapped, self.optimizer = [], [], None
        self.stamp.invalidate("the copy was closed")

    # Building

    def _freeze(self) -> None:
        for chunk in self.chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        self.segments = SegmentSet.adopt(
            self.chunks, owner=self.parameters_owner, ledger=self.ledger, host_ledger=self._host_ledger
        )

    def _make_trainable(self, training: Training) -> None:
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        gradient_itemsize = 4 if training.ddp.grad_reduce_in_fp32 else self.config.params_dtype.itemsize
        numel = sum(parameter.numel() for parameter in parameters)
        self._declare("gradients", numel * gradient_itemsize)
        ddp_config = dataclasses.replace(training.ddp, use_distributed_optimizer=True)
        with self.parallel.active(), quiet(_DDP_LOGGER, "full_param_layout not provided"):
            self.wrapped = [
                DistributedDataParallel(
                    self.config,
                    dataclasses.replace(ddp_config),  # DDP writes into it
                    chunk,
                    disable_bucketing=index > 0,
                    pg_collection=self.parallel.pg_collection,
                )
                for index, chunk in enumerate(self.chunks)
            ]
        buffers = [(f"chunk {index} buffer {number}", buffer) for index, number, buffer in self._buffers()]
        # Padding makes the buffers a little larger than the parameters: book what there is.
        self._declare("gradients", sum(buffer.grad_data.nbytes for _, buffer in buffers))
        self.segments = BufferSegments(
            [(name, buffer.param_data) for name, buffer in buffers],
            owner=self.parameters_owner,
            ledger=self.ledger,
            host_ledger=self._host_ledger,
        )
        self._build_optimizer(training.optimizer)

    def _build_optimizer(self, options: OptimizerConfig) -> None:
        if options.optimizer != "adam":
            raise ConfigError(
                f"optimizer of {self.role.role}: found {options.optimizer!r}; expected 'adam', the only one "
                "that Megatron's distributed optimizer shards."
            )
        dtype = self.config.params_dtype
        options = dataclasses.replace(
            options,
            use_distributed_optimizer=True,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
        )
        owned = sum(
            buffer.grad_data.numel() // buffer.data_parallel_world_size for _, _, buffer in self._buffers()
        )
        itemsize = options.exp_avg_dtype.itemsize + options.exp_avg_sq_dtype.itemsize
        if dtype != torch.float32:
            itemsize += options.main_params_dtype.itemsize
        self._declare("optimizer state", owned * itemsize)
        with self.parallel.active(), self.parallel.mesh_as_world():
            self.optimizer = get_megatron_optimizer(
                options,
                self.wrapped,
                use_gloo_process_groups=False,
                pg_collection=self.parallel.pg_collection,
            )
        self._state = StateOffload(
            f"copy {self.key}",
            self.optimizer,
            self.wrapped,
            owners=[f"{self.key} optimizer state", f"{self.key} gradients"],
            ledger=self.ledger,
            host_ledger=self._host_ledger,
        )

    def _declare(self, what: str, num_bytes: int) -> None:
        """Book what Megatron allocates, in place of an earlier estimate."""
        if self.ledger is None:
            return
        owner = f"{self.key} {what}"
        self.ledger.free(owner)
        self.ledger.reserve(owner, num_bytes)
        if owner not in self._declared:
            self._declared.append(owner)

    def _buffers(self) -> Iterator[tuple[int, int, Any]]:
        for index, ddp in enumerate(self.wrapped):
            for number, buffer in enumerate((*ddp.buffers, *ddp.expert_parallel_buffers)):
                yield index, number, buffer

    def _owned_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.chunks):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                yield f"{index}.{name}", tensor

    def _optimizers(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def _rebuildable(self) -> WeightRebuild:
        if self._rebuild is None:
            self._rebuild = WeightRebuild(str(self.key), self.chunks, self.wrapped, self._optimizers())
        self._rebuild.require_possible(self._training)
        return self._rebuild
