"""Paged attention in Triton against float64, over caches that are NaN wherever a row must not read."""

from __future__ import annotations

from tests.support.devices import DEVICE, HAS_GPU, gpu_only, needs_triton  # isort: skip

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.ops import KvRows
from kernels.triton.attention import paged_attention
from kernels.triton.attention_launch import AttentionLaunch, AttentionLaunches, AttentionSizes, choose_launches
from kernels.triton.paged_step import PagedStep
from tests.unit.kernels.combinations import combinations
from tests.unit.kernels.triton.paged_steps import SMALL_ALIGNED, SMALL_FAST, Case, make_case, make_rows

pytestmark = needs_triton

#: Single rows before and after chunks, whole prompts, chunks with a prefix.
MIXED = [(1, 20), (5, 5), (6, 41), (1, 70)]
WITH_BOTH_LAUNCHES = pytest.mark.parametrize("launches", [SMALL_ALIGNED, SMALL_FAST], ids=["aligned", "fast"])


def attend(case: Case, launches: AttentionLaunches) -> Tensor:
    return paged_attention(case.q, case.step, case.layer, window=case.window, launches=launches)


def check(case: Case, launches: AttentionLaunches) -> None:
    """Within the rounding of weights and result to the dtype (the interpreter truncates bfloat16)."""
    out = attend(case, launches)
    assert out.dtype == case.q.dtype
    expected, size = case.expected()
    bound = (2 * torch.finfo(out.dtype).eps + 2e-5) * size + 1e-30
    assert not out.isnan().any()
    assert ((out.double() - expected).abs() <= bound).all(), ((out.double() - expected).abs() / bound).max()


#: (heads, kv_heads, dim, block_size, window, dtype)
SIZES = [
    (2, 2, 16, 1, None, torch.float32),
    (3, 1, 64, 4, 5, torch.float16),
    (4, 1, 80, 16, 17, torch.bfloat16),
    (8, 1, 128, 64, None, torch.bfloat16),
    (4, 1, 256, 16, 40, torch.float32),
    (3, 1, 96, 6, 1, torch.float16),
]


@pytest.mark.parametrize(("size", "launches"), combinations(SIZES, [SMALL_ALIGNED, SMALL_FAST]))
def test_attention_matches_the_formula(
    size: tuple[int, int, int, int, int | None, torch.dtype], launches: AttentionLaunches
) -> None:
    heads, kv_heads, dim, block_size, window, dtype = size
    case = make_case(
        MIXED, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, window=window, dtype=dtype, num_padding=1
    )
    check(case, launches)


@pytest.mark.parametrize(
    ("dtype", "launches"), combinations([torch.float32, torch.bfloat16], [SMALL_ALIGNED, SMALL_FAST])
)
def test_an_fp8_cache_is_read_with_its_scales(dtype: torch.dtype, launches: AttentionLaunches) -> None:
    check(make_case(MIXED, heads=2, kv_heads=1, dim=32, block_size=4, window=20, dtype=dtype, fp8=True), launches)


@pytest.mark.parametrize(("dtype", "deterministic"), combinations([torch.float32, torch.bfloat16], [False, True]))
def test_chosen_launches_match_the_formula(dtype: torch.dtype, deterministic: bool) -> None:
    case = make_case([(1, 700), (3, 66)], heads=4, kv_heads=1, dim=16, block_size=16, dtype=dtype)
    launches = choose_launches(
        AttentionSizes(
            num_sequences=2,
            num_heads=4,
            num_kv_heads=1,
            head_dim=16,
            capacity_tokens=case.step.rows.block_tables.shape[1] * 16,
            dtype=dtype,
        ),
        deterministic=deterministic,
    )
    assert launches.decode.num_splits(704, None) > 1
    check(case, launches)


@WITH_BOTH_LAUNCHES
@pytest.mark.parametrize("spans", [[(1, 5), (1, 33)], [(20, 31)], [(2, 2), (2, 18)]])
def test_steps_of_one_kind_need_one_kernel(spans: list[tuple[int, int]], launches: AttentionLaunches) -> None:
    check(make_case(spans, heads=3, kv_heads=1, dim=16, block_size=4), launches)


@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_a_large_batch_is_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (8, 2), generator=generator).tolist()
    spans = [(max(1, rows - 4), max(1, rows - 4) + before) for rows, before in lengths]
    # Tiles of 5 rows: sequences that fill one, overfill one, or share no boundary with any.
    check(make_case(spans, heads=3, kv_heads=1, dim=16, block_size=4), SMALL_FAST)


@WITH_BOTH_LAUNCHES
def test_a_sequence_without_context_gets_zeros(launches: AttentionLaunches) -> None:
    case = make_case([], heads=2, kv_heads=1, dim=16, block_size=4, num_padding=3)
    assert torch.equal(attend(case, launches), torch.zeros((3, 32), device=DEVICE))


@WITH_BOTH_LAUNCHES
def test_an_empty_step_gives_an_empty_result(launches: AttentionLaunches) -> None:
    assert attend(make_case([], heads=2, kv_heads=1, dim=16, block_size=4), launches).shape == (0, 32)


@pytest.mark.parametrize("window", [None, 30])
def test_a_large_score_in_any_split_dominates(window: int | None) -> None:
    case = make_case([(1, 100), (4, 100)], heads=1, kv_heads=1, dim=16, block_size=4, window=window)
    for position in (20, 75, 98):
        for table, context in zip(case.step.rows.block_tables.tolist(), case.contexts, strict=True):
            context[0, :, position] *= 30
            case.step.kv_cache[table[position // 4], case.layer, 0, :, position % 4] *= 30
    check(case, SMALL_ALIGNED)
    check(case, SMALL_FAST)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in gpu_only:
        test = mark(test)
    return test


# Deterministic mode


SHAPES = pytest.mark.parametrize(
    ("dtype", "dim", "window", "fp8"),
    [
        (torch.float32, 16, None, False),
        (torch.float32, 16, 33, False),
        *(
            pytest.param(dtype, dim, window, fp8, marks=gpu_only)
            for dtype, dim, window, fp8 in (
                *((torch.bfloat16, dim, window, False) for dim in (64, 80, 128, 256) for window in (None, 100)),
                (torch.bfloat16, 128, None, True),
                (torch.float16, 128, 100, False),
                (torch.float32, 64, None, False),
            )
        ),
    ],
)


def deterministic_case(dtype: torch.dtype, dim: int, window: int | None, fp8: bool) -> tuple[Case, AttentionLaunches]:
    """A prompt of more than one split, as small as possible if it is interpreted."""
    if not HAS_GPU:
        case = make_case([(50, 50)], heads=2, kv_heads=1, dim=dim, block_size=4, window=window, dtype=dtype, fp8=fp8)
        return case, SMALL_ALIGNED
    case = make_case([(1300, 1300)], heads=8, kv_heads=2, dim=dim, block_size=16, window=window, dtype=dtype, fp8=fp8)
    launches = choose_launches(
        AttentionSizes(
            num_sequences=1,
            num_heads=8,
            num_kv_heads=2,
            head_dim=dim,
            capacity_tokens=case.step.rows.block_tables.shape[1] * 16,
            dtype=dtype,
        ),
        deterministic=True,
    )
    return case, launches


def attend_chunks(case: Case, chunks: list[tuple[int, int]], launches: AttentionLaunches) -> Tensor:
    """Rows [begin, end) of a whole prompt, each chunk as a separate sequence over the same blocks."""
    device = case.q.device
    rows = KvRows(
        positions=case.step.rows.positions,
        slot_mapping=case.step.rows.slot_mapping,
        query_starts=torch.tensor([0, *(end - begin for begin, end in chunks)], device=device).cumsum(0),
        context_lens=torch.tensor([end for _, end in chunks], device=device),
        block_tables=case.step.rows.block_tables.expand(len(chunks), -1),
    )
    q = torch.cat([case.q[begin:end] for begin, end in chunks])
    step = replace(case.step, rows=rows)
    return paged_attention(q, step, case.layer, window=case.window, launches=launches)


def assert_same(left: Tensor, right: Tensor) -> None:
    """Bit for bit on a GPU; the interpreter's products may differ between shapes."""
    if HAS_GPU:
        assert torch.equal(left, right)
    else:
        torch.testing.assert_close(left, right, atol=2e-6, rtol=2e-6)


@SHAPES
def test_decode_has_the_bits_of_prefill(dtype: torch.dtype, dim: int, window: int | None, fp8: bool) -> None:
    case, launches = deterministic_case(dtype, dim, window, fp8)
    whole = attend(case, launches)
    count = case.q.shape[0]
    positions = [*range(0, count, count // 5), count - 1]
    single = attend_chunks(case, [(position, position + 1) for position in positions], launches)
    assert_same(single, whole[positions])


@SHAPES
def test_chunks_have_the_bits_of_the_whole_prompt(dtype: torch.dtype, dim: int, window: int | None, fp8: bool) -> None:
    case, launches = deterministic_case(dtype, dim, window, fp8)
    whole = attend(case, launches)
    count = case.q.shape[0]
    cuts = [0, 4, 5, count // 2 + 1, count]
    chunked = attend_chunks(case, list(itertools.pairwise(cuts)), launches)
    assert_same(chunked, whole)


@SHAPES
def test_prefill_has_the_same_bits_in_tall_tiles(dtype: torch.dtype, dim: int, window: int | None, fp8: bool) -> None:
    case, launches = deterministic_case(dtype, dim, window, fp8)
    tall = replace(launches.prefill, block_m=2 * launches.prefill.block_m, num_warps=2 * launches.prefill.num_warps)
    if HAS_GPU and launches.prefill.num_warps > 4:
        pytest.skip("wide heads have no tall tiles")
    assert_same(attend(case, replace(launches, prefill=tall)), attend(case, launches))


@SHAPES
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(
    dtype: torch.dtype, dim: int, window: int | None, fp8: bool
) -> None:
    case, launches = deterministic_case(dtype, dim, window, fp8)
    count = case.q.shape[0]
    chunks = [(count - 1, count), (5, 6), (7, 12), (count // 2, count // 2 + 1)]
    batch = attend_chunks(case, chunks, launches).split([end - begin for begin, end in chunks])
    for chunk, together in zip(chunks, batch, strict=True):
        assert_same(attend_chunks(case, [chunk], launches), together)


# Launch parameters


def chosen(**changes: int) -> AttentionLaunches:
    shape = {"num_sequences": 8, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "capacity_tokens": 8192} | changes
    return choose_launches(AttentionSizes(**shape, dtype=torch.bfloat16), deterministic=True)


def test_deterministic_launches_depend_on_the_model_alone() -> None:
    assert chosen() == chosen(num_sequences=1) == chosen(capacity_tokens=100)
    assert chosen().decode == chosen().prefill


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "num_heads"), [(128, 32), (64, 8), (256, 32), (128, 1024)])
def test_tall_tiles_are_those_of_prefill_with_more_rows(dtype: torch.dtype, head_dim: int, num_heads: int) -> None:
    sizes = AttentionSizes(8, num_heads, 8, head_dim, 8192, dtype)
    flat = choose_launches(sizes, deterministic=True)
    tall = choose_launches(sizes, deterministic=True, tall_tiles=True)
    assert tall.decode == flat.decode
    # Without tensor cores, with keys shared by two groups of warps, or with many rows already, there are none.
    has_tall = dtype == torch.bfloat16 and head_dim <= 128 and num_heads <= 64 * 8
    assert tall.prefill == (replace(flat.prefill, block_m=128, num_warps=8) if has_tall else flat.prefill)


@pytest.mark.parametrize("num_sequences", [1, 3, 64, 512])
@pytest.mark.parametrize("capacity_tokens", [16, 1000, 131072])
def test_fast_decode_fills_the_gpu_if_the_context_is_long_enough(num_sequences: int, capacity_tokens: int) -> None:
    launch = choose_launches(
        AttentionSizes(
            num_sequences=num_sequences,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            capacity_tokens=capacity_tokens,
            dtype=torch.bfloat16,
        ),
        deterministic=False,
    ).decode
    programs = num_sequences * 8 * launch.num_splits(capacity_tokens, None)
    assert programs >= 200 or launch.split_tokens == 128
    assert launch.num_splits(capacity_tokens, None) * launch.split_tokens >= capacity_tokens


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34, 64, 65, 66, 1000])
def test_the_number_of_splits_is_that_a_window_can_touch(window: int) -> None:
    launch = AttentionLaunch(block_m=16, block_n=16, split_tokens=32, even_splits=False, num_warps=4, num_stages=2)
    capacity = 256
    touched = [(context - 1) // 32 - max(0, context - window) // 32 + 1 for context in range(1, capacity + 1)]
    assert max(touched) == launch.num_splits(capacity, window)


@on_gpu
def test_blocks_beyond_two_to_the_31_elements_are_addressed() -> None:
    rows = make_rows([(1, 100)], 64)
    cache = torch.empty((3, 8192, 2, 8, 64, 128), dtype=torch.bfloat16, device=DEVICE)
    small = torch.randn((3, 1, 2, 8, 64, 128), device=DEVICE).to(torch.bfloat16)
    cache[:, 8191:] = small
    q = torch.randn((1, 32, 128), device=DEVICE).to(torch.bfloat16)
    launches = chosen()
    cos_sin = torch.empty(0, 2, 128, device=DEVICE)
    far, near = (
        paged_attention(
            q,
            PagedStep(rows=rows, kv_cache=memory, cos_sin=cos_sin, scale=0.1),
            layer,
            window=None,
            launches=launches,
        )
        for memory, layer in ((cache, 8191), (small, 0))
    )
    assert torch.equal(far, near)
