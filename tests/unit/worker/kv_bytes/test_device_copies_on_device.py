"""Blocks are packed on a device as soon as they are written, without waiting for everything launched."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import DEVICE, gpu_only, keep_busy

pytest.importorskip("triton")

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.memory import MessageSpec
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.kv_bytes.device_blocks import DeviceCopies

pytestmark = gpu_only

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
FIRST = MessageSpec(layers=slice(0, 1), digest=MessageDigest(b"k" * 32))


def copies() -> tuple[KvCache, torch.Tensor, DeviceCopies]:
    cache = KvCache(LAYOUT, 2, DEVICE)
    stage = torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8, device=DEVICE)
    return cache, stage, DeviceCopies(cache, stage)


async def test_packing_waits_for_its_event_and_for_no_later_launch() -> None:
    cache, stage, packing = copies()
    await packing.read([[BlockId(0)]], [1], FIRST)  # the first use compiles, and waits
    keep_busy()
    cache.tensor[1, 0] = 5
    event = cache.record_event(1)
    keep_busy()
    cache.tensor[1, 0] = 6
    later = torch.cuda.current_stream().record_event()
    spec = MessageSpec(layers=FIRST.layers, digest=FIRST.digest, after=event)
    first = await packing.read([[BlockId(1)]], [0], spec)
    assert not later.query()
    layer = stage[: LAYOUT.block_bytes // LAYOUT.num_layers].view(torch.bfloat16)
    assert (layer == 5).all()
    assert first != await packing.read(
        [[BlockId(1)]], [0], MessageSpec(layers=spec.layers, digest=spec.digest, after=later)
    )


async def test_unpacked_blocks_are_visible_to_later_launches() -> None:
    cache, stage, packing = copies()
    stage.view(torch.bfloat16).fill_(3)
    torch.cuda.synchronize()
    await packing.write([[BlockId(1)]], [0], FIRST)
    assert (cache.tensor[1, 0] == 3).all()
    assert not cache.tensor[1, 1:].any()
    assert not cache.tensor[0].any()
