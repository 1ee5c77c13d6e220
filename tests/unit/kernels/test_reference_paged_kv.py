"""Paged KV of the reference against attention written out row by row in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops import KvRows
from kernels.reference import ReferenceOps

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Sequence:
    """`new` rows at the end of a context of `context` tokens; `q`, `k`, `v` of the whole context, not rotated."""

    context: int
    new: int
    q: Tensor
    k: Tensor
    v: Tensor


def make_sequence(context: int, new: int, generator: torch.Generator) -> Sequence:
    def random(heads: int) -> Tensor:
        return torch.randn(context, heads, DIM, generator=generator)

    return Sequence(context, new, random(HEADS), random(KV_HEADS), random(KV_HEADS))


def angles(length: int) -> Tensor:
    frequencies = 1.0 / (100.0 ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM))
    half = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((half.cos(), half.sin()), 1).repeat(1, 1, 2)


def rotate(x: Tensor) -> Tensor:
    """Position i is row i: each pair (j, j + DIM / 2) is rotated as a complex number."""
    cos, sin = angles(x.shape[0])[:, :, : DIM // 2].double().unbind(1)
    pair = torch.complex(x[..., : DIM // 2].double(), x[..., DIM // 2 :].double())
    rotated = pair * torch.complex(cos, sin)[:, None]
    return torch.cat((rotated.real, rotated.imag), -1)


def expected_rows(sequence: Sequence, window: int | None) -> Tensor:
    q, k, v = rotate(sequence.q), rotate(sequence.k), sequence.v.double()
    rows = []
    for position in range(sequence.context - sequence.new, sequence.context):
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = k[first : position + 1, shared] @ q[position, head] * SCALE
            heads.append(scores.softmax(0) @ v[first : position + 1, shared])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


class Cache:
    """Block tables in random order over a cache full of NaN; contexts are written as earlier steps."""

    def __init__(self, sequences: list[Sequence], block_size: int) -> None:
        self.block_size = block_size
        needed = [-(-sequence.context // block_size) for sequence in sequences]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.tensor = torch.full((sum(needed) + 3, LAYERS, 2, KV_HEADS, block_size, DIM), torch.nan)

    def rows(self, spans: list[tuple[int, int, int]]) -> KvRows:
        """spans: (sequence, first position, last position + 1)."""
        size, width = self.block_size, max(map(len, self.tables))
        positions = [position for _, first, end in spans for position in range(first, end)]
        slots = [
            self.tables[index][position // size] * size + position % size
            for index, first, end in spans
            for position in range(first, end)
        ]
        lengths = torch.tensor([end - first for _, first, end in spans])
        return KvRows(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
            context_lens=torch.tensor([end for _, _, end in spans]),
            block_tables=torch.tensor(
                [self.tables[index] + [0] * (width - len(self.tables[index])) for index, _, _ in spans]
            ),
        )


def attend(sequences: list[Sequence], block_size: int, window: int | None, layer: int = 1) -> list[Tensor]:
    cache, ops = Cache(sequences, block_size), ReferenceOps()
    cos_sin = angles(max(sequence.context for sequence in sequences))
    before = [(index, 0, s.context - s.new) for index, s in enumerate(sequences) if s.context > s.new]
    now = [(index, s.context - s.new, s.context) for index, s in enumerate(sequences)]
    for spans in filter(None, (before, now)):
        kv = ops.paged_kv(cache.rows(spans), cache.tensor, cos_sin, SCALE)
        q, k, v = (torch.cat([getattr(sequences[i], name)[a:b] for i, a, b in spans]) for name in "qkv")
        q = kv.rope_write_kv(layer, q, k, v)
    out = kv.attention(layer, q, window)
    assert torch.isnan(cache.tensor[:, 1 - layer]).all(), "another layer was written"
    return list(out.split([sequence.new for sequence in sequences]))


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 17, 100]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_attention_matches_the_formula_in_any_batch(
    shapes: list[tuple[int, int]], block_size: int, window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequences = [make_sequence(before + new, new, generator) for before, new in shapes]
    for sequence, out in zip(sequences, attend(sequences, block_size, window), strict=True):
        torch.testing.assert_close(out.double(), expected_rows(sequence, window), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 300])
def test_a_chunk_longer_than_a_query_tile_is_attended_in_full(window: int | None) -> None:
    sequence = make_sequence(700, 690, torch.Generator().manual_seed(3))
    out = attend([sequence], 16, window)[0]
    torch.testing.assert_close(out.double(), expected_rows(sequence, window), atol=2e-5, rtol=1e-4)


def test_single_rows_of_very_different_contexts_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(4)
    sequences = [make_sequence(context, 1, generator) for context in (1, 300, 2, 299, 17, 33, 16)]
    for sequence, out in zip(sequences, attend(sequences, 16, None), strict=True):
        torch.testing.assert_close(out.double(), expected_rows(sequence, None), atol=2e-5, rtol=1e-4)


def test_opening_a_block_clears_what_its_earlier_owner_left() -> None:
    sequence = make_sequence(1, 1, torch.Generator().manual_seed(5))
    cache = Cache([sequence], 4)
    kv = ReferenceOps().paged_kv(cache.rows([(0, 0, 1)]), cache.tensor, angles(1), SCALE)
    kv.rope_write_kv(0, sequence.q, sequence.k, sequence.v)
    block = cache.tensor[cache.tables[0][0], 0]
    assert torch.equal(block[1, :, 0], sequence.v[0])
    assert not block[:, :, 1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_k_and_v_are_stored_in_the_cache_dtype(dtype: torch.dtype) -> None:
    sequence = make_sequence(3, 3, torch.Generator().manual_seed(6))
    cache = Cache([sequence], 4)
    tensor = cache.tensor.to(dtype)
    kv = ReferenceOps().paged_kv(cache.rows([(0, 0, 3)]), tensor, angles(3), SCALE)
    q = kv.rope_write_kv(0, sequence.q.to(dtype), sequence.k.to(dtype), sequence.v.to(dtype))
    out = kv.attention(0, q, None)
    assert q.dtype == out.dtype == dtype
    stored = tensor[cache.tables[0][0], 0, 0, :, :3].transpose(0, 1)
    torch.testing.assert_close(stored.double(), rotate(sequence.k.to(dtype)), atol=2e-2, rtol=1e-2)


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    sequence = make_sequence(1, 1, torch.Generator().manual_seed(6))
    cache = Cache([sequence], 4)
    with pytest.raises(AssertionError):
        ReferenceOps().paged_kv(cache.rows([(0, 0, 1)]), cache.tensor[:, :, :, :, ::2], angles(1), SCALE)


class Fp8Run:
    """One sequence over an fp8 cache of NaN, in steps of given sizes, with scales per layer, K or V, and head."""

    SCALES = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.5, 0.11], [0.07, 2.0]]])
    LAYER, BLOCK_SIZE = 1, 4

    def __init__(self, sequence: Sequence, steps: list[int], window: int | None = None) -> None:
        self.sequence, self.window = sequence, window
        self.cache = Cache([sequence], self.BLOCK_SIZE)
        self.tensor = self.cache.tensor.to(torch.float8_e4m3fn)
        outs, first = [], 0
        for rows in steps:
            end = first + rows
            kv = ReferenceOps().paged_kv(
                self.cache.rows([(0, first, end)]), self.tensor, angles(end), SCALE, kv_scales=self.SCALES
            )
            q, k, v = (side[first:end] for side in (sequence.q, sequence.k, sequence.v))
            outs.append(kv.attention(self.LAYER, kv.rope_write_kv(self.LAYER, q, k, v), window))
            first = end
        self.out = torch.cat(outs)

    def stored(self) -> Tensor:
        """Float64 [2, context, KV_HEADS, DIM], not scaled."""
        blocks = self.tensor[self.cache.tables[0], self.LAYER].double()
        return blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.sequence.context]

    def read_back(self) -> Tensor:
        return self.stored() * self.SCALES[self.LAYER].double()[:, None, :, None]


def attention_over(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The formula; q rotated, all float64 [context, heads, DIM]."""
    k, v = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (k, v))
    positions = torch.arange(len(q))
    seen = positions[None] <= positions[:, None]
    if window is not None:
        seen &= positions[None] > positions[:, None] - window
    scores = (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("steps", [[23], [1] * 23, [9, 1, 13]])
def test_an_fp8_cache_is_read_back_as_it_was_stored_times_its_scales(steps: list[int], window: int | None) -> None:
    sequence = make_sequence(23, 23, torch.Generator().manual_seed(7))
    run = Fp8Run(sequence, steps, window)
    expected = attention_over(rotate(sequence.q), *run.read_back(), window)
    torch.testing.assert_close(run.out.double(), expected, atol=2e-5, rtol=1e-4)


def test_an_fp8_cache_stores_the_nearest_numbers_with_a_scale_for_each_head() -> None:
    sequence = make_sequence(23, 23, torch.Generator().manual_seed(7))
    run = Fp8Run(sequence, [23])
    exact = torch.stack((rotate(sequence.k), sequence.v.double()))
    scales = Fp8Run.SCALES[Fp8Run.LAYER].double()[:, None, :, None]
    assert ((run.read_back() - exact).abs() <= torch.maximum(exact.abs() / 16, scales * 2.0**-10) * 1.001).all()
    assert torch.isnan(run.tensor[:, 1 - Fp8Run.LAYER].float()).all(), "another layer was written"


def test_errors_of_attention_over_fp8_are_within_rounding() -> None:
    sequence = make_sequence(40, 40, torch.Generator().manual_seed(8))
    run = Fp8Run(sequence, [40])
    q, k, v = rotate(sequence.q), rotate(sequence.k), sequence.v.double()
    # K is off by a sixteenth at most, so is each score's sum of magnitudes; weights then change by exp(2 * score).
    magnitudes = torch.einsum("qhd,khd->qhk", q.abs(), k.abs().repeat_interleave(HEADS // KV_HEADS, 1))
    score = magnitudes.amax(-1, keepdim=True) * SCALE * (1 / 16 + 2.0**-10)
    largest = v.abs().amax()
    bound = (largest * (torch.expm1(2 * score) + 1 / 16 + 2.0**-10)).expand(-1, -1, DIM).flatten(1)
    assert ((run.out.double() - attention_over(q, k, v, None)).abs() <= bound).all()
    # On average errors cancel, so no scale is missing.
    assert (run.out.double() - attention_over(q, k, v, None)).abs().mean() < 0.03


def test_single_rows_store_the_bytes_of_a_chunk() -> None:
    sequence = make_sequence(23, 23, torch.Generator().manual_seed(9))
    whole, single = Fp8Run(sequence, [23]), Fp8Run(sequence, [1] * 23)
    assert torch.equal(whole.tensor.view(torch.uint8), single.tensor.view(torch.uint8))
    torch.testing.assert_close(whole.out, single.out, atol=2e-6, rtol=1e-5)


def test_a_head_is_saturated_at_448_times_its_own_scale() -> None:
    sequence = make_sequence(1, 1, torch.Generator().manual_seed(10))
    sequence.v[0, :, :3] = torch.tensor([1e6, -1e6, 100.0])
    run = Fp8Run(sequence, [1])
    limits = 448 * Fp8Run.SCALES[Fp8Run.LAYER, 1].double()
    v = run.read_back()[1, 0]
    assert torch.equal(v[:, 0], limits)
    assert torch.equal(v[:, 1], -limits)
    assert v[0, 2] == limits[0] < 100.0
    assert abs(v[1, 2] - 100) <= 100 / 16


def test_opening_a_block_of_an_fp8_cache_clears_the_rest_of_it() -> None:
    run = Fp8Run(make_sequence(5, 5, torch.Generator().manual_seed(11)), [5])
    opened = run.tensor[run.cache.tables[0][1], run.LAYER].view(torch.uint8)
    assert opened[:, :, 0].any()
    assert not opened[:, :, 1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_in_half_precision_can_attend_to_an_fp8_cache(dtype: torch.dtype) -> None:
    sequence = make_sequence(9, 9, torch.Generator().manual_seed(12))
    halves = Sequence(9, 9, *(side.to(dtype) for side in (sequence.q, sequence.k, sequence.v)))
    run = Fp8Run(halves, [9])
    assert run.out.dtype == dtype
    expected = attention_over(rotate(halves.q), *run.read_back(), None)
    torch.testing.assert_close(run.out.double(), expected, atol=3e-2, rtol=2e-2)


def test_an_fp8_cache_without_scales_or_scales_without_fp8_are_refused() -> None:
    sequence = make_sequence(1, 1, torch.Generator().manual_seed(6))
    cache = Cache([sequence], 4)
    rows = cache.rows([(0, 0, 1)])
    with pytest.raises(AssertionError):
        ReferenceOps().paged_kv(rows, cache.tensor, angles(1), SCALE, kv_scales=Fp8Run.SCALES)
    with pytest.raises(AssertionError):
        ReferenceOps().paged_kv(rows, cache.tensor.to(torch.float8_e4m3fn), angles(1), SCALE)
