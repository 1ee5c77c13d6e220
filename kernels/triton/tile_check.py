"""Whether faster kernels compute the bits of slower ones on this GPU: both are tried on random numbers.

A sum has one order as long as the matrix instruction, its depth and the layout of a row over the threads stay, which is
what the compiler makes of these tiles for Hopper. What a GPU does within one instruction is written nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import chain

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.decoder import DecoderShape
from kernels.ops import KvRows
from kernels.triton.activation import silu_mul_merged
from kernels.triton.attention import paged_attention
from kernels.triton.attention_launch import AttentionSizes, choose_launches
from kernels.triton.gemm import TALL_TILES, choose_tile, gated_linear, linear
from kernels.triton.paged_step import PagedStep

#: Rows and columns of a product, of which the last tile has few. Columns are a multiple of 16, as those of models: the
#: compiler makes another kernel of other numbers.
_NUM_ROWS, _NUM_COLUMNS = 130, 272
#: Rows of a prompt that goes on behind a part which is computed already, and its context: more keys than a split has,
#: so that splits are merged.
_CHUNK, _CONTEXT = 130, 600
_BLOCK_SIZE = 16


@cache
def gated_products_agree(shape: DecoderShape, dtype: torch.dtype, device: torch.device, *, tall_tiles: bool) -> bool:
    """Whether the MLP's first products and its activation have the same bits in one launch as in two.

    `tall_tiles`: also with these. False for float32, whose products are no matrix instructions.
    """
    if dtype == torch.float32:
        return False
    tiles = (choose_tile(2 * shape.intermediate_size, dtype), *(TALL_TILES if tall_tiles else ()))
    x, weight = (_random((rows, shape.hidden_size), dtype, device) for rows in (_NUM_ROWS, 2 * _NUM_COLUMNS))
    try:
        return all(
            silu_mul_merged(linear(x, weight, tile=tile)).equal(gated_linear(x, weight, tile=tile)) for tile in tiles
        )
    except OutOfResources:
        return False


@cache
def tall_tiles_agree(shape: DecoderShape, dtype: torch.dtype, device: torch.device, *, has_fp8_kv: bool) -> bool:
    """Whether products and prefill attention of a decoder have the same bits with tiles of 64 and of 128 rows.

    A few launches, once the kernels are compiled. False for float32, which has no tall tiles, and for GPUs with too
    little shared memory for them.
    """
    if dtype == torch.float32:
        return False
    pairs = chain(_products(shape, dtype, device), _attention(shape, dtype, device, has_fp8_kv=has_fp8_kv))
    try:
        return all(flat.equal(tall) for flat, tall in pairs)
    except OutOfResources:
        return False


def _products(shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    heads = shape.num_heads * shape.head_dim
    matrices = (
        (heads + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden_size),
        (shape.hidden_size, heads),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
        (shape.vocab_size, shape.hidden_size),
    )
    for flat, depth in dict.fromkeys((choose_tile(out_features, dtype), depth) for out_features, depth in matrices):
        x, weight = _random((_NUM_ROWS, depth), dtype, device), _random((_NUM_COLUMNS, depth), dtype, device)
        # Rounding the sums would hide differences.
        product = partial(linear, x, weight, out_dtype=torch.float32)
        expected = product(tile=flat)
        for tall in TALL_TILES:
            yield expected, product(tile=tall)


def _attention(
    shape: DecoderShape, dtype: torch.dtype, device: torch.device, *, has_fp8_kv: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """One KV head and its query heads, for each size of window."""
    group_size, head_dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    num_blocks = -(-_CONTEXT // _BLOCK_SIZE)
    rows = KvRows(
        positions=torch.arange(_CONTEXT - _CHUNK, _CONTEXT, device=device),
        slot_mapping=torch.full((_CHUNK,), -1, device=device),
        query_starts=torch.tensor([0, _CHUNK], device=device),
        context_lens=torch.tensor([_CONTEXT], device=device),
        block_tables=torch.arange(num_blocks, device=device).view(1, num_blocks),
    )
    cache = _random((num_blocks, 1, 2, 1, _BLOCK_SIZE, head_dim), dtype, device)
    step = PagedStep(
        rows=rows,
        kv_cache=cache.to(torch.float8_e4m3fn) if has_fp8_kv else cache,
        cos_sin=torch.empty(0, 2, head_dim, device=device),
        scale=shape.scale,
        kv_scales=torch.full((1, 2, 1), 0.7, device=device) if has_fp8_kv else None,
    )
    q = _random((_CHUNK, group_size, head_dim), dtype, device)
    sizes = AttentionSizes(1, group_size, 1, head_dim, step.capacity_tokens, dtype)
    flat, tall = (choose_launches(sizes, deterministic=True, tall_tiles=is_tall) for is_tall in (False, True))
    for window in sorted(set(shape.windows), key=lambda size: size or 0):
        attend = partial(paged_attention, q, step, 0, window=window)
        yield attend(launches=flat), attend(launches=tall)


def _random(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of many magnitudes, whose sums differ with their order."""
    generator = torch.Generator().manual_seed(sum(size))
    exponents = torch.randint(-6, 3, size, generator=generator)
    return (torch.randn(size, generator=generator) * torch.exp2(exponents)).to(dtype).to(device)
