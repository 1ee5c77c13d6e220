"""Cancelling a copy of blocks waits for its end, after which nothing touches the blocks."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import pytest
import torch

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.memory import MessageSpec
from kvtransfer.handover.ticket import new_key
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.kv_bytes.host_blocks import CacheCopies
from pdserve.worker.kv_bytes.stage import Stage
from tests.support.deadline import DEADLINE_S

LAYOUT = KvLayout.uniform(model="m", dtype="float32", block_size=2, num_layers=2, num_kv_heads=1, head_dim=4)


class HeldCache:
    """A cache whose copies end on request."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    def read_blocks(self, *_: object) -> None:
        self.started.set()
        assert self.may_end.wait(DEADLINE_S)
        self.ended = True

    write_blocks = read_blocks


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_cancelled_copy_is_awaited(way: str) -> None:
    cache = HeldCache()
    stage = Stage(torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT, torch.float32)
    copies = CacheCopies(cast(KvCache, cache), stage)
    spec = MessageSpec(layers=slice(0, 2), digest=MessageDigest(new_key()))
    copy = copies.read if way == "read" else copies.write
    task = asyncio.create_task(copy([[BlockId(1)]], [0], spec))
    assert await asyncio.to_thread(cache.started.wait, DEADLINE_S)
    for _ in range(2):  # No matter how often.
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
    cache.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cache.ended
