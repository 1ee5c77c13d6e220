"""A worker that fails by itself leaves the requests of its last step; one that is killed leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.base.errors import PeerLost, StoreError
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.deaths import note_death, requests_of_death
from pdserve.redis.store import Argument, Reply, Store
from pdserve.worker.serve.process import _noting_death
from pdserve.worker.serve.worker import Worker

W, EPOCH = WorkerId("w"), Epoch(7)
REQUESTS = frozenset({RequestId("a"), RequestId("b:1")})


async def _ends_with(error: Exception) -> None:
    raise error


def worker(epoch: Epoch, *, rank_was_ended: bool | None = None) -> Worker:
    """A worker of one rank, or with other ranks."""
    ranks = None if rank_was_ended is None else SimpleNamespace(was_ended=lambda: rank_was_ended)
    model, loop = SimpleNamespace(rank_group=ranks), SimpleNamespace(requests=REQUESTS)
    return cast(Worker, SimpleNamespace(worker_id=W, epoch=epoch, step_loop=loop, model=model))


async def test_a_failed_step_is_noted_before_the_error_goes_on(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url) as store:
        with pytest.raises(ValueError, match="a defect"):
            await _noting_death(worker(EPOCH), store, _ends_with(ValueError("a defect")))
        assert await requests_of_death(store, W, EPOCH) == REQUESTS
        assert await requests_of_death(store, W, Epoch(8)) is None


@pytest.mark.parametrize("error", [PeerLost("rank 1 is lost"), RuntimeError("Connection closed by peer")])
async def test_a_rank_that_fails_by_itself_is_noted_and_one_that_is_killed_is_not(
    redis_server: PrivateRedis, error: Exception
) -> None:
    """Rank 0 may see it as an error of its own first. Without `was_ended`, the order decided whether it was noted."""
    async with Store(redis_server.url) as store:
        for epoch, was_ended, noted in ((Epoch(9), True, None), (Epoch(10), False, REQUESTS)):
            with pytest.raises(type(error)):
                await _noting_death(worker(epoch, rank_was_ended=was_ended), store, _ends_with(error))
            assert await requests_of_death(store, W, epoch) == noted


async def test_without_redis_it_is_unknown_how_a_worker_died() -> None:
    async with Store("redis://127.0.0.1:1/0") as store:
        await note_death(store, W, EPOCH, REQUESTS)
        assert await requests_of_death(store, W, EPOCH) is None


class LateStore(Store):
    """The answers to its PING and to two commands come too late."""

    late = 3

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        replies = await super().pipeline(commands, block_s=block_s)
        if self.late:
            self.late -= 1
            raise StoreError("no answer within 0.5 s")
        return replies


async def test_a_busy_redis_hides_no_death(redis_server: PrivateRedis) -> None:
    """Without further tries, the death counted as one from outside, and the request ended a fourth worker."""
    async with LateStore(redis_server.url) as store:
        await note_death(store, W, EPOCH, REQUESTS)
    async with Store(redis_server.url) as store:
        assert await requests_of_death(store, W, EPOCH) == REQUESTS
    async with LateStore(redis_server.url) as store:
        assert await requests_of_death(store, W, EPOCH) == REQUESTS


async def test_a_note_that_no_worker_wrote_names_no_request(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url) as store:
        await store.call("SET", "pd:death:w:7", b"\xff\xfe")
        assert await requests_of_death(store, W, EPOCH) == {"\ufffd\ufffd"}
        await store.call("DEL", "pd:death:w:7")
        await store.call("RPUSH", "pd:death:w:7", "x")
        assert await requests_of_death(store, W, EPOCH) is None
