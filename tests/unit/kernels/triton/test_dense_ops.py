"""Norms, gated activations, gathers and all ops of `TritonOps` against the reference ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from kernels.ops import Ops
from kernels.reference import ReferenceOps
from kernels.triton.activation import gelu_mul, gelu_mul_merged, silu_mul, silu_mul_merged
from kernels.triton.gather import gather_rows
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.ops import TritonOps
from tests.unit.kernels.combinations import combinations

reference = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: One element, a power of two, and widths that are no power of two.
SHAPES = ((1, 1), (3, 64), (5, 100), (2, 1500))
#: One unit in the last place: the interpreter truncates bfloat16, hardware rounds it.
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_close(ours: Tensor, expected: Tensor, steps: int) -> None:
    """Same shape and dtype, and values within `steps` units in the last place."""
    assert ours.dtype == expected.dtype
    step = STEP[ours.dtype]
    torch.testing.assert_close(ours.double(), expected.double(), rtol=steps * step, atol=1e-6)


@pytest.mark.parametrize(("shape", "dtype"), combinations(SHAPES, DTYPES), ids=str)
def test_rms_norm_matches_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype, scale=3), random(shape[1], dtype=dtype)
    ours = rms_norm(x, weight, 1e-5)
    assert_close(ours, reference.rms_norm(x, weight, 1e-5), steps=3)
    assert ours.is_contiguous()


@in_every_dtype
def test_rms_norm_accepts_heads_of_a_view(dtype: torch.dtype) -> None:
    merged, weight = random(4, 7 * 25, dtype=dtype), random(24, dtype=dtype)
    heads = merged.view(4, 7, 25)[:, 2:5, 1:]
    ours = rms_norm(heads, weight, 1e-6)
    assert_close(ours, reference.rms_norm(heads, weight, 1e-6), steps=3)
    assert torch.equal(ours[3, 2], rms_norm(heads[3:, 2:], weight, 1e-6)[0, 0])


def test_rms_norm_of_large_float16_rows_does_not_overflow() -> None:
    x = torch.full((2, 8), 3e4, dtype=torch.float16, device=DEVICE)
    assert torch.equal(rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), combinations(SHAPES, DTYPES), ids=str)
def test_add_rms_norm_is_the_sum_and_its_norm(shape: tuple[int, int], in_place: bool, dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype)
    residual = random(shape[0], shape[1] + 1, dtype=dtype, scale=3)[:, 1:]
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5, in_place=in_place)
    assert_close(total, x + before, steps=1)
    # The norm is that of the rounded sum, which is the residual stream.
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))
    assert torch.equal(residual, total if in_place else before)
    assert (total.data_ptr() == residual.data_ptr()) == in_place


@pytest.mark.parametrize(("shape", "dtype"), combinations(SHAPES, DTYPES), ids=str)
def test_silu_mul_matches_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up = random(*shape, dtype=dtype, scale=4), random(shape[0], shape[1] + 3, dtype=dtype)[:, 3:]
    ours = silu_mul(gate, up)
    assert_close(ours, reference.silu_mul(gate, up), steps=2)
    assert torch.equal(silu_mul_merged(torch.cat((gate, up), dim=1)), ours)


@pytest.mark.parametrize(("shape", "dtype"), combinations(SHAPES, DTYPES), ids=str)
def test_gelu_mul_is_the_tanh_approximation(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up = random(*shape, dtype=dtype, scale=2), random(shape[0], shape[1] + 3, dtype=dtype)[:, 3:]
    ours = gelu_mul(gate, up)
    # In float64: torch's float32 loses the small values of negative arguments to cancellation.
    expected = functional.gelu(gate.double(), approximate="tanh").to(dtype) * up
    assert_close(ours, expected, steps=3)
    assert torch.equal(gelu_mul_merged(torch.cat((gate, up), dim=1)), ours)


@pytest.mark.parametrize("gated", [silu_mul, gelu_mul])
def test_activations_of_large_arguments_are_finite(gated: Callable[[Tensor, Tensor], Tensor]) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]], device=DEVICE)
    expected = torch.tensor([[0.0, 0.0, 0.0, 90.0, 200.0, 1e4]], device=DEVICE)
    torch.testing.assert_close(gated(gate, torch.ones_like(gate)), expected)


def test_values_are_rounded_where_the_reference_rounds_them() -> None:
    """In float16, which the interpreter rounds as hardware does. Rounding elsewhere would change a third of them."""
    x, other, weight = (random(*shape, dtype=torch.float16) for shape in [(8, 100), (8, 101), (100,)])
    other = other[:, 1:]
    pairs = (
        (rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (add_rms_norm(x, other, weight, 1e-5)[0], reference.add_rms_norm(x, other, weight, 1e-5)[0]),
        (silu_mul(x, other), reference.silu_mul(x, other)),
        (gelu_mul(x, other), functional.gelu(x.float(), approximate="tanh").half() * other),
    )
    for ours, expected in pairs:
        assert float((ours != expected).float().mean()) < 0.02


@pytest.mark.parametrize(("width", "dtype"), combinations([1, 96, 1100], DTYPES), ids=str)
def test_gathered_rows_equal_the_tables(width: int, dtype: torch.dtype) -> None:
    table = random(11, width + 2, dtype=dtype)[:, 1:-1]
    index = torch.tensor([10, 0, 3, 3, 10, 7], device=DEVICE)
    assert torch.equal(gather_rows(table, index), table[index])


def test_empty_inputs_give_empty_results() -> None:
    x, weight = torch.empty(0, 24, device=DEVICE), torch.ones(24, device=DEVICE)
    index = torch.empty(0, dtype=torch.int64, device=DEVICE)
    normed, total = add_rms_norm(x, x, weight, 1e-5)
    results = (rms_norm(x, weight, 1e-5), normed, total, silu_mul(x, x), gelu_mul(x, x), gather_rows(x, index))
    assert all(result.shape == (0, 24) for result in results)
    assert rms_norm(x.view(0, 3, 8), weight[:8], 1e-5).shape == (0, 3, 8)


@pytest.mark.parametrize("deterministic", [False, True])
def test_ops_match_the_reference_ops(deterministic: bool) -> None:
    x, other, weight, matrix, bias = (
        random(*shape, dtype=torch.float32) for shape in [(3, 40), (3, 40), (40,), (70, 40), (70,)]
    )
    index = torch.tensor([2, 2, 0], device=DEVICE)
    inputs = (x, other, weight, matrix, bias, index)
    before = [tensor.clone() for tensor in inputs]

    def computed(ops: Ops) -> list[Tensor]:
        return [
            ops.embedding(index, matrix),
            ops.linear(x, matrix, bias),
            ops.linear(x, matrix),
            ops.rms_norm(x, weight, 1e-5),
            *ops.add_rms_norm(x, other, weight, 1e-5),
            ops.silu_mul(x, other),
        ]

    for ours, expected in zip(computed(TritonOps(deterministic=deterministic)), computed(reference), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_can_be_float32(deterministic: bool) -> None:
    x, matrix = random(2, 16, dtype=torch.bfloat16), random(33, 16, dtype=torch.bfloat16)
    logits = TritonOps(deterministic=deterministic).linear(x, matrix, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ matrix.float().T, rtol=2**-7, atol=2**-6)
