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
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from estimator_memory import memory  # noqa: E402
from estimator_numbers import PRIOR, Sample, judge, leave_one_model_out, priced, rounded, spearman  # noqa: E402
from validation_rows import PRETRAIN, TRAIN, Row, RowError, read_rows  # noqa: E402

from megatron_real.dataflow import Call, CallType, Graph  # noqa: E402
from megatron_real.model_shape import ModelShape  # noqa: E402
from megatron_real.plan import LayoutSpec, Placement  # noqa: E402
from megatron_real.plan_search.costs.analytic import AnalyticCost  # noqa: E402
from megatron_real.plan_search.costs.calls import BackendTraits, CallPricer  # noqa: E402
from megatron_real.plan_search.costs.operations import Collective, Grid, Group, MicroBatch, Pass  # noqa: E402
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
        "rank_correlation": rounded(correlation),
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
