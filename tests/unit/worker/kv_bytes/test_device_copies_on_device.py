"""Blocks are packed on a device when they are there, and not when all that was launched is done."""

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
from pdserve.worker.kv_bytes.device import DeviceCopies

pytestmark = gpu_only

LAYOUT = KvLayout(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
FIRST = MessageSpec(layers=slice(0, 1), digest=MessageDigest(b"k" * 32))


def copies() -> tuple[KvCache, torch.Tensor, DeviceCopies]:
    cache = KvCache(LAYOUT, 2, DEVICE)
    stage = torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8, device=DEVICE)
    return cache, stage, DeviceCopies(cache, stage)


async def test_what_is_packed_has_what_was_launched_before_its_moment_and_waits_for_nothing_else() -> None:
    cache, stage, packing = copies()
    await packing.read([[BlockId(0)]], [1], FIRST)  # what is compiled at first use waits
    keep_busy()
    cache.tensor[1, 0] = 5
    moment = cache.record_event(1)
    keep_busy()
    cache.tensor[1, 0] = 6
    later = torch.cuda.current_stream().record_event()
    spec = MessageSpec(layers=FIRST.layers, digest=FIRST.digest, after=moment)
    first = await packing.read([[BlockId(1)]], [0], spec)
    assert not later.query()
    layer = stage[: LAYOUT.block_bytes // LAYOUT.num_layers].view(torch.bfloat16)
    assert (layer == 5).all()
    assert first != await packing.read(
        [[BlockId(1)]], [0], MessageSpec(layers=spec.layers, digest=spec.digest, after=later)
    )


async def test_what_is_unpacked_is_found_by_what_is_launched_then() -> None:
    cache, stage, packing = copies()
    stage.view(torch.bfloat16).fill_(3)
    torch.cuda.synchronize()
    await packing.write([[BlockId(1)]], [0], FIRST)
    assert (cache.tensor[1, 0] == 3).all()
    assert not cache.tensor[1, 1:].any()
    assert not cache.tensor[0].any()
