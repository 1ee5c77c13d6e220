"""Layers of blocks pass through a stage at the right offsets, and are read only once they are written."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.memory import MessageSpec
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.kv_bytes.host_blocks import staged
from pdserve.worker.kv_bytes.stage import stage_bytes

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
DIGEST = MessageDigest(b"k" * 32)
CPU = torch.device("cpu")


class Writing:
    """An event after which a step has written a block."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def wait(self) -> None:
        self._cache.tensor[1] = 7


async def test_layers_are_read_to_their_offset_after_the_event_at_which_they_are_written() -> None:
    cache, stage = KvCache(LAYOUT, 3, CPU), torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8)
    memory = staged(cache, stage, bundle_blocks=1)
    cache.tensor[2] = 1
    bundles = [[BlockId(1)], [BlockId(2)]]
    lent = await memory.lend(bundles)
    await memory.load(bundles, lent, MessageSpec(layers=slice(1, 2), digest=DIGEST, after=Writing(cache)))
    for buffer, value in zip(lent, (7, 1), strict=True):
        layers = torch.from_numpy(buffer).view(torch.bfloat16).view(3, -1)
        assert not layers[[0, 2]].any()
        assert (layers[1] == value).all()


async def test_only_the_given_layers_are_written() -> None:
    cache, stage = KvCache(LAYOUT, 3, CPU), torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8)
    memory = staged(cache, stage, bundle_blocks=1)
    (buffer,) = await memory.lend([[BlockId(1)]])
    content = torch.arange(LAYOUT.block_bytes // 2).to(torch.bfloat16).view(3, 2, 2, 4, 8)
    buffer[:] = content.view(-1).view(torch.uint8).numpy()
    await memory.store([[BlockId(1)]], [buffer], MessageSpec(layers=slice(1, 3), digest=DIGEST))
    assert torch.equal(cache.tensor[1, 1:], content[1:])
    assert not cache.tensor[1, 0].any()
    assert not cache.tensor[[0, 2]].any()


async def test_a_bundle_holds_each_layer_group_of_all_its_blocks_contiguously() -> None:
    cache, stage = KvCache(LAYOUT, 4, CPU), torch.zeros(4 * LAYOUT.block_bytes, dtype=torch.uint8)
    cache.tensor.copy_(torch.arange(cache.tensor.numel()).view(cache.tensor.shape) % 251)
    memory = staged(cache, stage, bundle_blocks=2)
    bundle = [BlockId(3), BlockId(1)]
    [_, buffer] = await memory.lend([[BlockId(0)], bundle])
    for layers in (slice(0, 2), slice(2, 3)):
        await memory.load([bundle], [buffer], MessageSpec(layers=layers, digest=DIGEST))
    expected = torch.cat([cache.tensor[[3, 1], :2].flatten(), cache.tensor[[3, 1], 2:].flatten()])
    assert torch.equal(torch.from_numpy(buffer).view(torch.bfloat16), expected)
    # Back again, into other blocks.
    other = [BlockId(0), BlockId(2)]
    for layers in (slice(2, 3), slice(0, 2)):
        await memory.store([other], [buffer], MessageSpec(layers=layers, digest=DIGEST))
    assert torch.equal(cache.tensor[[0, 2]], cache.tensor[[3, 1]])


def test_a_stage_holds_at_least_one_bundle() -> None:
    assert stage_bytes(LAYOUT, 16 * LAYOUT.block_bytes + 5) == 16 * LAYOUT.block_bytes
    with pytest.raises(
        SetupError, match=r"too small: 16 KV blocks of 768 bytes travel together\. Set it to at least 12288"
    ):
        stage_bytes(LAYOUT, 16 * LAYOUT.block_bytes - 1)
