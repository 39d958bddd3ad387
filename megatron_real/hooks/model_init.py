"""Initial values that depend on (seed, key, global coordinates) only, and so are the same under every layout.

Each element's position in the global tensor is hashed together with the seed and the tensor's key; the hash is
turned into a normal number by linear interpolation in a table of quantiles. Only exact IEEE operations take part (no
logarithm, no cosine), so that the bits depend neither on how a tensor is cut nor on the device. Standard deviations
are Megatron's.

Invariants (tests/hooks/test_model_builder.py):
    - a model gathered from any layout equals the one built on one rank, bit for bit;
    - the values of a row do not depend on the number of rows: another padded vocabulary keeps the real tokens' rows.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_real.errors import MegatronCompatError
from megatron_real.realloc_ops.storage.local_shards import ShardedTensorLike

__all__ = ["fill", "hash_elements", "initialize", "normal_from_hash"]

_BLOCK_ELEMENTS = 2**16
"""At a time: what is in between stays in a core's cache."""
_TABLE_BITS = 14
_FRACTION_BITS = 36


def _signed(value: int) -> int:
    """The int64 with the bits of the unsigned `value`."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def hash_elements(seed: int, key: str, index: torch.Tensor) -> torch.Tensor:
    """splitmix64 of each element's row-major position in the global tensor `key`; int64 in and out, any shape."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
    state = (index + 1).mul_(_GOLDEN).add_(int.from_bytes(digest, "little", signed=True))
    state.bitwise_xor_(_shift(state, 30)).mul_(_MIX[0])
    state.bitwise_xor_(_shift(state, 27)).mul_(_MIX[1])
    return state.bitwise_xor_(_shift(state, 31))


@functools.cache
def _quantiles(device: torch.device) -> torch.Tensor:
    """The normal distribution's quantiles at ``i / 2**_TABLE_BITS``; the ends are inside the first and last step."""
    steps = 2**_TABLE_BITS
    normal = NormalDist()
    edge = 1 / (8 * steps)
    quantiles = [normal.inv_cdf(min(max(i / steps, edge), 1 - edge)) for i in range(steps + 1)]
    return torch.tensor(quantiles, dtype=torch.float64, device=device)


def normal_from_hash(bits: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers in float64 (up to 4.3 deviations) from int64 hashes."""
    table = _quantiles(bits.device)
    step = _shift(bits, 64 - _TABLE_BITS)
    fraction = _shift(bits, 64 - _TABLE_BITS - _FRACTION_BITS).bitwise_and_((1 << _FRACTION_BITS) - 1)
    low = table.take(step)
    high = table.take(step.add_(1))
    return high.sub_(low).mul_(fraction.double().mul_(2.0**-_FRACTION_BITS)).add_(low)


def fill(shard: ShardedTensorLike, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set every element of a shard to `value` of its row-major position in the global tensor.

    Args:
        shard: its `data` is overwritten.
        value: from int64 positions to values of the same shape; called on blocks of about `_BLOCK_ELEMENTS`.
    """
    assert shard.data is not None
    data = shard.data.detach()
    strides = [math.prod(shard.global_shape[axis + 1 :]) for axis in range(len(shard.global_shape))]
    first = sum(offset * stride for offset, stride in zip(shard.global_offset, strides, strict=True))
    local_strides = strides[shard.prepend_axis_num :]
    if data.dim() == 0:
        data.copy_(value(torch.tensor(first, device=data.device)))
        return
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(data.shape[1:])))
    for start in range(0, data.shape[0], rows):
        block = data[start : start + rows]
        data[start : start + rows].copy_(
            value(_positions(first + start * local_strides[0], block, local_strides))
        )


def _positions(first: int, block: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    index = torch.tensor(first, dtype=torch.int64, device=block.device)
    for extent, stride in zip(block.shape, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(extent, device=block.device) * stride
    return index


def initialize(
    shards: Iterable[ShardedTensorLike],
    config: TransformerConfig,
    seed: int,
    only: Callable[[str], bool] | None = None,
) -> None:
    """Give parameters their initial values.

    Args:
        shards: from `model_builder.sharded_tensors`.
        seed: of the role.
        only: keys to touch, for example a fresh head beside loaded weights; None is all.

    Raises:
        MegatronCompatError: a tensor of which it is not known how Megatron initialises it.
    """
    with torch.no_grad():
        for shard in shards:
            if only is None or only(shard.key):
                _initialize_one(shard, config, seed)


def _initialize_one(shard: ShardedTensorLike, config: TransformerConfig, seed: int) -> None:
    assert shard.data is not None
    key = shard.key
    constant = _constant(key, config)
    if constant is not None:
        shard.data.fill_(constant)
    elif shard.data.dim() >= 2:
        deviation = _deviation(key, config)
        fill(shard, lambda index: normal_from_hash(hash_elements(seed, key, index)) * deviation)
    else:
        raise MegatronCompatError(
            f"{key}: found a tensor of shape {list(shard.data.shape)}; expected a matrix, a norm or a bias. New models "
            "with such layers are not supported: load a checkpoint."
        )


def _constant(key: str, config: TransformerConfig) -> float | None:
    if key.endswith("bias"):
        return 0.0
    if any("norm" in part for part in key.split(".")[-2:]):
        return 0.0 if config.layernorm_zero_centered_gamma else 1.0
    return None


def _deviation(key: str, config: TransformerConfig) -> float:
    """Megatron's standard deviation: smaller where a branch ends in the residual stream, by depth."""
    if key.startswith("embedding."):
        return float(config.embedding_init_method_std or config.init_method_std)
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        branches = 1.0 if config.is_hybrid_model else 2.0  # of a layer, that end in the residual stream
        return float(config.init_method_std / math.sqrt(branches * config.num_layers))
    return float(config.init_method_std)
