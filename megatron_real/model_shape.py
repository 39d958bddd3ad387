"""The dimensions of a transformer that layouts, plans and prices depend on. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_real.errors import PlanError, Problem
from megatron_real.layout import Layout, stage_layers

__all__ = ["ModelShape", "padded_vocab_size"]


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_sizes: tuple[int, ...]) -> int:
    """One padded vocabulary for every layout of a plan: a multiple of ``divisible_by * tp`` for each tp.

    Megatron pads to ``make_vocab_size_divisible_by * tp`` of the current layout, so that two layouts would disagree
    (`megatron.training.tokenizer`); one size for all keeps checkpoints and reallocs equal.
    """
    multiple = 1
    for tp in tp_sizes or (1,):
        step = divisible_by * tp
        multiple = multiple * step // _gcd(multiple, step)
    return -(-vocab_size // multiple) * multiple


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of one role's model. Defaults are those of Megatron's arguments."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    padded_vocab_size: int
    tied_embeddings: bool = False
    scalar_head: bool = False
    """A critic or reward model: one output per token instead of the vocabulary."""
    head_size: int | None = None
    """Channels of an attention head (``kv_channels``); None is ``hidden_size / num_attention_heads``."""
    gated_mlp: bool = False
    """SwiGLU and its like: the MLP's first projection is twice as wide."""
    linear_bias: bool = True
    qkv_bias: bool = False
    norm_bias: bool = True
    """LayerNorm has a bias, RMSNorm has none."""
    qk_norm: bool = False
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 where positions are rotary."""
    num_experts: int = 0
    """Routed experts of a layer; 0 is a dense model."""
    experts_per_token: int = 1
    expert_ffn_hidden_size: int | None = None
    """Width of one expert; None is `ffn_hidden_size`."""
    shared_expert_ffn_hidden_size: int = 0
    num_dense_layers: int = 0
    """Leading layers without experts, in a model with experts."""

    @property
    def head_width(self) -> int:
        return self.head_size if self.head_size is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.head_width * self.num_attention_heads

    @property
    def key_width(self) -> int:
        """Columns of all key heads (and of all value heads)."""
        return self.head_width * self.num_query_groups

    @property
    def expert_width(self) -> int:
        return (
            self.expert_ffn_hidden_size if self.expert_ffn_hidden_size is not None else self.ffn_hidden_size
        )

    @property
    def output_width(self) -> int:
        """Columns of the head."""
        return 1 if self.scalar_head else self.padded_vocab_size

    def has_experts(self, layer: int) -> bool:
        """Whether decoder `layer` (0-based) has routed experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def layout_problems(self, layout: Layout, path: str) -> Iterator[Problem]:
        """What keeps this model from being built in `layout`, each with the path of the degree to change."""
        try:
            stage_layers(self.num_layers, layout)
        except PlanError as error:
            yield Problem(
                path=f"{path}.pp", found=f"pp={layout.pp} vpp={layout.vpp}", expected=str(error).rstrip(".")
            )
        for name, size in (
            ("num_attention_heads", self.num_attention_heads),
            ("ffn_hidden_size", self.ffn_hidden_size),
            ("padded_vocab_size", self.padded_vocab_size),
        ):
            if size % layout.tp:
                divisors = [value for value in range(1, min(size, 64) + 1) if size % value == 0]
                yield Problem(
                    path=f"{path}.tp",
                    found=f"tp={layout.tp}",
                    expected=f"a divisor of {name}={size}: {', '.join(map(str, divisors))}",
                )
        if self.num_query_groups % layout.tp and layout.tp % self.num_query_groups:
            yield Problem(
                path=f"{path}.tp",
                found=f"tp={layout.tp}",
                expected=f"a divisor or a multiple of num_query_groups={self.num_query_groups}",
            )
        yield from self._expert_problems(layout, path)

    def _expert_problems(self, layout: Layout, path: str) -> Iterator[Problem]:
        if self.num_experts == 0:
            if layout.ep > 1:
                yield Problem(
                    path=f"{path}.ep", found=f"ep={layout.ep}", expected="1: the model has no experts"
                )
            return
        etp = layout.etp if layout.etp is not None else layout.tp
        if self.num_experts % layout.ep:
            yield Problem(
                path=f"{path}.ep",
                found=f"ep={layout.ep}",
                expected=f"a divisor of num_experts={self.num_experts}",
            )
        if self.expert_width % etp:
            yield Problem(
                path=f"{path}.etp",
                found=f"etp={etp}",
                expected=f"a divisor of the experts' width {self.expert_width}",
            )
        ranks = layout.dp * layout.tp * layout.cp
        if ranks % (layout.ep * etp):
            yield Problem(
                path=f"{path}.ep",
                found=f"ep*etp = {layout.ep}*{etp}",
                expected=f"a divisor of dp*tp*cp = {ranks}: experts are spread over the ranks of a stage",
            )
