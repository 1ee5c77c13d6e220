"""Rank 0 has the others do what it does, and tells nothing that was computed without one of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.memory import MessageSpec
from kvtransfer.handover.ticket import new_key
from pdserve.base.errors import PeerLost
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.worker.kv_bytes.stage import Stage
from pdserve.worker.ranks.messages import StepPosition
from pdserve.worker.ranks.rank0 import Rank0, RankCopies


class Followers:
    """Other ranks, of which one may be lost, and which copy until they may end; of steps they are told nothing."""

    steps: Sequence[socket.socket] = ()

    def __init__(self) -> None:
        self.lost: PeerLost | None = None
        self.asked = asyncio.Event()
        self.may_end = asyncio.Event()

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    async def ask(self, request: bytes) -> None:
        self.asked.set()
        await self.may_end.wait()
        self.check()


class Sampler:
    """Draws, and meanwhile a rank is lost."""

    def __init__(self, others: Followers, lost: PeerLost | None) -> None:
        self._others = others
        self._lost = lost

    def sample(self, logits: Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> list[SampleResult]:
        self._others.lost = self._lost
        return []

    def wait_for_step(self) -> None:
        self._others.lost = self._lost


@pytest.mark.parametrize("ends", ["sample", "wait_for_step"])
def test_what_was_drawn_without_a_rank_is_not_told(ends: str) -> None:
    others = Followers()
    lead = Rank0(others)
    lead.begin_copies([])
    sampler = lead.sampler(Sampler(others, PeerLost("rank 1 is lost")))
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        sampler.wait_for_step() if ends == "wait_for_step" else sampler.sample(torch.zeros(1, 9), [], [0])
    assert lead.ended == StepPosition(0)


@pytest.mark.parametrize("ends", ["sample", "wait_for_step"])
def test_a_step_has_ended_when_its_result_is_there(ends: str) -> None:
    others = Followers()
    lead = Rank0(others)
    sampler = lead.sampler(Sampler(others, None))
    for number in (1, 2):
        lead.begin_copies([])
        assert lead.ended == StepPosition(number - 1)
        sampler.wait_for_step() if ends == "wait_for_step" else sampler.sample(torch.zeros(1, 9), [], [0])
        assert lead.ended == StepPosition(number)


LAYOUT = KvLayout(model="m", dtype="float32", block_size=2, num_layers=2, num_kv_heads=1, head_dim=4)
PART = MessageSpec(layers=slice(0, 2), digest=MessageDigest(new_key()))


def copies_of(others: Followers) -> RankCopies:
    own = KvCache(LAYOUT, 2, torch.device("cpu"))
    stage = Stage(torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT, torch.float32)
    return RankCopies(Rank0(others), own, stage)


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_cancelled_copy_is_waited_for_on_all_ranks(way: str) -> None:
    others = Followers()
    copies = copies_of(others)
    copy = copies.read if way == "read" else copies.write
    task = asyncio.create_task(copy([[BlockId(1)]], [0], PART))
    await others.asked.wait()
    for _ in range(2):  # However often.
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
    others.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_copy_without_a_rank_fails() -> None:
    others = Followers()
    others.lost = PeerLost("rank 1 is lost")
    others.may_end.set()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        await copies_of(others).read([[BlockId(1)]], [0], PART)
