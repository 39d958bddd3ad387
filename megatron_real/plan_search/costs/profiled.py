"""Prices of operations from a profile: times that were measured on the device, interpolated between its points.

Layers, embedding and head were timed inside real calls of this runtime, so the prices of one stage add up to what the
call took: launches, padding and the schedule's own work are in `head`. Tensor-parallel collectives are inside the
layer's time; `OpTime.communication_s` is what the same profile says that they take alone, and the rest is compute.
What was not measured is refused, with what to measure.

Between points: linear in sequences, contexts, tokens and bytes; logarithmic in the length, whose square attention
takes. Beyond the largest point: layers in proportion to the tokens; contexts, bytes, parameters and what comes once per
pass by their last slope.

Invariants (tests/unit/plan_search/test_profiled.py):
    - at a measured point of one stage, embedding + layers + head are the measured pass;
    - a price never falls when sequences, length, context, bytes or busy ranks rise;
    - a layout, shape or device that was not measured has no price.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_real.dataflow import CallType
from megatron_real.errors import ConfigError, PlanError
from megatron_real.plan_search.cluster import Device
from megatron_real.plan_search.costs.curves import Curve, Surface
from megatron_real.plan_search.costs.operations import Collective, Grid, Group, MicroBatch, OpTime, Pass
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.profile_db import Entry, Operation, ProfileDatabase, head_key, layer_key

__all__ = ["ProfiledCost"]

_SCORING = (Pass.FORWARD, Pass.TRAIN_FORWARD, Pass.BACKWARD)
"""Passes whose logits are those of the response tokens; the others compute one per sequence."""
_PADDING = 2.0
"""A vocabulary is padded for the tp degrees of its plan: a measured one within this factor is taken for it."""
_MOST_COMMUNICATION = 0.9
"""Of a layer's measured time; collectives alone may have been slower than inside it."""


class ProfiledCost:
    """`operations.OperationCosts` from a `ProfileDatabase`."""

    def __init__(self, database: ProfileDatabase, device: Device | None = None) -> None:
        """Price from measurements.

        Args:
            database: the measurements.
            device: of the cluster that is planned for; None does not check.

        Raises:
            ConfigError: the profile is of another device.
        """
        measured = database.provenance.device
        if device is not None and device.name != measured:
            raise ConfigError(
                f"profile {database.hash}: found measurements of {measured} ({database.provenance.device_model}); "
                f"expected {device.name}, the cluster's device. Profile that, or set cluster.device={measured}."
            )
        self._database = database
        self._entries: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in database.entries:
            self._entries.setdefault((entry.operation, entry.kind, entry.shape), []).append(entry)
        self._surfaces: dict[tuple[object, ...], Surface] = {}
        self._curves: dict[tuple[object, ...], Curve] = {}
        self._slower: dict[tuple[str, int], Mapping[float, Curve]] = {}

    @property
    def provenance(self) -> dict[str, str]:
        """See `OperationCosts.provenance`."""
        origin = self._database.provenance
        return {
            "prices": "profile",
            "profile": self._database.hash,
            "device": origin.device,
            "device_model": origin.device_model,
            "date": origin.date,
            **{f"version.{name}": version for name, version in sorted(origin.versions.items())},
        }

    # -- passes -------------------------------------------------------------------------------------------------------

    def layer(self, model: ModelSpec, layer: int, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """See `OperationCosts.layer`."""
        self._check(grid)
        shape = layer_key(model, layer)
        seconds = _at(self._surface(Operation.LAYER, pass_, shape, grid), pass_, batch)
        return self._split(seconds, self._layer_communication(model, batch, grid), pass_, grid)

    def embedding(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """See `OperationCosts.embedding`."""
        self._check(grid)
        communication = self._all_reduce(model, batch, grid) if pass_ is not Pass.BACKWARD else 0.0
        return self._split(self._embedding_s(model, pass_, batch, grid), communication, pass_, grid)

    def head(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> OpTime:
        """See `OperationCosts.head`; here also what else a pass does once, such as padding and the schedule's work."""
        self._check(grid)
        shape = head_key(model)
        rest = _at(self._surface(Operation.REST, pass_, shape, grid, _vocabulary(model)), pass_, batch)
        seconds = max(rest - self._embedding_s(model, pass_, batch, grid), 0.0)
        if pass_ in _SCORING:
            logits = self._curve(Operation.LOGITS, pass_, shape, grid, _vocabulary(model), axis="logits")
            seconds += max(logits(batch.logit_positions) - logits(batch.sequences), 0.0)
        return self._split(seconds, 0.0, pass_, grid)

    def pass_floor(self, model: ModelSpec, num_layers: int, pass_: Pass) -> float:
        """See `OperationCosts.pass_floor`: none beyond the price of the layers, whose times contain launches."""
        return 0.0

    def decode_step_floor(self, model: ModelSpec, num_layers: int) -> float:
        """See `OperationCosts.decode_step_floor`: as `pass_floor`."""
        return 0.0

    def call_overhead(self, type_: CallType, grid: Grid) -> float:
        """See `OperationCosts.call_overhead`."""
        times = sorted(entry.median_s for entry in self._need(Operation.CALL, type_))
        return self._beside(times[len(times) // 2], Pass.PREFILL, grid)

    def optimizer_step(self, model: ModelSpec, num_parameters: float, num_owned: float, grid: Grid) -> float:
        """See `OperationCosts.optimizer_step`; also clears the gradients."""
        shape = f"{layer_key(model, model.shape.num_layers - 1)} / {head_key(model)}"
        clearing, stepping = (
            self._plain_curve(operation, shape=shape, axis="parameters")
            for operation in (Operation.ZERO_GRADIENTS, Operation.OPTIMIZER)
        )
        return self._beside(clearing(num_parameters) + stepping(num_owned), Operation.OPTIMIZER, grid)

    # -- communication and copies -------------------------------------------------------------------------------------

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        """See `OperationCosts.collective`."""
        if group.size <= 1:
            return 0.0
        entries = [
            entry
            for entry in self._need(Operation.COLLECTIVE, kind)
            if entry.at["num_nodes"] == group.num_nodes
        ]
        sizes = sorted({entry.at["group"] for entry in entries})
        if not sizes or not sizes[0] <= group.size <= sizes[-1]:
            raise self._missing(
                f"{kind} over {group.size} ranks on {group.num_nodes} nodes",
                f"groups of {_numbers(sizes)} ranks there",
            )
        points = {size: self._collective_curve(kind, size, group.num_nodes)(num_bytes) for size in sizes}
        return Curve.through(points)(group.size)

    def _collective_curve(self, kind: Collective, size: float, num_nodes: int) -> Curve:
        where = {"group": size, "num_nodes": float(num_nodes)}
        return self._plain_curve(Operation.COLLECTIVE, kind, axis="bytes", where=where)

    def point_to_point(self, num_bytes: float, *, within_node: bool) -> float:
        """See `OperationCosts.point_to_point`."""
        where = {"within_node": float(within_node)}
        return self._plain_curve(Operation.POINT_TO_POINT, axis="bytes", where=where)(num_bytes)

    def bandwidth(self, *, within_node: bool) -> float:
        """See `OperationCosts.bandwidth`."""
        where = {"within_node": float(within_node)}
        curve = self._plain_curve(Operation.EXCHANGE, axis="bytes", where=where)
        return max(num_bytes / seconds for num_bytes, seconds in zip(curve.xs, curve.ys, strict=True))

    def local_copy(self, num_bytes: float) -> float:
        """See `OperationCosts.local_copy`."""
        return self._plain_curve(Operation.LOCAL_COPY, axis="bytes")(num_bytes)

    def host_copy(self, num_bytes: float) -> float:
        """See `OperationCosts.host_copy`."""
        return self._plain_curve(Operation.HOST_COPY, axis="bytes")(num_bytes)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _embedding_s(self, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> float:
        kind = Pass.FORWARD if pass_ in (Pass.PREFILL, Pass.DECODE) else pass_
        curve = self._curve(
            Operation.EMBEDDING, kind, head_key(model), grid, _vocabulary(model), axis="tokens"
        )
        return curve(batch.tokens)

    def _layer_communication(self, model: ModelSpec, batch: MicroBatch, grid: Grid) -> float:
        """Two all-reduces each way (Megatron's f and g); with sequence parallelism each is a gather and a scatter."""
        return 2 * self._all_reduce(model, batch, grid)

    def _all_reduce(self, model: ModelSpec, batch: MicroBatch, grid: Grid) -> float:
        if grid.tp == 1:
            return 0.0
        num_bytes = batch.tokens * model.shape.hidden_size * model.param_itemsize
        group = Group(grid.tp, grid.tp_nodes)
        kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if grid.sp else (Collective.ALL_REDUCE,)
        return sum(self.collective(kind, num_bytes, group) for kind in kinds)

    def _split(self, seconds: float, communication: float, pass_: Pass, grid: Grid) -> OpTime:
        inside = min(communication, _MOST_COMMUNICATION * seconds)
        beside = self._beside(seconds, Pass.PREFILL if pass_ is Pass.FORWARD else pass_, grid)
        return OpTime(seconds - inside, inside).times(beside / seconds if seconds > 0 else 1.0)

    def _beside(self, seconds: float, kind: str, grid: Grid) -> float:
        """Of what takes `seconds` while all ranks of a node are at work, as it was measured, beside fewer of them.

        Between the measured shapes linear in the seconds with all ranks at work, beyond them in proportion: so prices
        rise with the work.
        """
        origin = self._database.provenance
        busy, per_node = grid.busy_ranks, origin.ranks_per_node
        if busy > per_node:
            raise self._missing(f"{busy} ranks of a node at work at once", f"up to {per_node} of them")
        if not origin.shares_cores or busy == per_node:
            return seconds
        slower = self._contention(kind, grid.tp)
        return Curve.through({number: curve(seconds) for number, curve in slower.items()})(busy)

    def _contention(self, kind: str, tp: int) -> Mapping[float, Curve]:
        """By number of busy ranks: seconds over those with all ranks of a node at work."""
        key = (str(kind), tp)
        if key not in self._slower:
            entries = [entry for entry in self._need(Operation.CONTENTION, kind) if entry.at["tp"] == tp]
            if not entries:
                raise self._missing(f"contention of {kind} with tp={tp}", "other degrees only")
            all_busy = self._database.provenance.ranks_per_node
            seconds = {
                (entry.at["sequences"], entry.at["length"], entry.at["busy"]): entry.median_s
                for entry in entries
            }
            points: dict[float, dict[float, float]] = {}
            for (sequences, length, busy), one in seconds.items():
                if (sequences, length, all_busy) not in seconds:
                    raise self._missing(
                        f"contention of {kind} with tp={tp} on all {all_busy} ranks of a node", "fewer only"
                    )
                slowest = seconds[sequences, length, all_busy]
                points.setdefault(busy, {})[slowest] = min(one, slowest)
            self._slower[key] = {busy: _from_nothing(of_busy) for busy, of_busy in points.items()}
        return self._slower[key]

    def _check(self, grid: Grid) -> None:
        etp = grid.etp if grid.ep > 1 else 1
        for name, found in (("cp", grid.cp), ("ep", grid.ep), ("etp", etp)):
            if found != 1:
                raise PlanError(
                    f"profile {self._database.hash}: found {name}={found}; expected 1: a profile measures tp only. "
                    f"Search with {name}=1, or with the device's constants instead of a profile."
                )

    # -- entries ------------------------------------------------------------------------------------------------------

    def _need(self, operation: Operation, kind: str = "", shape: str = "") -> list[Entry]:
        entries = self._entries.get((operation, str(kind), shape))
        if not entries:
            known = sorted({key[2] for key in self._entries if key[0] == operation and key[1] == str(kind)})
            what = " ".join(part for part in (operation, str(kind), "of" if shape else "", shape) if part)
            raise self._missing(what, "; ".join(known) if shape and known else "nothing of that kind")
        return entries

    def _missing(self, wanted: str, measured: str) -> PlanError:
        return PlanError(
            f"profile {self._database.hash}: found no {wanted}; it has {measured}. Measure it with megatron-real "
            "profile (same output, this model and as many ranks); what is there already is kept."
        )

    def _surface(
        self, operation: Operation, pass_: Pass, shape: str, grid: Grid, vocabulary: int | None = None
    ) -> Surface:
        key = (operation, pass_, shape, grid.tp, grid.sp, grid.tp_nodes, vocabulary)
        if key not in self._surfaces:
            entries = self._of_layout(self._need(operation, pass_, shape), operation, grid, vocabulary)
            axis = "context" if pass_ is Pass.DECODE else "length"
            points = {(entry.at["sequences"], entry.at[axis]): entry.median_s for entry in entries}
            # Most of a decode step, and of what comes once per pass, is the same for any number of sequences.
            fixed = pass_ is Pass.DECODE or operation is Operation.REST
            self._surfaces[key] = Surface.through(
                points, beyond="slope" if fixed else "proportional", log=not fixed
            )
        return self._surfaces[key]

    def _curve(
        self,
        operation: Operation,
        pass_: Pass,
        shape: str,
        grid: Grid,
        vocabulary: int,
        *,
        axis: str,
    ) -> Curve:
        key = (operation, pass_, shape, grid.tp, grid.sp, grid.tp_nodes, vocabulary)
        if key not in self._curves:
            entries = self._of_layout(self._need(operation, pass_, shape), operation, grid, vocabulary)
            points = {entry.at[axis]: entry.median_s for entry in entries}
            self._curves[key] = Curve.through(points, beyond="slope")
        return self._curves[key]

    def _plain_curve(
        self,
        operation: Operation,
        kind: str = "",
        shape: str = "",
        *,
        axis: str,
        where: Mapping[str, float] | None = None,
    ) -> Curve:
        where = where or {}
        key = (operation, str(kind), shape, tuple(where.items()))
        if key not in self._curves:
            entries = [
                entry
                for entry in self._need(operation, kind, shape)
                if all(entry.at.get(name) == value for name, value in where.items())
            ]
            if not entries:
                wanted = ", ".join(f"{name}={value:g}" for name, value in where.items())
                raise self._missing(f"{operation} with {wanted}", "others only")
            points = {entry.at[axis]: entry.median_s for entry in entries}
            self._curves[key] = Curve.through(points, beyond="slope")
        return self._curves[key]

    def _of_layout(
        self, entries: Iterable[Entry], operation: Operation, grid: Grid, vocabulary: int | None
    ) -> list[Entry]:
        entries = list(entries)
        wanted = {"tp": grid.tp, "sp": int(grid.sp and grid.tp > 1), "tp_nodes": grid.tp_nodes}
        found = [entry for entry in entries if all(entry.at[name] == value for name, value in wanted.items())]
        if not found:
            have = sorted({tuple(int(entry.at[name]) for name in wanted) for entry in entries})
            texts = (
                ", ".join(f"{name}={value}" for name, value in zip(wanted, one, strict=True)) for one in have
            )
            asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
            raise self._missing(f"{operation} of {entries[0].shape} with {asked}", "; ".join(texts))
        return found if vocabulary is None else self._of_vocabulary(found, vocabulary)

    def _of_vocabulary(self, entries: list[Entry], vocabulary: int) -> list[Entry]:
        measured = sorted({entry.at["vocab"] for entry in entries})
        nearest = min(measured, key=lambda size: max(size / vocabulary, vocabulary / size))
        if not 1 / _PADDING <= nearest / vocabulary <= _PADDING:
            raise self._missing(f"vocabulary of {vocabulary}", f"vocabularies of {_numbers(measured)}")
        return [entry for entry in entries if entry.at["vocab"] == nearest]


def _at(surface: Surface, pass_: Pass, batch: MicroBatch) -> float:
    """The time of a micro-batch. Ragged ones are priced as equal sequences with the same tokens and squared lengths."""
    if pass_ is Pass.DECODE:
        return surface(batch.sequences, batch.context)
    if not batch.square_length or batch.length <= 0:
        return surface(batch.sequences, batch.length)
    length = batch.square_length / batch.length
    return surface(batch.tokens / length, length)


def _from_nothing(points: Mapping[float, float]) -> Curve:
    """Through `points`, and below the first one in proportion."""
    first = min(points)
    near = 1e-9
    return Curve.through({first * near: points[first] * near, **points})


def _vocabulary(model: ModelSpec) -> int:
    return model.shape.padded_vocab_size


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "no"
