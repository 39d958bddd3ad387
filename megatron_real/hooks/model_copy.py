"""A model's weights on one window in one layout: modules, owned storage, realloc table, and for training an optimizer.

Modules are built once and never again; only the storage of their parameters comes and goes. A frozen copy's parameters
lie in segments of our own; a trainable copy's lie in the flat buffers of Megatron's DistributedDataParallel, which are
segments too, freed whole. Weights of a trainable copy may be dropped and rebuilt from the distributed optimizer's main
parameters, so that optimizer state never moves.

Invariants (tests/hooks/test_model_copy.py):
    - without residence the storages are zero bytes and the ledger holds none for the parameters;
    - `reload` gives back the bits that `offload` found, from the host and from the main parameters;
    - an optimizer step after weights arrived starts from those weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import ConfigError, PlanError, RealError
from megatron_real.hooks import model_init
from megatron_real.hooks.model_builder import RoleModel, build_chunks, layout_config, quiet, sharded_tensors
from megatron_real.hooks.parallel_state import ParallelLayout
from megatron_real.plan import CopyKey
from megatron_real.realloc_ops.local_shards import LocalShards, local_table
from megatron_real.realloc_ops.segments import BufferSegments, SegmentSet
from megatron_real.realloc_ops.versions import VersionStamp

__all__ = ["ModelCopy", "Training", "require_droppable"]

_DDP_LOGGER = "megatron.core.distributed.distributed_data_parallel"


def _default_ddp() -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(grad_reduce_in_fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What makes a copy trainable."""

    optimizer: OptimizerConfig
    """Its precision fields are set from the model."""
    ddp: DistributedDataParallelConfig = field(default_factory=_default_ddp)
    """The distributed optimizer is always on."""


def require_droppable(role: RoleModel, training: Training) -> None:
    """Check that a trained model's weights can be dropped and rebuilt from the optimizer's main parameters.

    Needs no processes: for plans with `drop_trained_weights`, before anything is built.

    Raises:
        PlanError: they cannot.
    """
    reason = _reason_in_options(role.config, training)
    if reason is not None:
        raise _no_dropping(role.role, reason)


def _reason_in_options(config: TransformerConfig, training: Training) -> str | None:
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return "fp32 parameters are themselves the main parameters"
    if config.cuda_graph_impl != "none":
        return "CUDA graphs hold the addresses of the weights"
    if training.optimizer.use_precision_aware_optimizer:
        return "the precision-aware optimizer keeps only what bf16 weights lack (store_param_remainders)"
    for option in ("fp8_param_gather", "fp4_param_gather", "nccl_ub", "reuse_grad_buf_for_mxfp8_param_ag"):
        if getattr(training.ddp, option, False):
            return f"{option} is on"
    return None


def _no_dropping(subject: str, reason: str) -> PlanError:
    return PlanError(
        f"{subject}: its weights cannot be rebuilt from the optimizer's main parameters: {reason}. Set "
        "drop_trained_weights to false for this call."
    )


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
    ) -> None:
        """Build the modules, and DDP and the optimizer if trained; the copy is resident, its values are not set.

        Collective over the mesh. Not called on ranks outside it.

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
        self._offloaded_to: str | None = None
        self._host_version: int | None = None
        self._checksum: int | None = None
        self._rebuild_proven = False
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
        """
        if self.optimizer is not None:
            with self.parallel.active():
                self.optimizer.reload_model_params()
        self._offloaded_to = None
        self.stamp.set(version)

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
            to: ``host``, or ``main_params``: of the optimizer, which has them anyway.

        Raises:
            PlanError: `to` is neither, or the values cannot be rebuilt from the main parameters.
        """
        if to not in ("host", "main_params"):
            raise PlanError(f"copy {self.key}: found offload to {to!r}; expected 'host' or 'main_params'.")
        if to == "main_params":
            self._require_rebuildable()
        if self._offloaded_to is not None:
            return
        if not self.resident:
            raise RealError(f"copy {self.key}: found no weights to offload; reallocate or load them first.")
        if to == "host":
            version = self.stamp.version
            self.segments.to_host(unchanged=version is not None and version == self._host_version)
            self._host_version = version
        else:
            self._checksum = None if self._rebuild_proven else self._sum_bits()
            self.segments.free()
        self._offloaded_to = to

    def reload(self) -> None:
        """Undo `offload`; nothing to do when the copy is resident.

        Collective over the data-parallel group after an offload to the main parameters.

        Raises:
            RealError: the copy was freed and not offloaded, or the rebuilt weights are not what they were.
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
        else:
            self._rebuild()
        self._offloaded_to = None

    def close(self) -> None:
        """Give everything back to the ledger and drop the modules."""
        if hasattr(self, "segments"):
            self.segments.free()
            self.segments.drop_host()
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
        self.segments = SegmentSet.adopt(self.chunks, owner=self.parameters_owner, ledger=self.ledger)

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

    # Rebuilding from the main parameters

    def _optimizers(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def _require_rebuildable(self) -> None:
        if self._training is None:
            reason: str | None = "the copy is not trained and has no optimizer"
        else:
            reason = _reason_in_options(self.config, self._training)
        if reason is None and not all(p.requires_grad for chunk in self.chunks for p in chunk.parameters()):
            reason = "some parameters are frozen and have no main parameter"
        if reason is None and not all(isinstance(part, DistributedOptimizer) for part in self._optimizers()):
            reason = "the optimizer is not Megatron's distributed optimizer"
        if reason is not None:
            raise _no_dropping(str(self.key), reason)

    @torch.no_grad()
    def _rebuild(self) -> None:
        self.segments.allocate()
        for segment in self.segments.segments:
            segment.flat.zero_()  # also between the parameters, where nothing is copied to
        with self.parallel.active():
            for optimizer in self._optimizers():
                optimizer._copy_main_params_to_model_params()
            for ddp in self.wrapped:
                ddp.start_param_sync(force_sync=True)
        if self._checksum is not None:
            # Once per copy, since this rests on private functions of Megatron.
            if self._checksum != self._sum_bits():
                self.stamp.invalidate("rebuilding it from the main parameters gave other weights")
                raise RealError(
                    f"copy {self.key}: weights rebuilt from the optimizer's main parameters differ from those "
                    "that were dropped. Set drop_trained_weights to false."
                )
            self._rebuild_proven = True

    def _sum_bits(self) -> int:
        """A checksum of all parameters' bits, sensitive to their order."""
        total = 0
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                bits = parameter.detach().reshape(-1).view(torch.int16).to(torch.int64)
                weights = torch.arange(1, bits.numel() + 1, device=bits.device)
                total = (total * 31 + int((bits * weights).sum())) % (1 << 61)
        return total
