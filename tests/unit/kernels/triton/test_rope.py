"""RoPE and the KV write in one launch against the reference, which rotates, clears and scatters separately."""

from __future__ import annotations

from tests.support.devices import DEVICE, HAS_GPU, needs_triton  # isort: skip

import pytest
import torch
from torch import Tensor

from kernels.ops import KvRows
from kernels.reference import ReferenceOps
from kernels.triton.paged_step import PagedStep
from kernels.triton.rope import HeadNorms, rope_write_kv
from tests.unit.kernels.triton.paged_steps import FP8, NAN, make_rows, num_blocks_of

pytestmark = needs_triton

LAYERS, LAYER = 3, 1
#: A block that is opened, is filled, is entered in the middle, and two blocks in one chunk.
SPANS = [(1, 1), (3, 11), (1, 8), (7, 10), (1, 17)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def angles(dim: int) -> Tensor:
    half = torch.rand((40, 1, dim // 2), generator=torch.Generator().manual_seed(dim)) * 6
    return torch.cat((half.cos(), half.sin()), 1).repeat(1, 1, 2).to(DEVICE)


def split(rows: KvRows, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of merged rows."""
    merged = random(rows.positions.shape[0], heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def launch(
    rows: KvRows,
    cache: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    scales: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    cos_sin = angles(qkv[0].shape[2])
    step = PagedStep(rows=rows, kv_cache=cache, cos_sin=cos_sin, scale=1.0, kv_scales=scales)
    return rope_write_kv(*qkv, step, LAYER, norms)


def poisoned_cache(rows: KvRows, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((num_blocks_of(rows), LAYERS, 2, kv_heads, block_size, dim), NAN, dtype=dtype, device=DEVICE)


def assert_near(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """Within `roundings` units in the last place; NaN, which marks unwritten memory, at the same indices."""
    step = torch.finfo(expected.dtype).eps * roundings
    torch.testing.assert_close(actual, expected, rtol=step, atol=step, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype"),
    [
        (2, 2, 16, 1, torch.float32),
        (4, 1, 64, 4, torch.float16),
        (3, 1, 80, 16, torch.bfloat16),
        (8, 1, 96, 6, torch.float16),
        (2, 1, 256, 16, torch.bfloat16),
    ],
)
def test_q_and_the_whole_cache_match_the_reference(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    rows = make_rows(SPANS, block_size)
    q, k, v = split(rows, heads, kv_heads, dim, dtype)
    cache = poisoned_cache(rows, kv_heads, block_size, dim, dtype)
    expected_cache = cache.clone()
    expected = ReferenceOps().paged_kv(rows, expected_cache, angles(dim), 1.0).rope_write_kv(LAYER, q, k, v)
    rotated = launch(rows, cache, (q, k, v))
    assert rotated.is_contiguous()
    assert_near(rotated, expected)
    assert_near(cache, expected_cache)
    # V is only copied, and cleared slots are exact zeros.
    assert torch.equal(cache[:, :, 1].nan_to_num(7.0), expected_cache[:, :, 1].nan_to_num(7.0))
    assert torch.equal(cache == 0, expected_cache == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_before_the_rotation_round_as_the_norm_op(dtype: torch.dtype) -> None:
    rows, ops, dim, eps = make_rows([(1, 5), (3, 3)], 4), ReferenceOps(), 48, 1e-5
    q, k, v = split(rows, 3, 1, dim, dtype)
    weights = tuple(1 + random(dim, dtype=dtype, seed=seed) / 4 for seed in (1, 2))
    cache = poisoned_cache(rows, 1, 4, dim, dtype)
    expected_cache = cache.clone()
    normed = [ops.rms_norm(x, weight, eps) for x, weight in zip((q, k), weights, strict=True)]
    expected = ops.paged_kv(rows, expected_cache, angles(dim), 1.0).rope_write_kv(LAYER, normed[0], normed[1], v)
    # The interpreter truncates bfloat16 each time; otherwise another order of sums seldom changes a rounding.
    roundings = 6 if dtype == torch.bfloat16 and not HAS_GPU else 4 if dtype == torch.float32 else 2
    assert_near(
        launch(rows, cache, (q, k, v), norms=HeadNorms(q=weights[0], k=weights[1], eps=eps)), expected, roundings
    )
    assert_near(cache, expected_cache, roundings)


def test_padding_rows_write_nothing() -> None:
    rows = make_rows([(1, 3)], 4, num_padding=3)
    cache = poisoned_cache(rows, 1, 4, 16, torch.float32)
    before = cache.clone()
    q, k, v = split(rows, 2, 1, 16, torch.float32)
    assert not launch(rows, cache, (q, k, v)).isnan().any()
    changed = (cache.nan_to_num(7.0) != before.nan_to_num(7.0)).nonzero()
    slots = changed[:, 0] * 4 + changed[:, 4]
    assert set(slots.tolist()) == {int(rows.slot_mapping[0])}


def test_no_rows_give_an_empty_result() -> None:
    rows = make_rows([], 4)
    q, k, v = split(rows, 2, 1, 16, torch.float32)
    assert launch(rows, poisoned_cache(rows, 1, 4, 16, torch.float32), (q, k, v)).shape == (0, 2, 16)


@pytest.mark.skipif(HAS_GPU, reason="only the interpreter's order of programs can be chosen")
def test_clearing_overwrites_no_row_in_any_order_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder

    rows = make_rows(SPANS, 4)
    q, k, v = split(rows, 2, 1, 16, torch.float32)
    forwards, backwards = (poisoned_cache(rows, 1, 4, 16, torch.float32) for _ in range(2))
    launch(rows, forwards, (q, k, v))
    set_index = interpreter_builder.set_grid_idx
    count = rows.positions.shape[0]
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_index(count - 1 - x, y, z))
    launch(rows, backwards, (q, k, v))
    assert torch.equal(forwards.nan_to_num(7.0), backwards.nan_to_num(7.0))


def test_an_fp8_cache_stores_the_nearest_number_of_the_format() -> None:
    rows = make_rows(SPANS, 4)
    q, k, v = split(rows, 2, 2, 32, torch.float32)
    # From far below the smallest step to beyond the largest number.
    v = v * torch.logspace(-5, 3.5, 32, device=DEVICE)
    v[0, 0, :3] = torch.tensor([1e9, -1e9, 0.0], device=DEVICE)
    scales = torch.rand((LAYERS, 2, 2), generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.5
    expected_cache = poisoned_cache(rows, 2, 4, 32, torch.float32)
    expected = ReferenceOps().paged_kv(rows, expected_cache, angles(32), 1.0).rope_write_kv(LAYER, q, k, v)
    expected_fp8 = (expected_cache / scales[None, :, :, :, None, None]).clamp(-448, 448).to(FP8)
    cache = poisoned_cache(rows, 2, 4, 32, torch.float32).to(FP8)
    assert_near(launch(rows, cache, (q, k, v), scales), expected)
    stored, wanted = cache.float(), expected_fp8.float()
    assert torch.equal(stored.isnan(), wanted.isnan())
    assert torch.equal(stored[:, :, 1].nan_to_num(7.0), wanted[:, :, 1].nan_to_num(7.0))
    # Rotation in another order may round a few numbers to the other neighbour.
    off = (stored[:, LAYER, 0] - wanted[:, LAYER, 0]).nan_to_num(0.0).abs()
    assert (off <= wanted[:, LAYER, 0].nan_to_num(0.0).abs() / 8 + 2**-9).all()
    assert (off > 0).float().mean() < 0.01
