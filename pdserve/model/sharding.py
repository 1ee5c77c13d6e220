"""Which part of each tensor one of several ranks holds, and the config of what it computes. No torch.

A layer's first product of each half is split by rows, its last by columns, so that ranks meet twice a layer:

q, k, v        rows of the rank's heads        | output  columns of the same heads: parts of sums
gate, up       rows of its inner features      | down    columns of the same: parts of sums
lm_head        rows of its part of the vocabulary, the first ranks with one more where it does not divide
norms, embedding   whole; biases of output and down on rank 0, for they are added once

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from kernels.split import even_slice
from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.tensors import Shape, tensor_shapes

#: Along each dimension, with explicit ends.
Shard = tuple[slice, ...]

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The config of what each of `size` ranks computes: its heads and inner features, the model's hidden size.

    Raises `SetupError` naming the sizes that work, when heads, KV heads or inner features do not divide. A KV head that
    several ranks share, with more ranks than KV heads, is not supported.
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
            f"{size} ranks cannot split a model with {' and '.join(uneven)}: each takes an equal share of both kinds of"
            f" heads and of the intermediate size, and KV heads are not replicated. Sizes that work: {sizes}."
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def tensor_shards(config: ModelConfig, rank: int, size: int) -> dict[str, Shard]:
    """What a rank takes of each tensor of the whole model's config; those it takes nothing of are absent.

    Raises `SetupError` like `rank_config`.
    """
    rank_config(config, size)
    return {
        name: _shard(name, shape, rank, size)
        for name, shape in tensor_shapes(config).items()
        if rank == 0 or not (_is_split(name, _BY_COLUMNS) and len(shape) == 1)
    }


def _shard(name: str, shape: Shape, rank: int, size: int) -> Shard:
    part = [slice(0, length) for length in shape]
    if _is_split(name, _BY_ROWS) or name == "lm_head.weight":
        part[0] = even_slice(shape[0], rank, size)
    elif _is_split(name, _BY_COLUMNS) and len(shape) == 2:
        part[1] = even_slice(shape[1], rank, size)
    return tuple(part)


def _is_split(name: str, modules: tuple[str, ...]) -> bool:
    return name.split(".")[-2] in modules
