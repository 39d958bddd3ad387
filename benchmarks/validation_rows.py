"""The measured rows of `data/validation.csv`, as models, clusters and placements. A row that lacks something says what.

Every row keeps its source, the file that it was read in, and its licence: MIT, Apache-2.0, or that of the Megatron-LM
repository. Rows whose numbers were only remembered, or come from a page or a paper without such a licence, are not in
the file.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_real.dataflow import Call, CallType, Graph
from megatron_real.layout import Layout
from megatron_real.model_shape import ModelShape, padded_vocab_size
from megatron_real.plan import ClusterSpec, LayoutSpec, Placement
from megatron_real.plan_search.cluster import Cluster, Device, load_device
from megatron_real.plan_search.models import ModelSpec
from megatron_real.plan_search.workload import LengthDistribution, Workload

__all__ = ["PRETRAIN", "TRAIN", "Row", "RowError", "read_rows"]

DATA = Path(__file__).parent / "data" / "validation.csv"
PER_NODE = 8
TRAIN = Call(name="train", model="model", type=CallType.TRAIN)
PRETRAIN = Graph(name="pretrain", calls=(TRAIN,), keys=())
GPT2_VOCAB = 50257
"""Of the tokenizer of Megatron's small test cases, whose rows leave it out."""
VTRAIN_NODE_BYTES_PER_S = 100e9
"""vTrain's cluster: 800 Gb/s per node of eight (the row's notes)."""
SIXTEEN_BIT = ("bf16", "fp16", "unlabelled (bf16 checkpoint id)")
_DEVICES = {"A100": "a100", "A100-80G": "a100", "H100-80G": "h100", "H200-141G": "h200"}
_EXPERTS = re.compile(r"(?P<width>\d+)x(?P<experts>\d+)e top(?P<top>\d+)(?P<shared> \+1 shared)?")
_NOT_PLAIN = re.compile(r"hybrid|LoRA|Nemotron", re.IGNORECASE)


class RowError(Exception):
    """Why a row cannot be priced."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    fields: dict[str, str]

    def text(self, name: str) -> str:
        return self.fields[name]

    def number(self, name: str, default: int | None = None) -> int:
        value = self.fields[name]
        if re.fullmatch(r"\d+", value):
            return int(value)
        if default is None:
            raise RowError(f"no {name}")
        return default

    @property
    def value(self) -> float:
        return float(self.fields["value"])

    @property
    def is_vtrain(self) -> bool:
        return "vTrain" in self.fields["source"]

    @cached_property
    def layout(self) -> Layout:
        """Raises RowError: the degrees do not multiply to the devices."""
        degrees = {name: self.number(name, 1) for name in ("tp", "pp", "cp", "ep")}
        devices = self.number("n_gpus")
        rest, remainder = divmod(devices, degrees["tp"] * degrees["pp"] * degrees["cp"])
        if remainder or rest != self.number("dp", rest):
            raise RowError("degrees that do not multiply to the devices")
        sequence_parallel = degrees["tp"] > 1 and self.fields["seq_parallel"] == "1"
        return Layout(
            dp=rest, **degrees, etp=1 if degrees["ep"] > 1 else None, vpp=self._chunks(), sp=sequence_parallel
        )

    def _chunks(self) -> int:
        per_chunk = re.search(r"vpp layers=(\d+)", self.fields["notes"])
        if per_chunk and self.number("pp", 1) > 1:
            return self.number("layers") // self.number("pp") // int(per_chunk[1])
        return self.number("vpp", 1)

    @cached_property
    def shape(self) -> ModelShape:
        """Raises RowError: the row does not say enough, or the model is of a kind that has no shape here."""
        name = self.fields["id"] + self.fields["model"]
        if _NOT_PLAIN.search(name) or "mla" in name or self.fields["kv_heads"] == "MLA":
            raise RowError("a model that is no plain decoder")
        gpt = not re.search(r"Llama|Qwen|_8b_", name)
        experts = _EXPERTS.fullmatch(self.fields["ffn"])
        hidden = self.number("hidden")
        if not self.fields["ffn"] and (not gpt or "MoE" in name):
            raise RowError("no ffn")
        heads = self.number("heads")
        vocab = self.number("vocab", GPT2_VOCAB)
        shape = ModelShape(
            num_layers=self.number("layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=self.number("kv_heads", heads),
            head_size=128 if "Qwen3" in name else None,
            ffn_hidden_size=int(experts["width"])
            if experts
            else self.number("ffn", _default_width(hidden, name)),
            padded_vocab_size=padded_vocab_size(vocab, 128, (self.number("tp", 1),)),
            tied_embeddings=gpt and "unti" not in name and "7b_" not in name,
            gated_mlp=not gpt or "swiglu" in name,
            linear_bias=gpt and "disable_bias" not in name,
            norm_bias=gpt,
            learned_positions=self.number("seq") if gpt and "rope" not in name else 0,
        )
        if experts is None:
            return shape
        width, top = int(experts["width"]), int(experts["top"])
        return replace(
            shape,
            num_experts=int(experts["experts"]),
            experts_per_token=top,
            expert_ffn_hidden_size=width,
            shared_expert_ffn_hidden_size=width if experts["shared"] else 0,
        )

    @cached_property
    def model(self) -> ModelSpec:
        """As the run was set up; raises RowError for 8-bit formats."""
        if self.fields["precision"] not in SIXTEEN_BIT:
            raise RowError("an 8-bit format, which has no price")
        name = self.fields["id"]
        old = self.is_vtrain or name.startswith("kor_")  # before fused attention
        golden = name.startswith("mlm_gold")
        return ModelSpec(
            shape=self.shape,
            param_dtype="float16" if self.fields["precision"] == "fp16" else "bfloat16",
            # Megatron-DeepSpeed reduces gradients of fp16 runs as they are.
            grad_dtype="bfloat16" if self.is_vtrain else "float32",
            distributed_optimizer="dist_optimizer=True" in self.fields["notes"] or not (old or golden),
            fused_attention=not old and "attention_backend=unfused" not in self.fields["notes"],
            overlap_grad_reduce=not old and (not golden or "overlap" in name or "memory_speed" in name),
        )

    @property
    def microbatches(self) -> int:
        samples = self.layout.dp * self.number("mbs")
        count, remainder = divmod(self.number("gbs"), samples)
        if remainder or not count:
            raise RowError("a global batch that is no multiple of the micro-batch (the world is another one)")
        return count

    @property
    def device(self) -> Device:
        """With vTrain's network, where the row is from there."""
        known = _DEVICES.get(self.fields["gpu"])
        if known is None:
            raise RowError(f"no constants of {self.fields['gpu']}")
        device = load_device(known)
        if not self.is_vtrain:
            return device
        efficiency = device.number("inter_node_bytes_per_s") / 25e9  # of the 200 Gb/s that the file assumes
        speed = VTRAIN_NODE_BYTES_PER_S / PER_NODE * efficiency
        return replace(device, constants={**device.constants, "inter_node_bytes_per_s": speed})

    @property
    def cluster(self) -> Cluster:
        devices = self.number("n_gpus")
        nodes = max(1, devices // PER_NODE)
        spec = ClusterSpec(num_nodes=nodes, devices_per_node=devices // nodes, device=self.device.name)
        return Cluster(spec=spec, device=self.device)

    @property
    def workload(self) -> Workload:
        """Sequences of one length: a token of prompt, the rest is what the loss is over."""
        length = self.number("seq")
        return Workload(
            batch_size=self.number("gbs"),
            prompt=LengthDistribution.constant(1),
            response=LengthDistribution.constant(length - 1),
        )

    @property
    def placement(self) -> Placement:
        layout = self.layout
        if self.shape.num_layers % (layout.pp * layout.vpp):
            raise RowError("stages of layers that the row does not say")
        return Placement(
            ranks=(0, layout.size),
            layout=LayoutSpec(**{name: getattr(layout, name) for name in LayoutSpec.model_fields}),
            num_microbatches=self.microbatches,
            recompute=self.fields["recompute"] or "none",
        )

    @property
    def iteration_s(self) -> float:
        """Measured, or from the tokens per second that were."""
        if self.fields["metric"] == "iteration_time":
            return self.value
        if self.fields["metric"] == "tokens_per_s_per_gpu":
            return self.number("gbs") * self.number("seq") / (self.value * self.number("n_gpus"))
        raise RowError(f"the metric {self.fields['metric']}")


def _default_width(hidden: int, name: str) -> int:
    """Megatron's, where no width is given (`megatron.training.arguments`)."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in name else 4 * hidden


def read_rows(kind: str) -> list[Row]:
    """All rows of a kind."""
    with DATA.open(newline="") as file:
        return [Row(fields) for fields in csv.DictReader(file) if fields["kind"] == kind]
