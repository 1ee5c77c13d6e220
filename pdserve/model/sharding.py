"""Tensor parallelism: the shard of each tensor that a rank holds, and the config of its computation. No torch.

Attention and MLP each start with products split by rows and end with one split by columns, so that there are two
all-reduces per layer:

q, k, v            rows of the rank's heads           | output  columns of the same heads: partial sums
gate, up           rows of the rank's inner features  | down    columns of the same features: partial sums
lm_head            rows of the rank's vocabulary shard; the first ranks have one more if it does not divide evenly
norms, embedding   replicated; biases of output and down only on rank 0, because they must be added once

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from kernels.split import even_slice
from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.tensors import Shape, tensor_shapes

#: Slices of a tensor, one per dimension, with explicit ends.
Shard = tuple[slice, ...]

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The config of each of `size` ranks: its share of heads and inner features, and the model's hidden size.

    Raises `SetupError` that lists valid sizes when heads, KV heads or inner features do not divide evenly. More ranks
    than KV heads are not supported, because KV heads are not replicated.
    """
    assert size >= 1
    split = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    uneven = [f"{name} {number}" for name, number in split.items() if number % size]
    if uneven:
        common = gcd(*split.values())
        sizes = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise SetupError(
            f"{size} ranks cannot split a model with {' and '.join(uneven)}: each rank needs an equal share of heads, "
            f"KV heads and intermediate size, and KV heads are not replicated. Sizes that work: {sizes}."
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def tensor_shards(config: ModelConfig, rank: int, size: int) -> dict[str, Shard]:
    """A rank's shards of the tensors of the whole model's config, by name. Tensors of other ranks are absent.

    Raises `SetupError` like `rank_config`.
    """
    rank_config(config, size)
    return {
        name: _shard(name, shape, rank, size)
        for name, shape in tensor_shapes(config).items()
        if rank == 0 or not (_is_split(name, _BY_COLUMNS) and len(shape) == 1)
    }


def _shard(name: str, shape: Shape, rank: int, size: int) -> Shard:
    shard = [slice(0, length) for length in shape]
    if _is_split(name, _BY_ROWS) or name == "lm_head.weight":
        shard[0] = even_slice(shape[0], rank, size)
    elif _is_split(name, _BY_COLUMNS) and len(shape) == 2:
        shard[1] = even_slice(shape[1], rank, size)
    return tuple(shard)


def _is_split(name: str, modules: tuple[str, ...]) -> bool:
    return name.split(".")[-2] in modules
