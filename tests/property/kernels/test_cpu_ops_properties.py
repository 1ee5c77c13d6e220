"""The single C++ ops against float64, over random shapes and numbers, with bounds that follow from how they round."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

#: Half the distance of float32 from 1 to the next.
EPS = 2.0**-24
SEEDS = st.integers(0, 2**31)
few = settings(max_examples=25, deadline=None)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rounded_weights(weight: Tensor, name: str) -> Tensor:
    """What the panels hold, float64."""
    if name != "int8":
        return weight.double()
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return torch.where(scale > 0, (weight.float() / scale).round(), 0).double() * scale.double()


@on_every_instruction_set
@in_every_format
@few
@given(st.integers(0, 40), st.integers(1, 150), st.integers(1, 200), st.booleans(), SEEDS)
def test_a_product_is_exact_within_the_rounding_of_its_sums(
    isa: str, name: str, num_rows: int, depth: int, features: int, has_bias: bool, seed: int
) -> None:
    ops = CpuOps(isa)
    weight = _normal(seed, features, depth).to(dtype_of(name))
    bias = _normal(seed + 1, features).to(dtype_of(name)) if has_bias else None
    rows = rows_of(ops, _normal(seed + 2, num_rows, depth) * 3, name)
    out = product(ops, rows, pack(weight, bias, int8=name == "int8"))

    x, w = values_of(rows, name), _rounded_weights(weight, name)
    offset = torch.zeros(features, dtype=torch.float64) if bias is None else bias.double()
    size = x.abs() @ w.abs().T
    if name == "int8":  # The bytes' sums are exact; turning them into floats rounds numbers that may cancel.
        size += 512 * rows.scale.double()[:, None] * w.abs().sum(1)
    bound = EPS * (4 if name == "int8" else depth + 2) * (size + offset.abs())
    assert ((out[:, :features].double() - (x @ w.T + offset)).abs() <= bound + 1e-30).all()
    assert (out[:, features:] == 0).all()


@on_every_instruction_set
@few
@given(st.integers(1, 20), st.integers(1, 150), st.integers(1, 70), SEEDS)
def test_int8_errors_are_within_half_a_step_of_weights_and_rows(
    isa: str, num_rows: int, depth: int, features: int, seed: int
) -> None:
    ops = CpuOps(isa)
    weight, x = _normal(seed, features, depth), _normal(seed + 1, num_rows, depth)
    out = product(ops, rows_of(ops, x, "int8"), pack(weight, int8=True))[:, :features].double()
    x, weight = x.double(), weight.double()
    weight_step, row_step = weight.abs().amax(1) / 127, x.abs().amax(1, keepdim=True) / 32767
    bound = x.abs().sum(1, keepdim=True) * weight_step / 2 + row_step / 2 * (weight.abs().sum(1) + depth * weight_step)
    assert ((out - x @ weight.T).abs() <= bound * 1.001 + 1e-5).all()


@on_every_instruction_set
@in_every_format
@few
@given(st.integers(0, 30), st.integers(1, 100), st.integers(1, 100), st.sampled_from([0.1, 1.0, 30.0]), SEEDS)
def test_gate_and_up_are_combined_with_silu(
    isa: str, name: str, num_rows: int, depth: int, features: int, size: float, seed: int
) -> None:
    ops = CpuOps(isa)
    gate, up = (_normal(seed + i, features, depth).to(dtype_of(name)) for i in range(2))
    rows = rows_of(ops, _normal(seed + 2, num_rows, depth) * size, name)
    int8 = name == "int8"
    out = product(ops, rows, pack_gate_up(gate, up, int8=int8))
    g, u = (product(ops, rows, pack(weight, int8=int8))[:, :features].double() for weight in (gate, up))
    exact = g * torch.sigmoid(g) * u
    assert ((out[:, :features].double() - exact).abs() <= 1e-6 * exact.abs() + 1e-30).all()
    assert (out[:, features:] == 0).all()


@on_every_instruction_set
@in_every_format
@few
@given(st.integers(2, 40), st.integers(1, 150), st.integers(1, 130), st.booleans(), SEEDS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_more_threads(
    isa: str, name: str, num_rows: int, depth: int, features: int, interleaved: bool, seed: int
) -> None:
    ops = CpuOps(isa)
    weights = [_normal(seed + i, features, depth).to(dtype_of(name)) for i in range(2)]
    int8 = name == "int8"
    matrix = pack_gate_up(*weights, int8=int8) if interleaved else pack(weights[0], int8=int8)
    x = _normal(seed + 2, num_rows, depth)
    chosen = seed % num_rows
    batch = x.clone()
    batch[(chosen + 1) % num_rows, 0] = NAN
    batch[(chosen + 2) % num_rows if num_rows > 2 else (chosen + 1) % num_rows, -1] = float("inf")
    alone = product(ops, rows_of(ops, x[chosen : chosen + 1].contiguous(), name), matrix)
    for threads in (ops, CpuOps(isa, num_threads=3)):
        among = product(threads, rows_of(threads, batch, name), matrix)
        assert torch.equal(among[chosen], alone[0])


@on_every_instruction_set
@in_every_format
@few
@given(st.integers(0, 20), st.integers(1, 300), SEEDS)
def test_a_norm_is_exact_within_rounding(isa: str, name: str, num_rows: int, width: int, seed: int) -> None:
    ops = CpuOps(isa)
    x, weight = _normal(seed, num_rows, width) * 5, _normal(seed + 1, width)
    rows = Rows.empty(num_rows, width, format_of(dtype_of(name), int8=name == "int8"))
    ops.norm(x, weight, 1e-5, rows)
    wide = x.double()
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    bound = 1e-6 * exact.abs()
    if name == "bf16":
        bound += 2.0**-8 * exact.abs()
    if name == "int8":
        bound += exact.abs().amax(1, keepdim=True) * (0.501 / 32767)
    assert ((values_of(rows, name) - exact).abs() <= bound + 1e-30).all()


@on_every_instruction_set
@few
@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.sampled_from([2, 6, 32, 34, 64, 80, 96, 128, 256]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
    st.booleans(),
    SEEDS,
)
def test_heads_are_normed_rotated_rounded_once_and_stored_at_their_offsets(
    isa: str, num_rows: int, heads: int, dim: int, dtype: torch.dtype, has_norm: bool, rotates: bool, seed: int
) -> None:
    x = _normal(seed, num_rows, heads, dim)
    half = _normal(seed + 1, num_rows, dim // 2) * 100
    angles = torch.cat((half, half), 1)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1) if rotates else None
    weight = _normal(seed + 2, dim)
    # Row r's heads lie `heads + 1` vectors apart from the next row's, in reverse order, behind one spare vector.
    out = torch.full(((num_rows + 1) * (heads + 1), dim), NAN, dtype=dtype)
    offsets = torch.arange(num_rows).flip(0) * (heads + 1) * dim + dim
    target = HeadTarget(out=out, offsets=offsets, head_stride=dim)
    CpuOps(isa).rotate(x, cos_sin, target, norm=(weight, 1e-6) if has_norm else None)

    wide = x.double()
    if has_norm:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    size = wide.abs()
    if cos_sin is not None:
        cos, sin = cos_sin.double()[:, 0, None], cos_sin.double()[:, 1, None]
        rotated = torch.cat((-wide[..., dim // 2 :], wide[..., : dim // 2]), -1)
        size = size + rotated.abs()
        wide = wide * cos + rotated * sin
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
    written = (offsets[:, None] // dim + torch.arange(heads)).flatten()
    got = out[written].view(num_rows, heads, dim).double()
    assert ((got - wide).abs() <= 2e-6 * size + step * wide.abs() + 2.0**-25).all()
    spare = torch.ones(len(out), dtype=torch.bool).index_fill(0, written, False)
    assert out[spare].isnan().all()


def _attended(q: Tensor, rows: KvRows, cache: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
    """In float64, row by row. q: [num_kv_heads, num_tokens, group_size, head_dim]; returns [num_tokens, width]."""
    out = []
    for sequence, context in enumerate(rows.context_lens.tolist()):
        table = rows.block_tables[sequence, : -(-context // cache.shape[4])]
        keys, values = cache[table, layer].permute(1, 2, 0, 3, 4).flatten(2, 3).double()
        begin, end = rows.query_starts[sequence : sequence + 2].tolist()
        for row in range(begin, end):
            last = context - (end - row) + 1
            seen = slice(0 if window is None else max(0, last - window), last)
            scores = q[:, row].double() @ keys[:, seen].mT * scale
            out.append((scores.softmax(-1) @ values[:, seen]).flatten())
    return torch.stack(out)


@on_every_instruction_set
@few
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 150)), min_size=1, max_size=4),
    st.integers(1, 32),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 16, 34, 64, 80, 128])),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.one_of(st.none(), st.integers(1, 150)),
    SEEDS,
)
def test_attention_is_exact_within_rounding_and_accesses_no_other_memory(
    isa: str,
    sequences: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    seed: int,
) -> None:
    num_kv_heads, group_size, dim = heads
    rows = kv_rows([(count, count + before) for count, before in sequences], block_size)
    num_tokens = int(rows.query_starts[-1])
    num_blocks = 1 + sum(-(-int(context) // block_size) for context in rows.context_lens)
    cache = _normal(seed, num_blocks, 2, 2, num_kv_heads, block_size, dim).to(dtype)
    # Everything but the contexts, in the layer that is read, is NaN: the first block, the other layer, ends of blocks.
    cache[0] = cache[:, 0] = NAN
    for table, context in zip(rows.block_tables.tolist(), rows.context_lens.tolist(), strict=True):
        if context % block_size:
            cache[table[context // block_size], :, :, :, context % block_size :] = NAN
    q = _normal(seed + 1, num_kv_heads, num_tokens, group_size, dim).to(dtype)
    q = q.float() if dtype == torch.float16 else q
    scale = dim**-0.5
    out = torch.full((num_tokens, num_kv_heads * group_size * dim), NAN)
    before = cache.clone()
    context = AttentionContext(rows=rows, kv_cache=cache, scale=scale)
    CpuOps(isa).attend(1, q, context, out, window=window)
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
    exact = _attended(q, rows, cache, 1, scale, window)
    largest = float(cache[~cache.isnan()].abs().max())
    # In bfloat16 weights are rounded before they meet the values, and their sum is not.
    tolerance = (2.0**-8 if dtype == torch.bfloat16 else 1e-5) * largest
    assert ((out.double() - exact).abs() <= tolerance).all()

    # The same in another batch: each sequence's last row alone, on two threads.
    alone = torch.full_like(out, NAN)[: len(sequences)]
    lasts = rows.query_starts[1:] - 1
    single = KvRows(
        positions=rows.positions[lasts],
        slot_mapping=rows.slot_mapping[lasts],
        query_starts=torch.arange(len(sequences) + 1),
        context_lens=rows.context_lens,
        block_tables=rows.block_tables,
    )
    CpuOps(isa, 2).attend(1, q[:, lasts].contiguous(), replace(context, rows=single), alone, window=window)
    assert torch.equal(alone, out[lasts])
