"""Layers of blocks on their way through a stage: each in its place, and read when they are there."""

from __future__ import annotations

import torch

from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.blocks import staged

LAYOUT = KvLayout(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


class Writing:
    """A moment at which a step has written a block."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def wait(self) -> None:
        self._cache.tensor[1] = 7


async def test_layers_are_read_into_their_place_after_the_moment_at_which_they_are_written() -> None:
    cache, stage = KvCache(LAYOUT, 3, CPU), torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8)
    memory = staged(cache, stage)
    cache.tensor[2] = 1
    lent = await memory.lend([BlockId(1), BlockId(2)])
    await memory.load([BlockId(1), BlockId(2)], lent, slice(1, 2), Writing(cache))
    for buffer, value in zip(lent, (7, 1), strict=True):
        layers = torch.from_numpy(buffer).view(torch.bfloat16).view(3, -1)
        assert not layers[[0, 2]].any()
        assert (layers[1] == value).all()


async def test_layers_are_written_from_their_place_and_no_others() -> None:
    cache, stage = KvCache(LAYOUT, 3, CPU), torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8)
    memory = staged(cache, stage)
    (buffer,) = await memory.lend([BlockId(1)])
    content = torch.arange(LAYOUT.block_bytes // 2).to(torch.bfloat16).view(3, 2, 2, 4, 8)
    buffer[:] = content.view(-1).view(torch.uint8).numpy()
    await memory.store([BlockId(1)], [buffer], slice(1, 3))
    assert torch.equal(cache.tensor[1, 1:], content[1:])
    assert not cache.tensor[1, 0].any()
    assert not cache.tensor[[0, 2]].any()
