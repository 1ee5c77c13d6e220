"""bfloat16 weights compressed to 12 bits: the same products, bit for bit, as without compression."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.ops import CpuOps, PackedMatrix, Rows, pack, pack_gate_up
from tests.unit.kernels.cpu_ops import INSTRUCTION_SETS, needs_kernels, product, rows_of

#: Instruction sets that permute 32 patterns of 16 bits; the others keep weights uncompressed.
CODED = [isa for isa in INSTRUCTION_SETS if isa.startswith("avx512")]

pytestmark = [needs_kernels, pytest.mark.skipif(not CODED, reason="needs avx512")]

SEEDS = st.integers(0, 2**31)
#: Depth in groups of eight weights: whole groups of codes only.
GROUPS = st.integers(1, 30)
#: Numbers of rows below and above the one from which panels are decoded first.
ROWS = st.integers(1, 70)
on_coded_instruction_sets = pytest.mark.parametrize("isa", CODED)


def _weights(seed: int, features: int, depth: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(features, depth, generator=generator) * 0.05).to(torch.bfloat16)


def _rows(ops: CpuOps, seed: int, num_rows: int, depth: int) -> Rows:
    return rows_of(ops, torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(seed)), "bf16")


def _same_bits(ops: CpuOps, rows: Rows, plain: PackedMatrix, coded: PackedMatrix) -> None:
    expected, got = product(ops, rows, plain), product(ops, rows, coded)
    # The bits of NaN may differ.
    assert torch.equal(expected.isnan(), got.isnan())
    assert torch.equal(expected.nan_to_num().view(torch.int32), got.nan_to_num().view(torch.int32))


@on_coded_instruction_sets
@settings(max_examples=40, deadline=None)
@given(ROWS, GROUPS, st.integers(1, 150), SEEDS)
def test_products_are_the_same(isa: str, num_rows: int, groups: int, features: int, seed: int) -> None:
    ops, depth = CpuOps(isa), groups * 8
    weight, bias = _weights(seed, features, depth), _weights(seed + 1, 1, features)[0]
    coded = pack(weight, bias, instruction_set=isa)
    _same_bits(ops, _rows(ops, seed + 2, num_rows, depth), pack(weight, bias), coded)


@on_coded_instruction_sets
@settings(max_examples=25, deadline=None)
@given(ROWS, GROUPS, st.integers(1, 70), SEEDS)
def test_gate_and_up_are_the_same(isa: str, num_rows: int, groups: int, features: int, seed: int) -> None:
    ops, depth = CpuOps(isa), groups * 8
    gate, up = _weights(seed, features, depth), _weights(seed + 1, features, depth)
    coded = pack_gate_up(gate, up, instruction_set=isa)
    _same_bits(ops, _rows(ops, seed + 2, num_rows, depth), pack_gate_up(gate, up), coded)


@on_coded_instruction_sets
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 64 * 1024 - 1) | st.integers(0, 40)), max_size=16),
    st.integers(1, 60),
    SEEDS,
)
def test_rare_weights_of_any_bits_come_through(isa: str, rare: list[tuple[int, int]], num_rows: int, seed: int) -> None:
    ops = CpuOps(isa)
    weight = _weights(seed, 64, 1024)
    for bits, index in rare:
        weight.view(torch.int16).view(-1)[index] = bits - 2**16 if bits >= 2**15 else bits
    plain, coded = pack(weight), pack(weight, instruction_set=isa)
    assert coded.num_bytes < plain.num_bytes
    _same_bits(ops, _rows(ops, seed, num_rows, 1024), plain, coded)


@on_coded_instruction_sets
@pytest.mark.parametrize("start", range(0, 2**16, 2**11))
def test_every_weight_there_is_comes_through(isa: str, start: int) -> None:
    # 2,048 neighbours have 16 exponents, so they are coded; the product with a row of the identity is the weight.
    ops = CpuOps(isa)
    bits = torch.arange(start, start + 2**11, dtype=torch.int32)
    weight = torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16).view(torch.bfloat16).view(64, 32)
    plain, coded = pack(weight), pack(weight, instruction_set=isa)
    assert coded.num_bytes < plain.num_bytes
    finite = weight.isfinite().all()
    _same_bits(ops, rows_of(ops, torch.eye(32) if finite else torch.ones(1, 32), "bf16"), plain, coded)


@on_coded_instruction_sets
def test_codes_take_three_quarters_of_the_bytes(isa: str) -> None:
    weight = _weights(1, 320, 576)
    coded, plain = pack(weight, instruction_set=isa).num_bytes, pack(weight).num_bytes
    assert 0.75 * plain <= coded < 0.8 * plain  # A few groups with very small weights are kept as they are.


@on_coded_instruction_sets
def test_weights_that_codes_would_not_make_smaller_stay_as_they_are(isa: str) -> None:
    noise = torch.randint(-(2**15), 2**15, (64, 256), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    for weight in (noise.view(torch.bfloat16), _weights(1, 64, 12), _weights(1, 64, 64).float()):
        assert pack(weight, instruction_set=isa).num_bytes == pack(weight).num_bytes
