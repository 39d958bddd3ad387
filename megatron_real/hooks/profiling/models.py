"""The models that a profile measures: roles of the launch arguments, a few layers deep, in one layout per rank group.

Invariants (tests/e2e/test_profile.py):
    - the copies are those of a run: same arguments, layers, optimizer and padded vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.optimizer import OptimizerConfig

from megatron_real.algorithms.graphs import ppo_graph
from megatron_real.device_memory import MemoryLedger
from megatron_real.errors import ConfigError
from megatron_real.hooks import cpu_device, roles
from megatron_real.hooks.model_builder import RoleModel
from megatron_real.hooks.model_copy import ModelCopy, Training
from megatron_real.hooks.parallel_state import ParallelLayouts
from megatron_real.layout import Layout, Mesh
from megatron_real.model_shape import ModelShape
from megatron_real.plan import ClusterSpec, CopyKey, LayoutSpec, Placement, Plan
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.profile_options import ProfileOptions
from megatron_real.process_groups import ProcessGroups

__all__ = ["Copies", "ProfiledRole", "describe_roles"]

_GRAPH = ppo_graph()
"""Whose models are measured: it has all kinds of them."""
_DTYPES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}
_STILL = 1e-12
"""Learning rate: weights must not run away over hundreds of steps on random data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRole:
    """A model to measure."""

    model: RoleModel
    spec: ModelSpec
    optimizer: OptimizerConfig
    tps: tuple[int, ...]
    """Tensor-parallel degrees that the model can be built in."""

    def with_layers(self, count: int) -> RoleModel:
        """The role's model with fewer layers."""
        config = self.model.config
        changes: dict[str, object] = {"num_layers": count}
        if isinstance(config.moe_layer_freq, list):
            changes["moe_layer_freq"] = config.moe_layer_freq[-count:]
        return dataclasses.replace(self.model, config=dataclasses.replace(config, **changes))


def describe_roles(options: ProfileOptions) -> tuple[tuple[ProfiledRole, ...], Namespace]:
    """The roles to measure, and the parsed arguments. No collective; the same on every rank.

    Raises:
        ConfigError: an argument is wrong, or no degree fits.
    """
    foreign = sorted(set(options.roles) - set(_GRAPH.models))
    if foreign:
        raise ConfigError(
            f"profile: roles: found {', '.join(foreign)}; expected some of {', '.join(_GRAPH.models)}. Measure a model "
            "of your own algorithm as one of these: prices are found by its shape."
        )
    base = _arguments(options)
    wanted = options.tp or tuple(2**power for power in range(20) if 2**power <= options.devices_per_node)
    fitting = [tp for tp in wanted if options.num_ranks % tp == 0]
    unknown = sorted(set(options.overrides) - set(options.roles))
    if unknown:
        raise ConfigError(
            f"profile: model: found {', '.join(unknown)}; expected some of roles={list(options.roles)}. Add it."
        )
    found = []
    for name in options.roles:
        args = roles.role_arguments(base, overrides=options.overrides.get(name), role=name)
        model = roles.role_model(
            name,
            args,
            scalar_head=_GRAPH.has_scalar_head(name),
            tp_sizes=fitting,
            seed=1234,
            use_te=args.transformer_impl == "transformer_engine" and not cpu_device.is_active(),
        )
        if options.max_length > model.max_sequence_length:
            raise ConfigError(
                f"profile: max_length: found {options.max_length}; expected at most {model.max_sequence_length}, "
                f"the positions of {name} (max_position_embeddings)."
            )
        spec = ModelSpec(shape=model.shape(), param_dtype=_DTYPES[str(model.config.params_dtype)])  # type: ignore[arg-type]
        tps = tuple(tp for tp in fitting if _fits(model.shape(), tp))
        if not tps:
            raise ConfigError(
                f"profile: tp: found {list(wanted)}; expected a degree that {name} can be built in."
            )
        optimizer = dataclasses.replace(roles.optimizer_config(name, args), lr=_STILL, min_lr=0.0)
        found.append(ProfiledRole(model=model, spec=spec, optimizer=optimizer, tps=tps))
    return tuple(found), base


def _fits(shape: ModelShape, tp: int) -> bool:
    return not list(shape.layout_problems(Layout(tp=tp), "layout"))


def _arguments(options: ProfileOptions) -> Namespace:
    """Megatron's arguments under a plan that says nothing: one data-parallel group of all ranks."""
    placement = Placement(ranks=(0, options.num_ranks), layout=LayoutSpec(dp=options.num_ranks))
    plan = Plan(
        algorithm=_GRAPH.name,
        cluster=ClusterSpec(num_nodes=options.num_nodes, devices_per_node=options.devices_per_node),
        calls={call.name: placement for call in _GRAPH.calls},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.dump(path)
        return roles.parse_arguments(options.megatron, path)


class Copies:
    """Builds the copies that this rank measures on: with the other ranks of its tensor-parallel group."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._layouts = ParallelLayouts(groups)
        self.rank, self._world_size = groups.rank, groups.world_size

    @contextlib.contextmanager
    def pair(
        self, role: ProfiledRole, tp: int, sp: bool, layers: tuple[int, int]
    ) -> Iterator[tuple[ModelCopy, ModelCopy]]:
        """The role's model with few and with more layers, trained, in groups of `tp` ranks over all ranks, for a block.

        Collective over WORLD.

        Raises:
            PlanError: Megatron refuses the layout.
        """
        layout = Layout(tp=tp, sp=sp)
        meshes = [Mesh(start, start + tp) for start in range(0, self._world_size, tp)]
        built = [self._layouts.build(mesh, layout) for mesh in meshes]
        mine = next(one for one in built if one.member)
        ledger = MemoryLedger(None, name=f"rank {self.rank}")
        copies: list[ModelCopy] = []
        try:
            for count in layers:
                key = CopyKey(model=f"{role.model.role}, {count} layers", mesh=mine.mesh, layout=layout)
                training = Training(optimizer=dataclasses.replace(role.optimizer))
                copies.append(ModelCopy(key, role.with_layers(count), mine, training=training, ledger=ledger))
                copies[-1].initialize()
            yield copies[0], copies[1]
        finally:
            for copy in copies:
                copy.close()
            for one in reversed(built):
                self._layouts.destroy(one)

    def close(self) -> None:
        """Give the layouts back. Collective over WORLD."""
        self._layouts.close()
