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

#: Relative distance of adjacent numbers; the interpreter truncates bfloat16, hardware rounds it.
STEP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = st.sampled_from(tuple(STEP))
few = settings(max_examples=12, deadline=None)


def random(rows: int, width: int, margin: int, dtype: torch.dtype) -> Tensor:
    """[rows, width]; with `margin` columns of NaN on both sides, which must not be read."""
    values = torch.full((rows, width + 2 * margin), torch.nan)
    middle = values[:, margin : margin + width]
    middle.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * 7 + width)))
    return values.to(dtype).to(DEVICE)[:, margin : margin + width]


@few
@given(st.integers(1, 140), st.integers(1, 140), st.integers(1, 150), st.integers(0, 2), DTYPES)
def test_linear_is_the_product_and_rows_keep_their_bits(
    num_rows: int, out_features: int, depth: int, margin: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, depth, margin, dtype), random(out_features, depth, margin, dtype)
    out = linear(x, weight)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    bound = sizes * (depth + 2) * 2**-23 + exact.abs() * STEP[dtype]
    assert bool(((out.double() - exact).abs() <= bound).all())
    assert torch.equal(linear(x[-1:], weight), out[-1:])


@few
@given(st.integers(1, 5), st.integers(1, 700), st.integers(0, 2), DTYPES)
def test_row_wise_ops_match_the_reference(num_rows: int, width: int, margin: int, dtype: torch.dtype) -> None:
    x, other = random(num_rows, width, margin, dtype), random(num_rows, width + 1, margin, dtype)[:, 1:]
    weight = random(1, width, 0, dtype)[0]
    expected = (*ReferenceOps().add_rms_norm(x, other, weight, 1e-5), ReferenceOps().silu_mul(x, other))
    for ours, wanted in zip((*add_rms_norm(x, other, weight, 1e-5), silu_mul(x, other)), expected, strict=True):
        # Sums of numbers that nearly cancel are off by steps of what was summed.
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=16 * STEP[dtype], atol=16 * STEP[dtype])
