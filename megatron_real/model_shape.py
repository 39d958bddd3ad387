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
    """Dimensions of one role's model."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    padded_vocab_size: int
    tied_embeddings: bool = False
    scalar_head: bool = False
    """A critic or reward model: one output per token instead of the vocabulary."""

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
