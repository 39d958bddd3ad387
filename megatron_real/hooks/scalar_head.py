"""The head of critic and reward models: one fp32 value per token instead of the vocabulary.

It stands where a GPTModel has its LM head, on the last pipeline stage, replicated over the tensor-parallel ranks. Under
sequence parallelism each rank computes the values of its slice of the sequence and the values are gathered, which moves
`hidden_size` times fewer bytes than gathering the hidden states.

Invariants (tests/hooks/test_model_builder.py):
    - values and gradients are equal under every layout;
    - the weight's sharded key is `VALUE_HEAD_KEY`, so that it never matches an LM head.

Shape legend: s sequence (of this rank under sequence parallelism), b batch, h hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

__all__ = ["VALUE_HEAD_KEY", "ScalarHead"]

VALUE_HEAD_KEY = "value_head.weight"


class ScalarHead(torch.nn.Module):
    """A linear map from hidden states to one value, with the interface of Megatron's output layer."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = pg_collection.tp
        self.weight = torch.nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Under sequence parallelism each rank has the gradient of its slice; Megatron sums those that are marked so.
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.is_embedding_or_output_parameter = True

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Values of all positions.

        Args:
            input_: hidden states [s, b, h].
            weight: always None; models with this head have no tied embeddings.
            runtime_gather_output: without meaning here: values are never split over the vocabulary.

        Returns:
            Values [s of the whole sequence, b, 1] in fp32, and no bias. Collective over the tensor-parallel group
            under sequence parallelism.
        """
        assert weight is None, "a scalar head does not share the embedding's weight"
        values = torch.nn.functional.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            # What follows is computed alike on every rank, so the gradient is cut, not summed.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight under `prefix`, where GPTModel looks for its output layer, with a key of its own."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        sharded[f"{prefix}weight"].key = VALUE_HEAD_KEY
        return sharded
