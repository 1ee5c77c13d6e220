"""The batch-invariant linear layer: errors against float64 within rounding, and rows whose bits do not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.devices import DEVICE, gpu_only

pytest.importorskip("triton")

from kernels.triton.activation import silu_mul_merged
from kernels.triton.gemm import TALL_TILES, GemmTile, choose_tile, choose_tile_for_rows, gated_linear, linear
from pdserve.worker.serve.warm_up import warm_up_lengths
from tests.unit.kernels.combinations import combinations

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: Error of rounding to the dtype by truncation, as the interpreter does.
STEP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_is_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding errors of float32 sums of these terms, and of the result."""
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    bound = sizes * (x.shape[1] + 2) * 2**-23 + exact.abs() * STEP[out.dtype]
    assert out.shape == exact.shape
    gaps = (out.double() - exact).abs()
    assert bool((gaps <= bound).all()), f"off by up to {float((gaps / bound).max()):.3g} times the bound"


#: (num_rows, out_features, depth, has_bias)
SIZES = (
    (1, 1, 1, True),
    (1, 97, 64, False),
    (3, 33, 130, True),
    (64, 64, 128, False),
    (70, 130, 17, False),
    (130, 70, 33, True),
    (2, 2100, 20, True),
)


@pytest.mark.parametrize(("size", "dtype"), combinations(SIZES, DTYPES), ids=str)
def test_linear_is_the_product(size: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    num_rows, out_features, depth, has_bias = size
    x, weight = random(num_rows, depth, dtype=dtype), random(out_features, depth, dtype=dtype)
    bias = random(out_features, dtype=dtype) if has_bias else None
    assert_is_product(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_results_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = random(3, 50, dtype=dtype), random(40, 50, dtype=dtype)
    out = linear(x, weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_is_product(out, x, weight)


@pytest.mark.parametrize(
    ("size", "dtype"), combinations([(1, 1, 1, True), (3, 33, 130, True), (130, 70, 64, False)], DTYPES), ids=str
)
def test_a_gated_product_is_that_of_two_launches(size: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    num_rows, width, depth, has_bias = size
    x, weight = random(num_rows, depth, dtype=dtype), random(2 * width, depth, dtype=dtype)
    bias = random(2 * width, dtype=dtype) if has_bias else None
    for tile in (None, *TALL_TILES):
        expected = silu_mul_merged(linear(x, weight, bias, tile=tile))
        assert torch.equal(gated_linear(x, weight, bias, tile=tile), expected)


@in_every_dtype
def test_linear_accepts_views_and_reads_nothing_outside_of_them(dtype: torch.dtype) -> None:
    wide_x, wide_weight = (random(rows, 60, dtype=dtype) for rows in (5, 45))
    for wide in (wide_x, wide_weight):
        wide[:, :7] = torch.nan
        wide[:, 40:] = torch.nan
        wide[0] = wide[-1] = torch.nan
    x, weight = wide_x[1:-1, 7:40], wide_weight[1:-1, 7:40]
    assert_is_product(linear(x, weight), x, weight)


def test_the_program_order_covers_every_tile_once() -> None:
    x, weight = random(200, 16, dtype=torch.float32), random(70, 16, dtype=torch.float32)
    whole = linear(x, weight)
    for group_m in (1, 3):
        tile = replace(choose_tile(70, x.dtype), group_m=group_m)
        assert torch.equal(linear(x, weight, tile=tile), whole)


def test_no_rows_give_an_empty_result() -> None:
    assert linear(torch.empty(0, 8, device=DEVICE), torch.ones(5, 8, device=DEVICE)).shape == (0, 5)


@pytest.mark.parametrize(("depth", "dtype"), combinations([64, 200], DTYPES), ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(depth: int, dtype: torch.dtype) -> None:
    x, weight = random(130, depth, dtype=dtype), random(40, depth, dtype=dtype)
    batch = linear(x, weight)
    for row in (0, 63, 64, 129):
        # Also among large values: no other row may influence it.
        assert torch.equal(linear(x[row : row + 1], weight)[0], batch[row])
    others = torch.cat((x[:9] * 100, x[9:10], x[10:70] * 100))
    assert torch.equal(linear(others, weight)[9], batch[9])


@pytest.mark.parametrize("tile", TALL_TILES, ids=str)
def test_a_row_has_the_same_bits_in_a_tall_tile(tile: GemmTile) -> None:
    x, weight = random(130, 200, dtype=torch.bfloat16), random(300, 200, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight, tile=tile), linear(x, weight))


@pytest.mark.parametrize(
    ("num_rows", "out_features", "tile"),
    [
        (8192, 6144, TALL_TILES[0]),
        (512, 28672, TALL_TILES[0]),
        (512, 4096, TALL_TILES[1]),  # 64 programs of the largest tile would leave half of the GPU without work.
        (65, 28672, TALL_TILES[1]),
        (256, 4096, choose_tile(4096, torch.bfloat16)),
        (64, 128256, choose_tile(128256, torch.bfloat16)),  # Another row tile would be padding.
    ],
)
def test_tiles_are_as_tall_as_the_gpu_has_work(num_rows: int, out_features: int, tile: GemmTile) -> None:
    assert choose_tile_for_rows(num_rows, out_features, torch.bfloat16) == tile
    assert choose_tile_for_rows(num_rows, out_features, torch.float32) == choose_tile(out_features, torch.float32)


@pytest.mark.parametrize("out_features", [128, 1000, 4096, 6144, 14336, 28672, 128256])
def test_the_lengths_of_the_warm_up_take_each_tile(out_features: int) -> None:
    """Else a request would wait while a kernel is compiled."""
    warmed = {choose_tile_for_rows(rows, out_features, torch.bfloat16) for rows in (1, 48, *warm_up_lengths(4096))}
    assert {choose_tile_for_rows(rows, out_features, torch.bfloat16) for rows in range(1, 4097)} == warmed


class TestOnHardware:
    """Matrices as large as those of served models."""

    pytestmark = gpu_only

    @in_every_dtype
    @pytest.mark.parametrize(("out_features", "depth"), [(6144, 4096), (28672, 1024), (896, 4864), (4096, 14336)])
    def test_bits_do_not_depend_on_the_number_of_rows(self, out_features: int, depth: int, dtype: torch.dtype) -> None:
        x, weight = random(2050, depth, dtype=dtype), random(out_features, depth, dtype=dtype)
        batch = linear(x, weight)
        for first, last in ((0, 1), (5, 6), (0, 2), (3, 20), (60, 70), (1000, 1257), (2049, 2050)):
            assert torch.equal(linear(x[first:last].clone(), weight), batch[first:last])

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_bits_do_not_depend_on_the_tile(self, dtype: torch.dtype) -> None:
        """Sums run along the depth in steps of one instruction, whatever the tile.

        `kernels.triton.tile_check` finds out whether this holds before tall tiles are used.
        """
        x, weight = random(300, 4096, dtype=dtype), random(1024, 4096, dtype=dtype)
        usual = linear(x, weight)
        tile = choose_tile(4096, dtype)
        for change in (
            *TALL_TILES,
            replace(tile, block_n=128, num_stages=4),
            replace(tile, block_n=256, num_warps=8, num_stages=3),
            replace(tile, block_m=128, block_n=64),
            replace(tile, block_k=128, num_stages=3),
        ):
            assert torch.equal(linear(x, weight, tile=change), usual), change

    @in_every_dtype
    def test_large_products_are_correct(self, dtype: torch.dtype) -> None:
        for num_rows, out_features, depth in ((1, 4096, 4096), (64, 20000, 1000), (300, 1000, 5000)):
            x, weight = random(num_rows, depth, dtype=dtype), random(out_features, depth, dtype=dtype)
            assert_is_product(linear(x, weight), x, weight)
