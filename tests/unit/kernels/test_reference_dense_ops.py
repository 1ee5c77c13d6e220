"""The dense reference ops against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference import ReferenceOps

ops = ReferenceOps()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_rms_norm_scales_rows_to_unit_mean_square() -> None:
    x, weight = random(5, 32), random(32)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5)


def test_rms_norm_works_over_the_last_dimension_of_heads() -> None:
    x, weight = random(5, 3, 16), random(16)
    expected = torch.stack([ops.rms_norm(x[:, head], weight, 1e-6) for head in range(3)], dim=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), expected)


def test_rms_norm_of_large_float16_rows_does_not_overflow() -> None:
    x = torch.full((2, 8), 3e4, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_add_rms_norm_returns_the_sum_and_its_norm() -> None:
    x, residual, weight = random(4, 24), random(4, 24) * 3, random(24)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


def test_silu_mul_is_the_gated_activation() -> None:
    gate, up = random(3, 17), random(3, 18)[:, :17]
    expected = gate.double() * gate.double().sigmoid() * up.double()
    torch.testing.assert_close(ops.silu_mul(gate, up).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_dense_op_changes_its_inputs(dtype: torch.dtype) -> None:
    x, other, weight, matrix = (
        random(4, 8, dtype=dtype),
        random(4, 8, dtype=dtype),
        random(8, dtype=dtype),
        random(6, 8, dtype=dtype),
    )
    inputs = (x, other, weight, matrix)
    before = [tensor.clone() for tensor in inputs]
    results = (
        ops.rms_norm(x, weight, 1e-5),
        *ops.add_rms_norm(x, other, weight, 1e-5),
        ops.silu_mul(x, other),
        ops.linear(x, matrix, weight[:6]),
        ops.embedding(torch.tensor([3, 0]), x),
    )
    assert all(result.dtype == dtype for result in results)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


def test_linear_adds_the_bias() -> None:
    x, weight, bias = random(3, 8), random(5, 8), random(5)
    torch.testing.assert_close(ops.linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)


def test_embedding_picks_rows() -> None:
    table = random(7, 4)
    assert torch.equal(ops.embedding(torch.tensor([6, 0, 6]), table), table[[6, 0, 6]])
