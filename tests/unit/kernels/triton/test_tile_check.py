"""Tall tiles are used only where they compute the bits of small ones; a difference anywhere is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from kernels.decoder import DecoderShape
from kernels.triton import attention_launch, tile_check
from kernels.triton.attention_launch import AttentionLaunch, AttentionSizes
from kernels.triton.gemm import TALL_TILES, GemmTile, choose_tile, gated_linear, linear

SHAPE = DecoderShape(
    hidden_size=64,
    intermediate_size=96,
    vocab_size=200,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    windows=(None, 100),
)


def agree(dtype: torch.dtype = torch.bfloat16, *, has_fp8_kv: bool = False) -> bool:
    """As `tall_tiles_agree`, without its cache."""
    return tile_check.tall_tiles_agree.__wrapped__(SHAPE, dtype, DEVICE, has_fp8_kv=has_fp8_kv)


def gated_agree(dtype: torch.dtype = torch.bfloat16, *, tall_tiles: bool) -> bool:
    """As `gated_products_agree`, without its cache."""
    return tile_check.gated_products_agree.__wrapped__(SHAPE, dtype, DEVICE, tall_tiles=tall_tiles)


@pytest.mark.parametrize("has_fp8_kv", [False, True])
def test_tall_tiles_have_the_bits_of_small_ones_here(has_fp8_kv: bool) -> None:
    assert agree(has_fp8_kv=has_fp8_kv)


def test_a_gpu_with_too_little_shared_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Tensor, weight: Tensor, **options: object) -> Tensor:
        raise OutOfResources(147456, 101376, "shared memory")

    monkeypatch.setattr(tile_check, "linear", fails)
    assert not agree()


def test_float32_has_no_tall_tiles() -> None:
    assert not agree(torch.float32)


@pytest.mark.parametrize("differing", TALL_TILES, ids=str)
def test_a_product_with_another_order_of_sums_is_found(monkeypatch: pytest.MonkeyPatch, differing: GemmTile) -> None:
    def reversed_in_one_tile(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, tile: GemmTile) -> Tensor:
        if tile == differing and x.shape[1] == SHAPE.intermediate_size:
            x, weight = x.flip(1), weight.flip(1)
        return linear(x, weight, out_dtype=out_dtype, tile=tile)

    monkeypatch.setattr(tile_check, "linear", reversed_in_one_tile)
    assert not agree()


@pytest.mark.parametrize("tall_tiles", [False, True])
def test_gated_products_have_the_bits_of_two_launches_here(tall_tiles: bool) -> None:
    assert gated_agree(tall_tiles=tall_tiles)
    assert not gated_agree(torch.float32, tall_tiles=tall_tiles)


@pytest.mark.parametrize("differing", [*TALL_TILES, choose_tile(2 * SHAPE.intermediate_size, torch.bfloat16)], ids=str)
def test_a_gated_product_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch, differing: GemmTile) -> None:
    def other_in_one_tile(x: Tensor, weight: Tensor, *, tile: GemmTile) -> Tensor:
        out = gated_linear(x, weight, tile=tile)
        return torch.nextafter(out, out + 1) if tile == differing else out

    monkeypatch.setattr(tile_check, "gated_linear", other_in_one_tile)
    assert not gated_agree(tall_tiles=True)
    assert gated_agree(tall_tiles=False) == (differing in TALL_TILES)


def other_keys(launch: AttentionLaunch, sizes: AttentionSizes) -> AttentionLaunch:
    return replace(launch, block_n=launch.block_n // 2)


def other_splits(launch: AttentionLaunch, sizes: AttentionSizes) -> AttentionLaunch:
    return replace(launch, split_tokens=launch.split_tokens // 2)


@pytest.mark.parametrize("change", [other_keys, other_splits])
def test_attention_with_another_order_of_sums_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[AttentionLaunch, AttentionSizes], AttentionLaunch]
) -> None:
    attention_launch.choose_launches.cache_clear()
    monkeypatch.setattr(attention_launch, "_with_more_rows", change)
    try:
        assert not agree()
    finally:
        attention_launch.choose_launches.cache_clear()
