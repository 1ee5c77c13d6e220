"""A worker that fails by itself leaves the requests of its last step; one that is killed leaves nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.base.deaths import note_death, requests_of_death
from pdserve.base.errors import PeerLost
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.base.store import Store
from pdserve.cli.private_redis import PrivateRedis
from pdserve.worker.serve.process import _noting_death
from pdserve.worker.serve.worker import Worker
from tests.support.redis import redis_server

__all__ = ["redis_server"]

W, EPOCH = WorkerId("w"), Epoch(7)
REQUESTS = frozenset({RequestId("a"), RequestId("b:1")})


async def _ends_with(error: Exception) -> None:
    raise error


async def test_a_failed_step_is_noted_before_the_error_goes_on(redis_server: PrivateRedis) -> None:
    worker = cast(Worker, SimpleNamespace(worker_id=W, epoch=EPOCH, step_loop=SimpleNamespace(requests=REQUESTS)))
    async with Store(redis_server.url) as store:
        with pytest.raises(ValueError, match="a defect"):
            await _noting_death(worker, store, _ends_with(ValueError("a defect")))
        assert await requests_of_death(store, W, EPOCH) == REQUESTS
        assert await requests_of_death(store, W, Epoch(8)) is None


async def test_the_loss_of_a_rank_is_not_noted_as_the_worker_s_own_failure(redis_server: PrivateRedis) -> None:
    epoch = Epoch(9)
    worker = cast(Worker, SimpleNamespace(worker_id=W, epoch=epoch, step_loop=SimpleNamespace(requests=REQUESTS)))
    async with Store(redis_server.url) as store:
        with pytest.raises(PeerLost):
            await _noting_death(worker, store, _ends_with(PeerLost("rank 1 is lost")))
        assert await requests_of_death(store, W, epoch) is None


async def test_without_redis_it_is_unknown_how_a_worker_died() -> None:
    async with Store("redis://127.0.0.1:1/0") as store:
        await note_death(store, W, EPOCH, REQUESTS)
        assert await requests_of_death(store, W, EPOCH) is None


async def test_a_note_that_no_worker_wrote_names_no_request(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url) as store:
        await store.call("SET", "pd:death:w:7", b"\xff\xfe")
        assert await requests_of_death(store, W, EPOCH) == {"\ufffd\ufffd"}
        await store.call("DEL", "pd:death:w:7")
        await store.call("RPUSH", "pd:death:w:7", "x")
        assert await requests_of_death(store, W, EPOCH) is None
