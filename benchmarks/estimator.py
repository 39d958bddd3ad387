"""How good the planner's estimates are, against public measurements. One JSON line per kind.

    python benchmarks/estimator.py            # make bench-estimator

Errors are relative, ``|predicted / measured - 1|``; `bias` is the median of ``predicted / measured - 1``. `regret` is
what it costs to run the layout that is predicted to be best: its measured time over the best measured one, minus 1,
within groups of one model on equally many devices. `rank_correlation` is Spearman's, within those groups.

Devices' constants come from data sheets and kernel tables; `fitted_on` says what else was taken from measured rows, and
from which. A named factor is fitted to the rows of the other models, with a prior that it is 1, and the line judges the
model that was left out; `unfitted` is without it. Rows without a price are counted by reason in `left_out`.

Two things were settled with rows in view, so that they are no blind test of them: how experts' products are launched
(`rl_step`), and what Megatron's test cases hold beside the model and in their loss (`memory_max`).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from validation_rows import PRETRAIN, TRAIN, Row, RowError, read_rows  # noqa: E402

from megatron_real.dataflow import Call, CallType, Graph  # noqa: E402
from megatron_real.errors import PlanError  # noqa: E402
from megatron_real.model_shape import ModelShape  # noqa: E402
from megatron_real.plan import LayoutSpec, Placement  # noqa: E402
from megatron_real.plan_search.costs.analytic import AnalyticCost  # noqa: E402
from megatron_real.plan_search.costs.calls import BackendTraits, CallPricer  # noqa: E402
from megatron_real.plan_search.costs.operations import Collective, Grid, Group, MicroBatch, Pass  # noqa: E402
from megatron_real.plan_search.memory import MemoryModel  # noqa: E402
from megatron_real.plan_search.models import ModelSpec  # noqa: E402
from megatron_real.plan_search.workload import LengthDistribution, Workload  # noqa: E402

GRPO = Graph(
    name="grpo",
    calls=tuple(
        Call(name=name, model="model", type=type_)
        for name, type_ in (
            ("generate", CallType.GENERATE),
            ("old_log_probs", CallType.INFERENCE),
            ("ref_log_probs", CallType.INFERENCE),
            ("train", CallType.TRAIN),
        )
    ),
    keys=(),
)
"""One role stands for actor and reference, which are of one shape."""
MIB = 1 << 20
GIB = 1 << 30
HEAD_ROOM = 0.08
"""Of the capacity: what a search leaves free."""
MIN_GROUP = 5
"""Rows of a group before a rank correlation says anything."""
NOISE = 0.15
"""Relative error that a row is taken to have when a factor is fitted."""
PRIOR = 0.25
"""Standard deviation of the logarithm of a fitted factor, before any row was seen."""


class Sample(NamedTuple):
    """One row's group, model and measured value, and its prediction under a factor."""

    group: str
    model: str
    measured: float
    predict: Callable[[float], float]


# Numbers


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank. NaN where one side is constant."""
    ranks = []
    for values in (np.asarray(left), np.asarray(right)):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[place])
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def errors_of(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of (predicted, measured) pairs."""
    ratios = np.array([predicted / measured - 1 for predicted, measured in pairs])
    return {
        "median_error": _round(float(np.median(abs(ratios)))),
        "p90_error": _round(float(np.quantile(abs(ratios), 0.9))),
        "bias": _round(float(np.median(ratios))),
    }


def choices_of(groups: dict[str, list[tuple[float, float]]]) -> dict[str, float | int]:
    """Regret and rank correlation of (predicted, measured) pairs, by group."""
    regrets, correlations = [], []
    for pairs in groups.values():
        if len(pairs) > 1:
            chosen = min(pairs)[1]
            regrets.append(chosen / min(measured for _, measured in pairs) - 1)
        if len(pairs) >= MIN_GROUP:
            correlations.append(spearman(*zip(*pairs, strict=True)))
    if not regrets:
        return {}
    found: dict[str, float | int] = {
        "groups": len(regrets),
        "regret": _round(float(np.mean(regrets))),
        "max_regret": _round(max(regrets)),
    }
    if correlations:
        found["rank_correlation"] = _round(float(np.nanmean(correlations)))
    return found


def judge(samples: Sequence[Sample], factors: Sequence[float]) -> dict[str, Any]:
    """All metrics of samples, each predicted under its factor."""
    pairs, groups = [], defaultdict(list)
    for sample, factor in zip(samples, factors, strict=True):
        pair = (sample.predict(factor), sample.measured)
        pairs.append(pair)
        groups[sample.group].append(pair)
    return {**errors_of(pairs), **choices_of(groups)}


def fit(samples: Sequence[Sample], *, prior: float = PRIOR) -> float:
    """The factor that the samples and the prior make most likely, by golden-section search over its logarithm."""

    def loss(log_factor: float) -> float:
        factor = math.exp(log_factor)
        misses = [math.log(sample.predict(factor) / sample.measured) / NOISE for sample in samples]
        return sum(min(miss * miss, 9.0) for miss in misses) + (log_factor / prior) ** 2

    low, high, golden = -4 * prior, 4 * prior, (math.sqrt(5) - 1) / 2
    while high - low > 0.01:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def leave_one_model_out(
    samples: Sequence[Sample], *, prior: float = PRIOR
) -> tuple[list[float], list[float]]:
    """The factor of each sample, fitted to the other models; and the distinct factors."""
    by_model = {
        model: fit([sample for sample in samples if sample.model != model], prior=prior)
        for model in sorted({sample.model for sample in samples})
    }
    return [by_model[sample.model] for sample in samples], [_round(value) for value in by_model.values()]


def _round(value: float) -> float:
    return round(value, 4)


def priced(rows: Sequence[Row], make: Callable[[Row], Sample], left_out: Counter[str]) -> list[Sample]:
    """The rows' samples; `left_out` counts reasons."""
    found = []
    for row in rows:
        try:
            sample = make(row)
            sample.predict(1.0)
        except (RowError, PlanError) as error:
            left_out[str(error)[:80]] += 1
        else:
            found.append(sample)
    return found


# Kinds


def train() -> dict[str, Any]:
    """Iteration times of pretraining."""

    def make(row: Row) -> Sample:
        placement, model, cluster, workload = row.placement, row.model, row.cluster, row.workload

        def predict(factor: float) -> float:
            operations = AnalyticCost(cluster.device, compute_scale=factor)
            traits = BackendTraits(padded=False)
            pricer = CallPricer(PRETRAIN, {"model": model}, cluster, workload, operations, traits=traits)
            return pricer.price(TRAIN, placement).seconds

        name = row.text("model")
        return Sample(f"{name} on {row.text('n_gpus')}", name, row.iteration_s, predict)

    left_out: Counter[str] = Counter()
    samples = priced(read_rows("train"), make, left_out)
    return {"kind": "train", "metric": "iteration_time", **_both(samples, "compute_scale", left_out)}


def _both(
    samples: list[Sample], factor: str, left_out: Counter[str], *, prior: float = PRIOR
) -> dict[str, Any]:
    factors, values = leave_one_model_out(samples, prior=prior)
    return {
        "rows": len(samples),
        "fitted_on": f"{factor}: the other models (leave one model out)",
        "fitted": values,
        **judge(samples, factors),
        "unfitted": judge(samples, [1.0] * len(samples)),
        "left_out": dict(left_out),
    }


def decode(*, megatron: bool) -> dict[str, Any]:
    """Milliseconds per token of serving engines, or of Megatron's own."""

    def make(row: Row) -> Sample:
        model = ModelSpec(shape=row.shape, cuda_graph="AIC" in row.text("source"))
        _ = row.model  # 8-bit formats have no price
        device, layout = row.device, row.layout
        sequences, prompt, answer = row.number("concurrency"), row.number("seq"), row.number("osl")
        grid = Grid(tp=layout.tp)

        def predict(factor: float) -> float:
            operations = AnalyticCost(device, decode_floor_scale=factor)
            step = MicroBatch(sequences, 1.0, prompt + answer / 2, sequences)
            first = MicroBatch(1.0, prompt, prompt, 1.0)
            floor = operations.decode_step_floor(model, model.shape.num_layers)
            seconds = max(_pass(operations, model, Pass.DECODE, step, grid), floor)
            # Continuous batching: each answer's prompt interrupts the others' steps once.
            return seconds + sequences / answer * _pass(operations, model, Pass.PREFILL, first, grid)

        name = row.text("model")
        group = f"{name} {row.text('gpu')} {prompt}+{answer} x{sequences}"
        return Sample(group, name, row.value / 1e3, predict)

    rows = [row for row in read_rows("decode") if ("Megatron" in row.text("source")) == megatron]
    left_out: Counter[str] = Counter()
    samples = priced(rows, make, left_out)
    if megatron:
        return {
            "kind": "decode_megatron",
            "metric": "tpot",
            "rows": len(samples),
            "fitted_on": "these rows: the device's floors of eager decoding were read from them (in sample)",
            **judge(samples, [1.0] * len(samples)),
            "left_out": dict(left_out),
        }
    # Other engines than Megatron's: the prior on their floor is wide.
    return {"kind": "decode", "metric": "tpot", **_both(samples, "decode_floor_scale", left_out, prior=1.5)}


def _pass(operations: AnalyticCost, model: ModelSpec, pass_: Pass, batch: MicroBatch, grid: Grid) -> float:
    layers = model.shape.num_layers * operations.layer(model, 0, pass_, batch, grid).total_s
    ends = operations.embedding(model, pass_, batch, grid) + operations.head(model, pass_, batch, grid)
    return layers + ends.total_s


def gemm() -> dict[str, Any]:
    """Latencies of single matrix products."""

    def make(row: Row) -> Sample:
        m, n, k = map(int, re.findall(r"[mnk]=(\d+)", row.text("notes")))
        operations, model = AnalyticCost(row.device), ModelSpec(shape=_plain(k, n))
        return Sample("gemm", "gemm", row.value / 1e3, lambda _: operations.matrix_product(model, m, n, k))

    return _plainly("gemm", "gemm_latency", read_rows("gemm"), make)


def collective() -> dict[str, Any]:
    """Latencies of NCCL inside a node."""

    def make(row: Row) -> Sample:
        operations = AnalyticCost(row.device)
        kind = Collective(row.text("metric").removesuffix("_latency"))
        group, num_bytes = Group(row.number("n_gpus")), 2 * row.number("seq")
        return Sample("nccl", kind, row.value / 1e3, lambda _: operations.collective(kind, num_bytes, group))

    return _plainly("collective", "latency", read_rows("collective"), make)


MOE_CASES = {
    "mixtral": {"hidden": 4096, "width": 14336, "experts": 8, "top": 2, "shared": 0},
    "deepseek": {"hidden": 7168, "width": 2048, "experts": 32, "top": 8, "shared": 2048},
}
"""Megatron-LM tests/functional_tests/test_cases/common/moe_perf/test_cases.py: one sequence of 4096 tokens per rank."""


def layer() -> dict[str, Any]:
    """Forward and backward of Megatron's layers of experts alone, eight H100 with expert parallelism."""

    def make(row: Row) -> Sample:
        if row.text("precision") != "bf16" or not row.text("id").startswith("mlm_moe"):
            raise RowError(
                "an 8-bit format, which has no price" if "fp8" in row.text("id") else "no device named"
            )
        case = MOE_CASES[row.text("model").split()[0]]
        operations = AnalyticCost(row.device)
        experts = ModelSpec(shape=_with_experts(case))
        pass_ = Pass.BACKWARD if "backward" in row.text("metric") else Pass.TRAIN_FORWARD
        batch, grid = MicroBatch(1, 4096, 4096, 4096), Grid(ep=row.number("ep"))
        whole = operations.layer(experts, 1, pass_, batch, grid)
        attention = operations.layer(
            experts, 0, pass_, batch, grid
        )  # the leading layer's MLP is one channel wide
        seconds = whole.total_s - attention.total_s
        return Sample("moe", row.text("model"), row.value / 1e3, lambda _: seconds)

    return _plainly("layer", "moe_layer", read_rows("layer"), make)


def _plain(hidden: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_query_groups=1,
        ffn_hidden_size=hidden,
        padded_vocab_size=vocab,
    )


def _with_experts(case: dict[str, int]) -> ModelShape:
    return ModelShape(
        num_layers=2,
        hidden_size=case["hidden"],
        num_attention_heads=8,
        num_query_groups=8,
        ffn_hidden_size=1,
        padded_vocab_size=128,
        gated_mlp=True,
        num_experts=case["experts"],
        experts_per_token=case["top"],
        expert_ffn_hidden_size=case["width"],
        shared_expert_ffn_hidden_size=case["shared"],
        num_dense_layers=1,
    )


_IN_TABLES = {
    "gemm": "medians over the whole table that these rows are from (in sample)",
    "collective": "another version's table of the same devices",
}
"""Where the devices' constants are from, for kinds that they were read for."""


def _plainly(kind: str, metric: str, rows: list[Row], make: Callable[[Row], Sample]) -> dict[str, Any]:
    left_out: Counter[str] = Counter()
    samples = priced(rows, make, left_out)
    judged = judge(samples, [1.0] * len(samples))
    correlation = spearman(
        [sample.predict(1.0) for sample in samples], [sample.measured for sample in samples]
    )
    return {
        "kind": kind,
        "metric": metric,
        "rows": len(samples),
        "fitted_on": _IN_TABLES.get(kind),
        **{name: judged[name] for name in ("median_error", "p90_error", "bias")},
        "rank_correlation": _round(correlation),
        "left_out": dict(left_out),
    }


_RL_LAYOUTS = re.compile(r"generation \[TP,PP\]=\[([\d,]+)\]; training \[TP,CP,EP,PP,VPP\]=\[([\d,]+),n/a\]")
_PROMPT = 128
"""Tokens; NeMo RL's tables tell the mean of prompt and response together."""
_SPREAD = 0.6
"""Standard deviation of the logarithm of response lengths, which the tables do not tell."""
_SERVING_FLOOR = 0.3
"""`decode_floor_scale` of a serving engine, as fitted by `decode`."""


def rl_step() -> dict[str, Any]:
    """Whole on-policy GRPO steps of NeMo RL, all calls one after the other on all devices."""

    def make(row: Row) -> Sample:
        layouts = _RL_LAYOUTS.search(row.text("notes"))
        if "On policy" not in row.text("notes") or layouts is None:
            raise RowError("calls that overlap across iterations, or no layouts")
        served, trained = ([int(value) for value in text.split(",")] for text in layouts.groups())
        model, cluster, devices = row.model, row.cluster, row.number("n_gpus")
        (tp, cp, ep), pp = trained[:3], trained[-1]
        layers = model.shape.num_layers
        uneven = [layers // pp + (stage < layers % pp) for stage in range(pp)] if layers % pp else None
        spec = LayoutSpec(
            dp=devices // (tp * cp * pp),
            tp=tp,
            cp=cp,
            pp=pp,
            ep=ep,
            etp=1,
            sp=tp > 1,
            layers=uneven and tuple(uneven),
        )
        length, cap, rollouts = row.number("osl"), row.number("seq"), row.number("concurrency")
        workload = Workload(
            batch_size=rollouts,
            prompt=LengthDistribution.constant(_PROMPT),
            response=LengthDistribution.lognormal(length - _PROMPT, _SPREAD, cap - _PROMPT),
            num_minibatches=max(1, rollouts // row.number("gbs")),
        )
        per_pass = max(1, cap // length)  # sequences are packed to the longest
        serving = LayoutSpec(dp=devices // served[0], tp=served[0])

        def predict(_: float) -> float:
            operations = AnalyticCost(cluster.device, decode_floor_scale=_SERVING_FLOOR)
            engine = BackendTraits(padded=False, continuous_batching=True)
            pricer = CallPricer(
                GRPO, {"model": replace(model, cuda_graph=True)}, cluster, workload, operations, traits=engine
            )
            total = 0.0
            for call in GRPO.calls:
                layout = serving if call.type is CallType.GENERATE else spec
                sequences = workload.step_sequences(call) // layout.dp
                passes = 1 if call.type is CallType.GENERATE else max(1, sequences // per_pass)
                placement = Placement(ranks=(0, devices), layout=layout, num_microbatches=passes)
                total += pricer.price(call, placement).seconds
            return total

        name = row.text("model")
        return Sample(f"{row.text('id')}", name, row.value, predict)

    line = _plainly("rl_step", "total_step_time", read_rows("rl_step"), make)
    line["fitted_on"] = (
        f"decode_floor_scale {_SERVING_FLOOR}: the rows of `decode`, which share no run with these"
    )
    line["assumed"] = (
        f"prompts of {_PROMPT} tokens, log-normal responses (spread {_SPREAD}), no recomputation"
    )
    line["not_counted"] = "refit of the engine, rewards, host work between calls"
    return line


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
        "rank_correlation": _round(spearman(*zip(*pairs, strict=True))),
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
        "worst_underestimate": _round(worst),
        "underestimated_beyond_head_room": sum(
            predicted < (1 - HEAD_ROOM) * measured for predicted, measured in pairs
        ),
    }


def main() -> None:
    """Print one line per kind."""
    kinds: list[Callable[[], Any]] = [
        train,
        lambda: decode(megatron=False),
        lambda: decode(megatron=True),
        gemm,
        collective,
        layer,
        rl_step,
    ]
    for kind in kinds:
        print(json.dumps(kind()), flush=True)
    for line in memory():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
