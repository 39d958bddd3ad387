"""Stages for a user who writes their own trainer: every layout of a plan, without our runtime.

real = Session("plan.json")                          # after torch.distributed is up
real.add_model("actor", role, optimizer=options)     # lives at its train placement
with real.call("actor_gen") as stage:                # weights arrive, parallel_state shows this layout
    ...                                              # stage.model is None on ranks outside the mesh
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.algorithms import registry
from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.errors import PlanError
from megatron_real.hooks import checkpoint
from megatron_real.hooks.cpu_device import install_cpu_device
from megatron_real.hooks.megatron_backend import MegatronBackend, RoleSetup
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.layout import Layout
from megatron_real.plan import Plan
from megatron_real.process_groups import ProcessGroups
from megatron_real.program import compile_program

__all__ = ["Session", "Stage", "graph_of_plan"]

_SUFFIXES = {"_gen": CallType.GENERATE, "_inf": CallType.INFERENCE, "_train": CallType.TRAIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a rank sees inside a call; everything but `layout` is None on ranks outside the call's mesh."""

    layout: Layout
    model: list[Any] | None = None
    """The model chunks of this rank, wrapped in DDP where the model is trained."""
    config: TransformerConfig | None = None
    pg_collection: ProcessGroupCollection | None = None
    p2p_communicator: P2PCommunicator | None = None
    """For Megatron's pipeline schedules; None without pipelining."""
    optimizer: MegatronOptimizer | None = None


def graph_of_plan(plan: Plan) -> Graph:
    """The graph of a known algorithm, or one made of the calls' names: ``MODEL_gen``, ``MODEL_inf``, ``MODEL_train``.

    A reward function's placement looks like a reward model's: who has a function gives the graph to `Session`.

    Raises:
        PlanError: a call's name does not end in one of these.
    """
    known = registry.graph_of_plan(plan)
    if known is not None:
        return known
    calls = []
    for name in plan.calls:
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            raise PlanError(
                f"calls.{name}: found a name without a kind; expected MODEL_gen, MODEL_inf or MODEL_train, or give the "
                "graph to Session."
            )
        calls.append(Call(name=name, model=name.removesuffix(suffix), type=_SUFFIXES[suffix]))
    return Graph(name=plan.algorithm, calls=tuple(calls), keys=())


class Session:
    """Every layout of a plan in this process, and the models that live in them."""

    def __init__(
        self, plan: Plan | str | Path, *, graph: Graph | None = None, timeout_s: float = 600.0
    ) -> None:
        """Build every layout's process groups, once. Collective over WORLD.

        Args:
            plan: a plan, or the path of one.
            graph: the calls; None takes those of the plan (see `graph_of_plan`).
            timeout_s: after which a rank that does not come is named.

        Raises:
            PlanError: the plan is wrong, or does not fit the graph.
            PeerError: a rank did not come.
        """
        install_cpu_device()
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        self.program = compile_program(graph or graph_of_plan(loaded), loaded)
        self.groups = ProcessGroups(timeout_s=timeout_s)
        self.backend = MegatronBackend(self.program, groups=self.groups, timeout_s=timeout_s)
        self._versions: dict[str, int] = {}

    def add_model(
        self,
        name: str,
        builder: RoleModel,
        *,
        optimizer: OptimizerConfig | None = None,
        load: str | Path | None = None,
    ) -> None:
        """Build a model in all its layouts and fill it: fresh, or from a Megatron checkpoint. Collective over WORLD.

        Args:
            name: a model of the plan.
            builder: what it is made of.
            optimizer: for a model that some call trains.
            load: a folder that Megatron saved, under any layout.

        Raises:
            ConfigError: no such model, no optimizer for a trained one, or a checkpoint of another shape.
        """
        found = checkpoint.find_checkpoint(load) if load is not None else None
        self.backend.add_model(name, RoleSetup(model=builder, args=Namespace(), optimizer=optimizer))
        if found is not None:
            self.backend.load(name, found)
        self._versions[name] = 0

    @contextmanager
    def call(self, name: str) -> Iterator[Stage]:
        """Enter a call: its weights arrive, and Megatron's `parallel_state` shows its layout until the block ends.

        Collective over the ranks of the call's mesh and of the model's home mesh; other ranks may enter too. After a
        train call the model's version advances; an inference-only copy is freed.

        Raises:
            PlanError: no such call.
        """
        call = self.program.graph.call(name)
        key = self.program.plan.copy_of(call)
        if key is None:
            raise PlanError(f"calls.{name}: found a call without a model; there is nothing to enter.")
        home = self.program.home(key.model)
        version = self._versions[key.model]
        rank = self.backend.rank
        temporary = key != home
        if temporary and (rank in key.mesh or rank in home.mesh):
            self.backend.realloc(home, key, version)
        if rank not in key.mesh:
            yield Stage(layout=key.layout)
        else:
            copy = self.backend.copy(key)
            copy.stamp.require(version)
            try:
                with copy.parallel.active():
                    yield Stage(
                        layout=key.layout,
                        model=copy.wrapped,
                        config=copy.config,
                        pg_collection=copy.parallel.pg_collection,
                        p2p_communicator=copy.parallel.p2p_communicator(copy.config),
                        optimizer=copy.optimizer,
                    )
                if call.trains:
                    copy.stamp.set(version + 1)
            finally:
                if temporary:
                    copy.free()
        if call.trains:
            self._versions[key.model] = version + 1

    def close(self) -> None:
        """Free all copies and groups. Collective over WORLD."""
        self.backend.close()
        self.groups.close()
