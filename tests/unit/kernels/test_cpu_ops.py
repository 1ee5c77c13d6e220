"""Edge cases of the single C++ ops: rounding, half precision, NaN, huge scores, empty inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.ops import AttentionContext, CpuOps, HeadTarget, Rows, format_of, pack, pack_gate_up
from kernels.ops import KvRows
from tests.unit.kernels.cpu_ops import (
    NAN,
    dtype_of,
    in_every_format,
    kv_rows,
    needs_kernels,
    on_every_instruction_set,
    product,
    rows_of,
    values_of,
)

pytestmark = needs_kernels

INF = float("inf")
HALVES = [torch.bfloat16, torch.float16]


def _floats_of_all_kinds() -> Tensor:
    """Random bit patterns, and those around which rounding to 16 bits changes."""
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator).to(torch.int32)
    near = torch.arange(-3, 4, dtype=torch.int32)
    # Halfway between neighbours in bfloat16, float16 and subnormal float16, even and odd ones; the largest of each.
    middles = [0x3F80_8000, 0x3F81_8000, 0x3F80_1000, 0x3F80_3000, 0x3300_0000, 0x33C0_0000, 0x3880_0000]
    largest = [0x7F7F_8000, 0x477F_F000, 0x7F80_0000 - 4, 0x0080_0003]
    chosen = (torch.tensor(middles + largest, dtype=torch.int32)[:, None] + near).flatten()
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, -NAN])
    return torch.cat((random.view(torch.float32), chosen.view(torch.float32), -chosen.view(torch.float32), special))


def _same_rounding(got: Tensor, x: Tensor) -> None:
    """Asserts that `got` is x rounded as torch rounds it; NaN stays NaN. Subnormal float32 may become zero.

    Numbers too large for float16 saturate: an infinite V would affect rows that must not see it.
    """
    if got.dtype == torch.float16:
        x = x.clamp(torch.finfo(got.dtype).min, torch.finfo(got.dtype).max)
    assert torch.equal(got.isnan(), x.isnan())
    kept = ~x.isnan() & ((x == 0) | (x.abs() >= torch.finfo(torch.float32).tiny))
    assert torch.equal(got[kept].view(torch.int16), x[kept].to(got.dtype).view(torch.int16))
    flushed = ~x.isnan() & ~kept
    zero, rounded = got[flushed] == 0, got[flushed] == x[flushed].to(got.dtype)
    assert (zero | rounded).all()


@on_every_instruction_set
def test_bfloat16_rows_are_rounded_to_nearest_even(isa: str) -> None:
    x = _floats_of_all_kinds()
    # Shorter than a vector and a multiple of one: the last lanes are rounded by other code.
    for width in (x.numel(), 16 * (x.numel() // 16), 5):
        rows = rows_of(CpuOps(isa), x[None, -width:].contiguous(), "bf16")
        _same_rounding(rows.units.view(torch.bfloat16)[0, :width], x[-width:])


@on_every_instruction_set
@pytest.mark.parametrize("dtype", HALVES)
def test_cached_heads_are_rounded_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    x = _floats_of_all_kinds()
    x = x[: x.numel() // 90 * 90].view(-1, 1, 90)
    out = torch.empty(len(x), 90, dtype=dtype)
    CpuOps(isa).rotate(x, None, HeadTarget(out=out, offsets=torch.arange(len(x)) * 90, head_stride=90))
    _same_rounding(out.flatten(), x.flatten())


@on_every_instruction_set
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_is_read_exactly(isa: str, dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ops = CpuOps(isa)
    one = rows_of(ops, torch.ones(1, 1), "f32")
    # float16 weights become float32; bfloat16 ones, multiplied in pairs, may take subnormal numbers for zero.
    if dtype == torch.bfloat16:
        one = rows_of(ops, torch.ones(1, 1), "bf16")
    [got] = product(ops, one, pack(halves[:, None]))
    exact = halves.float()
    finite = exact.isfinite() & ((exact == 0) | (exact.abs() >= torch.finfo(torch.float32).tiny))
    assert torch.equal(got[finite], exact[finite])
    assert torch.equal(got.isnan(), exact.isnan())
    assert torch.equal(got[exact.isinf()], exact[exact.isinf()])


@on_every_instruction_set
@in_every_format
def test_no_rows_give_empty_results(isa: str, name: str) -> None:
    ops = CpuOps(isa, 2)
    weight = torch.ones(40, 7, dtype=dtype_of(name))
    rows = rows_of(ops, torch.empty(0, 7), name)
    ops.norm(torch.empty(0, 7), torch.ones(7), 1e-5, rows)
    assert product(ops, rows, pack(weight, int8=name == "int8")).shape == (0, 64)
    target = HeadTarget(out=torch.empty(0), offsets=torch.empty(0, dtype=torch.int64), head_stride=8)
    ops.rotate(torch.empty(0, 2, 8), None, target)
    nothing = torch.empty(0, dtype=torch.int64)
    empty = KvRows(
        positions=nothing,
        slot_mapping=nothing,
        query_starts=torch.zeros(1, dtype=torch.int64),
        context_lens=nothing,
        block_tables=torch.empty(0, 4, dtype=torch.int64),
    )
    context = AttentionContext(rows=empty, kv_cache=torch.zeros(1, 1, 2, 2, 4, 8), scale=1.0)
    ops.attend(0, torch.empty(2, 0, 3, 8), context, torch.empty(0, 48))


@on_every_instruction_set
def test_a_row_of_zeros_is_zero_in_int8(isa: str) -> None:
    ops = CpuOps(isa)
    x = torch.zeros(2, 9)
    x[1, 4] = 1.0
    rows = rows_of(ops, x, "int8")
    assert torch.allclose(values_of(rows, "int8"), x.double(), rtol=1e-6, atol=0)
    weight = torch.zeros(3, 9)
    weight[1] = 1.0
    out = product(ops, rows, pack(weight, int8=True))[:, :3]
    assert torch.allclose(out, torch.tensor([[0.0] * 3, [0.0, 1.0, 0.0]]), rtol=1e-6, atol=0)


@on_every_instruction_set
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_poisons_itself_alone_in_int8(isa: str, poison: float) -> None:
    ops = CpuOps(isa)
    x = torch.ones(3, 40)
    x[1, 37] = poison
    out = product(ops, rows_of(ops, x, "int8"), pack(torch.ones(3, 40), int8=True))[:, :3]
    assert out[1].isnan().all()
    assert torch.allclose(out[[0, 2]], torch.tensor(40.0), rtol=1e-4)


@on_every_instruction_set
def test_silu_is_exact_at_its_limits(isa: str) -> None:
    ops = CpuOps(isa)
    x = torch.tensor(
        [0.0, -0.0, 1e-30, 1.0, -1.0, 20.0, -20.0, 86.9, -86.9, 88.0, -88.0, 1e19, -1e30, -3e38, 3e38, NAN]
    )
    one = torch.ones(1, 1)
    out = product(ops, rows_of(ops, x[:, None].contiguous(), "f32"), pack_gate_up(one, one))[:, 0]
    exact = torch.nn.functional.silu(x.double()) * x.double()
    finite = exact.abs() < 3e38
    # Below -87 it is 0: the exact one is smaller than 2e-36, times x.
    assert torch.allclose(out[finite].double(), exact[finite], rtol=1e-6, atol=2e-34)
    assert (out[exact > 3.5e38] == INF).all()
    assert torch.equal(out.isnan(), exact.isnan())


def _attend(isa: str, scores: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """One row over len(scores) keys, whose scores are those: [head_dim]."""
    dim = values.shape[1]
    rows = kv_rows([(1, len(scores))], block_size=7)
    cache = torch.full((int(rows.block_tables[0, :-1].max()) + 1, 1, 2, 1, 7, dim), NAN, dtype=dtype)
    for position in range(len(scores)):
        block, offset = rows.block_tables[0, position // 7], position % 7
        cache[block, 0, 0, 0, offset] = 0
        cache[block, 0, 0, 0, offset, 0] = scores[position]
        cache[block, 0, 1, 0, offset] = values[position]
    q = torch.zeros(1, 1, 1, dim, dtype=torch.float32 if dtype == torch.float16 else dtype)
    q[..., 0] = 1
    out = torch.full((1, dim), NAN)
    CpuOps(isa).attend(0, q, AttentionContext(rows=rows, kv_cache=cache, scale=1.0), out)
    return out[0]


@on_every_instruction_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e4, 1e20, 1e30])
@pytest.mark.parametrize("count", [2, 64, 65, 200])
def test_a_score_far_above_the_others_gets_all_the_weight(
    isa: str, dtype: torch.dtype, size: float, count: int
) -> None:
    values = torch.randn(count, 8, generator=torch.Generator().manual_seed(count)).to(dtype).float()
    for winner in (0, count // 2, count - 1):
        scores = torch.full((count,), -size)
        scores[winner] = size
        assert torch.equal(_attend(isa, scores, values, dtype), values[winner])


@on_every_instruction_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("score", [6e4, -6e4, 0.0])
def test_equal_scores_get_equal_weights_at_any_size(isa: str, dtype: torch.dtype, score: float) -> None:
    values = torch.randn(150, 8, generator=torch.Generator().manual_seed(3)).to(dtype).float()
    out = _attend(isa, torch.full((150,), score), values, dtype)
    assert torch.allclose(out, values.mean(0), rtol=0, atol=1e-6)


@on_every_instruction_set
def test_scores_of_minus_infinity_hide_a_key(isa: str) -> None:
    values = torch.randn(80, 8, generator=torch.Generator().manual_seed(4))
    scores = torch.full((80,), -INF)
    scores[70:] = 0.5
    assert torch.allclose(_attend(isa, scores, values, torch.float32), values[70:].mean(0), rtol=0, atol=1e-6)


@on_every_instruction_set
def test_weights_of_scores_are_powers_of_e(isa: str) -> None:
    # Two keys, one with value 1: the row becomes the weight of that key, down to where float32 has no more digits.
    for gap in torch.linspace(0, 85, 171).tolist():
        out = _attend(isa, torch.tensor([0.0, -gap]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.float32)
        exact = torch.sigmoid(torch.tensor(-gap, dtype=torch.float64))
        assert abs(out[0].double() - exact) <= 1e-5 * exact


@on_every_instruction_set
def test_padding_of_rows_does_not_depend_on_the_memorys_old_contents(isa: str) -> None:
    # 7 values leave half a unit, or one byte, over: it must not meet the weights' padding as NaN.
    ops = CpuOps(isa)
    for name in ("bf16", "int8"):
        rows = Rows.empty(1, 7, format_of(dtype_of(name), int8=name == "int8"))
        rows.units.fill_(-1)
        rows.low.fill_(-1)
        ops.norm(torch.ones(1, 7), torch.ones(7), 0.0, rows)
        out = product(ops, rows, pack(torch.ones(1, 7, dtype=dtype_of(name)), int8=name == "int8"))
        assert out[0, 0] == pytest.approx(7.0, rel=1e-4)


@on_every_instruction_set
@pytest.mark.parametrize("num_threads", [1, 3])
def test_reading_memory_reads_all_of_it(isa: str, num_threads: int) -> None:
    memory = torch.arange(8 * 1003)
    assert CpuOps(isa, num_threads).read(memory) == int(memory.sum())


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="avx1024"):
        CpuOps("avx1024")
