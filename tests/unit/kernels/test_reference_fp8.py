"""Rounding to float8_e4m3fn against the definition of the format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference.fp8 import FP8_MAX, from_fp8, to_fp8

ONE = torch.ones(())


def format_numbers() -> Tensor:
    """The numbers of codes 0x00 to 0x7e, float64: four bits of exponent with bias 7, three of mantissa, subnormals."""
    codes = torch.arange(0x7F)
    exponent, mantissa = (codes >> 3).double(), (codes & 7).double()
    return torch.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def stored(*values: float, scale: float = 1.0) -> list[float]:
    return from_fp8(to_fp8(torch.tensor(values), torch.tensor(scale)), ONE, torch.float32).tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_every_number_of_the_format_is_kept_and_has_its_code(sign: int) -> None:
    numbers = format_numbers().float() * sign
    codes = torch.arange(0x7F) + (0 if sign > 0 else 0x80)
    assert to_fp8(numbers, ONE).tolist() == codes.tolist()
    assert torch.equal(from_fp8(codes.to(torch.uint8), ONE, torch.float32), numbers)


def test_numbers_are_rounded_to_nearest_even() -> None:
    numbers = format_numbers()
    middle = (numbers[1:] + numbers[:-1]) / 2
    codes = torch.arange(0x7E)
    assert to_fp8(middle.float(), ONE).tolist() == (codes + codes % 2).tolist()
    nearly = middle * (1 - 2.0**-20)
    assert to_fp8(nearly.float(), ONE).tolist() == codes.tolist()
    assert to_fp8((middle * (1 + 2.0**-20)).float(), ONE).tolist() == (codes + 1).tolist()


def test_large_numbers_are_saturated_and_nan_stays_nan() -> None:
    assert stored(449.0, 1e9, float("inf"), -1e9) == [FP8_MAX, FP8_MAX, FP8_MAX, -FP8_MAX]
    assert to_fp8(torch.tensor([float("nan")]), ONE).item() & 0x7F == 0x7F


def test_the_smallest_step_is_two_to_the_minus_nine() -> None:
    assert stored(2.0**-9, 1.5 * 2.0**-9, 2.0**-10, 2.0**-10 * 1.01, 0.0) == [2.0**-9, 2.0**-8, 0.0, 2.0**-9, 0.0]


@pytest.mark.parametrize("scale", [1.0, 0.02, 3.7])
def test_an_error_is_a_sixteenth_of_the_number_or_half_a_smallest_step(scale: float) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 1.5, 20_000) * scale
    scales = torch.tensor(scale)
    back = from_fp8(to_fp8(values, scales), scales, torch.float32)
    off = (back - values).abs()
    # Slightly more, since the division and the product are rounded, too.
    assert (off <= torch.maximum(values.abs() / 16, scales * 2.0**-10) * (1 + 1e-5)).all()
    assert off.max() > 0


def test_numbers_with_scale_one_are_exact_in_bfloat16_and_float16() -> None:
    codes = torch.arange(0x7F).to(torch.uint8)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(from_fp8(codes, ONE, dtype).double(), format_numbers())
