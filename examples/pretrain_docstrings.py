"""Pretrain a byte-level GPT with Megatron's own trainer; the demo's first step.

    torchrun --nproc-per-node 4 -m megatron_real examples/pretrain_docstrings.py --real-plan
    examples/plans/pretrain.json \
        --train-tokens runs/demo/data/train.npy <usual Megatron arguments>

A launch script as people have them: it knows nothing of megatron_real. The parallel layout comes from the plan.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial

import numpy
import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class TokenWindows(torch.utils.data.Dataset):
    """Windows of ``seq_length + 1`` tokens, at places that depend on the seed and the index alone."""

    def __init__(self, path: str, seq_length: int, samples: int, seed: int) -> None:
        self.tokens = torch.from_numpy(numpy.load(path).astype(numpy.int64))
        self.seq_length = seq_length
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(
            self.tokens.numel() - seq_length - 1, (max(samples, 1),), generator=generator
        )

    def __len__(self) -> int:
        return self.starts.numel()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self.starts[index])
        window = self.tokens[start : start + self.seq_length + 1]
        return {"tokens": window[:-1], "labels": window[1:]}


def datasets_provider(
    num_samples: tuple[int, int, int], vp_stage: int | None = None
) -> tuple[TokenWindows, ...]:
    """Train, validation and test windows; the same for every model chunk."""
    args = get_args()
    return tuple(
        TokenWindows(args.train_tokens, args.seq_length, samples, args.seed + index)
        for index, samples in enumerate(num_samples)
    )


def loss_function(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum of token losses, number of tokens, and what Megatron logs."""
    total = (output.float().view(-1) * loss_mask.view(-1)).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return total, num_tokens, {"lm loss": torch.cat([total.detach().view(1), num_tokens.float().view(1)])}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., object]]:
    """One micro-batch; Megatron's schedules call it."""
    args = get_args()
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    batch = next(data_iterator) if data_iterator is not None else None  # only tp rank 0 has a loader
    tokens, labels = broadcast_over_tp(batch, args, device)
    positions = torch.arange(args.seq_length, device=device).expand(args.micro_batch_size, -1)
    mask = torch.ones(1, 1, args.seq_length, args.seq_length, device=device, dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=labels)
    return output, partial(loss_function, torch.ones_like(labels, dtype=torch.float32))


def broadcast_over_tp(
    batch: dict[str, torch.Tensor] | None, args: Namespace, device: int | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the first tp rank reads data; the others receive it."""
    shape = (2, args.micro_batch_size, args.seq_length)
    both = torch.empty(shape, dtype=torch.int64, device=device)
    if batch is not None:
        both.copy_(torch.stack([batch["tokens"], batch["labels"]]))
    torch.distributed.broadcast(
        both, mpu.get_tensor_model_parallel_src_rank(), group=mpu.get_tensor_model_parallel_group()
    )
    return both[0], both[1]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """This script's own argument."""
    parser.add_argument_group("docstrings").add_argument("--train-tokens", required=True)
    return parser


if __name__ == "__main__":
    arguments = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
