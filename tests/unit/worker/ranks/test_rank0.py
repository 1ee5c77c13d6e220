"""Rank 0 has its followers do what it does, and reports nothing that was computed without one of them."""

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
from pdserve.worker.ranks.messages import MessageKind, MessageReader, StepPosition
from pdserve.worker.ranks.rank0 import Rank0, RankCopies


class Followers:
    """Followers that receive no steps, one of which may be lost, and whose copies end on request."""

    steps: Sequence[socket.socket] = ()

    def __init__(self) -> None:
        self.lost: PeerLost | None = None
        self.requested = asyncio.Event()
        self.may_end = asyncio.Event()

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    async def request_copy(self, request: bytes) -> None:
        self.requested.set()
        await self.may_end.wait()
        self.check()


class Sampler:
    """A sampler during whose work a rank is lost."""

    def __init__(self, followers: Followers, lost: PeerLost | None) -> None:
        self._followers = followers
        self._lost = lost

    def sample(self, logits: Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> list[SampleResult]:
        self._followers.lost = self._lost
        return []

    def wait_for_step(self) -> None:
        self._followers.lost = self._lost


@pytest.mark.parametrize("ends", ["sample", "wait_for_step"])
def test_tokens_sampled_without_a_rank_are_not_reported(ends: str) -> None:
    followers = Followers()
    rank0 = Rank0(followers)
    rank0.start_copies([])
    sampler = rank0.sampler(Sampler(followers, PeerLost("rank 1 is lost")))
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        sampler.wait_for_step() if ends == "wait_for_step" else sampler.sample(torch.zeros(1, 9), [], [0])
    assert rank0.ended == StepPosition(0)


def test_all_ranks_record_the_same_graphs() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        followers = Followers()
        followers.steps = [ours]
        reader, recorded = MessageReader(theirs), list[bool]()

        def own(is_idle: bool) -> bool:
            recorded.append(is_idle)
            if is_idle:
                raise torch.OutOfMemoryError
            return True

        free = [0]
        record_next = Rank0(followers).record_next(own, lambda: free[0])
        assert record_next(False)
        assert not record_next(True)  # Little memory is left on rank 0, and so on the others.
        free[0] = 1 << 30
        # The others have one graph more then, which exchanges results with none of rank 0.
        with pytest.raises(RuntimeError, match="No memory for a graph of rank 0"):
            record_next(True)
        for is_idle in recorded:
            message = reader.receive()
            assert message is not None
            assert (message.kind, message.values.tolist()) == (MessageKind.RECORD, [int(is_idle)])


@pytest.mark.parametrize("ends", ["sample", "wait_for_step"])
def test_a_step_has_ended_when_its_result_is_available(ends: str) -> None:
    followers = Followers()
    rank0 = Rank0(followers)
    sampler = rank0.sampler(Sampler(followers, None))
    for number in (1, 2):
        rank0.start_copies([])
        assert rank0.ended == StepPosition(number - 1)
        sampler.wait_for_step() if ends == "wait_for_step" else sampler.sample(torch.zeros(1, 9), [], [0])
        assert rank0.ended == StepPosition(number)


LAYOUT = KvLayout.uniform(model="m", dtype="float32", block_size=2, num_layers=2, num_kv_heads=1, head_dim=4)
SPEC = MessageSpec(layers=slice(0, 2), digest=MessageDigest(new_key()))


def copies_of(followers: Followers) -> RankCopies:
    own = KvCache(LAYOUT, 2, torch.device("cpu"))
    stage = Stage(torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT, torch.float32)
    return RankCopies(Rank0(followers), own, stage)


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_cancelled_copy_is_awaited_on_all_ranks(way: str) -> None:
    followers = Followers()
    copies = copies_of(followers)
    copy = copies.read if way == "read" else copies.write
    task = asyncio.create_task(copy([[BlockId(1)]], [0], SPEC))
    await followers.requested.wait()
    for _ in range(2):  # No matter how often.
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
    followers.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_copy_fails_without_one_of_the_ranks() -> None:
    followers = Followers()
    followers.lost = PeerLost("rank 1 is lost")
    followers.may_end.set()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        await copies_of(followers).read([[BlockId(1)]], [0], SPEC)
