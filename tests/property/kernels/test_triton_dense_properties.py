"""The dense Triton kernels on matrices of any shape, dtype and stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from kernels.reference import ReferenceOps
from kernels.triton.activation import silu_mul
from kernels.triton.gemm import linear
from kernels.triton.norm import add_rms_norm

#: By dtype, how far apart neighbours are; the interpreter cuts bfloat16 off where hardware rounds.
STEP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = st.sampled_from(tuple(STEP))
few = settings(max_examples=12, deadline=None)


def random(rows: int, width: int, beside: int, dtype: torch.dtype) -> Tensor:
    """[rows, width]; `beside` columns of NaN on either side belong to nobody."""
    values = torch.full((rows, width + 2 * beside), torch.nan)
    middle = values[:, beside : beside + width]
    middle.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * 7 + width)))
    return values.to(dtype).to(DEVICE)[:, beside : beside + width]


@few
@given(st.integers(1, 140), st.integers(1, 140), st.integers(1, 150), st.integers(0, 2), DTYPES)
def test_linear_is_the_product_and_rows_keep_their_bits(
    num_rows: int, out_features: int, depth: int, beside: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, depth, beside, dtype), random(out_features, depth, beside, dtype)
    out = linear(x, weight)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    bound = sizes * (depth + 2) * 2**-23 + exact.abs() * STEP[dtype]
    assert bool(((out.double() - exact).abs() <= bound).all())
    assert torch.equal(linear(x[-1:], weight), out[-1:])


@few
@given(st.integers(1, 5), st.integers(1, 700), st.integers(0, 2), DTYPES)
def test_row_wise_ops_are_the_references(num_rows: int, width: int, beside: int, dtype: torch.dtype) -> None:
    x, other = random(num_rows, width, beside, dtype), random(num_rows, width + 1, beside, dtype)[:, 1:]
    weight = random(1, width, 0, dtype)[0]
    expected = (*ReferenceOps().add_rms_norm(x, other, weight, 1e-5), ReferenceOps().silu_mul(x, other))
    for ours, wanted in zip((*add_rms_norm(x, other, weight, 1e-5), silu_mul(x, other)), expected, strict=True):
        # Sums of numbers that nearly cancel are off by steps of what was summed.
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=16 * STEP[dtype], atol=16 * STEP[dtype])
