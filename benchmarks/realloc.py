"""Reallocation against what else moves weights between two layouts, on four gloo ranks.

    python benchmarks/realloc.py                      # make bench-realloc: a subset, about 10 minutes
    python benchmarks/realloc.py --all                # all models, dtypes and pairs of layouts
    python benchmarks/realloc.py --only "t4->d4 48M"  # cases whose name contains this
    python benchmarks/realloc.py --part exposed       # what a reallocation adds to an iteration

In one run, on the same models and ranks, in turn after a warm-up: ours; `megatron.core.resharding` with each transport
that runs here (its "gloo", and its "nccl" over gloo groups); Megatron's checkpoint through a RAM disk; and the limits:
a bare transfer of the same bytes between the same pairs in one message each, with the copies inside a rank that are
needed, over gloo (``limit_s``) and by memory as ours (``memory_limit_s``). ``gloo_s`` is ours over gloo alone.
A repetition takes as long as its slowest rank; medians are shown. One JSON line per case:

    {"case", "ours_s", "gloo_s", "megatron_gloo_s", "megatron_nccl_s", "checkpoint_s", "limit_s", "memory_limit_s",
     "checksum_s", "bytes_moved", "bytes_bound", "messages", "staging_peak_bytes", "bucket_bytes",
     "peak_over_max_bytes", ...}

``checksum_s`` is ours with ``verify="checksum"``. ``peak_over_max_bytes`` is how far an in-place run exceeds the larger
of source and destination on the worst rank. ``contiguous_share`` is the part of the received bytes that is contiguous
on arrival in pieces of a mebibyte or more. A method that refuses, or that leaves wrong weights, is null, and ``why``
says so.
The last lines compare with the aims.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # four ranks share few cores

from megatron_real.hooks.cpu_device import install_cpu_device  # noqa: E402  (before Megatron is imported)

install_cpu_device()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from realloc_exposed import exposed_rows  # noqa: E402
from realloc_methods import BUCKET_BYTES, Checkpoint, Limit, Pair, in_place_excess_bytes  # noqa: E402

from megatron_real.hooks.model_builder import RoleModel  # noqa: E402
from megatron_real.realloc_ops.execution.node_links import NodeLinks  # noqa: E402
from tests.harness import RankFailed, run_ranks  # noqa: E402
from tests.hooks.tiny import layouts, placement, tiny_role  # noqa: E402

RANKS = 4
DISK = Path("/dev/shm")
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "48M": {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1536, "vocab": 20480},
    "200M": {"num_layers": 12, "hidden_size": 1024, "ffn_hidden_size": 2816, "vocab": 22528},
    "MoE 48M": {
        "num_layers": 4,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "vocab": 8192,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 1536,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    },
}
PAIRS: Mapping[str, tuple[str, str]] = {
    "t2p2->t4": ("d1t2p2@0-3", "d1t4p1@0-3"),
    "t4->d4": ("d1t4p1@0-3", "d4t1p1@0-3"),
    "t2p2->d4": ("d1t2p2@0-3", "d4t1p1@0-3"),
    "d4->t2p2": ("d4t1p1@0-3", "d1t2p2@0-3"),
    "disjoint t2->t2": ("d1t2p1@0-1", "d1t2p1@2-3"),
    "e2->e4": ("d4t1p1e2@0-3", "d4t1p1e4@0-3"),
}
SUBSET = (
    *(f"{pair} 48M fp32" for pair in list(PAIRS)[:-1]),
    *(f"{pair} 48M bf16" for pair in ("t2p2->t4", "t4->d4", "disjoint t2->t2")),
    *("t4->d4 200M fp32", "t4->d4 200M bf16", "t2p2->t4 200M bf16", "disjoint t2->t2 200M bf16"),
    *("e2->e4 MoE 48M fp32", "e2->e4 MoE 48M bf16"),
)
MAX_SECONDS = {"checkpoint_s": 4.0}
"""A method is not repeated beyond this, after two repetitions."""
WARMUPS = 2
LARGE_BYTES = 24e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which model moves from where to where."""

    pair: str
    shape: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.pair} {self.shape} {self.dtype}"

    def role(self) -> RoleModel:
        shape = dict(SHAPES[self.shape])
        vocab = shape.pop("vocab")
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]
        heads = {"num_attention_heads": 8, "num_query_groups": 8}
        return tiny_role(dtype=dtype, vocab_size=vocab, padded_vocab_size=vocab, **heads, **shape)


def all_cases() -> list[Case]:
    """Every dense model with every dense pair, and the mixture of experts with its own."""
    dense = [name for name in PAIRS if name != "e2->e4"]
    cases = [
        Case(pair=pair, shape=shape, dtype=dtype)
        for shape, dtype, pair in product(("48M", "200M"), ("fp32", "bf16"), dense)
    ]
    return [*cases, *(Case(pair="e2->e4", shape="MoE 48M", dtype=dtype) for dtype in ("fp32", "bf16"))]


class Stopwatch:
    """Times methods in turn; all ranks take the same turns."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.methods: dict[str, Callable[[], object]] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.why: dict[str, str] = {}

    def add(
        self, name: str, method: Callable[[], object], *, before: Callable[[], None] | None = None
    ) -> None:
        """Warm a method up and keep it if it delivers the weights. Collective over WORLD."""
        if before is not None:
            self.before[name] = before
        self._pair.poison()
        for _ in range(WARMUPS):
            self._time(name, method)
        if name.endswith("limit_s") or self._pair.arrived():
            self.methods[name], self.seconds[name] = method, []
        else:
            self.why[name] = "the destination has wrong weights after it"

    def repeat(self, repetitions: int) -> None:
        """Time all methods, each time in another order. Collective over WORLD."""
        names = list(self.methods)
        for number in range(repetitions):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                done = self.seconds[name]
                if len(done) < 2 or sum(done) < MAX_SECONDS.get(name, float("inf")):
                    done.append(self._time(name, self.methods[name]))

    def _time(self, name: str, method: Callable[[], object]) -> float:
        if name in self.before:
            self.before[name]()
        dist.barrier()
        began_s = perf_counter()
        method()
        return over_ranks(perf_counter() - began_s, dist.ReduceOp.MAX)


def over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    """The sum or the largest of a number over all ranks. Collective over WORLD."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=operation)
    return float(found.item())


def _quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def measure(case: Case, repetitions: int, skip: Sequence[str], folder: Path) -> dict[str, Any]:
    """One case, on one rank of all."""
    _quiet()
    with layouts() as made:
        source, target = (placement(made, text) for text in PAIRS[case.pair])
        pair = Pair.build(case.role(), (source, target), made.groups.acquire(range(RANKS), purpose="realloc"))
        watch = Stopwatch(pair)
        ours = pair.reallocator()
        watch.add("ours_s", ours.run)
        report = ours.run()
        watch.add("gloo_s", pair.reallocator(node_links=False).run)
        watch.add("checksum_s", pair.reallocator(verify="checksum").run)
        for service in ("gloo", "nccl"):
            if f"megatron_{service}_s" not in skip:
                watch.add(f"megatron_{service}_s", pair.megatron(service))
        if "checkpoint_s" not in skip:
            checkpoint = Checkpoint(pair, folder)
            watch.add("checkpoint_s", checkpoint.run, before=checkpoint.prepare)
        limit = Limit(pair, pair.plan())
        watch.add("limit_s", limit.run)
        watch.add("memory_limit_s", Limit(pair, pair.plan(), NodeLinks.connect(pair.group)).run)
        watch.repeat(repetitions)
        received = over_ranks(report.bytes_moved, dist.ReduceOp.SUM)
        row = {
            **{name: statistics.median(times) for name, times in watch.seconds.items()},
            "bytes_moved": int(received),
            "bytes_bound": int(over_ranks(report.bytes_bound, dist.ReduceOp.SUM)),
            "messages": int(over_ranks(report.messages, dist.ReduceOp.SUM)) // 2,
            "staging_peak_bytes": int(over_ranks(report.staging_peak_bytes, dist.ReduceOp.MAX)),
            "rank_bytes": int(over_ranks(report.bytes_moved, dist.ReduceOp.MAX)),
            "contiguous_share": round(
                over_ranks(limit.contiguous_bytes, dist.ReduceOp.SUM) / max(received, 1), 3
            ),
            "why": watch.why,
        }
        del limit, watch
        excess_bytes = in_place_excess_bytes(pair)
        row["peak_over_max_bytes"] = int(over_ranks(excess_bytes, dist.ReduceOp.MAX))
        made.groups.release(range(RANKS), purpose="realloc")
    return row


def probe(case: Case, service: str) -> None:
    """Megatron's transport alone, where it may raise on some ranks and leave the others waiting."""
    _quiet()
    with layouts() as made:
        source, target = (placement(made, text) for text in PAIRS[case.pair])
        pair = Pair.build(case.role(), (source, target), made.groups.acquire(range(RANKS), purpose="realloc"))
        pair.megatron(service)()
        made.groups.release(range(RANKS), purpose="realloc")


def refusals(case: Case) -> dict[str, str]:
    """By method, why Megatron cannot do a case at all."""
    if "moe" not in case.shape.lower():
        return {}
    why = {}
    for service in ("gloo", "nccl"):
        try:
            run_ranks(RANKS, probe, case, service, timeout_s=60, group_timeout_s=30)
        except RankFailed as error:
            why[f"megatron_{service}_s"] = str(error).strip().splitlines()[-1]
    return why


def line(case: Case, found: dict[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
    """The JSON line of a case."""
    timed = (
        *("ours_s", "gloo_s", "megatron_gloo_s", "megatron_nccl_s", "checkpoint_s"),
        *("limit_s", "memory_limit_s", "checksum_s"),
    )
    counted = (
        *("bytes_moved", "bytes_bound", "messages", "staging_peak_bytes", "peak_over_max_bytes"),
        *("rank_bytes", "contiguous_share"),
    )
    row: dict[str, Any] = {"case": case.name}
    row |= {name: round(found[name], 4) if name in found else None for name in timed}
    row |= {name: found[name] for name in counted}
    row["bucket_bytes"] = BUCKET_BYTES
    why = {**found["why"], **refused}
    return {**row, "why": why} if why else row


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The aims, and what was found."""
    large = [row for row in rows if row["rank_bytes"] >= LARGE_BYTES]
    contiguous = [row for row in large if row["contiguous_share"] >= 0.95]
    both = [row for row in rows if row["megatron_gloo_s"] is not None and row["megatron_nccl_s"] is not None]
    found: list[dict[str, Any]] = []
    for what, chosen, ours, limit, most in (
        ("ours / limit, 24 MB per rank or more", large, "ours_s", "limit_s", 1.35),
        ("ours / limit, contiguous and large", contiguous, "ours_s", "limit_s", 1.15),
        ("ours / limit by memory, 24 MB per rank or more", large, "ours_s", "memory_limit_s", 1.35),
        ("ours / limit by memory, contiguous and large", contiguous, "ours_s", "memory_limit_s", 1.15),
        ("ours over gloo / limit, 24 MB per rank or more", large, "gloo_s", "limit_s", 1.35),
        ("ours over gloo / limit, contiguous and large", contiguous, "gloo_s", "limit_s", 1.15),
    ):
        ratios = {row["case"]: round(row[ours] / row[limit], 3) for row in chosen}
        if ratios:
            worst = max(ratios, key=lambda case: ratios[case])
            found.append(
                {"summary": what, "aim": f"<= {most}", "worst": ratios[worst], "case": worst}
                | {"median": statistics.median(ratios.values()), "met": ratios[worst] <= most}
            )
    for what, peers, least in (
        ("megatron gloo / ours", ("megatron_gloo_s",), 4.0),
        ("megatron's fastest / ours", ("megatron_gloo_s", "megatron_nccl_s"), 1.5),
    ):
        gains = [min(row[peer] for peer in peers) / row["ours_s"] for row in both]
        if gains:
            median = round(statistics.median(gains), 3)
            found.append({"summary": what, "aim": f">= {least}", "median": median, "met": median >= least})
    equal = all(row["bytes_moved"] == row["bytes_bound"] for row in rows)
    found.append({"summary": "bytes_moved == bytes_bound", "aim": "in every case", "met": equal})
    return found


def main() -> None:
    """Measure, print a line for each case, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("realloc", "exposed", "both"), default="both")
    parser.add_argument("--all", action="store_true", help="every case instead of the subset")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], help="methods to leave out, such as checkpoint_s")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.part in ("realloc", "both"):
        for case in all_cases():
            if options.only not in case.name or not (options.all or options.only or case.name in SUBSET):
                continue
            refused = refusals(case)
            skip = [*options.skip, *refused]
            with tempfile.TemporaryDirectory(dir=DISK, prefix="realloc-") as folder:
                results = run_ranks(
                    RANKS, measure, case, options.repetitions, skip, Path(folder), timeout_s=600
                )
            rows.append(line(case, results[0], refused))
            print(json.dumps(rows[-1]), flush=True)
        for row in summary(rows):
            print(json.dumps(row), flush=True)
    if options.part in ("exposed", "both"):
        for row in exposed_rows(Case(pair="t4->d4", shape="48M", dtype="fp32").role(), *PAIRS["t4->d4"]):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
