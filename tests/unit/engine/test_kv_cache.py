"""Memory of KV blocks: views, copies, dtypes and errors of allocation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from tests.unit.engine.fakes import CPU

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8_e4m3"])
def test_a_block_is_one_range_of_bytes_of_the_layouts_size(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    cache = KvCache(layout, 5, CPU)
    assert cache.tensor.shape == (5, 3, 2, 2, 4, 8)
    view = cache.block_bytes_view(BlockId(2))
    assert (view.dtype, view.shape) == (np.uint8, (layout.block_bytes,))
    assert view.ctypes.data == cache.tensor[2].data_ptr()


def test_a_write_to_a_blocks_view_changes_only_that_block() -> None:
    cache = KvCache(LAYOUT, 3, CPU)
    source = torch.randn(3, 2, 2, 4, 8).to(torch.bfloat16)
    cache.block_bytes_view(BlockId(1))[:] = source.flatten().view(torch.uint8).numpy()
    assert torch.equal(cache.tensor[1], source)
    assert not cache.tensor[0].any()
    assert not cache.tensor[2].any()


def test_a_view_shows_writes_in_inference_mode() -> None:
    cache = KvCache(LAYOUT, 2, CPU)
    with torch.inference_mode():
        cache.tensor[1, 0, 0, 0, 0, 0] = 1.0
    assert cache.block_bytes_view(BlockId(1))[:2].tolist() == [0x80, 0x3F]


def test_copies_are_made_in_order() -> None:
    cache = KvCache(LAYOUT, 3, CPU)
    for block in range(3):
        cache.tensor[block] = block + 1
    cache.copy_blocks([(BlockId(0), BlockId(1)), (BlockId(1), BlockId(2)), (BlockId(2), BlockId(2))])
    assert [cache.tensor[block].unique().tolist() for block in range(3)] == [[1.0]] * 3


def test_blocks_of_8_bit_floats_start_as_zeros_and_are_copied_byte_for_byte() -> None:
    layout = replace(LAYOUT, dtype="fp8_e4m3")
    source, target = (KvCache(layout, 3, CPU) for _ in range(2))
    assert source.tensor.dtype == torch.float8_e4m3fn
    assert layout.block_bytes == LAYOUT.block_bytes // 2
    assert not source.tensor.view(torch.uint8).any()
    # Every code, including NaN and minus zero.
    codes = torch.arange(layout.block_bytes).to(torch.uint8)
    source.tensor[1].view(torch.uint8).view(-1).copy_(codes)
    source.copy_blocks([(BlockId(1), BlockId(2))])
    target.block_bytes_view(BlockId(0))[:] = source.block_bytes_view(BlockId(2))
    on_the_way = [torch.empty_like(source.tensor[1])]
    source.read_blocks([BlockId(1)], on_the_way)
    target.write_blocks([BlockId(2)], on_the_way)
    for block in (0, 2):
        assert torch.equal(target.tensor[block].view(torch.uint8).view(-1), codes)
    assert not target.tensor[1].view(torch.uint8).any()


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(0, 4)])
def test_some_heads_of_blocks_are_copied_in_contiguous_ranges(heads: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    group = replace(LAYOUT.only_group, num_kv_heads=heads.stop - heads.start)
    cache = KvCache(replace(LAYOUT, groups=(group,)), 3, CPU)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    there = torch.zeros(3, 2, 4, 4, 8, dtype=torch.bfloat16)
    block, copy = cache.tensor[1].clone(), torch.Tensor.copy_
    sizes: list[int] = []

    def copy_contiguous(to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert to.is_contiguous()
        assert source.is_contiguous()
        sizes.append(to.numel())
        return copy(to, source, non_blocking)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", copy_contiguous)
        cache.read_blocks([BlockId(1)], [there[1:, :, heads]], slice(1, 3))
        cache.write_blocks([BlockId(2)], [there[1:, :, heads]], slice(1, 3))
    assert torch.equal(there[1:, :, heads], block[1:])
    assert torch.equal(cache.tensor[2, 1:], block[1:])
    there[1:, :, heads] = 0
    assert not there.any()
    # No more ranges than necessary.
    whole = cache.tensor[1, 1:].numel()
    assert sizes == ([whole] * 2 if heads == slice(0, 4) else [whole // 4] * 8)


def test_memory_that_cannot_be_allocated_is_a_setup_error_with_the_size() -> None:
    with pytest.raises(SetupError, match=r"Cannot allocate \d+ MiB on cpu for \d+ KV blocks"):
        KvCache(LAYOUT, 2**52, CPU)


def test_a_cache_on_a_device_has_no_view_in_host_memory() -> None:
    cache = KvCache(LAYOUT, 2, torch.device("meta"))
    with pytest.raises(SetupError, match="no view in host memory"):
        cache.block_bytes_view(BlockId(0))
