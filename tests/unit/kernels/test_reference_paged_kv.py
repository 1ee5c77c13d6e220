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
    """Position i is row i: each pair (j, j + DIM / 2) is turned as a complex number."""
    cos, sin = angles(x.shape[0])[:, :, : DIM // 2].double().unbind(1)
    pair = torch.complex(x[..., : DIM // 2].double(), x[..., DIM // 2 :].double())
    turned = pair * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


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
        """spans: (sequence, first position, one beyond the last)."""
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
def test_attention_is_that_of_the_formula_whatever_shares_the_batch(
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
