"""Memory in `make bench-estimator`: the bytes that Megatron's own test cases allocated, between steps and at most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from estimator_numbers import errors_of, rounded, spearman
from validation_rows import PRETRAIN, TRAIN, Row, RowError, read_rows

from megatron_real.errors import PlanError
from megatron_real.plan_search.memory import MemoryModel

MIB = 1 << 20
GIB = 1 << 30
HEAD_ROOM = 0.08
"""Of the capacity: what a search leaves free."""

_OTHER_MEMORY = re.compile(r"grpo|fsdp|fp8")
_OVERWRITTEN = 4
"""Bytes per logit that Megatron's cross entropy keeps less than this package's: it exponentiates in place
(`megatron.core.tensor_parallel.cross_entropy`), where log-probabilities and their exponentials are two fp32 tensors."""


class Allocation(NamedTuple):
    """Bytes of a test case, on its last rank."""

    predicted: float
    overwritten: float
    """Of `predicted`, what Megatron's own loss does not hold."""
    measured: float
    is_spread: bool
    """With the distributed optimizer."""


def memory() -> Iterator[dict[str, Any]]:
    """Bytes that Megatron's own test cases allocated, between steps and at most."""
    left_out: Counter[str] = Counter()
    static, peak = _allocations("mem_allocated", left_out), _allocations("mem_max", left_out)
    plain = [one for one in static if not one.is_spread]
    offset = float(np.median([one.measured - one.predicted for one in plain]))
    fitted_on = (
        f"{offset / MIB:.0f} MiB beside the model: {len(plain)} static rows without distributed optimizer"
    )
    yield {
        "kind": "memory_static",
        "rows": len(static),
        "fitted_on": f"{fitted_on}; judged on the {len(static) - len(plain)} with it",
        **errors_of([(one.predicted + offset, one.measured) for one in static if one.is_spread]),
        "unfitted": errors_of([(one.predicted, one.measured) for one in static]),
    }
    pairs = [(one.predicted - one.overwritten + offset, one.measured) for one in peak]
    yield {
        "kind": "memory_max",
        "rows": len(peak),
        "fitted_on": f"{fitted_on}; {_OVERWRITTEN} bytes per logit fewer, as Megatron's own loss keeps",
        **errors_of(pairs),
        "rank_correlation": rounded(spearman(*zip(*pairs, strict=True))),
        "unfitted": errors_of([(one.predicted, one.measured) for one in peak]),
        **_confusion(pairs),
        "left_out": dict(left_out),
    }


def _allocations(metric: str, left_out: Counter[str]) -> list[Allocation]:
    found = []
    for row in read_rows("memory"):
        if row.text("metric").startswith(metric):
            try:
                found.append(_allocation(row, static=metric == "mem_allocated"))
            except (RowError, PlanError) as error:
                left_out[str(error)[:80]] += 1
    return found


def _allocation(row: Row, *, static: bool) -> Allocation:
    """Raises RowError."""
    if _OTHER_MEMORY.search(row.text("id")):
        raise RowError("another job: an inference engine beside training, FSDP or fp8")
    memory_model = MemoryModel(PRETRAIN, {"model": row.model}, row.cluster, row.workload)
    needed = memory_model.call_memory(TRAIN, row.placement)
    found = needed.weights_bytes[-1] + needed.state_bytes[-1]
    overwritten = 0.0
    if not static:
        found += needed.active_bytes[-1]
        if "cross_entropy_loss_fusion" not in row.text("notes"):
            positions = row.number("mbs") * row.number("seq") / row.layout.cp
            overwritten = _OVERWRITTEN * positions * row.shape.padded_vocab_size / row.layout.tp
    return Allocation(found, overwritten, row.value * GIB, row.model.distributed_optimizer)


def _confusion(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Fits or not, for capacities from 0.5 to 2 times what each run took, and for the device that it ran on."""
    counts: Counter[str] = Counter()
    for predicted, measured in pairs:
        for share in (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.4, 2.0):
            fits, said = share >= 1, predicted <= (1 - HEAD_ROOM) * share * measured
            counts[f"{'fits' if fits else 'too_large'}_predicted_{'fits' if said else 'too_large'}"] += 1
    worst = max(measured / predicted - 1 for predicted, measured in pairs)
    device = Row({"gpu": "H100-80G", "source": ""}).device.memory_bytes
    return {
        "fits_its_device_predicted_too_large": sum(
            predicted > (1 - HEAD_ROOM) * device for predicted, _ in pairs
        ),
        "confusion": dict(sorted(counts.items())),
        "worst_underestimate": rounded(worst),
        "underestimated_beyond_head_room": sum(
            predicted < (1 - HEAD_ROOM) * measured for predicted, measured in pairs
        ),
    }
