"""Time to plan one rank's part of a reallocation, from training to inference layouts of large models, from tables.

    python benchmarks/realloc_plan.py      # make bench-realloc-plan

One JSON line per model and number of ranks, in nodes of eight:

    ours_s                median over the sampled ranks of `build_realloc_plan(..., rank=r, devices_per_node=8)`;
                          `slowest_s` is the slowest of them
    megatron_s            Megatron's planner for one rank, from gathered metadata; null where it was not tried, because
                          four times its last time is over the limit, or where it did not finish within the limit
    egress_max_over_mean  most over mean bytes that ranks with equal shards send, the worst set of such ranks, per hop
    internode_bytes       between nodes; `internode_bytes_bound` is one copy of each destination shard per node, without
                          what the node's ranks hold
    table_s               to make both tables from shapes; a run gathers them once per copy. Not part of `ours_s`
    messages, tensors     of the median rank: messages sent and received, regions of tensors exchanged or copied
"""

from __future__ import annotations

import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from megatron_real.layout import Layout, Mesh, stage_layers
from megatron_real.model_shape import ModelShape
from megatron_real.plan_search.costs.traffic import Traffic, Window, realloc_traffic
from megatron_real.plan_search.parameters import param_table, rank_entries
from megatron_real.realloc_ops.planning.plan import DEFAULT_BUCKET_BYTES, RankPlan, build_realloc_plan
from megatron_real.realloc_ops.planning.shards import Box, ParamTable, ShardEntry

RANKS = (64, 256, 1024, 4096)
PER_NODE = 8
SAMPLES = 5
MEGATRON_LIMIT_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is planned for, on any number of ranks."""

    name: str
    shape: ModelShape
    train: Layout
    """With dp for no number of ranks yet."""
    inference: Layout

    def layouts(self, ranks: int) -> tuple[Layout, Layout]:
        """Of training and inference, both on all ranks."""
        return tuple(
            Layout(dp=ranks // (one.tp * one.pp), tp=one.tp, pp=one.pp, ep=one.ep, etp=one.etp)
            for one in (self.train, self.inference)
        )  # type: ignore[return-value]


MODELS = (
    Model(
        name="dense-70b",
        shape=ModelShape(
            num_layers=80,
            hidden_size=8192,
            num_attention_heads=64,
            num_query_groups=8,
            ffn_hidden_size=28672,
            padded_vocab_size=128256,
            gated_mlp=True,
            linear_bias=False,
            norm_bias=False,
        ),
        train=Layout(tp=8, pp=4),
        inference=Layout(tp=8),
    ),
    Model(
        name="moe-128x48",
        shape=ModelShape(
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_query_groups=4,
            head_size=128,
            ffn_hidden_size=6144,
            padded_vocab_size=151936,
            gated_mlp=True,
            linear_bias=False,
            norm_bias=False,
            qk_norm=True,
            num_experts=128,
            experts_per_token=8,
            expert_ffn_hidden_size=768,
        ),
        train=Layout(tp=4, pp=2, ep=8, etp=1),
        inference=Layout(tp=2, ep=4, etp=1),
    ),
)


def run_case(model: Model, ranks: int, megatron_limit_s: float) -> dict[str, Any]:
    """Plan, count and time; returns the line to print."""
    layouts = model.layouts(ranks)
    mesh = Mesh(0, ranks)
    started_s = time.perf_counter()
    src, dst = (param_table(model.shape, layout, mesh, "bfloat16") for layout in layouts)
    table_s = time.perf_counter() - started_s
    sampled = sorted({int(rank) for rank in np.linspace(0, ranks - 1, SAMPLES)})
    timed = [_timed_plan(src, dst, rank) for rank in sampled]
    traffic = realloc_traffic(
        model.shape,
        2,
        *(Window(0, layout) for layout in layouts),
        per_node=PER_NODE,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
    )
    for _, part in timed:
        assert traffic.sent[part.rank] == part.bytes_sent, "the sums below are those of the plan"
        assert traffic.received[part.rank] == part.bytes_received == part.bytes_bound
    parts = sorted(timed, key=lambda item: item[0])
    middle = parts[len(parts) // 2][1]
    return {
        "model": model.name,
        "ranks": ranks,
        "ours_s": round(statistics.median(seconds for seconds, _ in timed), 4),
        "megatron_s": _megatron_s(model, layouts, ranks, megatron_limit_s),
        "egress_max_over_mean": round(_egress(model, layouts, mesh, traffic), 4),
        "internode_bytes": int(traffic.received_across.sum()),
        "internode_bytes_bound": internode_bound(model, layouts, mesh),
        "slowest_s": round(parts[-1][0], 4),
        "table_s": round(table_s, 3),
        "layouts": [str(layout) for layout in layouts],
        "messages": sum(1 for _ in middle.sends) + sum(1 for _ in middle.receives),
        "tensors": len({piece.order for piece in _pieces(middle)}),
        "samples": len(timed),
    }


def _timed_plan(src: ParamTable, dst: ParamTable, rank: int) -> tuple[float, RankPlan]:
    gc.collect()
    started_s = time.perf_counter()
    plan = build_realloc_plan(src, dst, rank=rank, devices_per_node=PER_NODE)
    return time.perf_counter() - started_s, plan.of(rank)


def _pieces(part: RankPlan) -> Iterator[Any]:
    yield from part.copies
    for message in (*part.sends, *part.receives):
        yield from message.slices


# Bytes


def _egress(model: Model, layouts: tuple[Layout, Layout], mesh: Mesh, traffic: Traffic) -> float:
    """Of hop 0 over ranks with equal source shards, of hop 1 over ranks with equal destination shards."""
    worst = 1.0
    hops = (traffic.sent_within + traffic.sent_across, traffic.sent_relayed)
    for layout, sent in zip(layouts, hops, strict=True):
        groups: dict[int, list[float]] = {}
        for rank in mesh.ranks:
            groups.setdefault(id(rank_entries(model.shape, layout, mesh, rank, "bfloat16")), []).append(
                sent[rank]
            )
        worst = max([worst, *(max(each) * len(each) / sum(each) for each in groups.values() if sum(each))])
    return worst


def internode_bound(model: Model, layouts: tuple[Layout, Layout], mesh: Mesh) -> int:
    """Of every node: the bytes of its distinct destination shards that none of its ranks holds, box by box."""
    known: dict[tuple[frozenset[int], frozenset[int]], int] = {}
    total = 0
    for node in range(mesh.size // PER_NODE):
        ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
        held, wanted = (
            {
                id(entries): entries
                for entries in (rank_entries(model.shape, layout, mesh, rank, "bfloat16") for rank in ranks)
            }
            for layout in layouts
        )
        kind = frozenset(held), frozenset(wanted)
        if kind not in known:
            known[kind] = _missing_bytes(held.values(), wanted.values())
        total += known[kind]
    return total


def _missing_bytes(held: Iterable[tuple[ShardEntry, ...]], wanted: Iterable[tuple[ShardEntry, ...]]) -> int:
    sources: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
    for entry in {entry for entries in held for entry in entries}:
        sources.setdefault((entry.key, _lead(entry.box)), set()).add(entry.box)
    missing = 0
    for entry in {entry for entries in wanted for entry in entries}:
        boxes = sources.get((entry.key, _lead(entry.box)), ())
        common = (entry.box.intersect(box) for box in boxes)
        missing += entry.box.num_elements - sum(box.num_elements for box in common if box is not None)
    return missing * 2


def _lead(box: Box) -> tuple[int, ...]:
    """Layer and expert."""
    return tuple(low for low, extent in zip(box.offset, box.shape, strict=True) if extent == 1)


# Megatron's planner


def _megatron_s(model: Model, layouts: tuple[Layout, Layout], ranks: int, limit_s: float) -> float | None:
    if limit_s <= 0:
        return None
    from megatron.core.resharding.planner import build_plan_from_rosters, index_metadata_rosters

    sides = [list(_metadata(model.shape, layout)) for layout in layouts]
    rosters = index_metadata_rosters(list(zip(*sides, strict=True)))
    gc.collect()
    return _within(limit_s, lambda: build_plan_from_rosters(*rosters, ranks // 2))


def _within(limit_s: float, work: Callable[[], object]) -> float | None:
    """Seconds of `work`; None if it was stopped at the limit."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    started_s = time.perf_counter()
    try:
        work()
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return round(time.perf_counter() - started_s, 3)


def _metadata(shape: ModelShape, layout: Layout) -> Iterator[list[Any]]:
    """By rank, what `extract_param_metadata` finds in a model of TE layers (one tensor per expert and projection)."""
    stage_size = layout.tp * layout.dp
    cells = layout.ep * (layout.etp or layout.tp)
    for rank in range(layout.size):
        stage, index = divmod(rank, stage_size)
        first, tp = stage * stage_size, index % layout.tp
        block = first + index // cells * cells
        yield list(
            _rank_metadata(
                shape,
                layout,
                rank,
                stage,
                {
                    "tensor": list(range(rank - tp, rank - tp + layout.tp)),
                    "data": list(range(first + tp, first + stage_size, layout.tp)),
                    "pipeline": list(range(index, layout.size, stage_size)),
                    "expert": list(range(block, block + cells)),
                    "expert data": list(range(first + index % cells, first + stage_size, cells)),
                },
            )
        )


def _rank_metadata(
    shape: ModelShape, layout: Layout, rank: int, stage: int, groups: dict[str, list[int]]
) -> Iterator[Any]:
    import torch
    from megatron.core.resharding.utils import ParameterMetadata

    def made(
        name: str, size: tuple[int, ...], axis: int | None, stride: int = 1, expert: int | None = None
    ) -> Any:
        local = tuple(n // layout.tp if at == axis else n for at, n in enumerate(size))
        return ParameterMetadata(
            name=name,
            resolved_name=name,
            shape=local,
            dtype=torch.bfloat16,
            element_size=2,
            is_tp=axis is not None,
            partition_dim=axis or 0,
            partition_stride=stride,
            is_ep=expert is not None,
            num_experts=shape.num_experts if expert is not None else None,
            owner_rank=rank,
            tensor_parallel_group_ranks=groups["tensor"] if expert is None else [rank],
            expert_parallel_group_ranks=groups["expert"] if expert is not None else None,
            data_parallel_group_ranks=groups["data" if expert is None else "expert data"],
            pipeline_parallel_group_ranks=groups["pipeline"],
            global_expert_index=expert,
        )

    h, per_rank = shape.hidden_size, shape.num_experts // layout.ep
    first_expert = groups["expert"].index(rank) * per_rank
    if stage == 0:
        yield made("embedding.word_embeddings.weight", (shape.padded_vocab_size, h), 0)
    for layer in stage_layers(shape.num_layers, layout)[stage][0]:
        prefix = f"decoder.layers.{layer}."
        yield made(f"{prefix}self_attention.linear_qkv.layer_norm_weight", (h,), None)
        yield made(
            f"{prefix}self_attention.linear_qkv.weight", (shape.query_width + 2 * shape.key_width, h), 0
        )
        yield made(f"{prefix}self_attention.linear_proj.weight", (h, shape.query_width), 1)
        if shape.qk_norm:
            yield made(f"{prefix}self_attention.q_layernorm.weight", (shape.head_width,), None)
            yield made(f"{prefix}self_attention.k_layernorm.weight", (shape.head_width,), None)
        if not shape.num_experts:
            yield made(f"{prefix}mlp.linear_fc1.layer_norm_weight", (h,), None)
            yield made(f"{prefix}mlp.linear_fc1.weight", (2 * shape.ffn_hidden_size, h), 0, 2)
            yield made(f"{prefix}mlp.linear_fc2.weight", (h, shape.ffn_hidden_size), 1)
            continue
        yield made(f"{prefix}pre_mlp_layernorm.weight", (h,), None)
        yield made(f"{prefix}mlp.router.weight", (shape.num_experts, h), None)
        width = shape.expert_width
        for expert in range(first_expert, first_expert + per_rank):
            yield made(f"{prefix}mlp.experts.linear_fc1.weight{expert}", (2 * width, h), None, 1, expert)
            yield made(f"{prefix}mlp.experts.linear_fc2.weight{expert}", (h, width), None, 1, expert)
    if stage == layout.pp - 1:
        yield made("decoder.final_layernorm.weight", (h,), None)
        yield made("output_layer.weight", (shape.padded_vocab_size, h), 0)


def main() -> None:
    """Run all cases."""
    for model in MODELS:
        limit_s = MEGATRON_LIMIT_S
        for ranks in RANKS:
            print(f"{model.name}, {ranks} ranks", file=sys.stderr, flush=True)
            found = run_case(model, ranks, limit_s)
            print(json.dumps(found), flush=True)
            last_s = found["megatron_s"]
            if last_s is None or 4 * last_s > MEGATRON_LIMIT_S:
                limit_s = 0.0


if __name__ == "__main__":
    main()
