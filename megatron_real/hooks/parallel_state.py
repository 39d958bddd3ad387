"""Several parallel layouts of Megatron in one process, all alive, one shown to Megatron at a time.

Megatron keeps one layout in the globals of `megatron.core.parallel_state`. A `ParallelLayout` is a snapshot
of those globals for one (mesh, layout), made by Megatron's own `initialize_model_parallel` on blank globals,
with the process group collection taken from them, so that the two never disagree. `ParallelLayout.active()`
puts the snapshot in place for a block, with the layout's RNG tracker and micro-batch calculator. What the
launch script initialised itself stays the default outside such blocks. Models must also be given
`pg_collection` explicitly: some code of Megatron reads the globals, some the collection.

Groups come from `ProcessGroups`, by rank list and purpose. Within a layout, and between layouts, groups of
equal ranks are shared inside these purposes:

- ``model``: tp, cp, mp, ep, expert tp, embeddings and their products. Megatron issues their collectives in
  program order from one thread, the same on all members.
- ``data``: dp, dp_cp, expert dp and the optimizer's: gradient reductions and parameter gathers, which overlap
  with the collectives of ``model``. Among themselves they are issued in bucket order, the same on all
  members, so that dp and dp_cp may be one group.
- ``gather``: the separate all-gather groups, which exist to overlap with ``data``.
- ``mesh``: the whole mesh, for what this package itself agrees on before a model is used.
- ``pipeline``: point-to-point of the schedule, in flight while ``model`` collectives run.

Layouts may share because a rank runs one call at a time and all ranks run the calls in one order.

Invariants (tests/hooks/test_parallel_state.py):
    - after `active()`, also on an exception, every global is the object that it was before;
    - the groups equal `megatron_real.layout.rank_groups`;
    - building and destroying a layout leaves the number of groups and descriptors where it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random

from megatron_real.errors import ConfigError, PlanError
from megatron_real.hooks import cpu_device
from megatron_real.hooks.megatron_state import (
    MICROBATCH_CALCULATOR,
    RNG_TRACKER,
    SideState,
    blank_globals,
    capture_globals,
    capture_side,
    restore_globals,
    restore_side,
)
from megatron_real.hooks.patching import Patch, applied, require_parameters
from megatron_real.layout import Layout, Mesh, format_placement
from megatron_real.process_groups import ProcessGroups

__all__ = ["ParallelLayout", "ParallelLayouts", "active_layout"]

_CREATE_GROUP = "megatron.core.parallel_state:create_group"
_CREATE_GROUP_PARAMETERS = (
    "ranks",
    "timeout",
    "backend",
    "pg_options",
    "use_local_synchronization",
    "group_desc",
)
_INITIALIZE = "megatron.core.parallel_state:initialize_model_parallel"

_ACTIVE: list[ParallelLayout] = []
"""The layouts that are shown to Megatron now, innermost last."""


def active_layout() -> ParallelLayout | None:
    """The layout that Megatron sees now, or None outside every `ParallelLayout.active()`."""
    return _ACTIVE[-1] if _ACTIVE else None


class ParallelLayout:
    """One layout on one mesh, as Megatron sees it; made by `ParallelLayouts.build`."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.name = format_placement(mesh, layout)
        self.mesh = mesh
        self.layout = layout
        self.member = dist.get_rank() in mesh
        self.pg_collection: ProcessGroupCollection | None = None
        """The groups to give to model, optimizer and schedule; None on ranks outside the mesh."""
        self.mesh_group: dist.ProcessGroup | None = None
        """All ranks of the mesh; None on ranks outside it."""
        self._globals: dict[str, Any] | None = None
        self._side: SideState | None = None
        self._acquired: list[tuple[tuple[int, ...], str, str | None]] = []

    def __repr__(self) -> str:
        return f"ParallelLayout({self.name}, member={self.member})"

    @contextlib.contextmanager
    def active(self) -> Iterator[ParallelLayout]:
        """Show this layout to Megatron for a block, and what it saw before after it. May be nested.

        Random draws go on where this layout's last block ended. What Megatron changes in `parallel_state`
        inside the block (the virtual rank of an interleaved schedule) ends with it.

        Raises:
            PlanError: this rank is not in the mesh, or the layout was destroyed.
        """
        globals_, side = self._usable()
        outer = active_layout()
        former_globals, former_side = capture_globals(), capture_side()
        if outer is not None:
            outer._side = former_side
            side = former_side if outer is self else side
        _ACTIVE.append(self)
        try:
            restore_globals(globals_)
            restore_side(side)
            yield self
        finally:
            self._side = capture_side()
            left = _ACTIVE.pop()
            assert left is self, "layouts must be left in the reverse order of entering"
            restore_globals(former_globals)
            restore_side(former_side if outer is None or outer._side is None else outer._side)

    @contextlib.contextmanager
    def mesh_as_world(self) -> Iterator[None]:
        """Let object collectives that name no group meet on the mesh instead of on WORLD, for a block.

        Megatron aligns the optimizer's parameter groups over WORLD
        (`megatron.core.optimizer._get_param_groups`), where ranks outside the mesh would have to join.
        """
        assert self.mesh_group is not None, "only members enter a layout"
        reason = "ranks outside the mesh do not build this model's optimizer"
        with applied(
            [
                Patch(target="torch.distributed:all_gather_object", factory=self._on_mesh, reason=reason),
                Patch(target="torch.distributed:get_world_size", factory=self._on_mesh, reason=reason),
            ]
        ):
            yield

    def _on_mesh(self, original: Callable[..., Any]) -> Callable[..., Any]:
        group = self.mesh_group

        @functools.wraps(original)
        def meet(*args: Any, **kwargs: Any) -> Any:
            positional = 2 if original.__name__ == "all_gather_object" else 0
            if len(args) <= positional and kwargs.get("group") is None:
                kwargs["group"] = group
            return original(*args, **kwargs)

        return meet

    def p2p_communicator(self, config: Any) -> P2PCommunicator | None:
        """The communicator that a pipeline schedule wants beside `pg_collection`; None without a pipeline."""
        self._usable()
        assert self.pg_collection is not None
        return P2PCommunicator(self.pg_collection.pp, config) if self.layout.pp > 1 else None

    def set_num_microbatches(self, num_microbatches: int, *, micro_batch_size: int = 1) -> None:
        """Let `get_num_microbatches` under this layout say so.

        Args:
            num_microbatches: micro-batches per data-parallel rank and step.
            micro_batch_size: sequences per micro-batch.
        """
        _, side = self._usable()
        calculator = num_microbatches_calculator.ConstantNumMicroBatchesCalculator(
            global_batch_size=num_microbatches * micro_batch_size * self.layout.dp,
            micro_batch_size=micro_batch_size,
            data_parallel_size=self.layout.dp,
            decrease_batch_size_if_needed=False,
            rank=dist.get_rank(),
        )
        side.values[MICROBATCH_CALCULATOR] = calculator
        if active_layout() is self:
            num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator

    def _usable(self) -> tuple[dict[str, Any], SideState]:
        if not self.member:
            raise PlanError(
                f"layout {self.name}: rank {dist.get_rank()} is not in its mesh (ranks {self.mesh}), so "
                "it has nothing to show to Megatron here. Check `member` before entering."
            )
        if self._globals is None or self._side is None:
            raise PlanError(f"layout {self.name}: it was destroyed; build it again before use.")
        return self._globals, self._side


class ParallelLayouts:
    """Builds layouts and keeps them: equal requests share one object, until the last is destroyed.

    Args:
        groups: where process groups come from; also for reallocs and transfers, under purposes of their own.
        seed: of the random draws under a layout, as Megatron's ``--seed``.

    Raises:
        ConfigError: neither CUDA nor the CPU device of `cpu_device` is there.
        MegatronCompatError: Megatron lacks a symbol that this rests on.
    """

    def __init__(self, groups: ProcessGroups | None = None, *, seed: int = 1234) -> None:
        if not (torch.cuda.is_available() or cpu_device.is_active()):
            raise ConfigError(
                "layouts: there is no CUDA device and the CPU device is not installed; expected one of them. "
                "Call megatron_real.hooks.cpu_device.install_cpu_device() first."
            )
        require_parameters(_INITIALIZE, self._degrees(Mesh(0, 1), Layout()))
        self.groups = groups if groups is not None else ProcessGroups()
        self.seed = seed
        self._built: dict[tuple[Mesh, Layout], ParallelLayout] = {}
        self._holders: dict[tuple[Mesh, Layout], int] = {}
        self._memory_buffer: Any = None

    def __len__(self) -> int:
        return len(self._built)

    def build(self, mesh: Mesh, layout: Layout) -> ParallelLayout:
        """The layout on the mesh; give it back with `destroy`.

        Collective over WORLD: every rank calls, member or not, with the same arguments in the same order.

        Raises:
            PlanError: the degrees do not fit the mesh, or the mesh the world; before anything collective.
            PeerError: a rank did not come within the timeout of `groups`.
        """
        key = (mesh, layout)
        if key not in self._built:
            self._check(mesh, layout)
            name = format_placement(mesh, layout)
            self.groups.rendezvous(f"layout {name}")
            self._built[key] = self._build(ParallelLayout(mesh, layout))
            self._holders[key] = 0
        self._holders[key] += 1
        return self._built[key]

    def destroy(self, parallel_layout: ParallelLayout) -> None:
        """Give back what `build` gave; with the last holder the layout's groups go.

        Collective over WORLD.

        Raises:
            PlanError: the layout is shown to Megatron now, or is not one of these.
        """
        key = (parallel_layout.mesh, parallel_layout.layout)
        if self._built.get(key) is not parallel_layout:
            raise PlanError(f"layout {parallel_layout.name}: destroyed more often than built.")
        if parallel_layout in _ACTIVE:
            raise PlanError(
                f"layout {parallel_layout.name}: Megatron is using it; leave `active()` before `destroy`."
            )
        self._holders[key] -= 1
        if self._holders[key] == 0:
            # Nobody closes a socket while another rank is still at work on the other end.
            self.groups.rendezvous(f"destroy layout {parallel_layout.name}")
            del self._built[key], self._holders[key]
            self._release(parallel_layout)

    def close(self) -> None:
        """Destroy all layouts, whoever holds them. Collective over WORLD."""
        for key, parallel_layout in reversed(list(self._built.items())):
            self._holders[key] = 1
            self.destroy(parallel_layout)

    def _check(self, mesh: Mesh, layout: Layout) -> None:
        name = format_placement(mesh, layout)
        if layout.size != mesh.size:
            raise PlanError(
                f"layout {name}: found degrees for {layout.size} ranks (dp*tp*pp*cp); expected {mesh.size}, "
                "the size of the mesh."
            )
        if mesh.stop > self.groups.world_size:
            raise PlanError(
                f"layout {name}: found a mesh up to rank {mesh.stop - 1}; the world has "
                f"{self.groups.world_size} ranks."
            )
        expert = (layout.etp if layout.etp is not None else layout.tp) * layout.ep * layout.pp
        if mesh.size % expert:
            raise PlanError(
                f"layout {name}: found etp*ep*pp = {expert}; expected a divisor of {mesh.size}, "
                "the size of the mesh."
            )

    @staticmethod
    def _degrees(mesh: Mesh, layout: Layout) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "create_gloo_process_groups": False,
            "rank_offset": mesh.start,
            "local_world_size": mesh.size,
        }

    def _build(self, made: ParallelLayout) -> ParallelLayout:
        former_globals, former_side = capture_globals(), capture_side()
        create_group = Patch(
            target=_CREATE_GROUP,
            replacement=self._group_creator(made),
            parameters=_CREATE_GROUP_PARAMETERS,
            reason="a layout's groups are shared with other layouts and counted",
        )
        try:
            restore_globals(blank_globals())
            restore_side(SideState(rng_state=former_side.rng_state))
            with applied([create_group]):
                parallel_state.initialize_model_parallel(**self._degrees(made.mesh, made.layout))
            everyone = (tuple(made.mesh.ranks), "mesh", None)
            mesh_group = self.groups.acquire(everyone[0], purpose=everyone[1], meet=False)
            made._acquired.append(everyone)
            if made.member:
                made.mesh_group = mesh_group
                self._share_memory_buffer(former_globals)
                self._seed(former_side.values.get(RNG_TRACKER))
                made._globals = capture_globals()
                made._side = capture_side()
                made.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        except BaseException:
            self._release(made)
            raise
        finally:
            restore_globals(former_globals)
            restore_side(former_side)
        if made.member:
            made.set_num_microbatches(1)
        return made

    def _group_creator(self, made: ParallelLayout) -> Callable[..., Any]:
        """A `parallel_state.create_group` that takes groups from `groups`; collective, as the original."""

        def create_group(
            ranks: list[int],
            timeout: Any = None,
            backend: str | None = None,
            pg_options: Any = None,
            use_local_synchronization: bool = False,
            group_desc: str | None = None,
        ) -> Any:
            assert pg_options is None, "layouts pass no communicator options"
            key = (tuple(ranks), _purpose(group_desc or ""), backend)
            group = self.groups.acquire(key[0], purpose=key[1], backend=backend, meet=False)
            made._acquired.append(key)
            held = parallel_state._global_process_group_list
            if held is None:
                held = parallel_state._global_process_group_list = [None]  # None stands for WORLD
            if self.groups.rank in ranks and group not in held:
                held.append(group)
            return group

        return create_group

    def _share_memory_buffer(self, former_globals: dict[str, Any]) -> None:
        """One scratch buffer for all layouts: it is keyed by name and dtype; layouts do not run at once."""
        if self._memory_buffer is None:
            self._memory_buffer = (
                former_globals.get("_GLOBAL_MEMORY_BUFFER") or parallel_state._GLOBAL_MEMORY_BUFFER
            )
        parallel_state._GLOBAL_MEMORY_BUFFER = self._memory_buffer

    def _seed(self, tracker: Any) -> None:
        """Start the layout's random streams as `megatron.training` does, in a tracker like that given."""
        megatron_random.model_parallel_cuda_manual_seed(
            self.seed + 100 * parallel_state.get_pipeline_model_parallel_rank(),
            te_rng_tracker=any(kind.__name__ == "TECudaRNGStatesTracker" for kind in type(tracker).__mro__),
            inference_rng_tracker=getattr(tracker, "is_inference_rng_tracker", False),
            use_cudagraphable_rng=getattr(tracker, "use_cudagraphable_rng", False),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
            etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            force_reset_rng=True,
        )

    def _release(self, made: ParallelLayout) -> None:
        # The last references to the groups' sockets.
        made.pg_collection = made.mesh_group = made._globals = made._side = None
        for ranks, purpose, backend in reversed(made._acquired):
            self.groups.release(ranks, purpose=purpose, backend=backend)
        made._acquired.clear()


def _purpose(group_desc: str) -> str:
    """The purpose (see the module's text) of a group that Megatron describes so."""
    if group_desc.endswith("_AG"):
        return "gather"
    if group_desc == "PIPELINE_MODEL_PARALLEL_GROUP":
        return "pipeline"
    if "DATA_PARALLEL_GROUP" in group_desc and not group_desc.startswith("TENSOR_AND_DATA"):
        return "data"
    return "model"
